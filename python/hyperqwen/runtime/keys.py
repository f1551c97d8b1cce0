"""The API key that a server asks for: from a file, the environment or a credential, never from the command line."""

from __future__ import annotations

import functools
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from hyperqwen.errors import BadInputError, MissingError, UnsuitableError

VARIABLE = "HYPERQWEN_API_KEY"
CREDENTIAL = "api-key"
"""Name of the key among the credentials of a systemd service (LoadCredential=)."""
LONGEST_KEY = 1024
"""Characters. It travels in the environment and in every request's header, and both have their limits."""

SERVICE_KEY = "/etc/hyperqwen/api-key"
"""Where a host keeps the key of its services, for root alone."""


def resolve_key(file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The key in HYPERQWEN_API_KEY, else the service's credential, else the key in `file`; None where there is none.

    A `file` that gives way to a credential is named on stderr, once. A host file names one for all servers of the host,
    and the sandbox of a service would hide it: the credential was made for this very service.

    Raises MissingError or UnsuitableError for a file that cannot be read; BadInputError where both are given, for a
    file that others may read or write, and for a key that is empty (which a server would take for none) or that no
    HTTP header can carry.
    """
    if file is not None and VARIABLE in environ:
        # Whichever won, a client that was told of the other one would be turned away without an explanation.
        raise BadInputError(
            f"two keys are given: {VARIABLE} and the key file {file}",
            f"keep one: unset {VARIABLE}, or give no key file",
        )
    if VARIABLE in environ:
        return _checked(environ[VARIABLE], VARIABLE)
    credential = credential_file(environ)
    if credential is not None:
        if file is not None:
            _say_once(f"the key is the service's credential {credential}; the key file {file} is not read")
        # The service manager guards it: only this service's user gets at the folder, whatever the file's mode says.
        return _checked(_text(credential), f"the credential {credential}")
    return None if file is None else _checked(_read(file), f"the key file {file}")


def credential_file(environ: Mapping[str, str]) -> Path | None:
    """The key that systemd hands to its service; None where it hands none."""
    folder = environ.get("CREDENTIALS_DIRECTORY", "")
    file = Path(folder) / CREDENTIAL
    return file if folder and file.is_file() else None


@functools.cache
def _say_once(text: str) -> None:
    """A start asks for the key more than once: to check it, and to hand it on."""
    print(f"hyperqwen: {text}", file=sys.stderr)


def shell_key(file: Path | None, credential: Path | None = None) -> str:
    """How a shell says the key inside double quotes, without showing it: from `file`, or else from the variable.

    A service's `credential` is there for the service alone; what it was made of is root's.
    """
    if credential is not None:
        return f"$(sudo cat {SERVICE_KEY})"
    # The folder is spelled out: a client is usually started in another terminal, and in another place.
    return f"${VARIABLE}" if file is None else f"$(cat {shlex.quote(str(file.absolute()))})"


def _read(file: Path) -> str:
    try:
        found = file.stat()
    except FileNotFoundError:
        return _text(file)
    except OSError as error:
        raise _unreadable(file, error) from None
    # A pipe would be waited for, and a device is none to change the mode of.
    if not stat.S_ISREG(found.st_mode):
        raise BadInputError(f"the key file {file} is no file: a folder, a pipe or a device", "name a file with the key")
    mode = stat.S_IMODE(found.st_mode)
    for bits, verb in ((stat.S_IWGRP | stat.S_IWOTH, "write"), (stat.S_IRGRP | stat.S_IROTH, "read")):
        if mode & bits:
            raise BadInputError(
                f"others may {verb} the key file {file} (mode {mode:04o})", f"chmod 600 {shlex.quote(str(file))}"
            )
    return _text(file)


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(f"the key file {file} does not exist", "make one: hyperqwen keygen FILE") from None
    except UnicodeDecodeError:
        raise BadInputError(f"the key file {file} is not text", "write the key into it as one line") from None
    except OSError as error:
        raise _unreadable(file, error) from None
    # An editor ends the line; the line's end is not part of the key.
    return text.removesuffix("\n").removesuffix("\r")


def _unreadable(file: Path, error: OSError) -> UnsuitableError:
    return UnsuitableError(f"the key file {file} cannot be read: {error.strerror}", "name a file that you may read")


def _checked(key: str, where: str) -> str:
    if len(key) > LONGEST_KEY:
        raise BadInputError(
            f"the key in {where} has {len(key):,} characters", f"use at most {LONGEST_KEY}: hyperqwen keygen makes one"
        )
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
