"""Where the torch backend's own tests run: on the GPU where there is one, else on the processor."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
