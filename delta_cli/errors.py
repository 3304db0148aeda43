"""The exceptions that reach a person, and the commands that their messages print."""

import shlex

LONGEST = 480  # characters of a message
_WORD = 200  # and of a word in it


class UserError(Exception):
    """A problem a person can fix. The message is one line: what, where, why, how to fix.

    What it quotes may come from anywhere: line breaks, control characters and halves of characters are escaped,
    and what is very long is left out in the middle.
    """

    def __init__(self, message: str = "") -> None:
        words = [_shortened(word, _WORD) for word in message.split(" ")]
        line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(words))
        super().__init__(_shortened(line, LONGEST))


def delta_command(*words: object) -> str:
    """A ``delta`` command as a shell reads it: words with spaces or other special characters are quoted."""
    return shlex.join(["delta", *map(str, words)])


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def typed_line(error: BaseException) -> str:
    """The type of an error and the first line of its message, as tracebacks end."""
    line = first_line(error)
    return line if line == type(error).__name__ else f"{type(error).__name__}: {line[:300]}"


def _shortened(text: str, longest: int) -> str:
    """The text without its middle, where it is longer."""
    half = (longest - 5) // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


class NotFetchedError(UserError):
    """Something of the hub that is not on this machine and cannot be fetched now; the recipe may be right."""


class StopRequested(Exception):
    """The run was asked to stop; raised only where stopping loses nothing that was saved."""


class Interrupted(Exception):
    """The run was asked to stop and has saved; ``step`` is the one it goes on from, ``dropped`` the phase under way."""

    def __init__(self, step: int, dropped: str = "") -> None:
        self.step = step
        self.dropped = dropped
        super().__init__(f"stopped after step {step}")


class RenamedWarning(FutureWarning):
    """A recipe uses a key's old name, which works for one more release."""
