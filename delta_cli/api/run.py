"""A run as a Python object: its records, and what can be done with it afterwards."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from delta_cli.api.evaluate import EvaluationRequest, engine_section, evaluate
from delta_cli.api.metrics_table import MetricsTable
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.records import RecordedRun

if TYPE_CHECKING:
    from delta_cli.evaluation.compare import Comparison
    from delta_cli.evaluation.results import EvaluationResult
    from delta_cli.reporting.inspection import Inspection

WIDTH = 100  # columns of an inspection as text


@dataclass(frozen=True)
class InspectionView:
    """The responses to a prompt and the credit of their tokens, as text and as a page."""

    inspection: Inspection

    def __str__(self) -> str:
        from rich.console import Console

        from delta_cli.reporting.inspection_text import render

        console = Console(file=io.StringIO(), width=WIDTH)
        with console.capture() as captured:
            console.print(render(self.inspection))
        return captured.get()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from delta_cli.reporting.html_pages import inspection_page

        page = escape(inspection_page(self.inspection), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


class Run:
    """A run in its folder: one that ``train`` made, or any other. Raises UserError if the folder holds no run."""

    def __init__(self, folder: Path | str, backend: str = "auto") -> None:
        self.folder = Path(folder)
        self.backend = backend
        RecordedRun(self.folder)
        self._files = RunFolder(self.folder)

    @cached_property
    def recipe(self) -> Recipe:
        """The run's recipe with every key."""
        return load_recipe(self._files.recipe)

    @property
    def metrics(self) -> MetricsTable:
        """What was measured in each step (docs/metrics.md explains every column)."""
        return _table(self._files.metrics)

    @property
    def evaluations(self) -> MetricsTable:
        """The held-out accuracy while training, with its interval."""
        return _table(self._files.evaluations)

    @property
    def model(self) -> Path:
        """The folder of the trained model, which transformers and mlx-lm open."""
        return self._files.model

    @property
    def state(self) -> str:
        """ "going", "done", "stopped", "failed" or "died", as ``delta runs`` shows it."""
        from delta_cli.reporting.run_list import summary_of

        return summary_of(self.folder).state

    def evaluate(
        self,
        checkpoint: str | int = "last",
        *,
        suite: str | None = None,
        data: str | None = None,
        limit: int | None = None,
        quiet: bool = True,
        **settings: object,
    ) -> EvaluationResult:
        """Measure a checkpoint ("best", "last", "base" or a step) on the run's held-out problems, a suite or a file.

        ``settings`` are those of ``delta eval``: samples, temperature, top_p, top_k, min_p, max_tokens, template, seed.
        Raises UserError for what ``delta eval`` refuses.
        """
        from delta_cli.runs.checkpoint_reference import find_checkpoint

        reference = find_checkpoint(str(self.folder), str(checkpoint))
        request = EvaluationRequest.of(reference, suite, data, limit, settings)
        return evaluate(request, self.backend, engine_section(reference, None), quiet=quiet)[0]

    def compare(self, before: str | int = "base", after: str | int = "last") -> Comparison:
        """Whether ``after`` is better than ``before`` on the held-out problems, with the gain and its interval."""
        from delta_cli.evaluation.compare import compare

        return compare(self.evaluate(before), self.evaluate(after))

    def inspect(self, step: int | None = None, problem: str | None = None, whole_run: bool = False) -> InspectionView:
        """Where the credit of a step went (default: the newest). Print it, or let a notebook show it."""
        from delta_cli.reporting.inspection import inspect_run

        return InspectionView(inspect_run(self.folder, step, problem, whole_run=whole_run))

    def report(self, file: Path | str = "report.html") -> Path:
        """Write one page about the run that opens offline, and return its path."""
        from delta_cli.reporting.report import write_report

        return write_report([self.folder], Path(file))[0]

    def __repr__(self) -> str:
        steps, held_out = len(self.metrics), self.evaluations
        accuracy = f", held-out accuracy {held_out[-1]['accuracy']:.1%}" if len(held_out) else ""
        return f"<Run {self.folder}: {self.state}, step {steps} of {self.recipe.run.steps}{accuracy}>"


def _table(file: Path) -> MetricsTable:
    return MetricsTable(list(read_lines(file)) if file.exists() else [])
