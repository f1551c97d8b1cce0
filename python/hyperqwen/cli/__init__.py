"""The `hyperqwen` command: one module of this package per command, imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click

from hyperqwen import __version__
from hyperqwen.errors import INTERRUPTED, HyperqwenError, UnsuitableError

# Each is a module of this package that exports itself as `command`.
COMMANDS = (
    "demo",
    "docs",
    "doctor",
    "down",
    "fetch",
    "health",
    "keygen",
    "logs",
    "nano",
    "oci",
    "patches",
    "pins",
    "plan",
    "profile",
    "report",
    "serve",
)


class KnownError(click.ClickException):
    """A `HyperqwenError` as click reports it: one message on stderr and the error's own exit code."""

    def __init__(self, error: HyperqwenError) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.error.exit_code

    def show(self, file: Any = None) -> None:
        click.echo(f"hyperqwen: {self.message}", file=file, err=file is None)


class Root(click.Group):
    """A group whose commands are imported on first use, so that `--help` of one does not load the rest."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HyperqwenError as error:
            raise KnownError(error) from error
        except BrokenPipeError:
            # The reader has gone, as `| head` does; click ends quietly.
            raise
        except OSError as error:
            named = f"{error.filename}: " if error.filename else ""
            raise KnownError(UnsuitableError(f"{named}{error.strerror or error}")) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hyperqwen")
def main() -> None:
    """From pinned bytes to a served answer: pins, patches, nano, and the demo that serves it.

    Exit codes: 0 ok, 1 failure, 2 bad input, 3 environment unsuitable, 4 not found, 5 verification failed,
    130 interrupted.
    """
