"""The folder a run leaves behind: recipe, metrics, evaluations, recorded rollouts, checkpoints, model."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from delta_cli.errors import UserError
from delta_cli.recipe.renamed import with_new_metrics

JsonObject = dict[str, Any]


# What a full disk raises in a backend's save and export: safetensors has its own error, MLX a RuntimeError.
BACKEND_WRITES = (SafetensorError, RuntimeError)


@contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Turns what the disk refuses, an OSError or what is named in ``also``, into a UserError."""
    refusals: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except refusals as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]
        raise UserError(
            f"{path}: cannot be written ({reason}); put that right, then go on from the last checkpoint with --resume"
        ) from error


class RunFolder:
    """Paths of a run, and the lines it writes. One process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.notices = path / "notices.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self._lock = FileLock(path / ".lock")

    def hold(self) -> None:
        """Create the folder and keep other processes out; raises UserError where that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0.5)  # `delta runs` holds it for an instant, to see whether it is free
        except Timeout:
            raise UserError(
                f"{self.path}: another process is training in this folder; choose another --run-dir"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); choose another --run-dir") from None

    def release(self) -> None:
        """Let other processes in."""
        self._lock.release()

    @property
    def started(self) -> bool:
        """Whether a run has begun here."""
        return self.recipe.exists()

    def begin(self, recipe: str, step: int | None = None) -> None:
        """Write the resolved recipe, and forget what was recorded after ``step``; None: everything.

        The recipe is what makes the folder a run, so it comes last.
        """
        with writing(self.path):
            self.rollouts.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            for file in (self.metrics, self.evaluations, self.notices):
                if file.exists():
                    _write_whole(file, "".join(map(_line, _up_to(step, file))))
            for file in self.rollouts.glob("step-*.jsonl.gz"):
                number = file.name[5:-9]  # what somebody else put there stays
                if number.isdecimal() and int(number) > (step or 0):
                    file.unlink()
            _write_whole(self.recipe, recipe)

    def append(self, file: Path, record: JsonObject) -> None:
        """Add a line to one of the folder's .jsonl files."""
        with writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(_line(record))

    def amend_metrics(self, step: int, changes: JsonObject) -> JsonObject:
        """Add to the line of a step, which is returned; where there is none, only to what is returned."""
        records = list(read_lines(self.metrics)) if self.metrics.exists() else []
        amended: JsonObject = {"step": step} | changes
        for place, record in enumerate(records):
            if record.get("step") == step:
                amended = records[place] = record | changes
        with writing(self.metrics):
            _write_whole(self.metrics, "".join(map(_line, records)))
        return amended

    def sync(self) -> None:
        """Have every line on disk before a checkpoint says that they are there."""
        for file in (self.metrics, self.evaluations, self.notices):
            if file.exists():
                with writing(file):
                    _sync(file)

    def emptied_model(self) -> Path:
        """The folder of the exported model, there and without files of an earlier export."""
        self.model.mkdir(parents=True, exist_ok=True)
        for file in self.model.iterdir():
            if file.is_file():
                file.unlink()
        return self.model

    def rollout_file(self, step: int) -> Path:
        """Where the rollout batch of a step is recorded."""
        return self.rollouts / f"step-{step:06d}.jsonl.gz"

    def write_rollouts(self, step: int, records: Iterable[JsonObject]) -> None:
        """JsonObject the responses of a step, one line each; the file appears whole."""
        file = self.rollout_file(step)
        partial = file.with_suffix(".partial")
        # Level 1: on these lines a fifth larger than the default level and five times as fast.
        with writing(file):
            with gzip.open(partial, "wt", compresslevel=1, encoding="utf-8") as stream:
                stream.writelines(map(_line, records))
            _sync(partial)
            partial.replace(file)


class FollowedFolder(RunFolder):
    """The folder of a run as the ranks after the first know it: they read it, and the first one writes."""

    def hold(self) -> None:
        """The first rank holds it."""

    def release(self) -> None:
        """Nothing was held."""

    def begin(self, recipe: str, step: int | None = None) -> None:
        """The first rank writes the recipe."""

    def append(self, file: Path, record: JsonObject) -> None:
        """The first rank adds the line."""

    def amend_metrics(self, step: int, changes: JsonObject) -> JsonObject:
        """The first rank adds to the line."""
        return {"step": step} | changes

    def sync(self) -> None:
        """Nothing was written."""

    def emptied_model(self) -> Path:
        """The first rank empties it."""
        return self.model

    def write_rollouts(self, step: int, records: Iterable[JsonObject]) -> None:
        """The first rank records them."""


def read_lines(file: Path) -> Iterator[JsonObject]:
    """The records of a .jsonl or .jsonl.gz file, up to a last line that a killed process left torn."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        for line in stream:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield with_new_metrics(record)
            elif line.endswith(b"\n"):
                raise UserError(f"{file}: not a line of JSON: {line[:60]!r}; mend or remove the line")


def missing_steps(file: Path, last: int) -> str:
    """Steps from 1 to ``last`` that a file of records has no line for, as "steps 3 to 5, 8"; empty where none is."""
    there = {record.get("step") for record in read_lines(file)} if file.exists() else set()
    missing = [step for step in range(1, last + 1) if step not in there]
    starts = [step for step in missing if step - 1 not in missing]
    ends = [step for step in missing if step + 1 not in missing]
    parts = [f"{a} to {b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True)]
    return ("steps " if len(missing) > 1 else "step ") + ", ".join(parts) if missing else ""


def _up_to(step: int | None, file: Path) -> list[JsonObject]:
    """The records of the steps up to ``step``; none for None."""
    if step is None:
        return []
    records = list(read_lines(file))
    for record in records:
        if not isinstance(record.get("step"), int):
            raise UserError(f"{file}: a line without its step: {str(record)[:60]}; mend or remove the line")
    return [record for record in records if record["step"] <= step]


def _write_whole(file: Path, text: str) -> None:
    """Replace a file by one that is complete on disk."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)


def _sync(file: Path) -> None:
    """Wait until what was written to a file is on disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _line(record: JsonObject) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
