"""`hyperqwen patches`: list, check, apply and write the changes to vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from hyperqwen.errors import BadInputError, HyperqwenError, UnsuitableError, VerificationError
from hyperqwen.patches.apply import PatchProblems, Problem, UnsafePath
from hyperqwen.patches.check import check_series
from hyperqwen.patches.files import copy_patched, find_tree, tree_reader
from hyperqwen.patches.make import Written, new_patch, refresh_patch
from hyperqwen.patches.series import KINDS, apply_folder, find_repository, load, read_series

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

_repository = click.option(
    "--repo",
    type=_FOLDER,
    metavar="DIR",
    help="The checkout whose patches/ is meant; else the one around the working directory.",
)
_tree = click.option(
    "--tree",
    type=_FOLDER,
    required=True,
    metavar="DIR",
    help="The unpacked vLLM without patches, as './hq build .#vllm-source' leaves it at ./result.",
)


def repository(given: Path | None) -> Path:
    """The checkout to work on: `given`, or the one that the working directory is in.

    Raises:
        BadInputError: if there is no `patches/series` there.
    """
    found = find_repository(Path.cwd()) if given is None else given
    if found is None or not (found / "patches" / "series").is_file():
        where = "this directory and those above it" if given is None else str(given)
        raise BadInputError(f"no patches/series in {where}", "run inside the checkout, or name it with --repo DIR")
    return found


def _source(folder: Path) -> Path:
    """The tree in `folder`.

    Raises:
        BadInputError: if there is none, or its files are links: a built engine, which has the series applied already.
    """
    root = find_tree(folder)
    if (root / "vllm").is_symlink() or (root / "vllm" / "__init__.py").is_symlink():
        raise BadInputError(
            f"{folder} is no vLLM to patch: its files are links, as in a built engine",
            "use ./hq build .#vllm-source -o vllm-source",
        )
    return root


def _refuse(problems: Sequence[Problem], kind: type[HyperqwenError]) -> HyperqwenError:
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)}"
    return kind("\n".join([f"{count} with the patches:", *(f"  {problem}" for problem in problems)]))


@contextmanager
def _refusals(kind: type[HyperqwenError]) -> Iterator[None]:
    """Turn what the patches module raises into the one error that a command ends with."""
    try:
        yield
    except PatchProblems as error:
        raise _refuse(error.problems, kind) from None
    except UnsafePath as error:
        raise BadInputError(str(error), "replace the link by what it points to") from None
    except OSError as error:
        raise UnsuitableError(f"{error.filename or 'the disk'}: {error.strerror or error}") from error


def _json(problems: Sequence[Problem]) -> list[dict[str, object]]:
    fields = ("patch", "line", "file", "hunk", "file_line", "what", "expected", "found", "hint")
    return [{field: getattr(problem, field) for field in fields} for problem in problems]


@click.group(name="patches")
def command() -> None:
    """List, check, apply and write the changes to vLLM.

    A patch applies exactly: at the lines that it names, to the bytes that it shows. docs/adding-a-patch.md
    walks through making one.
    """


@command.command("list")
@_repository
@click.option("--json", "as_json", is_flag=True, help="Print all header fields, as JSON.")
def list_(repo: Path | None, as_json: bool) -> None:
    """Print the series in its order: name, kind, subject."""
    with _refusals(BadInputError):
        entries = load(repository(repo) / "patches")
    headers = [(entry, entry.header) for entry in entries if entry.header is not None]
    if as_json:
        rows = [
            {
                "name": entry.name,
                "subject": header.subject,
                "kind": header.kind,
                "reason": header.reason,
                "upstream": header.upstream,
                "retires": header.retires,
                "seams": list(map(str, header.seams)),
                "tests": list(map(str, header.tests)),
                "provides": list(header.provides),
                "files": [file.path for file in entry.patch.files],
            }
            for entry, header in headers
        ]
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    names = max((len(entry.name) for entry, _ in headers), default=0)
    kinds = max((len(header.kind) for _, header in headers), default=0)
    for entry, header in headers:
        click.echo(f"{entry.name:{names}}  {header.kind:{kinds}}  {header.subject}")


@command.command()
@_tree
@_repository
@click.option("--json", "as_json", is_flag=True, help="Print the problems as JSON.")
def check(tree: Path, repo: Path | None, as_json: bool) -> None:
    """Check the series against a vLLM tree and this checkout.

    Every patch applies at its own lines and leaves files that compile; the series taken back gives the same
    bytes; each seam is defined in hyperqwen.engine and used; each test exists; each capability is one that
    profiles know. All problems are printed, and the exit code is then 5.
    """
    root = repository(repo)
    with _refusals(VerificationError):
        series = read_series(root / "patches")
        problems = check_series(series, tree_reader(_source(tree)), root)
    if as_json:
        result = {"patches": len(series.entries), "problems": _json(problems)}
        click.echo(json.dumps(result, indent=2, ensure_ascii=False))
    if problems:
        raise _refuse(problems, VerificationError)
    if not as_json:
        click.echo(f"{len(series.entries)} of {len(series.entries)} patches apply exactly, go back and compile")
        click.echo("every seam, test and capability that they name exists")


@command.command()
@_tree
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Where the patched copy goes: a folder that does not exist, or an empty one.",
)
@_repository
def apply(tree: Path, out: Path, repo: Path | None) -> None:
    """Write a copy of a vLLM tree with the series applied.

    The copy is writable and appears whole or not at all; the tree stays as it is.
    """
    root = _source(tree)
    target = out.absolute()
    if target.resolve().is_relative_to(root.resolve()):
        raise BadInputError(f"--out {out} lies inside the tree {root}", "name a folder outside it")
    with _refusals(VerificationError):
        changes = apply_folder(repository(repo) / "patches", tree_reader(root))
        copy_patched(root, changes, target)
    for path in sorted(changes):
        click.echo(f"{'removed' if changes[path] is None else 'changed'} {path}")


@command.command()
@click.argument("name")
@_tree
@click.option("--edited", type=_FOLDER, required=True, metavar="DIR", help="A copy of the tree with your edits in it.")
@click.option("--subject", required=True, help="What the patch does, in one line.")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What sort of change it is.")
@click.option("--reason", required=True, help="Why vLLM needs it.")
@click.option("--upstream", default="none known", show_default=True, help="The issue or change in vLLM.")
@click.option("--retires", required=True, metavar="WHEN", help="When it can go, as in 'when upstream reads /sys'.")
@click.option(
    "--seam",
    "seams",
    multiple=True,
    metavar="MODULE:FUNCTION",
    help="The hyperqwen.engine function that it calls; may be given more than once.",
)
@click.option(
    "--test",
    "tests",
    multiple=True,
    required=True,
    metavar="FILE[::TEST]",
    help="The test that fails without it, below python/tests or checks; may be given more than once.",
)
@click.option(
    "--provides",
    multiple=True,
    metavar="CAPABILITY",
    help="What profiles can ask of an engine with it, as in kv-group-size; may be given more than once.",
)
@_repository
def new(
    name: str,
    tree: Path,
    edited: Path,
    subject: str,
    kind: str,
    reason: str,
    upstream: str,
    retires: str,
    seams: tuple[str, ...],
    tests: tuple[str, ...],
    provides: tuple[str, ...],
    repo: Path | None,
) -> None:
    """Write a patch from an edited copy of vLLM and add it to the series.

    NAME is a few words with hyphens; the next number is put before it. The copy may be one of the tree as it
    is, or one that 'hyperqwen patches apply' made. Nothing is written unless the whole series applies with
    the new patch at its end.
    """
    fields = {
        "Subject": subject,
        "Kind": kind,
        "Reason": reason,
        "Upstream": upstream,
        "Retires": retires if retires.startswith("when ") else f"when {retires}",
        "Seam": ", ".join(seams) or "none",
        "Test": ", ".join(tests),
    }
    if provides:
        fields["Provides"] = ", ".join(provides)
    with _refusals(BadInputError):
        series = read_series(repository(repo) / "patches")
        _report(new_patch(series, name, _source(tree), _source(edited), fields))


@command.command()
@click.argument("name")
@_tree
@click.option(
    "--edited",
    type=_FOLDER,
    metavar="DIR",
    help="Take the diff from this edited copy instead of moving the hunks.",
)
@_repository
def refresh(name: str, tree: Path, edited: Path | None, repo: Path | None) -> None:
    """Rewrite patch NAME of the series for another vLLM tree.

    Each hunk moves to the one place where its context stands now, and every move is printed; a hunk whose
    context is nowhere, or in several places, is left to you: edit a copy and give it with --edited. A patch in
    which nothing moves stays as it is, to the byte. Refresh patches in the order of the series.
    """
    with _refusals(BadInputError):
        series = read_series(repository(repo) / "patches")
        source = None if edited is None else _source(edited)
        _report(refresh_patch(series, name, _source(tree), source))


def _report(written: Written) -> None:
    """The patch's path on stdout, for scripts; what is in it on stderr."""
    click.echo(written.path)
    if not written.changed:
        click.echo(f"  nothing moved: {written.path.name} stays as it is", err=True)
        return
    for path in written.files:
        click.echo(f"  changes {path}", err=True)
    for move in written.moves:
        click.echo(f"  moved {move}", err=True)
