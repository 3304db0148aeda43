"""Several processes, engines, tools and adapters in TRL: the coefficients are those of the slow oracle."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from delta_cli.integrations.trl import DelTAArguments, DelTAConfig, DelTATrainer, trainer
from delta_cli.integrations.trl import credit as credit_module
from tests.integrations.credited import Rescored, Seen, slow, train
from tests.integrations.tiny import model, questions, right, settings, tokenizer, weights


class Rank:
    """In place of an accelerator: one of two threads that add up and gather as two processes would."""

    num_processes, device = 2, torch.device("cpu")

    def __init__(self, process_index: int, together: threading.Barrier, slots: list[Any]) -> None:
        self.process_index, self._together, self._slots = process_index, together, slots

    def all(self, mine: Any) -> list[Any]:
        self._slots[self.process_index] = mine
        self._together.wait(10)
        found = list(self._slots)
        self._together.wait(10)
        return found

    def reduce(self, tensor: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "sum"
        return sum(self.all(tensor))  # type: ignore[return-value]


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_two_processes_are_credited_as_one(scope: str, rescored: Rescored, monkeypatch: pytest.MonkeyPatch) -> None:
    """With threads for processes; test_trl_two_processes.py has real ones."""
    together, slots = threading.Barrier(2), [None, None]
    ranks = [Rank(index, together, slots) for index in (0, 1)]
    here = threading.local()
    monkeypatch.setattr(credit_module, "gather_object", lambda item: [one for [one] in here.rank.all(item)])
    arguments = DelTAArguments(delta_scope=scope)
    halves = [{name: value[8 * index : 8 * index + 8] for name, value in rescored.batch.items()} for index in (0, 1)]
    scored = [rescored.score(arguments, half) for half in halves]

    def credited(index: int) -> torch.Tensor:
        here.rank = ranks[index]
        rng = np.random.default_rng(0)
        found = trainer.credit(halves[index], scored[index], arguments.delta_section(), ranks[index], 4, rng)
        return found.weights

    with ThreadPoolExecutor(2) as pool:
        found = torch.cat(list(pool.map(credited, (0, 1))))
    whole = rescored.credit(delta_scope=scope).weights
    np.testing.assert_allclose(found, whole, rtol=0, atol=2e-6)
    if scope == "batch":  # a process by itself would say otherwise
        scored = [rescored.score(arguments, half) for half in halves]
        monkeypatch.setattr(Rank, "num_processes", 1)
        monkeypatch.setattr(Rank, "all", lambda self, mine: [mine])
        assert (credited(0) - whole[:8]).abs().max() > 1e-3


FUNCTION = """
def weights(batch):
    assert (batch.entropies > 0).all() and len(batch.groups) == 16 and batch.pieces(0)
    return 0.5 - batch.logprobs + batch.tokens % 7 + 10 * (batch.token_advantages > 0) + batch.groups[batch.rows]
"""


def test_a_weight_function_sees_the_batch_of_all_processes(
    rescored: Rescored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one process and on two, with threads for processes; expected weights are computed from TRL's batch."""
    (tmp_path / "mine.py").write_text(FUNCTION, encoding="utf-8")
    arguments = DelTAArguments(delta_credit=f"{tmp_path}/mine.py:weights")
    together, slots = threading.Barrier(2), [None, None]
    ranks = [Rank(index, together, slots) for index in (0, 1)]
    here = threading.local()
    monkeypatch.setattr(credit_module, "gather_object", lambda item: [one for [one] in here.rank.all(item)])
    batch, rng = rescored.batch, np.random.default_rng(0)
    halves = [{name: value[8 * index : 8 * index + 8] for name, value in batch.items()} for index in (0, 1)]
    scored = [rescored.score(arguments, half, entropies=True) for half in halves]

    def credited(index: int) -> torch.Tensor:
        here.rank = ranks[index]
        section, function = arguments.delta_section(), arguments.weight_function()
        decode = rescored.trainer._tokenizer.decode
        return trainer.credit(halves[index], scored[index], section, ranks[index], 4, rng, function, decode, 3).weights

    with ThreadPoolExecutor(2) as pool:
        found = torch.cat(list(pool.map(credited, (0, 1)))).double().numpy()
    counted = batch["completion_mask"].bool().numpy()
    logps = torch.cat([each.logps for each in scored]).double().numpy()
    expected = 0.5 - logps + batch["completion_ids"].numpy() % 7 + (np.arange(16) // 4)[:, None]
    expected += 10 * (batch["advantages"].numpy() > 0)[:, None]
    np.testing.assert_allclose(found[counted], expected[counted], rtol=1e-6)
    assert (found[~counted] == 1).all()


def with_tools(prompts: list[str], owner: Any) -> dict[str, Any]:
    """Completions; half of them hold ten tokens that a tool wrote."""
    rng, encode = np.random.default_rng(3), owner.processing_class.encode
    result: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for row, prompt in enumerate(prompts):
        said, tool = encode("1+2=3 "), encode("tool: 47!!") if row % 2 else []
        answer = encode(f"\\boxed{{{rng.integers(10, 99)}}}") if row % 3 else encode("\\boxed{1} 1+1=2")
        result["prompt_ids"].append(encode(prompt))
        result["completion_ids"].append(said + tool + answer)
        result["env_mask"].append([1] * len(said) + [0] * len(tool) + [1] * len(answer))
        result["logprobs"].append([0.0] * len(result["completion_ids"][-1]))
    return result


def short(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3 == 0) for text in completions]


def test_what_a_tool_wrote_has_no_credit_and_moves_no_centroid(
    seen: list[Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    args = DelTAConfig(**settings(tmp_path, max_steps=1, per_device_train_batch_size=16, delta_rollouts_every=0))
    run = DelTATrainer(model(), short, args, questions(4), processing_class=tokenizer(), rollout_func=with_tools)
    run.train()
    [found] = seen
    tools = found.batch["completion_mask"].bool() & ~found.counted
    assert int(tools.sum()) == 80
    assert (found.weights[tools] == 1).all()
    np.testing.assert_allclose(found.flat, slow(found), rtol=0, atol=2e-6)
    naive = slow(replace(found, batch={**found.batch, "tool_mask": torch.ones_like(found.batch["tool_mask"])}))
    assert np.abs(naive[found.counted[found.batch["completion_mask"].bool()].numpy()] - found.flat).max() > 1e-3


class FakeEngine:
    """In place of vLLM: draws with transformers, and reports log-probabilities that are a little off."""

    def __init__(self, model: Any, processing_class: Any, mode: str, **_: Any) -> None:
        self.model, self.tokenizer, self.syncs = model, processing_class, 0
        self.vllm_client = self

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None:
        self.syncs += 1

    def generate(self, prompts: list[list[int]], num_generations: int, **_: Any) -> tuple[Any, ...]:
        completions = []
        for ids in prompts:
            drawn = self.model.generate(torch.tensor([ids]), do_sample=True, max_new_tokens=24, pad_token_id=0)
            text = drawn[0, len(ids) :].tolist()
            completions.append(text[: text.index(0) + 1] if 0 in text else text)
        return prompts, completions, [[[-0.1]] * len(ids) for ids in completions], None


ENGINES = [("colocate", True), ("colocate", False), ("server", True), ("server", False)]


@pytest.mark.parametrize(
    ("mode", "correction"), [ENGINES[0], *(pytest.param(*each, marks=pytest.mark.long) for each in ENGINES[1:])]
)
def test_an_engine_that_draws_and_its_correction(
    mode: str, correction: bool, seen: list[Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake vLLM hands TRL its samples, and the forward pass that TRL then makes serves us too."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", FakeEngine)
    forwards = []
    plain = GRPOTrainer._get_per_token_logps_and_entropies

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards.append(torch.is_grad_enabled())
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    correct = {"vllm_importance_sampling_correction": correction, "vllm_importance_sampling_mode": "token_truncate"}
    run = train(tmp_path, use_vllm=True, vllm_mode=mode, **correct)
    [found] = seen
    assert run.vllm_generation.syncs == 1
    assert ("importance_sampling_ratio" in found.batch) == correction
    assert forwards == [False, True]  # one that scores, whoever makes it, and that of the loss
    np.testing.assert_allclose(found.flat, slow(found), rtol=0, atol=2e-6)


def test_adapters_are_part_of_the_policy(seen: list[Seen], tmp_path: Path) -> None:
    """With a reference of the same weights without adapters, the features are the policy's, not the reference's."""
    import peft

    args = DelTAConfig(
        **settings(tmp_path, max_steps=3, per_device_train_batch_size=16, beta=0.1, learning_rate=0.1, warmup_steps=0)
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    run = DelTATrainer(model(), right, args, questions(12), processing_class=tokenizer(), peft_config=lora)
    run.train()
    assert any("lora" in name for name in weights(run))
    found = seen[1]
    np.testing.assert_allclose(found.flat, slow(found), rtol=0, atol=5e-6)
    with found.policy.disable_adapter():
        assert np.abs(slow(found) - found.flat).max() > 1e-3
