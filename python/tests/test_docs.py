"""Generated parts of the docs: made from the data, compared byte for byte, wrong markers refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hyperqwen import docs
from hyperqwen.cli import main
from hyperqwen.errors import BadInputError
from hyperqwen.patches.make import diff, header_text

HEADER = {
    "Subject": "count the processors",
    "Kind": "fix",
    "Reason": "lscpu | grep needs a shell",
    "Upstream": "none known",
    "Retires": "when upstream reads /sys",
    "Seam": "none",
    "Test": "checks/test_x.py",
    "Provides": "kvarn",
}
PINS = {
    "wheels": [
        {"name": "torch", "size": 3 * 2**20, "groups": ["serve-cpu", "serve-cuda"]},
        {"name": "ruff", "size": 2**20, "groups": ["tools"]},
    ],
    "debs": [{"name": "libc6", "size": 1000, "groups": ["libc"]}],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/0001-count.patch").write_bytes(
        header_text(HEADER).encode() + diff({"vllm/a.py": (b"x\n", b"y\n"), "vllm/b.py": (None, b"y\n")})
    )
    (tmp_path / "patches/series").write_text("0001-count.patch\n")
    (tmp_path / "nix/pins").mkdir(parents=True)
    for kind, pins in PINS.items():
        (tmp_path / f"nix/pins/{kind}.json").write_text(json.dumps({"schema": 1, kind: pins}))
    (tmp_path / "docs").mkdir()
    return tmp_path


def page(root: Path, *lines: str, name: str = "docs/x.md") -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join(lines) + "\n")
    return root / name


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["docs", *arguments, "--repo", str(root)])


BEGIN, END = "<!-- generated: patch-table -->", "<!-- end generated -->"
TABLE = [
    "| Patch | Kind | What it does | Why | Hands over to | Provides | Upstream | Retires when |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
    "| [0001](../patches/0001-count.patch) | fix | count the processors | lscpu \\| grep needs a shell "
    "| none | `kvarn` | none known | upstream reads /sys |",
]


def test_write_fills_the_part_and_leaves_the_rest(root: Path) -> None:
    path = page(root, "# Patches", "", BEGIN, "stale", END, "after")
    result = run(root, "write")
    assert (result.exit_code, result.stdout) == (0, "docs/x.md\n"), result.output
    assert path.read_text().split("\n") == ["# Patches", "", BEGIN, *TABLE, END, "after", ""]
    result = run(root, "write")
    assert (result.exit_code, result.stdout) == (0, "")


def test_capabilities_name_their_patches(root: Path) -> None:
    path = page(root, BEGIN.replace("patch-table", "capability-table"), END)
    assert run(root, "write").exit_code == 0
    rows = path.read_text().splitlines()
    (row,) = [row for row in rows if row.startswith("| `kvarn` |")]
    assert row.endswith("| [0001](../patches/0001-count.patch) |")
    (row,) = [row for row in rows if row.startswith("| `chains` |")]
    assert row.endswith("| none yet |")


def test_check_prints_the_drift_and_exits_1(root: Path) -> None:
    path = page(root, BEGIN, END)
    result = run(root, "check")
    assert result.exit_code == 1
    assert "--- docs/x.md (committed)\n+++ docs/x.md (generated)\n" in result.stdout
    assert f"+{TABLE[2]}\n" in result.stdout
    assert "1 files have drifted: run 'hyperqwen docs write'" in result.stderr
    assert path.read_text() == f"{BEGIN}\n{END}\n"
    assert run(root, "write").exit_code == 0
    result = run(root, "check")
    assert (result.exit_code, result.output) == (0, "")
    text = (root / "patches/0001-count.patch").read_text()
    (root / "patches/0001-count.patch").write_text(text.replace("count the processors", "count them"))
    result = run(root, "check")
    assert result.exit_code == 1
    assert "count them" in result.stdout


def test_all_pages_are_looked_at(root: Path) -> None:
    names = ["README.md", "docs/a.md", "docs/deep/b.md"]
    for name in names:
        page(root, BEGIN, END, name=name)
    page(root, BEGIN, END, name="notes/c.md")
    assert [path.relative_to(root).as_posix() for path in docs.write(root)] == names


def test_pages_without_markers_are_left_as_they_are(root: Path) -> None:
    path = root / "docs/x.md"
    path.write_bytes(b"no newline at the end")
    assert docs.write(root) == []
    assert path.read_bytes() == b"no newline at the end"


def test_markers_in_a_code_block_are_text(root: Path) -> None:
    path = page(root, "````", "```", BEGIN, "mine", END, "````", "~~~ text", BEGIN, END, "~~~", BEGIN, END)
    docs.write(root)
    lines = path.read_text().split("\n")
    assert lines[:11] == ["````", "```", BEGIN, "mine", END, "````", "~~~ text", BEGIN, END, "~~~", BEGIN]
    assert lines[11:14] == TABLE
    assert docs.stale(root) == {}


def test_wrong_markers_are_refused_together_and_nothing_is_written(root: Path) -> None:
    good = page(root, BEGIN, END, name="docs/a.md")
    page(
        root,
        END,
        "<!-- generated: no-such-table -->",
        END,
        BEGIN,
        BEGIN,
        name="docs/b.md",
    )
    with pytest.raises(BadInputError) as caught:
        docs.write(root)
    known = ", ".join(sorted(docs.GENERATORS))
    assert caught.value.message.split("\n") == [
        "docs/b.md:1: '<!-- end generated -->' without a beginning",
        f"docs/b.md:2: no generator named 'no-such-table'; there are {known}",
        "docs/b.md:5: 'patch-table' begins before 'patch-table' of line 4 ends",
        "docs/b.md:4: 'patch-table' has no '<!-- end generated -->' line after it",
    ]
    assert good.read_text() == f"{BEGIN}\n{END}\n"
    assert run(root, "check").exit_code == 2


def test_a_broken_series_is_no_table(root: Path) -> None:
    page(root, BEGIN, END)
    (root / "patches/stray.patch").write_text("")
    with pytest.raises(BadInputError, match=r"stray\.patch lies beside the series"):
        docs.write(root)


def test_an_empty_series(root: Path) -> None:
    (root / "patches/0001-count.patch").unlink()
    (root / "patches/series").write_text("")
    assert docs.patch_table(root) == "The series is empty."


def test_pin_table(root: Path) -> None:
    assert docs.pin_table(root).split("\n") == [
        "| Group | Wheels | .debs | Bytes | MiB |",
        "| --- | --: | --: | --: | --: |",
        "| libc | 0 | 1 | 1000 | 0.0 |",
        "| serve-cpu | 1 | 0 | 3145728 | 3.0 |",
        "| serve-cuda | 1 | 0 | 3145728 | 3.0 |",
        "| tools | 1 | 0 | 1048576 | 1.0 |",
        "| all | 2 | 1 | 4195304 | 4.0 |",
    ]


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"wheels": [{"name": "x"}]}', '{"wheels": [{"size": "1", "groups": []}]}']
)
def test_pins_that_cannot_be_read(root: Path, text: str) -> None:
    (root / "nix/pins/wheels.json").write_text(text)
    with pytest.raises(BadInputError, match=r"wheels\.json: cannot read the pins"):
        docs.pin_table(root)


def test_cli_help_is_the_help_of_every_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = docs.cli_help(root)
    assert "\x1b" not in text
    assert "## `hyperqwen`\n" in text
    assert "### `hyperqwen patches`\n" in text
    shown = text.split("#### `hyperqwen patches new`\n\n```text\n")[1].split("\n```\n")[0]
    direct = CliRunner().invoke(main, ["patches", "new", "--help"], terminal_width=docs.WIDTH)
    assert shown == direct.output.rstrip("\n").replace("Usage: main ", "Usage: hyperqwen ")
    assert max(len(line) for line in shown.split("\n")) > 80
    assert all(len(line) <= docs.WIDTH for line in text.split("\n"))
    monkeypatch.setenv("COLUMNS", "200")
    assert docs.cli_help(root) == text
    assert (os.environ["COLUMNS"], os.environ["FORCE_COLOR"]) == ("200", "1")


def test_cli_help_leaves_hidden_commands_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.group()
    def group() -> None:
        """A group."""

    group.add_command(click.Command("seen", help="Be seen."))
    group.add_command(click.Command("unseen", hidden=True))
    monkeypatch.setattr("hyperqwen.cli.main", group)
    assert docs.cli_help(root) == (
        "## `hyperqwen`\n\n```text\nUsage: hyperqwen [OPTIONS] COMMAND [ARGS]...\n\n  A group.\n\n"
        "Options:\n  --help  Show this message and exit.\n\nCommands:\n  seen  Be seen.\n```\n\n"
        "### `hyperqwen seen`\n\n```text\nUsage: hyperqwen seen [OPTIONS]\n\n  Be seen.\n\n"
        "Options:\n  --help  Show this message and exit.\n```"
    )


def test_generators_are_named_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "GENERATORS", dict(docs.GENERATORS))

    @docs.generator("greeting")
    def greeting(root: Path) -> str:
        return f"hello\nfrom {root.name}\n"

    path = page(root, "<!-- generated: greeting -->", END)
    docs.write(root)
    assert path.read_text().split("\n")[1:3] == ["hello", f"from {root.name}"]
    with pytest.raises(ValueError, match="a second generator named 'greeting'"):
        docs.generator("greeting")(greeting)
