"""`hyperqwen keygen`: write a new API key into a file that only its owner reads, and show nobody."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import tempfile
from pathlib import Path

import click

from hyperqwen.errors import BadInputError, UnsuitableError

KEY_BYTES = 32
"""Of randomness: 256 bits, in 43 characters that every header and shell takes."""


def default_file() -> Path:
    """hyperqwen/api-key among the user's configuration; raises UnsuitableError where that is nowhere."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    home = os.environ.get("HOME", "")
    if config.startswith("/"):
        return Path(config) / "hyperqwen" / "api-key"
    if home.startswith("/"):
        return Path(home) / ".config" / "hyperqwen" / "api-key"
    raise UnsuitableError("neither XDG_CONFIG_HOME nor HOME says where configuration goes", "name a file: keygen FILE")


def write_key(file: Path, replace: bool) -> None:
    """A new key in `file`, mode 0600 from its first byte on; an existing file is kept unless `replace`.

    Raises BadInputError for a file that exists, UnsuitableError for a folder that cannot be written.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="ascii") as out:
                out.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
                out.flush()
                os.fsync(out.fileno())
            if replace:
                os.replace(name, file)
            else:
                # A link, not a rename: it fails where another keygen was faster, and no key is lost.
                os.link(name, file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        if not file.parent.is_dir():
            raise UnsuitableError(f"{file.parent} is no folder", "name a file that you may write") from None
        raise BadInputError(
            f"the key file {file} exists, and its key would be lost", "use it, name another file, or give --replace"
        ) from None
    except OSError as error:
        raise UnsuitableError(f"{error.filename or file}: {error.strerror}", "name a file that you may write") from None


@click.command()
@click.argument("file", type=click.Path(), required=False)
@click.option(
    "--replace", is_flag=True, help="Replace the key of an existing file: clients with the old one are refused."
)
def command(file: str | None, replace: bool) -> None:
    """Write a new key into FILE (else hyperqwen/api-key among your configuration), readable by you alone.

    The key is never printed. Give the file to the server (--api-key-file, or api_key_file in a host file).
    """
    if file == "":
        raise BadInputError("the name of the key file is empty", "name a file: keygen FILE")
    target = default_file() if file is None else Path(file)
    if target.is_dir():
        raise BadInputError(f"{target} is a folder", f"name a file: keygen {shlex.quote(str(target / 'api-key'))}")
    write_key(target, replace)
    click.echo(str(target.absolute()))
