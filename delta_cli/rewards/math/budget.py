"""A budget of work for each verdict, so that no answer can take long, however it was written.

Work is counted, not timed: the same answer always gets the same verdict. One unit is about one
microsecond on a slow machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from delta_cli.rewards.math.errors import UnreadableError

UNITS = 400_000  # of work for one verdict


class OutOfBudgetError(UnreadableError):
    """The verdict would take too much work; the answer is refused."""


class _Account:
    def __init__(self) -> None:
        self.left = UNITS


_account: ContextVar[_Account | None] = ContextVar("work", default=None)


@contextmanager
def budget() -> Iterator[None]:
    """Limit the work of everything inside. Raises OutOfBudgetError when it is used up."""
    token = _account.set(_Account())
    try:
        yield
    finally:
        _account.reset(token)


def spend(units: int) -> None:
    """Count ``units`` of work. Raises OutOfBudgetError if the budget does not cover them; no-op outside a budget."""
    account = _account.get()
    if account is not None:
        account.left -= units
        if account.left < 0:
            raise OutOfBudgetError("too much work for one verdict")
