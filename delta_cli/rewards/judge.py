"""A judge: a language model behind an OpenAI-compatible endpoint that gives each response a score.

A verdict is a function of what the judge was asked. Each one is kept in a file under a digest of the request, so a
resumed run asks nothing twice. A verdict that could not be had is no score of 0: it says so, and the response teaches
nothing.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from delta_cli.data.problem import Problem
from delta_cli.data.prompts import fill
from delta_cli.errors import UserError
from delta_cli.recipe.reward import JudgeSection
from delta_cli.rewards.worker_pool import Score

ANSWER_BYTES = 2**24  # a longer answer is not read
PAUSE, LONGEST_PAUSE = 0.2, 20.0  # seconds before the first repetition; doubled each time up to the longest
AGAIN = (408, 409, 425, 429)  # statuses after which the same request may succeed, besides those of 500 and above
FIELD = re.compile(r"\{(\w+)\}")


class JudgeError(Exception):
    """No verdict; the message says why. ``final``: asking again would not help."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


@dataclass
class JudgeUsage:
    """What a judge was asked since it was last looked at."""

    calls: int = 0  # requests that were sent, repetitions included
    kept: int = 0  # verdicts that were known already
    failures: int = 0  # responses without a verdict
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # by the recipe's prices

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class JudgeAnswer:
    """The text of an answer and what it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class VerdictStore:
    """Verdicts by the digest of their request; in memory only without a ``file``.

    A line that a killed process left unfinished is skipped.
    """

    file: Path | None = None
    known: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is None:
            return
        for file in sorted(self.file.parent.glob("verdicts-*.jsonl")):  # of every rank
            for line in file.read_bytes().splitlines():
                try:
                    record = json.loads(line)
                    self.known[record["request"]] = float(record["value"])
                except (ValueError, KeyError, TypeError):
                    continue

    def keep(self, request: str, value: float, text: str) -> None:
        """Add a verdict, in one write, so that a kill loses at most the last line."""
        self.known[request] = value
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"request": request, "value": value, "answer": text}) + "\n"
        with self.file.open("ab") as file:
            file.write(line.encode())


class JudgeClient:
    """Asks for verdicts, some at a time. ``file`` keeps them for a resumed run."""

    def __init__(self, settings: JudgeSection, file: Path | None = None) -> None:
        self.settings = settings
        self.store = VerdictStore(file)
        self.template = read_template(settings)
        self._pattern = re.compile(settings.pattern)
        self._threads = ThreadPoolExecutor(settings.concurrency, "judge")
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Score]] = {}  # requests on their way
        self._usage = JudgeUsage()
        self._closed = threading.Event()

    def submit(self, response: str, problem: Problem) -> Future[Score]:
        """The score of a response, between 0 and 1 if ``settings.best`` is the judge's highest."""
        body = self._body(response, problem)
        digest = hashlib.sha256(json.dumps([self.settings.url, self.settings.pattern, body]).encode()).hexdigest()
        result: Future[Score] = Future()
        with self._lock:
            if digest in self.store.known:
                self._usage.kept += 1
                result.set_result(self._score(self.store.known[digest]))
                return result
            if digest in self._asked:  # the same response once more
                self._usage.kept += 1
                return self._asked[digest]
            self._asked[digest] = result
        self._threads.submit(self._decide, digest, body, result)
        return result

    def used(self) -> JudgeUsage:
        """What was asked since the last call."""
        with self._lock:
            usage, self._usage = self._usage, JudgeUsage()
        return usage

    def close(self) -> None:
        """Ask nothing more. What waits for a verdict fails."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [result for result in self._asked.values() if not result.done()]
        for result in waiting:
            _settle(result, Score(0.0, failure="error: the grader was closed", void=True))

    def _score(self, value: float) -> Score:
        return Score(value / self.settings.best)

    def _body(self, response: str, problem: Problem) -> dict[str, Any]:
        prompt = fill(self.template, _values(response, problem))
        return {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }

    def _decide(self, digest: str, body: dict[str, Any], result: Future[Score]) -> None:
        """Ask until there is a verdict, the attempts are used up, or the deadline has passed."""
        end = time.monotonic() + self.settings.deadline
        reason = ""
        for attempt in range(self.settings.retries + 1):
            if attempt and self._closed.wait(min(PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE, end - time.monotonic())):
                break
            try:
                answer = self._ask(body, end - time.monotonic())
                value = self._read(answer.text)
            except JudgeError as error:
                reason = str(error)
                if error.final or time.monotonic() >= end:
                    break
                continue
            with self._lock:
                self.store.keep(digest, value, answer.text)
                self._usage += self._paid(answer)
                self._asked.pop(digest)
            _settle(result, self._score(value))
            return
        with self._lock:
            self._usage.failures += 1
            self._asked.pop(digest)
        _settle(result, Score(0.0, failure=f"error: {reason}"[:1000], void=True))

    def _paid(self, answer: JudgeAnswer) -> JudgeUsage:
        prompt, completion = answer.prompt_tokens, answer.completion_tokens
        cost = (prompt * self.settings.price_prompt + completion * self.settings.price_completion) / 1e6
        return JudgeUsage(prompt_tokens=prompt, completion_tokens=completion, cost=cost)

    def _read(self, text: str) -> float:
        """The number in an answer: the first group of the pattern's last match."""
        found = list(self._pattern.finditer(text))
        try:
            value = float(found[-1][1])
        except (IndexError, ValueError, TypeError):
            raise JudgeError(f"the judge's answer has no score: {text[:80]!r}") from None
        if not 0 <= value <= self.settings.best:
            raise JudgeError(f"the judge's score {value:g} is not between 0 and {self.settings.best:g}")
        return value

    def _ask(self, body: dict[str, Any], seconds: float) -> JudgeAnswer:
        """One call. Raises JudgeError for whatever is no answer."""
        if seconds <= 0:
            raise JudgeError("no verdict before the deadline")
        with self._lock:
            self._usage.calls += 1
        parts = urlsplit(self.settings.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(seconds, self.settings.timeout))
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.settings.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        end = time.monotonic() + min(seconds, self.settings.timeout)
        try:
            path = f"{parts.path.rstrip('/')}/chat/completions"
            connection.request("POST", path, json.dumps(body).encode(), headers)
            answer = connection.getresponse()
            text = _read_by(answer, end)
        except TimeoutError:
            raise JudgeError(f"no answer within {min(seconds, self.settings.timeout):.3g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise JudgeError(f"{self.settings.url}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            again = answer.status in AGAIN or answer.status >= 500
            raise JudgeError(f"{self.settings.url}: status {answer.status}, {_first_line(text)}", final=not again)
        return _parsed(text)


def read_template(settings: JudgeSection) -> str:
    """The judge's prompt: the recipe's text, or that of the file it names. Raises UserError."""
    if not settings.template.endswith((".txt", ".md", ".jinja")):
        return settings.template
    try:
        return Path(settings.template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.template: {settings.template}: cannot be read ({error})") from None


def check_template(template: str, problem: Problem) -> None:
    """Raise UserError if the template names a column that the problem lacks, or leaves the response out."""
    names, known = set(FIELD.findall(template)), _values("", problem)
    if unknown := sorted(names - set(known)):
        raise UserError(
            f"reward.judge.template: {{{unknown[0]}}} is not known; the names are {', '.join(known)}. Name further "
            "columns of the data in data.columns"
        )
    if "response" not in names:
        raise UserError("reward.judge.template: does not contain {response}, so the judge would not see it")


def _values(response: str, problem: Problem) -> Mapping[str, Any]:
    return {**problem.columns, "question": problem.question, "answer": problem.answer, "response": response}


def _read_by(answer: http.client.HTTPResponse, end: float) -> bytes:
    """The body of an answer. Raises TimeoutError if it is not complete in time, however slowly it arrives."""
    parts: list[bytes] = []
    while part := answer.read1(65536):
        parts.append(part)
        if time.monotonic() > end:
            raise TimeoutError
        if sum(map(len, parts)) > ANSWER_BYTES:
            raise http.client.HTTPException(f"an answer of more than {ANSWER_BYTES} bytes")
    if answer.length:  # a connection that ended early is no error of read1
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return b"".join(parts)


def _parsed(text: bytes) -> JudgeAnswer:
    """The answer in the body of a chat completion."""
    try:
        record = json.loads(text)
        content = record["choices"][0]["message"]["content"]
        usage = record.get("usage") or {}
        tokens = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise JudgeError(f"not a chat completion: {_first_line(text)}") from None
    if not isinstance(content, str):
        raise JudgeError(f"not a chat completion: {_first_line(text)}")
    return JudgeAnswer(content, *tokens)


def _first_line(text: bytes) -> str:
    return repr(text[:80].decode(errors="replace").partition("\n")[0])


def _settle(result: Future[Score], score: Score) -> None:
    """Set a result unless the judge was closed meanwhile."""
    try:
        result.set_result(score)
    except Exception as error:  # InvalidStateError: it was settled by close()
        if not result.done():
            raise error
