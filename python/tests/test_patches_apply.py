"""The strict applier: exact forth and back, and one report of everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyperqwen.patches.apply import (
    Patch,
    PatchProblems,
    Problem,
    Reader,
    UnsafePath,
    apply_series,
    parse,
    path_error,
    reanchor,
    scan,
    split_lines,
)
from hyperqwen.patches.files import overlay_reader
from hyperqwen.patches.make import diff, file_diff

TREE: dict[str, bytes] = {
    "vllm/a.py": b"".join(b"line %d\n" % number for number in range(1, 41)),
    "vllm/b.py": b"one\ntwo\nthree",
}

GOOD = b"""\
diff --git a/vllm/a.py b/vllm/a.py
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -7,7 +7,8 @@
 line 7
 line 8
 line 9
-line 10
+LINE 10
+line 10b
 line 11
 line 12
 line 13
@@ -27,7 +28,6 @@ def section():
 line 27
 line 28
 line 29
-line 30
 line 31
 line 32
 line 33
"""


def reader(tree: Mapping[str, bytes]) -> Reader:
    return lambda path: tree.get(path)


def problems(data: bytes, tree: Mapping[str, bytes] = TREE) -> list[Problem]:
    """What is wrong with one patch, parsed and applied."""
    with pytest.raises(PatchProblems) as caught:
        apply_series(reader(tree), [scan(data, "p.patch")])
    return list(caught.value.problems)


def only(data: bytes, tree: Mapping[str, bytes] = TREE) -> str:
    found = problems(data, tree)
    assert len(found) == 1, "\n".join(map(str, found))
    return str(found[0])


def apply(data: bytes, tree: Mapping[str, bytes] = TREE) -> dict[str, bytes | None]:
    return apply_series(reader(tree), [parse(data, "p.patch")])


def test_a_good_patch_applies_and_goes_back() -> None:
    changes = apply(GOOD)
    expected = TREE["vllm/a.py"].replace(b"line 10\n", b"LINE 10\nline 10b\n").replace(b"line 30\n", b"")
    assert changes == {"vllm/a.py": expected}
    back = apply_series(reader({**TREE, "vllm/a.py": expected}), [parse(GOOD, "p.patch")], reverse=True)
    assert back == {"vllm/a.py": TREE["vllm/a.py"]}


def test_lines_that_git_adds_are_taken() -> None:
    extended = GOOD.replace(b"\n--- a", b"\nindex 86ba524..b462182 100644\n--- a", 1)
    assert apply(extended) == apply(GOOD)
    assert parse(b"Subject: x\n\n" + extended, "p").header == ("Subject: x", "")


def test_without_the_git_line() -> None:
    assert apply(GOOD.split(b"\n", 1)[1]) == apply(GOOD)


def test_new_and_removed_files() -> None:
    data = b"""\
diff --git a/vllm/b.py b/vllm/b.py
deleted file mode 100644
--- a/vllm/b.py
+++ /dev/null
@@ -1,3 +0,0 @@
-one
-two
-three
\\ No newline at end of file
diff --git a/vllm/new.py b/vllm/new.py
new file mode 100644
--- /dev/null
+++ b/vllm/new.py
@@ -0,0 +1 @@
+fresh
"""
    assert apply(data) == {"vllm/b.py": None, "vllm/new.py": b"fresh\n"}
    after = {"vllm/a.py": TREE["vllm/a.py"], "vllm/new.py": b"fresh\n"}
    back = apply_series(reader(after), [parse(data, "p")], reverse=True)
    assert back == {"vllm/b.py": b"one\ntwo\nthree", "vllm/new.py": None}


def test_the_message_has_every_place() -> None:
    shifted = {**TREE, "vllm/a.py": b"# licence\n" + TREE["vllm/a.py"]}
    first, second = map(str, problems(GOOD, shifted))
    assert first == (
        "p.patch:5: vllm/a.py, hunk 1, file line 7: the context line differs, and 6 more of the "
        "hunk's lines: "
        "expected 'line 7', found 'line 6' (context found at line 8: refresh the patch)"
    )
    assert second.startswith("p.patch:15: vllm/a.py, hunk 2, file line 27: ")
    assert second.endswith("(context found at line 28: refresh the patch)")


def test_hints_tell_several_places_and_an_applied_patch_apart() -> None:
    doubled = {"vllm/a.py": b"# 1\n" + TREE["vllm/a.py"] + TREE["vllm/a.py"]}
    assert "context found at lines 8, 48: refresh the patch by hand" in str(problems(GOOD, doubled)[0])
    applied = apply(GOOD)["vllm/a.py"]
    assert applied is not None
    assert "applied before?" in str(problems(GOOD, {"vllm/a.py": applied})[0])
    gone = {"vllm/a.py": TREE["vllm/a.py"].replace(b"line 12\n", b"other\n")}
    assert only(GOOD, gone).endswith("file line 12: the context line differs: expected 'line 12', found 'other'")


def test_the_end_of_the_file_is_no_context() -> None:
    short = {"vllm/a.py": b"".join(split_lines(TREE["vllm/a.py"])[:31])}
    assert "expected 'line 32', found the end of the file, which has 31 lines" in only(GOOD, short)


HEADERLESS = b"--- a/vllm/a.py\n+++ b/vllm/a.py\n"
HUNK = b"@@ -1,4 +1,4 @@\n-line 1\n+LINE 1\n line 2\n line 3\n line 4\n"

REFUSED = {
    "empty": (b"", "p.patch:1: the patch changes no file"),
    "prose only": (b"Subject: x\n", "p.patch:1: the patch changes no file"),
    "cut off": (HEADERLESS + HUNK[:-1], "p.patch:8: the last line has no line end: the patch is cut off"),
    "CRLF": (
        (HEADERLESS + HUNK).replace(b"\n", b"\r\n"),
        "p.patch:1: CRLF line ends (8 of 8 lines): save the patch with LF",
    ),
    "one CRLF": (
        HEADERLESS + HUNK.replace(b"+LINE 1\n", b"+LINE 1\r\n"),
        "p.patch:5: CRLF line ends (1 of 8 lines): save the patch with LF",
    ),
    "NUL": (HEADERLESS + HUNK.replace(b"LINE", b"L\0NE"), "p.patch:5: a NUL byte: this is not a text patch"),
    "a library": (
        (HEADERLESS + HUNK).replace(b"a.py", b"_C.so"),
        "p.patch:1: the file is not a .py file: found 'vllm/_C.so'",
    ),
    "byte code": (
        (HEADERLESS + HUNK).replace(b"a.py", b"a.pyc"),
        "p.patch:1: the file is not a .py file: found 'vllm/a.pyc'",
    ),
    "parent path": (
        (HEADERLESS + HUNK).replace(b"vllm/a.py", b"../a.py"),
        "p.patch:1: the path has an empty, '.' or '..' component: found '../a.py'",
    ),
    "hidden parent path": (
        (HEADERLESS + HUNK).replace(b"vllm/a.py", b"vllm/../../a.py"),
        "p.patch:1: the path has an empty, '.' or '..' component: found 'vllm/../../a.py'",
    ),
    "absolute path": (
        (HEADERLESS + HUNK).replace(b"vllm/a.py", b"/etc/a.py"),
        "p.patch:1: the path is absolute: found '/etc/a.py'",
    ),
    "parent path in the git line": (
        b"diff --git a/../a.py b/../a.py\nnew file mode 100644\nindex 0000000..e69de29\n",
        "p.patch:1: the path has an empty, '.' or '..' component: found '../a.py'",
    ),
    "folder of a file": (
        (HEADERLESS + HUNK).replace(b"a.py", b"a.py/b.py"),
        "p.patch:1: the path has a folder named like a Python file: found 'vllm/a.py/b.py'",
    ),
    "quoted path": (
        (HEADERLESS + HUNK).replace(b"a/vllm/a.py", b'"a/vllm/\\303.py"'),
        "p.patch:1: not a name as git writes it: expected a/PATH or /dev/null, found '\"a/vllm/\\\\303.py\"'",
    ),
    "time stamp": (
        (HEADERLESS + HUNK).replace(b"b/vllm/a.py\n", b"b/vllm/a.py\t2026-01-01\n"),
        "p.patch:2: the path has a character other than letters, digits and _ . + -: found 'vllm/a.py\\t2026-01-01'",
    ),
    "no prefixes": (
        (HEADERLESS + HUNK).replace(b"b/vllm", b"vllm"),
        "p.patch:2: not a name as git writes it: expected b/PATH or /dev/null, found 'vllm/a.py'",
    ),
    "swapped prefixes": (
        b"--- b/vllm/a.py\n+++ b/vllm/a.py\n" + HUNK,
        "p.patch:1: not a name as git writes it: expected a/PATH or /dev/null, found 'b/vllm/a.py'",
    ),
    "rename by names": (
        (HEADERLESS + HUNK).replace(b"b/vllm/a.py", b"b/vllm/c.py"),
        "p.patch:1: vllm/a.py: renames a file; remove the old one and add the new one: found vllm/c.py",
    ),
    "rename by the git line": (
        b"diff --git a/vllm/a.py b/vllm/c.py\n" + HEADERLESS + HUNK,
        "p.patch:1: not as git writes it, or a rename: expected 'diff --git a/PATH b/PATH' with "
        "one PATH twice, "
        "found 'diff --git a/vllm/a.py b/vllm/c.py'",
    ),
    "another file in the git line": (
        b"diff --git a/vllm/b.py b/vllm/b.py\n" + HEADERLESS + HUNK,
        "p.patch:2: vllm/a.py: the 'diff --git' line names another file: found vllm/b.py",
    ),
    "nothing on both sides": (
        b"--- /dev/null\n+++ /dev/null\n" + HUNK,
        "p.patch:1: both names are /dev/null",
    ),
    "mode change": (
        b"diff --git a/vllm/a.py b/vllm/a.py\nold mode 100644\n" + HEADERLESS + HUNK,
        "p.patch:2: vllm/a.py: changes a file's mode: found 'old mode 100644'",
    ),
    "program": (
        b"diff --git a/vllm/n.py b/vllm/n.py\nnew file mode 100755\n--- /dev/null\n+++ b/vllm/n.py\n"
        b"@@ -0,0 +1 @@\n+x\n",
        "p.patch:2: vllm/n.py: only plain files can be added or removed: expected mode 100644, found mode 100755",
    ),
    "link": (
        b"diff --git a/vllm/n.py b/vllm/n.py\nnew file mode 120000\n--- /dev/null\n+++ b/vllm/n.py\n"
        b"@@ -0,0 +1 @@\n+x\n",
        "p.patch:2: vllm/n.py: only plain files can be added or removed: expected mode 100644, found mode 120000",
    ),
    "mode against names": (
        b"diff --git a/vllm/a.py b/vllm/a.py\nnew file mode 100644\n" + HEADERLESS + HUNK,
        "p.patch:3: vllm/a.py: 'new file mode', but the names do not say so",
    ),
    "binary": (
        b"diff --git a/vllm/a.py b/vllm/a.py\nBinary files a/vllm/a.py and b/vllm/a.py differ\n",
        "p.patch:2: vllm/a.py: changes a binary file; a patch touches .py files only: "
        "found 'Binary files a/vllm/a.py and b/vllm/a.py differ'",
    ),
    "empty new file": (
        b"diff --git a/vllm/n.py b/vllm/n.py\nnew file mode 100644\nindex 0000000..e69de29\n",
        "p.patch:1: vllm/n.py: no '---' and '+++' lines: nothing is changed here "
        "(an empty file cannot be added or removed: give it a line)",
    ),
    "odd extended header": (
        b"diff --git a/vllm/a.py b/vllm/a.py\nIndex: a.py\n" + HEADERLESS + HUNK,
        "p.patch:2: vllm/a.py: not a line that git writes here: found 'Index: a.py'",
    ),
    "no hunks": (HEADERLESS, "p.patch:3: vllm/a.py: no hunk follows the file names"),
    "bad hunk header": (
        HEADERLESS + HUNK.replace(b"@@ -1,4 +1,4 @@", b"@@ -1,4 +1.4 @@"),
        "p.patch:3: vllm/a.py, hunk 1: not a hunk header: "
        "expected '@@ -LINE,COUNT +LINE,COUNT @@', found '@@ -1,4 +1.4 @@'",
    ),
    "combined diff": (
        HEADERLESS + HUNK.replace(b"@@ -1,4 +1,4 @@", b"@@@ -1,4 -1,4 +1,4 @@@"),
        "p.patch:3: vllm/a.py, hunk 1: not a hunk header: "
        "expected '@@ -LINE,COUNT +LINE,COUNT @@', found '@@@ -1,4 -1,4 +1,4 @@@'",
    ),
    "counts too high": (
        HEADERLESS + HUNK.replace(b"-1,4 +1,4", b"-1,5 +1,5"),
        "p.patch:3: vllm/a.py, hunk 1: the header's counts are not those of the lines below it: "
        "expected 5 old and 5 new lines, found 4 old and 4 new",
    ),
    "counts too low": (
        HEADERLESS + HUNK.replace(b"-1,4 +1,4", b"-1,3 +1,3"),
        "p.patch:3: vllm/a.py, hunk 1: the header's counts are not those of the lines below it: "
        "expected 3 old and 3 new lines, found 4 old and 4 new",
    ),
    "truncated hunk": (
        HEADERLESS + HUNK.removesuffix(b" line 4\n"),
        "p.patch:3: vllm/a.py, hunk 1: the header's counts are not those of the lines below it: "
        "expected 4 old and 4 new lines, found 3 old and 3 new",
    ),
    "signature": (
        HEADERLESS + HUNK + b"-- \n2.39.5\n\n",
        "p.patch:9: the signature of git format-patch is no part of a patch: remove it",
    ),
    "stripped context": (
        HEADERLESS + HUNK.replace(b" line 3\n", b"\n"),
        "p.patch:7: vllm/a.py, hunk 1: an empty context line must hold one space (an editor has stripped it)",
    ),
    "blank end": (
        HEADERLESS + HUNK + b"\n",
        "p.patch:9: 1 line outside any hunk: expected 'diff --git', '---', '@@' or the end of the patch, found ''",
    ),
    "prose at the end": (
        HEADERLESS + HUNK + b"thanks\nall\n",
        "p.patch:9: 2 lines outside any hunk: "
        "expected 'diff --git', '---', '@@' or the end of the patch, found 'thanks'",
    ),
    "hunk before a file": (
        b"@@ -1 +1 @@\n" + HEADERLESS + HUNK,
        "p.patch:1: a diff line before the first 'diff --git' or '---' line: found '@@ -1 +1 @@'",
    ),
    "header not UTF-8": (
        b"Subject: \xff\n" + HEADERLESS + HUNK,
        "p.patch:1: the header is not UTF-8: found 'Subject: \\\\xff'",
    ),
    "nothing changes": (
        HEADERLESS + b"@@ -1,3 +1,3 @@\n line 1\n line 2\n line 3\n",
        "p.patch:3: vllm/a.py, hunk 1: the hunk changes nothing",
    ),
    "same text": (
        HEADERLESS + HUNK.replace(b"LINE 1", b"line 1"),
        "p.patch:1: vllm/a.py: the patch leaves the file as it is",
    ),
    "line zero": (
        HEADERLESS + HUNK.replace(b"-1,4 +1,4", b"-0,4 +0,4"),
        "p.patch:3: vllm/a.py, hunk 1: a hunk with lines begins at line 0",
    ),
    "wrong new line": (
        HEADERLESS + HUNK.replace(b"+1,4", b"+2,4"),
        "p.patch:3: vllm/a.py, hunk 1: the new line number does not follow from the hunks before: "
        "expected +1, found +2",
    ),
    "wrong new line of the second hunk": (
        GOOD.replace(b"+28,6", b"+27,6"),
        "p.patch:14: vllm/a.py, hunk 2: the new line number does not follow from the hunks before: "
        "expected +28, found +27",
    ),
    "no context before": (
        HEADERLESS + b"@@ -10,4 +10,4 @@\n-line 10\n+LINE 10\n line 11\n line 12\n line 13\n",
        "p.patch:3: vllm/a.py, hunk 1: 0 context lines before the change: "
        "expected 3, or a hunk that begins at line 1 (make the diff with -U3)",
    ),
    "no context after": (
        HEADERLESS + b"@@ -7,4 +7,4 @@\n line 7\n line 8\n line 9\n-line 10\n+LINE 10\n",
        "p.patch:3: vllm/a.py, hunk 1, file line 11: 0 context lines after the change: "
        "expected 3, or a hunk that reaches the end of the file, found 30 more lines in the file "
        "(make the diff with -U3, or refresh the patch)",
    ),
    "bare insertion": (
        HEADERLESS + b"@@ -0,0 +1 @@\n+import os\n",
        "p.patch:3: vllm/a.py, hunk 1, file line 1: 0 context lines after the change: "
        "expected 3, or a hunk that reaches the end of the file, found 40 more lines in the file "
        "(make the diff with -U3, or refresh the patch)",
    ),
    "the same file twice": (
        HEADERLESS + HUNK + HEADERLESS + HUNK,
        "p.patch:9: vllm/a.py: a second change of the same file",
    ),
    "missing file": (
        (HEADERLESS + HUNK).replace(b"a.py", b"c.py"),
        "p.patch:1: vllm/c.py: the tree has no such file",
    ),
    "new file exists": (
        b"--- /dev/null\n+++ b/vllm/b.py\n@@ -0,0 +1 @@\n+x\n",
        "p.patch:1: vllm/b.py: a new file must not exist in the tree",
    ),
    "new file was added before": (
        b"--- /dev/null\n+++ b/vllm/b.py\n@@ -0,0 +1,3 @@\n+one\n+two\n+three\n\\ No newline at end of file\n",
        "p.patch:1: vllm/b.py: a new file must not exist in the tree (the same content: applied before?)",
    ),
    "new file in part": (
        b"--- /dev/null\n+++ b/vllm/n.py\n@@ -0,0 +3 @@\n+x\n",
        "p.patch:3: vllm/n.py, hunk 1: the new line number does not follow from the hunks before: "
        "expected +1, found +3",
    ),
    "new file with an old line": (
        b"--- /dev/null\n+++ b/vllm/n.py\n" + HUNK,
        "p.patch:3: vllm/n.py, hunk 1: a patch that adds a file has one hunk, of the whole file: "
        "expected old side 0,0, found old side 1,4",
    ),
    "removed in part": (
        b"--- a/vllm/a.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-line 1\n-line 2\n",
        "p.patch:1: vllm/a.py, file line 3: a removed file must be removed whole: found 38 more lines in the file",
    ),
    "removed with a line left": (
        b"--- a/vllm/b.py\n+++ /dev/null\n@@ -1,2 +1 @@\n-one\n two\n",
        "p.patch:3: vllm/b.py, hunk 1: a patch that removes a file has one hunk, of the whole file: "
        "expected new side 0,0, found new side 1,1",
    ),
    "newline expected at the end": (
        b"--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -1,3 +1,3 @@\n-one\n+ONE\n two\n three\n",
        "p.patch:7: vllm/b.py, hunk 1, file line 3: the context line differs: "
        "expected 'three', found 'three' without a newline",
    ),
    "no newline expected at the end": (
        HEADERLESS + b"@@ -37,4 +37,4 @@\n line 37\n line 38\n line 39\n-line 40\n"
        b"\\ No newline at end of file\n+LINE 40\n",
        "p.patch:7: vllm/a.py, hunk 1, file line 40: the removed line differs: "
        "expected 'line 40' without a newline, found 'line 40'",
    ),
    "newline lost inside the file": (
        HEADERLESS + b"@@ -1,2 +1,2 @@\n-line 1\n line 2\n+LINE\n\\ No newline at end of file\n",
        "p.patch:6: vllm/a.py, hunk 1, file line 3: the new last line has no newline, but the file goes on: "
        "found 'line 3'",
    ),
    "lines after the last": (
        b"--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -1,3 +1,4 @@\n one\n two\n three\n\\ No newline at end of file\n+four\n",
        "p.patch:6: vllm/b.py, hunk 1: lines follow the one that is marked as the file's end without a newline",
    ),
    "odd marker": (
        HEADERLESS + HUNK + b"\\ Kein Zeilenumbruch am Dateiende.\n",
        "p.patch:9: vllm/a.py, hunk 1: a marker that git does not write here: "
        "expected '\\\\ No newline at end of file' after a line of the hunk, "
        "found '\\\\ Kein Zeilenumbruch am Dateiende.'",
    ),
    "marker first": (
        HEADERLESS + HUNK.replace(b"@@\n", b"@@\n\\ No newline at end of file\n"),
        "p.patch:4: vllm/a.py, hunk 1: a marker that git does not write here: "
        "expected '\\\\ No newline at end of file' after a line of the hunk, "
        "found '\\\\ No newline at end of file'",
    ),
    "after the end of the file": (
        b"--- a/vllm/b.py\n+++ b/vllm/b.py\n@@ -9,0 +10 @@\n+x\n",
        "p.patch:3: vllm/b.py, hunk 1: 0 context lines before the change: "
        "expected 3, or a hunk that begins at line 1 (make the diff with -U3)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_clear_problem(name: str) -> None:
    data, message = REFUSED[name]
    assert only(data) == message


@pytest.mark.parametrize(
    "line", [b"rename from vllm/a.py", b"copy to vllm/c.py", b"similarity index 95%", b"GIT binary patch"]
)
def test_what_git_can_do_and_we_refuse(line: bytes) -> None:
    data = b"diff --git a/vllm/a.py b/vllm/a.py\n" + line + b"\n" + HEADERLESS + HUNK
    found = problems(data)[0]
    assert (found.line, found.file, found.found) == (2, "vllm/a.py", repr(line.decode()))


def test_overlapping_hunks() -> None:
    body = GOOD.replace(b"@@ -27,7 +28,6 @@", b"@@ -12,7 +13,6 @@")
    found = problems(body)[0]
    assert found.what == "the hunk begins before the end of the one before it"
    assert (found.line, found.hunk, found.expected, found.found) == (14, 2, "an old line from 14", "12")


def test_all_problems_come_together() -> None:
    one = scan(
        GOOD.replace(b" line 8\n", b" LINE 8\n").replace(b" line 32\n", b" LINE 32\n")
        + b"--- a/vllm/none.py\n+++ b/vllm/none.py\n"
        + HUNK
        + b"--- a/../x.py\n+++ b/../x.py\n"
        + HUNK,
        "0001-one.patch",
    )
    two = scan(b"--- a/vllm/_C.so\n+++ b/vllm/_C.so\n" + HUNK, "0002-two.patch")
    three = scan(HEADERLESS + HUNK, "0003-three.patch")
    four = scan(b"--- /dev/null\n+++ b/vllm/b.py\n@@ -0,0 +1 @@\n+x\n", "0004-four.patch")
    with pytest.raises(PatchProblems) as caught:
        apply_series(reader(TREE), [one, two, three, four])
    found = [(problem.patch, problem.line, problem.file, problem.hunk) for problem in caught.value.problems]
    assert found == [
        ("0001-one.patch", 30, None, None),
        ("0001-one.patch", 6, "vllm/a.py", 1),
        ("0001-one.patch", 20, "vllm/a.py", 2),
        ("0001-one.patch", 22, "vllm/none.py", None),
        ("0002-two.patch", 1, None, None),
        ("0003-three.patch", 1, "vllm/a.py", None),
        ("0004-four.patch", 1, "vllm/b.py", None),
    ]
    assert str(caught.value).count("\n") == len(found) - 1
    assert caught.value.problems[5].what == "not judged, since 0001-one.patch has problems in the same file"


def test_a_patch_after_one_that_moved_is_still_judged() -> None:
    later = GOOD.replace(b"line 10b", b"line 10c").replace(b"-line 10\n", b"-LINE 10\n-line 10b\n")
    later = later.replace(b"@@ -7,7 +7,8 @@", b"@@ -8,8 +8,8 @@").replace(b"@@ -27,7 +28,6 @@", b"@@ -27,7 +27,6 @@")
    shifted = {**TREE, "vllm/a.py": b"# licence\n" + TREE["vllm/a.py"]}
    with pytest.raises(PatchProblems) as caught:
        apply_series(reader(shifted), [parse(GOOD, "1"), parse(later, "2")])
    assert [(problem.patch, problem.hunk) for problem in caught.value.problems] == [
        ("1", 1),
        ("1", 2),
        ("2", 2),
    ]
    assert caught.value.problems[2].found == "'line 25'"


def test_patches_build_on_each_other_and_vanish_where_they_cancel() -> None:
    first = parse(HEADERLESS + HUNK, "1")
    second = parse((HEADERLESS + HUNK).replace(b"-line 1", b"-LINE 1").replace(b"+LINE 1", b"+line 1"), "2")
    assert apply_series(reader(TREE), [first, second]) == {}
    with pytest.raises(PatchProblems):
        apply_series(reader(TREE), [second, first])


def test_a_reader_that_refuses_is_a_problem() -> None:
    def read(path: str) -> bytes | None:
        raise UnsafePath(f"{path} is a symbolic link in the tree")

    with pytest.raises(PatchProblems) as caught:
        apply_series(read, [parse(GOOD, "p")])
    assert str(caught.value) == "p:1: vllm/a.py: vllm/a.py is a symbolic link in the tree"


def test_unsafe_paths_are_never_read() -> None:
    seen: list[str] = []

    def read(path: str) -> bytes | None:
        seen.append(path)
        return None

    for path in (
        b"../../etc/passwd.py",
        b"/etc/passwd.py",
        b"vllm/./a.py",
        b"vllm//a.py",
        b"vllm/_C.abi3.so",
    ):
        data = (HEADERLESS + HUNK).replace(b"vllm/a.py", path)
        with pytest.raises(PatchProblems):
            apply_series(read, [scan(data, "p")])
        with pytest.raises(PatchProblems):
            apply_series(read, [scan(b"diff --git a/%s b/%s\n" % (path, path) + data, "p")], reverse=True)
    assert seen == []


def test_paths() -> None:
    assert path_error("vllm/v1/worker/gpu_model_runner.py") is None
    assert path_error("a.py") is None
    for path in (
        "",
        "a",
        "/a.py",
        "a/../b.py",
        "..",
        "./a.py",
        "a//b.py",
        "a b.py",
        "a\\b.py",
        "ä.py",
        "a.py\n",
        "a.so",
    ):
        assert path_error(path) is not None, path


# The machine that runs this may be busy with a build: no deadline.
quick = settings(deadline=None, max_examples=60)

# Lines that look like parts of a diff, that repeat, and that are not UTF-8.
TRICKY = [
    b"",
    b" ",
    b"-",
    b"+",
    b"-- a/x.py",
    b"++ b/x.py",
    b"@@ -1 +1 @@",
    b"\\ No newline at end of file",
    b"diff --git a/x.py b/x.py",
    b"x",
    b"y",
    b"\xff\xfe",
    b"a\rb\x0c\xe2\x80\xa8",
]
LINES = st.lists(st.sampled_from(TRICKY) | st.binary(max_size=3).map(lambda data: data.translate(None, b"\n\r\0")))


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """A file with lines: with or without a newline at its end."""
    lines = draw(LINES)
    content = b"".join(line + b"\n" for line in lines)
    return content if draw(st.booleans()) else content.removesuffix(b"\n")


@st.composite
def edited(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` after a few random edits, or something else altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(contents())
    lines = content.split(b"\n")
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(lines)))
        end = draw(st.integers(start, min(len(lines), start + 3)))
        lines[start:end] = draw(st.lists(st.sampled_from(TRICKY), max_size=3))
    return b"\n".join(lines)


@st.composite
def long_pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A long file and an edit of it, far enough apart for several hunks."""
    before = b"".join(b"%d\n" % (number % 7) for number in range(draw(st.integers(0, 60))))
    return before, draw(edited(before))


PAIRS = contents().flatmap(lambda content: st.tuples(st.just(content), edited(content))) | long_pairs()


@quick
@given(PAIRS)
def test_any_edit_applies_and_goes_back(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    assume(old != new)
    patch = parse(file_diff("x.py", old, new), "p")
    assert apply_series(reader({"x.py": old}), [patch]) == {"x.py": new}
    assert apply_series(reader({"x.py": new}), [patch], reverse=True) == {"x.py": old}


@quick
@given(st.lists(contents().filter(bool), min_size=2, max_size=4), st.data())
def test_any_series_applies_and_goes_back(start: list[bytes], data: st.DataObject) -> None:
    tree: dict[str, bytes | None] = {f"f{number}.py": content for number, content in enumerate(start)}
    first, patches = dict(tree), []
    for number in range(data.draw(st.integers(1, 4))):
        changes: dict[str, tuple[bytes | None, bytes | None]] = {}
        for path, content in tree.items():
            new = data.draw(st.none() | edited(content or b"x\n").filter(bool))
            if new != content and (content or new):
                changes[path] = (content, new)
        if changes:
            patches.append(parse(diff(changes), f"{number}"))
            tree.update({path: new for path, (_, new) in changes.items()})
    expected = {path: content for path, content in tree.items() if content != first[path]}
    forth = apply_series(first.get, patches)
    assert forth == expected
    back = apply_series(overlay_reader(first.get, forth), patches, reverse=True)
    assert back == {path: first[path] for path in expected}


def numbered(count: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(count))


@st.composite
def unique_edits(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A file of which no two lines are equal, and an edit of it."""
    old = numbered(draw(st.integers(8, 40)))
    lines = split_lines(old)
    for number in sorted(draw(st.sets(st.integers(0, len(lines) - 1), min_size=1, max_size=4)), reverse=True):
        lines[number : number + draw(st.integers(0, 1))] = [b"new %d\n" % number]
    return old, b"".join(lines)


@quick
@given(unique_edits(), st.integers(0, 40), st.integers(1, 3))
def test_a_tree_that_shifted_is_refused_and_the_place_is_named(pair: tuple[bytes, bytes], at: int, count: int) -> None:
    old, new = pair
    patch = parse(file_diff("x.py", old, new), "p")
    lines = split_lines(old)
    at %= min(patch.files[0].hunks[0].old_index + 1, len(lines))
    shifted = b"".join([*lines[:at], *[b"other %d\n" % number for number in range(count)], *lines[at:]])
    with pytest.raises(PatchProblems) as caught:
        apply_series(reader({"x.py": shifted}), [patch])
    assert len(caught.value.problems) == len(patch.files[0].hunks)
    for problem, hunk in zip(caught.value.problems, patch.files[0].hunks, strict=True):
        assert problem.hint == f"context found at line {hunk.old_index + 1 + count}: refresh the patch"
    moved = reanchor(patch.files[0], shifted)
    assert moved is not None
    assert moved[1] == [hunk.old_index + count for hunk in patch.files[0].hunks]


@quick
@given(unique_edits(), st.sampled_from([-2, -1, 1, 2]), st.booleans(), st.booleans())
def test_shifted_hunk_headers_are_refused(pair: tuple[bytes, bytes], by: int, old_side: bool, new_side: bool) -> None:
    assume(old_side or new_side)
    old, new = pair
    out = []
    for line in file_diff("x.py", old, new).split(b"\n"):
        if line.startswith(b"@@"):
            sides = [side[1:].split(b",") for side in line.split(b" ")[1:3]]
            starts = [int(side[0]) + by * on for side, on in zip(sides, (old_side, new_side), strict=True)]
            assume(min(starts) >= 0)
            counts = [side[1] if len(side) > 1 else b"1" for side in sides]
            line = b"@@ -%d,%s +%d,%s @@" % (starts[0], counts[0], starts[1], counts[1])
        out.append(line)
    with pytest.raises(PatchProblems):
        apply_series(reader({"x.py": old}), [scan(b"\n".join(out), "p")])


@quick
@given(unique_edits(), st.data())
def test_a_lost_or_doubled_line_is_refused(pair: tuple[bytes, bytes], data: st.DataObject) -> None:
    old, new = pair
    lines = split_lines(file_diff("x.py", old, new))
    at = data.draw(st.integers(3, len(lines) - 1))
    again = data.draw(st.integers(0, 1)) * 2
    broken = b"".join([*lines[:at], *[lines[at]] * again, *lines[at + 1 :]])
    with pytest.raises(PatchProblems):
        apply_series(reader({"x.py": old}), [scan(broken, "p")])


@quick
@given(st.binary() | st.lists(st.sampled_from(GOOD.split(b"\n") + TRICKY)).map(b"\n".join))
def test_any_bytes_give_problems_and_nothing_else(data: bytes) -> None:
    patch = scan(data, "p")
    assert isinstance(patch, Patch)
    try:
        changes = apply_series(reader(TREE), [patch])
    except PatchProblems as error:
        assert error.problems and all(problem.what for problem in error.problems)
    else:
        assert changes and not patch.problems
