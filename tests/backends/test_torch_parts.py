"""Folders with more than a language model, on torch: the language model trains, and the rest is exported as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from backends.interface import BackendError, Sequences
from backends.settings import BackendSettings, Lora
from backends.torch.backend import TorchEngine
from tests.conformance.objectives import Linear
from tests.device import DEVICE
from tests.families.families import RECURRENT, SIZES, SLIDING, VOCAB

TEXT = {
    "gemma3": SIZES | SLIDING | {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
    "qwen3_5": SIZES | RECURRENT | {"model_type": "qwen3_5_text", "rope_parameters": None},
    "mistral3": SIZES | {"model_type": "mistral"},
}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "qwen3_5": {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "mistral3": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
}


def image_text(kind: str, folder: Path) -> Any:
    """A tiny image-text model with random weights, written to ``folder``."""
    torch.manual_seed(0)
    text = {key: value for key, value in TEXT[kind].items() if value is not None}
    tied = kind == "gemma3"
    config = transformers.AutoConfig.for_model(
        kind, text_config=text | {"tie_word_embeddings": tied}, vision_config=VISION[kind], tie_word_embeddings=tied
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


def logprobs(model: Any, sequences: Sequences) -> torch.Tensor:
    """Log-probabilities of one response by transformers."""
    prompt = sequences.prompts[0]
    ids = torch.from_numpy(np.concatenate([prompt, sequences.tokens]))
    log = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return log.gather(1, ids[len(prompt) :, None])[:, 0]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", [*TEXT])
def test_only_the_language_model_changes(kind: str, tmp_path: Path) -> None:
    model = image_text(kind, tmp_path / "model")
    ids = np.random.default_rng(0).integers(2, VOCAB, 12)
    sequences = Sequences((ids[:4],), ids[4:], np.array([0, 8]))
    engine = TorchEngine(BackendSettings.of(str(tmp_path / "model")), DEVICE)
    with torch.no_grad():
        np.testing.assert_allclose(engine.score(sequences).logprobs, logprobs(model, sequences), rtol=0, atol=2e-5)
    engine.accumulate(sequences, Linear(sequences.starts, np.ones(8)))
    engine.step(1e-2)
    trained = engine.score(sequences).logprobs
    engine.export(tmp_path / "exported")
    opened = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        np.testing.assert_allclose(logprobs(opened, sequences), trained, rtol=0, atol=2e-5)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "exported"))
    assert before.keys() == after.keys()
    others = [name for name in before if "language_model" not in name and "lm_head" not in name]
    assert others
    for name in others:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_adapters_open_on_the_whole_model(tmp_path: Path) -> None:
    model = image_text("gemma3", tmp_path / "model")
    ids = np.random.default_rng(0).integers(2, VOCAB, 12)
    sequences = Sequences((ids[:4],), ids[4:], np.array([0, 8]))
    lora = Lora(rank=2, targets=("q_proj", "v_proj"))
    engine = TorchEngine(BackendSettings.of(str(tmp_path / "model"), lora=lora), DEVICE)
    for _ in range(2):
        engine.accumulate(sequences, Linear(sequences.starts, np.ones(8)))
        engine.step(1e-2)
    trained = engine.score(sequences).logprobs
    engine.export(tmp_path / "exported")
    with torch.no_grad():
        start = logprobs(model, sequences).numpy()
        opened = peft.PeftModel.from_pretrained(model, str(tmp_path / "exported" / "adapter"))
        np.testing.assert_allclose(logprobs(opened, sequences), trained, rtol=0, atol=2e-5)
    assert np.abs(trained - start).max() > 1e-3


def test_a_language_model_that_cannot_be_loaded_alone(tmp_path: Path) -> None:
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.AutoConfig.for_model("qwen3_vl", text_config=text, vision_config=vision)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(BackendError, match="'qwen3_vl', whose language model transformers cannot load by itself"):
        TorchEngine(BackendSettings.of(str(tmp_path)), DEVICE)
