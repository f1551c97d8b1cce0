"""The `hyperqwen` command: one module of this package per command, imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click

from hyperqwen import __version__
from hyperqwen.errors import INTERRUPTED, HyperqwenError, UnsuitableError

# Each is a module of this package that exports itself as `command`. The summaries stand here so that the list of
# commands imports none of them, and so that none is cut in the middle.
COMMANDS = {
    "demo": "Serve nano, the small model that ships, on this processor.",
    "docs": "Write or check the generated parts of the docs.",
    "doctor": "Say what is wrong on this machine, and how to mend it.",
    "down": "Stop a server, after its running requests.",
    "fetch": "Bring the pinned files that the Nix store lacks.",
    "health": "Exit 0 if a server generates tokens.",
    "keygen": "Write a new API key into a file.",
    "logs": "Print the end of a server's log.",
    "nano": "Write, check and talk to the small model.",
    "oci": "Write container images, and the files that start them.",
    "patches": "List, check, apply and write the changes to vLLM.",
    "pins": "Check and update the pinned bytes that all is built from.",
    "plan": "Say what a profile takes of a card, and whether it fits.",
    "profile": "List the profiles, and show one as it is on this host.",
    "report": "Write a bundle for a bug report, without secrets.",
    "serve": "Serve a profile (OpenAI API).",
}


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

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
    """Serve Qwen 3.8 27B on your own card: plan a profile, serve it, and let doctor say what is in the way.

    Begin with doctor and plan; serve starts a profile, and demo a small model that needs no card. The others look after
    running servers, deliver them (oci), and bring, check and patch the pinned bytes that all is built from.

    Exit codes: 0 ok, 1 failure, 2 bad input, 3 environment unsuitable, 4 not found, 5 verification failed,
    130 interrupted.
    """
