"""How a backend is found, and what a person reads when it is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from backends import registry
from backends.interface import BackendError


@pytest.mark.parametrize(
    ("system", "machine", "nvidia_smi", "expected"),
    [
        ("Darwin", "arm64", None, "mlx"),
        ("Darwin", "x86_64", None, "cpu"),
        ("Linux", "x86_64", "/usr/bin/nvidia-smi", "cuda"),
        ("Linux", "aarch64", None, "cpu"),
        ("Windows", "AMD64", None, "cpu"),
    ],
)
def test_auto_depends_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, nvidia_smi: str | None, expected: str
) -> None:
    monkeypatch.setattr(registry.platform, "system", lambda: system)
    monkeypatch.setattr(registry.platform, "machine", lambda: machine)
    monkeypatch.setattr(registry.shutil, "which", lambda _: nvidia_smi)
    monkeypatch.setattr(registry, "find_spec", lambda _: object())
    assert registry.resolve("auto") == expected


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(BackendError, match=r"'tpu' does not exist; choose one of auto, cpu, cuda, mlx, fake"):
        registry.resolve("tpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [("cpu", r"'cpu' needs transformers.*pip install 'delta-rlvr\[torch\]'"), ("fake", None)],
)
def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, name: str, message: str | None) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: None if package == "transformers" else object())
    if message is None:
        assert registry.resolve(name) == name
        return
    with pytest.raises(BackendError, match=message) as caught:
        registry.resolve(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", ["backends.registry", "backends.interface", "backends.batching", "backends.fake"])
def test_importing_it_imports_no_framework(module: str) -> None:
    check = (
        f"import sys, {module}; print(*{{'torch', 'transformers', 'mlx', 'mlx_lm', 'delta_cli'}} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
