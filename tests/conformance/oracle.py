"""The oracle of every backend: transformers' Qwen3, torch's autograd and AdamW, all in float64.

Sequences go through one at a time, unpadded, and logits are whole, so that nothing a backend does to
be quick (padding, micro-batches, chunks of the head, caches) is shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from backends.interface import Proxy, Sequences
from backends.settings import Optimizer


class Rotary(torch.nn.Module):
    """The rotation's cosines and sines in float64; transformers computes them in float32."""

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        self.frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, _: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def cut_down(p: np.ndarray, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> np.ndarray:
    """Truncate probabilities [V] and normalise them: min-p first, then top-k, then top-p of the rest."""
    left = {token: float(p[token]) for token in sorted(range(len(p)), key=lambda token: -p[token])}
    left = {token: q for token, q in left.items() if q >= min_p * max(p)}
    left = dict(list(left.items())[: top_k or None])
    total, reached, kept = sum(left.values()), 0.0, np.zeros(len(p))
    for token, q in left.items():
        if reached < top_p * total:
            kept[token] = q
            reached += q
    return np.asarray(kept / kept.sum())


@dataclass
class Distributions:
    """For every response token: its distribution's log-probabilities [N, V], head input h [N, H], id [N]."""

    log: torch.Tensor
    hidden: torch.Tensor
    targets: torch.Tensor

    @property
    def logprobs(self) -> torch.Tensor:
        return self.log.gather(1, self.targets[:, None])[:, 0]

    @property
    def entropies(self) -> torch.Tensor:
        return -(self.log.exp() * self.log).sum(1)


class Oracle:
    """A model folder in float64. ``stock`` keeps the operations that transformers does in float32."""

    def __init__(self, folder: Path, stock: bool = False) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
        if stock:
            return
        # Otherwise the gradient of the padding id's embedding is zeroed, even if it occurs as an ordinary token.
        self.model.model.embed_tokens.padding_idx = None
        config = self.model.config
        self.model.model.rotary_emb = Rotary(config.rope_parameters["rope_theta"], config.head_dim)
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Qwen3RMSNorm):
                    norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                    norm.weight = child.weight
                    setattr(module, name, norm)

    def distributions(self, sequences: Sequences) -> Distributions:
        parts = []
        for row, prompt in enumerate(sequences.prompts):
            response, own = sequences.region(row)
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            hidden = self.model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1][torch.from_numpy(own)]
            log = (self.model.lm_head(hidden) / (sequences.temperature or 1.0)).log_softmax(-1)
            parts.append((log, hidden, ids[0, len(prompt) :][torch.from_numpy(own)]))
        return Distributions(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def next_token(self, ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """Probabilities [V] of the next id."""
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        return (logits / temperature).softmax(-1).numpy()

    def greedy(self, prompt: np.ndarray, max_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
        ids = prompt.tolist()
        for _ in range(max_tokens):
            ids.append(int(self.next_token(ids).argmax()))
            if ids[-1] in stop_ids:
                break
        return ids[len(prompt) :]

    def vectors(self, sequences: Sequences, proxy: Proxy) -> np.ndarray:
        """The token-gradient proxies [N, H], token by token."""
        with torch.no_grad():
            found = self.distributions(sequences)
            rows, result = self.model.lm_head.weight, []
            for log, h, y in zip(found.log, found.hidden, found.targets, strict=True):
                p = log.exp()
                if proxy.kind == "output_row":
                    result.append((1 - p[y]) * h)
                    continue
                likeliest = p.argsort(descending=True)[: proxy.k if proxy.kind == "hidden_topk" else len(p)]
                q = p[likeliest] / p[likeliest].sum()
                result.append(rows[y] - sum(q_j * rows[j] for q_j, j in zip(q, likeliest, strict=True)))
        return torch.stack(result).numpy()

    def update(
        self,
        sequences: Sequences,
        objective: Callable[[torch.Tensor], torch.Tensor],
        settings: Optimizer,
        learning_rate: float,
        steps: int = 1,
    ) -> tuple[float, float]:
        """Take gradient steps on objective(logp [N]); return the loss and the gradient norm before the last step."""
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )
        for _ in range(steps):
            optimizer.zero_grad()
            loss = objective(self.distributions(sequences).logprobs)
            loss.backward()
            gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:  # torch's own clipping adds 1e-6 to the norm
                gradient.mul_(min(1.0, (settings.max_grad_norm or math.inf) / norm.item()))
            optimizer.step()
        return loss.item(), norm.item()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: weight.detach().numpy() for name, weight in self.model.named_parameters()}
