"""The DelTA core: which token deserves how much credit, and the gradient of the objective. Numpy only.

``token_coefficients``, ``output_row_features`` and ``policy_loss`` are public and stable: another
trainer can call them with arrays of its own.
"""

from delta_cli.credit.advantages import group_advantages
from delta_cli.credit.coefficients import CoefficientSettings, TokenCoefficients, token_coefficients
from delta_cli.credit.corrections import CORRECTIONS, Correction, correction
from delta_cli.credit.features import DenseFeatures, FeatureReductions, output_row_features
from delta_cli.credit.methods import PRESETS, Method, method
from delta_cli.credit.surrogate import MiniBatch, Surrogate, policy_loss

__all__ = [
    "CORRECTIONS",
    "PRESETS",
    "CoefficientSettings",
    "Correction",
    "DenseFeatures",
    "FeatureReductions",
    "Method",
    "MiniBatch",
    "Surrogate",
    "TokenCoefficients",
    "correction",
    "group_advantages",
    "method",
    "output_row_features",
    "policy_loss",
    "token_coefficients",
]
