"""The exceptions that reach a person."""


class UserError(Exception):
    """A problem a person can fix. The message is one line: what, where, why, how to fix."""


class NotFetchedError(UserError):
    """Something of the hub that is not on this machine and cannot be fetched now; the recipe may be right."""


class StopRequested(Exception):
    """Somebody asked the run to stop; raised where that loses nothing that was saved."""
