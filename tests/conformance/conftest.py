"""Fixtures: the backends under test, their common model and batches, and the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import registry
from backends.interface import BackendError, Engine, Sequences
from backends.settings import BackendSettings, Optimizer

from .oracle import Oracle
from .tiny_model import make_sequences, write_model


@dataclass(frozen=True)
class Tolerance:
    """How far a backend may be from float64; absolute unless it says relative."""

    logprob: float  # nats; records are float32, whatever the backend computes in
    feature: float  # relative to the largest entry
    gradient: float  # of the norm, relative
    weight: float  # after updates that move a weight by 1e-3 and more; exports are float32


TOLERANCES = {
    "fake": Tolerance(logprob=1e-6, feature=1e-11, gradient=1e-9, weight=1e-7),
    "cpu": Tolerance(logprob=1e-5, feature=1e-5, gradient=1e-5, weight=1e-6),
    "cuda": Tolerance(logprob=2e-5, feature=2e-5, gradient=5e-5, weight=5e-6),
    "mlx": Tolerance(logprob=1e-5, feature=1e-5, gradient=1e-5, weight=1e-6),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that takes a backend's ``name`` once for each name in the registry."""
    if "name" in metafunc.fixturenames:
        no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="backend 'cuda' needs an NVIDIA GPU")
        names = [pytest.param(name, marks=no_gpu if name == "cuda" else ()) for name in registry.NAMES]
        metafunc.parametrize("name", names, scope="session")


@pytest.fixture(scope="session")
def installed(name: str) -> str:
    """The backend's name; skips the test if a package that it needs is not installed."""
    try:
        return registry.resolve(name)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def tolerance(name: str) -> Tolerance:
    return TOLERANCES[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(root / kind, tie=kind == "tied") for kind in ("tied", "untied")}


@pytest.fixture(scope="session")
def folder(folders: dict[str, Path]) -> Path:
    """The tied model, which most tests use: its embedding's gradient has two sources."""
    return folders["tied"]


@pytest.fixture(scope="session", params=["tied", "untied"])
def either(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    """Both models, for tests of the head."""
    return folders[request.param]


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    """The oracle of ``folder``, shared: a test that updates it makes its own."""
    return Oracle(folder)


Make = Callable[..., Engine]

# A large epsilon keeps Adam smooth: the default turns a rounding error of the gradient into a whole step.
OPTIMIZER = Optimizer(epsilon=1e-2, weight_decay=0.1, max_grad_norm=1.0)


@pytest.fixture
def make(installed: str, folder: Path) -> Iterator[Make]:
    """Make a backend from settings; all are closed at the end of the test."""
    made: list[Engine] = []

    def make_backend(model: Path = folder, **settings: Any) -> Engine:
        settings = {"optimizer": OPTIMIZER} | settings
        made.append(registry.create(installed, BackendSettings.of(str(model), **settings)))
        return made[-1]

    yield make_backend
    for backend in made:
        backend.close()


@pytest.fixture(scope="session")
def backend(installed: str, folder: Path) -> Iterator[Engine]:
    """A shared backend for tests that update nothing."""
    backend = registry.create(installed, BackendSettings.of(str(folder)))
    yield backend
    backend.close()


@pytest.fixture(params=[1.0, 0.7], ids=["T1", "T0.7"])
def sequences_at(request: pytest.FixtureRequest) -> Sequences:
    """The batch at two sampling temperatures."""
    return make_sequences(temperature=request.param)


@pytest.fixture
def sequences() -> Sequences:
    return make_sequences(temperature=0.7)
