"""The one exception that reaches a person."""


class UserError(Exception):
    """A problem a person can fix. The message is one line: what, where, why, how to fix."""
