"""Loading: the architectures that work, and one clear line for every model that cannot."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from backends.interface import BackendError, Engine, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings, Lora, RewardModelSettings
from backends.torch import create
from backends.torch.convert import quantise
from backends.torch.reward_model import TransformersRewardModel
from delta_cli.assets.random_model import write_qwen3
from tests.device import DEVICE

VOCAB = 31
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.3,
}
ARCHITECTURES = {
    "llama": SIZES,
    "qwen2": SIZES,  # projections with a bias
    "mistral": {**SIZES, "sliding_window": 5},  # every layer slides
    "olmo2": SIZES,  # norms after the blocks
    "qwen2_moe": {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "num_experts": 4},
    "olmo3": {**SIZES, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {**SIZES, "logit_scale": 0.5},
    "granite": {**SIZES, "logits_scaling": 2.0},
    # capped scores and logits, both well inside of what these weights give
    "gemma2": {
        **SIZES,
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
        "sliding_window": 5,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "phi": {**SIZES, "num_key_value_heads": 4},  # a head with a bias
    "gpt_oss": {**SIZES, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},  # sinks
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_qwen3(tmp_path / "model", vocab_size=VOCAB, hidden=16, layers=3, head_dim=4, intermediate=24)
    return tmp_path / "model"


def load(folder: Path | str, **settings: Any) -> Engine:
    return create(BackendSettings.of(str(folder), **settings), DEVICE)


@pytest.mark.parametrize("layout", [pytest.param("slots", marks=pytest.mark.long), "pages"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures(kind: str, layout: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Responses much longer than a sliding window: what was sampled, what is scored and the whole model agree."""
    if layout == "pages":
        request.getfixturevalue("pages")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    # eager: transformers 5.17 leaves Gemma 2's cap on attention scores out of its default
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    backend = load(tmp_path)
    prompts = [np.array([3, 4, 5, 6, 7, 8, 9]), np.array([2])]
    drawn = backend.rollout(RolloutRequest(tuple(prompts), Sampling(max_tokens=20, stop_ids=(1,), samples=3)))
    sequences = Sequences(tuple(prompts[row // 3] for row in range(6)), drawn.tokens, drawn.starts)
    scored = backend.score(sequences)
    np.testing.assert_allclose(drawn.logprobs, scored.logprobs, atol=1e-5)
    for row, prompt in enumerate(sequences.prompts):
        ids = torch.from_numpy(np.concatenate([prompt, sequences.response(row)]))
        with torch.no_grad():
            log = model(ids[None]).logits[0].log_softmax(-1)
        expected = log[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
        found = scored.logprobs[drawn.starts[row] : drawn.starts[row + 1]]
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "extra", "why"),
    [
        (
            "nanochat",
            {"final_logit_softcapping": None, "num_key_value_heads": 4},
            "logits with more than the output matrix",
        ),
    ],
)
def test_logits_beyond_the_head_are_refused(
    kind: str, extra: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "nanochat":  # a transformation that no configuration key announces
        forward = transformers.LlamaForCausalLM.forward

        def doubled(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

        monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", doubled)
        kind, extra = "llama", {}
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **extra})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match=why):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # whose tolerance alone would let them pass
@pytest.mark.parametrize("kind", ["stablelm", "nemotron", "falcon"])  # the first two ignore the request
def test_attention_outside_the_interface_is_refused(kind: str, dtype: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, "initializer_range": 0.02})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match="choose another architecture"):
        load(tmp_path, dtype=dtype)


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_a_weight(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4, layer_types=["full_attention"] * 4)


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{ not json"), "config.json that cannot be used"),
        (lambda folder: edit_config(folder, model_type="nonesuch"), "nonesuch"),
        (lambda folder: edit_config(folder, hidden_size="wide"), "config.json that cannot be used"),
        (lambda folder: edit_config(folder, vocab_size=VOCAB + 1), "embed_tokens"),
        (lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq"}), "quantised"),
        (
            lambda folder: edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.Config"}),
            "Python code of its own",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "no \\*.safetensors weights"),
        (pickle_weights, "pickled"),
        (drop_a_weight, "11 are missing or have another shape"),
        (truncate, "cannot be loaded"),
    ],
)
def test_broken_folders(folder: Path, damage: Any, why: str) -> None:
    damage(folder)
    with pytest.raises(BackendError, match=why) as error:
        load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_that_is_not_on_the_hub() -> None:
    with pytest.raises(BackendError, match="is not a local folder and cannot be downloaded") as error:
        load("nobody/nothing")
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(folder: Path) -> None:
    with pytest.raises(BackendError, match="choose --backend cpu"):
        create(BackendSettings.of(str(folder)), "cuda")


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        (Lora(targets=("q_proj", "query")), "'query'.*down_proj, gate_proj"),
        (Lora(targets=("lm_head",)), "'lm_head'"),
        (Lora(layers=4), "1 to 3"),
    ],
)
def test_adapters_that_do_not_fit(folder: Path, lora: Lora, why: str) -> None:
    with pytest.raises(BackendError, match=why):
        load(folder, lora=lora)


def test_adapters_of_the_last_layers(folder: Path, tmp_path: Path) -> None:
    """The count is exact, the seed decides, and the global random state is left alone."""
    lora = Lora(rank=2, targets=("q_proj", "down_proj"), layers=2)
    state = torch.get_rng_state()
    backends = [load(folder, lora=lora, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert [backend.trainable for backend in backends] == [2 * 2 * ((16 + 16) + (24 + 16))] * 3
    saved = []
    for i, backend in enumerate(backends):
        (tmp_path / str(i)).mkdir()
        backend.save(tmp_path / str(i))
        saved.append((tmp_path / str(i) / "weights.safetensors").read_bytes())
    assert saved[0] == saved[1] != saved[2]


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder, lora=Lora(rank=2), keep_reference=True).close()
    assert capfd.readouterr() == ("", "")


def _unpack(file: Path, folder: Path) -> None:
    from backends.torch.gguf_import import unpack

    unpack(file, folder, ())


LOADERS: dict[str, Callable[[Path], object]] = {
    "policy": lambda folder: load(folder),
    "reward model": lambda folder: TransformersRewardModel(RewardModelSettings(path=str(folder), device="cpu")),
    "gguf": lambda folder: _unpack(folder / "model.gguf", folder / "out"),
    "quantised": lambda folder: quantise(folder, folder / "out", 8),
}


@pytest.mark.parametrize(("one", "other"), [("policy", "reward model"), ("gguf", "quantised")])
def test_two_threads_make_models_one_after_the_other(
    one: str, other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes settings of the whole process while it makes a model."""
    for package in ("bitsandbytes", "gguf"):
        pytest.importorskip(package)
    meeting, met = threading.Barrier(2), []

    def make(*_: object, **__: object) -> None:
        with suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(0.3))  # broken if nobody else comes meanwhile
        raise OSError("no model")

    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification):
        for name in ("from_config", "from_pretrained"):
            monkeypatch.setattr(kind, name, make)
    with ThreadPoolExecutor(2) as threads:
        errors = [thread.exception() for thread in [threads.submit(LOADERS[name], folder) for name in (one, other)]]
    assert ["no model" in str(error) for error in errors] == [True, True]
    assert not met


@pytest.mark.filterwarnings("ignore")
def test_quantising_prints_no_progress(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    quantise(folder, folder / "out", 8)
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.is_progress_bar_enabled()
