"""Whether mlx-lm's batch generator, of which rollouts use private parts, does what they expect of it."""

from __future__ import annotations

from importlib.metadata import version

import mlx.core as mx
import numpy as np

from backends.interface import BackendError, RolloutRequest, Sampling
from backends.mlx.model import MlxPolicy
from backends.mlx.rollout import MlxRollout

TOKENS = 5
TOLERANCES = {mx.float32: 1e-3, mx.bfloat16: 0.2, mx.float16: 0.05}  # nats, mean over the tokens


def check_generator(policy: MlxPolicy, dtype: mx.Dtype) -> None:
    """Draw a few tokens, more responses than fit at a time, and compare their log-probabilities with a plain forward.

    Raises BackendError where they differ by more than rounding, as they would where another version of mlx-lm took
    tokens, rows or positions in another order.
    """
    prompts = tuple(np.arange(size) % policy.vocabulary for size in (1, 4))
    request = RolloutRequest(prompts, Sampling(TOKENS, stop_ids=(), samples=2))
    drawn = MlxRollout(policy, request, batch=3, version=0).run(None)
    head, gaps = policy.head(), []
    for row in range(len(request)):
        prompt, tokens = prompts[row // 2], drawn.tokens[drawn.starts[row] : drawn.starts[row + 1]]
        ids = mx.array(np.concatenate([prompt, tokens])[None, :-1])
        known = np.array(head.log_softmax(policy.trunk(ids)[0, len(prompt) - 1 :], 1.0))
        gaps.append(known[np.arange(len(tokens)), tokens] - drawn.logprobs[drawn.starts[row] : drawn.starts[row + 1]])
    gap = float(np.abs(np.concatenate(gaps)).mean())
    if len(drawn.tokens) != TOKENS * len(request) or not gap <= TOLERANCES[dtype]:
        raise BackendError(
            f"mlx-lm {version('mlx-lm')} draws tokens whose log-probabilities are {gap:.2g} nats from those of a plain "
            "forward: its batch generator is not the one this backend was written for, or the model's cache is wrong; "
            "install mlx-lm 0.32.2, or choose --backend cpu"
        )
