"""Writing patches: from edited copies of either tree, and by moving them to where their context stands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperqwen.patches.apply import CONTEXT, PatchProblems, apply_series, parse, split_lines
from hyperqwen.patches.files import copy_patched, tree_reader
from hyperqwen.patches.make import EditError, base_readers, file_diff, header_text, new_patch, refresh_patch
from hyperqwen.patches.series import load, read_series

A = b"".join(b"a%d\n" % number for number in range(60))
B = b"".join(b"b%d\n" % number for number in range(20))
FIELDS = {
    "Subject": "change a line",
    "Kind": "fix",
    "Reason": "a reason that is long enough to be wrapped onto a second line of the header, as most of them are",
    "Upstream": "none known",
    "Retires": "when upstream does it",
    "Seam": "none",
    "Test": "checks/test_x.py",
}


class Box:
    """A checkout, a vLLM tree and copies of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.patches = root / "repo" / "patches"
        self.patches.mkdir(parents=True)
        (self.patches / "series").write_text("# the series\n")
        self.tree = root / "tree"
        self.write(self.tree, {"vllm/a.py": A, "vllm/b.py": B, "vllm/_C.so": b"\x7fELF", "vllm/d/c.py": b"c\n"})

    @staticmethod
    def write(tree: Path, files: dict[str, bytes]) -> None:
        for path, content in files.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(content)

    def copy(self, name: str, patched: bool = False) -> Path:
        changes = apply_series(tree_reader(self.tree), read_series(self.patches).patches) if patched else {}
        copy_patched(self.tree, changes, self.root / name)
        return self.root / name

    def new(self, name: str, edited: Path, tree: Path | None = None, **fields: str) -> Path:
        series = read_series(self.patches)
        return new_patch(series, name, tree or self.tree, edited, {**FIELDS, **fields}).path

    def result(self) -> dict[str, bytes | None]:
        return apply_series(tree_reader(self.tree), [entry.patch for entry in load(self.patches)])


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def edit(tree: Path, path: str, old: bytes, new: bytes) -> None:
    content = (tree / path).read_bytes()
    assert content.count(old) == 1
    (tree / path).write_bytes(content.replace(old, new))


def test_a_new_patch_ends_the_series_and_gives_the_edit(box: Box) -> None:
    copy = box.copy("copy")
    edit(copy, "vllm/a.py", b"a30\n", b"A30\n")
    (copy / "vllm/new.py").write_bytes(b"n\n")
    (copy / "vllm/d/c.py").unlink()
    path = box.new("first-change", copy)
    assert path == box.patches / "0001-first-change.patch"
    assert (box.patches / "series").read_text() == "# the series\n0001-first-change.patch\n"
    assert box.result() == {
        "vllm/a.py": A.replace(b"a30\n", b"A30\n"),
        "vllm/new.py": b"n\n",
        "vllm/d/c.py": None,
    }
    (entry,) = load(box.patches)
    assert entry.header is not None and entry.header.reason == FIELDS["Reason"]
    assert all(len(line) <= 100 for line in entry.patch.header)


def test_the_diff_is_as_git_writes_it() -> None:
    assert file_diff("vllm/a.py", A, A.replace(b"a30\n", b"A30\n").replace(b"a50\n", b"")) == (
        b"diff --git a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\n+++ b/vllm/a.py\n"
        b"@@ -28,7 +28,7 @@\n a27\n a28\n a29\n-a30\n+A30\n a31\n a32\n a33\n"
        b"@@ -48,7 +48,6 @@\n a47\n a48\n a49\n-a50\n a51\n a52\n a53\n"
    )
    assert file_diff("n.py", None, b"x") == (
        b"diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n"
        b"@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n"
    )
    assert file_diff("n.py", b"x\n", None) == (
        b"diff --git a/n.py b/n.py\ndeleted file mode 100644\n--- a/n.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    )
    assert file_diff("n.py", b"x\n", b"x\n") == b""
    with pytest.raises(ValueError, match="an empty file"):
        file_diff("n.py", None, b"")


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(0, 59), min_size=1))
def test_hunks_have_full_context_and_never_touch(changed: set[int]) -> None:
    lines = split_lines(A)
    new = b"".join(b"new\n" if number in changed else line for number, line in enumerate(lines))
    (file,) = parse(file_diff("x.py", A, new), "p").files
    end = None
    for hunk in file.hunks:
        inside = changed & set(range(hunk.old_index, hunk.old_index + hunk.old_count))
        assert hunk.leading == min(CONTEXT, min(inside))
        assert hunk.trailing == min(CONTEXT, 59 - max(inside))
        assert end is None or hunk.old_index > end
        end = hunk.old_index + hunk.old_count
    assert sum(line.tag == "-" for hunk in file.hunks for line in hunk.lines) == len(changed)


@pytest.mark.parametrize("patched_copy", [False, True])
@pytest.mark.parametrize("patched_tree", [False, True])
def test_a_second_patch_from_either_tree_and_either_copy(box: Box, patched_tree: bool, patched_copy: bool) -> None:
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"a10\na10b\n")
    edit(copy, "vllm/b.py", b"b10\n", b"")
    box.new("one", copy)
    tree = box.copy("patched", patched=True) if patched_tree else box.tree
    copy = box.copy("two", patched=patched_copy)
    edit(copy, "vllm/a.py", b"a30\n", b"A30\n")
    edit(copy, "vllm/d/c.py", b"c\n", b"C\n")
    path = box.new("two", copy, tree)
    assert [file.path for file in parse(path.read_bytes(), "p").files] == ["vllm/a.py", "vllm/d/c.py"]
    assert box.result() == {
        "vllm/a.py": A.replace(b"a10\n", b"a10\na10b\n").replace(b"a30\n", b"A30\n"),
        "vllm/b.py": B.replace(b"b10\n", b""),
        "vllm/d/c.py": b"C\n",
    }


def test_an_edit_where_the_series_has_one_needs_a_patched_copy(box: Box) -> None:
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"A10\n")
    edit(copy, "vllm/b.py", b"b10\n", b"B10\n")
    box.new("one", copy)
    copy = box.copy("two")
    edit(copy, "vllm/a.py", b"a11\n", b"A11\n")
    with pytest.raises(EditError, match=r"vllm/a\.py: the series changes this file too, at the place of your edit"):
        box.new("two", copy)
    copy = box.copy("three", patched=True)
    edit(copy, "vllm/a.py", b"a11\n", b"A11\n")
    box.new("two", copy)
    assert box.result()["vllm/a.py"] == A.replace(b"a10\n", b"A10\n").replace(b"a11\n", b"A11\n")


@pytest.mark.parametrize("patched_copy", [False, True])
def test_every_file_of_the_series_edited(box: Box, patched_copy: bool) -> None:
    """No file is left as it was that would show which tree the copy was made from."""
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"A10\n")
    box.new("one", copy)
    copy = box.copy("two", patched=patched_copy)
    content = (copy / "vllm/a.py").read_bytes()
    (copy / "vllm/a.py").write_bytes(content.replace(b"a30\n", b"A30\nA31\nA32\n").replace(b"a50\n", b""))
    box.new("two", copy)
    expected = A.replace(b"a10\n", b"A10\n").replace(b"a30\n", b"A30\nA31\nA32\n").replace(b"a50\n", b"")
    assert box.result() == {"vllm/a.py": expected}


def test_a_copy_that_could_be_either_is_refused(box: Box) -> None:
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"A10\n")
    box.new("one", copy)
    copy = box.copy("two")
    edit(copy, "vllm/a.py", b"a10\n", b"AA10\n")
    with pytest.raises(EditError, match="cannot tell whether the edited copy has the series applied"):
        box.new("two", copy)
    assert sorted(path.name for path in box.patches.iterdir()) == ["0001-one.patch", "series"]


def test_what_a_patch_cannot_carry_is_named_in_full(box: Box) -> None:
    copy = box.copy("copy")
    edit(copy, "vllm/a.py", b"a30\n", b"A30\r\n")
    (copy / "vllm/_C.so").write_bytes(b"\x7fELG")
    (copy / "vllm/b.py~").write_bytes(B)
    (copy / "vllm/my notes.py").write_bytes(b"x\n")
    with pytest.raises(EditError) as caught:
        box.new("one", copy)
    assert str(caught.value).splitlines()[1:] == [
        "  vllm/_C.so: the file is not a .py file",
        "  vllm/a.py: the file has CRLF line ends, which a patch may not hold",
        "  vllm/b.py~: the path has a character other than letters, digits and _ . + -",
        "  vllm/my notes.py: the path has a character other than letters, digits and _ . + -",
    ]
    assert sorted(path.name for path in box.patches.iterdir()) == ["series"]


def test_many_refused_files_are_counted(box: Box) -> None:
    copy = box.copy("copy")
    box.write(copy, {f"vllm/{number}.txt": b"x" for number in range(50)})
    with pytest.raises(EditError) as caught:
        box.new("one", copy)
    assert len(str(caught.value).splitlines()) == 22
    assert str(caught.value).endswith("and 30 more")


def test_nothing_to_write(box: Box) -> None:
    with pytest.raises(EditError, match="nothing to write"):
        box.new("one", box.copy("copy"))
    copy = box.copy("empty-file")
    (copy / "vllm/empty.py").write_bytes(b"")
    with pytest.raises(EditError, match="an empty file cannot be added"):
        box.new("one", copy)


def test_a_bad_name_or_header_writes_nothing(box: Box) -> None:
    copy = box.copy("copy")
    edit(copy, "vllm/a.py", b"a30\n", b"A30\n")
    with pytest.raises(EditError, match="patch name 'No Good'"):
        box.new("No Good", copy)
    with pytest.raises(PatchProblems) as caught:
        box.new("one", copy, Kind="hack", Retires="never", Test="/tmp/x")
    assert len(caught.value.problems) == 3
    (box.patches / "stray").write_text("")
    with pytest.raises(PatchProblems, match="stray lies beside the series"):
        box.new("one", copy)
    (box.patches / "stray").unlink()
    assert [path.name for path in box.patches.iterdir()] == ["series"]
    assert (box.patches / "series").read_text() == "# the series\n"


def test_a_series_that_cannot_be_written_leaves_no_patch(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperqwen.patches import files, make

    copy = box.copy("copy")
    edit(copy, "vllm/a.py", b"a30\n", b"A30\n")
    sound = files.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.name == "series":
            raise OSError(28, "No space left on device")
        sound(path, data)

    monkeypatch.setattr(make, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        box.new("one", copy)
    assert [path.name for path in box.patches.iterdir()] == ["series"]


def test_a_tree_that_is_neither(box: Box) -> None:
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"A10\n")
    box.new("one", copy)
    edit(box.tree, "vllm/a.py", b"a11\n", b"other\n")
    with pytest.raises(PatchProblems, match="file line 12: the context line differs: expected 'a11', found 'other'"):
        base_readers(read_series(box.patches), tree_reader(box.tree))


def two_patches(box: Box) -> None:
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"A10\n")
    edit(copy, "vllm/a.py", b"a40\n", b"A40\n")
    box.new("one", copy)
    copy = box.copy("two", patched=True)
    edit(copy, "vllm/a.py", b"a20\n", b"A20\n")
    (copy / "vllm/n.py").write_bytes(b"n\n")
    box.new("two", copy)


def test_refresh_moves_hunks_and_keeps_the_header(box: Box) -> None:
    two_patches(box)
    header = load(box.patches)[0].patch.header
    shifted = b"# licence\n" + A.replace(b"a25\n", b"")
    (box.tree / "vllm/a.py").write_bytes(shifted)
    with pytest.raises(PatchProblems):
        box.result()
    written = refresh_patch(read_series(box.patches), "0001-one", box.tree)
    assert written.moves == ("vllm/a.py, hunk 1: line 8 -> 9",)
    with pytest.raises(PatchProblems):
        box.result()
    written = refresh_patch(read_series(box.patches), "0002-two.patch", box.tree)
    assert written.moves == ("vllm/a.py, hunk 1: line 18 -> 19",)
    assert box.result() == {
        "vllm/a.py": shifted.replace(b"a10\n", b"A10\n").replace(b"a40\n", b"A40\n").replace(b"a20\n", b"A20\n"),
        "vllm/n.py": b"n\n",
    }
    assert load(box.patches)[0].patch.header == header


def test_refresh_changes_nothing_where_all_is_well(box: Box) -> None:
    two_patches(box)
    before = {path: path.read_bytes() for path in box.patches.iterdir()}
    assert refresh_patch(read_series(box.patches), "0001-one", box.tree).moves == ()
    assert {path: path.read_bytes() for path in box.patches.iterdir()} == before


def test_refresh_keeps_what_git_wrote_where_nothing_moved(box: Box) -> None:
    two_patches(box)
    path = box.patches / "0001-one.patch"
    lines = path.read_bytes().splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith(b"diff "))
    lines.insert(start + 1, b"index 0123abc..4567def 100644\n")
    lines = [line.replace(b" @@\n", b" @@ def start():\n") if line.startswith(b"@@ ") else line for line in lines]
    path.write_bytes(b"".join(lines))

    written = refresh_patch(read_series(box.patches), "0001-one", box.tree)

    assert path.read_bytes() == b"".join(lines)
    assert (written.changed, written.moves, written.files) == (False, (), ("vllm/a.py",))
    same = box.root / "same"
    copy_patched(box.tree, apply_series(tree_reader(box.tree), [load(box.patches)[0].patch]), same)
    assert not refresh_patch(read_series(box.patches), "0001-one", box.tree, same).changed
    (box.tree / "vllm/a.py").write_bytes(b"# licence\n" + A)
    assert refresh_patch(read_series(box.patches), "0001-one", box.tree).changed
    assert b"index" not in path.read_bytes(), "a moved patch is written anew"


@pytest.mark.parametrize("name", ["one", "one.patch", "0001-one", "0003-one"])
def test_a_second_patch_of_a_name_is_refused(box: Box, name: str) -> None:
    two_patches(box)
    before = {path: path.read_bytes() for path in box.patches.iterdir()}
    with pytest.raises(EditError, match=r"has a patch of that name, 0001-one\.patch") as raised:
        box.new(name, box.copy("again"))
    assert "patches refresh 0001-one.patch" in str(raised.value)
    assert {path: path.read_bytes() for path in box.patches.iterdir()} == before


def test_refresh_leaves_what_is_not_found_once(box: Box) -> None:
    two_patches(box)
    before = {path: path.read_bytes() for path in box.patches.iterdir()}
    (box.tree / "vllm/a.py").write_bytes(b"#\n" + A + A)
    with pytest.raises(PatchProblems, match="context found at lines 9, 69: refresh the patch by hand"):
        refresh_patch(read_series(box.patches), "0001-one", box.tree)
    (box.tree / "vllm/a.py").write_bytes(A.replace(b"a11\n", b"other\n"))
    with pytest.raises(PatchProblems, match="expected 'a11', found 'other'"):
        refresh_patch(read_series(box.patches), "0001-one", box.tree)
    with pytest.raises(EditError, match="no patch 'none'"):
        refresh_patch(read_series(box.patches), "none", box.tree)
    assert {path: path.read_bytes() for path in box.patches.iterdir()} == before


def test_refresh_from_an_edited_copy(box: Box) -> None:
    two_patches(box)
    (box.tree / "vllm/a.py").write_bytes(A.replace(b"a11\n", b"other\n"))
    copy = box.root / "copy"
    shutil.copytree(box.tree, copy)
    edit(copy, "vllm/a.py", b"a10\n", b"AA10\n")
    written = refresh_patch(read_series(box.patches), "0001-one", box.tree, copy)
    assert written.files == ("vllm/a.py",)
    result = box.result()["vllm/a.py"]
    assert result == A.replace(b"a11\n", b"other\n").replace(b"a10\n", b"AA10\n").replace(b"a20\n", b"A20\n")


def test_refresh_of_a_patch_that_upstream_has_taken(box: Box) -> None:
    copy = box.copy("one")
    edit(copy, "vllm/a.py", b"a10\n", b"A10\n")
    box.new("one", copy)
    edit(box.tree, "vllm/a.py", b"a10\n", b"A10\n")
    with pytest.raises(EditError, match=r"nothing is left of 0001-one\.patch"):
        refresh_patch(read_series(box.patches), "0001-one", box.tree, box.tree)
    with pytest.raises(PatchProblems, match="applied before"):
        refresh_patch(read_series(box.patches), "0001-one", box.tree)


def test_header_text_wraps_and_normalises() -> None:
    text = header_text({**FIELDS, "Reason": "one\n two   three " + "word " * 40})
    assert text.endswith("\n\n")
    assert "Reason: one two three word" in text
    assert all(len(line) <= 100 for line in text.splitlines())
