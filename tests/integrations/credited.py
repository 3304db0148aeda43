"""Batches that TRL credits, and the slow oracle of their coefficients."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from delta_cli.integrations.trl import DelTAArguments, DelTAConfig, DelTATrainer, scoring, trainer
from delta_cli.integrations.trl.credit import BatchCredit
from tests.credit import oracle
from tests.integrations.tiny import model, questions, right, settings, tokenizer

Batch = dict[str, Any]


@dataclass
class Seen:
    """A generation batch, the weights that it was given, and the policy at that moment."""

    batch: Batch
    weights: torch.Tensor  # [B, T]
    policy: Any

    @property
    def counted(self) -> torch.Tensor:
        """Which tokens the loss counts, [B, T]."""
        mask = self.batch["completion_mask"] * self.batch.get("tool_mask", 1)
        return mask.bool()

    @property
    def flat(self) -> np.ndarray:
        """The weights of the tokens that count, flat and in order."""
        return self.weights[self.counted].double().numpy()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Every batch that is credited while the test runs."""
    found: list[Seen] = []
    credit, init = trainer.credit, trainer.FeatureScorer.__init__
    policy: list[Any] = []

    def remember(self: Any, owner: Any, arguments: Any) -> None:
        policy[:] = [owner.model]
        init(self, owner, arguments)

    def spy(output: Batch, *arguments: Any) -> Any:
        before = {name: value.clone() if torch.is_tensor(value) else value for name, value in output.items()}
        result = credit(output, *arguments)
        found.append(Seen(before, result.weights, copy.deepcopy(policy[0])))
        return result

    monkeypatch.setattr(trainer.FeatureScorer, "__init__", remember)
    monkeypatch.setattr(trainer, "credit", spy)
    return found


def train(folder: Path, rollout: Any = None, **changes: Any) -> Any:
    """A run of our trainer on the embedded task."""
    args = DelTAConfig(**{**settings(folder, max_steps=1, per_device_train_batch_size=16), **changes})
    data = questions(4)
    run = DelTATrainer(model(), right, args, data, processing_class=tokenizer(), rollout_func=rollout)
    run.train()
    return run


@torch.no_grad()
def slow(seen: Seen, proxy: str = "output_row", drawn_at: float = 1.0, k: int = 5, **options: Any) -> np.ndarray:
    """The oracle's weights of the tokens that count, from a forward of each row alone, in float64."""
    policy = (seen.policy.get_base_model() if hasattr(seen.policy, "peft_config") else seen.policy).double().eval()
    head = policy.get_output_embeddings().weight
    hidden, logps, lengths = [], [], []
    for row in range(len(seen.weights)):
        prompt = seen.batch["prompt_ids"][row][seen.batch["prompt_mask"][row].bool()]
        present = seen.batch["completion_mask"][row].bool()
        response = seen.batch["completion_ids"][row][present]
        counted = seen.counted[row][present]
        lengths.append(int(counted.sum()))
        if not len(response):
            continue
        states = policy.base_model(torch.cat([prompt, response])[None]).last_hidden_state[0]
        states = states[len(prompt) - 1 : -1][counted]
        chosen = (states @ head.T / drawn_at).log_softmax(-1)
        response = response[counted]
        hidden.append(states if proxy == "output_row" else direction(chosen, response, head, proxy, k))
        logps.append(chosen.gather(1, response[:, None])[:, 0])
    v, lp = torch.cat(hidden).numpy(), torch.cat(logps).numpy()
    if proxy != "output_row":
        lp = np.full(len(lp), -np.inf)  # the oracle multiplies by 1 − p
    advantages = seen.batch["advantages"].double().tolist()
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return np.array(oracle.coefficients(v, lp, advantages, starts, **options).weights)


def direction(logp: torch.Tensor, targets: torch.Tensor, head: torch.Tensor, proxy: str, k: int) -> torch.Tensor:
    """W_y − Σ q_j·W_j over the vocabulary, or over the k likeliest."""
    q = logp.exp()
    if proxy == "hidden_topk":
        kept = q.topk(k).indices
        q = torch.zeros_like(q).scatter(1, kept, q.gather(1, kept))
        q = q / q.sum(1, keepdim=True)
    return head[targets] - q @ head


@dataclass
class Rescored:
    """A generation batch in two chunks of a trainer whose weights stay, to be credited again in other ways."""

    trainer: Any
    batch: Batch  # with advantages [B]

    def credit(self, **changes: Any) -> BatchCredit:
        """The credit with these arguments, by a forward of its own."""
        arguments = DelTAArguments(**changes)
        scored = self.score(arguments, self.batch)
        rng = np.random.default_rng(0)
        return trainer.credit(self.batch, scored, arguments.delta_section(), self.trainer.accelerator, 4, rng)

    def score(self, arguments: DelTAArguments, batch: Batch, entropies: bool = False) -> scoring.ScoredCompletions:
        """The features of some of the rows, in chunks of eight."""
        Accelerator(cpu=True)  # a config that another test made has reset the state that all accelerators share
        scorer = scoring.FeatureScorer(self.trainer, arguments)
        ids, masks = (
            torch.cat([batch[f"{part}_{name}"] for part in ("prompt", "completion")], dim=1) for name in ("ids", "mask")
        )
        with scorer.scoring():
            forward = super(DelTATrainer, self.trainer)._get_per_token_logps_and_entropies
            width = batch["completion_ids"].shape[1]
            return scorer.score(forward, self.trainer.model, ids, masks, width, batch_size=8, compute_entropy=entropies)

    def seen(self, found: BatchCredit) -> Seen:
        """What the slow oracle needs."""
        return Seen(self.batch, found.weights, copy.deepcopy(self.trainer.model))


@pytest.fixture(scope="module")
def rescored(tmp_path_factory: pytest.TempPathFactory) -> Rescored:
    """Four prompts × four completions, right and wrong ones among them."""
    with pytest.MonkeyPatch.context() as patched:
        found: list[Batch] = []
        credit = trainer.credit

        def spy(output: Batch, *rest: Any) -> Any:
            found.append(
                {name: value.clone() for name, value in output.items() if torch.is_tensor(value) and value.dim()}
            )
            return credit(output, *rest)

        patched.setattr(trainer, "credit", spy)
        run = train(tmp_path_factory.mktemp("rescored"), learning_rate=0.0, delta_rollouts_every=0)
    assert found[0]["advantages"].count_nonzero()
    return Rescored(run, found[0])
