"""Sends weights to a vLLM server that cannot read the trainer's folder: over NCCL, from a process of vLLM's Python."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from backends.process import reachable_address
from backends.settings import EngineSection
from backends.vllm.api import ServerError
from backends.vllm.command import environment
from backends.vllm.launcher import free_port, last_error

SCRIPT = Path(__file__).with_name("send_weights.py")  # imports vllm, which the trainer's environment need not have


class WeightSender:
    """A process that sends the weights of a folder to one server; see ``send_weights.py``.

    It starts with the first weights. After a failure it is ended, since NCCL's group of this process and the server's
    workers is then of no use, and the next weights start another.
    """

    def __init__(self, url: str, engine: EngineSection, log: Path) -> None:
        self.url, self.log = url, log
        self._python = os.path.expanduser(engine.python or "")
        self._seconds = engine.deadline
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, folder: Path) -> None:
        """Return once the server has the weights of the folder's safetensors files. Raises ServerError."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
            error = self._answer(process)
        except OSError:  # it has ended
            error = last_error(self.log)
        if error:
            self.stop()
            raise ServerError(
                f"{self.url}: did not get the weights over NCCL ({error[:300]}); see {self.log}, and start the server "
                'with --weight-transfer-config \'{"backend": "nccl"}\''
            )

    def _start(self) -> subprocess.Popen[bytes]:
        host = urlsplit(self.url).hostname or "127.0.0.1"
        where = [reachable_address(host), str(free_port()), str(self._seconds)]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [self._python, str(SCRIPT), self.url, *where],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(os.environ),
                start_new_session=True,  # the first Ctrl-C asks the run to stop, not the transfer
            )

    def _answer(self, process: subprocess.Popen[bytes]) -> str:
        """The error message; empty if the server has the weights."""
        assert process.stdout is not None
        end, text = time.monotonic() + self._seconds, b""
        while not text.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(end - time.monotonic(), 0.0))[0]:
                return f"no answer within {self._seconds:.3g} s"
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                process.wait()
                return last_error(self.log)
            text += part
        return str(json.loads(text)["error"])

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._process = None
