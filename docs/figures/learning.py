"""Figures of what is learned, and of what the credit looks at."""

from __future__ import annotations

from typing import Any

import numpy as np
from results import Named, mean_of, percent, points, result, span, table

from delta_cli.study.summary import over_seeds


def _learning() -> Named:
    rows = result("quickstart")["rows"]
    yield "quickstart.seeds", str(len(rows))
    yield "quickstart.to_80", span(row["seconds_to_target"] for row in rows)
    yield "quickstart.seconds", span(row["seconds"] for row in rows)
    yield from _ends("quickstart", rows)
    rows = result("real_seeds")["rows"]
    yield "real_seeds.minutes", span(row["seconds"] / 60 for row in rows)
    yield from _ends("real_seeds", rows)
    header = ("seed", "before", "after 24 steps", "after 48 steps", "training", "peak memory")
    yield "real_seeds.table", table(header, map(_seed, rows))
    yield from _calculator(header)


def _calculator(header: tuple[str, ...]) -> Named:
    """Word problems with a calculator in the running text, and without it."""
    arms = {"with": result("calculator")["rows"], "without": result("calculator_without")["rows"]}
    yield "calculator.after", span(100 * row["accuracy"][-1]["accuracy"] for row in arms["with"])
    lines = ([arm, *_seed(row)] for arm, rows in arms.items() for row in rows)
    yield "calculator.table", table(("calculator", *header), lines)


def _ends(name: str, rows: list[dict[str, Any]]) -> Named:
    """Accuracy before and after the run, and peak memory."""
    yield f"{name}.before", span(100 * row["accuracy"][0]["accuracy"] for row in rows)
    yield f"{name}.after", span(100 * row["accuracy"][-1]["accuracy"] for row in rows)
    yield f"{name}.memory", f"{max(row['peak_bytes'] for row in rows) / 1e9:.1f}"


def _seed(row: dict[str, Any]) -> list[str]:
    cells = [f"{100 * at['accuracy']:.1f} ({100 * at['low']:.1f} to {100 * at['high']:.1f})" for at in row["accuracy"]]
    return [str(row["seed"]), *cells, f"{row['seconds'] / 60:.1f} min", f"{row['peak_bytes'] / 1e9:.1f} GB"]


def _studies() -> Named:
    for name, arms in STUDIES.items():
        yield f"study_{name}.table", _study(f"study_{name}/study", arms)
    for name, arms in (("format", ("delta_12", "dapo_12")), ("noise", ("delta", "dapo", "delta_30", "dapo_30"))):
        rows = {row["arm"]: row for row in result(f"study_{name}/study")["rows"]}
        yield from ((f"study_{name}.{arm}", f"{100 * rows[arm]['accuracy']['mean']:.1f}") for arm in arms)
    noise = {row["arm"]: row for row in result("study_noise/study")["rows"]}
    yield "study_noise.p", f"{noise['dapo_30']['accuracy_test']['p_value']:.2f}"
    for name in ("quickstart", "words"):
        rows = {row["arm"]: row["accuracy"] for row in result(f"study_{name}/study")["rows"]}
        yield f"found.{name}.seeds", str(rows["delta"]["seeds"])
        yield from ((f"found.{name}.{arm}", percent(rows[arm])) for arm in ("delta", "dapo", "grpo") if arm in rows)


STUDIES: dict[str, dict[str, str]] = {
    "quickstart": {"delta_random": "coefficients drawn at random", "delta_exact": "proxy `hidden_exact`"},
    "words": {"exact_group": "proxy `hidden_exact`, centroids by group"},
}


def _study(name: str, remarks: dict[str, str]) -> str:
    """A study's own table, arm by arm in its order."""
    study = result(name)
    target = f"steps to {100 * study['study']['target']:.0f} %"
    header = ("arm", "final held-out accuracy, %", "p", "area under the learning curve, %", "p", target)
    rows = []
    for row in study["rows"]:
        seeds = row["accuracy"]["seeds"]
        all_of = "" if row["reached"] == seeds else f" ({row['reached']} of {seeds} seeds)"
        steps = f"{row['steps_to_target']['mean']:.0f}{all_of}" if row["steps_to_target"] else "never"
        remark = f" ({remarks[row['arm']]})" if row["arm"] in remarks else ""
        first = [f"{row['arm']}{remark}", percent(row["accuracy"]), _p(row["accuracy_test"])]
        last = [steps, f"{row['entropy']['mean']:.3f}", f"{row['length']['mean']:.1f}"]
        rows.append([*first, percent(row["area"]), _p(row["area_test"]), *last])
    return table((*header, "entropy", "length"), rows)


def _p(test: dict[str, Any] | None) -> str:
    return "" if test is None else f"{test['p_value']:.3f}"


def _lab() -> Named:
    """The one hypothesis that was written down before its test, and the gradient's variance."""
    dapo, arm = result("lab/confirm")["rows"]
    yield "lab.seeds", str(arm["runs"])
    yield "lab.gain", f"{100 * arm['area difference']['mean']:.1f}"
    for key in ("area", "final"):
        yield f"lab.{key}.dapo", f"{100 * dapo[key]['mean']:.1f}"
        yield f"lab.{key}.arm", f"{100 * arm[key]['mean']:.1f}"
        yield f"lab.{key}.difference", points(arm[f"{key} difference"])
        yield f"lab.{key}.p", f"{arm[f'{key} p']:.{3 if key == 'area' else 2}f}"
    header = ("arm", "seeds", "area under the learning curve, %", "− DAPO, points")
    rows = {row["arm"]: row for row in result("lab/explore")["rows"]}
    yield "lab.table", table(header, (_lab_row(rows[arm], what) for arm, what in LAB.items()))
    for arm in ("dapo_0.001", "delta_0.001"):
        yield f"lab.{arm}", f"{100 * rows[arm]['area']['mean']:.1f}"
    runs = result("gradient_noise")["results"]
    noise = {way: [run[way]["ratio"] / run["dapo"]["ratio"] for run in runs] for way in runs[0]}
    for way, name in (("delta", "delta"), ("delta, exact by group", "exact_group")):
        yield f"gradient_noise.{name}", f"{100 * abs(np.mean(noise[way]) - 1):.0f}"
    header = ("weights", f"noise relative to DAPO's, {len(runs)} batches")
    yield "gradient_noise.table", table(header, ([what, mean_of(noise[way], 3)] for way, what in NOISE.items()))


LAB = {
    "dapo": "DAPO",
    "delta": "DelTA, the paper's",
    "topk": "top-k proxy",
    "exact": "exact proxy",
    "group": "centroids by group",
    "topk_group": "top-k proxy, by group",
    "exact_group": "exact proxy, by group",
    "k0": "K = 0",
    "k2": "K = 2",
    "wide": "range 0.5 to 1.5",
    "wide_group": "range 0.2 to 1.8, by group",
    "first_gamma": "temperature of the first step",
    "equations": "blame on false equations alone",
    "equations_delta": "blame on false equations × DelTA",
}
NOISE = {
    "delta": "DelTA, the paper's",
    "delta, random": "DelTA, coefficients drawn at random",
    "delta, exact by group": "DelTA, exact proxy, centroids by group",
    "delta, 0.2 to 1.8": "DelTA, range 0.2 to 1.8",
    "false equations": "blame on false equations alone",
}


def _lab_row(row: dict[str, Any], what: str) -> list[str]:
    difference = points(row["area difference"]) if "area difference" in row else ""
    return [what, str(row["runs"]), f"{100 * row['area']['mean']:.1f}", difference]


def _mistakes() -> Named:
    """How often the first wrong token outweighs another token of its response."""
    header = ("weight", "at the start ({} right)", "after 30 steps ({} right)")
    yield (
        "mistakes.table",
        table(
            (header[0], *(text.format(_right(step)) for text, step in zip(header[1:], (0, 30), strict=True))),
            ([what, *(_chance(name, step) for step in (0, 30))] for name, what in MISTAKES.items()),
        ),
    )
    kinds = [record["kinds"]["delta"] for record in result("mistakes_filler12")["records"]]
    for key in ("formatting_positive", "digits_positive", "formatting_negative", "digits_negative"):
        yield f"format.{key}", f"{np.mean([kind[key] for kind in kinds]):.2f}"
    yield "format.share", f"{100 * np.mean([kind['formatting_share'] for kind in kinds]):.0f}"
    for scope in ("batch", "group"):
        yield f"reward_noise.{scope}", f"{np.mean([row['rank_correlation_kept'] for row in _flipped(scope)]):.3f}"


MISTAKES = {
    "delta": "DelTA",
    "delta, K = 0": "DelTA without refinement (K = 0)",
    "delta hidden_exact": "DelTA, `hidden_exact`",
    "delta hidden_exact, by group": "DelTA, `hidden_exact`, centroids by group",
    "delta, within side": "within-side only (ablation)",
    "entropy (forking tokens)": "entropy (forking tokens)",
    "surprisal": "surprisal, −log p (no method's weight)",
    "fipo, after the updates": "FIPO",
}


def _at(step: int) -> list[dict[str, Any]]:
    return [record for record in result("mistakes")["records"] if record["step"] == step]


def _right(step: int) -> str:
    return f"{100 * np.mean([record['accuracy'] for record in _at(step)]):.0f} %"


def _chance(weight: str, step: int) -> str:
    """Mean over seeds and half of its 95 % interval."""
    rows = [row for record in _at(step) for row in record["separation"] if row["weight"] == weight]
    interval = over_seeds([row["auc"] for row in rows])
    return f"{interval.mean:.3f} ± {interval.high - interval.mean:.3f}"


def _flipped(scope: str) -> list[dict[str, Any]]:
    """Coefficients at the start with 30 % of the rewards flipped."""
    rows = [row for record in _at(0) for row in record["noise"]]
    return [row for row in rows if row["scope"] == scope and row["share"] == 0.3]


def _public_code() -> Named:
    """How much the public code's choices change the weight of a token."""
    rows = {row["option"]: row for row in result("public_code")["results"]}
    for name, option in PUBLIC.items():
        yield f"public_code.{name}", f"{rows[option]['least']:.2f} to {rows[option]['most']:.2f}"


PUBLIC = {
    "shards_2": "delta.shards = 2",
    "shards_4": "delta.shards = 4",
    "one_sided": 'delta.one_sided = "zero", all right',
}


def _real_text() -> Named:
    """What the credit looks at in SmolLM2's responses: kinds of tokens, surprisal, the first wrong digit."""
    first, last = result("real_text")["parts"].values()
    rows = []
    for side, name in (("+", "right (A > 0)"), ("−", "wrong (A < 0)")):
        kinds = [{row["kind"]: row for row in part["kinds"] if row["side"] == side} for part in (first, last)]
        for kind, what in KINDS.items():
            early, late = (found[kind] for found in kinds)
            values = [f"{early['coefficient']:.3f}", f"{late['coefficient']:.3f}", f"{late['surprisal']:.3f}"]
            rows.append([name, what, f"{100 * late['share']:.0f} %", *values])
    header = ("side", "kind of token", "share", "coefficient, steps 1–3", "steps 10–12", "surprisal, steps 10–12")
    yield "real_text.kinds", table(header, rows)
    for name, part in (("first", first), ("last", last)):
        for row in part["agreement"]:
            yield f"real_text.{name}.{'right' if row['side'] == '+' else 'wrong'}", _signed(row["surprisal"])
        yield f"real_text.{name}.responses", str(part["first_wrong"][0]["responses"])
    header = ("weight", "another token, steps 1–3", "another digit", "another token, steps 10–12", "another digit")
    pairs = zip(first["first_wrong"], last["first_wrong"], strict=True)
    yield (
        "real_text.mistakes",
        table(header, ([WEIGHTS[early["weight"]], *_chances(early, late)] for early, late in pairs)),
    )


KINDS = {
    "formatting": "formatting",
    "digits": "digits",
    "operators": "operators",
    "words": "words",
    "end": "end of the response",
}
WEIGHTS = {"coefficient": "DelTA's coefficient", "surprisal": "surprisal", "entropy": "entropy"}


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _chances(*rows: dict[str, Any]) -> list[str]:
    return [f"{row[key]:.3f}" for row in rows for key in ("auc", "auc_digits")]


def _temperatures() -> Named:
    """The runs by which the temperature of recipes/smollm2_135m.toml was chosen."""
    runs = result("h100/real_settings")["results"]
    steps = [str(row["step"]) for row in runs["temperature 1"]]
    rows = ([what, *(f"{100 * row['accuracy']:.1f}" for row in runs[name])] for name, what in SETTINGS.items())
    yield "real_settings.table", table(("settings", "before", *(f"{step} steps" for step in steps[1:])), rows)


SETTINGS = {
    "temperature 0.6": "temperature 0.6",
    "temperature 1": "temperature 1, the recipe's",
    "temperature 1, learning rate 2e-5": "temperature 1, twice the learning rate",
    "temperature 0.6, three shots": "temperature 0.6, a third solved problem, a subtraction",
    "temperature 1, three shots": "temperature 1, the same third problem",
}


def _engines() -> Named:
    """Twenty steps with the local engine and with vLLM, and DelTA inside TRL."""
    for name, rate in (("vllm_learning", "3e-4"), ("vllm_learning_fast", "1e-3")):
        header = (f"learning rate {rate}", "seed 0", "seed 1", "seed 2")
        yield f"{name}.table", table(header, (_seeds(name, way, what) for way, what in ENGINES.items()))
    before = [row["before"] for row in result("vllm_learning")["results"].values()]
    yield "vllm_learning.before", span(100 * value for value in before)
    means = result("trl_learning")["mean"] | result("trl_learning_together")["mean"]
    rows = []
    for way, what in TRL.items():
        reward = "{:.3f} [{:.3f}, {:.3f}]".format(*means[way]["last quarter"])
        rows.append([what, reward, "{:.1f} [{:.1f}, {:.1f}]".format(*(100 * end for end in means[way]["after"]))])
    yield "trl_learning.table", table(("", "reward of the last quarter", "held-out accuracy, %"), rows)
    yield "trl_learning.before", f"{100 * result('trl_learning')['before']:.1f}"


ENGINES = {"local": "local engine", "vllm": "vLLM", "vllm ahead": "vLLM, `engine.async_steps = 1`"}
TRL = {
    "delta train": "`delta train`",
    "TRL, prompts together": "TRL with DelTA, prompts together (its shuffle patched out)",
    "TRL with DelTA": "TRL with DelTA as it is",
}


def _ahead() -> Named:
    """Twenty steps at a high rate, on-policy and some steps ahead."""
    runs = result("async_learning")["runs"]
    seeds = {arm: [run for name, run in runs.items() if name.startswith(f"{arm}, seed ")] for arm in AHEAD}
    exact = seeds["on-policy"]
    rows = []
    for arm, what in AHEAD.items():
        found = [100 * run["accuracy"] for run in seeds[arm]]
        lost, inside = "", ""
        if arm != "on-policy":
            estimate = over_seeds([each - 100 * run["accuracy"] for each, run in zip(found, exact, strict=False)])
            lost = f"{estimate.mean:+.1f} [{estimate.low:+.1f}, {estimate.high:+.1f}]"
            within = sum(own["low"] <= run["accuracy"] for own, run in zip(exact, seeds[arm], strict=False))
            inside = f"{within} of {len(found)}"
        rows.append([what, ", ".join(f"{each:.1f}" for each in found), lost, inside])
    header = ("", "accuracy of each seed, %", "difference to on-policy, points", "not below on-policy's interval")
    yield "async_learning.table", table(header, rows)


def _curriculum() -> Named:
    """Forty steps on sums of which half are too hard, in shuffled epochs and by pass rate."""
    runs = result("curriculum")["runs"]
    rows = []
    for arm, what in CURRICULUM.items():
        own = [runs[f"{arm}, seed {seed}"] for seed in range(3)]
        ends = [_accuracy(run | {"accuracy": run["accuracy"][-1]}) for run in own]
        rows.append([what, *ends, span(100 * run["zero_variance_groups"] for run in own)])
    yield "curriculum.table", table(("", "seed 0", "seed 1", "seed 2", "groups without variance"), rows)


def _accuracy(run: dict[str, Any]) -> str:
    """The accuracy and its interval, in per cent."""
    return "{:.1f} ({:.1f} to {:.1f})".format(*(100 * run[key] for key in ("accuracy", "low", "high")))


CURRICULUM = {
    "shuffled epochs": "shuffled epochs",
    "by pass rate": '`curriculum = "pass_rate"`',
    "by pass rate, half explored": "the same, `curriculum_exploration = 0.5`",
}


AHEAD = {
    "on-policy": "on-policy",
    "1 ahead, slower": "1 ahead, by the rule",
    "2 ahead, slower": "2 ahead, by the rule",
    "4 ahead, slower": "4 ahead, by the rule",
    "1 ahead": "1 ahead, rate 1e-3, `decoupled_seq_is`",
    "2 ahead": "2 ahead, rate 1e-3, `decoupled_seq_is`",
    "2 ahead, by token": "2 ahead, rate 1e-3, `decoupled_token_is`",
}


def _seeds(name: str, way: str, what: str) -> list[str]:
    rows = [result(name)["results"][f"learning, {way}, seed {seed}"] for seed in range(3)]
    values = ([100 * row[key] for key in ("accuracy", "low", "high")] for row in rows)
    return [what, *("{:.1f} ({:.1f} to {:.1f})".format(*each) for each in values)]


SOURCES = (_learning, _studies, _lab, _mistakes, _public_code, _real_text, _temperatures, _engines, _ahead, _curriculum)
