"""Randomness as a function of (seed, step, purpose), so that a resumed run has no generator state to restore."""

from __future__ import annotations

import zlib

import numpy as np


def derive(seed: int, step: int, purpose: str) -> int:
    """A seed in [0, 2**63), different for every step and purpose of a run."""
    words = np.random.SeedSequence([seed, step, zlib.crc32(purpose.encode())]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def generator(seed: int, step: int, purpose: str) -> np.random.Generator:
    """A numpy generator seeded by :func:`derive`."""
    return np.random.default_rng(derive(seed, step, purpose))
