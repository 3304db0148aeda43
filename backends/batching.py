"""Split sequences into micro-batches by token budget, padded or packed; sampling noise. Numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from backends.interface import Bools, Floats, Ids, Sequences


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts and responses of some sequences, padded on the right: B rows of length T.

    ``predicts`` marks the positions whose logits predict a response token, one before it. Read row by row, they come
    in the flat order of the tokens at ``rows``. Tokens of an environment are in ``ids`` but not among the targets.
    """

    rows: Ids  # [B] indices into the sequences
    ids: Ids  # [B, T], 0 where padded
    valid: Bools  # [B, T] False where padded
    predicts: Bools  # [B, T]
    targets: Ids  # [n] the response tokens, flat in the order of rows

    @property
    def lengths(self) -> Ids:
        """The number of tokens of each response [B]."""
        return np.asarray(self.predicts.sum(1), dtype=np.int64)

    @property
    def tokens(self) -> int:
        """The number of tokens that count against a budget, padding included."""
        return self.ids.size

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return int(self.ids.shape[1])


def micro_batches(sequences: Sequences, budget: int) -> Iterator[PaddedBatch]:
    """Split into rectangles of at most ``budget`` padded tokens, with sequences of similar length together.

    The longest come first, so that a batch that exceeds memory fails at once. Leaves out responses without tokens; a
    sequence longer than the budget gets its own batch.
    """
    lengths = np.array([len(prompt) for prompt in sequences.prompts]) + sequences.region_lengths
    order = np.argsort(-lengths, kind="stable")
    order = order[sequences.lengths[order] > 0]
    first = 0
    while first < len(order):
        rows = max(1, budget // int(lengths[order[first]]))
        yield pad(sequences, order[first : first + rows])
        first += rows


def pad(sequences: Sequences, rows: Ids) -> PaddedBatch:
    """The padded rectangle of the sequences at ``rows``."""
    regions = [sequences.region(row) for row in rows]
    parts = [np.concatenate([sequences.prompts[row], ids]) for row, (ids, _) in zip(rows, regions, strict=True)]
    width = max(len(part) for part in parts)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    valid = np.zeros((len(rows), width), dtype=bool)
    predicts = np.zeros((len(rows), width), dtype=bool)
    for i, (row, part, (_, own)) in enumerate(zip(rows, parts, regions, strict=True)):
        prompt = len(sequences.prompts[row])
        ids[i, : len(part)] = part
        valid[i, : len(part)] = True
        predicts[i, prompt - 1 : len(part) - 1] = own
    targets = np.concatenate([sequences.response(row) for row in rows])
    return PaddedBatch(rows, ids, valid, predicts, targets)


@dataclass(frozen=True)
class SharedPromptBatch:
    """Right-padded prompts, each once, and right-padded responses that attend to their prompt.

    The last token of a response region predicts nothing and is left out. The end of a prompt predicts the first token
    of each of its responses.
    """

    rows: Ids  # [B] indices into the sequences
    prompts: Ids  # [P, Tp] ids, 0 where padded
    prompt_lengths: Ids  # [P]
    prompt_of: Ids  # [B] which prompt each response belongs to
    responses: Ids  # [B, Tr] ids, 0 where padded
    own: tuple[Bools, ...]  # B: which tokens of a region, the last included, the model wrote
    targets: Ids  # [n] the response tokens, flat in the order of rows

    @property
    def lengths(self) -> Ids:
        """The number of tokens of each response [B]."""
        return np.array([own.sum() for own in self.own], dtype=np.int64)

    @property
    def tokens(self) -> int:
        """The number of tokens that count against a budget, padding included."""
        return self.prompts.size + self.responses.size

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return int((self.prompt_lengths[self.prompt_of] + [len(own) for own in self.own]).max())

    @property
    def predicts(self) -> Ids:
        """The position that predicts each target [n]: among the P · Tp positions of prompts, then the B · Tr of
        responses.
        """
        ends = self.prompt_of * self.prompts.shape[1] + self.prompt_lengths[self.prompt_of] - 1
        begins = self.prompts.size + np.arange(len(self.rows)) * self.responses.shape[1]
        parts = [
            np.concatenate([[end], np.arange(begin, begin + len(own) - 1)])[own]
            for end, begin, own in zip(ends, begins, self.own, strict=True)
        ]
        return np.concatenate(parts).astype(np.int64)


def shared_batches(sequences: Sequences, budget: int) -> list[SharedPromptBatch]:
    """Split into batches of at most ``budget`` padded tokens, by similar length first and by prompt second.

    Responses that share a prompt's array share its tokens within a batch.
    """
    lengths = sequences.region_lengths
    prompt = {id(array): place for place, array in reversed(list(enumerate(sequences.prompts)))}
    group = np.array([prompt[id(array)] for array in sequences.prompts], dtype=np.int64)
    like = np.floor(2 * np.log2(np.maximum(lengths, 1)))  # lengths within a factor of √2
    order = np.lexsort((-lengths, group, -like))
    order = order[sequences.lengths[order] > 0]
    found, chosen, prompts, wide, long = [], list[int](), set[int](), 0, 0
    for row in order.tolist():
        size = len(sequences.prompts[row])
        grown = max(wide, size), max(long, int(lengths[row]) - 1)
        needed = len(prompts | {int(group[row])}) * grown[0] + (len(chosen) + 1) * grown[1]
        if chosen and needed > budget:
            found.append(_shared(sequences, np.array(chosen), group))
            chosen, prompts, grown = [], set(), (size, int(lengths[row]) - 1)
        chosen.append(row)
        prompts.add(int(group[row]))
        wide, long = grown
    return [*found, _shared(sequences, np.array(chosen), group)] if chosen else found


def _shared(sequences: Sequences, rows: Ids, group: Ids) -> SharedPromptBatch:
    first, place = np.unique(group[rows], return_inverse=True)
    prompts = [sequences.prompts[row] for row in first]
    responses, own = zip(*(sequences.region(row) for row in rows), strict=True)
    return SharedPromptBatch(
        rows=rows,
        prompts=_rectangle(prompts),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        prompt_of=place.astype(np.int64),
        responses=_rectangle([ids[:-1] for ids in responses]),
        own=own,
        targets=np.concatenate([sequences.response(row) for row in rows]),
    )


def _rectangle(parts: SequenceOf[Ids]) -> Ids:
    """Rows of ids, padded on the right with 0."""
    found = np.zeros((len(parts), max(len(part) for part in parts)), dtype=np.int64)
    for row, part in zip(found, parts, strict=True):
        row[: len(part)] = part
    return found


@dataclass(frozen=True)
class PromptGroup:
    """A prompt and responses to it, one after another in a row of tokens."""

    start: int  # position of the prompt in the row
    prompt: int  # its number of tokens
    responses: Ids  # tokens of each response region in the row: all but its last, which predicts nothing


@dataclass(frozen=True)
class PackedBatch:
    """Some sequences end to end in one row of T tokens: each prompt once, then its responses, without padding.

    ``predicts`` says where in the row each response token is predicted, in the flat order of the tokens at ``rows``.
    The last token of a prompt predicts the first token of all its responses. A response without tokens has that
    position in ``predicts`` but no target: this is how a rollout prefills a prompt.
    """

    rows: Ids  # [B] indices into the sequences
    ids: Ids  # [T]
    positions: Ids  # [T] position of each token in its own sequence
    predicts: Ids  # [n] indices into the T tokens
    targets: Ids  # [n] the response tokens, flat in the order of rows
    lengths: Ids  # [B] the number of tokens of each response
    groups: tuple[PromptGroup, ...]

    @property
    def tokens(self) -> int:
        """The number of tokens that count against a budget."""
        return len(self.ids)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, including its last one, which is not in the row."""
        return max(group.prompt + int(group.responses.max(initial=-1)) + 1 for group in self.groups)


def packed_batches(sequences: Sequences, budget: int) -> Iterator[PackedBatch]:
    """Split into rows of at most ``budget`` tokens, with responses that share a prompt's array together.

    The longest sequence comes first, so that a batch that exceeds memory fails at once. Leaves out responses without
    tokens; a sequence longer than the budget gets its own batch.
    """
    lengths = sequences.region_lengths
    members: dict[int, list[int]] = {}
    for row in np.argsort(-lengths, kind="stable"):
        if sequences.lengths[row]:
            members.setdefault(id(sequences.prompts[row]), []).append(int(row))
    longest_first = sorted(members.values(), key=lambda rows: -len(sequences.prompts[rows[0]]) - lengths[rows[0]])
    groups: list[list[int]] = []
    used = 0
    for rows in longest_first:
        prompt, first = len(sequences.prompts[rows[0]]), 0
        for i, row in enumerate(rows):
            needed = lengths[row] - 1 + (prompt if i == first else 0)
            if used and used + needed > budget:
                yield pack(sequences, [*groups, rows[first:i]] if i > first else groups)
                groups, used, first = [], 0, i
                needed = lengths[row] - 1 + prompt
            used += needed
        groups.append(rows[first:])
    if groups:
        yield pack(sequences, groups)


def pack(sequences: Sequences, groups: Iterable[list[int]]) -> PackedBatch:
    """One row of sequences. Each of ``groups`` has the indices of responses that share a prompt."""
    rows: list[int] = []
    ids: list[Ids] = []
    positions: list[Ids] = []
    predicts: list[Ids] = []
    members: list[PromptGroup] = []
    end = 0
    for group in groups:
        prompt = sequences.prompts[group[0]]
        regions = [sequences.region(row) for row in group]
        responses = [tokens[:-1] for tokens, _ in regions]
        members.append(PromptGroup(end, len(prompt), np.array([len(response) for response in responses])))
        rows += group
        ids += [prompt, *responses]
        positions.append(np.arange(len(prompt)))
        end += len(prompt)
        last = [end - 1]
        for response, (_, own) in zip(responses, regions, strict=True):
            positions.append(np.arange(len(prompt), len(prompt) + len(response)))
            places = np.concatenate([last, np.arange(end, end + len(response))])
            predicts.append(places[own] if len(own) else places)  # of an empty response: what predicts its first token
            end += len(response)
    return PackedBatch(
        rows=np.array(rows, dtype=np.int64),
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        predicts=np.concatenate(predicts),
        targets=np.concatenate([sequences.response(row) for row in rows]),
        lengths=sequences.lengths[rows],
        groups=tuple(members),
    )


def similar_lengths(lengths: Ids) -> Iterator[Ids]:
    """Indices of ``lengths`` above 0, longest first, in runs where none is half as long as the longest."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    while len(order):
        count = int(np.sum(2 * lengths[order] > lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def response_chunks(
    batch: PaddedBatch | SharedPromptBatch | PackedBatch, most: int, cut: bool = False
) -> Iterator[tuple[slice, Ids]]:
    """Chunks of whole responses of a batch, each at most ``most`` tokens, or a single longer response.

    Yields the slice in the flat order of ``batch.rows``, and the rows it covers. With ``cut``, longer responses are
    split.
    """
    lengths = batch.lengths
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        start = int(ends[first] - lengths[first])
        last = max(first + 1, int(np.searchsorted(ends, start + most, side="right")))
        stop = int(ends[last - 1])
        for begin in range(start, stop, most if cut else stop - start):
            yield slice(begin, min(begin + most, stop) if cut else stop), batch.rows[first:last]
        first = last


def uniforms(seed: int, row: int, count: int) -> Floats:
    """Sampling noise of response ``row``: float64 [count] in [0, 1).

    A function of (seed, row) alone, so that a response does not depend on the others in the batch, nor on when it
    enters. A longer stream begins with the shorter one.
    """
    return np.random.Generator(np.random.Philox(key=[seed, row])).random(count)
