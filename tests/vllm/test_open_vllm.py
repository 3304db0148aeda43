"""Where published weights go, what is left behind of them, and servers that could not read them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backends.collective import Solo
from delta_cli.errors import UserError
from delta_cli.rollout import memory_inbox, open_vllm
from tests.harness import make_recipe, train, write_model
from tests.vllm.conftest import engine_at
from tests.vllm.server import serving

HOLDER = """
import sys, time
from pathlib import Path
from delta_cli.rollout import memory_inbox
memory_inbox.MEMORY = Path(sys.argv[1])
with memory_inbox.opened() as folder:
    (folder / "model.safetensors").write_bytes(b"weights")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the machine's memory."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory_inbox, "MEMORY", folder)
    return folder


def test_a_local_run_does_not_import_vllms_client(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    arguments = ["train", "--backend", "fake", "--run-dir", str(tmp_path / "run"), "--quiet", "--set", "run.steps=1"]
    arguments += ["--set", f"model.path={model}", "--set", "rollout.prompts=4", "--set", "rollout.responses=2"]
    arguments += ["--set", "rollout.max_tokens=4", "--set", "evaluation.every=never"]
    program = (
        "import sys\nfrom delta_cli.cli import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(*[name for name in sys.modules if 'vllm' in name], 'delta_cli.training.setup' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stdout + done.stderr


def test_a_killed_runs_weights_are_removed_at_the_next_start(memory: Path) -> None:
    """Those of a run that lives stay, and so does what is no run's."""
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(memory)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(holder.stdout.readline().strip()) for holder in holders]  # type: ignore[union-attr]
    others = [memory / name for name in ("delta-weights-being-made", "somebody-elses")]
    for other in others:
        other.mkdir()
    (memory / "delta-weights-link").symlink_to(folders[0])
    try:
        assert memory_inbox.sweep() == []
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        assert memory_inbox.sweep() == [folders[0]]
        assert not folders[0].exists()
        assert (folders[1] / "model.safetensors").exists()
        assert all(other.exists() for other in others)
        holders[1].terminate()
        holders[1].wait()
        assert memory_inbox.sweep() == [folders[1]]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_another_users_weights_are_left_alone(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = memory / f"{memory_inbox.PREFIX}theirs"
    folder.mkdir()
    (folder / memory_inbox.LOCK).touch()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert memory_inbox.sweep() == []
    monkeypatch.undo()
    monkeypatch.setattr(memory_inbox, "MEMORY", memory)
    assert memory_inbox.sweep() == [folder]


def test_a_run_sweeps_and_leaves_nothing(tmp_path: Path, memory: Path) -> None:
    model = write_model(tmp_path / "model")
    left = memory / f"{memory_inbox.PREFIX}left"
    left.mkdir()
    (left / memory_inbox.LOCK).touch()
    with serving(model) as (_, url):
        train(make_recipe(model, engine__kind="vllm", engine__url=[url], run__steps=1), tmp_path / "run")
    assert list(memory.iterdir()) == []


class Machines(Solo):
    """Ranks on several machines, of which this is the first."""

    size = 4

    def gather(self, item: object) -> list[object]:
        other = "another machine" if isinstance(item, str) else item
        return [item, item, other, other]


def test_servers_that_cannot_read_the_weights_are_refused() -> None:
    """Addresses for documentation (RFC 5737) are no machine's own."""
    away = engine_at("http://127.0.0.1:8000", "http://192.0.2.7:8000")
    with pytest.raises(UserError, match=r"http://192\.0\.2\.7:8000 is on another machine.*set engine\.inbox to"):
        open_vllm.refuse_unreachable(away, Solo())
    open_vllm.refuse_unreachable(away.but(inbox="/shared/weights"), Solo())
    open_vllm.refuse_unreachable(engine_at("http://127.0.0.1:8000", "http://localhost:8001"), Solo())


def test_ranks_that_cannot_reach_a_server_are_refused() -> None:
    launched = engine_at("http://127.0.0.1:1").but(url=(), launch=True)
    with pytest.raises(UserError, match=r"2 of 4 ranks run on other machines.*name them in engine\.url"):
        open_vllm.refuse_unreachable(launched, Machines())
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:1 is another server on each machine"):
        open_vllm.refuse_unreachable(engine_at("http://127.0.0.1:1"), Machines())
    open_vllm.refuse_unreachable(launched, Solo())
