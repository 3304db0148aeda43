"""The names of backends and how to create one. Frameworks are imported only when their backend is used."""

from __future__ import annotations

import importlib
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from backends.collective import SOLO
from backends.interface import BackendError, Collective, Engine, RewardModel
from backends.process import rank_and_size
from backends.settings import BackendSettings, RewardModelSettings


@dataclass(frozen=True)
class BackendEntry:
    """A backend's module, the packages that it needs, and how to install them."""

    module: str  # has create(settings, name, collective) -> Engine and join(name) -> Collective
    needs: tuple[str, ...]  # importable packages
    install: str  # the command that installs them


ENTRIES = {
    "cpu": BackendEntry("backends.torch", ("torch", "transformers"), "pip install 'delta-rlvr[torch]'"),
    "cuda": BackendEntry("backends.torch", ("torch", "transformers"), "pip install 'delta-rlvr[torch]'"),
    "mlx": BackendEntry("backends.mlx", ("mlx", "mlx_lm"), "pip install 'delta-rlvr[mlx]'"),
    "fake": BackendEntry("backends.fake", (), ""),
}

NAMES = tuple(ENTRIES)


def default() -> str:
    """The backend that ``auto`` means: mlx on Apple silicon, cuda with an NVIDIA GPU, otherwise cpu."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return "mlx"
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


def resolve(name: str) -> str:
    """A backend's name from user input; raises BackendError if it does not exist or lacks a package."""
    name = default() if name == "auto" else name
    if name not in ENTRIES:
        raise BackendError(f"backend '{name}' does not exist; choose one of auto, {', '.join(NAMES)}")
    if missing := _missing(name):
        names, verb = " and ".join(missing).replace("_", "-"), "is" if len(missing) == 1 else "are"
        other = "" if _missing(default()) else f"choose --backend {default()}, or "
        raise BackendError(
            f"backend '{name}' needs {names}, which {verb} not installed; {other}run: {ENTRIES[name].install}"
        )
    return name


def _missing(name: str) -> list[str]:
    """The packages that a backend needs and that are not installed."""
    return [package for package in ENTRIES[name].needs if find_spec(package) is None]


def check_installation(name: str) -> None:
    """Raise BackendError unless a backend's packages are there and, those of MLX, can be imported."""
    if resolve(name) == "mlx":
        importlib.import_module(ENTRIES["mlx"].module).check_installation()


def join(name: str) -> Collective:
    """Join the processes that were started together with this one; raises BackendError if they cannot be reached."""
    _, size = rank_and_size()
    if size == 1:
        return SOLO
    make: Callable[[str], Collective] = importlib.import_module(ENTRIES[name].module).join
    return make(name)


def create(name: str, settings: BackendSettings, collective: Collective = SOLO) -> Engine:
    """Load a model, or this rank's part of it, onto a backend. Raises BackendError with one line."""
    name = resolve(name)
    make: Callable[[BackendSettings, str, Collective], Engine] = importlib.import_module(ENTRIES[name].module).create
    return make(settings, name, collective)


def converter(name: Literal["mlx", "transformers"]) -> Any:
    """The module that quantises exported models and makes GGUF files, for mlx-lm or for transformers.

    Raises BackendError if a package is missing.
    """
    if name == "transformers":
        resolve("cpu")
        return importlib.import_module("backends.torch.convert")
    check_installation("mlx")
    return importlib.import_module("backends.mlx.convert")


def reward_model(settings: RewardModelSettings) -> RewardModel:
    """Load a sequence classifier that scores chats, through transformers. Raises BackendError with one line."""
    resolve("cpu")
    made: RewardModel = importlib.import_module("backends.torch.reward_model").TransformersRewardModel(settings)
    return made


def default_converter() -> Literal["mlx", "transformers"]:
    """The converter for this machine: mlx if mlx-lm is installed, otherwise transformers."""
    return "mlx" if find_spec("mlx") is not None and find_spec("mlx_lm") is not None else "transformers"
