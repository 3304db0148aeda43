"""Stop strings against a search in the whole text, on a real tokenizer's bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.stop_strings import StopText
from delta_cli.assets import model_path
from delta_cli.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(model_path("tiny-base"))  # bytes: a character beyond ASCII is several tokens
STRINGS = ("\n\n", "é.", "stop", "→")


@given(st.text(alphabet="aé→.\nstop", max_size=40))
@settings(max_examples=300, deadline=None)
def test_it_ends_where_the_text_first_contains_one(text: str) -> None:
    """Checked token by token: incomplete characters do not count, and no occurrence is missed."""
    stop = TOKENIZER.stop_text(STRINGS)
    assert stop is not None
    ids = TOKENIZER.encode(text)
    found = next((n for n in range(len(ids) + 1) if stop.completed_by(ids[:n])), None)
    whole = [ids[:n].tolist() for n in range(len(ids) + 1)]
    expected = next((n for n, part in enumerate(whole) if any(s in TOKENIZER.decode(part) for s in STRINGS)), None)
    assert found == expected


def test_few_tokens_need_to_be_decoded() -> None:
    stop = TOKENIZER.stop_text(("end\n",))
    assert stop is not None
    assert stop.may_complete[TOKENIZER.encode("\n")[0]]
    assert stop.may_complete.sum() < 140  # that byte, and those of characters that need several


def test_the_end_of_sequence_written_as_text_is_found() -> None:
    stop = TOKENIZER.stop_text(("<|endoftext|>",))
    assert stop is not None
    assert stop.completed_by([*TOKENIZER.encode("a"), TOKENIZER.eos_ids[0]])


def test_ids_beyond_the_tokenizer_complete_nothing() -> None:
    stop = TOKENIZER.stop_text(("a",))
    assert stop is not None
    assert not stop.completed_by(np.array([TOKENIZER.vocab_size + 3]))
    assert not stop.completed_by([])


def test_there_is_none_without_strings_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    assert TOKENIZER.stop_text(()) is None
    with pytest.raises(ValueError, match="empty"):
        StopText.of(("a", ""), lambda ids: "", 1)
