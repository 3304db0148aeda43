"""Arrays of other libraries are read where they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from delta_cli.credit import output_row_features, token_coefficients

ADVANTAGES, STARTS = [1.0, -1.0], [0, 3, 6]


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=generator).to(dtype), -torch.rand(6, generator=generator)


def test_a_tensor_is_not_copied() -> None:
    hidden, logprobs = tensors()
    features = output_row_features(hidden.requires_grad_(), logprobs)
    assert isinstance(features.hidden, np.ndarray)
    assert features.hidden.ctypes.data == hidden.data_ptr()
    with torch.no_grad():
        hidden[0, 0] = 7.0
    assert features.hidden[0, 0] == 7.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_tensors_give_what_arrays_give(dtype: torch.dtype) -> None:
    hidden, logprobs = tensors(dtype)
    found = token_coefficients(output_row_features(hidden, logprobs), torch.tensor(ADVANTAGES), torch.tensor(STARTS))
    expected = token_coefficients(output_row_features(hidden.numpy(), logprobs.numpy()), ADVANTAGES, STARTS)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert found.weights.std() > 0.01


def test_what_numpy_cannot_read_says_what_to_do() -> None:
    hidden, logprobs = tensors()
    with pytest.raises(
        ValueError, match=r"hidden are torch.bfloat16, which numpy does not have; convert them to float"
    ):
        output_row_features(hidden.bfloat16(), logprobs)

    class Elsewhere:
        """An array on a GPU, as DLPack tells it."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(ValueError, match="logprobs are on a device; give features of your own"):
        output_row_features(hidden, Elsewhere())
