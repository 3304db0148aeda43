"""Token features of the torch backend: where they live, and what is computed again when they live nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.interface import BackendError, Proxy, Sequences
from backends.torch.backend import TorchEngine
from backends.torch.features import PositionedRows, RecomputeRows, TorchFeatures
from delta_cli.credit import token_coefficients
from tests.device import DEVICE

TOKENS, SIZE, VOCAB = 13, 6, 29
HIDDEN = 16
ROW = HIDDEN * 4  # bytes
STARTS = np.array([0, 3, 4, 13, 18, 23, 25, 32, 36])
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 1.0, 0.0, -1.0, 1.0]
ROUNDING = {"cpu": 1e-5, "cuda": 2e-5}[DEVICE]  # of a sum, in micro-batches of another size
PROXIES = [Proxy("output_row"), Proxy("hidden_topk", k=3), Proxy("hidden_exact")]


@pytest.fixture
def sequences() -> Sequences:
    """Eight responses to two prompts of 2 and 6 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, size) for size in (2, 6)]
    return Sequences((prompts[0],) * 4 + (prompts[1],) * 4, rng.integers(1, VOCAB, STARTS[-1]), STARTS, temperature=0.8)


def scored(backend: TorchEngine, sequences: Sequences, proxy: Proxy) -> TorchFeatures:
    features = backend.score(sequences, proxy).features
    assert isinstance(features, TorchFeatures)
    return features


def counted(backend: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Responses of every forward from now on."""
    hidden, forwards = backend._hidden, []

    def note(policy: Any, batch: Any) -> Any:
        forwards.append(len(batch.rows))
        return hidden(policy, batch)

    monkeypatch.setattr(backend, "_hidden", note)
    return forwards


# ------------------------------------------------------------------------------- the features alone


def from_memory(rows: np.ndarray) -> RecomputeRows:
    """Rows [N, H] for those that were not kept, in two parts and backwards."""

    def recompute(start: int, stop: int, reduce: Callable[[PositionedRows], torch.Tensor]) -> torch.Tensor:
        parts = np.array_split(np.arange(start, stop)[::-1].copy(), 2)
        return reduce((part, torch.from_numpy(rows[part]).to(DEVICE)) for part in parts)

    return recompute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [(0, 0), (0, 4), (5, 0), (5, 3), (5, 100), (100, 0)])
def test_features(kept: tuple[int, int], dtype: torch.dtype) -> None:
    """Sums, projections, norms and slices of features stored out of order, on the device, the host or nowhere."""
    rng = np.random.default_rng(0)
    rows, scale = rng.standard_normal((TOKENS, SIZE)), rng.random(TOKENS)
    weights, direction = rng.standard_normal((3, TOKENS)), rng.standard_normal(SIZE)
    budgets = (kept[0] * SIZE * dtype.itemsize, kept[1] * SIZE * dtype.itemsize + 1)
    recompute = from_memory(rows)
    features = TorchFeatures.allocate(TOKENS, SIZE, dtype, torch.device(DEVICE), budgets, recompute)
    order = rng.permutation(TOKENS)
    for part in np.array_split(order, 3):
        features.put(part, torch.from_numpy(rows[part]).to(DEVICE), torch.from_numpy(scale[part]).float().to(DEVICE))
    rounded = torch.from_numpy(rows).to(dtype).double().numpy()  # wherever a row lives, it is rounded once
    for start, stop in ((0, TOKENS), (2, 4), (3, 9), (8, TOKENS), (4, 4)):
        part = features.slice(start, stop).slice(0, stop - start)
        v = (rounded * scale[:, None])[start:stop]
        for found, expected in (
            (part.weighted_sum(weights[:, start:stop]), weights[:, start:stop] @ v),
            (part.project(direction), v @ direction),
            (part.squared_norms(), (v**2).sum(1)),
        ):
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, expected, atol=2e-6)
    features.close()
    features.close()


@pytest.mark.parametrize("device", [0, 3])
def test_host_memory_in_pieces_changes_no_bit(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole chunks each, whatever their bytes; the last is what is left of the budget."""
    rng = np.random.default_rng(0)
    rows, weights = rng.standard_normal((TOKENS, SIZE)), rng.standard_normal((2, TOKENS))
    row = SIZE * 4
    monkeypatch.setattr("backends.torch.features._CHUNK", 2)

    def features(piece: int) -> TorchFeatures:
        monkeypatch.setattr("backends.torch.features._PIECE_BYTES", piece)
        budgets, cpu = (device * row, 9 * row), torch.device(DEVICE)
        made = TorchFeatures.allocate(TOKENS, SIZE, torch.float32, cpu, budgets, from_memory(rows))
        for part in np.array_split(rng.permutation(TOKENS), 3):
            made.put(part, torch.from_numpy(rows[part]).to(DEVICE))
        return made

    whole = features(2**30)
    assert [len(store) for store in whole._stores] == [device, 9]
    for piece, lengths in ((1, [2, 2, 2, 2, 1]), (2 * row, [2, 2, 2, 2, 1]), (5 * row, [4, 4, 1])):
        pieces = features(piece)
        assert [len(store) for store in pieces._stores] == [device, *lengths]
        np.testing.assert_array_equal(pieces.weighted_sum(weights), whole.weighted_sum(weights))
        np.testing.assert_array_equal(pieces.project(rows[0]), whole.project(rows[0]))
        np.testing.assert_array_equal(pieces.squared_norms(), whole.squared_norms())
        for start in range(TOKENS + 1):
            for stop in range(start, TOKENS + 1):
                found, expected = pieces.slice(start, stop), whole.slice(start, stop)
                each = np.eye(stop - start)
                np.testing.assert_array_equal(found.weighted_sum(each), expected.weighted_sum(each))
                np.testing.assert_array_equal(found.squared_norms(), expected.squared_norms())


@pytest.mark.parametrize("budget", [0, 10**9])
def test_long_sums_keep_their_precision(budget: int) -> None:
    """A hundred thousand equal terms, where float32 products were off by 4e-5."""
    count = 100_000
    rows = torch.full((count, 1), 0.1, device=DEVICE)
    recompute = from_memory(rows.cpu().numpy())
    features = TorchFeatures.allocate(count, 1, torch.float32, torch.device(DEVICE), (budget, 0), recompute)
    features.put(np.arange(count), rows)
    total = features.weighted_sum(np.ones((1, count)))[0, 0]
    assert total == pytest.approx(count * float(np.float32(0.1)), rel=1e-12)


# --------------------------------------------------------------------------------- with the backend


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.kind)
def test_what_is_computed_again_is_what_would_have_been_kept(
    make: Callable[..., TorchEngine], sequences: Sequences, proxy: Proxy, dtype: str
) -> None:
    """Bit for bit where all is: the micro-batches are the same. Otherwise within the rounding of the compute."""
    settings = {"dtype": dtype, "micro_batch_tokens": 20, "head_chunk_tokens": 4}
    each = np.eye(STARTS[-1])
    kept = scored(make(**settings), sequences, proxy).weighted_sum(each)
    again = scored(make(**settings, feature_bytes=0, feature_host_bytes=0), sequences, proxy)
    np.testing.assert_array_equal(again.weighted_sum(each), kept)
    np.testing.assert_array_equal(again.weighted_sum(each), kept)  # and again
    part = scored(make(**settings, feature_bytes=5 * ROW, feature_host_bytes=4 * ROW), sequences, proxy)
    tolerance = {"float32": 1e-6, "bfloat16": 2**-6}[dtype]
    np.testing.assert_allclose(part.weighted_sum(each), kept, atol=tolerance * np.abs(kept).max(), rtol=0)


@pytest.mark.parametrize(("kept", "again"), [(0, 8), (4, 6), (13, 5), (20, 4), (36, 0)])
def test_one_forward_a_reduction_of_the_responses_it_needs(
    make: Callable[..., TorchEngine], sequences: Sequences, kept: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two weighted sums and two projections for one refinement; a response of which a part was kept is one of them."""
    backend = make(feature_bytes=kept * ROW, feature_host_bytes=0)
    features = scored(backend, sequences, Proxy("output_row"))
    forwards = counted(backend, monkeypatch)
    found = token_coefficients(features, ADVANTAGES, STARTS, refinements=1)
    assert forwards == ([again] * 4 if again else [])
    expected = token_coefficients(scored(make(), sequences, Proxy("output_row")), ADVANTAGES, STARTS, refinements=1)
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-6)
    forwards.clear()
    features.slice(23, 32).squared_norms()  # two whole responses
    assert forwards == ([2] if kept <= 23 else [])


def test_the_head_is_computed_again_only_where_it_makes_the_rows(
    make: Callable[..., TorchEngine], sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the largest part of a forward with a large vocabulary is saved."""
    for proxy in PROXIES:
        backend = make(feature_bytes=0, feature_host_bytes=0)
        features, heads = scored(backend, sequences, proxy), []
        head = backend._policy.head
        monkeypatch.setattr(
            backend._policy, "head", lambda chunk, head=head, heads=heads: heads.append(1) or head(chunk)
        )
        features.squared_norms()
        assert len(heads) == (proxy.kind != "output_row")


def test_out_of_memory_while_features_are_computed_again(
    make: Callable[..., TorchEngine], sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is summed twice; the micro-batch stays small; what does not fit alone is said."""
    weights = np.random.default_rng(0).standard_normal((2, STARTS[-1]))
    expected = scored(make(), sequences, Proxy()).weighted_sum(weights)
    backend = make(feature_bytes=ROW, feature_host_bytes=ROW, micro_batch_tokens=20)
    features = scored(backend, sequences, Proxy())
    hidden, sizes, limit = backend._hidden, [], 14

    def limited(policy: Any, batch: Any) -> Any:
        sizes.append(len(batch.ids))
        if len(sizes) > 1 and len(batch.ids) > limit:  # after the first micro-batch was summed
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(policy, batch)

    monkeypatch.setattr(backend, "_hidden", limited)
    np.testing.assert_allclose(features.weighted_sum(weights), expected, atol=ROUNDING)
    assert max(sizes) > limit
    sizes.clear()
    np.testing.assert_allclose(features.weighted_sum(weights), expected, atol=ROUNDING)
    assert max(sizes) <= limit
    limit = 5
    with pytest.raises(BackendError, match="single sequence of 13 tokens"):
        features.weighted_sum(weights)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),  # of pinned memory
        RuntimeError("DefaultCPUAllocator: can't allocate memory: tried"),
    ],
)
def test_features_that_do_not_fit(
    make: Callable[..., TorchEngine], sequences: Sequences, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No micro-batch is small enough for them: the budgets are named."""

    def refuse(*_: Any) -> list[torch.Tensor]:
        raise error

    monkeypatch.setattr("backends.torch.features._memory", refuse)
    with pytest.raises(
        BackendError, match="features of 36 tokens, with feature_bytes = 640 and feature_host_bytes = 7"
    ):
        make(feature_bytes=640, feature_host_bytes=7).score(sequences, Proxy())
