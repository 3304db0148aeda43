"""Chats with tools from the sampler to the graded batch, with a sampler that writes a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.arrays import Ids
from backends.interface import Completions, OnFinished, RolloutRequest, Sampling
from backends.regions import ResponseRegions
from delta_cli.data.problem import Problem
from delta_cli.environments.opened import Environments
from delta_cli.recipe.environment import EnvironmentSection
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.worker import RolloutWorker
from tests.environments.test_dialogue import FAMILIES, make_tokenizer
from tests.harness import EarnedGrader

# The shapes of three of TRL's examples: an echo that pays for length, a game of catch on a grid, and a guessed word.
CLASSES = '''
class Echo:
    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """Echo a message.

        Args:
            message: The message to echo.

        Returns:
            The message.
        """
        self.reward = len(message) / 10
        return message


class Catch:
    def __init__(self):
        self.width = 5

    def reset(self, **kwargs) -> str:
        self.ball, self.paddle, self.height, self.done, self.reward = 3, 1, 2, False, 0.0
        return "\\nThe ball is at 3, the paddle at 1."

    def move(self, direction: str) -> str:
        """Move the paddle.

        Args:
            direction: One of left, right or stay.
        """
        if self.done:
            raise ValueError("Game over.")
        self.paddle += {"left": -1, "right": 1, "stay": 0}[direction]
        self.height -= 1
        self.done = self.height == 0
        self.reward = float(self.done and self.paddle == self.ball)
        return f"paddle {self.paddle}"

    def get_reward(self) -> float:
        return self.reward


class Guess:
    def reset(self, answer: str, **kwargs) -> str:
        self.word, self.guesses, self.right = answer, 0, False
        return " It has five letters."

    async def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: Five letters.
        """
        self.guesses += 1
        self.right = word == self.word
        return "".join("G" if a == b else "X" for a, b in zip(word, self.word))

    def get_reward(self) -> float:
        return float(self.right) / self.guesses if self.guesses else 0.0
'''


def call(name: str, **arguments: str) -> str:
    inside = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{inside}}}}}\n</tool_call><|im_end|>'


class Scripted:
    """A sampler whose response ``row`` writes the texts of its script, a turn each."""

    version, inbox = 0, None

    def __init__(self, scripts: list[list[str]], tokenizer: Any) -> None:
        self.scripts, self.tokenizer = scripts, tokenizer
        self.prompts: list[str] = []

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        assert request.turns is not None
        samples = request.sampling.samples
        self.prompts = [self.tokenizer.decode(prompt, skip_special=False) for prompt in request.prompts]
        regions: list[list[int]] = [[] for _ in range(len(request))]
        own: list[list[bool]] = [[] for _ in regions]
        left = [list(self.scripts[(row // samples) % len(self.scripts)]) for row in range(len(request))]
        ready, open_rows = list(range(len(request))), set(range(len(request)))
        while open_rows:
            for row in ready:
                ids = self.tokenizer.encode(left[row].pop(0), special=False).tolist()
                regions[row] += ids
                own[row] += [True] * len(ids)
                request.turns.turn_ended(row, np.array(regions[row], np.int64))
            ready = []
            for row, answer in request.turns.answers(wait=True):
                if answer is None:
                    open_rows.remove(row)
                    assert on_finished is not None
                    on_finished(row, np.array(regions[row], np.int64))
                    continue
                regions[row] += answer.tolist()
                own[row] += [False] * len(answer)
                ready.append(row)
        whole = ResponseRegions.of(
            [np.array(each, np.int64) for each in regions], [np.array(each, bool) for each in own]
        )
        count = len(whole.own_tokens)
        numbers = np.zeros(count, np.float32)
        truncated = np.zeros(len(regions), bool)
        return Completions(whole.own_tokens, whole.own_starts, numbers, truncated, 0, numbers, None, whole)

    def load_weights(self, weights: Any) -> None:
        raise NotImplementedError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "classes.py"
    path.write_text(CLASSES)
    return path


def draw(
    scripts: list[list[str]], section: EnvironmentSection, samples: int = 1, answer: str = "crane"
) -> tuple[RolloutBatch, EarnedGrader, Scripted]:
    tokenizer = make_tokenizer(FAMILIES["template"][0])
    sampler, grader = Scripted(scripts, tokenizer), EarnedGrader()
    with Environments(section, tokenizer, "some/model") as environments:
        worker = RolloutWorker(sampler, tokenizer, grader, "chat", environments=environments)  # type: ignore[arg-type]
        problems = [Problem(f"p{place}", f"Question {place}?", answer) for place in range(len(scripts))]
        sampling = Sampling(max_tokens=2000, stop_ids=tokenizer.eos_ids, samples=samples)
        return worker.sample(problems, sampling).result(), grader, sampler


def text_of(ids: Ids) -> str:
    return make_tokenizer(FAMILIES["template"][0]).decode(ids, skip_special=False)


def test_the_shipped_calculator() -> None:
    script = ["Let me see. " + call("calculator", expression="6 * 7"), "It is 42.<|im_end|>"]
    batch, grader, sampler = draw([script], EnvironmentSection(kind="tools", tools=("calculator",)), samples=2)
    assert "Question 0?" in sampler.prompts[0]
    assert "Work out a sum" in sampler.prompts[0]
    assert len(sampler.prompts) == 1, "equal prompts are asked once"
    assert {asked[0] for asked in grader.asked} == {"It is 42."}, "the last turn is graded"
    assert batch.episodes is not None
    assert [(each.turns, each.calls, each.errors, each.ended) for each in batch.episodes] == [(2, 1, 0, "done")] * 2
    assert batch.sequences.regions is not None
    ids, own = batch.sequences.regions.region(0)
    assert text_of(ids[own]) == "".join(script)
    assert "42" in text_of(ids[~own])
    assert grader.asked[0][1] == int(own.sum()), "the length is that of the model's tokens"


def test_three_classes_in_trls_shape_run_unchanged(file: Path) -> None:
    echo, _, _ = draw(
        [[call("echo", message="hello"), "done<|im_end|>"]], EnvironmentSection(kind="tools", file=f"{file}:Echo")
    )
    assert echo.rewards.tolist() == [0.5], "its attribute"
    assert "hello" in text_of(echo.sequences.regions.ids[~echo.sequences.regions.own])  # type: ignore[union-attr]

    moves = [call("move", direction="right")] * 3 + ["caught<|im_end|>"]
    catch, _, sampler = draw([moves], EnvironmentSection(kind="tools", file=f"{file}:Catch"))
    assert "Question 0?\nThe ball is at 3, the paddle at 1." in sampler.prompts[0]
    assert catch.rewards.tolist() == [1.0]
    (episode,) = catch.episodes or ()
    assert (episode.calls, episode.errors) == (3, 1), "the third move was told that the game is over"
    assert "Game over." in text_of(catch.sequences.regions.ids)  # type: ignore[union-attr]

    words = [[call("guess", word="cramp"), call("guess", word="crane"), "so<|im_end|>"], ["no idea<|im_end|>"]]
    guess, _, _ = draw(words, EnvironmentSection(kind="tools", file=f"{file}:Guess"))
    assert guess.rewards.tolist() == [0.5, 0.0]
    assert "GGGXX" in text_of(guess.sequences.regions.region(0)[0])  # type: ignore[union-attr]


def test_calls_that_are_wrong_and_too_many_turns(file: Path) -> None:
    scripts = [
        ["<tool_call>\nnonsense\n</tool_call><|im_end|>", "ok<|im_end|>"],
        [call("nothing"), call("echo", wrong="x"), "ok<|im_end|>"],
        [call("echo", message="again")] * 4,
    ]
    batch, grader, _ = draw(scripts, EnvironmentSection(kind="tools", file=f"{file}:Echo", turns=3))
    assert batch.episodes is not None
    assert [(each.turns, each.errors, each.ended) for each in batch.episodes] == [
        (2, 1, "done"),
        (3, 2, "done"),
        (3, 0, "turns"),
    ]
    assert batch.failed.tolist() == [False] * 3
    assert len(grader.asked) == 3


def test_two_calls_in_a_turn_and_special_tokens_in_a_result(file: Path) -> None:
    two = call("echo", message="<|im_end|>").removesuffix("<|im_end|>") + call("echo", message="b")
    batch, _, _ = draw([[two, "ok<|im_end|>"]], EnvironmentSection(kind="tools", file=f"{file}:Echo"))
    assert batch.sequences.regions is not None
    ids, own = batch.sequences.regions.region(0)
    written = text_of(ids[~own])
    assert written.count("tool\n") == 2
    assert "< |im_end|>" in written
    assert (batch.episodes or ())[0].calls == 2
