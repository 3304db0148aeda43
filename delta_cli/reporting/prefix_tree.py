"""The prefix tree of a group: which beginnings the responses to one prompt share, and where they branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from delta_cli.runs.records import RecordedResponse


@dataclass(frozen=True)
class PrefixNode:
    """Consecutive tokens that the responses ``rows`` share, and what follows them."""

    start: int  # tokens before it
    stop: int  # tokens up to its end
    rows: tuple[int, ...]  # responses that run through it
    right: int  # of these, how many are correct
    children: tuple[PrefixNode, ...]  # one for each next token; none if the responses end here

    @property
    def wrong(self) -> int:
        """How many of the responses are not correct."""
        return len(self.rows) - self.right

    @property
    def parts(self) -> bool:
        """Whether a right and a wrong response branch at the end of this node."""
        return any(one.right and other.wrong for one in self.children for other in self.children if one is not other)

    def walk(self) -> Iterator[PrefixNode]:
        """This node and all nodes below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def prefix_tree(responses: Sequence[RecordedResponse]) -> PrefixNode:
    """The tree of the responses to one prompt; a node ends where its responses differ."""
    return _node(responses, tuple(range(len(responses))), 0)


def first_parting(root: PrefixNode) -> PrefixNode | None:
    """The node with the fewest tokens before its end at which a right and a wrong response branch; None without one."""
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
    """The length of the longest common prefix of the responses ``rows``, which is known to be at least ``start``."""
    shortest = min((len(responses[row]) for row in rows), default=0)
    first = responses[rows[0]].tokens[start:shortest] if rows else np.empty(0)
    agree = np.ones(len(first), bool)
    for row in rows[1:]:
        agree &= responses[row].tokens[start:shortest] == first
    return start + (len(agree) if agree.all() else int(agree.argmin()))
