"""Mistakes are one-line ValueErrors that name what is wrong; the package needs numpy and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from delta_cli.credit import MiniBatch, group_advantages, method, output_row_features, policy_loss, token_coefficients

FEATURES = output_row_features(np.ones((5, 3)), np.full(5, -1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"advantages": [1.0]}, "got [1] and [3]"),
        ({"advantages": [[1.0, -1.0]]}, "got [1, 2] and [3]"),
        ({"starts": [1, 2, 5]}, "starts must begin with 0"),
        ({"starts": [0, 4, 3]}, "never fall"),
        ({"starts": [0, 2, 6]}, "N = 5 features, not [2, 6]"),
        ({"advantages": [1.0, np.nan]}, "advantage of response 1 is not a finite number"),
        ({"advantages": [-np.inf, 1.0]}, "advantage of response 0 is not a finite number"),
        ({"groups": [1]}, "groups must be [R] = [2], not [1]"),
        ({"refinements": -1}, "refinements must be 0 or more, not -1"),
        ({"lambda_min": 1.3}, "[1.3, 1.2]"),
        ({"lambda_min": -0.1}, "[-0.1, 1.2]"),
        ({"lambda_min": 0.0, "lambda_max": 0.0}, "[0.0, 0.0]"),
        ({"lambda_max": np.inf}, "[0.8, inf]"),
        ({"lambda_min": np.nan}, "[nan, 1.2]"),
        ({"temperature": 0.0}, "not 0.0"),
        ({"temperature": np.nan}, "not nan"),
        ({"temperature": "newest"}, "not newest"),
        ({"share": 0.0}, "share must lie in (0, 1], not 0.0"),
        ({"share": 1.1}, "not 1.1"),
        ({"score": "softmax"}, "score 'softmax' does not exist; choose one of sigmoid, hard, random"),
        ({"contrast": "among"}, "contrast 'among'"),
        ({"weighting": "lambda"}, "weighting 'lambda'"),
        ({"normalise": "none"}, "normalise 'none'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_token_coefficients(arguments: dict[str, Any], message: str) -> None:
    arguments = {"advantages": [1.0, -1.0], "starts": [0, 2, 5]} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        token_coefficients(FEATURES, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "ppo"}, "preset 'ppo' does not exist; choose one of reinforce, grpo"),
        ({"logp": np.zeros(4)}, "logp must be [N] = [5], not [4]"),
        ({"logp_old": np.zeros(6)}, "logp_old must be [N] = [5], not [6]"),
        ({"weights": np.zeros(4)}, "weights must be [N] = [5], not [4]"),
        ({"advantages": [1.0, np.nan]}, "advantage of response 1"),
        ({"kept": [True]}, "kept must be [R] = [2], not [1]"),
        ({"preset": "dapo_ft"}, 'credit "entropy" needs the entropies'),
        ({"preset": "dr_grpo"}, 'aggregation "constant" needs max_length'),
        ({"preset": "dr_grpo", "max_length": 0}, "needs max_length"),
        ({"kl_coefficient": 0.1}, "kl_coefficient needs reference_logp"),
        ({"correction": "decoupled_token_is"}, "a correction needs engine_logp"),
        ({"correction": "tis"}, "correction 'tis' does not exist"),
        ({"entropy_coefficient": 0.1}, "entropy_coefficient needs entropies"),
        ({"gate": "clap"}, "gate 'clap' does not exist; choose one of none, clip"),
        ({"credit": "entropi"}, "credit 'entropi' does not exist"),
        ({"eps_low": 1.0}, "not 1.0 and 0.28"),
        ({"eps_high": np.nan}, "not 0.2 and nan"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, not 1.0"),
        ({"entropy_share": 2.0}, "entropy_share must lie in (0, 1], not 2.0"),
        ({"tau_negative": 0.0}, "tau_negative must be a finite number above 0, not 0.0"),
        ({"bound": -1.0}, "bound must be a finite number above 0, not -1.0"),
        ({"future_half_life": 0}, "future_half_life must be"),
        ({"future_high": 0.9}, "future_high >= 1, not 0.9"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_policy_loss(arguments: dict[str, Any], message: str) -> None:
    valid = {
        "preset": "dapo",
        "logp": np.zeros(5),
        "logp_old": np.zeros(5),
        "advantages": [1.0, -1.0],
        "starts": [0, 2, 5],
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_loss(**(valid | arguments))


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="eps_hihg"):
        policy_loss("dapo", np.zeros(1), np.zeros(1), [1.0], [0, 1], eps_hihg=0.3)


def test_advantages() -> None:
    with pytest.raises(ValueError, match=re.escape("got [2] and [3]")):
        group_advantages([1, 0], [0, 0, 0])
    with pytest.raises(ValueError, match="advantage 'z_score' does not exist; choose one of group_normalised"):
        group_advantages([1, 0], [0, 0], "z_score")  # type: ignore[arg-type]


def test_features() -> None:
    with pytest.raises(ValueError, match=re.escape("got [5, 3] and [4]")):
        output_row_features(np.ones((5, 3)), np.zeros(4))


def test_mini_batch_and_method_check_themselves() -> None:
    with pytest.raises(ValueError, match="entropies must be"):
        MiniBatch(np.zeros(2), np.ones(1), np.array([0, 2]), entropies=np.zeros(3))
    with pytest.raises(ValueError, match="aggregation 'mean'"):
        method("dapo", aggregation="mean")


def test_numpy_is_all_it_imports() -> None:
    """And the names of the array types, which are shared with the backends."""
    code = (
        "import sys, delta_cli.credit; "
        "names = {name for name in sys.modules if not name.startswith('delta_cli.credit')}; "
        "ours = {name for name in names if name.partition('.')[0] in ('delta_cli', 'backends')}; "
        "heavy = names & {'torch', 'mlx', 'transformers', 'scipy', 'pydantic', 'rich', 'typer'}; "
        "found = heavy | ours - {'delta_cli', 'backends', 'backends.arrays'}; "
        "sys.exit(', '.join(sorted(found)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
