"""The root command: what it does with errors that every command may raise."""

from __future__ import annotations

import errno
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner

from hyperqwen import cli, errors


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (errors.BadInputError("field x is 3", "use 4"), errors.USAGE, "field x is 3\n  fix: use 4"),
        (errors.VerificationError("bytes differ"), errors.UNVERIFIED, "bytes differ"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/some/file"),
            errors.UNSUITABLE,
            "/some/file: No space left",
        ),
        (KeyboardInterrupt(), errors.INTERRUPTED, ""),
    ],
)
def test_every_known_error_has_its_code_and_no_traceback(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def failing() -> NoReturn:
        raise raised

    monkeypatch.setattr(cli.Root, "get_command", lambda self, context, name: failing)
    result = CliRunner().invoke(cli.main, ["failing"])
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def failing() -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.Root, "get_command", lambda self, context, name: failing)
    assert isinstance(CliRunner().invoke(cli.main, ["failing"]).exception, ZeroDivisionError)


def test_every_command_is_there_and_says_what_it_does() -> None:
    for name in cli.COMMANDS:
        result = CliRunner().invoke(cli.main, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert "usage:" in result.output.lower()
    assert CliRunner().invoke(cli.main, ["pin"]).exit_code == errors.USAGE


def test_the_list_of_commands_is_whole_and_cuts_no_summary() -> None:
    said = CliRunner().invoke(cli.main, ["--help"]).stdout
    assert all(f"  {name} " in said and summary in said for name, summary in cli.COMMANDS.items())
    assert (
        all(word in said.split("Commands:")[0] for word in ("plan", "serve", "doctor"))
        and "..." not in said.split("Commands:")[1]
    )
