"""Training and sampling on Apple silicon with MLX; its CPU build runs the same code on Linux."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from backends.collective import SOLO
from backends.interface import BackendError, Collective, Engine
from backends.settings import BackendSettings

SUPPORTED = (0, 32)  # of mlx and mlx-lm alike: the batch generator's interface changes between minor versions
ATTENTION_BLOCK = 128  # queries whose attention scores exist at a time, if the fused kernel has no gradient
CATCHABLE = (0, 32, 2)  # of mlx: before it, a failure of Metal ended the process instead of raising an error


def create(settings: BackendSettings, name: str, collective: Collective = SOLO) -> Engine:
    """Load ``settings.model.path`` through mlx-lm.

    Raises BackendError where MLX is missing, of another version or without Metal on a Mac, and
    where the model cannot be loaded or trained as the settings ask.
    """
    check_installation()
    from backends.mlx.backend import MlxEngine

    return MlxEngine(settings, name, collective)


def join(name: str) -> Collective:
    """The ranks that this process was started with, on this Mac or several."""
    check_installation()
    from backends.mlx.collective import MlxCollective

    return MlxCollective()


def check_installation() -> None:
    """Raise a BackendError that says what to install or choose unless MLX can run here."""
    install = "run: pip install 'delta-rlvr[mlx]'"
    for package in ("mlx", "mlx-lm"):
        try:
            found = version(package)
        except PackageNotFoundError:
            raise BackendError(f"backend 'mlx' needs {package}, which is not installed; {install}") from None
        release = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
        if release[:2] != SUPPORTED:
            wanted = ".".join(map(str, SUPPORTED))
            raise BackendError(f"backend 'mlx' works with {package} {wanted}.x and found {found}; {install}")
        if package == "mlx" and release < CATCHABLE:
            wanted = ".".join(map(str, CATCHABLE))
            raise BackendError(
                f"backend 'mlx' needs mlx {wanted} or later, from which on Metal's failures can be caught, and found "
                f"{found}; {install}"
            )
    try:
        import mlx.core as mx
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise BackendError(f"mlx is installed but cannot be imported ({reason}); {install}") from error
    if platform.system() == "Darwin" and not mx.metal.is_available():
        raise BackendError(
            "mlx finds no Metal device (a virtual machine, or Python running under Rosetta?); "
            "use an arm64 Python on Apple silicon, or choose --backend cpu"
        )
