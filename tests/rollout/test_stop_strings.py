"""rollout.stop in a run: where responses end, what is graded and what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import make_recipe, train, write_model

STOPS = ["a", "bc", "é", *"0123456789"]  # é is two tokens of the byte tokenizer


@pytest.mark.parametrize("backend", ["fake", "cpu"])
def test_the_text_ends_before_the_stop_string_and_the_tokens_after_it(tmp_path: Path, backend: str) -> None:
    model = write_model(tmp_path / "model")
    tokenizer = Tokenizer.load(str(model))
    recipe = make_recipe(model, run__steps=2, rollout__stop=STOPS, rollout__max_tokens=40)
    watcher = train(recipe, tmp_path / "run", backend)
    ended = 0
    for row in read_lines(RunFolder(tmp_path / "run").rollout_file(1)):
        tokens, text = row["tokens"], row["response"]
        assert not any(stop in text for stop in STOPS)
        whole = tokenizer.decode(tokens)
        assert not any(stop in tokenizer.decode(tokens[:-1]) for stop in STOPS), "it goes on after its end"
        stopped = [stop for stop in STOPS if stop in whole]
        assert row["truncated"] == (not stopped and tokens[-1] not in tokenizer.eos_ids)
        assert whole.removeprefix(text) in ["", *STOPS]
        assert len(row["logprobs"]) == len(tokens)
        ended += bool(stopped)
    assert ended > 10
    assert 0 < watcher.records[0]["truncated"] < 1
    # Without stop strings the same responses go on after the same tokens.
    train(make_recipe(model, run__steps=1, rollout__max_tokens=40), tmp_path / "plain", backend)
    plain = read_lines(RunFolder(tmp_path / "plain").rollout_file(1))
    for row, longer in zip(read_lines(RunFolder(tmp_path / "run").rollout_file(1)), plain, strict=True):
        assert longer["tokens"][: len(row["tokens"])] == row["tokens"]


def test_an_empty_string_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.stop: an empty string would end every response"):
        make_recipe(tmp_path, rollout__stop=["\n", ""])
