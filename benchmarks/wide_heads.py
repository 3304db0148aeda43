"""The embedded base with heads of 32 numbers instead of 16, which is the least that vLLM's CPU attention takes.

It computes the same function: a head's numbers go to the places whose rotary frequencies are its own (i of 16 is the
frequency 2i of 32), zeros to the others, where their gradients are zero too. The root mean square over twice as many
numbers and the attention's scale are made up for in the norms of queries and keys.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from backends.interface import Floats

NARROW, WIDE = 16, 32
PLACES = np.concatenate([np.arange(0, WIDE // 2, 2), WIDE // 2 + np.arange(0, WIDE // 2, 2)])


def write_wide(narrow: Path, folder: Path) -> Path:
    """A copy in ``folder`` of the model folder ``narrow``, with wide heads."""
    shutil.copytree(narrow, folder, dirs_exist_ok=True)
    config = json.loads((narrow / "config.json").read_text())
    if config["head_dim"] != NARROW:
        raise SystemExit(f"{narrow}: its heads have {config['head_dim']} numbers instead of {NARROW}")
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": WIDE}, indent=2) + "\n")
    weights = load_file(narrow / "model.safetensors")
    save_file({name: _widened(name, weight) for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _widened(name: str, weight: Floats) -> Floats:
    """[…] of a projection or norm with each head's rows (of the output projection: columns) spread out."""
    if name.endswith("k_norm.weight"):
        return _spread(weight / np.sqrt(2))
    if name.endswith(("q_norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return _spread(weight)  # a query's √2 for its scale cancels that of its norm
    if name.endswith("o_proj.weight"):
        return np.ascontiguousarray(_spread(weight.T).T)
    return weight


def _spread(weight: Floats) -> Floats:
    """[heads × 16, …] to [heads × 32, …]."""
    heads = weight.reshape(-1, NARROW, *weight.shape[1:])
    wide = np.zeros((len(heads), WIDE, *weight.shape[1:]), np.float32)
    wide[:, PLACES] = heads
    return wide.reshape(-1, *weight.shape[1:])
