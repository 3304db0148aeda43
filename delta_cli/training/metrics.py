"""Compute the numbers of a step; runs/metrics.py says what each means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.arrays import Bools, Doubles
from backends.collective import SOLO
from backends.interface import Collective, Learner
from delta_cli.credit.coefficients import TokenCoefficients
from delta_cli.credit.corrections import Correction, accepted_tokens, correction_weights, raw_weights
from delta_cli.credit.surrogate import Totals
from delta_cli.rewards.judge import JudgeUsage
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.runs.metrics import RANK_PHASES
from delta_cli.runs.observer import Example

if TYPE_CHECKING:
    from delta_cli.training.update import ScoredBatch


@dataclass
class Updates:
    """What happened in the updates of one batch."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of updates that moved the weights
    skipped: int = 0
    nonfinite: int = 0
    totals: list[Totals] = field(default_factory=list)  # of every update that ran a forward pass
    probe_logprob_change: float = 0.0  # nats, see metrics

    def record(self) -> dict[str, Any]:
        """The metrics of the updates."""
        tokens = max(sum(total.tokens for total in self.totals), 1)
        return {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "updates": len(self.norms),
            "updates_skipped": self.skipped,
            "nonfinite_updates": self.nonfinite,
            "clip_fraction": sum(total.closed for total in self.totals) / tokens,
            "kl_old": sum(total.kl_old for total in self.totals) / tokens,
            "kl_reference": sum(total.kl_reference for total in self.totals) / tokens,
            "ratio_gap_first": self.totals[0].ratio_gap if self.totals else None,
            "ratio_gap": max((total.ratio_gap for total in self.totals), default=0.0),
            "probe_logprob_change": self.probe_logprob_change,
        }


def describe_staleness(batch: RolloutBatch, version: int) -> dict[str, Any]:
    """How many updates before ``version`` the batch was drawn; if that differs by token, of the oldest and the mean."""
    found: dict[str, Any] = {"staleness": version - batch.version}
    if batch.token_versions is not None:
        found["staleness_mean"] = mean(version - batch.token_versions)
    return found


def describe_batch(batch: RolloutBatch, wanted: int) -> dict[str, Any]:
    """Metrics of the responses to a batch of ``wanted`` prompts."""
    lengths, counted = batch.sequences.lengths, ~batch.failed
    graded = [verdict for verdict, counts in zip(batch.verdicts, counted, strict=True) if counts]
    return describe_episodes(batch) | {
        "reward_mean": mean(batch.rewards[counted]),
        **{f"reward_{name}": mean(rewards[counted]) for name, rewards in batch.each_reward.items()},
        "accuracy": mean(batch.correct[counted]),
        **_accuracy_by_source(batch, counted),
        "reward_failures": sum(verdict.failure is not None for verdict in graded),
        "zero_variance_groups": 1 - len(batch.mixed_groups) / len(batch.problems),
        "prompts_drawn": batch.draws * wanted,
        "batch_filled": len(batch.problems) / wanted,
        "response_length_mean": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "truncated": float(batch.truncated.mean()),
        "tokens": int(lengths.sum()),
    }


def describe_curriculum(batch: RolloutBatch, pass_rates: Doubles) -> dict[str, Any]:
    """Metrics of the groups drawn for the batch, and of the latest pass rates of all problems [P]; none without a
    curriculum.
    """
    if not batch.pass_rates:
        return {}
    measured = pass_rates[~np.isnan(pass_rates)]
    return {
        "pass_rate_drawn": float(np.mean([rate for _, rate in batch.pass_rates])),
        "problems_measured": len(measured) / len(pass_rates),
        "problems_always_solved": float(np.mean(measured == 1)),
        "problems_never_solved": float(np.mean(measured == 0)),
    }


def _accuracy_by_source(batch: RolloutBatch, counted: NDArray[np.bool_]) -> dict[str, float | None]:
    """The accuracy on the problems of each source, if the batch has problems of several."""
    sources = np.repeat([problem.source for problem in batch.problems], batch.samples)
    names = sorted(set(sources.tolist()))
    return {f"accuracy_{name}": mean(batch.correct[counted & (sources == name)]) for name in names if len(names) > 1}


def mean(values: NDArray[Any]) -> float | None:
    """The mean of values; None if there are none."""
    return float(values.mean()) if len(values) else None


def describe_judges(usage: JudgeUsage | None, ranks: Collective = SOLO) -> dict[str, Any]:
    """Metrics of what judges were asked, added up over the ranks; none without a judge."""
    if usage is None:
        return {}
    names = list(asdict(usage))
    totals = ranks.sum(np.array(list(asdict(usage).values()), np.float64))
    found = dict(zip(names, totals.tolist(), strict=True))
    return {f"judge_{name}": value if name == "cost" else int(value) for name, value in found.items()}


def describe_episodes(batch: RolloutBatch) -> dict[str, Any]:
    """Metrics of episodes; none if responses have one turn."""
    episodes = batch.episodes
    if episodes is None:
        return {}
    return {
        "episode_turns_mean": float(np.mean([episode.turns for episode in episodes])),
        "environment_calls": sum(episode.calls for episode in episodes),
        "environment_errors": sum(episode.errors for episode in episodes),
        "environment_failures": sum(episode.failure is not None for episode in episodes),
        "observation_tokens": sum(episode.observation_tokens for episode in episodes),
        "observations_cut": sum(episode.cut for episode in episodes),
        "seconds_environment": sum(episode.seconds for episode in episodes),
        "seconds_environment_wait": batch.environment_wait,
    }


def describe_scores(batch: ScoredBatch, correction: Correction) -> dict[str, Any]:
    """Metrics of entropies, and of the gap between the sampler's log-probabilities and the trainer's."""
    return {
        "entropy_mean": float(np.mean(batch.entropies, dtype=np.float64)),
        **describe_gap(batch, correction),
        "scored": float(batch.scored.mean()),
    }


def describe_coefficients(
    coefficients: TokenCoefficients, advantages: Doubles, contrasted: bool = True
) -> dict[str, Any]:
    """Metrics of token weights, by the sign of each token's advantage [N].

    ``contrasted`` adds those of DelTA's margins.
    """
    weights = coefficients.weights
    positive, negative = advantages > 0, advantages < 0
    quantiles = np.quantile(weights, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist() if len(weights) else [None] * 5
    margins = {
        "margin_positive": mean(coefficients.margins[positive] > 0),
        "margin_negative": mean(coefficients.margins[negative] > 0),
        "gamma_positive": coefficients.temperatures[0],
        "gamma_negative": coefficients.temperatures[1],
        "degenerate": coefficients.degenerate,
    }
    return {
        "coefficient_mean": mean(weights),
        "coefficient_std": float(weights.std()) if len(weights) else None,
        "coefficient_min": float(weights.min(initial=np.inf)) if len(weights) else None,
        "coefficient_max": float(weights.max(initial=-np.inf)) if len(weights) else None,
        **dict(zip((f"coefficient_p{share}" for share in ("05", "25", "50", "75", "95")), quantiles, strict=True)),
        "coefficient_positive": mean(weights[positive]),
        "coefficient_negative": mean(weights[negative]),
        **(margins if contrasted else {}),
    }


def describe_ranks(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of the differences between ranks: largest memory, and the spread of phase times."""
    found: dict[str, Any] = {"processes": len(records)}
    for name in ("peak_memory", "swapped"):
        values = [record[name] for record in records if record[name] is not None]
        found[name] = max(values, default=None)
    found["peak_memory_least"] = min(record["peak_memory"] for record in records)
    if drawing := [record for record in records if "graph_share" in record]:
        found["graph_share"] = min(record["graph_share"] for record in drawing)
        found["graph_fault"] = next((record["graph_fault"] for record in drawing if record["graph_fault"]), None)
    for phase in RANK_PHASES:
        times = [record[f"seconds_{phase}"] for record in records]
        found[f"seconds_{phase}_spread"] = max(times) - min(times)
    return found


def describe_process(learner: Learner) -> dict[str, Any]:
    """Metrics of this process: its memory and, on a GPU that draws, its use of CUDA graphs."""
    found: dict[str, Any] = {"peak_memory": learner.peak_memory(), "swapped": swapped()}
    if (used := learner.take_graph_use()) is not None:
        found |= {"graph_share": used.share, "graph_fault": used.fault}
    return found


def swapped() -> int | None:
    """Bytes of this process that are swapped out; None except on Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^VmSwap:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else None


def describe_learner(learner: Learner) -> str:
    """Backend and threads of a run, in a few words."""
    threads = {None: "", 1: ", 1 thread"}.get(learner.threads, f", {learner.threads} threads")
    return f"{learner.name}{threads}"


def first_examples(batch: RolloutBatch) -> list[Example]:
    """The batch's first right and first wrong response."""
    rows = [np.flatnonzero(batch.correct == right)[:1] for right in (True, False)]
    return [
        Example(
            question=batch.problems[row // batch.samples].question,
            response=batch.texts[row],
            correct=bool(batch.correct[row]),
            reward=float(batch.rewards[row]),
        )
        for row in np.concatenate(rows)
    ]


def describe_gap(batch: ScoredBatch, correction: Correction) -> dict[str, Any]:
    """Metrics of the gap over the responses that a forward pass scored; null if it scored none.

    Quarters are those of each response: a gap that grows from one to the next comes from what the engine keeps, such as
    its cache. The effective sample size is (Σ w)² / Σ w² over the number of tokens, or of responses, for weights w that
    are not bounded.
    """
    sequences = batch.rollout.sequences
    scored = batch.scored
    difference = np.asarray(batch.old_logprobs, np.float64) - batch.rollout.engine_logprobs
    gap = np.abs(difference)
    p99, p999 = np.quantile(gap[scored], [0.99, 0.999]).tolist() if scored.any() else (None, None)
    found = {
        "engine_gap_mean": mean(gap[scored]),
        "engine_gap_max": float(gap[scored].max()) if scored.any() else None,
        "engine_gap_p99": p99,
        "engine_gap_p999": p999,
    }
    quarters = _quarters(sequences.starts)
    for quarter in range(4):
        found[f"engine_gap_q{quarter + 1}"] = mean(gap[scored & (quarters == quarter)])
    firsts = sequences.starts[:-1][sequences.lengths > 0]
    firsts = firsts[scored[firsts]]
    found["ess_token"] = _effective_share(raw_weights("token", difference, sequences.starts)[scored])
    found["ess_sequence"] = _effective_share(raw_weights("sequence", difference, sequences.starts)[firsts])
    if correction.active:
        found["correction_cut"] = mean(_cut(correction, difference, sequences.starts)[scored])
    return found


def _cut(correction: Correction, difference: Doubles, starts: Any) -> Bools:
    """Which tokens the correction rejects, or whose weight it changes, [N]."""
    raw = raw_weights(correction.weight, difference, starts)
    changed: Bools = correction_weights(correction, difference, starts) != raw
    return changed | ~accepted_tokens(correction, difference, starts)


def _quarters(starts: Any) -> Any:
    """The quarter of its response that each token lies in, 0 to 3, [N]."""
    lengths = np.diff(starts)
    places = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    return 4 * places // np.repeat(np.maximum(lengths, 1), lengths)


def _effective_share(weights: Doubles) -> float | None:
    if not len(weights):
        return None
    scaled = weights / weights.max()  # squares of large weights would overflow
    return float(scaled.sum() ** 2 / (len(scaled) * (scaled**2).sum()))
