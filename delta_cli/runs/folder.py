"""The folder of a run: recipe, metrics, evaluations, recorded rollouts, checkpoints, model."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from backends.collective import from_first
from backends.interface import Collective
from delta_cli.errors import UserError, first_line
from delta_cli.recipe.renamed import with_new_metrics

JsonObject = dict[str, Any]

# Errors of a backend's save and export on a full disk: safetensors has its own type, MLX raises RuntimeError.
BACKEND_WRITES = (SafetensorError, RuntimeError)
RUN_AGAIN = "fix that and run the command again, a run with --resume"


def numbered_folders(root: Path, name: str) -> list[Path]:
    """The folders ``name-1``, ``name-2``, … in ``root``, in the order of their numbers."""
    found = [path for path in root.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(f"{name}-")))


def next_folder(root: Path, name: str) -> Path:
    """The folder for a new run of the recipe ``name``: one number above the largest there is."""
    taken = numbered_folders(root, name)
    return root / f"{name}-{int(taken[-1].name.removeprefix(f'{name}-')) + 1 if taken else 1}"


@contextmanager
def writing(path: Path, *also: type[Exception], remedy: str = RUN_AGAIN) -> Iterator[None]:
    """Turn an OSError, or an error listed in ``also``, into a UserError that names ``path`` and the ``remedy``."""
    refusals: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except refusals as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise UserError(f"{path}: cannot be written ({reason}); {remedy}") from error


@contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Create the folder of a ``what`` and lock it. Raises UserError if another process has locked it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder}: another process runs this {what}; wait for it, or choose another --out") from None
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """The paths of a run and the lines it writes. Only one process at a time may hold the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.notices = path / "notices.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.shared = True  # whether every rank sees this folder; otherwise rank 0 writes for all
        self._lock = FileLock(path / ".lock")

    def hold(self, new: bool = False) -> None:
        """Create the folder and lock it against other processes. ``new``: it may not hold a run yet.

        Raises UserError if that fails, or if the folder contains a link, which could lead out of it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Path(self._lock.lock_file)
            _refuse_links([lock] if os.path.lexists(lock) else [])
            self._lock.acquire(timeout=0.5)  # `delta runs` holds the lock for an instant to see whether it is free
            inner = (file for folder in (self.rollouts, self.checkpoints, self.model) for file in _below(folder))
            _refuse_links([*self.path.iterdir(), *inner])
        except UserError:
            self.release()
            raise
        except Timeout:
            raise UserError(
                f"{self.path}: another process is training in this folder; choose another --run-dir"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); choose another --run-dir") from None
        if new and self.started:  # another process may have trained here since the command line looked
            self.release()
            raise UserError(
                f"{self.path}: holds a run already; add --resume to continue it, or choose another --run-dir"
            )

    def release(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    @property
    def started(self) -> bool:
        """Whether the folder holds a run."""
        return self.recipe.exists()

    def begin(self, recipe: str, step: int | None = None) -> None:
        """Write the resolved recipe and delete what was recorded after ``step``; None: everything.

        The recipe is written last, because it is what makes the folder a run.
        """
        with writing(self.path):
            self.rollouts.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            for file in (self.metrics, self.evaluations, self.notices):
                if file.exists():
                    write_whole(file, "".join(map(_line, _up_to(step, file))))
            for file in self.rollouts.glob(".step-*.partial"):
                file.unlink()  # of a killed process
            for file in self.rollouts.glob("step-*.jsonl.gz"):
                number = file.name[5:-9]  # a file that is not ours stays
                if number.isdecimal() and int(number) > (step or 0):
                    file.unlink()
            write_whole(self.recipe, recipe)

    def append(self, file: Path, record: JsonObject) -> None:
        """Add a line to one of the folder's .jsonl files."""
        with writing(file), file.open("a", encoding="utf-8") as stream:
            stream.write(_line(record))

    def amend_metrics(self, step: int, changes: JsonObject) -> JsonObject:
        """Merge ``changes`` into a step's line of metrics and return the result, even if the file lacks that line."""
        records = list(read_lines(self.metrics)) if self.metrics.exists() else []
        amended: JsonObject = {"step": step} | changes
        for place, record in enumerate(records):
            if record.get("step") == step:
                amended = records[place] = record | changes
        with writing(self.metrics):
            write_whole(self.metrics, "".join(map(_line, records)))
        return amended

    def sync(self) -> None:
        """Flush all lines to disk; a checkpoint may only claim them afterwards."""
        for file in (self.metrics, self.evaluations, self.notices):
            if file.exists():
                with writing(file):
                    flush(file)

    def emptied_model(self) -> Path:
        """Create the folder of the exported model, or delete the files of an earlier export from it."""
        self.model.mkdir(parents=True, exist_ok=True)
        for file in self.model.iterdir():
            if file.is_file():
                file.unlink()
        return self.model

    def rollout_file(self, step: int) -> Path:
        """The file of a step's recorded rollouts."""
        return self.rollouts / f"step-{step:06d}.jsonl.gz"

    def write_rollouts(self, step: int, records: Iterable[JsonObject]) -> None:
        """Write the responses of a step, one line each; the file appears complete or not at all."""
        self.write_rollout_part(step, 0, records)
        self.join_rollout_parts(step, 1)

    def write_rollout_part(self, step: int, rank: int, records: Iterable[JsonObject]) -> None:
        """Write one rank's share of a step's responses, flushed to disk."""
        part = self._rollout_part(step, rank)
        # Level 1 is five times as fast as the default on these lines, for files a fifth larger.
        with writing(part):
            with gzip.open(part, "wt", compresslevel=1, encoding="utf-8") as stream:
                stream.writelines(map(_line, records))
            flush(part)

    def join_rollout_parts(self, step: int, ranks: int) -> None:
        """Make one file of the shares of all ranks, in rank order; it appears complete or not at all."""
        file = self.rollout_file(step)
        parts = [self._rollout_part(step, rank) for rank in range(ranks)]
        with writing(file):
            if ranks > 1:  # gzip files can be concatenated
                with parts[0].open("ab") as joined:
                    for part in parts[1:]:
                        with part.open("rb") as stream:
                            shutil.copyfileobj(stream, joined)
                        part.unlink()
                flush(parts[0])
            parts[0].replace(file)

    def _rollout_part(self, step: int, rank: int) -> Path:
        return self.rollouts / f".step-{step:06d}.rank-{rank:05d}.partial"


class ReadOnlyRunFolder(RunFolder):
    """A run folder for every rank but the first: reads work, writes do nothing because rank 0 makes them."""

    def hold(self, new: bool = False) -> None:
        """Rank 0 holds the lock."""

    def release(self) -> None:
        """Rank 0 holds the lock."""

    def begin(self, recipe: str, step: int | None = None) -> None:
        """Rank 0 writes the recipe."""

    def append(self, file: Path, record: JsonObject) -> None:
        """Rank 0 adds the line."""

    def amend_metrics(self, step: int, changes: JsonObject) -> JsonObject:
        """Rank 0 changes the line."""
        return {"step": step} | changes

    def sync(self) -> None:
        """This rank wrote nothing."""

    def emptied_model(self) -> Path:
        """Rank 0 empties the folder."""
        return self.model

    def join_rollout_parts(self, step: int, ranks: int) -> None:
        """Rank 0 joins them."""


def ranks_without(folder: Path, ranks: Collective) -> list[int]:
    """The ranks that do not see rank 0's folder, because their machines have other disks. Every rank calls it."""
    name = from_first(ranks, f".seen-{secrets.token_hex(8)}")
    if ranks.rank == 0:
        (folder / name).touch()
    ranks.barrier()
    seen = ranks.gather((folder / name).exists())
    if ranks.rank == 0:
        (folder / name).unlink()
    return [rank for rank, found in enumerate(seen) if not found]


def read_lines(file: Path) -> Iterator[JsonObject]:
    """Read a .jsonl or .jsonl.gz file; ignores an incomplete last line, which a killed process may leave."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        for line in stream:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                yield with_new_metrics(record)
            elif line.endswith(b"\n"):
                raise UserError(f"{file}: not a line of JSON: {line[:60]!r}; fix or delete the line")


def _refuse_links(files: Iterable[Path]) -> None:
    """Raise UserError if something that a run reads, writes or deletes is not a plain file or folder."""
    for file in files:
        mode = file.lstat().st_mode
        if stat.S_ISLNK(mode):
            raise UserError(
                f"{file}: is a symbolic link, and a run writes and deletes only inside its own folder; replace the "
                "link by what it points to"
            )
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{file}: is not a plain file or folder; remove it")


def _below(folder: Path) -> Iterator[Path]:
    """Everything below a folder, without following links."""
    if folder.is_dir() and not folder.is_symlink():
        for parent, folders, files in os.walk(folder):
            yield from (Path(parent) / name for name in (*folders, *files))


def missing_steps(file: Path, last: int) -> str:
    """The steps from 1 to ``last`` without a line in the file, such as "steps 3 to 5, 8"; empty if none is missing."""
    there = {record.get("step") for record in read_lines(file)} if file.exists() else set()
    missing = [step for step in range(1, last + 1) if step not in there]
    starts = [step for step in missing if step - 1 not in missing]
    ends = [step for step in missing if step + 1 not in missing]
    parts = [f"{a} to {b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True)]
    return ("steps " if len(missing) > 1 else "step ") + ", ".join(parts) if missing else ""


def _up_to(step: int | None, file: Path) -> list[JsonObject]:
    """The records of steps up to ``step``; None: no records."""
    if step is None:
        return []
    records = list(read_lines(file))
    for record in records:
        if not isinstance(record.get("step"), int):
            raise UserError(f"{file}: a line without a step: {str(record)[:60]}; fix or delete the line")
    return [record for record in records if record["step"] <= step]


def write_whole(file: Path, text: str) -> None:
    """Replace a file atomically by one that is flushed to disk."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    flush(partial)
    partial.replace(file)


def flush(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _line(record: JsonObject) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
