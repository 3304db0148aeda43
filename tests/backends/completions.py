"""Whether two rollouts drew the same."""

from __future__ import annotations

import numpy as np

from backends.interface import Completions


def assert_same(found: Completions, expected: Completions) -> None:
    """Tokens and episodes are equal; log-probabilities, entropies and features to rounding, if ``expected`` has any."""
    for name in ("tokens", "starts", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    for name in ("regions", "entropies", "features"):
        assert (getattr(found, name) is None) == (getattr(expected, name) is None), name
    if found.regions is not None and expected.regions is not None:
        np.testing.assert_array_equal(found.regions.ids, expected.regions.ids)
        np.testing.assert_array_equal(found.regions.own, expected.regions.own)
    if found.entropies is not None and expected.entropies is not None:
        np.testing.assert_allclose(found.entropies, expected.entropies, atol=1e-5)
    if found.features is not None and expected.features is not None:
        every = np.eye(len(found.tokens))
        np.testing.assert_allclose(found.features.weighted_sum(every), expected.features.weighted_sum(every), atol=2e-5)
