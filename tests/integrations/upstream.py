"""A pytest plugin that runs TRL's own GRPO tests without a network, with its trainer class or with ours.

Their models and data sets of a few kilobytes live on a hub. In their place: random models of the same
architectures with the embedded model's tokenizer, put into a hub's cache folder, and a data set of a
few sentences in each of the formats. ``DELTA_UPSTREAM=delta`` puts DelTATrainer and DelTAConfig where
the tests import GRPOTrainer and GRPOConfig.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

CACHE = Path(mkdtemp(prefix="upstream-"))
os.environ.update(HF_HUB_CACHE=str(CACHE), HF_HUB_OFFLINE="1")

import datasets  # noqa: E402  after the cache is set
import transformers  # noqa: E402
import trl  # noqa: E402

from delta_cli.assets import model_path  # noqa: E402
from delta_cli.integrations.trl import DelTAConfig, DelTATrainer  # noqa: E402

OWNER = "trl-internal-testing"
SIZES = {
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
}
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": ("Qwen2", "ForCausalLM"),
    "tiny-Qwen3ForCausalLM": ("Qwen3", "ForCausalLM"),
    "tiny-LlamaForCausalLM-3.2": ("Llama", "ForCausalLM"),
    "tiny-MistralForCausalLM-0.2": ("Mistral", "ForCausalLM"),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3Moe", "ForCausalLM"),
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2", "ForSequenceClassification"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3", "ForSequenceClassification"),
    "tiny-LlamaForSequenceClassification-3.2": ("Llama", "ForSequenceClassification"),
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SENTENCES = [f"Count {number} things that are better than a list" for number in range(17)]


def write_models() -> None:
    """Each model as a snapshot in the cache."""
    for name, (family, head) in MODELS.items():
        folder = CACHE / f"models--{OWNER}--{name}"
        snapshot = folder / "snapshots" / "0"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0")
        more = MIXTURE if "Moe" in family else {}
        labels = {"num_labels": 1} if "Sequence" in head else {}
        config = getattr(transformers, f"{family}Config")(**SIZES, **more, **labels)
        transformers.set_seed(0)
        getattr(transformers, f"{family}{head}")(config).save_pretrained(snapshot)
        reader = transformers.AutoTokenizer.from_pretrained(model_path("tiny-base"))
        reader.chat_template = TEMPLATE
        reader.save_pretrained(snapshot)


def load_dataset(path: str, name: str = "standard_prompt_only", split: str | None = None, **_: Any) -> Any:
    """A stand-in for ``trl-internal-testing/zen``; the others need what is not here."""
    if path != f"{OWNER}/zen":
        raise ConnectionError(f"no stand-in for {path}")
    rows = [{"prompt": [{"role": "user", "content": text}] if "conv" in name else text} for text in SENTENCES]
    found = datasets.Dataset.from_list(rows)
    return found if split else datasets.DatasetDict({"train": found, "test": found.select(range(2))})


def not_available(name: str) -> Any:
    """What ``trl.import_utils`` of another version may be asked for: is_…_available, of packages that are not here."""
    if name.startswith("is_") and name.endswith("_available"):
        return lambda *_: False
    raise AttributeError(name)


write_models()
importlib.import_module("trl.import_utils").__getattr__ = not_available
datasets.load_dataset = load_dataset
if os.environ.get("DELTA_UPSTREAM") == "delta":
    trl.GRPOTrainer, trl.GRPOConfig = DelTATrainer, DelTAConfig
