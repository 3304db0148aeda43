"""Write the pages that are generated from the code: ``python docs/generate.py``.

A test holds the committed pages to what this prints, so nothing about a key or a metric is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from pages.markdown import HEAD, table
from pages.plans import memory, paper_hours, scale

from delta_cli.credit.corrections import CORRECTIONS
from delta_cli.credit.methods import PRESET_KEYS, PRESETS, Method
from delta_cli.recipe import Recipe, json_schema, key_reference
from delta_cli.recipe.document import toml_value
from delta_cli.recipe.keys import section_of
from delta_cli.recipe.other_trainers import TRAINERS, VERSIONS, Alias
from delta_cli.runs.metrics import METRICS
from delta_cli.study.plan import Arm, Measure, Published, StudyFile, study_schema
from delta_cli.training.tripwires import TRIPWIRES

CHOICES = ("advantage", "credit", "gate", "aggregation")


def pages() -> dict[str, Callable[[], str]]:
    """Every generated file's name in docs/, and the function that writes its text."""
    return {
        "recipes.md": recipes,
        "recipe.schema.json": json_schema,
        "metrics.md": metrics,
        "memory.md": memory,
        "scale.md": scale,
        "paper_hours.md": paper_hours,
        "coming_from.md": coming_from,
        "studies.md": studies,
        "study.schema.json": study_schema,
    }


def recipes() -> str:
    """A table for each section of a recipe, and the table of presets."""
    parts = [
        HEAD,
        "# Every key of a recipe\n",
        "A recipe is a TOML file with the sections below. A key that is left out has its default; a key that does\n"
        'not exist is an error. `extends = "other.toml"` on the first line starts from another recipe, and\n'
        "`--set section.key=value` changes one key from the command line. `delta recipe show RECIPE` prints a\n"
        "recipe with every key filled in.\n",
        "A response may have [several rewards](verifier.md#several-rewards): tables `[[reward]]` with the keys of\n"
        "`[reward]`, one after another. A list of them replaces the rewards of the recipe that is extended.\n",
        "Problems may come from [several sources](tutorial.md#several-sources), each a table `[data.sources.NAME]`.\n",
        "An editor can complete and check recipes with [recipe.schema.json](recipe.schema.json). With Taplo or the\n"
        "VS Code extension Even Better TOML, put this on the first line of a recipe, with the path from the recipe\n"
        "to the schema:\n",
        "```toml\n#:schema ../docs/recipe.schema.json\n```\n",
    ]
    for section, keys in groupby(key_reference(), lambda key: key.name.rpartition(".")[0]):
        header = ("key", "type", "default", "allowed", "unit", "meaning")
        rows = [(f"`{key.name}`", key.type, _code(key.default), key.allowed, key.unit, key.description) for key in keys]
        parts += [f"## [{section}]\n", f"{_purpose(section)}\n", table(header, rows)]
    parts += [
        "## Presets\n",
        "The settings of each `method.preset`. Any of these can be changed by its own key in `[method]`.\n"
        f"The defaults of the numbers: {_numbers()}.\n",
        table(("preset", *CHOICES, "numbers that differ from the defaults"), map(_preset, PRESETS)),
        "## Corrections\n",
        "The settings of each `correction.preset`, which [off_policy.md](off_policy.md) explains. The four names with\n"
        "truncate or mask are TRL's `vllm_importance_sampling_mode`, the others verl's `RolloutCorrectionConfig`.\n",
        table(("preset", "weight", "outside the bounds", "rejected", "bypass"), map(_correction, CORRECTIONS)),
    ]
    return "\n".join(parts)


STUDIES = """# Studies

A study trains several arms with several seeds and compares them. The shortest one compares values of a recipe's key;
with several `--grid`, all combinations are run:

```sh
delta study recipes/quickstart.toml --grid update.learning_rate=2e-4,5e-4,1e-3,2e-3 --seeds 3
```

It prints a table and writes it to `studies/NAME` as `table.txt`, with all numbers in `study.json` and the learning
curves in `curves.png` and `curves.svg`. If it is stopped, the same command continues it, and `--summary` prints the
table of the runs that are finished. The table has means over seeds with 95 % intervals (Student's t); p is a
one-sided Mann–Whitney U test that the reference is higher. One seed has neither interval nor test.

A study that you run more than once is better written to a file:

```toml
name = "rates"
question = "Which learning rate for DAPO, and which for DelTA?"
recipe = "quickstart.toml"
seeds = 4
set = ["run.steps=30"]
arms = [
  { name = "dapo", set = ["method.preset=dapo"] },
  { name = "delta", set = ["method.preset=delta"] },
]

[grid]
"update.learning_rate" = [2e-4, 5e-4]
```

`delta study rates.toml` makes its sixteen runs. For an editor to complete and check studies by
[study.schema.json](study.schema.json), put `#:schema ../docs/study.schema.json` on the first line.
"""


def studies() -> str:
    """What a study is, and a table for each of its sections."""
    parts = [HEAD, STUDIES]
    titles = {"Keys of a study": StudyFile, "[[arms]]": Arm, "[measure]": Measure, "[paper]": Published}
    for title, model in titles.items():
        rows = []
        for name, field in model.model_fields.items():
            default = "" if field.is_required() or not field.default else toml_value(field.default)
            rows.append((f"`{name}`", _code(default), field.description or ""))
        parts += [f"## {title}\n", table(("key", "default", "meaning"), rows)]
    return "\n".join(parts)


def coming_from() -> str:
    """What keys of other trainers are called here."""
    parts = [
        HEAD,
        "# Coming from TRL, verl or mlx-lm-lora\n",
        "The tables list what their settings are called here. `delta recipe explain NAME` also takes one of their\n"
        "names, and if a recipe contains their keys, the error message names the keys to write instead. All keys are\n"
        "in [recipes.md](recipes.md).\n",
        "Three things differ from all of them. A step is one batch of rollouts, however many updates are made on it.\n"
        "Micro-batches and processes change no result, so nothing needs retuning for them. Training samples from the\n"
        "whole distribution at the temperature it scores at; truncated sampling (top-p, top-k, min-p) is for\n"
        "evaluations. vLLM since 0.28 can return the tokens that truncation kept (`return_sampling_mask`), which\n"
        "would make it correctable in training; we do not use that.\n",
        "You can also use DelTA inside TRL's own trainer: [trl.md](trl.md). Unsloth's `MLXGRPOTrainer` (in\n"
        "`unsloth_zoo` since October 2026; read in 2026.10.9) has the fields of TRL 0.24's `GRPOConfig`, so the rows\n"
        "of TRL's table about sampling, loss, optimizer and saving apply to it; it has no correction for vLLM and no\n"
        "entropy bonus.\n",
        f"The names are those of {_listed([f'{name} {VERSIONS[name]}' for name in TRAINERS])};\n"
        "`tests/docs/test_coming_from.py` compares them with the packages. The notes come from reading the source of\n"
        "these versions, and the defaults that they name were read there in November 2026.\n",
    ]
    for trainer, aliases in TRAINERS.items():
        rows = [
            (f"`{each.theirs}`", f"`{each.ours}`" if each.ours else "–", _alias_note(each, trainer)) for each in aliases
        ]
        parts += [f"## {trainer}\n", table(("there", "here", ""), rows)]
    return "\n".join(parts)


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _alias_note(alias: Alias, trainer: str) -> str:
    gone = f"not in {trainer} {VERSIONS[trainer]} any more" if alias.gone else ""
    return "; ".join(filter(None, (alias.note, gone)))


def metrics() -> str:
    """The table of metrics and the warnings that are read off them."""
    numbers = [(f"`{name}`", item.unit, item.meaning, item.healthy) for name, item in METRICS.items()]
    warnings = [(f"`{wire.name}`", re.sub(r"\{(\w+):[^}]*\}", r"{\1}", wire.text)) for wire in TRIPWIRES]
    return "\n".join(
        [
            HEAD,
            "# Every metric\n",
            "Each line of a run's `metrics.jsonl` is one step. A number that could not be computed is `null`.\n"
            "The same names go to TensorBoard, Weights & Biases, trackio, MLflow and SwanLab.\n",
            table(("name", "unit", "meaning", "healthy"), numbers),
            "## Warnings\n",
            "After each step these conditions are looked at. What fires is printed and written to `notices.jsonl`,\n"
            "once a run. The braces hold numbers of the step.\n",
            table(("name", "what it says"), warnings),
        ]
    )


def _purpose(section: str) -> str:
    """The first line of what the section's model says about itself."""
    model: type = Recipe
    for part in section.split("."):
        model = section_of(model.model_fields[part].annotation) or model  # type: ignore[attr-defined]
    return (model.__doc__ or "").partition("\n")[0]


def _numbers() -> str:
    numbers = (field for field in fields(Method) if field.name not in CHOICES)
    return ", ".join(f"{field.name} {field.default}" for field in numbers if isinstance(field.default, float))


def _correction(name: str) -> tuple[str, ...]:
    """The row of a correction."""
    given = CORRECTIONS[name]
    weighs = given.weight != "none"
    low = f"{given.reject_low:g} to" if given.reject.endswith("k1") else "at most"
    return (
        f"`{name}`",
        given.weight if weighs else "",
        f"{given.bound}, {given.low:g} to {given.high:g}" if weighs else "",
        "" if given.reject == "none" else f"{given.reject}, kept: {low} {given.reject_high:g}",
        "yes" if given.bypass else "",
    )


def _preset(name: str) -> tuple[str, ...]:
    method = PRESETS[name]
    changed = (
        f"{field.name} {getattr(method, field.name)}"
        for field in fields(Method)
        if field.name not in CHOICES and getattr(method, field.name) != field.default
    )
    keys = (f"{section}.{key} {it}" for section, of in PRESET_KEYS.get(name, {}).items() for key, it in of.items())
    return (f"`{name}`", *(getattr(method, choice) for choice in CHOICES), ", ".join([*changed, *keys]))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    for name, written in pages().items():
        (Path(__file__).parent / name).write_text(written(), encoding="utf-8")
