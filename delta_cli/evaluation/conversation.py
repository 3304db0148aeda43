"""``delta chat``: a conversation with a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from backends.arrays import Ids
from backends.interface import RolloutRequest, Sampler, Sampling
from delta_cli.data import prompts
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import encode_prompt, opened_think
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.opened import Environments
from delta_cli.rewards.weighted import WeightedReward
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.checkpoint_reference import CheckpointReference
from delta_cli.seeds import derive


def load_tokenizer_and_template(
    reference: CheckpointReference, template: str | None = None
) -> tuple[Tokenizer, str | None]:
    """The tokenizer of a model or run, and the template in which it is asked; None: in a conversation.

    The default is the run's own template with its system message, and "plain" for a model without a chat template.
    """
    recipe = reference.recipe
    tokenizer = Tokenizer.load(reference.settings.model.path)
    if template is None and recipe is not None:
        return tokenizer.chatting(recipe.data.system, recipe.data.thinking), recipe.data.prompt_template
    if template is None and not tokenizer.converses:
        template = "plain"
    if template is not None:
        prompts.check(template)
    return tokenizer, template


@dataclass
class Conversation:
    """Questions and answers.

    With a ``template`` each question is asked on its own, as in training. Without one, questions and answers form a
    conversation in the model's chat template.
    """

    sampler: Sampler
    tokenizer: Tokenizer
    template: str | None
    sampling: Sampling  # each answer derives its seed from this one's
    system: str | None = None
    environments: Environments | None = None  # of a run with episodes: each question begins one
    messages: list[dict[str, str]] = field(default_factory=list)
    asked: int = 0

    def ask(self, question: str) -> tuple[str, bool]:
        """The answer to a question, and whether it was truncated."""
        sampling = replace(self.sampling, seed=derive(self.sampling.seed, self.asked, "chat"))
        if self.environments is not None and self.template is not None:
            return self._episode(question, sampling)
        prompt = self._prompt(question)
        drawn = self.sampler.rollout(RolloutRequest((prompt,), sampling))
        self.asked += 1
        answer = sampling.before_stop(self.tokenizer.decode(drawn.tokens))
        begun = opened_think(self.tokenizer.decode(prompt, skip_special=False))
        if self.template is None:
            self.messages.append({"role": "assistant", "content": begun + answer})
        return begun + answer, bool(drawn.truncated[0])

    def _episode(self, question: str, sampling: Sampling) -> tuple[str, bool]:
        """What the model and its environment wrote, and whether it was truncated."""
        assert self.template is not None
        self.asked += 1
        worker = RolloutWorker(
            self.sampler, self.tokenizer, WeightedReward([]), self.template, environments=self.environments
        )
        drawn = worker.sample([Problem("chat", question, "")], sampling).result()
        region, own = drawn.sequences.region(0)
        if self.environments is None or self.environments.dialogue is None:
            return drawn.texts[0], bool(drawn.truncated[0])
        cuts = np.flatnonzero(np.diff(own)) + 1
        parts = [self.tokenizer.decode(ids).strip() for ids in np.split(region, cuts)]
        marked = [part if mine else f"» {part}" for part, mine in zip(parts, own[[0, *cuts]], strict=True)]
        return "\n".join(marked), bool(drawn.truncated[0])

    def _prompt(self, question: str) -> Ids:
        if self.template is not None:
            return encode_prompt(Problem("chat", question, ""), self.template, self.tokenizer)
        if not self.messages and self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": question})
        return self.tokenizer.encode(self.tokenizer.converse(self.messages), special=False)
