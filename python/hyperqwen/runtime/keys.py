"""The API key that a server asks for: from a file or the environment, never from the command line."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from hyperqwen.errors import BadInputError, MissingError, UnsuitableError

VARIABLE = "HYPERQWEN_API_KEY"


def resolve_key(file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The key in `file` or in HYPERQWEN_API_KEY; None where neither is given: no key is asked for.

    Raises MissingError or UnsuitableError for a file that cannot be read, BadInputError where both are given, and for a
    key that is empty (which a server would take for none) or that no HTTP header can carry.
    """
    if file is not None and VARIABLE in environ:
        # Whichever won, a client that was told of the other one would be turned away without an explanation.
        raise BadInputError(
            f"two keys are given: {VARIABLE} and the key file {file}",
            f"keep one: unset {VARIABLE}, or leave out --api-key-file (HYPERQWEN_DEMO_API_KEY_FILE)",
        )
    if file is not None:
        return _checked(_read(file), f"the key file {file}")
    if VARIABLE in environ:
        return _checked(environ[VARIABLE], VARIABLE)
    return None


def shell_key(file: Path | None) -> str:
    """How a shell says the key inside double quotes, without showing it: from `file`, or else from the variable."""
    # The folder is spelled out: a client is usually started in another terminal, and in another place.
    return f"${VARIABLE}" if file is None else f"$(cat {shlex.quote(str(file.absolute()))})"


def _read(file: Path) -> str:
    try:
        if stat.S_IMODE(file.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
            raise BadInputError(f"others may write the key file {file}", f"chmod 600 {shlex.quote(str(file))}")
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(
            f"the key file {file} does not exist", "write the key into it: openssl rand -hex 24 > FILE"
        ) from None
    except UnicodeDecodeError:
        raise BadInputError(f"the key file {file} is not text", "write the key into it as one line") from None
    except OSError as error:
        raise UnsuitableError(
            f"the key file {file} cannot be read: {error.strerror}", "name a file that you may read"
        ) from None
    # An editor ends the line; the line's end is not part of the key.
    return text.removesuffix("\n").removesuffix("\r")


def _checked(key: str, where: str) -> str:
    if not key.strip():
        raise BadInputError(
            f"{where} is empty, which would leave the server open",
            "put a key in it, or leave it out to serve without one",
        )
    # The key itself is not repeated: messages end up in logs.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise BadInputError(
            f"the key in {where} has a space or a character that a header cannot carry",
            "use letters, digits and - _ . ~ only",
        )
    return key
