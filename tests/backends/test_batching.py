"""Micro-batches, padding and sampling noise: properties of any batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.batching import PackedBatch, micro_batches, pack, packed_batches, pad, uniforms
from backends.interface import Sequences, token_index

ids = st.lists(st.integers(0, 9), max_size=6)
batches = st.lists(st.tuples(ids.filter(bool), ids), min_size=1, max_size=8)  # prompts, responses


def make(batch: list[tuple[list[int], list[int]]]) -> Sequences:
    responses = [np.array(response, dtype=np.int64) for _, response in batch]
    return Sequences(
        prompts=tuple(np.array(prompt, dtype=np.int64) for prompt, _ in batch),
        tokens=np.concatenate(responses),
        starts=np.cumsum([0, *map(len, responses)], dtype=np.int64),
    )


@given(batches, st.randoms(use_true_random=False))
def test_token_index_is_the_concatenated_ranges(batch: list, random: object) -> None:
    sequences = make(batch)
    rows = [random.randrange(len(batch)) for _ in range(5)]
    expected = [t for row in rows for t in range(sequences.starts[row], sequences.starts[row + 1])]
    assert token_index(sequences.starts, np.array(rows)).tolist() == expected


@given(batches, st.randoms(use_true_random=False))
def test_select_takes_the_sequences_in_order(batch: list, random: object) -> None:
    sequences = make(batch)
    rows = random.sample(range(len(batch)), k=len(batch))
    chosen = sequences.select(np.array(rows))
    assert len(chosen) == len(rows)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(chosen.prompts[i], sequences.prompts[row])
        np.testing.assert_array_equal(chosen.response(i), sequences.response(row))


@given(batches)
def test_padding_marks_what_predicts_each_token(batch: list) -> None:
    """The id after a marked position is the target, and the marked ones are the whole response."""
    sequences = make(batch)
    padded = pad(sequences, np.arange(len(batch)))
    row, position = np.nonzero(padded.predicts)
    np.testing.assert_array_equal(padded.ids[row, position + 1], padded.targets)
    np.testing.assert_array_equal(padded.targets, sequences.tokens)
    for i, (prompt, response) in enumerate(batch):
        assert padded.ids[i, padded.valid[i]].tolist() == prompt + response
        assert not padded.ids[i, ~padded.valid[i]].any()
        assert np.flatnonzero(padded.predicts[i]).tolist() == list(
            range(len(prompt) - 1, len(prompt) + len(response) - 1)
        )


@given(batches, st.integers(1, 60))
def test_micro_batches_cover_every_token_once_within_the_budget(batch: list, budget: int) -> None:
    sequences = make(batch)
    parts = list(micro_batches(sequences, budget))
    rows = np.concatenate([part.rows for part in parts]) if parts else np.zeros(0, dtype=int)
    assert sorted(rows.tolist()) == np.flatnonzero(sequences.lengths).tolist()
    widths = [part.ids.shape[1] for part in parts]
    assert widths == sorted(widths, reverse=True), "the longest first"
    for part in parts:
        assert part.ids.size <= budget or len(part.rows) == 1
        np.testing.assert_array_equal(sequences.tokens[token_index(sequences.starts, part.rows)], part.targets)


def test_micro_batches_take_as_many_rows_as_fit() -> None:
    sequences = make([([1, 2], [3])] * 7)
    assert [len(part.rows) for part in micro_batches(sequences, 9)] == [3, 3, 1]


groups = st.lists(st.tuples(ids.filter(bool), st.lists(ids, min_size=1, max_size=4)), min_size=1, max_size=5)


def make_groups(batch: list[tuple[list[int], list[list[int]]]]) -> Sequences:
    """Responses of one prompt share its array."""
    alone = make([(prompt, response) for prompt, responses in batch for response in responses])
    shared = [np.array(prompt, dtype=np.int64) for prompt, _ in batch]
    prompts = tuple(shared[i] for i, (_, responses) in enumerate(batch) for _ in responses)
    return Sequences(prompts, alone.tokens, alone.starts)


def read_back(batch: PackedBatch, sequences: Sequences) -> None:
    """Every response is found after its own prompt, at consecutive positions."""
    at = 0
    for row in batch.rows:
        prompt, response = sequences.prompts[row], sequences.response(row)
        where = batch.predicts[at : at + len(response)]
        np.testing.assert_array_equal(batch.ids[where], [prompt[-1], *response[:-1]])
        np.testing.assert_array_equal(batch.positions[where], len(prompt) - 1 + np.arange(len(response)))
        before = slice(where[0] - len(prompt) + 1, where[0] + 1)
        np.testing.assert_array_equal(batch.ids[before], prompt)
        np.testing.assert_array_equal(batch.positions[before], np.arange(len(prompt)))
        np.testing.assert_array_equal(batch.targets[at : at + len(response)], response)
        at += len(response)
    assert at == len(batch.targets) == len(batch.predicts)


@given(groups, st.integers(1, 40))
def test_packed_batches_cover_every_token_once_within_the_budget(batch: list, budget: int) -> None:
    sequences = make_groups(batch)
    parts = list(packed_batches(sequences, budget))
    rows = np.concatenate([part.rows for part in parts]) if parts else np.zeros(0, dtype=int)
    assert sorted(rows.tolist()) == np.flatnonzero(sequences.lengths).tolist()
    for part in parts:
        read_back(part, sequences)
        assert len(part.ids) <= budget or len(part.rows) == 1
        prompts = {id(sequences.prompts[row]): len(sequences.prompts[row]) for row in part.rows}
        assert len(part.ids) == sum(prompts.values()) + sum(sequences.lengths[part.rows] - 1), "nothing is there twice"
    longest = [max(part.positions) for part in parts]
    assert longest[:1] == [max(longest)] if longest else not sequences.lengths.any(), "the longest first"


def test_packed_batches_take_as_many_responses_as_fit() -> None:
    """A prompt of 2 and responses of which 1 is read; a prompt split over two batches is in both."""
    sequences = make_groups([([1, 2], [[3, 4]] * 5), ([5, 6], [[7, 8]] * 2)])
    parts = list(packed_batches(sequences, 6))
    assert [part.rows.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5], [6]]
    assert [len(part.ids) for part in parts] == [6, 6, 3]


def test_prompts_alone_are_packed_for_a_rollout() -> None:
    sequences = make_groups([([1, 2, 3], [[]]), ([4], [[]])])
    batch = pack(sequences, [[0], [1]])
    assert batch.ids.tolist() == [1, 2, 3, 4]
    assert batch.predicts.tolist() == [2, 3]
    assert not len(batch.targets)


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 20), st.integers(0, 20))
def test_a_longer_stream_of_noise_begins_with_the_shorter(seed: int, row: int, short: int, more: int) -> None:
    stream = uniforms(seed, row, short + more)
    assert stream.shape == (short + more,)
    assert ((stream >= 0) & (stream < 1)).all()
    np.testing.assert_array_equal(stream[:short], uniforms(seed, row, short))


def test_noise_differs_between_seeds_and_between_rows() -> None:
    streams = {tuple(uniforms(seed, row, 4)) for seed in range(20) for row in range(20)}
    assert len(streams) == 400


def test_noise_is_uniform_across_rows() -> None:
    """The first draw of many rows, as the first token of a rollout uses it: mean 1/2, variance 1/12."""
    first = np.array([uniforms(7, row, 1)[0] for row in range(4000)])
    assert abs(first.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / 4000)
    assert abs(first.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / 4000)
