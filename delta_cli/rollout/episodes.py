"""Episodes of several turns: what the environments answer while the sampler goes on with other responses."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from backends.arrays import Bools, Ids
from backends.interface import Sampling
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.dialogue import ToolCall
from delta_cli.environments.opened import Environments
from delta_cli.environments.turn import EpisodeFailure, EpisodeSession, Row, ToolError
from delta_cli.rewards.grader import Verdict

CUT_MARK = " [cut]"  # after an observation that was too long
WAIT_SECONDS = 0.2  # between two checks for a stop request while only environments work

EpisodeEnd = Literal["done", "turns", "tokens", "failed"]
Submit = Callable[[str, int, bool, float | None], Future[Verdict]]  # text, own tokens, truncated, environment's reward


@dataclass(frozen=True)
class Episode:
    """How an episode went."""

    turns: int  # of the model
    calls: int  # of the environment
    errors: int  # calls that failed, with a message for the model
    cut: int  # observations that were cut
    observation_tokens: int
    seconds: float  # that the environment worked
    ended: EpisodeEnd  # why: it was over, the limit of turns or of tokens was reached, or its environment failed
    reward: float | None  # the environment's own
    failure: str | None  # what failed, on one line


class EpisodeRecords(Protocol):
    """What a rollout says about its episodes afterwards."""

    @property
    def waited(self) -> float:
        """Seconds in which the sampler had nothing to do."""

    def record(self, row: int) -> Episode:
        """How an episode went, once its verdict is there."""


@dataclass
class _State:
    """An episode under way."""

    session: EpisodeSession
    prompt: Ids
    row: Row
    greeting: str | None = None
    observed: list[tuple[int, int]] = field(default_factory=list)  # places of the environment's tokens in the region
    turns: int = 0
    calls: int = 0
    errors: int = 0
    cut: int = 0
    seconds: float = 0.0
    earned: float | None = None
    ended: EpisodeEnd | None = None
    failure: str | None = None

    @property
    def turn(self) -> int:
        """Where the present turn begins in the region."""
        return self.observed[-1][1] if self.observed else 0

    def fail(self, reason: str) -> None:
        """End without a reward."""
        self.ended, self.failure = "failed", " ".join(reason.split())[:300]

    def own(self, length: int) -> Bools:
        """Which of the first ``length`` tokens of the region the model wrote."""
        marks = np.ones(length, dtype=bool)
        for first, last in self.observed:
            marks[first:last] = False
        return marks

    def finished(self) -> Episode:
        """The record of it."""
        return Episode(
            turns=self.turns,
            calls=self.calls,
            errors=self.errors,
            cut=self.cut,
            observation_tokens=sum(last - first for first, last in self.observed),
            seconds=self.seconds,
            ended=self.ended or "tokens",
            reward=None if self.failure is not None else self.earned,
            failure=self.failure,
        )


class EpisodeDriver:
    """Answers the turns of a rollout's episodes; see ``backends.interface.Turns``.

    ``begin`` resets the environments; their texts belong to the prompts, which ``set_prompts`` then hands over. An
    environment that answers in microseconds is asked at once, any other one in a thread.
    """

    def __init__(
        self, environments: Environments, tokenizer: Tokenizer, sampling: Sampling, problems: Sequence[Problem]
    ) -> None:
        self.environments, self.tokenizer, self.sampling = environments, tokenizer, sampling
        self.section = environments.section
        self.prompts: tuple[Ids, ...] = ()
        self.waited = 0.0  # seconds in which the sampler had nothing to do
        self._pool = ThreadPoolExecutor(self.section.workers, "environments")
        self._answers: queue.SimpleQueue[tuple[int, Ids | None, BaseException | None]] = queue.SimpleQueue()
        self._states = [_State(environments.session(), np.zeros(0, np.int64), row_of(each)) for each in problems]

    def begin(self) -> list[str]:
        """Reset every environment; the texts that belong to the questions. A failure ends its episode later."""
        if self.environments.has_reset:
            list(self._pool.map(self._reset, self._states))
        return [state.greeting or "" for state in self._states]

    def set_prompts(self, prompts: Sequence[Ids]) -> None:
        """The prompt of each episode."""
        self.prompts = tuple(prompts)
        for state, prompt in zip(self._states, prompts, strict=True):
            state.prompt = prompt

    def _reset(self, state: _State) -> None:
        start = time.perf_counter()
        try:
            state.greeting = state.session.reset(state.row)
        except EpisodeFailure as failure:
            state.fail(str(failure))
        state.seconds += time.perf_counter() - start

    # ------------------------------------------------------------------------ backends.interface.Turns

    def turn_ended(self, row: int, region: Ids) -> None:
        """Ask the environment."""
        if self.environments.quick or self._states[row].failure is not None:
            self._answer(row, region)
        else:
            self._pool.submit(self._answer, row, region)

    def answers(self, wait: bool) -> list[tuple[int, Ids | None]]:
        """The answers that have arrived."""
        found: list[tuple[int, Ids | None]] = []
        start = time.perf_counter()
        try:
            while True:
                first = wait and not found
                row, ids, error = self._answers.get(first, WAIT_SECONDS) if first else self._answers.get_nowait()
                if first:
                    self.waited += time.perf_counter() - start
                if error is not None:
                    raise error
                found.append((row, ids))
        except queue.Empty:
            if wait and not found:
                self.waited += time.perf_counter() - start
        return found

    def restart(self, row: int) -> None:
        """Begin an episode again, with a new environment; it fails if the text of its reset differs from the first."""
        old = self._states[row]
        old.session.close()
        self._states[row] = state = _State(self.environments.session(), old.prompt, old.row)
        if self.environments.has_reset:
            self._reset(state)
        if state.failure is None and (state.greeting or "") != (old.greeting or ""):
            state.fail("the episode had to be drawn again, and its environment's reset gave another text")

    def _answer(self, row: int, region: Ids) -> None:
        """Put the answer into the queue, whatever happens."""
        state, start = self._states[row], time.perf_counter()
        try:
            ids = None if state.failure is not None else self._next(state, region)
        except EpisodeFailure as failure:
            state.fail(str(failure))
            ids = None
        except BaseException as error:
            self._answers.put((row, None, error))
            return
        state.seconds += time.perf_counter() - start
        self._answers.put((row, ids, None))

    def _next(self, state: _State, region: Ids) -> Ids | None:
        """The ids that follow a turn; None ends the episode."""
        state.turns += 1
        ids = self._step(state, region) if self.environments.dialogue is None else self._use_tools(state, region)
        if ids is None or not len(ids):
            state.ended = state.ended or "done"
            return None
        if len(region) + len(ids) >= self.sampling.max_tokens:
            state.ended = "tokens"
            return None
        state.observed.append((len(region), len(region) + len(ids)))
        return ids

    def _step(self, state: _State, region: Ids) -> Ids | None:
        """What a text environment appends to the running text."""
        text = self.tokenizer.decode(region[state.turn :])
        state.calls += 1
        found = state.session.step(text)
        state.earned = found.reward if state.earned is None else state.earned + found.reward
        if found.done or int(region[-1]) in self.sampling.stop_ids:  # after the end of a text nothing can follow
            return None
        if state.turns >= self.section.turns:
            state.ended = "turns"
            return None
        return self.tokenizer.encode(self._cut(state, found.text), special=False)

    def _use_tools(self, state: _State, region: Ids) -> Ids | None:
        """The results of the calls in a turn; a turn without calls is the last one."""
        dialogue = self.environments.dialogue
        assert dialogue is not None
        before = np.concatenate([state.prompt, region])
        at = len(state.prompt) + state.turn
        calls = dialogue.calls(before[:at], before[at:])
        if calls and state.turns >= self.section.turns:
            state.ended = "turns"
        if not calls or state.ended:
            return None
        results = [(call, self._cut(state, self._result(state, call))) for call in calls]
        ids = dialogue.extend(state.prompt, region, results)
        if ids is None:
            raise EpisodeFailure("the chat cannot be extended after this turn without changing what was sampled")
        return ids

    def _result(self, state: _State, call: ToolCall) -> str:
        """What a tool answers, or why it does not."""
        state.calls += 1
        try:
            if call.problem is not None:
                raise ToolError(call.problem)
            return state.session.call(call.name, call.arguments)
        except ToolError as error:
            state.errors += 1
            return str(error)

    def _cut(self, state: _State, text: str) -> str:
        """An observation within its limit of tokens, in which nothing is a special token."""
        limit = self.section.observation_tokens
        longest = limit * self.tokenizer.longest_token
        text, long = self.tokenizer.without_special(text[: longest + 1]), len(text) > longest
        ids = self.tokenizer.encode(text, special=False)
        if not long and len(ids) <= limit:
            return text
        state.cut += 1
        mark = len(self.tokenizer.encode(CUT_MARK, special=False))
        return self.tokenizer.decode(ids[: max(limit - mark, 1)]) + CUT_MARK

    # ------------------------------------------------------------------------------ at the end

    def text(self, row: int, region: Ids) -> str:
        """What is graded: the last turn of a chat, or the running text up to the last turn's stop string.

        The running text holds what the environment wrote, too.
        """
        state = self._states[row]
        if self.environments.dialogue is not None:
            return self.tokenizer.decode(region[state.turn :])
        before, last = self.tokenizer.decode(region[: state.turn]), self.tokenizer.decode(region[state.turn :])
        strings = () if self.sampling.stop is None else self.sampling.stop.strings
        return before + last[: min((place for place in map(last.find, strings) if place >= 0), default=len(last))]

    def finish(self, row: int, region: Ids, text: str, submit: Submit) -> Future[Verdict]:
        """The verdict of an episode that is over; an episode that failed gets none but its failure."""
        state, result = self._states[row], Future[Verdict]()

        def end() -> None:
            try:
                self._earn(state)
                state.session.close()
                own = int(state.own(len(region)).sum())
                graded = submit(text, own, (state.ended or "tokens") == "tokens", state.earned)
                if state.failure is not None:  # a reward of whole groups waits for this response, too
                    result.set_result(Verdict(0.0, False, f"environment: {state.failure}"))
                    return
                graded.add_done_callback(lambda done: result.set_result(done.result()))
            except BaseException as error:
                result.set_exception(error)

        if self.environments.quick:
            end()
        else:
            self._pool.submit(end)
        return result

    def _earn(self, state: _State) -> None:
        """Ask an environment for its reward, beside those of its turns."""
        if state.failure is not None or not self.environments.has_reset:
            return
        try:
            more = state.session.reward()
        except EpisodeFailure as failure:
            state.fail(str(failure))
            return
        if more is not None:
            state.earned = more if state.earned is None else state.earned + more

    def record(self, row: int) -> Episode:
        """How an episode went, once its verdict is there."""
        return self._states[row].finished()

    def close(self, now: bool = False) -> None:
        """Take no more work; ``now`` also ends all environments."""
        if now:
            for state in self._states:
                state.session.close()
        self._pool.shutdown(wait=False, cancel_futures=now)


def row_of(problem: Problem) -> Row:
    """What an environment learns of the problem."""
    prompt = [{"role": "user", "content": problem.question}]
    return {
        "id": problem.id,
        "question": problem.question,
        "answer": problem.answer,
        "source": problem.source,
        "prompt": prompt,
    }
