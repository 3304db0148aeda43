"""Options, versions and what is refused, each with its reason."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer, TrlParser

from delta_cli.integrations.trl import DelTAArguments, DelTAConfig, DelTAMixin, DelTATrainer, versions, with_delta
from delta_cli.integrations.trl.config import LOSS_TYPES
from delta_cli.recipe.method import DeltaSection
from tests.integrations.tiny import model, questions, right, settings, tokenizer

ROOT = Path(__file__).parents[2]


def test_options_are_those_of_a_recipe() -> None:
    """The paper's settings by default, and each argument in the section's key of that name."""
    assert DelTAArguments().delta_section() == DeltaSection()
    ours = {each.name: each.default for each in fields(DelTAArguments)}
    assert (ours["delta_lambda_min"], ours["delta_lambda_max"], ours["delta_refinements"]) == (0.8, 1.2, 1)
    assert (ours["delta_temperature"], ours["delta_feature_bytes"]) == (None, 2**33)
    changed = DelTAArguments(delta_scope="group", delta_lambda_max=3.0, delta_temperature=0.5).delta_section()
    assert (changed.scope, changed.lambda_max, changed.temperature) == ("group", 3.0, 0.5)


def test_the_command_line_of_trl_takes_them(tmp_path: Path) -> None:
    parser = TrlParser(DelTAConfig)
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--delta_proxy", "hidden_topk"]
    [args] = parser.parse_args_and_config([*line, "--delta_lambda_max", "1.5", "--delta_temperature", "2"])
    assert (args.delta_proxy, args.delta_lambda_max, args.delta_temperature) == ("hidden_topk", 1.5, 2.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"delta_refinements": -1}, "delta_refinements: "),
        ({"delta_lambda_min": 1.3}, "0 <= lambda_min <= lambda_max"),
        ({"delta_proxy": "hidden"}, "delta_proxy: "),
        ({"delta_credit": "absent.py:f"}, "delta_credit: credit file absent.py does not exist"),
        ({"delta_credit": "delta"}, "delta_credit 'delta' is no weight function; name one, or FILE.py:FUNCTION"),
        ({"delta_credit": "nonsense"}, "credit 'nonsense' does not exist"),
        ({"delta_feature_bytes": -1}, "delta_feature_bytes must be 0 or more, not -1"),
        ({"importance_sampling_level": "sequence"}, "set importance_sampling_level='token'"),
        ({"loss_type": "new"}, "loss_type 'new' is not known to accept token advantages; choose one of grpo"),
    ],
)
def test_what_is_refused_says_why_in_a_line(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        DelTAConfig(**settings(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_a_loss_is_refused_in_a_plain_config_too(tmp_path: Path) -> None:
    args = GRPOConfig(**settings(tmp_path, importance_sampling_level="sequence"))
    with pytest.raises(ValueError, match="set importance_sampling_level='token'"):
        DelTATrainer(model(), right, args, questions(4), processing_class=tokenizer())


def test_every_loss_of_trl_is_known() -> None:
    """A new one must be looked at before it is let in."""
    named = re.findall(r'- `"(\w+)"`', GRPOConfig.__doc__.partition("loss_type (")[2].partition("mask_truncated")[0])
    assert set(named) == set(LOSS_TYPES)


def test_an_output_layer_that_is_more_than_a_matrix_is_refused(tmp_path: Path) -> None:
    policy = model()
    policy.config.final_logit_softcapping = 30.0
    args = DelTAConfig(**settings(tmp_path, delta_proxy="hidden_exact"))
    with pytest.raises(ValueError, match=re.escape("(final_logit_softcapping); set delta_proxy='output_row'")):
        DelTATrainer(policy, right, args, questions(4), processing_class=tokenizer())


def test_features_that_cannot_be_computed_anew_are_refused(tmp_path: Path) -> None:
    class Sharded(DelTATrainer):  # type: ignore[misc]
        """Says so once it scores; a processor does not shard."""

        def _delta_score(self, output: Any) -> Any:
            self.is_fsdp_enabled = True
            return super()._delta_score(output)

    args = DelTAConfig(**settings(tmp_path, delta_feature_bytes=0, delta_feature_host_bytes=100))
    run = Sharded(model(), right, args, questions(4), processing_class=tokenizer())
    with pytest.raises(ValueError, match="delta_feature_host_bytes together, and with a sharded model all processes"):
        run.train()


def test_advantages_of_tokens_are_refused(tmp_path: Path) -> None:
    class Own(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = output["advantages"].unsqueeze(1)
            return output

    args = DelTAConfig(**settings(tmp_path))
    run = with_delta(Own)(model(), right, args=args, train_dataset=questions(4), processing_class=tokenizer())
    with pytest.raises(ValueError, match=re.escape("one advantage for each completion, [B]; the trainer's are [8, 1]")):
        run.train()


def test_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Own(GRPOTrainer):  # type: ignore[misc]
        """Counts its losses."""

        count = 0

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.count += 1
            assert inputs["advantages"].shape == inputs["completion_ids"].shape
            return super()._compute_loss(model, inputs)

    @dataclass
    class OwnConfig(DelTAArguments, GRPOConfig):  # type: ignore[misc]
        """With an option of its own."""

        twice: bool = False

    made = with_delta(Own)
    assert issubclass(made, DelTAMixin)
    assert issubclass(made, Own)
    assert made.__name__ == "DelTAOwn"
    assert "delta" in made._tag_names
    assert "delta" not in Own._tag_names
    assert with_delta(made) is made
    args = OwnConfig(**settings(tmp_path, delta_lambda_max=3.0, twice=True))
    run = made(model(), right, args=args, train_dataset=questions(), processing_class=tokenizer())
    run.train()
    assert run.count == 2
    assert run.state.log_history[0]["delta/coefficient_max"] > 1.5


def test_a_plain_config_gives_the_papers_settings(tmp_path: Path) -> None:
    run = with_delta(GRPOTrainer)(
        model(), right, args=GRPOConfig(**settings(tmp_path)), train_dataset=questions(), processing_class=tokenizer()
    )
    assert run._delta_section == DeltaSection()


def test_what_is_no_grpo_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="subclass of TRL's GRPOTrainer, not Path"):
        with_delta(Path)


@pytest.mark.parametrize("found", ["1.15.2", "1.17.0", "2.0.0", "0.29"])
def test_another_version_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: found)
    with pytest.raises(ImportError, match=re.escape(f"needs trl>=1.16,<1.17, not {found}")):
        versions.check_trl()


def test_versions_that_were_tested_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.check_trl()
    monkeypatch.setattr(versions, "version", lambda _: "1.16.3")
    versions.check_trl()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trl"]
    assert "trl>=1.16,<1.17" in extra


def test_without_trl_one_line_says_what_to_install() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def gone(name):\n"
        "    if name == 'trl': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = gone\n"
        "sys.modules['trl'] = None\n"
        "import delta_cli.integrations.trl\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: delta_cli.integrations.trl needs trl>=1.16,<1.17, which is not installed; "
        "run: pip install 'delta-rlvr[trl]'"
    )
