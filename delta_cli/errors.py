"""The exceptions that reach a person."""


class UserError(Exception):
    """A problem a person can fix. The message is one line: what, where, why, how to fix.

    What it quotes may come from anywhere: line breaks, control characters and halves of characters are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(each if each.isprintable() else ascii(each)[1:-1] for each in message))


class NotFetchedError(UserError):
    """Something of the hub that is not on this machine and cannot be fetched now; the recipe may be right."""


class StopRequested(Exception):
    """Somebody asked the run to stop; raised where that loses nothing that was saved."""
