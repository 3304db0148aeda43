"""Saving, loading, exporting, the reference policy, and errors for folders that cannot be loaded."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from backends.interface import BackendError, Engine, Sequences, WriteState
from backends.settings import Optimizer

from .conftest import OPTIMIZER, Make, Tolerance
from .objectives import Clipped, exported
from .oracle import Oracle

LEARNING_RATE = 0.02


def update(backend: Engine, sequences: Sequences, times: int = 1) -> None:
    surrogate = Clipped(sequences, np.full(len(sequences.tokens), -3.0))
    for _ in range(times):
        backend.accumulate(sequences, surrogate)
        backend.step(LEARNING_RATE)


def test_a_saved_state_resumes_bit_for_bit(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    """In a new backend, and in the same one after further updates."""
    saved = tmp_path / "saved"
    saved.mkdir()
    straight, fresh = make(), make()
    update(straight, sequences, times=2)
    straight.save(saved)
    update(straight, sequences, times=2)
    expected = exported(straight, tmp_path / "straight")
    for name, backend in (("fresh", fresh), ("same", straight)):
        backend.load(saved)
        update(backend, sequences, times=2)
        found = exported(backend, tmp_path / name)
        assert found.keys() == expected.keys()
        for key, weight in expected.items():
            np.testing.assert_array_equal(found[key], weight, err_msg=key)


def test_a_copied_state_is_that_of_its_moment(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    """Written by another thread after two more updates, it resumes as what was saved in its place; one that does not
    fit is not made."""
    straight = make()
    update(straight, sequences, times=2)
    expected = written(straight.save, tmp_path / "saved")
    write = straight.copy_state(2**40)
    assert write is not None
    update(straight, sequences, times=2)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(written, write, tmp_path / "copied").result()
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    fresh = make()
    fresh.load(tmp_path / "copied")
    assert straight.copy_state(sum(array.nbytes for array in expected.values()) // 2) is None


def written(write: WriteState, folder: Path) -> dict[str, np.ndarray]:
    """The arrays in the files that were written."""
    folder.mkdir()
    write(folder)
    return {f"{file.name} {k}": v for file in sorted(folder.iterdir()) for k, v in load_file(file).items()}


def refused(name: str, make: Make, optimizer: Optimizer, key: str) -> None:
    """Whether a backend refuses these moments, because it has no such storage or no use for it."""
    with pytest.raises(BackendError, match=key) as caught:
        make(optimizer=optimizer)
    assert "\n" not in str(caught.value)
    pytest.skip(f"the {name} backend refused {key}, as it should")


def test_moments_in_host_memory_are_the_same_run(name: str, make: Make, sequences: Sequences, tmp_path: Path) -> None:
    """Bit for bit; a state saved with offload can be resumed without it, and the reverse."""
    offload = OPTIMIZER.but(offload=True)
    if name == "mlx":
        refused(name, make, offload, "update.offload")
    backends = {"here": make(), "there": make(optimizer=offload)}
    for place, backend in backends.items():
        update(backend, sequences, times=2)
        (tmp_path / place).mkdir()
        backend.save(tmp_path / place)
    backends["there"].load(tmp_path / "here")
    backends["here"].load(tmp_path / "there")
    for backend in backends.values():
        update(backend, sequences)
    found, expected = (exported(backend, tmp_path / f"{place}-on") for place, backend in backends.items())
    for key, weight in expected.items():
        np.testing.assert_array_equal(found[key], weight, err_msg=key)
    for file in (tmp_path / "here").iterdir():
        assert file.read_bytes() == (tmp_path / "there" / file.name).read_bytes(), file.name


def test_moments_in_8_bits_resume_bit_for_bit(
    name: str, make: Make, sequences: Sequences, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They differ from float32 moments; here even small weights are quantised, because the model is small."""
    coded = OPTIMIZER.but(moments="int8")
    if name in ("fake", "mlx"):
        refused(name, make, coded, "update.moments")
    monkeypatch.setattr("backends.torch.moments.SMALL", 1)
    straight, fresh, exact = make(optimizer=coded), make(optimizer=coded.but(offload=True)), make()
    update(straight, sequences, times=2)
    straight.save(tmp_path)
    fresh.load(tmp_path)
    update(straight, sequences)
    update(fresh, sequences)
    update(exact, sequences, times=3)
    np.testing.assert_array_equal(fresh.score(sequences).logprobs, straight.score(sequences).logprobs)
    assert np.abs(exact.score(sequences).logprobs - straight.score(sequences).logprobs).max() > 1e-6


def test_loading_discards_an_accumulated_gradient(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    backend, clean = make(), make()
    backend.save(tmp_path)
    backend.accumulate(sequences, Clipped(sequences, np.full(len(sequences.tokens), -3.0)))
    backend.load(tmp_path)
    for one in (backend, clean):
        update(one, sequences)
    np.testing.assert_array_equal(backend.score(sequences).logprobs, clean.score(sequences).logprobs)


@pytest.mark.parametrize("reader", ["transformers", "mlx_lm"])
def test_transformers_opens_an_export(
    make: Make, either: Path, sequences: Sequences, reader: str, tolerance: Tolerance, tmp_path: Path
) -> None:
    """It gives the log-probabilities of the backend that wrote it."""
    if reader == "mlx_lm":
        pytest.importorskip("mlx_lm", reason="opening an export in mlx-lm needs mlx-lm")
    backend, folder = make(either), tmp_path / "export"
    update(backend, sequences)
    folder.mkdir()
    backend.export(folder)
    read = _logprobs_in_mlx_lm if reader == "mlx_lm" else _logprobs_in_transformers
    expected = read(folder, sequences)
    np.testing.assert_allclose(backend.score(sequences).logprobs, expected, atol=max(tolerance.logprob, 1e-5), rtol=0)
    assert np.abs(expected - read(either, sequences)).max() > 0.1, "the update should show"


def _logprobs_in_transformers(folder: Path, sequences: Sequences) -> np.ndarray:
    return Oracle(folder, stock=True).distributions(sequences).logprobs.detach().numpy()


def _logprobs_in_mlx_lm(folder: Path, sequences: Sequences) -> np.ndarray:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    parts = []
    for row, prompt in enumerate(sequences.prompts):
        ids = np.concatenate([prompt, sequences.response(row)])
        logits = np.array(model(mx.array(ids)[None])[0].astype(mx.float32), dtype=np.float64) / sequences.temperature
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        parts.append(log[np.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]])
    return np.concatenate(parts)


def test_export_is_a_whole_model_folder(backend: Engine, folder: Path, tmp_path: Path) -> None:
    """Weights as they were loaded, the tokenizer's files, and a config that says float32."""
    found, expected = exported(backend, tmp_path / "export"), load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    written = tmp_path / "export"
    assert json.loads((written / "tokenizer.json").read_text()) == json.loads((folder / "tokenizer.json").read_text())
    assert (written / "tokenizer_config.json").is_file()
    assert (written / "generation_config.json").is_file()
    config = json.loads((written / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"


def test_another_run_starts_from_an_export(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    backend = make()
    update(backend, sequences)
    exported(backend, tmp_path / "export")
    again = make(tmp_path / "export").score(sequences).logprobs
    np.testing.assert_allclose(again, backend.score(sequences).logprobs, atol=1e-6, rtol=0)


def test_updates_do_not_change_the_reference(make: Make, sequences: Sequences) -> None:
    backend = make(keep_reference=True)
    before = backend.score(sequences).logprobs
    update(backend, sequences)
    np.testing.assert_array_equal(backend.reference(sequences), before)
    after = backend.score(sequences).logprobs
    assert np.abs(after - before).max() > 0.1, "reference() should leave the trained policy in place"


def test_hidden_residuals_are_distances_from_the_loaded_model(
    make: Make, folder: Path, sequences: Sequences, tolerance: Tolerance, tmp_path: Path
) -> None:
    backend = make(keep_reference=True)
    assert not backend.hidden_residuals(sequences).any()
    update(backend, sequences)
    exported(backend, tmp_path / "export")
    now, loaded = (
        Oracle(each).distributions(sequences).hidden.detach().double().numpy() for each in (tmp_path / "export", folder)
    )
    expected = np.sqrt(np.square(now - loaded).sum(-1))
    assert expected.min() > 0.01
    np.testing.assert_allclose(backend.hidden_residuals(sequences), expected, atol=10 * tolerance.logprob, rtol=0)


def test_a_reference_that_was_not_kept(backend: Engine, sequences: Sequences) -> None:
    for asks in (backend.reference, backend.hidden_residuals):
        with pytest.raises(BackendError, match="keep_reference"):
            asks(sequences)


def test_a_missing_model(make: Make, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="no-such-model") as caught:
        make(tmp_path / "no-such-model")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_saved_state(backend: Engine, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=str(tmp_path)) as caught:
        backend.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [10**9, 1e300])
def test_layers_without_weights_are_not_built(make: Make, folder: Path, tmp_path: Path, layers: float) -> None:
    """A wrong number in config.json is an error of one line, and does not fill the memory."""
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with pytest.raises(BackendError, match=r"(layers, but there are only \d+ weights|num_hidden_layers)"):
        make(broken)


def test_a_checkpoint_that_holds_nan_is_refused(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    """A number that was corrupted on disk is an error of one line."""
    backend = make()
    update(backend, sequences)
    backend.save(tmp_path)
    backend.load(tmp_path)
    [file] = [file for file in tmp_path.glob("*.safetensors") if file.stem not in ("moments", "optimizer")]
    with safe_open(file, "np") as stored:
        metadata = stored.metadata()
    arrays = load_file(file)
    name = next(name for name in sorted(arrays) if "down_proj" in name and "moment" not in name)
    broken = arrays[name].copy()
    broken.flat[-1] = np.nan
    save_file(arrays | {name: broken}, file, metadata)
    with pytest.raises(BackendError, match="NaN or infinity"):
        backend.load(tmp_path)
