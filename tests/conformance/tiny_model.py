"""The tiny Qwen3 that every backend loads, and a batch full of edge cases. Imports no framework."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from backends.interface import Sequences
from delta_cli.assets.random_model import write_qwen3

VOCAB, EOS = 23, 0
TOKENIZER_SIZE = 20  # ids 20, 21 and 22 are in the model and not in the tokenizer


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


def make_sequences(seed: int = 0, temperature: float = 1.0) -> Sequences:
    """Six responses that hold the edge cases met in practice.

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
