"""The records of an evaluation: outcomes of single responses and their summaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from backends.arrays import Bools
from backends.interface import Sampling
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.evaluation import statistics
from delta_cli.evaluation.statistics import Estimate
from delta_cli.runs.folder import write_whole

FILE = "evaluation.json"


class FrozenModel(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EvaluationSettings(FrozenModel):
    """How responses are sampled and verified. The defaults are the paper's for mathematics."""

    verifier: Literal["math", "number", "choice", "code"] = Field(
        default="math", description="what decides whether a response is right"
    )
    samples: int = Field(default=16, ge=1, description="responses sampled for each problem")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0 takes the most likely token")
    top_p: float = Field(
        default=0.7, gt=0, le=1, description="share of probability that is kept, most likely tokens first"
    )
    top_k: int = Field(default=0, ge=0, description="number of most likely tokens that are kept; 0: all")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="keep tokens with at least this times the highest probability"
    )
    max_tokens: int = Field(default=30_000, ge=1, description="length limit of a response, in tokens")
    stop: tuple[str, ...] = Field(default=(), description="strings that end a response")
    template: str = Field(default="paper", description="prompt template: a name or a text with {question}")
    system: str | None = Field(default=None, description="system message at the start of a chat")
    thinking: bool | None = Field(default=None, description="value of enable_thinking in the chat template")
    seed: int = Field(default=0, ge=0, description="seed of the sampling")
    environment: str | None = Field(default=None, description="the run's section [environment], as JSON")
    run_seconds: float = Field(default=6.0, gt=0, description="code: seconds for all tests of a response")

    @model_validator(mode="after")
    def _greedy_once(self) -> Self:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same response every time; set samples = 1")
        if not all(self.stop):
            raise ValueError("stop: an empty string would end every response before it begins; remove it")
        return self

    def identity(self) -> str:
        """A text that identifies these settings; newer keys are left out if unset, so older evaluations still match."""
        newer = {"stop": (), "system": None, "thinking": None, "top_k": 0, "min_p": 0.0, "environment": None}
        return self.model_dump_json(exclude={name for name, unset in newer.items() if getattr(self, name) == unset})

    def sampling(self, tokenizer: Tokenizer, seed: int) -> Sampling:
        """The sampling parameters for one call with ``seed``."""
        return Sampling(
            max_tokens=self.max_tokens,
            stop_ids=tokenizer.eos_ids,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            samples=self.samples,
            seed=seed,
            stop=tokenizer.stop_text(self.stop),
        )

    @property
    def truncation(self) -> str:
        """Which part of the distribution is sampled, in words."""
        words = [f"top-p {self.top_p:g}"]
        words += [f"top-k {self.top_k}"] if self.top_k else []
        return ", ".join(words + ([f"min-p {self.min_p:g}"] if self.min_p else []))


class SampleOutcome(BaseModel):
    """The outcome of one response."""

    model_config = ConfigDict(frozen=True)

    problem: str  # the problem's id
    sample: int  # 0 … k−1
    tokens: int  # length, the end-of-sequence token included
    truncated: bool
    answer: str | None  # extracted from the text, if the verifier extracts answers
    correct: bool = False  # until graded
    failure: str | None = None  # why grading failed, if it did
    turns: int | None = None  # of an episode
    calls: int = 0  # of its environment


class SampledResponse(SampleOutcome):
    """An outcome with the text of the response."""

    text: str


class Summary(FrozenModel):
    """Statistics over problems, each with k responses."""

    questions: int
    avg: Estimate  # avg@k
    passed: dict[int, Estimate]  # pass@n for n = 1, 2, 4, … and k
    maj: Estimate | None  # maj@k; None if answers are not extracted, as for code
    truncated: float  # share of responses cut at the length limit
    mean_length: float  # tokens of a response
    failures: dict[str, int]  # by reason: responses whose grading or environment failed, which count as wrong
    turns: float | None = None  # mean turns of an episode
    calls: float | None = None  # mean calls of its environment


class KindResult(FrozenModel):
    """Statistics over the problems of one kind."""

    questions: int
    accuracy: float  # mean over their responses
    mean_length: float  # tokens of a response


class BenchmarkResult(Summary):
    """Statistics of one benchmark and the outcome of every sample."""

    name: str
    outcomes: dict[str, Annotated[str, Field(pattern="^[01]+$")]]  # by problem id: 1 for each right sample, else 0
    kinds: dict[str, KindResult] = {}  # if the source has kinds of problems

    def correct(self, problems: Iterable[str] | None = None) -> Bools:
        """Outcomes [P, k] of ``problems``, or of all problems."""
        ids = self.outcomes if problems is None else problems
        return np.array([[mark == "1" for mark in self.outcomes[problem]] for problem in ids])


class EvaluationResult(FrozenModel):
    """One model on one suite: what ``evaluation.json`` holds. Format 1 had neither step, limit nor data."""

    format: Literal[1, 2] = 2
    model: str
    step: int | None = None  # of the measured run; None if unknown
    backend: str
    suite: str
    settings: EvaluationSettings
    limit: int | None = None  # problems of each benchmark, at most
    data: str = ""  # digest of the problems
    responses: str  # folder of the responses inside the evaluation's folder
    benchmarks: tuple[BenchmarkResult, ...]
    average: Summary  # over benchmarks, weighted by their questions
    suite_scores: tuple[float, ...]  # [k] accuracy of the whole suite at each sample index
    versions: dict[str, str]

    @model_validator(mode="after")
    def _all_samples(self) -> Self:
        for benchmark in self.benchmarks:
            for problem, marks in benchmark.outcomes.items():
                if len(marks) != self.settings.samples:
                    raise ValueError(f"{len(marks)} of {self.settings.samples} outcomes of problem '{problem}'")
        return self

    @property
    def label(self) -> str:
        """Display name: the model and its step."""
        return self.model if self.step is None else f"{self.model} after step {self.step}"

    def write(self, folder: Path) -> None:
        """Write ``evaluation.json``; it appears complete or not at all."""
        write_whole(folder / FILE, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> EvaluationResult:
        """Read an evaluation's folder or file. Raises UserError if it does not exist or is damaged."""
        file = path / FILE if path.is_dir() else path
        try:
            return cls.model_validate_json(file.read_bytes())
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); run `delta eval` first") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise UserError(f"{file}: not an evaluation ({where}: {first['msg']}); run `delta eval` again") from error


def summarize(
    name: str,
    outcomes: Sequence[Sequence[SampleOutcome]],
    settings: EvaluationSettings,
    kinds: Mapping[str, str] | None = None,
) -> BenchmarkResult:
    """Statistics of one benchmark from the outcomes [P][k] of its problems; ``kinds`` maps problem ids to kinds."""
    correct = np.array([[outcome.correct for outcome in group] for group in outcomes])  # [P, k]
    samples = correct.shape[1]
    passed = {
        k: statistics.estimate(
            np.array([statistics.pass_at_k(samples, int(right), k) for right in correct.sum(axis=1)]), samples
        )
        for k in powers_of_two(samples)
    }
    votes = [  # [P]
        statistics.majority([outcome.answer for outcome in group], [outcome.correct for outcome in group])
        for group in outcomes
    ]
    everything = [outcome for group in outcomes for outcome in group]
    return BenchmarkResult(
        name=name,
        questions=len(outcomes),
        avg=statistics.estimate(correct.mean(axis=1), samples),
        passed=passed,
        maj=statistics.estimate(np.array(votes), samples) if settings.verifier != "code" else None,
        truncated=float(np.mean([outcome.truncated for outcome in everything])),
        mean_length=float(np.mean([outcome.tokens for outcome in everything])),
        failures=dict(Counter(outcome.failure for outcome in everything if outcome.failure is not None)),
        turns=_mean([outcome.turns for outcome in everything]),
        calls=_mean([None if outcome.turns is None else outcome.calls for outcome in everything]),
        outcomes={
            group[0].problem: "".join("1" if right else "0" for right in row)
            for group, row in zip(outcomes, correct, strict=True)
        },
        kinds=_by_kind(everything, kinds or {}),
    )


def _mean(values: Sequence[int | None]) -> float | None:
    """The mean of numbers; None if one is missing."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _by_kind(outcomes: Sequence[SampleOutcome], kinds: Mapping[str, str]) -> dict[str, KindResult]:
    """Statistics of each kind of problem; empty without kinds."""
    found: dict[str, list[SampleOutcome]] = {}
    for outcome in outcomes:
        if kind := kinds.get(outcome.problem):
            found.setdefault(kind, []).append(outcome)
    return {
        kind: KindResult(
            questions=len({outcome.problem for outcome in own}),
            accuracy=float(np.mean([outcome.correct for outcome in own])),
            mean_length=float(np.mean([outcome.tokens for outcome in own])),
        )
        for kind, own in sorted(found.items())
    }


def average(benchmarks: Sequence[BenchmarkResult], samples: int) -> Summary:
    """The average of the benchmarks' statistics, weighted by questions."""
    questions = [each.questions for each in benchmarks]

    def mean(estimates: Sequence[Estimate]) -> Estimate:
        return statistics.weighted_average(estimates, questions, samples)

    majorities = [each.maj for each in benchmarks if each.maj is not None]  # all or none: one verifier
    return Summary(
        questions=sum(questions),
        avg=mean([each.avg for each in benchmarks]),
        passed={k: mean([each.passed[k] for each in benchmarks]) for k in powers_of_two(samples)},
        maj=mean(majorities) if majorities else None,
        truncated=float(np.average([each.truncated for each in benchmarks], weights=questions)),
        mean_length=float(np.average([each.mean_length for each in benchmarks], weights=questions)),
        failures=dict(sum((Counter(each.failures) for each in benchmarks), Counter())),
    )


def powers_of_two(samples: int) -> list[int]:
    """1, 2, 4, … below ``samples``, and ``samples``."""
    return [2**i for i in range((samples - 1).bit_length())] + [samples]
