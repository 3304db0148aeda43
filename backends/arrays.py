"""Names of array types, used in every signature."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.floating]
Doubles = NDArray[np.float64]
Bools = NDArray[np.bool_]
Summed = TypeVar("Summed", NDArray[np.float32], NDArray[np.float64])  # added up over ranks in its own precision
