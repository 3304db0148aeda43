"""The torch backend where it goes beyond the interface: memory, precision, batching of rollouts, files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.profiler import ProfilerActivity, profile

from backends.interface import BackendError, Floats, Ids, Proxy, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings, Lora, Optimizer
from backends.torch.backend import TorchEngine
from delta_cli.assets.random_model import write_qwen3
from tests.backends.torch_engine import gradients
from tests.device import DEVICE

VOCAB, EOS = 31, 0
LORA = Lora(rank=2, targets=("q_proj", "v_proj", "down_proj"))
SAMPLING = Sampling(max_tokens=24, stop_ids=(EOS,), samples=4)


@pytest.fixture
def sequences() -> Sequences:
    """Eight responses of 1 to 9 tokens; the end-of-sequence token is also the padding token."""
    rng = np.random.default_rng(0)
    lengths = [3, 1, 9, 5, 5, 2, 7, 4]
    tokens = rng.integers(0, VOCAB, sum(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens[starts[1:] - 1] = EOS
    prompts = tuple(rng.integers(1, VOCAB, size) for size in (4, 2, 3, 6, 6, 1, 5, 2))
    return Sequences(prompts, tokens, starts, temperature=0.8)


class Weighted:
    """Loss Σ c_t·logp_t with fixed c; remembers what it was called with."""

    def __init__(self, sequences: Sequences, seed: int = 1) -> None:
        self.coefficients = np.random.default_rng(seed).standard_normal(len(sequences.tokens))
        self.starts = sequences.starts
        self.seen: dict[int, Floats] = {}
        self.restarts = 0

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        lengths = np.diff(self.starts)[rows]
        for row, part in zip(rows, np.split(logp, np.cumsum(lengths)[:-1]), strict=True):
            assert row not in self.seen, "a response came twice in one attempt"
            self.seen[int(row)] = part.copy()
        slopes = np.concatenate([self.coefficients[self.starts[row] : self.starts[row + 1]] for row in rows])
        return float(slopes @ logp), slopes

    def restart(self) -> None:
        self.seen.clear()
        self.restarts += 1


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


# ----------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("settings", [{}, {"lora": LORA}, {"dtype": "bfloat16"}], ids=["full", "lora", "bfloat16"])
def test_training_sees_the_logprobs_that_were_scored(
    make: Callable[..., TorchEngine], sequences: Sequences, settings: dict[str, Any]
) -> None:
    """Bit for bit on the CPU, so that the first ratio is exactly 1; twice the same, so that runs repeat."""
    backend, surrogate = make(micro_batch_tokens=30, head_chunk_tokens=4, **settings), Weighted(sequences)
    scored = backend.score(sequences).logprobs
    np.testing.assert_array_equal(backend.score(sequences, Proxy()).logprobs, scored)
    backend.accumulate(sequences, surrogate)
    np.testing.assert_array_equal(np.concatenate([surrogate.seen[row] for row in range(len(sequences))]), scored)
    again = make(micro_batch_tokens=30, head_chunk_tokens=4, **settings)
    surrogate.restart()
    again.accumulate(sequences, surrogate)
    for name, gradient in gradients(backend).items():
        assert torch.equal(gradient, gradients(again)[name])


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU one kernel makes the whole matrix")
@pytest.mark.parametrize("tie", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_the_embeddings_gradient_is_added_by_rows(tmp_path: Path, sequences: Sequences, tie: bool) -> None:
    """As by a gradient of the whole vocabulary but for rounding, over several micro-batches; no such matrix is made."""
    shape = {"hidden": 16, "layers": 1, "head_dim": 4, "intermediate": 24}
    write_qwen3(tmp_path / "model", vocab_size=VOCAB, **shape, tie=tie, scale=0.3)
    found, dense = [], []
    for rows in (True, False):
        backend = TorchEngine(BackendSettings.of(str(tmp_path / "model"), micro_batch_tokens=20), DEVICE)
        backend._policy.causal.get_input_embeddings().sparse &= rows
        with profile(activities=[ProfilerActivity.CPU]) as done:
            backend.accumulate(sequences, Weighted(sequences))
        found.append(gradients(backend))
        dense.append(sum(event.name == "aten::embedding_dense_backward" for event in done.events()))
    assert dense[0] == 0
    assert dense[1] > 1
    for name, gradient in found[1].items():
        assert found[0][name].layout == torch.strided
        torch.testing.assert_close(found[0][name], gradient, atol=2e-6, rtol=0, msg=name)


def test_a_prompt_is_computed_once_for_all_its_responses(make: Callable[..., TorchEngine]) -> None:
    """Tokens that go through the layers, counted; the numbers are those of responses that share nothing."""
    prompts = [np.array([3, 4, 5, 6, 7]), np.array([8, 9])]
    lengths = [4, 1, 6, 3, 3, 2]
    tokens = np.random.default_rng(0).integers(0, VOCAB, sum(lengths))
    owners, starts = [0, 0, 0, 1, 1, 1], np.concatenate([[0], np.cumsum(lengths)])
    shared = Sequences(tuple(prompts[i] for i in owners), tokens, starts)
    apart = Sequences(tuple(prompts[i].copy() for i in owners), tokens, starts)
    found = []
    for sequences, counted in ((shared, 5 + 2 + sum(lengths) - 6), (apart, 3 * (5 + 2) + sum(lengths) - 6)):
        backend, seen = make(), []
        backend._policy.causal.model.layers[0].mlp.register_forward_hook(
            lambda _, inputs, __, seen=seen: seen.append(inputs[0].shape[:-1].numel())
        )
        logprobs = backend.score(sequences).logprobs
        assert sum(seen) == counted
        backend.accumulate(sequences, Weighted(sequences))
        found.append((logprobs, gradients(backend)))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    close(found[0][1], found[1][1])


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_checkpointing_recomputes_layers_and_changes_no_gradient(
    make: Callable[..., TorchEngine], sequences: Sequences, lora: Lora | None
) -> None:
    surrogate, found, calls = Weighted(sequences), [], []
    for checkpointing in (False, True):
        backend = make(gradient_checkpointing=checkpointing, lora=lora)
        backend._policy.causal.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        backend.accumulate(sequences, surrogate)
        found.append(gradients(backend))
        surrogate.restart()
    close(found[1], found[0])
    assert len(calls) == 1 + 2
    assert not any(module.training for module in backend._policy.causal.modules())
    backend.rollout(RolloutRequest((np.array([3]),), Sampling(max_tokens=2, stop_ids=())))  # the cache is back


def fail_above(backend: TorchEngine, monkeypatch: pytest.MonkeyPatch, tokens: int, error: Exception) -> list[int]:
    """Let backward passes of more than ``tokens`` tokens run out of memory, after the trunk's forward."""
    backward, sizes = backend._backward, []

    def limited(batch: Any, *rest: Any) -> float:
        sizes.append(batch.ids.size)
        loss = backward(batch, *rest)
        if batch.ids.size > tokens:
            raise error
        return loss

    monkeypatch.setattr(backend, "_backward", limited)
    return sizes


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: tried")],
    ids=["cuda", "cpu"],
)
def test_out_of_memory_halves_the_micro_batch(
    make: Callable[..., TorchEngine], sequences: Sequences, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is as if nothing had happened, the one from an earlier call included; the budget stays small."""
    plain, backend = make(), make(micro_batch_tokens=80)
    first, second = Weighted(sequences, seed=1), Weighted(sequences, seed=2)
    for surrogate in (first, second):
        expected = plain.accumulate(sequences, surrogate)
        surrogate.seen.clear()
    backend.accumulate(sequences, first)
    sizes = fail_above(backend, monkeypatch, 15, error)
    assert backend.accumulate(sequences, second) == pytest.approx(expected, abs=1e-4)
    assert second.restarts == 2
    close(gradients(backend), gradients(plain))
    assert max(sizes) > 50
    sizes.clear()
    second.seen.clear()
    backend.accumulate(sequences, second)
    assert max(sizes) <= 15


def test_a_sequence_that_does_not_fit(
    make: Callable[..., TorchEngine], sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    fail_above(backend, monkeypatch, 5, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(BackendError, match="single sequence of 12 tokens"):
        backend.accumulate(sequences, Weighted(sequences))
    with pytest.raises(RuntimeError, match="size"):  # other errors pass
        backend.recovery.run(lambda: torch.ones(2) @ torch.ones(3))


def test_bfloat16_keeps_small_updates(make: Callable[..., TorchEngine], sequences: Sequences, tmp_path: Path) -> None:
    """At a rate of 1e-6 a bfloat16 weight would not move; the float32 master does, in nearly every entry."""
    backend = make(dtype="bfloat16", optimizer=Optimizer(weight_decay=0))
    before = backend.sample_weights()
    backend.accumulate(sequences, Weighted(sequences))
    backend.step(1e-6)
    assert (backend.sample_weights() != before).mean() > 0.9
    full = make()
    found, expected = backend.score(sequences).logprobs, full.score(sequences).logprobs
    assert 1e-6 < np.abs(found - expected).max() < 0.3  # of bfloat16's order, and not zero: it is in use


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_reference_is_the_policy_as_it_was_loaded(
    make: Callable[..., TorchEngine], sequences: Sequences, dtype: str, lora: Lora | None
) -> None:
    backend = make(dtype=dtype, lora=lora, keep_reference=True)
    loaded = backend.score(sequences).logprobs
    np.testing.assert_array_equal(backend.reference(sequences), loaded)
    backend.accumulate(sequences, Weighted(sequences))
    backend.step(0.05)
    np.testing.assert_array_equal(backend.reference(sequences), loaded)
    assert np.abs(backend.score(sequences).logprobs - loaded).max() > 0.01
    backend.accumulate(sequences, Weighted(sequences))
    assert backend.step(0.0) > 0, "adapters train on after they were switched off"


# ------------------------------------------------------------------------------- files and mistakes


@pytest.mark.parametrize("file", ["weights.safetensors", "moments.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damaged_checkpoints_change_nothing(
    make: Callable[..., TorchEngine], sequences: Sequences, file: str, damage: str, tmp_path: Path
) -> None:
    backend = make()
    backend.accumulate(sequences, Weighted(sequences))
    backend.step(0.01)
    backend.save(tmp_path)
    path = tmp_path / file
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "gone":
        path.unlink()
    else:
        (tmp_path / "other").mkdir()
        other = make(lora=LORA)
        other.accumulate(sequences, Weighted(sequences))
        other.step(0.01)
        other.save(tmp_path / "other")
        (tmp_path / "other" / file).rename(path)
    fresh = make()
    before = fresh.score(sequences).logprobs
    with pytest.raises(BackendError, match="another model" if damage == "other" else "missing or damaged") as error:
        fresh.load(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    np.testing.assert_array_equal(fresh.score(sequences).logprobs, before)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT, in this test's own call
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments .'fine_tune_type':UserWarning")  # mlx-lm's
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_of_adapters(
    make: Callable[..., TorchEngine], sequences: Sequences, torch_folder: Path, dtype: str, tmp_path: Path
) -> None:
    """Merged weights are the base plus the adapters' product; PEFT opens the adapter on the base model."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend = make(lora=LORA, dtype=dtype)
    backend.accumulate(sequences, Weighted(sequences))
    backend.step(0.05)
    trained = {name: weight.detach().cpu().numpy() for name, weight in backend._optimizer.weights.items()}
    scored = backend.score(sequences).logprobs
    backend.export(tmp_path)
    np.testing.assert_array_equal(backend.score(sequences).logprobs, scored)

    modes = {file.suffix: file.stat().st_mode for file in tmp_path.rglob("*.*")}
    assert modes[".safetensors"] == modes[".json"]
    assert not (tmp_path / "adapter" / "README.md").exists()

    prefix = "model.layers.1.mlp.down_proj"
    a, b = (trained[f"{prefix}.lora_{part}.default.weight"] for part in "AB")
    base = torch.from_numpy(load_file(torch_folder / "model.safetensors")[f"{prefix}.weight"])
    base = base.to(getattr(torch, dtype)).float().numpy()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).get_parameter(f"{prefix}.weight")
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(merged.detach().numpy(), base + LORA.scale * b @ a, rtol=tolerance, atol=1e-6)

    model = AutoModelForCausalLM.from_pretrained(torch_folder, dtype=getattr(torch, dtype))
    adapted = PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    loaded = adapted.get_parameter(f"base_model.model.{prefix}.lora_A.default.weight").detach().float().numpy()
    np.testing.assert_allclose(loaded, a, atol=1e-6)


def test_ids_that_the_model_does_not_have(make: Callable[..., TorchEngine], sequences: Sequences) -> None:
    backend = make()
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        backend.rollout(
            RolloutRequest(
                (
                    np.array([1]),
                    np.array([], dtype=np.int64),
                ),
                SAMPLING,
            )
        )
    for bad in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"token id {bad} .* vocabulary of {VOCAB}"):
            backend.rollout(RolloutRequest((np.array([1, bad]),), SAMPLING))
        tokens = sequences.tokens.copy()
        tokens[3] = bad
        with pytest.raises(ValueError, match=f"token id {bad} "):
            backend.score(Sequences(sequences.prompts, tokens, sequences.starts))


def test_nothing_to_do(make: Callable[..., TorchEngine]) -> None:
    """No prompts, and responses without tokens: empty results rather than errors."""
    backend = make()
    drawn = backend.rollout(RolloutRequest((), SAMPLING))
    assert len(drawn.tokens) == 0
    assert drawn.starts.tolist() == [0]
    empty = Sequences((np.array([1]),), np.empty(0, dtype=np.int64), np.array([0, 0]))
    scores = backend.score(empty, Proxy())
    assert scores.features is not None
    assert scores.features.weighted_sum(np.empty((2, 0))).tolist() == [[0.0] * 16] * 2
    assert backend.accumulate(empty, Weighted(empty)) == 0
    backend.close()
    backend.close()


def test_only_repeatable_kernels_compute_a_gradient_if_asked(
    make: Callable[..., TorchEngine], sequences: Sequences
) -> None:
    """While it is computed, and not afterwards; the gradient is the same."""
    seen, norms = list[bool](), list[float]()
    for wanted in (False, True):
        engine = make(deterministic=wanted)

        def objective(logp: np.ndarray, _: np.ndarray) -> tuple[float, np.ndarray]:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return float(logp.sum()), np.ones_like(logp)

        engine.accumulate(sequences, objective)
        assert not torch.are_deterministic_algorithms_enabled()
        norms.append(engine.step(0.0))
    assert seen == len(seen) // 2 * [False] + len(seen) // 2 * [True]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
