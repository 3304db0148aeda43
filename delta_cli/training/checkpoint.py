"""Checkpoints: a folder that appears whole or not at all, with a manifest that says whether it still is.

A checkpoint is written beside its place under a name nobody reads, synced to disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from delta_cli.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class State:
    """The counters a run goes on from; everything else is weights, optimizer and recipe."""

    step: int  # steps done
    draws: int  # batches of prompts drawn
    best: float | None = None  # the metric of checkpoint.keep_best, at its best so far
    best_step: int | None = None  # and the step that had it


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:06d}"


def save(root: Path, state: State, recipe: str, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint; ``write`` puts the backend's files into the folder it is given.

    Raises UserError, with nothing half-written left behind, where the disk does not take it.
    """
    final = folder_of(root, state.step)
    partial = root / f"{_PARTIAL}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _discard_partial(root)
        partial.mkdir()
        write(partial)
        (partial / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
        (partial / "recipe.toml").write_text(recipe, encoding="utf-8")
        _seal(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{final}: the checkpoint could not be written ({error.strerror or error}); make room, "
            "then go on from the one before with --resume"
        ) from error
    return final


def find(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, or None, and a line for each newer one that is damaged."""
    damaged: list[str] = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        problem = check(folder)
        if problem is None:
            return folder, damaged
        damaged.append(f"{folder}: passed over, {problem}")
    return None, damaged


def check(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["files"]
        if version != FORMAT:
            return f"its format {version} is not {FORMAT}, the one this version of delta reads"
        for name, facts in files.items():
            file = folder / name
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}"
            if _digest(file) != facts["sha256"]:
                return f"{name} does not match its checksum"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not a manifest"
    return None


def read_state(folder: Path) -> State:
    """The counters of a checkpoint that :func:`check` found whole."""
    return State(**json.loads((folder / STATE).read_text(encoding="utf-8")))


def prune(root: Path, keep: int, best: Path | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one."""
    for folder in sorted(root.glob("step-*"))[:-keep]:
        if best is None or folder != best:
            # Renamed first: a removal that is interrupted leaves nothing that looks like a checkpoint.
            doomed = folder.rename(root / f"{_PARTIAL}old-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)


def _discard_partial(root: Path) -> None:
    for leftover in root.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)


def _seal(folder: Path) -> None:
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": _digest(file)}
        _sync(file)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")
    _sync(manifest)
    _sync(folder)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
