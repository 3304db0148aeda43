"""A reward model: a sequence classifier of transformers that scores chats."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from backends.interface import BackendError
from backends.settings import RewardModelSettings
from backends.torch.loading import exclusive_transformers, resolve_folder

LONGEST = 10**6  # a tokenizer without a limit names a larger number


class TransformersRewardModel:
    """One logit for each chat. Chats are padded on the right, so padding changes nothing before it."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self.settings = settings
        self.device = _device(settings.device)
        folder = resolve_folder(settings.path)
        self.model, self.tokenizer = _load(folder, self._dtype())
        self.model.to(self.device).eval()
        config = self.model.config
        self.label = _label(config, settings.label)
        self.pad = config.pad_token_id if config.pad_token_id is not None else self.tokenizer.pad_token_id
        config.pad_token_id = self.pad
        positions = getattr(config, "max_position_embeddings", None)
        limits = (settings.max_length, positions, self.tokenizer.model_max_length, LONGEST)
        self.max_length = min(limit for limit in limits if limit is not None)

    def logits(self, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[float | None]:
        """The logit of each chat; None for one of more than ``max_length`` tokens."""
        encoded = [self._encode(chat) for chat in chats]
        found: list[float | None] = [None] * len(chats)
        fitting = [index for index, ids in enumerate(encoded) if 0 < len(ids["input_ids"]) <= self.max_length]
        size = 1 if self.pad is None else self.settings.batch_size  # without a padding token, one at a time
        for start in range(0, len(fitting), size):
            part = fitting[start : start + size]
            for index, logit in zip(part, self._forward([encoded[each] for each in part]), strict=True):
                found[index] = logit
        return found

    def _encode(self, chat: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
        """The ids by the model's chat template; without one, of the earlier turns and the response as a pair."""
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(list(chat), tokenize=False)
            return dict(self.tokenizer(text, add_special_tokens=False))
        asked = "\n\n".join(turn["content"] for turn in chat[:-1])
        return dict(self.tokenizer(asked, chat[-1]["content"]))

    @torch.inference_mode()
    def _forward(self, encoded: Sequence[Mapping[str, list[int]]]) -> list[float]:
        width = max(len(each["input_ids"]) for each in encoded)
        inputs = {}
        for name in encoded[0]:
            fill = self.pad or 0 if name == "input_ids" else 0
            rows = [[*each[name], *[fill] * (width - len(each[name]))] for each in encoded]
            inputs[name] = torch.tensor(rows, device=self.device)
        logits: list[float] = self.model(**inputs).logits[:, self.label].float().tolist()
        return logits

    def _dtype(self) -> torch.dtype:
        if self.settings.dtype == "auto":
            return torch.float32 if self.device.type == "cpu" else torch.bfloat16
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype


def _device(name: str) -> torch.device:
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: PyTorch without CUDA
        raise BackendError(f"reward.model.device = '{name}' cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model and its tokenizer. A head that the folder lacks would be random, so it is refused."""
    try:
        with exclusive_transformers():
            model, report = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, use_safetensors=True
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BackendError(f"cannot be loaded as a sequence classifier: {str(error).splitlines()[0]}") from error
    if missing := sorted(report["missing_keys"]):
        raise BackendError(f"the weights of '{missing[0]}' are not in the folder, so it is not a trained reward model")
    return model, tokenizer


def _label(config: Any, wanted: str | None) -> int:
    """Which logit is the score."""
    names = {int(number): name for number, name in config.id2label.items()}
    if wanted is None and len(names) == 1:
        return 0
    for number, name in names.items():
        if name == wanted:
            return number
    raise BackendError(f"reward.model.label = {wanted!r}; the model's labels are {', '.join(names.values())}")
