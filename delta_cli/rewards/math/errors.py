"""What the parts of the mathematics verifier raise. None of it leaves ``math_reward``."""

from __future__ import annotations


class UnreadableError(ValueError):
    """The text is not an answer in a form that can be compared."""


class NoValueError(ValueError):
    """The expression has no value there that can be computed: it is too large, or an operation is not defined."""


class DomainError(NoValueError):
    """The expression is not defined there among the real numbers, as the logarithm of a negative number."""


class PoleError(NoValueError):
    """The expression has an isolated gap there, as a division by zero."""
