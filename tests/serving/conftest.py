"""One engine and one server for the tests that leave them as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends import registry
from backends.interface import Engine
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.data.tokenizer import Tokenizer

from .server import Client, serving


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("tiny-base"))


@pytest.fixture(scope="session")
def engine() -> Engine:
    return registry.create("fake", BackendSettings.of(model_path("tiny-base"), frozen=True))


@pytest.fixture(scope="session")
def client(engine: Engine, tokenizer: Tokenizer) -> Iterator[Client]:
    with serving(engine, tokenizer, engine.vocabulary) as client:
        yield client
