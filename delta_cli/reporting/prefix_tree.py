"""The prefix tree of a group: where the responses to one prompt share a beginning, and where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from delta_cli.runs.records import RecordedResponse


@dataclass(frozen=True)
class PrefixNode:
    """A stretch of tokens that the responses ``rows`` have in common, and what follows it."""

    start: int  # tokens before it
    stop: int  # tokens up to its end
    rows: tuple[int, ...]
    right: int  # of the rows, how many are correct
    children: tuple[PrefixNode, ...]  # by their first token; empty where the responses end

    @property
    def wrong(self) -> int:
        """Of the rows, how many are not correct."""
        return len(self.rows) - self.right

    @property
    def parts(self) -> bool:
        """Whether a right and a wrong response go different ways at the end of this stretch."""
        return any(one.right and other.wrong for one in self.children for other in self.children if one is not other)

    def walk(self) -> Iterator[PrefixNode]:
        """This node and all below it, from the root down."""
        yield self
        for child in self.children:
            yield from child.walk()


def prefix_tree(responses: Sequence[RecordedResponse]) -> PrefixNode:
    """The tree of one prompt's responses, compressed: a node ends where its responses differ."""
    return _node(responses, tuple(range(len(responses))), 0)


def first_parting(root: PrefixNode) -> PrefixNode | None:
    """The node at whose end, after the fewest tokens, a right and a wrong response part; None if none do."""
    return min((node for node in root.walk() if node.parts), key=lambda node: node.stop, default=None)


def _node(responses: Sequence[RecordedResponse], rows: tuple[int, ...], start: int) -> PrefixNode:
    stop = _shared(responses, rows, start)
    following: dict[int, list[int]] = {}
    for row in rows:
        if len(responses[row]) > stop:
            following.setdefault(int(responses[row].tokens[stop]), []).append(row)
    branches = sorted(following.values(), key=lambda branch: (-len(branch), branch))
    return PrefixNode(
        start=start,
        stop=stop,
        rows=rows,
        right=sum(responses[row].correct for row in rows),
        children=tuple(_node(responses, tuple(branch), stop) for branch in branches),
    )


def _shared(responses: Sequence[RecordedResponse], rows: tuple[int, ...], start: int) -> int:
    """How many tokens, from the beginning, all the responses at ``rows`` have in common; ``start`` are known to be."""
    shortest = min((len(responses[row]) for row in rows), default=0)
    first = responses[rows[0]].tokens[start:shortest] if rows else np.empty(0)
    agree = np.ones(len(first), bool)
    for row in rows[1:]:
        agree &= responses[row].tokens[start:shortest] == first
    return start + (len(agree) if agree.all() else int(agree.argmin()))
