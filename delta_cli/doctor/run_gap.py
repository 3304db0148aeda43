"""What a run's own numbers say about the gap between its sampler and its trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from delta_cli.errors import UserError
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.training.tripwires import advice, moves_too_fast

SHOWN = 20  # steps in the table


def explain(folder: Path) -> Iterator[str]:
    """Lines on the gap of a run's last steps, and the correction that fits them. Raises UserError without metrics."""
    file = RunFolder(folder).metrics
    if not file.is_file():
        raise UserError(f"{folder}: holds no metrics of a run; give a run folder, or a recipe file")
    records = [record for record in read_lines(file) if record.get("engine_gap_p999") is not None]
    if not records:
        yield "no step compared the sampler with the trainer: the local engine's own log-probabilities were used"
        return
    yield "gap between the sampler's log-probabilities and the trainer's, in nats, and effective sample sizes"
    yield f"{'step':>6} {'mean':>8} {'99 %':>8} {'99.9 %':>8} {'largest':>8} {'tokens':>7} {'responses':>9} {'cut':>6}"
    for record in records[-SHOWN:]:
        numbers = [record[f"engine_gap_{name}"] for name in ("mean", "p99", "p999", "max")]
        cut = record.get("correction_cut")
        yield (
            f"{record['step']:>6} "
            + " ".join(f"{number:8.2g}" for number in numbers)
            + f" {record['ess_token']:7.0%} {record['ess_sequence']:9.0%} "
            + ("     –" if cut is None else f"{cut:6.1%}")
        )
    shown = records[-SHOWN:]
    if moved := sum(map(moves_too_fast, shown)):
        yield (
            f"{moved} of these {len(shown)} steps trained on batches from which the policy had moved too far: divide "
            "update.learning_rate by the square root of 1 + engine.async_steps, and set correction.preset = "
            '"decoupled_seq_is" (docs/off_policy.md)'
        )
        return
    found = [advice(record) for record in shown]
    needed = [each for each in found if each is not None]
    if not needed:
        yield "the gap is harmless: no correction is needed"
        return
    preset = Counter(name for name, _ in needed).most_common(1)[0][0]
    last = next(reason for name, reason in reversed(needed) if name == preset)
    yield (
        f'{len(needed)} of these {len(found)} steps ask for a correction; set correction.preset = "{preset}": {last} '
        "(docs/off_policy.md)"
    )
