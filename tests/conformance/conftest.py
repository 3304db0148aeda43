"""The backends under test, the tiny Qwen3 folder they all load, and a batch full of edge cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from backends import registry
from backends.interface import BackendError, Engine, Sequences
from backends.settings import BackendSettings, Optimizer
from delta_cli.assets.random_model import write_qwen3

from .oracle import Oracle

VOCAB, EOS = 23, 0
TOKENIZER_SIZE = 20  # ids 20, 21 and 22 are in the model and not in the tokenizer


@dataclass(frozen=True)
class Tolerance:
    """How far a backend may be from float64; absolute where it does not say relative."""

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
    """Every test that touches a backend runs once for each name in the registry."""
    if "name" in metafunc.fixturenames:
        no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="backend 'cuda' needs an NVIDIA GPU")
        names = [pytest.param(name, marks=no_gpu if name == "cuda" else ()) for name in registry.NAMES]
        metafunc.parametrize("name", names, scope="session")


@pytest.fixture(scope="session")
def installed(name: str) -> str:
    """The backend's name; skips where a package it needs is not installed, and says which."""
    try:
        return registry.resolve(name)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def tolerance(name: str) -> Tolerance:
    return TOLERANCES[name]


def write_model(folder: Path, tie: bool) -> Path:
    write_qwen3(
        folder,
        vocab_size=VOCAB,
        hidden=16,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=24,
        tie=tie,
        eos_id=EOS,
        scale=0.3,
    )
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(TOKENIZER_SIZE)}, unk_token="t1"))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "pad_token": "t0"}'
    (folder / "tokenizer_config.json").write_text(config)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: write_model(root / kind, tie=kind == "tied") for kind in ("tied", "untied")}


@pytest.fixture(scope="session")
def folder(folders: dict[str, Path]) -> Path:
    """The model most tests use, tied: the embedding's gradient has two sources."""
    return folders["tied"]


@pytest.fixture(scope="session", params=["tied", "untied"])
def either(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    """Both models, for the tests where the head matters."""
    return folders[request.param]


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    """The oracle of ``folder`` as it was loaded; a test that updates it makes its own."""
    return Oracle(folder)


Make = Callable[..., Engine]

# A large epsilon keeps Adam smooth: the default turns the sign of a gradient's rounding into a whole step.
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
    """One of each backend for the tests that update nothing."""
    backend = registry.create(installed, BackendSettings.of(str(folder)))
    yield backend
    backend.close()


def make_sequences(seed: int = 0, temperature: float = 1.0) -> Sequences:
    """Six responses with what goes wrong in practice.

    Prompts of mixed length, one of a single token, one shared by two responses, one with the
    end-of-sequence token (which is also the padding token) inside; a response without tokens in the
    middle, one of a single token, one that ends with the end-of-sequence token, others cut before it;
    ids that the tokenizer does not know.
    """
    rng = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return rng.integers(1, VOCAB, size=count, dtype=np.int64)

    shared = ids(5)
    prompts = (ids(3), ids(1), shared, shared, np.array([4, EOS, 7, EOS], dtype=np.int64), ids(8))
    end = np.array([EOS], dtype=np.int64)
    responses = [ids(4), np.concatenate([ids(5), end]), ids(0), end, np.concatenate([[22, 20], ids(6)]), ids(5)]
    return Sequences(
        prompts=prompts,
        tokens=np.concatenate(responses),
        starts=np.concatenate([[0], np.cumsum([len(part) for part in responses])]).astype(np.int64),
        temperature=temperature,
    )


@pytest.fixture(params=[1.0, 0.7], ids=["T1", "T0.7"])
def sequences_at(request: pytest.FixtureRequest) -> Sequences:
    """The batch at two sampling temperatures."""
    return make_sequences(temperature=request.param)


@pytest.fixture
def sequences() -> Sequences:
    return make_sequences(temperature=0.7)
