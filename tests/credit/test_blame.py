"""Weights of blame against a loop over responses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delta_cli.credit.blame import blame_weights


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=6))
def test_each_response_keeps_its_weight_and_the_blamed_carry_it(responses: list[list[bool]]) -> None:
    starts = np.cumsum([0, *map(len, responses)])
    weights = blame_weights([mark for response in responses for mark in response], starts)
    for (first, last), response in zip(pairwise(starts), responses, strict=True):
        blamed = sum(response)
        expected = [len(response) / blamed if mark else 0.0 for mark in response] if blamed else [1.0] * len(response)
        np.testing.assert_allclose(weights[first:last], expected, rtol=1e-15)
