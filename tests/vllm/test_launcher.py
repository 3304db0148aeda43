"""A server of our own: what it is started with, and what is said where it does not come up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backends.interface import BackendError
from backends.settings import EngineSection
from backends.vllm import ServedModel, ServerLauncher, die_with_parent
from backends.vllm.command import ON_CPU
from tests.vllm.server import VERSION

MEMORY = Path("/proc/meminfo")

# The lines that name an error in the log of vLLM 0.32 on a machine whose memory was taken, in their order.
LOG = """\
(APIServer pid=1) WARNING [system_utils.py:255] This can cause fd limit errors like `OSError: [Errno 24] Too many files`
(VllmWorker-0 pid=3) ERROR [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=3) ERROR [multiproc_executor.py:953] ValueError: Available memory on node 0 (17.45/23.54 GiB) on startup is less than desired
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""  # noqa: E501
FAILING = """
import json, sys
open(ARGUMENTS, "w").write(json.dumps(sys.argv))
print(LOG)
sys.exit(1)
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a server that is called vllm and fails to start leaves its arguments."""
    written = tmp_path / "arguments.json"
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(f"ARGUMENTS, LOG = {str(written)!r}, {LOG!r}\n{FAILING}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return written


def start(folder: Path, distribution: str, memory: float | None = None) -> None:
    info = folder / "site" / f"{distribution.replace('-', '_')}-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {VERSION}\n")
    engine = EngineSection(kind="vllm", launch=True, python=sys.executable, concurrency=4, memory=memory)
    launcher = ServerLauncher(ServedModel("model", "float32", 64), engine, folder / "vllm.log")
    launcher.check()
    launcher.start()


@pytest.mark.parametrize(("code", "ended"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_die_with_parent_ends_as_its_command_does(code: str, ended: int) -> None:
    """While its parent lives: the thread that waits for the parent's end must not hold it up."""
    command = [sys.executable, die_with_parent.__file__, sys.executable, "-c", f"import os, sys; {code}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(30) == ended
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_a_server_that_does_not_come_up_is_told_with_its_cause(tmp_path: Path, arguments: Path) -> None:
    with pytest.raises(BackendError, match=r"exit code 1 \(ValueError: Available memory on node 0"):
        start(tmp_path, "vllm")
    assert not {"--gpu-memory-utilization", *ON_CPU} & set(json.loads(arguments.read_text()))


@pytest.mark.skipif(not MEMORY.exists(), reason="a machine that does not say how much of its memory is free")
@pytest.mark.parametrize("memory", [None, 0.05])
def test_on_a_cpu_it_takes_half_of_what_is_free(tmp_path: Path, arguments: Path, memory: float | None) -> None:
    """Its own default is a share of all memory, and where less is free it refuses to start."""
    with pytest.raises(BackendError):
        start(tmp_path, "vllm-cpu", memory)
    given = json.loads(arguments.read_text())
    assert set(ON_CPU) <= set(given)
    share = float(given[given.index("--gpu-memory-utilization") + 1])
    if memory is not None:
        assert share == memory
        return
    table = dict(re.findall(r"(\w+):\s+(\d+)", MEMORY.read_text()))
    assert share == pytest.approx(0.5 * int(table["MemAvailable"]) / int(table["MemTotal"]), rel=0.3)
