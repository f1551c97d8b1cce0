"""`hyperqwen fetch`: the bare module's command under the full command line, the same in every option and exit code."""

from __future__ import annotations

import click

from hyperqwen.pins import fetch


class _Passed(click.Command):
    """A command whose options, help included, are those of the bare parser."""

    def get_help(self, ctx: click.Context) -> str:
        return fetch.build_parser(ctx.command_path).format_help()


@click.command(
    name="fetch",
    cls=_Passed,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
    short_help="Bring the pinned files that the Nix store lacks.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Bring the pinned files that the Nix store lacks; verified by size and sha256, resumable."""
    ctx.exit(fetch.main(arguments))
