"""The numbers of a step, as metrics.jsonl holds them: one documented table."""

from __future__ import annotations

from dataclasses import dataclass

RANK_PHASES = ("rollout", "score", "update")  # those whose time may differ between processes
PHASES = ("rollout", "reward", "score", "credit", "update", "evaluate", "save")


@dataclass(frozen=True)
class Metric:
    """What a number of metrics.jsonl says, in which unit, and what a healthy value looks like."""

    unit: str
    meaning: str
    healthy: str = ""


METRICS: dict[str, Metric] = {
    "step": Metric("steps", "steps done, this one included"),
    "reward_mean": Metric("reward", "mean reward of the batch's responses", "rises"),
    "accuracy": Metric(
        "share",
        "responses that the verifier called correct, of several all of them; accuracy_NAME: of one of several sources",
        "rises",
    ),
    "reward_failures": Metric(
        "responses", "with a verification that was killed or failed; the reward of that one is 0", "0"
    ),
    "zero_variance_groups": Metric(
        "share", "prompts whose responses all got one reward: nothing is learned from them", "below 0.8"
    ),
    "prompts_drawn": Metric("prompts", "prompts drawn to fill the batch", "the recipe's, unless sampling is dynamic"),
    "batch_filled": Metric("share", "prompts in the batch, of those the recipe wants; less where dynamic gave up", "1"),
    "response_length_mean": Metric("tokens", "mean length of a response, end-of-sequence token included"),
    "response_length_max": Metric("tokens", "longest response"),
    "truncated": Metric("share", "responses cut at the limit", "below 0.1"),
    "tokens": Metric("tokens", "response tokens of the batch"),
    "entropy_mean": Metric(
        "nats", "mean entropy of the distributions tokens were drawn from", "falls slowly, stays above 0"
    ),
    "scored": Metric("share", "response tokens that a forward scored: those that something is learned from"),
    "engine_gap_mean": Metric(
        "nats",
        "mean |log-probability of the engine − the trainer's| over the tokens scored, if any",
        "below 0.05",
    ),
    "engine_gap_max": Metric("nats", "the largest of these"),
    "engine_gap_p99": Metric("nats", "99 % of these are at most so large"),
    "engine_gap_p999": Metric("nats", "99.9 % of these are at most so large", "below 0.1, or a [correction]"),
    "engine_gap_q1": Metric("nats", "mean gap in the first quarter of each response"),
    "engine_gap_q2": Metric("nats", "mean gap in the second quarter"),
    "engine_gap_q3": Metric("nats", "mean gap in the third quarter"),
    "engine_gap_q4": Metric("nats", "mean gap in the last quarter", "as in the first"),
    "ess_token": Metric(
        "share", "effective sample size of the tokens under importance weights trainer / engine, not bounded", "1"
    ),
    "ess_sequence": Metric("share", "the same of the responses, each with the product of its tokens' weights", "1"),
    "staleness": Metric(
        "updates", "of the weights since the batch was drawn; more than 0 with engine.async_steps", "0"
    ),
    "loss": Metric("", "mean over the updates; 0 at the first on a batch by construction: watch the reward"),
    "grad_norm": Metric("", "mean over the updates, before clipping", "finite, above 0"),
    "learning_rate": Metric("", "of the step"),
    "updates": Metric("updates", "times the weights moved"),
    "updates_skipped": Metric("updates", "mini-batches without a gradient, or with one that was not finite", "0"),
    "nonfinite_updates": Metric("updates", "skipped because loss or gradient was not finite", "0"),
    "clip_fraction": Metric(
        "share",
        "tokens whose gradient the gate cut off, of those that something is learned from; so the next four",
        "below 0.2",
    ),
    "kl_old": Metric("nats", "mean k3 estimate of KL(rollout policy ‖ policy) over the updates", "below 0.1"),
    "kl_reference": Metric("nats", "mean estimate of KL(policy ‖ initial policy), with update.kl_coefficient"),
    "ratio_gap_first": Metric("nats", "largest |logp − logp_old| at the first update: rounding", "below 0.001"),
    "ratio_gap": Metric("nats", "largest |logp − logp_old| at any update", "above 0 when there is more than one"),
    "probe_logprob_change": Metric(
        "nats", "largest change of a log-probability of the batch's shortest response over the updates", "above 0"
    ),
    "coefficient_mean": Metric("", "mean token weight; like the next ten, if the method weighs tokens", "1"),
    "coefficient_std": Metric("", "standard deviation of the coefficients", "above 0"),
    "coefficient_min": Metric("", "smallest coefficient"),
    "coefficient_max": Metric("", "largest coefficient"),
    "coefficient_p05": Metric("", "5 % of the coefficients lie below"),
    "coefficient_p25": Metric("", "25 % of the coefficients lie below"),
    "coefficient_p50": Metric("", "median coefficient"),
    "coefficient_p75": Metric("", "75 % of the coefficients lie below"),
    "coefficient_p95": Metric("", "95 % of the coefficients lie below"),
    "coefficient_positive": Metric("", "mean coefficient of tokens with A > 0"),
    "coefficient_negative": Metric("", "mean coefficient of tokens with A < 0"),
    "margin_positive": Metric(
        "share",
        "tokens with A > 0 nearer to their own side's centroid; like the next four, with credit delta",
        "above 0.5",
    ),
    "margin_negative": Metric(
        "share",
        "tokens with A < 0 nearer to their own side's centroid; few, because wrong responses consist of mostly right "
        "tokens",
        "0.05 to 0.4",
    ),
    "gamma_positive": Metric("", "temperature of the margins of tokens with A > 0"),
    "gamma_negative": Metric("", "temperature of the margins of tokens with A < 0"),
    "degenerate": Metric("", "why there was no contrast between the sides; null otherwise", "null"),
    "tokens_per_second": Metric("tokens/s", "response tokens by the time of the whole step"),
    "rollout_tokens_per_second": Metric("tokens/s", "response tokens by the time of the rollout"),
    "peak_memory": Metric("bytes", "most memory used so far (device; on a CPU, of the process)"),
    "swapped": Metric(
        "bytes", "memory of this process that was moved to disk; null where the system does not say", "0"
    ),
    "seconds": Metric("s", "time of the step"),
    "eval_accuracy": Metric("share", "accuracy on the held-out problems; only in steps that evaluate", "rises"),
} | {f"seconds_{phase}": Metric("s", f"time of the phase: {phase}") for phase in PHASES}
RANK_METRICS = {
    "processes": Metric("processes", "that trained; only where there are several, like what follows"),
    "peak_memory_least": Metric("bytes", "peak_memory of the process that used least"),
} | {
    f"seconds_{phase}_spread": Metric("s", f"time of the phase {phase}: the slowest process less the fastest", "small")
    for phase in RANK_PHASES
}
AHEAD_METRICS = {
    "seconds_waited": Metric(
        "s",
        "with engine.async_steps: time the trainer waited for the batch; most of seconds_rollout overlaps training",
    ),
}
JUDGE_METRICS = {
    "judge_calls": Metric("requests", "with a judge, like what follows: sent to it, repetitions included"),
    "judge_kept": Metric("verdicts", "that were known already"),
    "judge_failures": Metric("responses", "without a verdict: they have no reward and no advantage", "0"),
    "judge_prompt_tokens": Metric("tokens", "that the judge read"),
    "judge_completion_tokens": Metric("tokens", "that the judge wrote"),
    "judge_cost": Metric("", "of these tokens, by reward.judge.price_prompt and price_completion"),
}
OPTION_METRICS = {
    "correction_cut": Metric(
        "share", "with [correction]: tokens that it rejects or whose weight it bounds", "below 0.2"
    ),
    "entropy_coefficient": Metric("", "with an entropy bonus: its weight"),
    "staleness_mean": Metric("updates", "with engine.in_flight: mean over the tokens; staleness is the oldest's", "0"),
}
CURRICULUM_METRICS = {
    "pass_rate_drawn": Metric(
        "share",
        "with data.curriculum, like what follows: mean pass rate of the groups drawn for the batch, those that dynamic "
        "sampling left out included",
        "0.2 to 0.8",
    ),
    "problems_measured": Metric("share", "problems whose pass rate is known", "rises"),
    "problems_always_solved": Metric("share", "of these: every response was right when the problem was last drawn"),
    "problems_never_solved": Metric(
        "share", "of these: no response was right when the problem was last drawn", "falls"
    ),
}
REWARD_METRICS = {
    "reward_NAME": Metric("reward", "with several rewards: mean of the one of that name, before its weight", "rises"),
}
EPISODE_METRICS = {
    "episode_turns_mean": Metric(
        "turns", "with [environment], like what follows: mean turns of the model in an episode"
    ),
    "environment_calls": Metric("calls", "of environments and tools"),
    "environment_errors": Metric("calls", "that failed, with a message for the model", "falls"),
    "environment_failures": Metric(
        "episodes", "that failed with their environment: they have no reward and no advantage", "0"
    ),
    "observation_tokens": Metric("tokens", "that environments wrote"),
    "observations_cut": Metric("observations", "longer than environment.observation_tokens", "0"),
    "seconds_environment": Metric("s", "sum of the times that environments worked; many work at once"),
    "seconds_environment_wait": Metric(
        "s", "in which the sampler had nothing to do but wait for environments", "small"
    ),
}
GRAPH_METRICS = {
    "graph_share": Metric(
        "share",
        "if the trainer draws on CUDA: forward passes of one token, and draws from them, that ran as recorded CUDA "
        "graphs, in this step's rollouts and evaluation; of several processes, the least",
        "above 0.9",
    ),
    "graph_fault": Metric("", "why CUDA graphs could not be recorded; null otherwise", "null"),
}
OPTION_METRICS |= EPISODE_METRICS | JUDGE_METRICS | CURRICULUM_METRICS | GRAPH_METRICS
METRICS |= RANK_METRICS | AHEAD_METRICS | OPTION_METRICS | REWARD_METRICS
