"""`hyperqwen report`: one file to attach to a bug report, with nothing secret in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from hyperqwen import __version__, share
from hyperqwen.cli.doctor import (
    Examination,
    cache_option,
    config_option,
    examine,
    hide_knobs,
    last_logs,
    models_option,
    profile_option,
)
from hyperqwen.cli.knobs import given_flags, knob_options
from hyperqwen.cli.profile import host_file_option
from hyperqwen.errors import BadInputError, HyperqwenError, UnsuitableError
from hyperqwen.files import TOML_LIMIT, read_regular
from hyperqwen.profiles.layers import HOST_FILE, HOST_FILES, find, shown
from hyperqwen.profiles.profile import knobs, read_table
from hyperqwen.runtime import bundle, measured, preflight
from hyperqwen.runtime.bundle import Scrubber

_SUFFIX = ".tar.gz"
_MOST_LOGS = 6
_ARGUMENTS = next(knob for knob in knobs() if knob.path == "engine.arguments")
# What is in the bundle, by name, for those who look before they send it.
_ABOUT = {
    "README.txt": "this list",
    "doctor.json": "what `hyperqwen doctor --json` says",
    "driver.json": "driver, cards, and where the driver was looked for",
    "environment.json": "variables that our programs read; of secret ones their length",
    "host.toml": "the host file; of a key file its path, never what is in it",
    "measured.json": "memory that the engine logged, beside the plan",
    "plan.json": "what `hyperqwen plan --json` says, for this machine's card",
    "profile.json": "every knob with its value, and where that comes from",
    "versions.json": "versions of everything, and hashes of the patches",
}


@click.command(context_settings={"show_default": True})
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.tar.gz",
    help="File to write; it must not be there yet.  [default: hyperqwen-report-TIME.tar.gz here]",
)
@click.option("--lines", type=click.IntRange(0, 100_000), default=2000, help="How many of each log's last lines.")
@profile_option
@host_file_option
@models_option
@cache_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the path and the names of what is inside.")
@config_option
@knob_options
@click.pass_context
def command(
    context: click.Context,
    out: Path | None,
    lines: int,
    profile: str,
    host_file: Path | None,
    models: Path | None,
    cache_dir: Path | None,
    as_json: bool,
    config: Path | None,
) -> None:
    """Write a bundle for a bug report: doctor, plan, versions, driver, cards, variables, and the ends of logs.

    No secret is in it: keys are taken out wherever they stand, as are tokens, prompts, your name, this machine's name
    and the path of your home folder. The file is readable by you alone: look into it before you send it.

    Every knob of the profile is an option here as well, as `serve` lists them.
    """
    file = out or Path(f"hyperqwen-report-{time.strftime('%Y%m%d-%H%M%S')}{_SUFFIX}")
    if not file.name.endswith(_SUFFIX) or file.name == _SUFFIX:
        raise BadInputError(f"--out {file} is no name of a bundle", f"end it with {_SUFFIX}")
    if file.exists():
        raise BadInputError(f"{file} is there already", f"name another file: --out FILE{_SUFFIX}")
    if not file.absolute().parent.is_dir():
        raise UnsuitableError(f"{file.absolute().parent} is no folder", "make it, or name another: --out")
    found = examine(
        profile,
        host_file=host_file,
        models=models,
        cache_dir=cache_dir,
        config=config,
        flags=given_flags(context),
        environ=os.environ,
    )
    settings = _host_file(host_file, os.environ)
    scrubber = bundle.scrubber(
        os.environ,
        _key_files(found, settings),
        arguments=_arguments(found, profile, settings, given_flags(context), os.environ),
    )
    members = collect(found, scrubber, settings, lines, os.environ)
    bundle.write(file, members, scrubber)
    if as_json:
        click.echo(json.dumps({"path": str(file.absolute()), "files": sorted(members)}))
        return
    click.echo(str(file.absolute()))
    for name in sorted(members):
        click.echo(f"  {name}: {_ABOUT.get(name, 'the end of a log')}, {len(members[name]):,} bytes", err=True)


hide_knobs(command)


def collect(
    found: Examination, scrubber: Scrubber, host_file: Path | None, lines: int, environ: Mapping[str, str]
) -> dict[str, bytes]:
    """Everything of a bundle by its name in there, without secrets."""
    data: dict[str, Any] = {
        "doctor.json": found.report(),
        "driver.json": found.seen.report(),
        "environment.json": bundle.variables(environ),
        "versions.json": versions(found),
    }
    if found.plan is not None:
        data["plan.json"] = found.plan.report()
    if found.effective is not None:
        data["profile.json"] = _profile(found)
    logs, figures = _logs(found, lines)
    if figures:
        data["measured.json"] = figures
    members = {name: bundle.as_json(value, scrubber) for name, value in data.items()}
    # A service keeps no log file: what its engine says is the journal's.
    if said := bundle.journal(lines, environ):
        logs["journal.log"] = said
    members |= {f"logs/{name}": scrubber.log(text).encode() for name, text in logs.items()}
    if host_file is not None:
        try:
            text = read_regular(host_file, TOML_LIMIT).decode("utf-8", errors="replace")
            members["host.toml"] = scrubber.text(text).encode()
        except BadInputError as error:
            members["host.toml"] = scrubber.text(f"# {error.message}\n").encode()
        except OSError as error:
            members["host.toml"] = scrubber.text(f"# {host_file} cannot be read: {error.strerror}\n").encode()
    about = [f"A report of hyperqwen {__version__}. {bundle.MARK} stands where something secret was.", ""]
    about += [f"{name}: {_ABOUT.get(name, 'the end of a log')}" for name in sorted({"README.txt", *members})]
    members["README.txt"] = scrubber.text("\n".join([*about, ""])).encode()
    return members


def versions(found: Examination) -> dict[str, Any]:
    """Of the program, its Python and its packages; the engine; and the patches by their SHA-256."""
    try:
        patches: Any = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(share.folder("patches").iterdir())
            if path.is_file() and (path.suffix == ".patch" or path.name == "series")
        }
    except (HyperqwenError, OSError) as error:
        patches = {"error": str(error)}
    parts = found.parts
    return {
        "hyperqwen": __version__,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "libc": " ".join(platform.libc_ver()),
        "kernel": platform.release(),
        "packages": {
            item.name: item.version for item in sorted(metadata.distributions(), key=lambda item: item.name.lower())
        },
        "engine": None
        if parts is None
        else {"id": parts.engine_id, "for": parts.engine, "python": str(parts.engine_python)},
        "patches": patches,
    }


def _profile(found: Examination) -> dict[str, Any]:
    effective = found.effective
    if effective is None:
        return {}
    return {
        "name": effective.profile.name,
        "knobs": {
            knob.path: {
                "value": shown(knob, effective.profile.get(knob.path)),
                "source": str(effective.sources[knob.path]),
            }
            for knob in knobs()
        },
    }


def _logs(found: Examination, lines: int) -> tuple[dict[str, str], dict[str, Any]]:
    """The ends of the newest logs, each with what was put aside before it; and what they say of memory."""
    if found.logs is None:
        return {}, {}
    current = [record.log for record in found.servers if record.log is not None]
    files = list(dict.fromkeys([*current, *last_logs(found.logs)]))[:_MOST_LOGS]
    texts: dict[str, str] = {}
    figures: dict[str, Any] = {}
    for log in files:
        for file in (log, log.with_name(f"{log.name}.1")):
            try:
                texts[file.name] = bundle.tail(file, lines)
            except FileNotFoundError:
                continue
            except OSError as error:
                texts[file.name] = f"{file} cannot be read: {error.strerror}\n"
        figures |= _measured(found, log)
    return texts, figures


def _measured(found: Examination, log: Path) -> dict[str, Any]:
    try:
        # All of it: what a start came to stands at the beginning of a log, long before its end.
        seen = measured.read(log)
    except HyperqwenError:
        return {}
    if seen.empty:
        return {}
    said: dict[str, Any] = {"measured": seen.report()}
    plan = found.plan
    served = next((record.profile for record in found.servers if record.log == log), None)
    if plan is not None and plan.budget is not None and plan.profile.name == served:
        said["beside_the_plan"] = [row.report() for row in measured.side_by_side(plan.budget, seen)]
    return {log.name: said}


def _host_file(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The host file that counts, or would if it were right."""
    if given is not None:
        return given
    if environ.get(HOST_FILE):
        return Path(environ[HOST_FILE])
    return next((path for path in map(Path, HOST_FILES) if path.exists()), None)


def _key_files(found: Examination, host_file: Path | None) -> list[Path]:
    """Key files that the profile or the host file name, the latter also when it is not right otherwise."""
    files = []
    if found.effective is not None:
        named = preflight.key_file(found.effective.profile)
        files += [named] if named is not None else []
    if host_file is not None:
        files += bundle.named_key_files(host_file)
    return files


def _arguments(
    found: Examination, profile: str, host_file: Path | None, flags: Mapping[str, str], environ: Mapping[str, str]
) -> list[list[str]]:
    """The engine's arguments of every layer: also of one that another shadows, or that is not right."""
    lists = [] if found.effective is None else [list(found.effective.profile.engine.arguments)]
    for text in (flags.get(_ARGUMENTS.path), environ.get(_ARGUMENTS.variable)):
        if text is not None:
            lists.append(text.split())
            with contextlib.suppress(ValueError):
                lists.append(shlex.split(text))
    files = [] if host_file is None else [host_file]
    with contextlib.suppress(HyperqwenError):
        files.append(find(profile))
    for file in files:
        lists.append(bundle.quoted_words(file))
        with contextlib.suppress(HyperqwenError, OSError):
            engine = read_table(file, "file", HOST_FILES[0]).get("engine")
            words = engine.get("arguments") if isinstance(engine, dict) else None
            lists.append([str(word) for word in words] if isinstance(words, list) else str(words or "").split())
    return lists
