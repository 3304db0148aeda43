"""Running a hostile Python program: in bubblewrap on Linux, in sandbox-exec on macOS.

No network, no home, no repository, nothing writable but a small scratch folder; limits on CPU and
wall-clock time, memory, processes, file size and output; no process survives the run.
"""

from __future__ import annotations

import functools
import itertools
import json
import marshal
import os
import platform
import secrets
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import numpy

from delta_cli.errors import UserError
from delta_cli.rewards.code.syscalls import seccomp_filter

SCRATCH = "/scratch"
PACKAGES = "/packages"  # the folder of numpy, which tests and solutions may import besides the standard library
SCRATCH_BYTES = 64 * 2**20
MAX_OUTPUT = 2**20  # bytes a program may write; more ends it
FIRST_USER = 10**9  # runs that root starts draw a user from a range that begins here
# The modules of each kind of process, each after those that it imports. The last one's ``main`` is called.
GUEST = ("wire", "startup", "guest")
JUDGE = ("wire", "startup", "pytest_stub", "remote", "checks", "judge")
# The code that Python starts with. It reads compiled modules and then the job from an open file.
START = """
import marshal, sys
file = open(int(sys.argv[1]), 'rb')
for name, code in marshal.load(file):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(file)
"""


@dataclass(frozen=True)
class ProcessLimits:
    """What one process of a program may use."""

    seconds: int  # CPU time
    memory: int = 2**30
    processes: int = 8  # threads, and processes if no filter forbids them
    file_bytes: int = 16 * 2**20


@dataclass(frozen=True)
class Sandbox:
    """How to confine a command: ``bwrap``, ``sandbox-exec``, or ``none`` with resource limits only."""

    kind: str
    executable: str = ""

    @property
    def packages(self) -> str:
        """The folder inside the sandbox that numpy can be imported from."""
        return PACKAGES if self.kind == "bwrap" else str(_numpy()[0].parent)

    @property
    def filter(self) -> bytes | None:
        """The filter of system calls; None if this machine has none."""
        if sys.platform != "linux":
            return None
        return seccomp_filter(platform.machine(), alone=self.kind == "none")

    def command(self, scratch: str, filter_fd: int | None = None) -> list[str]:
        """The arguments that go before the Python command. ``filter_fd`` is an open file with the filter."""
        if self.kind == "bwrap":
            seccomp = ["--seccomp", str(filter_fd)] if filter_fd is not None else []
            return [self.executable, *seccomp, *_bubblewrap(self.executable)]
        if self.kind == "sandbox-exec":
            return [self.executable, "-p", _seatbelt(scratch)]
        return []


@functools.cache
def find_sandbox(allow_unsandboxed: bool = False) -> Sandbox:
    """The sandbox of this machine, after a program has run in it.

    Raises UserError if there is none, unless ``allow_unsandboxed``.
    """
    name, install = (
        ("sandbox-exec", "it is part of macOS in /usr/bin")
        if sys.platform == "darwin"
        else ("bwrap", "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)")
    )
    executable = shutil.which(name)
    problem = f"{name} was not found; {install}"
    if executable is not None:
        sandbox = Sandbox(name, executable)
        problem = _probe(sandbox)
        if not problem:
            return sandbox
    if allow_unsandboxed:
        return Sandbox("none")
    raise UserError(
        f"code rewards run programs that a model wrote and need a sandbox: {problem}; "
        "or let them run with resource limits only (reward.allow_unsandboxed = true, or --allow-unsandboxed)"
    )


def _probe(sandbox: Sandbox) -> str:
    """Why the sandbox does not work here; empty if it does."""
    with SandboxRun(sandbox) as run:
        process = run.start({"mode": "program", "code": "print('ready')"}, ProcessLimits(5), stderr=subprocess.PIPE)
        output = run.read(process, time.monotonic() + 10)
        if output == b"ready\n":
            return ""
        process.kill()
        assert process.stderr is not None
        message = process.stderr.read(1000).decode(errors="replace").strip().splitlines()
    return f"{sandbox.executable} does not work here ({message[-1] if message else 'no output'})"


class SandboxRun:
    """The processes of one test run. All of them are gone when the run ends."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._stack = ExitStack()
        self._scratch = ""

    def __enter__(self) -> SandboxRun:
        self._stack.__enter__()
        if self.sandbox.kind != "bwrap":  # bwrap makes its own, in memory
            self._scratch = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-code-"))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def start(
        self,
        job: dict[str, Any],
        limits: ProcessLimits,
        stdin: str = "",
        fds: tuple[int, ...] = (),
        stderr: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start the guest or the judge on a job. The job and the input are open files without a name."""
        user = FIRST_USER + secrets.randbelow(10**9) if self.sandbox.kind == "bwrap" and _is_root() else None
        confined = self.sandbox.kind == "bwrap"  # it sets the filter itself and ends the program with its parent
        job = {
            **job,
            "limits": asdict(limits),
            "user": user,
            "packages": self.sandbox.packages,
            "filter": None if confined else self.sandbox.filter,
            "parent": os.getpid(),
        }
        task = _file(_modules(JUDGE if job["mode"] == "judge" else GUEST) + marshal.dumps(job))
        source = _file(stdin.encode(errors="surrogatepass"))
        calls = _file(self.sandbox.filter) if confined and self.sandbox.filter is not None else None
        with task, source, calls or nullcontext():
            if calls is not None:
                fds = (*fds, calls.fileno())
            command = self.sandbox.command(self._scratch, calls.fileno() if calls is not None else None)
            process = subprocess.Popen(
                [*command, *_python(), START, str(task.fileno())],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=(task.fileno(), *fds),
                cwd=self._scratch or "/",
                env={"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "HOME": self._scratch or SCRATCH},
                start_new_session=True,
            )
        self._stack.enter_context(_ended(process))
        return process

    def read(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """What the process writes until it ends; None if it writes too much or takes too long."""
        assert process.stdout is not None
        chunks: list[bytes] = []
        size = 0
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(max(deadline - time.monotonic(), 0)):
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    return b"".join(chunks)
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_OUTPUT:
                    return None
        return None


def ended_well(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether the process ends by the deadline, with exit code 0."""
    try:
        return process.wait(max(deadline - time.monotonic(), 0.01)) == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process at the end: with bwrap its whole namespace dies, otherwise its session."""
    try:
        yield
    finally:
        try:
            os.killpg(process.pid, 9)
        except (ProcessLookupError, PermissionError):
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _file(content: bytes) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(content)
    file.seek(0)
    return file


def _python() -> list[str]:
    return [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c"]


@functools.cache
def _modules(names: tuple[str, ...]) -> bytes:
    """The modules that run inside, compiled, with their names."""
    modules = []
    for name in names:
        source = files("delta_cli.rewards.code").joinpath(f"{name}.py").read_text(encoding="utf-8")
        modules.append((f"delta_cli.rewards.code.{name}", compile(source, f"<{name}>", "exec")))
    return marshal.dumps(modules)


# ------------------------------------------------------------------------------------ bubblewrap


@functools.cache
def _bubblewrap(executable: str) -> tuple[str, ...]:
    """bwrap's arguments: new namespaces, and only the files that Python needs to start."""
    options = ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if _is_root():  # startup.py becomes another user, which takes these two capabilities and drops them
        options += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-all", "--uid", "65534", "--gid", "65534"]
    sized = "--size" in subprocess.run([executable, "--help"], capture_output=True, text=True, check=False).stdout
    mounts = _mounts()
    if sized:
        parents = {str(parent) for mount in mounts for parent in Path(mount[-1]).parents}
        for parent in sorted(parents - {"/"}):
            options += ["--perms", "0755", "--dir", parent]  # bwrap alone would make them readable by root only
        mounts.append(["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", SCRATCH])
    else:
        mounts.append(["--dir", SCRATCH])  # not writable: an old bwrap cannot bound its size
    return (*options, *itertools.chain(*mounts), "--remount-ro", "/", "--chdir", SCRATCH, "--")


def _mounts() -> list[list[str]]:
    """Python and the system's libraries, without installed packages; two devices."""
    mounts = [["--ro-bind", path, path] for path in _python_paths()]
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        if os.path.islink(path):
            mounts.append(["--symlink", os.readlink(path), path])
        elif os.path.isdir(path):
            mounts.append(["--ro-bind", path, path])
    for folder in (*_python_paths(), "/usr/lib/python3"):
        packages = [os.path.join(folder, name) for name in ("site-packages", "dist-packages")]
        mounts += [["--tmpfs", path] for path in packages if os.path.isdir(path)]
    mounts += [["--ro-bind", str(path), f"{PACKAGES}/{path.name}"] for path in _numpy()]
    mounts.append(["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"])
    return mounts + [["--dev-bind", path, path] for path in ("/dev/null", "/dev/urandom")]


def _is_root() -> bool:
    """Whether this is the machine's own root, whose processes the kernel does not count.

    A user namespace does not change that, so the limit on processes only works for another user.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _numpy() -> list[Path]:
    """numpy's folder and the folder of the libraries in its wheel."""
    folder = Path(numpy.__file__).resolve().parent
    return [path for path in (folder, folder.with_name("numpy.libs")) if path.is_dir()]


def _python_paths() -> tuple[str, ...]:
    """The interpreter, its standard library and its shared library."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not those of a virtual environment
    paths = {os.path.realpath(sys.executable)}
    paths |= {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    folder, shared = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and folder and shared and os.path.exists(f"{folder}/{shared}"):
        paths.add(f"{folder}/{shared}")
    return tuple(sorted(paths))


# ----------------------------------------------------------------------------------- sandbox-exec


def _seatbelt(scratch: str) -> str:
    """A profile that allows reading Python and writing the scratch folder, and denies everything else."""
    readable = {str(Path(sys.base_prefix).resolve()), os.path.realpath(scratch), *_python_paths(), *map(str, _numpy())}
    subpaths = " ".join(f"(subpath {json.dumps(path)})" for path in sorted(readable))
    return f"""(version 1)
(deny default)
(allow process-exec {subpaths})
(allow file-read* {subpaths} (subpath "/usr/lib") (subpath "/private/var/db/dyld"))
(allow file-read* (subpath "/System/Library") (subpath "/System/Cryptexes") (subpath "/System/Volumes/Preboot"))
(allow file-read* (literal "/") (literal "/dev/null") (literal "/dev/urandom") (literal "/dev/random"))
(allow file-read-metadata)
(allow file-write* (subpath {json.dumps(os.path.realpath(scratch))}))
(allow file-write-data (literal "/dev/null"))
(allow sysctl-read)
"""
