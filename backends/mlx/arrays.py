"""Name of an array type that several modules of this backend use."""

import mlx.core as mx

NamedArrays = dict[str, mx.array]  # weights, gradients or moments, by parameter name
