"""DelTA token credit in TRL's GRPOTrainer: two lines change in a script.

    from delta_cli.integrations.trl import DelTAConfig, DelTATrainer

in place of GRPOConfig and GRPOTrainer. For a trainer class of your own, use ``with_delta(MyTrainer)``.
The import raises ImportError if TRL is missing or has a version that was not tested.
"""

from delta_cli.integrations.trl.versions import check_trl

check_trl()

from delta_cli.integrations.trl.config import DelTAArguments, DelTAConfig  # noqa: E402  after the check
from delta_cli.integrations.trl.trainer import DelTAMixin, DelTATrainer, with_delta  # noqa: E402

__all__ = ["DelTAArguments", "DelTAConfig", "DelTAMixin", "DelTATrainer", "with_delta"]
