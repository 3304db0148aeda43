"""What a run reports as saved is on disk: files are synced before they are renamed into place."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from delta_cli.data.problem import Problem
from delta_cli.evaluation.response_file import ResponseFile
from delta_cli.evaluation.results import SampledResponse
from tests.harness import make_recipe, train

Identity = tuple[int, int]  # device and inode: a file keeps them when it is renamed


@dataclass
class Disk:
    """Records every sync and every rename."""

    synced: dict[Identity, int] = field(default_factory=dict)  # with its size when it was synced
    torn: list[str] = field(default_factory=list)  # renamed into place without a sync of its last state
    placed: list[Path] = field(default_factory=list)
    unsynced: set[Path] = field(default_factory=set)  # folders with a new entry that is not on disk yet

    def is_synced(self, path: Path) -> bool:
        facts = path.stat()
        size = self.synced.get((facts.st_dev, facts.st_ino))
        return size is not None and (path.is_dir() or size == facts.st_size)

    def place(self, source: Path, target: Path) -> None:
        """Called before the rename."""
        if target.name.startswith("."):  # about to be deleted
            return
        self.placed.append(target)
        inside = [source, *source.rglob("*")] if source.is_dir() else [source]
        self.torn += [f"{target.name}: {path.name}" for path in inside if not self.is_synced(path)]
        if source.is_dir():
            self.unsynced.add(target.parent)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Records the syncs and renames of this process."""
    seen, fsync, rename, replace = Disk(), os.fsync, os.rename, os.replace

    def note_sync(descriptor: int) -> None:
        facts = os.fstat(descriptor)
        seen.synced[facts.st_dev, facts.st_ino] = facts.st_size
        seen.unsynced = {folder for folder in seen.unsynced if not os.path.samestat(folder.stat(), facts)}
        fsync(descriptor)

    def noting(original: Any) -> Any:
        def moved(source: Any, target: Any, **more: Any) -> None:
            seen.place(Path(source), Path(target))
            original(source, target, **more)

        return moved

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", noting(rename))
    monkeypatch.setattr(os, "replace", noting(replace))
    return seen


@pytest.mark.parametrize("backend", ["fake", "cpu"])
def test_files_are_synced_before_they_are_renamed_into_place(
    backend: str, model: Path, tmp_path: Path, disk: Disk
) -> None:
    if backend == "cpu":
        pytest.importorskip("torch", reason="the backend is torch")
    recipe = make_recipe(model, run__steps=2, rollout__max_tokens=8, checkpoint__every=1)
    train(recipe, tmp_path / "run", backend)
    longer = make_recipe(model, run__steps=3, rollout__max_tokens=8, checkpoint__every=1)
    train(longer, tmp_path / "run", backend, resume=True)
    names = {path.name for path in disk.placed}
    expected = {"recipe.toml", "metrics.jsonl", "evaluations.jsonl"}
    assert expected | {f"step-00000{step}" for step in (1, 2, 3)} <= names
    assert any(name.endswith(".jsonl.gz") for name in names)
    assert disk.torn == []
    assert disk.unsynced == set(), "the folder of a checkpoint is synced once more when the checkpoint has its name"


def test_the_records_of_a_step_are_on_disk_before_its_checkpoint(
    model: Path, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking: list[str] = []
    place = disk.place

    def look(source: Path, target: Path) -> None:
        place(source, target)
        if target.name.startswith("step-") and source.is_dir():
            files = [tmp_path / "run" / name for name in ("metrics.jsonl", "evaluations.jsonl", "notices.jsonl")]
            lacking.extend(
                f"{target.name}: {file.name}" for file in files if file.exists() and not disk.is_synced(file)
            )

    monkeypatch.setattr(disk, "place", look)
    recipe = make_recipe(model, run__steps=2, rollout__max_tokens=8, checkpoint__every=1, evaluation__every=1)
    train(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert lacking == []


def test_added_responses_of_an_evaluation_are_on_disk(tmp_path: Path, disk: Disk) -> None:
    file = tmp_path / "responses" / "suite.jsonl"
    answer = SampledResponse(problem="a", sample=0, tokens=1, truncated=False, answer="4", correct=True, text="4")
    ResponseFile(file).add([Problem("a", "2+2", "4")], [[answer]])
    assert disk.is_synced(file)
