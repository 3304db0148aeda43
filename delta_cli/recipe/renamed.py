"""Keys and metrics that have a new name. Their old names work for one more release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from delta_cli.errors import RenamedWarning

Table = dict[str, Any]

KEYS = {  # section -> old key -> new key
    "update": {"score": "old_logprobs"},
    "engine": {"ahead": "async_steps"},
    "reward": {"format": "format_bonus", "length": "length_penalty"},
    "rollout": {"dynamic": "dynamic_sampling", "dynamic_limit": "dynamic_sampling_limit"},
}
MOVED = {("update", "importance_cap"): ("correction", "high", {"preset": "decoupled_token_is"})}
VALUES = {("update", "old_logprobs"): {"fresh": "recompute"}}
METRICS = {
    "equal_groups": "zero_variance_groups",
    "policy_shift": "probe_logprob_change",
    "version_lag": "staleness",
}


def with_new_keys(table: Mapping[str, Any], where: str) -> Table:
    """A recipe's table with new names in place of old ones. Warns once for each old name.

    This includes several rewards, and overrides of one of them by its name. A table with both names keeps both, so the
    old one is refused as an unknown key.
    """
    found = dict(table)
    for section, names in KEYS.items():
        value = found.get(section)
        if isinstance(value, list | tuple):
            found[section] = [_renamed(section, each, names, where) for each in value]
        elif isinstance(value, Mapping):
            found[section] = _renamed(section, value, names, where)
    return _with_moved(found, where)


def _with_moved(table: Table, where: str) -> Table:
    """The table with keys that moved to another section in their new places, beside what they imply there."""
    found = dict(table)
    for (section, old), (target, new, implied) in MOVED.items():
        if not isinstance(found.get(section), Mapping) or old not in found[section]:
            continue
        _warn(f"{where}: {section}.{old} is now {target}.{new}; the next release drops the old name")
        rest = dict(found[section])
        value = rest.pop(old)
        found[section] = rest
        found[target] = {**implied, new: value, **found.get(target, {})}
    return found


def with_new_metrics(record: Mapping[str, Any]) -> Table:
    """A line of metrics.jsonl with new names in place of old ones."""
    return {METRICS.get(name, name): value for name, value in record.items()}


def _renamed(section: str, value: Any, names: Mapping[str, str], where: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    renamed = {}
    for name, item in value.items():
        new = names.get(name, name)
        if new != name and (isinstance(item, Mapping) or new in value):  # the name of a reward, or both names are there
            new = name
        elif new != name:
            _warn(f"{where}: {section}.{name} is now {section}.{new}; the next release drops the old name")
        values = VALUES.get((section, new), {})
        if isinstance(item, str) and item in values:
            _warn(f'{where}: {section}.{new} = "{item}" is now "{values[item]}"')
            item = values[item]
        nested = isinstance(item, Mapping) and section == "reward"  # --set reward.NAME.KEY=…
        renamed[new] = _renamed(section, item, names, where) if nested else item
    return renamed


def _warn(line: str) -> None:
    warnings.warn(line, RenamedWarning, stacklevel=2)
