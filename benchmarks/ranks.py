"""What records and collectives cost each rank of a large run: processor seconds, and what crosses to every rank.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --out benchmarks/results/ranks.json

One process plays one of 64 ranks after the other. It runs the program's own code on a batch of 10 million tokens; what
the other ranks would send is prepared beforehand. Half of the groups have zero variance. Counted are processor seconds
of the exchange of responses, of the scores and coefficients of all tokens, and of recording the rank's share; network
and disk are not. A sum costs one addition of the arrays.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import show, write
from numpy.typing import NDArray

from backends.collective import deal
from backends.interface import Completions, Sampling, Sequences, starts_of, token_index
from delta_cli.assets import model_path
from delta_cli.credit.coefficients import CoefficientSettings, TokenCoefficients, _Contrast
from delta_cli.credit.distributed import HeldFeatures
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import load_recipe
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.worker import PendingRollout
from delta_cli.runs.folder import ReadOnlyRunFolder, RunFolder
from delta_cli.training.rollout_records import RolloutRecorder
from delta_cli.training.update import ScoredBatch, Updater

VOCABULARY = 151_936
CHARACTERS = 3.3  # of text for each token
PROMPT = 128  # tokens


@dataclass
class PlayedRanks:
    """The collective of one rank, to whom the others' parts are known."""

    rank: int
    size: int
    parts: list[bytes] = field(default_factory=list)  # what each rank hands in next, pickled; empty: what this one does
    rests: list[NDArray[Any]] = field(default_factory=list)  # the sums of the others' arrays, in the order of calls
    received: int = 0  # bytes of the last call
    watchdog: None = None

    def gather(self, item: Any) -> list[Any]:
        """As TorchCollective does, but for the network."""
        mine = pickle.dumps(item, protocol=5)
        parts = self.parts or [mine] * self.size
        self.received = sum(map(len, parts))
        return [pickle.loads(part) for part in parts]

    def sum(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array and those of the others."""
        self.received = array.nbytes
        return array + self.rests.pop(0) if self.rests else array

    def barrier(self) -> None:
        """The others are there already."""


class Captured(Exception):
    """Ends the work of a rank whose part is all that is wanted."""


@dataclass
class Capturing(PlayedRanks):
    """Keeps what a rank hands in to a gather."""

    def gather(self, item: Any) -> list[Any]:
        raise Captured(pickle.dumps(item, protocol=5))


class PlayedRun:
    """A batch of a run of many ranks, and each one's part of it."""

    def __init__(self, ranks: int, tokens: int, prompts: int, samples: int) -> None:
        rng = np.random.default_rng(0)
        self.ranks, self.prompts, self.samples = ranks, prompts, samples
        shares = rng.uniform(0.5, 1.5, prompts * samples)
        self.lengths = np.maximum(1, shares / shares.sum() * tokens).astype(np.int64)
        self.starts = starts_of(self.lengths)
        count = int(self.starts[-1])
        self.ids = rng.integers(0, VOCABULARY, count)
        self.logprobs, self.entropies, self.alpha, self.margins = rng.random((4, count), np.float32)
        words = ["".join(map(chr, rng.integers(97, 123, length))) for length in rng.integers(2, 9, 2000)]
        base = " ".join(words[word] for word in rng.integers(0, len(words), 200_000))
        self.texts = [
            base[place : place + round(CHARACTERS * length)]
            for place, length in zip(rng.integers(0, len(base) // 2, len(self.lengths)), self.lengths, strict=True)
        ]
        mixed = np.arange(prompts) % 2 == 0
        self.rewards = np.where(np.repeat(mixed, samples), np.arange(prompts * samples) % 2, 0).astype(float)
        self.problems = tuple(Problem(str(number), f"question {number}", "1", "made up") for number in range(prompts))
        self.recipe = load_recipe(None, [f"rollout.prompts={prompts}", f"rollout.responses={samples}"])
        self.tokenizer = Tokenizer.load(model_path("tiny-base"))
        self.parts = [self._sent(rank) for rank in range(ranks)]

    def _pending(self, collective: PlayedRanks) -> PendingRollout:
        """What a rank has drawn: every n-th prompt."""
        groups = np.arange(collective.rank, self.prompts, self.ranks)
        rows = (groups[:, None] * self.samples + np.arange(self.samples)).ravel()
        index = token_index(self.starts, rows)
        completions = Completions(
            self.ids[index], starts_of(self.lengths[rows]), self.logprobs[index], np.zeros(len(rows), bool), 1
        )
        prompt = np.zeros(PROMPT, np.int64)
        texts = tuple(self.texts[row] for row in rows)
        prompts = (prompt,) * self.prompts
        sampling = Sampling(10**6, (), samples=self.samples)
        return PendingRollout(self.problems, prompts, sampling, rows, completions, texts, (), collective)

    def _verdicts(self, pending: PendingRollout) -> tuple[Verdict, ...]:
        return tuple(Verdict(self.rewards[row], bool(self.rewards[row]), None) for row in pending.rows.tolist())

    def _sent(self, rank: int) -> bytes:
        """What a rank hands in to the exchange of responses."""
        pending = self._pending(Capturing(rank, self.ranks))
        try:
            pending._exchange(self._verdicts(pending))
        except Captured as captured:
            found: bytes = captured.args[0]
            return found
        raise AssertionError

    # ------------------------------------------------------------------------- a rank's step

    def play(self, rank: int, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
        """Processor seconds and megabytes to every rank, by what they are for."""
        seconds: dict[str, float] = {}
        sizes: dict[str, float] = {}
        ranks = PlayedRanks(rank, self.ranks)
        batch = self._exchange(ranks, seconds, sizes)
        scored, coefficients = self._score(ranks, batch, seconds, sizes)
        self._record(ranks, scored, coefficients, folder, seconds)
        return seconds, sizes

    def _exchange(self, ranks: PlayedRanks, seconds: dict[str, float], sizes: dict[str, float]) -> RolloutBatch:
        pending = self._pending(ranks)
        verdicts, index = self._verdicts(pending), token_index(self.starts, pending.rows)
        rest = np.stack([self.ids.astype(np.float32), self.logprobs])
        rest[:, index] = 0
        ranks.parts, ranks.rests = self.parts, [rest]
        start = time.process_time()
        completions, texts, verdicts = pending._exchange(verdicts)
        seconds["responses"] = time.process_time() - start
        assert np.array_equal(completions.tokens, self.ids)
        assert list(texts) == self.texts
        ranks.parts = []
        sizes["token ids"] = sizes["log-probabilities"] = rest.nbytes / 2e6
        sizes["texts and verdicts"] = sum(map(len, self.parts)) / 1e6
        return pending_batch(pending, completions, texts, verdicts)

    def _score(
        self, ranks: PlayedRanks, batch: RolloutBatch, seconds: dict[str, float], sizes: dict[str, float]
    ) -> tuple[ScoredBatch, TokenCoefficients]:
        updater = Updater(self.recipe, None, ranks)  # type: ignore[arg-type]  # no model: the scores are made up
        wanted = np.repeat(np.arange(self.prompts) % 2 == 0, self.samples)
        advantages = np.where(wanted, self.rewards - 0.5, 0.0)
        groups = deal(batch.tokens_of_groups(wanted), self.ranks)[ranks.rank]
        rows = batch.rows(groups)
        rows = rows[wanted[rows]]
        own = token_index(self.starts, rows)
        found = []
        for name, values in (("old log-probabilities", self.logprobs), ("entropies", self.entropies)):
            start = time.process_time()
            every = updater._from_all_ranks(values[own], rows, wanted, batch)
            found.append(np.where(np.repeat(wanted, self.lengths), every, values))
            seconds["scores"] = seconds.get("scores", 0.0) + time.process_time() - start
            sizes[name] = ranks.received / 1e6
        held = HeldFeatures(None, own, len(self.ids), ranks)  # type: ignore[arg-type]  # no features either
        per_token = np.repeat(advantages, self.lengths)
        start = time.process_time()
        contrast = _Contrast(self.alpha[own].astype(np.float64), self.margins[own].astype(np.float64), (1.0, 1.0))
        coefficients = contrast.over_all_ranks(held, per_token, CoefficientSettings())
        seconds["coefficients"] = time.process_time() - start
        sizes["margins"] = ranks.received / 1e6
        everything = np.ones(len(self.ids), bool)
        return ScoredBatch(batch, advantages, found[0], found[1], None, None, everything), coefficients

    def _record(
        self,
        ranks: PlayedRanks,
        scored: ScoredBatch,
        coefficients: TokenCoefficients,
        folder: Path,
        seconds: dict[str, float],
    ) -> None:
        run = RunFolder(folder) if ranks.rank == 0 else ReadOnlyRunFolder(folder)
        run.rollouts.mkdir(parents=True, exist_ok=True)
        recorder = RolloutRecorder(run, self.tokenizer, ranks)
        start = time.process_time()
        recorder.record(1, scored, coefficients)
        assert recorder._pending is not None
        recorder._pending[1].result()
        seconds["records"] = time.process_time() - start
        mine = run._rollout_part(1, ranks.rank)
        for other in range(self.ranks):
            if other != ranks.rank:
                run._rollout_part(1, other).write_bytes(mine.read_bytes())
        start = time.process_time()
        recorder.finish()
        seconds["joining records"] = time.process_time() - start
        recorder.close()


def pending_batch(
    pending: PendingRollout, completions: Completions, texts: Sequence[str], verdicts: Sequence[Verdict]
) -> RolloutBatch:
    """The batch as every rank has it after the exchange."""
    prompts = tuple(prompt for prompt in pending.prompts for _ in range(pending.sampling.samples))
    return RolloutBatch(
        pending.problems,
        Sequences(prompts, completions.tokens, completions.starts),
        tuple(texts),
        tuple(verdicts),
        completions.truncated,
        completions.logprobs,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--play", type=int, nargs="*", default=[0, 1, 63], help="the ranks that are played")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--out", type=Path, help="JSON with the numbers and the machine")
    options = parser.parse_args()
    run = PlayedRun(options.ranks, options.tokens, options.prompts, options.samples)
    results = []
    for rank in options.play:
        rounds = []
        for _ in range(options.rounds):
            with TemporaryDirectory() as folder:
                spent, sizes = run.play(rank, Path(folder))
            rounds.append(spent)
        seconds = {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}
        beyond = sum(size for name, size in sizes.items() if "ids" not in name and "log-prob" not in name)
        results.append(
            {"rank": rank, "seconds": seconds, "total_seconds": sum(seconds.values()), "megabytes": sizes}
            | {"megabytes_beyond": beyond}
        )
    rows = [
        {"rank": str(result["rank"])}
        | {name: f"{value:.2f} s" for name, value in result["seconds"].items()}
        | {"all": f"{result['total_seconds']:.2f} s"}
        for result in results
    ]
    show(f"{options.tokens:,} tokens on {options.ranks} ranks: processor seconds of a rank", rows)
    sizes = results[0]["megabytes"]
    show("megabytes to every rank", [{name: f"{size:.1f}" for name, size in sizes.items()}])
    print(f"beyond token ids and log-probabilities: {results[0]['megabytes_beyond']:.1f} MB")
    write(options.out, {"workload": {"ranks": options.ranks, "tokens": options.tokens}, "results": results})


if __name__ == "__main__":
    main()
