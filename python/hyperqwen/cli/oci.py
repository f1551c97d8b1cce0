"""`hyperqwen oci`: write a profile's container image, and the files that start it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperqwen.cli.knobs import given_flags, knob_options
from hyperqwen.cli.profile import host_file_option
from hyperqwen.delivery import image, rootfs
from hyperqwen.delivery.compose import compose_file
from hyperqwen.delivery.container import container
from hyperqwen.delivery.quadlet import quadlet_file
from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles import rules
from hyperqwen.profiles.layers import Effective, find, resolve
from hyperqwen.profiles.planner import MODELS, make_plan, models_folder
from hyperqwen.profiles.profile import load
from hyperqwen.runtime.problems import describe

if TYPE_CHECKING:
    from hyperqwen.delivery.container import Container

CONFIG = "HYPERQWEN_OCI_CONFIG"


class Images(BaseModel):
    """What Nix bakes into the program: the description of each image, by the name of its profile."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    images: Annotated[dict[str, Path], Field(min_length=1)]


def read_images(file: Path) -> Images:
    """The program's configuration; raises MissingError or BadInputError."""
    try:
        return Images.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise MissingError(f"the configuration {file} does not exist", "start it through `./hq run .#oci`") from None
    except ValidationError as error:
        raise BadInputError(describe(error, Images, str(file))) from None
    except ValueError as error:
        raise BadInputError(f"{file} is not JSON: {error}", "start it through `./hq run .#oci`") from None


@click.group()
def command() -> None:
    """Container images (OCI) and the files that start them."""


@command.command()
@click.argument("target")
@click.option("--profile", "name", required=True, help="Whose image: A to E, demo, or a title such as single.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of the digest.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar=CONFIG,
    # For the program that Nix builds, which sets it.
    hidden=True,
)
def write(target: str, name: str, as_json: bool, config: Path | None) -> None:
    """Write the image of a profile to TARGET, straight out of the Nix store, and print its digest.

    TARGET is a new or empty folder (OCI layout), a new file that ends in .tar (for docker load, podman load, skopeo),
    or - for that archive on stdout; the digest then goes to stderr.
    """
    profile = load(find(name))
    if config is None:
        raise MissingError(
            "this program does not say what the images are made of",
            f"write with `./hq run .#oci -- --profile {profile.name} {target}`",
        )
    _warn_of_refusals(resolve(profile.name, environ={}))
    images = read_images(config).images
    if profile.name not in images:
        raise BadInputError(
            f"this program has no image of profile {profile.name}, only of {', '.join(sorted(images))}",
            "use `./hq run .#oci`, which has all of them",
        )
    found = image.load(images[profile.name])
    started = time.monotonic()
    kind, make = _writer(found, target)
    with _shown(found, passes=1 if kind == "layout" else 2) as progress:
        digest = make(progress)
    seconds = time.monotonic() - started
    if as_json:
        facts = {"profile": profile.name, "reference": found.reference, "target": target, "format": kind}
        text = json.dumps({**facts, "digest": digest, "seconds": round(seconds, 1)})
    else:
        text = digest
    click.echo(text, err=target == "-")
    if sys.stderr.isatty() and target != "-":
        _say(f"{found.reference} in {seconds:.0f} s; {_next_step(kind, target, found)}")


def _writer(found: image.Image, target: str) -> tuple[str, Callable[[image.Progress], str]]:
    """What kind of image `target` asks for, and what writes it."""
    if target == "-":
        if sys.stdout.isatty():
            raise BadInputError(
                "the archive would go to this terminal", "pipe it: … - | podman load, or name a file or folder"
            )
        return "archive", lambda progress: image.stream_archive(found, sys.stdout.buffer, progress)
    path = Path(target)
    if path.suffix == ".tar":
        return "archive", lambda progress: image.write_archive(found, path, progress)
    if path.suffix in (".gz", ".tgz", ".xz", ".zst"):
        raise BadInputError(
            f"{target} asks for a compressed archive; its digests would depend on the compressor",
            f"write {path.with_suffix('').with_suffix('.tar')} and compress that",
        )
    return "layout", lambda progress: image.write_layout(found, path, progress)


def _next_step(kind: str, target: str, found: image.Image) -> str:
    if kind == "archive":
        return f"load it: docker load -i {target}, or podman load -i {target}"
    return f"push it: skopeo copy oci:{target}:{found.tag} docker://REGISTRY/hyperqwen:{found.tag}"


def _say(text: str) -> None:
    click.echo(f"hyperqwen: {text}", err=True)


@contextmanager
def _shown(found: image.Image, passes: int) -> Iterator[image.Progress]:
    """Progress on stderr: a bar on a terminal, one line for each layer elsewhere."""
    total = passes * sum(map(image.estimated_size, found.layers))
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description:8}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda layer, count: bar.update(task, advance=count, description=layer)
        return
    seen: list[str] = []

    def report(layer: str, _count: int) -> None:
        # An archive goes through the layers twice: the second time is the one that writes.
        if not seen or seen[-1] != layer:
            seen.append(layer)
            if len(seen) > (passes - 1) * len(found.layers):
                _say(f"writing layer {layer}")

    yield report


def _warn_of_refusals(effective: Effective, models: Path | None = None) -> None:
    """Say on stderr what this engine lacks for the profile: the file may be for another one.

    Raises BadInputError for what no engine runs, such as three cards or a key among the flags.
    """
    refusals = make_plan(effective, models=models_folder({}, models or Path(rootfs.MODELS))).refusals
    hard = tuple(notice for notice in refusals if not notice.rule.endswith("-capability"))
    refusal = rules.refusal(hard)
    if refusal is not None:
        raise refusal
    for notice in refusals:
        _say(f"this engine refuses profile {effective.profile.name}: {notice.message}\n  fix: {notice.fix}")


def _file_command(kind: str, render: Callable[[Container], str], what: str) -> None:
    @command.command(kind, help=what)
    @click.argument("name")
    @host_file_option
    @click.option(
        "--models",
        type=click.Path(path_type=Path),
        envvar=MODELS,
        show_envvar=True,
        help="Folder of the prepared models on the host, to be mounted; without it a volume holds them.",
    )
    @knob_options
    @click.pass_context
    def file(context: click.Context, name: str, host_file: Path | None, models: Path | None) -> None:
        environ = {variable: value for variable, value in os.environ.items() if variable != CONFIG}
        effective = resolve(name, host_file=host_file, environ=environ, flags=given_flags(context))
        _warn_of_refusals(effective, models)
        click.echo(render(container(effective, models)), nl=False)


def _help(what: str) -> str:
    return (
        f"Print {what} that runs the image of profile NAME.\n\nValues of the host file, of variables and of flags"
        " become the container's: the address and port that are published, the key, the devices, the mounts, and"
        " variables for the rest."
    )


_file_command("compose", compose_file, _help("a compose file"))
_file_command("quadlet", quadlet_file, _help("a podman quadlet (systemd)"))
