"""The embedded base model: what is shipped, and the deterministic parts of what makes it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from make_tiny_base import (
    Plan,
    demonstrations,
    main,
    make,
    sampled_accuracy,
    supervised_step,
    write_tokenizer,
)
from safetensors.numpy import load_file

from backends import registry
from backends.interface import Engine, Sequences
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data import arithmetic
from delta_cli.data.prompts import encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe.data import Arithmetic

TINY_BASE = Path(model_path("tiny-base"))
TEXTS = ["347+586=?\n", "7+6=13 4+8+1=13 3+5+1=9 \\boxed{933}", "Ünïcode €, tabs\tand  spaces", ""]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(TINY_BASE))


def test_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in TINY_BASE.iterdir()) < 1_000_000
    parameters = sum(weight.size for weight in load_file(TINY_BASE / "model.safetensors").values())
    assert 100_000 <= parameters <= 300_000
    config = json.loads((TINY_BASE / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


def test_end_of_sequence_and_padding_are_declared_alike(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.pad_id == 0
    config = json.loads((TINY_BASE / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.vocab_size == 258


def test_opens_in_transformers(tokenizer: Tokenizer) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(TINY_BASE))
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.eos_token_id == tokenizer.eos_ids[0]
    messages = [{"role": "user", "content": "347+586=?"}]
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "347+586=?\n"
    model = AutoModelForCausalLM.from_pretrained(str(TINY_BASE), dtype=torch.float32)
    ids = tokenizer.encode(TEXTS[0] + TEXTS[1])
    with torch.no_grad():
        theirs_logits = model(torch.tensor(ids)[None]).logits[0].double()
    assert np.abs(logprobs(ids) - next_token(theirs_logits.log_softmax(-1).numpy(), ids)).max() < 1e-4


def test_opens_in_mlx_lm(tokenizer: Tokenizer) -> None:
    pytest.importorskip("mlx_lm", reason="MLX is an optional extra")
    import mlx.core as mx
    import mlx_lm

    model, theirs = mlx_lm.load(str(TINY_BASE))
    for text in TEXTS:
        assert theirs.encode(text) == tokenizer.encode(text).tolist()
    assert theirs.eos_token_ids == set(tokenizer.eos_ids)
    ids = tokenizer.encode(TEXTS[0] + TEXTS[1])
    logits = np.array(model(mx.array(ids)[None])[0]).astype(np.float64)
    normalised = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert np.abs(logprobs(ids) - next_token(normalised, ids)).max() < 1e-4


def logprobs(ids: np.ndarray) -> np.ndarray:
    """Of all tokens but the first, from the float64 numpy model."""
    backend = registry.create("fake", BackendSettings.of(str(TINY_BASE)))
    return backend.score(Sequences((ids[:1],), ids[1:], np.array([0, len(ids) - 1]))).logprobs


def next_token(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return table[np.arange(len(ids) - 1), ids[1:]]


def test_answers_some_of_its_problems(tokenizer: Tokenizer) -> None:
    """30 to 50 % of the held-out ones; 200 samples tell that from 20 and 60 %."""
    backend = registry.create("fake", BackendSettings.of(str(TINY_BASE)))
    held_out = arithmetic.problems(Plan().task, 200, seed=11, split="held_out")
    assert 0.25 < sampled_accuracy(backend, held_out, tokenizer, Plan().task, seed=1) < 0.55


# -------------------------------------------------------------------------------- the maker


@pytest.fixture
def minute(tmp_path: Path) -> Iterator[Engine]:
    """A model of a few thousand weights on the fake backend."""
    write_tokenizer(tmp_path)
    write_qwen3(
        tmp_path, vocab_size=258, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=32, scale=0.1
    )
    backend = registry.create("fake", BackendSettings.of(str(tmp_path)))
    yield backend
    backend.close()


def test_demonstrations_are_prompt_derivation_and_end(tokenizer: Tokenizer) -> None:
    problems = arithmetic.problems(Arithmetic(), 3, seed=0)
    sequences = demonstrations(problems, Plan(slips=0), 0, tokenizer)
    for row, problem in enumerate(problems):
        assert tokenizer.decode(sequences.prompts[row]) == problem.question + "\n"
        response = sequences.response(row)
        assert tokenizer.decode(response) == arithmetic.solution(problem, Arithmetic())
        assert response[-1] == tokenizer.eos_ids[0]


def test_the_wanted_share_of_results_is_off_by_one(tokenizer: Tokenizer) -> None:
    plan = Plan(slips=0.3)
    sequences = demonstrations(arithmetic.problems(plan.task, 1000, seed=0), plan, 7, tokenizer)
    texts = [tokenizer.decode(sequences.response(row)) for row in range(1000)]
    steps = [step.split("=") for text in texts for step in text.split(" ")[:-1]]
    errors = [int(right) - eval(left) for left, right in steps]
    assert set(errors) == {-1, 0, 1}
    assert len(errors) == 2000
    assert abs(np.count_nonzero(errors) / 2000 - 0.3) < 0.04  # four standard deviations
    assert (
        sequences.tokens.tolist()
        == demonstrations(arithmetic.problems(plan.task, 1000, seed=0), plan, 7, tokenizer).tokens.tolist()
    )


def test_a_supervised_step_is_gradient_descent_on_the_mean_log_likelihood(minute: Engine, tokenizer: Tokenizer) -> None:
    sequences = demonstrations(arithmetic.problems(Arithmetic(), 8, seed=0), Plan(), 0, tokenizer)
    losses = [supervised_step(minute, sequences, 1e-2) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.1
    assert -minute.score(sequences).logprobs.mean() < losses[-1]


def test_random_weights_box_no_answer(minute: Engine, tokenizer: Tokenizer) -> None:
    problems = arithmetic.problems(Arithmetic(digits=1), 4, seed=0)
    assert sampled_accuracy(minute, problems, tokenizer, Arithmetic(digits=1), seed=0) == 0


def test_the_same_plan_gives_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(Arithmetic(digits=1), accuracy=0.0, batch=4, measure_every=3, pool=20, held_out=4)
    for name in ("first", "second"):
        assert make(tmp_path / name, "fake", plan) == 0.0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    assert "step     3  loss" in capsys.readouterr().out
    Tokenizer.load(str(tmp_path / "first"))


def test_a_plan_that_does_not_get_there_says_so(tmp_path: Path) -> None:
    plan = Plan(Arithmetic(digits=1), batch=2, measure_every=1, max_steps=1, pool=20, held_out=2)
    with pytest.raises(UserError, match="not reached in 1 steps"):
        make(tmp_path, "fake", plan)
    with pytest.raises(SystemExit, match=r"^--digits: Input should be greater than or equal to 1$"):
        main(["--out", str(tmp_path), "--backend", "fake", "--digits", "0"])


def test_prompts_fit_the_quickstart(tokenizer: Tokenizer) -> None:
    """Speed of the quickstart depends on short prompts and responses."""
    spec = Plan().task
    problem = arithmetic.problems(spec, 1, seed=0)[0]
    assert len(encode_prompt(problem, "chat", tokenizer)) <= 12
    assert len(tokenizer.encode(arithmetic.solution(problem, spec))) <= 40
