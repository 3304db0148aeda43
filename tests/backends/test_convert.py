"""Exported models in other forms, opened by transformers: GGUF files and weights quantised by bitsandbytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from backends import registry
from backends.interface import BackendError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TEXT = "Natalia sold clips to 48 of her friends in April, and half as many in May: 48 + 24 = 72.\n\nÄpfel 12345"


def write_model(folder: Path, kind: str, **changes: Any) -> Any:
    """A small random model with a byte-level tokenizer, as transformers writes them."""
    tokenizer = Tokenizer(models.BPE())
    before: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if kind == "llama":
        before.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    torch.manual_seed(0)
    sizes = {"vocab_size": 304, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    width = 128 if kind == "qwen3" else 16  # transformers' reader takes Qwen3's heads to be this wide
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width, "max_position_embeddings": 128}
    config = transformers.AutoConfig.for_model(kind, **sizes, eos_token_id=0, bos_token_id=0, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": "{{ x }}"})
    )
    return model


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(1, 25)[None]).logits


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_gguf_is_the_model_that_transformers_reads_from_it(kind: str, tied: bool, tmp_path: Path) -> None:
    """The same logits but for float16, and the same tokens; transformers' reader undoes the order of Llama's rows."""
    gguf = pytest.importorskip("gguf")
    model = write_model(tmp_path / "m", kind, tie_word_embeddings=tied)
    registry.converter("transformers").gguf(tmp_path / "m", tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits(read), logits(model), atol=2e-3, rtol=0)
    assert float(logits(model).std()) > 0.05, "a model that says nothing would agree with any"
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    pieces = fields["tokenizer.ggml.tokens"].contents()
    own = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert pieces[: own.get_vocab_size()] == [own.id_to_token(number) for number in range(own.get_vocab_size())]
    assert len(pieces) == 304
    assert fields["tokenizer.ggml.pre"].contents() == ("smollm" if kind == "llama" else "qwen2")
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert fields["tokenizer.chat_template"].contents() == "{{ x }}"
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert opened.decode(opened.encode(TEXT, add_special_tokens=False)) == TEXT


def test_what_gguf_cannot_hold_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    convert = registry.converter("transformers")
    write_model(tmp_path / "m", "qwen3")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for changes, part in (
        ({"model_type": "mamba"}, "but this model is a 'mamba'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "does not support scaled positions"),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(BackendError, match=part):
            convert.gguf(tmp_path / "m", tmp_path / "model.gguf")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {}}}')
    with pytest.raises(BackendError, match="byte-level BPE"):
        convert.gguf(tmp_path / "m", tmp_path / "model.gguf")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_open_in_transformers(bits: int, tmp_path: Path) -> None:
    """Close to the model of full precision, nearer with more bits, and smaller on disk."""
    pytest.importorskip("bitsandbytes")
    model = write_model(tmp_path / "m", "qwen3")
    registry.converter("transformers").quantise(tmp_path / "m", tmp_path / "q", bits)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"][f"load_in_{bits}bit"] is True
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, device_map="cpu")
    with torch.no_grad():
        found = read(torch.arange(1, 25)[None]).logits.float()
    wanted = logits(model)
    error = float((found - wanted).std() / wanted.std())
    assert 0 < error < (0.25 if bits == 4 else 0.08)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")) for name in ("m", "q")]
    assert sizes[1] < 0.7 * sizes[0]
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    with pytest.raises(BackendError, match="4 and 8 bits, not 3"):
        registry.converter("transformers").quantise(tmp_path / "m", tmp_path / "r", 3)


def test_numbers_of_rows_are_interleaved_within_each_head() -> None:
    """Two heads of four rows: the halves 0 1 | 2 3 become 0 2 1 3."""
    pytest.importorskip("gguf")
    from backends.torch.gguf_export import _interleaved

    rows = np.arange(8, dtype=np.float32)[:, None]
    assert _interleaved(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
