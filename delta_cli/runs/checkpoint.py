"""Checkpoints: folders that appear complete or not at all, with a manifest to verify them later.

A checkpoint is written under a temporary name, flushed to disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import stat
from dataclasses import asdict, dataclass, field
from pathlib import Path

from backends.collective import SOLO
from backends.interface import Collective, FileDigests, WriteState
from delta_cli.runs.folder import BACKEND_WRITES, flush, writing

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
_PARTIAL = ".partial-"
MOST = 10**9  # steps and batches of a run


class NotInCheckpointError(Exception):
    """A manifest names something that is not a file of its checkpoint; the message says what."""


@dataclass(frozen=True)
class State:
    """The counters of a run; everything else it needs to resume is in weights, optimizer and recipe."""

    step: int  # steps done
    draws: int  # batches of prompts used
    data: str = ""  # digest of the training problems
    inputs: dict[str, str] = field(default_factory=dict)  # fingerprint of data, model and program
    best: float | None = None  # best value so far of the metric checkpoint.keep_best
    best_step: int | None = None  # its step


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return root / f"step-{step:06d}"


def save(root: Path, state: State, recipe: str, write: WriteState, ranks: Collective = SOLO) -> Path:
    """Write a checkpoint; ``write`` puts this rank's learner files into the folder it receives.

    It returns the digests of those it has hashed and flushed to disk while it wrote them. Raises UserError if the
    disk refuses a write, and then leaves nothing half-written behind.
    """
    partial = begin(root, state.step, ranks)
    try:
        with writing(folder_of(root, state.step), *BACKEND_WRITES):
            digests = write(partial)
        return complete(root, state, recipe, digests, ranks)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def begin(root: Path, step: int, ranks: Collective = SOLO) -> Path:
    """The folder that all ranks write a step's checkpoint into, made by rank 0. Raises UserError."""
    partial = _partial(root, step)
    if ranks.rank == 0:
        with writing(folder_of(root, step)):
            root.mkdir(parents=True, exist_ok=True)
            _discard_partial(root)
            partial.mkdir()
    ranks.barrier()
    return partial


def complete(root: Path, state: State, recipe: str, digests: FileDigests, ranks: Collective = SOLO) -> Path:
    """Seal a checkpoint once all ranks have written their files, of which each hands in its digests.

    Raises UserError if the disk refuses it.
    """
    final, partial = folder_of(root, state.step), _partial(root, state.step)
    every = {name: digest for part in ranks.gather(digests) for name, digest in part.items()}
    if ranks.rank == 0:
        with writing(final):
            (partial / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
            (partial / "recipe.toml").write_text(recipe, encoding="utf-8")
            _seal(partial, every)
            if final.exists():  # damaged: the run resumed from an earlier one
                shutil.rmtree(final)
            partial.rename(final)
            flush(root)
    ranks.barrier()  # no rank may exit before rank 0 has completed it
    return final


def _partial(root: Path, step: int) -> Path:
    """What a step's checkpoint is called while it is written."""
    return root / f"{_PARTIAL}{folder_of(root, step).name}"


def find(root: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, or None, and a line for each newer one that is damaged."""
    damaged: list[str] = []
    for folder in reversed(_folders(root)):
        problem = check(folder)
        if problem is None:
            return folder, damaged
        damaged.append(f"{folder}: skipped, {problem}")
    return None, damaged


def steps(root: Path) -> list[int]:
    """The steps that have a checkpoint, intact or damaged, ascending."""
    return [_step(folder) for folder in _folders(root)]


def check(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact."""
    try:
        manifest = json.loads(_plain_file(folder, MANIFEST).read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["files"]
        if version != FORMAT:
            return f"its format {_shown(version)} is not {FORMAT}, the one this version of delta reads"
        if STATE not in files:
            return f"{MANIFEST} does not list {STATE}"
        for name, facts in files.items():
            file = _plain_file(folder, name)
            if file.stat().st_size != facts["bytes"]:
                return f"{_shown(name)} has {file.stat().st_size} bytes instead of {_shown(facts['bytes'])}"
            if _digest(file) != facts["sha256"]:
                return f"{_shown(name)} does not match its checksum"
        read_state(folder)
    except NotInCheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{_shown(Path(error.filename or folder).name)} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} or {STATE} is not what its name says"
    return None


def _plain_file(folder: Path, name: str) -> Path:
    """A file of the checkpoint. Raises NotInCheckpointError for a device, a pipe, or a path out of the folder."""
    file = folder / name
    if not stat.S_ISREG(file.stat().st_mode):
        raise NotInCheckpointError(f"{_shown(name)} is not a plain file")
    if not file.resolve().is_relative_to(folder.resolve()):
        raise NotInCheckpointError(f"{_shown(name)} is outside the checkpoint")
    return file


def _shown(value: object) -> str:
    """A value from a damaged manifest, printable on one line."""
    text = str(value)[:60]
    return text if text.isprintable() else repr(text)


def read_state(folder: Path) -> State:
    """The counters of a checkpoint that passed :func:`check`. Raises ValueError or TypeError if they cannot be."""
    state = State(**json.loads(_plain_file(folder, STATE).read_text(encoding="utf-8")))
    if _step(folder) != state.step:
        raise ValueError(f"{folder} holds step {state.step}")
    counters = {"step": state.step, "draws": state.draws, "best_step": state.best_step or 0}
    if wrong := [name for name, value in counters.items() if type(value) is not int or not 0 <= value <= MOST]:
        raise ValueError(f"{folder}: {wrong[0]} is not a count")
    if state.draws < state.step or not isinstance(state.data, str) or not isinstance(state.inputs, dict):
        raise ValueError(f"{folder}: the counters contradict each other")
    if state.best is not None and not (isinstance(state.best, int | float) and math.isfinite(state.best)):
        raise ValueError(f"{folder}: best is not a number")
    return state


def prune(root: Path, newest: int, keep: int, best: int | None) -> None:
    """Delete the checkpoints up to step ``newest`` except the last ``keep`` and that of step ``best``.

    Later ones are left alone: they are damaged, which is why the run resumed from ``newest``.
    """
    for folder in [folder for folder in _folders(root) if _step(folder) <= newest][:-keep]:
        if _step(folder) != best:
            # Rename first, so that an interrupted deletion leaves nothing that looks like a checkpoint.
            doomed = folder.rename(root / f"{_PARTIAL}old-{folder.name}")
            shutil.rmtree(doomed, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    """The checkpoint folders, oldest first."""
    return sorted((path for path in root.glob("step-*") if path.name[5:].isdecimal()), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def _discard_partial(root: Path) -> None:
    for leftover in root.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)


def _seal(folder: Path, digests: FileDigests) -> None:
    """Write the manifest; files without a digest are hashed and flushed here."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if name not in digests:
            flush(file)
        files[name] = {"bytes": file.stat().st_size, "sha256": digests.get(name) or _digest(file)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")
    flush(manifest)
    flush(folder)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
