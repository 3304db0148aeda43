"""All responses of a benchmark on disk, one JSON object per line, so that an interrupted evaluation can continue."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError, first_line
from delta_cli.evaluation.results import SampledResponse, SampleOutcome
from delta_cli.runs.folder import writing

REMEDY = "fix that or choose another folder, then run the same command again: responses on disk are kept"


class ResponseLine(SampledResponse):
    """A response with its problem."""

    key: str  # digest of the problem
    question: str = ""
    gold: str = ""  # the gold answer as text


class ResponseFile:
    """The responses of one benchmark, for one model and one choice of settings; a later duplicate of a sample wins.

    Raises UserError if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        """Read the file and cut off an unfinished last line."""
        self.path = path
        self._outcomes: dict[str, dict[int, SampleOutcome]] = {}  # by problem key, then sample
        with writing(path, remedy=REMEDY):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                file.seek(0)
                end = 0
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._remember(line)
                    end += len(line)
                file.truncate(end)

    @staticmethod
    def lines(path: Path) -> list[ResponseLine]:
        """Every whole line of a file that an evaluation wrote. Raises UserError if it cannot be read."""
        try:
            text = path.read_text(encoding="utf-8")
            return [ResponseLine.model_validate_json(line) for line in text.splitlines() if line.endswith("}")]
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: cannot be read ({first_line(error)}); run the evaluation again with delta eval"
            ) from error

    def find(self, problems: Sequence[Problem], samples: int) -> list[list[SampleOutcome]] | None:
        """The outcomes [P][k] of the problems; None if a sample of one of them is missing."""
        groups = [self._outcomes.get(_key(problem), {}) for problem in problems]
        if any(sample not in group for group in groups for sample in range(samples)):
            return None
        return [[group[sample] for sample in range(samples)] for group in groups]

    def add(self, problems: Sequence[Problem], groups: Sequence[Sequence[SampledResponse]]) -> None:
        """Append the responses [P][k] to the problems and flush them to disk."""
        lines = [
            ResponseLine(
                key=_key(problem), question=problem.question, gold=str(problem.answer), **response.model_dump()
            ).model_dump_json()
            + "\n"
            for problem, group in zip(problems, groups, strict=True)
            for response in group
        ]
        with writing(self.path, remedy=REMEDY), self.path.open("ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _remember(self, line: bytes) -> None:
        try:
            read = ResponseLine.model_validate_json(line)
        except ValidationError:
            return  # a damaged line: its problem is sampled again
        outcome = SampleOutcome(**read.model_dump(include=set(SampleOutcome.model_fields)))
        self._outcomes.setdefault(read.key, {})[read.sample] = outcome


def _key(problem: Problem) -> str:
    """A digest of the problem, so that a problem with a corrected text or gold answer is sampled again."""
    content = json.dumps([problem.id, problem.question, problem.answer], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
