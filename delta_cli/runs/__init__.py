"""A run's folder: checkpoints, records and status; what training, evaluation and reporting all read."""

from pathlib import Path

RUNS = Path("runs")  # where new run folders are created
