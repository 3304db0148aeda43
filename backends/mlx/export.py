"""A trained policy as a model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.utils import dequantize_model, save_model

from backends.mlx.adapters import adapted_layers
from backends.mlx.model import MlxPolicy

COPIED = {".json", ".txt", ".jinja", ".model", ".tiktoken"}  # tokenizer, templates, generation defaults


def export(policy: MlxPolicy, folder: Path, dtype: str) -> None:
    """Write a folder that mlx-lm opens and, where it names its weights alike, transformers too.

    Adapters are fused into their layers and quantised layers are written dequantised, in
    ``dtype``: rounding the sum back to 4 bits could erase an update far smaller than a
    quantisation step. That costs the space of an unquantised model, and in bfloat16 still rounds
    what lies below its 8 bits.
    """
    with plain(policy.model, getattr(mx, dtype)):
        save_model(folder, policy.model)
    config = json.loads((policy.folder / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    config |= {"torch_dtype": dtype, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(policy.folder.iterdir()):
        if path.suffix in COPIED and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


@contextmanager
def plain(model: nn.Module, dtype: mx.Dtype) -> Iterator[None]:
    """Inside, the model's layers are dequantised to ``dtype`` and fused; afterwards they are what they were."""
    adapted = adapted_layers(model)
    packed = [(path, module) for path, module in model.named_modules() if hasattr(module, "bits")]
    try:
        dequantize_model(model)
        layers = dict(model.named_modules())
        for path, _ in packed:
            layers[path].set_dtype(dtype)  # some kinds of quantisation come out in bfloat16
        model.update_modules(tree_unflatten([(path, layer.fuse()) for path, layer in adapted]))
        yield
    finally:
        for before in (adapted, packed):  # packed layers lie inside adapted ones
            model.update_modules(tree_unflatten(before))
