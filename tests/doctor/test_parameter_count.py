"""The doctor's counts of parameters from published configs, against transformers' models without memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from delta_cli.doctor.model_shape import shape_of
from tests.families.published import PUBLISHED

SHORT = ("Qwen/Qwen3-30B-A3B", "LiquidAI/LFM2-1.2B")
MODELS = [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in PUBLISHED]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_counted(name: str, tmp_path: Path) -> None:
    """A token meets all parameters of a mixture of experts except those of the experts it is not sent to."""
    config = {key: value for key, value in PUBLISHED[name].items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text)
    shape, _ = shape_of(str(tmp_path))
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    experts = {key: weight for key, weight in model.named_parameters() if "experts." in key and "shared" not in key}
    used = (getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", 0)) if experts else 0
    idle = sum(weight.numel() * (len(weight) - used) // len(weight) for weight in experts.values())
    assert shape.counted
    assert shape.counted.layers - shape.counted.active == idle


def test_an_image_text_model_counts_its_language_model(tmp_path: Path) -> None:
    """Qwen3.5's attention is gated, so its queries take two matrices; adapters are on the layers that attend."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3.5-27B"]))
    shape, _ = shape_of(str(tmp_path))
    assert shape.attending == 16
    assert shape.adapters(8, ("v_proj",), None) == 16 * 8 * (5120 + 4 * 256)
