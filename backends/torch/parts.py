"""Model folders that hold more than a language model, such as image-text models.

Only the language model is loaded and trained. An export copies the other weights from the original files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from backends.interface import BackendError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LanguagePart:
    """The names of a language model's weights in the files of a larger model."""

    trunk: str  # what the trunk's names begin with in the files, instead of "model."
    head: str | None  # the output matrix; None if it is tied to the embedding
    opened: str  # what the trunk's names begin with if transformers opens the folder

    @classmethod
    def find(cls, folder: Path, opened: str) -> LanguagePart:
        """The language model in a folder, by the name of its embedding. Raises BackendError."""
        names = [name for file in _files(folder) for name in _names(file)]
        trunks = [name.removesuffix(EMBEDDING) for name in names if name.endswith(f".{EMBEDDING}")]
        if len(trunks) > 1:
            trunks = [trunk for trunk in trunks if "language_model" in trunk]
        if len(trunks) != 1:
            raise BackendError(
                f"{folder}: cannot tell which weights are the language model's: {len(trunks)} of its parts have an "
                "embedding; choose a text-only version"
            )
        return cls(trunks[0], next((name for name in names if name.endswith(HEAD)), None), opened)

    @property
    def renamings(self) -> dict[str, str]:
        """Patterns of names in the files, with what replaces them in the language model."""
        found = {f"^{re.escape(self.trunk)}": "model."}
        if self.head is not None:
            found[f"^{re.escape(self.head.removesuffix('weight'))}"] = "lm_head."
        return found

    def stored(self, name: str) -> str:
        """The name in the files of a weight of the language model."""
        if self.head is not None and name.startswith("lm_head."):
            return self.head.removesuffix("weight") + name.removeprefix("lm_head.")
        return self.trunk + name.removeprefix("model.")

    def others(self, folder: Path) -> dict[str, Tensor]:
        """The weights in ``folder`` that are not the language model's, as they are stored."""
        return {name: tensor for file in _files(folder) for name, tensor in self._others(file)}

    def _others(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        head = self.head.removesuffix("weight") if self.head else None
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if not name.startswith(self.trunk) and not (head and name.startswith(head)):
                    yield name, stored.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as stored:
        return list(stored.keys())
