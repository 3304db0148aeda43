"""Strings that end a response, found in its text regardless of token boundaries. Numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.interface import Bools, Ids

REPLACEMENT = "\ufffd"  # what decoding yields for an incomplete character


@dataclass(frozen=True)
class StopText:
    """Stop strings: the first that appears in a response's text ends it.

    The token that completes a string is the response's last: it is kept as sampled, and counts. ``decode`` returns the
    text of ids, special tokens included; ``may_complete`` says for each id whether it can complete a string, so that
    nearly all tokens need no decoding.
    """

    strings: tuple[str, ...]
    decode: Callable[[Ids], str]
    may_complete: Bools  # [V] of the tokenizer; larger ids have no text

    @classmethod
    def of(cls, strings: Sequence[str], decode: Callable[[Ids], str], vocabulary: int) -> StopText:
        """Inspect the text of every id of a tokenizer with ``vocabulary`` ids. Refuses empty strings."""
        if not all(strings):
            raise ValueError("a stop string is empty and would end every response before it begins")
        last = {string[-1] for string in strings} | {REPLACEMENT}  # a character may need several tokens
        texts = (decode(np.array([token])) for token in range(vocabulary))
        return cls(tuple(strings), decode, np.array([not last.isdisjoint(text) for text in texts], dtype=bool))

    @property
    def window(self) -> int:
        """How many of the last tokens to decode.

        Each token adds at least one byte, so a string that the last token completes begins within them.
        """
        return max(len(string.encode()) for string in self.strings) + 4

    def completed_by(self, tokens: Ids | Sequence[int]) -> bool:
        """Whether the last of ``tokens``, the response so far, completes a string."""
        if not len(tokens) or not (0 <= tokens[-1] < len(self.may_complete)) or not self.may_complete[tokens[-1]]:
            return False
        text = self.decode(np.asarray(tokens[-self.window :], dtype=np.int64))
        return any(string in text for string in self.strings)
