"""The interface's methods on the numpy model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from backends.arrays import Doubles
from backends.batching import PaddedBatch, micro_batches
from backends.fake import folder as model_folder
from backends.fake.qwen3 import Back, NumpyWeights, Qwen3
from backends.fake.sampling import DrawnResponse, FakeRollout, log_softmax
from backends.interface import (
    BackendError,
    Completions,
    FileDigests,
    Floats,
    Ids,
    Objective,
    OnFinished,
    Proxy,
    RolloutRequest,
    Scores,
    Sequences,
    WriteState,
    starts_of,
    token_index,
)
from backends.local_engine import LocalEngine, clip_factor, peak_resident
from backends.regions import ResponseRegions
from backends.settings import BackendSettings, Optimizer
from backends.weights import refuse_nonfinite

STATE = "state.safetensors"


class FakeFeatures:
    """Token features as one float64 array; ignores ``feature_bytes``."""

    def __init__(self, vectors: Doubles) -> None:
        self.vectors = vectors  # [N, H]

    def weighted_sum(self, weights: Floats) -> Floats:
        return np.asarray(weights, dtype=np.float64) @ self.vectors

    def project(self, direction: Floats) -> Floats:
        projected: Floats = self.vectors @ np.asarray(direction, dtype=np.float64)
        return projected

    def squared_norms(self) -> Floats:
        squares: Floats = np.square(self.vectors).sum(1)
        return squares

    def slice(self, start: int, stop: int) -> FakeFeatures:
        return FakeFeatures(self.vectors[start:stop])

    def close(self) -> None:
        self.vectors = self.vectors[:0]


class FakeEngine(LocalEngine):
    """A Qwen3 model trained as a whole in float64; see ``backends.interface.Engine``."""

    def __init__(self, settings: BackendSettings, name: str) -> None:
        if settings.model.lora is not None:
            raise BackendError("model.lora: the fake backend trains whole models; choose --backend cpu or mlx for LoRA")
        if settings.model.dtype != "float32":
            raise BackendError(
                f"model.dtype: the fake backend computes in float64 and cannot mimic {settings.model.dtype}; "
                "set float32 or choose --backend cpu or mlx"
            )
        if settings.optimizer.moments != "float32":
            raise BackendError(
                f'update.moments = "{settings.optimizer.moments}": the fake backend rounds nothing; '
                "set float32 or choose --backend cpu"
            )
        super().__init__(settings, name)
        self.model = Qwen3(*model_folder.read(settings.model.path))
        self.optimizer = FakeAdamW(settings.optimizer, self.model.weights)
        self.parameters = self.trainable = sum(weight.size for weight in self.model.weights.values())
        self.vocabulary = len(self.model.weights[self.model.head])
        self.initial: NumpyWeights = {}
        if settings.keep_reference:
            self.initial = {name: weight.copy() for name, weight in self.model.weights.items()}

    # ------------------------------------------------------------------------------- rollout

    def _rollout(self, request: RolloutRequest, on_finished: OnFinished | None) -> Completions:
        count = len(request)
        finished: dict[int, DrawnResponse] = {}
        for first in range(0, count, self.settings.rollout_batch):
            places = np.arange(first, min(first + self.settings.rollout_batch, count))
            finished |= FakeRollout(self.model, request, places, on_finished, self._vectors).run()
        responses = [finished[place] for place in range(count)]
        tokens, own = [each.tokens for each in responses], [each.own for each in responses]
        pairs = list(zip(tokens, own, strict=True))
        regions = ResponseRegions.of(tokens, own) if request.turns is not None else None
        features = None
        if request.proxy:
            nothing = np.zeros((0, self.model.config.hidden))
            features = FakeFeatures(np.concatenate([nothing, *(response.vectors for response in responses)]))
        return Completions(
            tokens=np.concatenate([np.zeros(0, np.int64), *(ids[marks] for ids, marks in pairs)]),
            starts=starts_of([int(marks.sum()) for marks in own]),
            logprobs=_float32([response.logprobs for response in responses]),
            truncated=np.array([response.truncated for response in responses], dtype=bool),
            version=self.version,
            entropies=_float32([response.entropies for response in responses]) if request.entropies else None,
            features=features,
            regions=regions,
        )

    # --------------------------------------------------------------------------------- score

    def _score(self, sequences: Sequences, proxy: Proxy | None) -> Scores:
        count = len(sequences.tokens)
        logprobs, entropies = np.zeros(count), np.zeros(count)
        vectors = np.zeros((count, self.model.config.hidden if proxy else 0))
        for batch in micro_batches(sequences, self.settings.memory.micro_batch_tokens):
            self.interrupt()
            flat = token_index(sequences.starts, batch.rows)
            states, _ = self._states(batch)
            for part, logp in self._head(states, sequences.temperature):
                h, y, at = states[part], batch.targets[part], flat[part]
                logprobs[at] = logp[np.arange(len(y)), y]
                entropies[at] = -(np.exp(logp) * logp).sum(1)
                if proxy:
                    vectors[at] = self._vectors(proxy, h, logp, y)
        features = FakeFeatures(vectors) if proxy else None
        return Scores(logprobs.astype(np.float32), entropies.astype(np.float32), features)

    def _reference(self, sequences: Sequences) -> Floats:
        with self._as_loaded():
            return self._score(sequences, None).logprobs

    def _hidden_residuals(self, sequences: Sequences) -> Floats:
        found = np.zeros(len(sequences.tokens), np.float32)
        for batch in micro_batches(sequences, self.settings.memory.micro_batch_tokens):
            present, _ = self._states(batch)
            with self._as_loaded():
                loaded, _ = self._states(batch)
            found[token_index(sequences.starts, batch.rows)] = np.linalg.norm(present - loaded, axis=1)
        return found

    @contextmanager
    def _as_loaded(self) -> Iterator[None]:
        """With the weights that were loaded."""
        current, self.model.weights = self.model.weights, self.initial
        try:
            yield
        finally:
            self.model.weights = current

    def _states(self, batch: PaddedBatch) -> tuple[Doubles, Back]:
        """Post-norm hidden states [n, H] that predict the targets, and a function for their gradient."""
        positions = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
        states, back_trunk = self.model.trunk(
            batch.ids, positions
        )  # attention is causal, so no token sees padding on the right

        def back(dh: Doubles) -> Doubles:
            dstates = np.zeros_like(states)
            dstates[batch.predicts] = dh
            return back_trunk(dstates)

        return states[batch.predicts], back

    def _head(self, states: Doubles, temperature: float) -> Iterator[tuple[slice, Doubles]]:
        """The head in chunks: the slice of states, and their log-probabilities [c, V]."""
        rows = self.model.weights[self.model.head]
        for first in range(0, len(states), self.settings.memory.head_chunk_tokens):
            part = slice(first, first + self.settings.memory.head_chunk_tokens)
            yield part, log_softmax(states[part] @ rows.T / temperature)

    def _vectors(self, proxy: Proxy, h: Doubles, logp: Doubles, y: Ids) -> Doubles:
        """Token-gradient proxies [c, H] (method, sections 2 and 'Richer proxies')."""
        if proxy.kind == "output_row":
            return -np.expm1(logp[np.arange(len(y)), y])[:, None] * h
        q = np.exp(logp)
        if proxy.kind == "hidden_topk" and proxy.k < q.shape[1]:
            np.put_along_axis(q, np.argpartition(-q, proxy.k - 1, axis=1)[:, proxy.k :], 0.0, axis=1)
            q /= q.sum(1, keepdims=True)
        rows = self.model.weights[self.model.head]
        return rows[y] - q @ rows

    # -------------------------------------------------------------------------------- update

    def _keep_gradient(self) -> Callable[[], None]:
        kept = {name: grad.copy() for name, grad in self.model.grads.items()}

        def restore() -> None:
            for name, grad in kept.items():
                self.model.grads[name][:] = grad

        return restore

    def _accumulate(self, sequences: Sequences, objective: Objective) -> float:
        total = 0.0
        for batch in micro_batches(sequences, self.settings.memory.micro_batch_tokens):
            self.interrupt()
            states, back = self._states(batch)
            logp = np.zeros(len(batch.targets))
            for part, distribution in self._head(states, sequences.temperature):
                y = batch.targets[part]
                logp[part] = distribution[np.arange(len(y)), y]
            loss, gradient = objective(logp, batch.rows)
            total += float(loss)
            back(self._back_head(states, batch.targets, np.asarray(gradient), sequences.temperature))
        return total

    def _back_head(self, states: Doubles, targets: Ids, gradient: Floats, temperature: float) -> Doubles:
        """From dloss/dlogp [n] to dloss/dstates [n, H]; d logp(y) / d logits = onehot(y) − p."""
        rows, grad = self.model.weights[self.model.head], self.model.grads[self.model.head]
        dstates = np.zeros_like(states)
        for part, distribution in self._head(states, temperature):
            y, g = targets[part], gradient[part]
            dlogits = -g[:, None] * np.exp(distribution)
            dlogits[np.arange(len(y)), y] += g
            dlogits /= temperature
            dstates[part] = dlogits @ rows
            grad += dlogits.T @ states[part]
        return dstates

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        norm = self.optimizer.step(self.model.weights, self.model.grads, learning_rate, scale)
        self.version += 1
        self._drop_gradient()
        return norm

    def _drop_gradient(self) -> None:
        for grad in self.model.grads.values():
            grad[:] = 0.0

    # --------------------------------------------------------------------------- save, export

    def _state(self) -> dict[str, NumpyWeights]:
        return {"weight": self.model.weights, "mean": self.optimizer.mean, "square": self.optimizer.square}

    def sample_weights(self) -> Floats:
        return np.concatenate([weight.ravel()[:16] for weight in self.model.weights.values()]).astype(np.float32)

    def _saved(self) -> NumpyWeights:
        state = {f"{kind}.{name}": array for kind, part in self._state().items() for name, array in part.items()}
        return state | {"steps": np.array([self.optimizer.steps])}

    def save(self, folder: Path) -> FileDigests:
        save_file(self._saved(), folder / STATE)
        return {}

    def copy_state(self, room: int) -> WriteState | None:
        if sum(array.nbytes for array in self._saved().values()) > room:
            return None
        copied = {name: array.copy() for name, array in self._saved().items()}

        def write(folder: Path) -> FileDigests:
            save_file(copied, folder / STATE)
            return {}

        return write

    def load(self, folder: Path) -> None:
        path = folder / STATE
        if not path.is_file():
            raise BackendError(f"{path}: does not exist; resume from a run that the fake backend wrote")
        try:
            stored = load_file(path)
        except SafetensorError as error:
            raise BackendError(f"{path}: cannot be read ({error}); resume from another checkpoint") from error
        refuse_nonfinite(path, (name for name, array in stored.items() if not np.isfinite(array).all()))
        for kind, part in self._state().items():
            for name, array in part.items():
                found = stored.get(f"{kind}.{name}")
                if found is None or found.shape != array.shape or "steps" not in stored:
                    raise BackendError(
                        f"{path}: {kind}.{name} does not fit {self.settings.model.path}; resume with the model it was "
                        "saved from"
                    )
                array[:] = found
        self.optimizer.steps = int(stored["steps"][0])
        self.version += 1
        self._drop_gradient()

    def export(self, folder: Path) -> None:
        model_folder.write(self.settings.model.path, folder, self.model.weights)

    # ---------------------------------------------------------------------------------- rest

    def peak_memory(self) -> int:
        return peak_resident()

    def close(self) -> None:
        self.model.weights, self.model.grads, self.initial = {}, {}, {}
        self.optimizer.mean, self.optimizer.square = {}, {}


def _float32(parts: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *parts]).astype(np.float32)


class FakeAdamW:
    """Adam with bias correction and decoupled weight decay on every weight (Loshchilov & Hutter 2019).

    Moments always are in host memory, so ``offload`` changes nothing.
    """

    def __init__(self, settings: Optimizer, weights: NumpyWeights) -> None:
        self.settings = settings
        self.steps = 0
        self.mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights: NumpyWeights, grads: NumpyWeights, learning_rate: float, scale: float) -> float:
        """Update ``weights`` in place; returns the norm of ``scale`` times the gradient before clipping.

        Updates nothing if the norm is not finite.
        """
        settings = self.settings
        norm = abs(scale) * math.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads.values()))
        if not math.isfinite(norm):
            return norm
        self.steps += 1
        factor = scale * clip_factor(norm, settings.max_grad_norm)
        bias1, bias2 = 1 - settings.beta1**self.steps, 1 - settings.beta2**self.steps
        for name, weight in weights.items():
            grad, mean, square = factor * grads[name], self.mean[name], self.square[name]
            mean += (1 - settings.beta1) * (grad - mean)
            square += (1 - settings.beta2) * (grad * grad - square)
            weight *= 1 - learning_rate * settings.weight_decay
            weight -= learning_rate * (mean / bias1) / (np.sqrt(square / bias2) + settings.epsilon)
        return norm
