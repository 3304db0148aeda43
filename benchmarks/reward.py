"""The reward of the training benchmarks, for any trainer."""

import zlib


def reward(response: str, problem: object) -> float:
    """1 for about half of all responses, so that most groups have both: the parity of a checksum."""
    return float(zlib.crc32(response.encode()) % 2)
