"""`hyperqwen docs`: keep the generated parts of the docs true."""

from __future__ import annotations

from pathlib import Path

import click

from hyperqwen import docs
from hyperqwen.cli.patches import repository
from hyperqwen.errors import FAILURE, UnsuitableError

_repository = click.option(
    "--repo",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="The checkout whose docs are meant; else the one around the working directory.",
)


@click.group(name="docs")
def command() -> None:
    """Write or check the generated parts of the docs.

    They stand between '<!-- generated: NAME -->' and '<!-- end generated -->' in README.md and docs/. What the NixOS
    module reads of the schema is generated as well.
    """


@command.command()
@_repository
def write(repo: Path | None) -> None:
    """Bring the generated parts up to date and print the files that changed."""
    root = repository(repo)
    try:
        changed = docs.write(root)
    except OSError as error:
        raise UnsuitableError(f"{error.filename or root}: {error.strerror or error}") from error
    for page in changed:
        click.echo(page.relative_to(root).as_posix())


@command.command()
@_repository
def check(repo: Path | None) -> None:
    """Print how the generated parts differ from what they should be; exit 1 if they do."""
    root = repository(repo)
    found = docs.stale(root)
    for text in docs.diffs(root, found):
        click.echo(text, nl=False)
    if found:
        click.echo(f"{len(found)} files have drifted: run 'hyperqwen docs write' and commit them", err=True)
        click.get_current_context().exit(FAILURE)
