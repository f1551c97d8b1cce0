"""Errors that a user can act on, and the exit codes they end a command with.

Everything that is raised on purpose derives from `HyperqwenError`. A command prints `str(error)` on stderr and exits
with `error.exit_code`; any other exception is a bug and keeps its traceback. Runs on a bare Python 3.9.
"""

from __future__ import annotations

OK = 0
FAILURE = 1
USAGE = 2
UNSUITABLE = 3
NOT_FOUND = 4
UNVERIFIED = 5
INTERRUPTED = 130


class HyperqwenError(Exception):
    """A failure with a message for the user, and where there is one, what to do about it.

    `message` names the thing (file, field, value); `fix` is the next step, in the imperative.
    """

    exit_code = FAILURE

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class BadInputError(HyperqwenError):
    """An argument or a file of the user's is wrong (exit 2)."""

    exit_code = USAGE


class UnsuitableError(HyperqwenError):
    """The machine lacks something: a program, disk space, a mirror, a permission (exit 3)."""

    exit_code = UNSUITABLE


class MissingError(HyperqwenError):
    """Something that was asked for is nowhere to be found, such as a pin's bytes (exit 4)."""

    exit_code = NOT_FOUND


class VerificationError(HyperqwenError):
    """Bytes or results are not what they must be (exit 5)."""

    exit_code = UNVERIFIED
