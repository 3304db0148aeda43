"""The versions of TRL that the plug-in was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

LOW, HIGH = (1, 16), (1, 17)  # LOW is included, HIGH is not; keep the extra ``trl`` in pyproject.toml equal
INSTALL = "run: pip install 'delta-rlvr[trl]'"


def check_trl() -> None:
    """Raise ImportError if TRL is missing or has a version whose private methods may differ."""
    wanted = f"trl>={'.'.join(map(str, LOW))},<{'.'.join(map(str, HIGH))}"
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ImportError(f"delta_cli.integrations.trl needs {wanted}, which is not installed; {INSTALL}") from None
    release = tuple(int(part) for part in found.split(".")[:2])
    if not LOW <= release < HIGH:
        raise ImportError(
            f"delta_cli.integrations.trl needs {wanted}, not {found}: it overrides methods that change between "
            f"minor versions; {INSTALL}"
        )
