"""Writable folders of a run: caches that make the second start warm, and the log that a failure points at."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hyperqwen.errors import BadInputError, UnsuitableError


@dataclass
class Folders:
    """Where one run writes.

    cache: the engine's own cache folder.
    logs: folder of log files.
    note: why these are not the usual places, for the user; None when they are.
    """

    cache: Path
    logs: Path
    note: str | None = None
    _temporary: Path | None = None

    def discard(self) -> None:
        """Remove what was only made for this run."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def prepare(environ: Mapping[str, str], engine_id: str, wanted: Path | None = None) -> Folders:
    """Make the folders of a run of the engine `engine_id`.

    Without `wanted`, the XDG cache and state folders are used, and a temporary folder where those cannot be written:
    nothing of this run is then there for the next one. Raises UnsuitableError when `wanted`, or every place, cannot
    be written.
    """
    if wanted is not None:
        if wanted == Path():
            # What an empty text becomes; caches in whichever folder a shell happens to be in are meant by nobody.
            raise BadInputError("the cache folder's name is empty (or .)", f"write it in full: {wanted.absolute()}")
        # The engine runs in another folder than this program.
        wanted = wanted.absolute()
        problem = _unusable(wanted)
        if problem:
            raise UnsuitableError(
                f"the cache folder {wanted} cannot be used: {problem}", "name a folder that you may write"
            )
        return Folders(_made(wanted / engine_id), _made(wanted / "log"))
    cache, state = _xdg(environ, "XDG_CACHE_HOME", ".cache"), _xdg(environ, "XDG_STATE_HOME", ".local/state")
    problems = [
        f"{place or 'HOME is not set'}: {_unusable(place) or ''}" for place in (cache, state) if _unusable(place)
    ]
    if cache is not None and state is not None and not problems:
        return Folders(_made(cache / engine_id), _made(state))
    try:
        temporary = Path(tempfile.mkdtemp(prefix="hyperqwen-"))
    except OSError as error:
        raise UnsuitableError(
            f"no folder can be written, neither a cache ({problems[0]}) nor a temporary one ({error.strerror})",
            "set HOME or XDG_CACHE_HOME, or TMPDIR, to a folder that you may write and that has space",
        ) from None
    note = f"{problems[0]}; caches of this run are in {temporary} and go with it"
    return Folders(_made(temporary / engine_id), _made(temporary / "log"), note, temporary)


def logs_folder(environ: Mapping[str, str], wanted: Path | None = None) -> Path | None:
    """Where runs with the same variables have their logs and records, made or not.

    None where there is no usual place: such a run has them in a temporary folder.
    """
    return wanted.absolute() / "log" if wanted is not None else _xdg(environ, "XDG_STATE_HOME", ".local/state")


def cache_folder(environ: Mapping[str, str], engine_id: str, wanted: Path | None = None) -> Path:
    """Where a run with the same variables has its engine's caches, made or not."""
    usual = (wanted and wanted.absolute()) or _xdg(environ, "XDG_CACHE_HOME", ".cache") or Path(tempfile.gettempdir())
    return usual / engine_id


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    # The specification: a relative path in the variable is to be ignored.
    given = environ.get(variable, "")
    if given.startswith("/"):
        return Path(given) / "hyperqwen"
    home = environ.get("HOME", "")
    return Path(home) / below_home / "hyperqwen" if home.startswith("/") else None


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _unusable(path: Path | None) -> str | None:
    """Why nothing can be written in `path`, or None after something was."""
    if path is None:
        return "no place for it"
    try:
        _made(path)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"hyperqwen")
            probe.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None
