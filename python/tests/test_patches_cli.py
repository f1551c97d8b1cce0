"""The `patches` commands from end to end: what they print, what they write, how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyperqwen.cli import main
from hyperqwen.patches.files import tree_files

A = b"".join(b"a%d = 1\n" % number for number in range(40))
NEW = [
    "--subject",
    "count the processors",
    "--kind",
    "seam",
    "--reason",
    "lscpu is not there",
    "--retires",
    "upstream reads /sys",
    "--seam",
    "hyperqwen.engine.cpu:count",
    "--test",
    "checks/test_cpu.py",
    "--provides",
    "kvarn",
]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in `repo`, which is the working directory, and a tree as a build leaves it in `result`."""
    for path, content in {
        "repo/patches/series": b"# vLLM 0.31.0\n",
        "repo/python/hyperqwen/engine/cpu.py": b"def count() -> int:\n    return 1\n",
        "repo/checks/test_cpu.py": b"",
        "result/site/vllm/a.py": A,
        "result/site/vllm/data.json": b"{}\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    monkeypatch.chdir(tmp_path / "repo/python")
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["patches", *map(str, arguments)])


def edit(box: Path) -> None:
    assert run("apply", "--tree", box / "result", "--out", box / "copy").exit_code == 0
    edited = A.replace(b"a20 = 1\n", b"from hyperqwen.engine.cpu import count\na20 = count()\n")
    (box / "copy/vllm/a.py").write_bytes(edited)


def test_from_an_edit_to_a_checked_series(box: Path) -> None:
    edit(box)
    result = run("new", "count-processors", "--tree", box / "result", "--edited", box / "copy", *NEW)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{box}/repo/patches/0001-count-processors.patch\n"
    assert result.stderr == "  changes vllm/a.py\n"

    result = run("list")
    assert (result.exit_code, result.stdout) == (0, "0001-count-processors.patch  seam  count the processors\n")
    (row,) = json.loads(run("list", "--json").stdout)
    assert row["retires"] == "upstream reads /sys"
    assert row["seams"] == ["hyperqwen.engine.cpu:count"]
    assert row["provides"] == ["kvarn"]
    assert (row["files"], row["upstream"]) == (["vllm/a.py"], "none known")

    result = run("check", "--tree", box / "result")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("1 of 1 patches apply exactly")
    assert json.loads(run("check", "--tree", box / "result", "--json").stdout) == {"patches": 1, "problems": []}

    result = run("apply", "--tree", box / "result", "--out", box / "patched")
    assert (result.exit_code, result.stdout) == (0, "changed vllm/a.py\n")
    assert (box / "patched/vllm/a.py").read_bytes() == (box / "copy/vllm/a.py").read_bytes()
    assert list(tree_files(box / "patched")) == ["vllm/a.py", "vllm/data.json"]
    assert (box / "result/site/vllm/a.py").read_bytes() == A


def test_check_prints_every_problem_and_exits_5(box: Path) -> None:
    edit(box)
    assert run("new", "count", "--tree", box / "result", "--edited", box / "copy", *NEW).exit_code == 0
    (box / "result/site/vllm/a.py").write_bytes(b"# licence\n" + A)
    (box / "repo/checks/test_cpu.py").unlink()
    result = run("check", "--tree", box / "result")
    assert (result.exit_code, result.stdout) == (5, "")
    assert "2 problems with the patches:\n" in result.stderr
    assert "0001-count.patch:7: Test checks/test_cpu.py: no such file in the repository\n" in result.stderr
    assert "hunk 1, file line 18: the context line differs" in result.stderr
    assert "(context found at line 19: refresh the patch)" in result.stderr

    result = run("check", "--tree", box / "result", "--json")
    assert result.exit_code == 5
    problems = json.loads(result.stdout)["problems"]
    assert [(problem["line"], problem["file"], problem["file_line"]) for problem in problems] == [
        (7, None, None),
        (14, "vllm/a.py", 18),
    ]

    result = run("apply", "--tree", box / "result", "--out", box / "out")
    assert result.exit_code == 5
    assert not (box / "out").exists()

    result = run("refresh", "0001-count", "--tree", box / "result")
    assert result.exit_code == 0, result.output
    assert "  moved vllm/a.py, hunk 1: line 18 -> 19\n" in result.stderr
    assert run("apply", "--tree", box / "result", "--out", box / "out").exit_code == 0


def test_refresh_says_that_nothing_moved(box: Path) -> None:
    edit(box)
    new: tuple[str | Path, ...] = ("new", "count", "--tree", box / "result", "--edited", box / "copy", *NEW)
    assert run(*new).exit_code == 0
    result = run("refresh", "0001-count", "--tree", box / "result")
    assert (result.exit_code, result.stderr) == (0, "  nothing moved: 0001-count.patch stays as it is\n")

    result = run(*new)
    assert result.exit_code == 2
    assert "has a patch of that name, 0001-count.patch\n  fix: change it with" in result.stderr


@pytest.mark.parametrize("inner", ["vllm", "vllm/a.py"])
def test_a_built_engine_is_no_tree(box: Path, inner: str) -> None:
    edit(box)
    assert run("new", "count", "--tree", box / "result", "--edited", box / "copy", *NEW).exit_code == 0
    source, farm = box / "result/site", box / "engine/site"
    if inner == "vllm":
        farm.mkdir(parents=True)
        (farm / "vllm").symlink_to(source / "vllm")
    else:
        (farm / "vllm").mkdir(parents=True)
        for name in ("__init__.py", "a.py", "data.json"):
            (farm / "vllm" / name).symlink_to(source / "vllm" / name)
    cases: list[tuple[str | Path, ...]] = [("check",), ("apply", "--out", box / "out"), ("refresh", "0001-count")]
    for arguments in cases:
        result = run(*arguments, "--tree", box / "engine")
        assert result.exit_code == 2, (arguments, result.output)
        assert result.stderr == (
            f"hyperqwen: {box}/engine is no vLLM to patch: its files are links, as in a built engine\n"
            "  fix: use ./hq build .#vllm-source -o vllm-source\n"
        )
    assert not (box / "out").exists()


def test_bad_input_exits_2_and_writes_nothing(box: Path) -> None:
    edit(box)
    tree, copy = box / "result", box / "copy"
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("new", "Bad Name", "--tree", tree, "--edited", copy, *NEW), "patch name 'Bad Name'"),
        (("new", "x", "--tree", tree, "--edited", tree, *NEW), "nothing to write"),
        (("new", "x", "--tree", tree, "--edited", copy, *NEW, "--seam", "os.path"), "Seam: not a function"),
        (("new", "x", "--tree", tree, "--edited", copy), "Missing option '--subject'"),
        (("new", "x", "--tree", box / "repo", "--edited", copy, *NEW), "holds neither vllm/ nor site/vllm/"),
        (("apply", "--tree", tree, "--out", tree / "site" / "out"), "lies inside the tree"),
        (("apply", "--tree", tree, "--out", copy), "exists and is not an empty folder"),
        (("refresh", "none", "--tree", tree), "no patch 'none'"),
        (("list", "--repo", tree), "no patches/series in"),
    ]
    for arguments, message in cases:
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in result.stderr
        assert result.stdout == ""
    assert [path.name for path in (box / "repo/patches").iterdir()] == ["series"]


def test_outside_a_checkout(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    result = run("list")
    assert result.exit_code == 2
    assert "no patches/series in this directory and those above it" in result.stderr
    assert run("list", "--repo", box / "repo").exit_code == 0


def test_a_checkout_that_cannot_be_written(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperqwen.patches import make

    edit(box)

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(make, "write_atomic", refuse)
    result = run("new", "count", "--tree", box / "result", "--edited", box / "copy", *NEW)
    assert result.exit_code == 3
    assert "0001-count.patch: Read-only file system" in result.stderr


def test_a_link_in_the_tree_is_named(box: Path) -> None:
    edit(box)
    (box / "copy/vllm/b.py").symlink_to("a.py")
    result = run("new", "count", "--tree", box / "result", "--edited", box / "copy", *NEW)
    assert result.exit_code == 2
    assert "vllm/b.py is a symbolic link in the tree" in result.stderr
