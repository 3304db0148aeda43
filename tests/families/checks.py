"""Check everything a run does with a family's tiny model, with transformers and autograd as the oracle."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import peft
import pytest
import torch
import transformers
from mlx_lm.utils import load_adapters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from backends import registry
from backends.interface import BackendError, Engine, Floats, RolloutRequest, Sampling, Sequences
from backends.mlx.backend import MlxEngine
from backends.mlx.model import load
from backends.settings import BackendSettings, Lora
from backends.torch.backend import TorchEngine
from backends.torch.decoder import Decoder
from tests.conformance.objectives import Linear
from tests.families.families import VOCAB, Family, build, for_mlx

OWN = 2e-5  # nats, within one library
ATEN = torch.ops.aten
WAITING = {ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.equal.default}
WAITING |= {ATEN._unique2.default, ATEN.repeat_interleave.Tensor}
PROMPT, LENGTH = 4, 14  # longer than the sliding windows of the models


@dataclass(frozen=True)
class Outcome:
    """Whether a backend trains a family."""

    passed: bool
    reason: str = ""  # the backend's error if it refuses the family, or why the family was not tried
    tried: bool = True


def one_response() -> Sequences:
    """A prompt and a response of ids that are in every model's vocabulary."""
    ids = np.random.default_rng(3).integers(2, VOCAB, PROMPT + LENGTH)
    return Sequences((ids[:PROMPT],), ids[PROMPT:], np.array([0, LENGTH]))


def expected(model: Any, sequences: Sequences) -> torch.Tensor:
    """Log-probabilities [n] of the response by transformers, with the autograd graph."""
    ids = torch.from_numpy(np.concatenate([sequences.prompts[0], sequences.tokens]))
    log = model(ids[None]).logits[0].log_softmax(-1)
    return log[PROMPT - 1 : -1].gather(1, ids[PROMPT:, None])[:, 0]


def try_family(family: Family, backend: str, folder: Path) -> Outcome:
    """Do everything that a run does. Raises AssertionError if a number is wrong, not if the model is refused."""
    if backend == "mlx" and not family.mlx_opens:
        return Outcome(False, "mlx-lm does not open a folder that transformers 5 writes", tried=False)
    model = build(family, folder / "model")
    if backend == "mlx":
        for_mlx(family, folder / "model")
    sequences = one_response()
    known = expected(model, sequences)
    try:
        engine = registry.create(backend, BackendSettings.of(str(folder / "model")))
    except BackendError as error:
        named = (f"the model in {folder / 'model'}", f"model '{folder / 'model'}'")
        return Outcome(False, str(error).replace(named[0], "it").replace(named[1], "it"))
    _score_and_draw(engine, sequences, known.detach().numpy(), family.apart if backend == "mlx" else OWN)
    _update(engine, sequences, model, known, 5 * family.apart)
    engine.close()
    _checkpointed(backend, folder / "model", sequences)
    for dora in (False, True):
        _adapters(family, backend, folder, sequences, dora)
    return Outcome(True)


class _Watch(TorchDispatchMode):
    """Collects the operations whose result's shape or value the host has to wait for."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = args[1] if call in (ATEN.index.Tensor, ATEN.index_put_.default) else ()
        if call in WAITING or any(place is not None and place.dtype == torch.bool for place in places):
            self._found.add(str(call))
        return call(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched_steps() -> Iterator[set[str]]:
    """Inside, collects the operations of the last decoding step in torch that would wait for a GPU."""
    found: set[str] = set()
    plain = Decoder._forward

    def forward(*args: Any) -> Any:
        found.clear()
        with _Watch(found):
            return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_forward", forward)
        yield found


def _score_and_draw(engine: Engine, sequences: Sequences, known: Floats, apart: float) -> None:
    np.testing.assert_allclose(engine.score(sequences).logprobs, known, rtol=0, atol=apart)
    prompts = (sequences.prompts[0], sequences.tokens[:7])
    with watched_steps() as waits:
        drawn = engine.rollout(RolloutRequest(prompts, Sampling(max_tokens=8, stop_ids=(), samples=2)))
    known = isinstance(engine, TorchEngine) and engine._policy.config.model_type == "gemma3n_text"
    assert known or not waits, f"CUDA graphs cannot record a step that waits for the device in {sorted(waits)}"
    repeated = tuple(prompt for prompt in prompts for _ in range(2))
    scored = engine.score(Sequences(repeated, drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, rtol=0, atol=OWN)


def _update(engine: Engine, sequences: Sequences, model: Any, known: torch.Tensor, apart: float) -> None:
    """The gradient norm is that of autograd through transformers, and a step raises the objective."""
    weights = np.random.default_rng(4).normal(size=LENGTH)
    (known * torch.from_numpy(weights).float()).sum().backward()
    squares = [weight.grad.double().square().sum() for weight in model.parameters() if weight.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt())
    before = engine.score(sequences).logprobs
    engine.accumulate(sequences, Linear(sequences.starts, weights))
    np.testing.assert_allclose(engine.step(1e-5), norm, rtol=apart)
    assert (engine.score(sequences).logprobs - before) @ weights > 0


def _checkpointed(backend: str, folder: Path, sequences: Sequences) -> None:
    """Gradient checkpointing changes no gradient."""
    weights = np.random.default_rng(4).normal(size=LENGTH)
    found: list[dict[str, Floats]] = []
    calls = {False: 0, True: 0}  # of attention and recurrent layers, in torch
    for checkpointing in calls:
        engine = registry.create(backend, BackendSettings.of(str(folder), gradient_checkpointing=checkpointing))
        if isinstance(engine, TorchEngine):
            for module in engine._policy.causal.modules():
                if hasattr(module, "layer_idx") and not isinstance(module, GradientCheckpointingLayer):
                    module.register_forward_pre_hook(
                        lambda *_, kind=checkpointing: calls.update({kind: calls[kind] + 1})
                    )
        engine.accumulate(sequences, Linear(sequences.starts, weights))
        found.append(_gradient(engine))
        engine.close()
    assert calls[True] == 2 * calls[False], "a layer is computed again in the backward pass"
    assert found[0].keys() == found[1].keys()
    for name, plain in found[0].items():
        np.testing.assert_allclose(found[1][name], plain, rtol=0, atol=1e-6 * np.abs(plain).max(), err_msg=name)


def _gradient(engine: Engine) -> dict[str, Floats]:
    """An engine's accumulated gradient, by name."""
    if isinstance(engine, MlxEngine):
        return {name: np.array(part) for name, part in engine.optimizer.gradient.items()}
    assert isinstance(engine, TorchEngine)
    weights = engine._optimizer.weights.items()
    return {name: weight.grad.cpu().numpy() for name, weight in weights if weight.grad is not None}


def _adapters(family: Family, backend: str, folder: Path, sequences: Sequences, dora: bool) -> None:
    """Adapters train; the exported model equals the trained one, and so do the adapters in PEFT and mlx-lm."""
    lora = Lora(rank=2, targets=family.targets, dora=dora)
    engine = registry.create(backend, BackendSettings.of(str(folder / "model"), lora=lora))
    before = engine.score(sequences).logprobs
    for _ in range(2):
        engine.accumulate(sequences, Linear(sequences.starts, np.ones(LENGTH)))
        engine.step(0.01)
    trained = engine.score(sequences).logprobs
    assert (trained - before).sum() > family.gain
    engine.export(folder / "exported")
    engine.close()
    np.testing.assert_allclose(_reopened(backend, folder / "exported", sequences), trained, rtol=0, atol=OWN)
    _exchange(family, folder, sequences, trained)
    shutil.rmtree(folder / "exported")


def _exchange(family: Family, folder: Path, sequences: Sequences, trained: Floats) -> None:
    """PEFT and mlx-lm compute the same with the adapters on their own base."""
    adapter = str(folder / "exported" / "adapter")
    build(family, folder / "for peft")
    model = by_transformers(folder / "for peft")
    with torch.no_grad():
        found = expected(peft.PeftModel.from_pretrained(model, adapter), sequences).numpy()
    np.testing.assert_allclose(found, trained, rtol=0, atol=2 * family.apart)
    if family.mlx and family.mlx_opens:
        build(family, folder / "for mlx")
        for_mlx(family, folder / "for mlx")
        opened = load_adapters(load(str(folder / "for mlx")).model, adapter)
        ids = np.concatenate([sequences.prompts[0], sequences.tokens])
        log = np.array(opened(mx.array(ids[None]))[0], dtype=np.float64)
        log -= np.log(np.exp(log).sum(-1, keepdims=True))
        found = log[np.arange(PROMPT - 1, PROMPT - 1 + LENGTH), sequences.tokens]
        np.testing.assert_allclose(found, trained, rtol=0, atol=2 * family.apart)


def by_transformers(folder: Path) -> Any:
    """What transformers opens for text: the language model, or the image-text model if it knows no other."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = transformers.AutoModelForCausalLM if known else transformers.AutoModelForImageTextToText
    return kind.from_pretrained(folder, config=config)


def _reopened(backend: str, folder: Path, sequences: Sequences) -> Floats:
    if backend != "mlx":
        with torch.no_grad():
            return expected(by_transformers(folder), sequences).numpy()
    engine = registry.create(backend, BackendSettings.of(str(folder)))
    try:
        return engine.score(sequences).logprobs
    finally:
        engine.close()
