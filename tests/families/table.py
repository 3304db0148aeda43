"""The table of docs/models.md: written from outcomes, and read by the test."""

from __future__ import annotations

from pathlib import Path

from tests.families.checks import Outcome
from tests.families.families import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- the table: make models -->", "<!-- end of the table -->"
COLUMNS = ("family", "model_type", "config", "cpu, cuda", "mlx", "remark")


def cell(outcome: Outcome) -> str:
    """A tick, or the backend's reason to refuse, or why there was nothing to try."""
    return "✓" if outcome.passed else f"{'refused' if outcome.tried else 'not tried'}: {outcome.reason}"


def write(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Write the outcomes, by key and backend, into the page; families that were not tried keep their row."""
    lines: list[tuple[str, ...]] = [COLUMNS, ("---",) * len(COLUMNS)]
    before = rows()
    for family in FAMILIES:
        if (family.key, "cpu") not in outcomes:
            lines.append(tuple(before[family.name].values()))
            continue
        found = (cell(outcomes[family.key, backend]) for backend in ("cpu", "mlx"))
        config = family.hub or "defaults"
        lines.append((family.name, f"`{family.inside or family.kind}`", config, *found, family.remark))
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def rows() -> dict[str, dict[str, str]]:
    """The page's rows by family and column."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[part.strip() for part in line.strip("|").split(" | ")] for line in table]
    return {line[0]: dict(zip(COLUMNS, line, strict=True)) for line in cells}
