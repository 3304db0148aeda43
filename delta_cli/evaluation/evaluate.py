"""Sample responses to benchmarks, grade and summarise them; responses on disk are not sampled again."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from delta_cli import __version__
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.evaluation import results
from delta_cli.evaluation.response_file import REMEDY, ResponseFile
from delta_cli.evaluation.results import (
    BenchmarkResult,
    EvaluationResult,
    EvaluationSettings,
    SampledResponse,
    SampleOutcome,
)
from delta_cli.evaluation.statistics import suite_scores
from delta_cli.rewards.choice import chosen
from delta_cli.rewards.grader import Verdict
from delta_cli.rewards.math.boxed import last_box
from delta_cli.rewards.math.last_number import last_number
from delta_cli.rollout.episodes import Episode
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.fingerprint import installed_version
from delta_cli.runs.folder import writing

SLICE_RESPONSES = 512  # sampled in one call; an interruption loses at most this many
PACKAGES = ("numpy", "torch", "transformers", "mlx", "mlx-lm", "math-verify", "sympy", "mpmath", "datasets")

# How each verifier extracts a response's answer; maj@k counts these answers.
EXTRACT: dict[str, Callable[[str], str | None]] = {
    "math": last_box,
    "number": last_number,
    "choice": chosen,
    "code": lambda text: None,
}

EvaluationProgress = Callable[[str, int, int], None]  # benchmark, responses done, responses in total


@dataclass(frozen=True)
class Benchmark:
    """A name and problems with distinct ids."""

    name: str
    problems: Sequence[Problem]


def evaluate(
    worker: RolloutWorker,
    benchmarks: Sequence[Benchmark],
    settings: EvaluationSettings,
    *,
    model: str,
    backend: str,
    suite: str,
    folder: Path,
    weights: str | None = None,
    step: int | None = None,
    limit: int | None = None,
    progress: EvaluationProgress | None = None,
) -> EvaluationResult:
    """Evaluate the model that ``worker`` samples from and write ``evaluation.json``.

    ``model`` is its display name, ``weights`` the folder or hub name of its weights (default: ``model``), ``step``
    the step of its run; ``limit`` records how the benchmarks were shortened.
    Each benchmark's responses go to ``responses/<digest>/<benchmark>.jsonl`` in ``folder``; the digest covers
    weights, backend and settings. After an interruption, another call samples only what is missing and gives the
    same result as one that was not interrupted. Raises UserError for a benchmark without problems or with two
    problems of one id, and if the folder cannot be written.
    """
    responses = responses_folder(weights or model, backend, settings)
    found = tuple(
        run_benchmark(
            worker,
            benchmark,
            settings,
            ResponseFile(folder / responses / f"{quote(benchmark.name, safe=' +')}.jsonl"),
            progress,
        )
        for benchmark in benchmarks
    )
    evaluation = EvaluationResult(
        model=model,
        step=step,
        backend=backend,
        suite=suite,
        settings=settings,
        limit=limit,
        data=data_digest(benchmarks),
        responses=responses.as_posix(),
        benchmarks=found,
        average=results.average(found, settings.samples),
        suite_scores=tuple(suite_scores([each.correct() for each in found]).tolist()),
        versions=versions(),
    )
    with writing(folder, remedy=REMEDY):
        evaluation.write(folder)
    return evaluation


def responses_folder(weights: str, backend: str, settings: EvaluationSettings) -> Path:
    """The folder of the responses inside an evaluation's folder, named by a digest of all that determines them."""
    return Path("responses") / _digest(model_identity(weights), backend, settings.identity())[:12]


def data_digest(benchmarks: Sequence[Benchmark]) -> str:
    """A digest of the problems, which tells evaluations on different data apart."""
    problems = [(each.name, *((p.id, p.question, p.answer) for p in each.problems)) for each in benchmarks]
    return _digest(repr(problems))[:12]


def own_folder(
    place: Path, weights: str, backend: str, settings: EvaluationSettings, benchmarks: Sequence[Benchmark]
) -> Iterator[Path]:
    """``place``, ``place-2``, …, without the folders that hold another evaluation."""
    responses, data = responses_folder(weights, backend, settings), data_digest(benchmarks)
    for number in itertools.count(1):
        folder = place if number == 1 else place.with_name(f"{place.name}-{number}")
        there = EvaluationResult.read(folder) if (folder / results.FILE).exists() else None
        if there is None or (there.responses, there.data) == (responses.as_posix(), data):
            yield folder


def run_benchmark(
    worker: RolloutWorker,
    benchmark: Benchmark,
    settings: EvaluationSettings,
    kept: ResponseFile | None = None,
    progress: EvaluationProgress | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> BenchmarkResult:
    """Sample and grade ``settings.samples`` responses to each problem; ``kept`` reads and stores them.

    Problems are sampled in slices. The randomness of a slice depends only on the seed, the benchmark's name and the
    position of the slice, so reusing one slice does not change the others.
    """
    _check(benchmark)
    worker = replace(worker, template=settings.template)
    samples, total = settings.samples, len(benchmark.problems)
    size = max(1, SLICE_RESPONSES // samples)  # problems
    outcomes: list[Sequence[SampleOutcome]] = []
    for start in range(0, total, size):
        problems = benchmark.problems[start : start + size]

        def report(done: int, before: int = start * samples) -> None:
            if progress:
                progress(benchmark.name, before + done, total * samples)

        groups: Sequence[Sequence[SampleOutcome]] | None = kept.find(problems, samples) if kept else None
        if groups is None:
            seed = int(_digest(str(settings.seed), benchmark.name, str(start))[:8], 16)
            groups = drawn = _draw(worker, problems, settings, seed, report, interrupt)
            if kept:
                kept.add(problems, drawn)
        outcomes += groups
        report(len(problems) * samples)
    kinds = {problem.id: problem.kind for problem in benchmark.problems}
    return results.summarize(benchmark.name, outcomes, settings, kinds)


def _draw(
    worker: RolloutWorker,
    problems: Sequence[Problem],
    settings: EvaluationSettings,
    seed: int,
    report: Callable[[int], None],
    interrupt: Callable[[], None],
) -> list[list[SampledResponse]]:
    """Graded responses [P][k]; calls ``report`` with the number of responses sampled."""
    sampling = settings.sampling(worker.tokenizer, seed)
    batch = worker.sample(problems, sampling, lambda done, _: report(done), interrupt).result()
    lengths = batch.sequences.lengths.tolist()
    episodes = batch.episodes or [None] * len(batch.texts)
    graded = zip(batch.texts, lengths, batch.truncated.tolist(), batch.verdicts, episodes, strict=True)
    return [
        [_response(problem, sample, *next(graded), settings) for sample in range(settings.samples)]
        for problem in problems
    ]


def _response(
    problem: Problem,
    sample: int,
    text: str,
    tokens: int,
    truncated: bool,
    verdict: Verdict,
    episode: Episode | None,
    settings: EvaluationSettings,
) -> SampledResponse:
    """A response as it is kept."""
    return SampledResponse(
        problem=problem.id,
        sample=sample,
        text=text,
        tokens=tokens,
        truncated=truncated,
        answer=EXTRACT[settings.verifier](text),
        correct=verdict.correct,
        failure=verdict.failure,
        turns=None if episode is None else episode.turns,
        calls=0 if episode is None else episode.calls,
    )


def _check(benchmark: Benchmark) -> None:
    counts = Counter(problem.id for problem in benchmark.problems)
    if not counts:
        raise UserError(f"benchmark '{benchmark.name}' has no problems; check its source, split and filter")
    repeated, count = counts.most_common(1)[0]
    if count > 1:
        raise UserError(f"benchmark '{benchmark.name}' has {count} problems with the id '{repeated}'; make ids differ")


def model_identity(model: str) -> str:
    """What identifies a model: names, sizes and times of its weight files, or else its name."""
    files = sorted(Path(model).expanduser().glob("*.safetensors"))
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return str(stats) if stats else model


def versions() -> dict[str, str]:
    """Versions of delta, Python and the installed packages that influence results."""
    installed = {package: found for package in PACKAGES if (found := installed_version(package)) is not None}
    return {"delta": __version__, "python": platform.python_version()} | installed


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
