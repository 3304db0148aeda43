"""The coefficients are those of the slow oracle and of ``delta``'s own path, whatever TRL does with the batch."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOTrainer

from backends.interface import Proxy, Sequences
from backends.registry import create
from backends.settings import BackendSettings
from delta_cli.credit import token_coefficients
from delta_cli.integrations.trl import DelTAArguments, DelTAConfig, DelTATrainer, scoring, trainer
from delta_cli.integrations.trl import credit as credit_module
from delta_cli.integrations.trl.credit import BatchCredit
from tests.credit import oracle
from tests.integrations.tiny import MODEL, model, questions, right, settings, tokenizer, weights

Batch = dict[str, Any]


@dataclass
class Seen:
    """A generation batch as the credit got it, what it gave, and the policy at that moment."""

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


def own(seen: Seen, proxy: Proxy, temperature: float) -> np.ndarray:
    """The weights that ``delta train`` computes on the same batch: packed rows, its own attention and head."""
    assert "tool_mask" not in seen.batch
    prompts = [
        ids[mask.bool()].numpy() for ids, mask in zip(seen.batch["prompt_ids"], seen.batch["prompt_mask"], strict=True)
    ]
    lengths = seen.counted.sum(1).numpy()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = seen.batch["completion_ids"][seen.counted].numpy()
    backend = create("cpu", BackendSettings.of(MODEL))
    scores = backend.score(Sequences(tuple(prompts), tokens, starts, temperature), proxy)
    found = token_coefficients(scores.features, seen.batch["advantages"].double().numpy(), starts)
    backend.close()
    return found.weights


@pytest.mark.parametrize("mini_batches", [1, 2], ids=["forward of ours", "forward of TRL's"])
@pytest.mark.parametrize("proxy", ["output_row", "hidden_exact", "hidden_topk"])
def test_they_are_the_oracles_and_deltas(proxy: Any, mini_batches: int, seen: list[Seen], tmp_path: Path) -> None:
    rows = {"per_device_train_batch_size": 16 // mini_batches, "steps_per_generation": mini_batches}
    train(tmp_path, delta_proxy=proxy, delta_topk=5, temperature=0.8, **rows)
    [found] = seen
    np.testing.assert_allclose(found.flat, own(found, Proxy(proxy, 5), 0.8), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.flat, slow(found, proxy, 0.8), rtol=0, atol=1e-5)
    assert found.flat.std() > 0.01
    assert abs(found.flat.mean() - 1) < 1e-6
    assert (found.weights[~found.counted] == 1).all()


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


ABLATIONS: dict[str, dict[str, Any]] = {
    "K = 0": {"refinements": 0},
    "K = 2": {"refinements": 2},
    "range": {"lambda_min": 0.5, "lambda_max": 1.5},
    "temperature": {"temperature": 2.0},
    "hard": {"score": "hard"},
    "within": {"contrast": "within"},
    "alpha": {"weighting": "alpha"},
    "top": {"weighting": "top", "share": 0.3},
    "bottom": {"weighting": "bottom"},
    "count": {"normalise": "count"},
    "group": {"scope": "group"},
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_option_reaches_the_core(name: str, rescored: Rescored) -> None:
    arguments = {f"delta_{key}": value for key, value in ABLATIONS[name].items()}
    found = rescored.seen(rescored.credit(**arguments))
    options = {key: value for key, value in ABLATIONS[name].items() if key != "scope"}
    groups = {"groups": np.arange(16) // 4} if name == "group" else {}
    np.testing.assert_allclose(found.flat, slow(found, **options, **groups), rtol=0, atol=1e-5)
    assert found.flat.std() > 0.01


def test_truncated_completions_are_no_part_of_it(seen: list[Seen], tmp_path: Path) -> None:
    train(tmp_path, mask_truncated_completions=True, max_completion_length=21)
    [found] = seen
    left = found.counted.any(1)
    assert 0 < int(left.sum()) < 16
    np.testing.assert_allclose(found.flat, slow(found), rtol=0, atol=2e-6)
    assert (found.weights[~left] == 1).all()


@pytest.mark.parametrize(
    ("device_share", "host_share"), [(0, 1), (0.4, 0.3), (0, 0)], ids=["host", "in three places", "computed anew"]
)
@pytest.mark.parametrize("scope", ["batch", "group"])
def test_bytes_decide_where_features_are_not_what_they_say(
    scope: str, device_share: float, host_share: float, rescored: Rescored
) -> None:
    whole = rescored.credit(delta_scope=scope)
    bytes_of_all = int(whole.counted.sum()) * 64 * 4
    budgets = {
        "delta_feature_bytes": int(bytes_of_all * device_share),
        "delta_feature_host_bytes": int(bytes_of_all * host_share),
    }
    split = rescored.credit(delta_scope=scope, **budgets)
    np.testing.assert_allclose(split.weights, whole.weights, rtol=0, atol=1e-6)
    assert whole.weights.std() > 0.01


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


class Wide(TorchDispatchMode):
    """The largest number of rows of any tensor whose last dimension is the vocabulary, but for the head's [64, V]."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.dim() > 1 and result.shape[-1] == 258 and len(result) != 64:
            self.rows = max(self.rows, result.numel() // 258)
        return result


@pytest.mark.parametrize("proxy", ["output_row", "hidden_topk", "hidden_exact"])
def test_logits_of_all_tokens_never_exist(proxy: str, rescored: Rescored, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's own forward is TRL's and left out; what we add sees a chunk of tokens at a time."""
    monkeypatch.setattr(scoring, "HEAD_CHUNK", 10)
    watch = Wide()
    rows = scoring.FeatureScorer._rows

    def watched(self: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert len(hidden) > 100
        with watch:
            return rows(self, hidden, targets)

    monkeypatch.setattr(scoring.FeatureScorer, "_rows", watched)
    rescored.credit(delta_proxy=proxy)
    assert watch.rows == (0 if proxy == "output_row" else 10)


def with_tools(prompts: list[str], owner: Any) -> dict[str, Any]:
    """Completions half of which hold ten tokens that a tool wrote."""
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
    """vLLM itself is not installed: what it hands TRL is, and the forward that TRL then makes is ours too."""
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


def test_advantages_are_multiplied_and_kept_for_the_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each optimizer step of a generation batch gets the rows' own coefficients, shuffled with them."""
    given: list[Batch] = []
    loss = GRPOTrainer._compute_loss

    def watch(self: Any, model: Any, inputs: Batch) -> Any:
        given.append(inputs)
        return loss(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watch)
    batches: list[tuple[Batch, torch.Tensor]] = []
    credit = trainer.credit

    def spy(output: Batch, *rest: Any) -> Any:
        result = credit(output, *rest)
        batches.append((output | {"advantages": output["advantages"].clone()}, result.weights))
        return result

    monkeypatch.setattr(trainer, "credit", spy)
    train(tmp_path, per_device_train_batch_size=4, steps_per_generation=4, num_iterations=2, max_steps=8)
    [(batch, coefficients)] = batches
    assert len(given) == 8
    rows = {tuple(ids.tolist()): row for row, ids in enumerate(batch["completion_ids"])}
    for inputs in given:
        for ids, advantages in zip(inputs["completion_ids"], inputs["advantages"], strict=True):
            same = [row for row, other in enumerate(batch["completion_ids"]) if torch.equal(other, ids)]
            expected = [batch["advantages"][row] * coefficients[row] for row in same]
            assert any(torch.equal(advantages, each) for each in expected)
    assert len(rows) > 4
