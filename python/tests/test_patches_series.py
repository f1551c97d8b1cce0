"""The series file and the headers: every problem is found, and found together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperqwen.patches.apply import PatchProblems
from hyperqwen.patches.make import header_text
from hyperqwen.patches.series import (
    FIELDS,
    KINDS,
    Seam,
    TestRef,
    apply_folder,
    find_repository,
    load,
    next_name,
    parse_header,
    read_series,
)

HEADER = """\
Subject: list the processors without a shell
Kind: seam
Reason: the CPU worker runs lscpu through a shell;
  a sandbox has neither
Upstream: none known
Retires: when upstream reads /sys
Seam: hyperqwen.engine.cpu:logical_cpus, hyperqwen.engine.cpu:Topology.node
Test: python/tests/test_engine_cpu.py, checks/engine/test_cpu.py::test_list

"""
DIFF = "--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1 +1 @@\n-one\n+two\n"


def folder(root: Path, series: str, **patches: str) -> Path:
    """A patches folder; keyword a_b is the file 000N-a-b.patch, N counting from 1."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "series").write_text(series)
    for number, (name, text) in enumerate(patches.items(), 1):
        (root / f"{number:04}-{name.replace('_', '-')}.patch").write_text(text)
    return root


def header_problems(text: str) -> list[str]:
    header, problems = parse_header(text.split("\n"), "p.patch")
    assert header is None
    return [str(problem) for problem in problems]


def test_a_good_header() -> None:
    header, problems = parse_header(HEADER.split("\n"), "p.patch")
    assert problems == [] and header is not None
    assert header.subject == "list the processors without a shell"
    assert header.kind == "seam"
    assert header.reason == "the CPU worker runs lscpu through a shell; a sandbox has neither"
    assert header.upstream == "none known"
    assert header.retires == "upstream reads /sys"
    assert header.seams == (
        Seam("hyperqwen.engine.cpu", "logical_cpus"),
        Seam("hyperqwen.engine.cpu", "Topology.node"),
    )
    assert header.tests == (
        TestRef("python/tests/test_engine_cpu.py"),
        TestRef("checks/engine/test_cpu.py", "test_list"),
    )
    assert (header.line("Subject"), header.line("Upstream"), header.line("Test")) == (1, 5, 8)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_required(field: str) -> None:
    lines = HEADER.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{field}:"))
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(" "))
    assert header_problems("\n".join(lines[:start] + lines[end:])) == [
        f"p.patch:1: missing from the header: {field} (docs/adding-a-patch.md shows one)"
    ]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_has_a_value(field: str) -> None:
    lines = [f"{field}:" if line.startswith(f"{field}:") else line for line in HEADER.split("\n")]
    assert any(
        f": {field}: no value: expected some text" in problem
        for problem in header_problems("\n".join(line for line in lines if not line.startswith("  ")))
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Kind: seam", "Kind: hack", "p.patch:2: Kind: unknown: expected one of plugin, seam, fix, security, found"),
        ("Retires: when", "Retires: if", "p.patch:6: Retires: not a condition: expected 'when ...', found"),
        ("shell\n", "shell\n  and more\n", "p.patch:1: Subject: too long: expected one line of at most 100"),
        ("a shell\n", "a shell " + "x" * 90 + "\n", "p.patch:1: Subject: too long: expected one line of at most 100"),
        ("cpu:logical_cpus", "cpu.logical_cpus", "p.patch:7: Seam: not a function of the engine: expected"),
        ("hyperqwen.engine.cpu:logical", "os.path:logical", "p.patch:7: Seam: not a function of the engine"),
        ("hyperqwen.engine.cpu:logical", "hyperqwen.pins.x:logical", "p.patch:7: Seam: not a function of the engine"),
        ("python/tests/test", "/etc/test", "p.patch:8: Test: not a test of this repository"),
        ("python/tests/test", "python/tests/../test", "p.patch:8: Test: not a test of this repository"),
        (", checks/engine/test_cpu.py::test_list", "", "p.patch:8: Test: none of these sees vLLM"),
        ("::test_list\n", "::test_list\nProvides: A b\n", "p.patch:9: Provides: not names of capabilities: expected"),
        ("::test_list\n", "::test_list\nProvides: a, ,b\n", "p.patch:9: Provides: not names of capabilities"),
        ("::test_list\n", "::test_list\nProvides: a, b, a\n", "p.patch:9: Provides: a name stands twice"),
        ("::test_list\n", "::test_list\nProvides:\n", "p.patch:9: Provides: no value: expected some text"),
        ("checks/engine", "docs/engine", "p.patch:8: Test: not a test of this repository"),
        ("Upstream:", "Upsteam:", "p.patch:5: unknown field 'Upsteam': expected one of Subject, Kind"),
        ("Upstream:", "Kind: fix\nUpstream:", "p.patch:5: a second 'Kind' field"),
        ("  a sandbox", "a sandbox", "p.patch:4: not a header line: expected 'Field: value', or an indented"),
        ("Upstream", "\nUpstream", "p.patch:5: not a header line: expected 'Field: value', or an indented"),
        ("Subject", " more\nSubject", "p.patch:1: not a header line: expected 'Field: value', or an indented"),
    ],
)
def test_wrong_fields(old: str, new: str, message: str) -> None:
    found = header_problems(HEADER.replace(old, new, 1))
    assert any(problem.startswith(message) for problem in found), found


def test_a_seam_patch_names_its_seam() -> None:
    text = "\n".join("Seam: none" if line.startswith("Seam") else line for line in HEADER.split("\n"))
    (problem,) = header_problems(text)
    assert problem.startswith("p.patch:7: Seam: a patch of kind 'seam' names what it hands over to")
    header, _ = parse_header(text.replace("Kind: seam", "Kind: fix").split("\n"), "p.patch")
    assert header is not None and header.seams == ()


def test_what_a_patch_provides() -> None:
    header, _ = parse_header(HEADER.split("\n"), "p.patch")
    assert header is not None and header.provides == ()
    more = HEADER.replace("::test_list\n", "::test_list\nProvides: kv-group-size,\n  int8-prefill\n")
    header, problems = parse_header(more.split("\n"), "p.patch")
    assert problems == [] and header is not None
    assert (header.provides, header.line("Provides")) == (("kv-group-size", "int8-prefill"), 9)


def test_all_header_problems_come_together() -> None:
    found = header_problems("Kind: hack\nColour: red\nRetires: never\nthanks\nTest: /tmp/x\n")
    assert len(found) == 6
    assert "missing from the header: Subject, Reason, Upstream, Seam" in "\n".join(found)


WORDS = st.lists(st.from_regex(r"[!-~]{1,30}", fullmatch=True), min_size=1, max_size=30).map(" ".join)


@settings(deadline=None, max_examples=50)
@given(
    reason=WORDS,
    upstream=WORDS,
    retires=WORDS,
    subject=WORDS.map(lambda words: words[:100].strip()),
    kind=st.sampled_from(KINDS),
    provides=st.lists(st.from_regex(r"[a-z][a-z0-9]{0,20}(-[a-z0-9]{1,9}){0,3}", fullmatch=True), unique=True),
)
def test_a_written_header_reads_back(
    subject: str, kind: str, reason: str, upstream: str, retires: str, provides: list[str]
) -> None:
    text = header_text(
        {
            "Subject": subject,
            "Kind": kind,
            "Reason": reason,
            "Upstream": upstream,
            "Retires": f"when {retires}",
            "Seam": "hyperqwen.engine.cpu:f",
            "Test": "checks/x.py",
            **({"Provides": ", ".join(provides)} if provides else {}),
        }
    )
    assert all(len(line) <= 110 for line in text.splitlines())
    header, problems = parse_header(text.splitlines(), "p")
    assert problems == [] and header is not None
    assert (header.subject, header.kind, header.reason) == (subject, kind, reason)
    assert (header.upstream, header.retires, header.provides) == (upstream, retires, tuple(provides))


def test_series_order_and_comments(tmp_path: Path) -> None:
    patches = folder(
        tmp_path / "patches",
        "# what vLLM needs\n\n0001-one.patch\n  0002-two.patch\n",
        one=HEADER + DIFF,
        two=HEADER + DIFF.replace("two", "three").replace("one", "two"),
    )
    assert [entry.name for entry in load(patches)] == ["0001-one.patch", "0002-two.patch"]
    assert [entry.name for entry in load(str(patches))] == ["0001-one.patch", "0002-two.patch"]
    assert apply_folder(patches, {"vllm/a.py": b"one\n"}.get) == {"vllm/a.py": b"three\n"}


def test_an_empty_series(tmp_path: Path) -> None:
    patches = folder(tmp_path / "patches", "# nothing\n")
    assert load(patches) == []
    assert apply_folder(patches, {"vllm/a.py": b"one\n"}.get) == {}


def test_every_problem_of_the_folder_comes_with_those_of_the_tree(tmp_path: Path) -> None:
    patches = folder(
        tmp_path / "patches",
        "0001-one.patch\n0001-one.patch\nthree.patch\n../0004-four.patch\n0009-gone.patch\n0002-two.patch\n",
        one=HEADER + DIFF,
        two="Subject: x\n\n" + DIFF.replace("a.py", "a.so"),
        unlisted=HEADER + DIFF,
    )
    (patches / "0001-one.patch.orig").write_text("")
    with pytest.raises(PatchProblems) as caught:
        apply_folder(patches, {"vllm/a.py": b"other\n"}.get)
    found = [str(problem) for problem in caught.value.problems]
    expected = [
        "series:2: 0001-one.patch is listed a second time, after line 1",
        "series:3: not a patch name: expected 0001-short-name.patch, found 'three.patch'",
        "series:4: not a patch name: expected 0001-short-name.patch, found '../0004-four.patch'",
        "series:5: cannot read 0009-gone.patch: No such file or directory",
        "series:6: the numbers do not rise: expected a number after 0009, found 0002-two.patch",
        "0002-two.patch:1: missing from the header: Kind, Reason, Upstream, Retires, Seam, Test "
        "(docs/adding-a-patch.md shows one)",
        "series: 0001-one.patch.orig lies beside the series, which does not list it "
        "(add its name to patches/series, or remove it)",
        "series: 0003-unlisted.patch lies beside the series, which does not list it "
        "(add its name to patches/series, or remove it)",
        "0001-one.patch:13: vllm/a.py, hunk 1, file line 1: the removed line differs: expected 'one', found 'other'",
        "0002-two.patch:3: the file is not a .py file: found 'vllm/a.so'",
    ]
    assert found == expected
    with pytest.raises(PatchProblems) as caught:
        load(patches)
    assert [str(problem) for problem in caught.value.problems] == expected[:8] + expected[9:]


def test_a_linked_patch_is_refused(tmp_path: Path) -> None:
    patches = folder(tmp_path / "patches", "0001-one.patch\n")
    (tmp_path / "elsewhere").write_text(HEADER + DIFF)
    (patches / "0001-one.patch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PatchProblems, match=r"series:1: 0001-one\.patch is a symbolic link"):
        load(patches)


def test_no_series(tmp_path: Path) -> None:
    with pytest.raises(PatchProblems, match=r"cannot read .*series"):
        read_series(tmp_path)
    (tmp_path / "series").write_bytes(b"\xff\n")
    with pytest.raises(PatchProblems, match=r"cannot read .*series"):
        read_series(tmp_path)


def test_find_repository(tmp_path: Path) -> None:
    folder(tmp_path / "patches", "")
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    assert find_repository(tmp_path / "docs" / "deep") == tmp_path
    assert find_repository(tmp_path) == tmp_path
    assert find_repository(Path("/")) is None


def test_names_of_new_patches(tmp_path: Path) -> None:
    series = read_series(folder(tmp_path / "patches", "0001-one.patch\n", one=HEADER + DIFF))
    assert next_name(series, "two-words") == "0002-two-words.patch"
    assert next_name(series, "0007-seven.patch") == "0007-seven.patch"
    for name, message in (
        ("0001-one", "exists already"),
        ("0001-other", "must come after 0001"),
        ("Two", "expected"),
        ("two_words", "expected"),
        ("../x", "expected"),
        ("", "expected"),
        ("a--b", "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            next_name(series, name)
    assert next_name(read_series(folder(tmp_path / "none", "")), "x") == "0001-x.patch"


@pytest.mark.parametrize("path", ["torch/evil.py", "sitecustomize.py", "vllm.py", "vllm_cpu/a.py"])
def test_a_patch_stays_in_vllm(tmp_path: Path, path: str) -> None:
    new = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+evil = True\n"
    patches = folder(tmp_path, "0001-evil.patch\n", evil=HEADER + new)
    assert any(path in str(problem) and "below vllm/" in str(problem) for problem in read_series(patches).problems)
    with pytest.raises(PatchProblems):
        apply_folder(patches, lambda _: None)
