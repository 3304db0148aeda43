"""A model card for the hub, made from the records of a run."""

from __future__ import annotations

from pathlib import Path

from delta_cli import __version__
from delta_cli.assets import model_path
from delta_cli.evaluation.results import FILE, EvaluationResult
from delta_cli.recipe import load_recipe
from delta_cli.recipe.document import to_toml
from delta_cli.runs.records import RecordedRun
from delta_cli.text import percent

LIBRARY = {"mlx-lm": "mlx", "bitsandbytes": "transformers", None: "transformers"}  # by what quantised the weights


def write_card(run: Path, out: Path, step: int | None, name: str, quantised: str | None) -> None:
    """Write README.md into an exported model folder; ``name`` is what the card calls the model."""
    (out / "README.md").write_text(card(run, step, name, quantised), encoding="utf-8")


def card(run: Path, step: int | None, name: str, quantised: str | None) -> str:
    """The text of a run's model card: base and its licence, method, curve, evaluations, recipe."""
    recorded = RecordedRun(run)
    recipe = load_recipe(run / "recipe.toml")
    base, licence = recipe.model.path, licence_of(recipe.model.path)
    lora = recipe.model.lora
    trained = (
        "the whole model"
        if lora is None
        else f"{'DoRA ' * lora.dora}adapters of rank {lora.rank}, merged into the weights"
    )
    front = [
        "---",
        *([f"license: {licence}"] if licence else []),
        *([f"base_model: {base}"] if base.count("/") == 1 and not Path(base).exists() else []),
        f"library_name: {LIBRARY[quantised]}",
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, rlvr, delta]",
        "---",
    ]
    about = [
        f"# {name}",
        f"`{base}` after {step if step is not None else 'its last'} steps of reinforcement learning with verifiable "
        f"rewards on `{recipe.data.title}`: method `{recipe.method.preset}`, {trained}. "
        f"Made with delta {__version__}.",
        f"Licence of the base: {licence or 'not known to the exporter; look at the base model'}.",
    ]
    if quantised:
        about.append(f"The weights are quantised by {quantised}; rounding to few bits loses part of a small update.")
    parts = ["\n".join(front), "\n\n".join(about), *_curve(recorded), *_evaluations(run, step)]
    parts.append(f"## Recipe\n\n```toml\n{to_toml(recipe).strip()}\n```")
    return "\n\n".join(parts) + "\n"


def licence_of(model: str) -> str | None:
    """The licence of a base model, from its card or the table of shipped models; None if neither states one."""
    if model == "tiny-base":
        return "apache-2.0"
    folder = Path(model_path(model)).expanduser()
    text = _read(folder / "README.md") if folder.is_dir() else _cached(model)
    lines = text.splitlines()
    if not lines or lines[0] != "---":
        return None
    for line in lines[1 : lines.index("---", 1) if "---" in lines[1:] else 1]:
        key, _, value = line.partition(":")
        if key == "license" and value.strip():
            return value.strip().strip("\"'")
    return None


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _cached(model: str) -> str:
    """The card of a hub model, from the hub or its cache; empty if neither has it."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        return ""
    try:
        return _read(Path(hf_hub_download(model, "README.md")))
    except (OSError, ValueError):  # the base classes of the hub's errors
        return ""


def _curve(recorded: RecordedRun) -> list[str]:
    """The held-out accuracy over the run, or its rewards if it was not evaluated."""
    if recorded.evaluations:
        rows = [f"| {record['step']} | {percent(record.get('accuracy'))} |" for record in recorded.evaluations]
        return ["## Held-out accuracy while training\n\n| step | accuracy |\n|---|---|\n" + "\n".join(rows)]
    if not recorded.metrics:
        return []
    chosen = recorded.metrics[:: max(1, len(recorded.metrics) // 8)]
    rows = [f"| {record['step']} | {record.get('reward_mean', float('nan')):.3f} |" for record in chosen]
    return ["## Mean reward while training\n\n| step | reward |\n|---|---|\n" + "\n".join(rows)]


def _evaluations(run: Path, step: int | None) -> list[str]:
    """The run's evaluations of this step, so that the card's numbers are this model's."""
    found = [EvaluationResult.read(file) for file in sorted((run / "evaluations").glob(f"*/{FILE}"))]
    rows = [
        f"| {each.suite} | {each.average.avg.mean:.1%} ({each.average.avg.low:.1%} to {each.average.avg.high:.1%}) | "
        f"{each.settings.samples} | {each.settings.temperature:g} | {each.settings.truncation} |"
        for each in found
        if each.step == step
    ]
    if not rows:
        return []
    head = "| suite | avg@k | k | temperature | of the distribution |\n|---|---|---|---|---|\n"
    return ["## Evaluations\n\n" + head + "\n".join(rows)]
