"""`hyperqwen pins`: update the pin files from groups.toml, and check them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hyperqwen.errors import OK, UNVERIFIED
from hyperqwen.pins.check import check_folder
from hyperqwen.pins.model import GROUPS, pins_dir
from hyperqwen.pins.progress import human
from hyperqwen.pins.update import update as update_pins

_folder = click.option(
    "--pins",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder nix/pins that is meant; else that of the checkout.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout.")


@click.group(name="pins")
def command() -> None:
    """Which bytes everything is built from: nix/pins/{groups.toml,wheels.json,debs.json,requires.json}."""


@command.command()
@click.option(
    "--group",
    "groups",
    multiple=True,
    type=click.Choice(sorted(GROUPS)),
    help="Only this group (repeatable); others stay.",
)
@click.option("--upgrade", is_flag=True, help="Take the newest versions that the inputs allow, not the pinned ones.")
@click.option("--dry-run", is_flag=True, help="Print what would change, write nothing.")
@click.option("--index", metavar="URL", help="Python package index in place of pip's.")
@click.option("--mirror", metavar="URL", help="Debian mirror in place of apt's.")
@_folder
@_as_json
def update(
    groups: tuple[str, ...],
    upgrade: bool,
    dry_run: bool,
    index: str | None,
    mirror: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Resolve groups.toml anew and write the pin files; prints what changed.

    Wheels are resolved with uv for the pinned runtime, .debs are those of the suite's signed index. Nothing is written
    unless the result passes `pins check`.
    """

    def say(text: str) -> None:
        click.echo(text, err=True)

    result = update_pins(pins_dir(folder), groups=groups, upgrade=upgrade, index=index, mirror=mirror, say=say)
    written = [] if dry_run else result.write()
    if as_json:
        changes = [asdict(change) for change in result.changes]
        click.echo(json.dumps({"changes": changes, "written": [path.name for path in written]}, indent=1))
    else:
        for change in result.changes:
            click.echo(change.line())
    old = sum(change.old_size for change in result.changes)
    new = sum(change.new_size for change in result.changes)
    total = sum(pin.size for pin in result.pins.all)
    say(
        f"{len(result.changes)} pins change ({human(old)} → {human(new)}); now {len(result.pins.all)} of {human(total)}"
        if result.changes
        else f"no pin changes; {len(result.pins.all)} of {human(total)}"
    )
    if written:
        say(f"written: {', '.join(path.name for path in written)}")


@command.command()
@_folder
@_as_json
@click.pass_context
def check(ctx: click.Context, folder: Path | None, as_json: bool) -> None:
    """Check the pin files without network or store; exit 5 if anything does not hold.

    Checked are their form, that every group is exactly what its declared inputs need, that every requirement is
    satisfied on the pinned Python and glibc, and that all CUDA wheels are of one major and one toolkit.
    """
    report = check_folder(pins_dir(folder))
    if as_json:
        groups = {name: {"pins": count, "bytes": size} for name, (count, size) in report.groups.items()}
        click.echo(json.dumps({"problems": report.problems, "groups": groups}, indent=1))
    else:
        for problem in report.problems:
            click.echo(problem)
    if report.problems:
        click.echo(f"{len(report.problems)} problems", err=True)
    elif not as_json:
        for name, (count, size) in report.groups.items():
            click.echo(f"{name:<11} {count:>4} pins  {human(size):>8}  {GROUPS[name]}")
    ctx.exit(UNVERIFIED if report.problems else OK)
