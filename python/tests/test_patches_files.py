"""Trees on disk: no link is followed, nothing is half written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hyperqwen.errors import BadInputError
from hyperqwen.patches import files
from hyperqwen.patches.apply import UnsafePath
from hyperqwen.patches.files import (
    copy_patched,
    find_tree,
    tree_files,
    tree_reader,
    write_atomic,
    write_changes,
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "vllm" / "sub").mkdir(parents=True)
    (root / "vllm" / "a.py").write_bytes(b"a\r\n")
    (root / "vllm" / "sub" / "b.py").write_bytes(b"b\n")
    (root / "vllm" / "_C.so").write_bytes(b"\x7fELF")
    (root / "vllm" / "__pycache__").mkdir()
    (root / "vllm" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"code")
    return root


def test_reader_gives_bytes_or_none(tree: Path) -> None:
    read = tree_reader(tree)
    assert read("vllm/a.py") == b"a\r\n"
    assert read("vllm/none.py") is None
    assert read("none/none.py") is None


def test_reader_takes_a_linked_root(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "result").symlink_to(tree)
    assert tree_reader(tmp_path / "result")("vllm/sub/b.py") == b"b\n"


def test_reader_refuses_links_below_the_root(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x.py").write_bytes(b"secret\n")
    (tree / "vllm" / "out").symlink_to(tmp_path / "outside")
    (tree / "vllm" / "x.py").symlink_to(tmp_path / "outside" / "x.py")
    (tree / "vllm" / "dangling.py").symlink_to("nowhere")
    read = tree_reader(tree)
    for path, link in (
        ("vllm/out/x.py", "vllm/out"),
        ("vllm/out/new.py", "vllm/out"),
        ("vllm/x.py", "vllm/x.py"),
        ("vllm/dangling.py", "vllm/dangling.py"),
    ):
        with pytest.raises(UnsafePath, match=f"^{link} is a symbolic link in the tree$"):
            read(path)


def test_reader_refuses_what_is_no_file(tree: Path) -> None:
    for path in ("vllm/sub", "vllm/a.py/b.py"):
        with pytest.raises(UnsafePath, match="not a plain file"):
            tree_reader(tree)(path)


def test_write_changes_replaces_adds_and_removes(tree: Path) -> None:
    write_changes({"vllm/a.py": b"new\n", "vllm/deep/er/c.py": b"c\n", "vllm/sub/b.py": None}, tree)
    assert (tree / "vllm/a.py").read_bytes() == b"new\n"
    assert (tree / "vllm/deep/er/c.py").read_bytes() == b"c\n"
    assert not (tree / "vllm/sub/b.py").exists()


def test_write_changes_leaves_the_target_of_a_link_alone(tree: Path, tmp_path: Path) -> None:
    farm = tmp_path / "farm"
    (farm / "vllm").mkdir(parents=True)
    (farm / "vllm" / "a.py").symlink_to(tree / "vllm" / "a.py")
    write_changes({"vllm/a.py": b"new\n"}, farm)
    assert not (farm / "vllm/a.py").is_symlink()
    assert (farm / "vllm/a.py").read_bytes() == b"new\n"
    assert (tree / "vllm/a.py").read_bytes() == b"a\r\n"


def test_write_changes_refuses_a_linked_folder_before_writing(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tree / "vllm" / "out").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafePath, match="would be written outside"):
        write_changes({"vllm/a.py": b"new\n", "vllm/out/x.py": b"x\n"}, tree)
    assert (tree / "vllm/a.py").read_bytes() == b"a\r\n"
    assert list((tmp_path / "outside").iterdir()) == []


def test_write_atomic_keeps_the_old_file_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "series"
    target.write_bytes(b"old\n")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(target, b"new\n")
    assert target.read_bytes() == b"old\n"
    assert list(tmp_path.iterdir()) == [target]


def test_write_atomic_keeps_the_mode(tmp_path: Path) -> None:
    target = tmp_path / "series"
    target.write_bytes(b"old\n")
    target.chmod(0o640)
    write_atomic(target, b"new\n")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "fresh", b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640


def read_only(root: Path) -> None:
    """Give a tree the modes of the Nix store."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            os.chmod(os.path.join(folder, name), 0o444)
        os.chmod(folder, 0o555)


def test_copy_is_writable_and_whole(tree: Path, tmp_path: Path) -> None:
    read_only(tree)
    out = tmp_path / "out"
    copy_patched(tree, {"vllm/a.py": b"new\n", "vllm/sub/b.py": None, "vllm/n.py": b"n\n"}, out)
    assert list(tree_files(out)) == ["vllm/_C.so", "vllm/a.py", "vllm/n.py"]
    assert not (out / "vllm" / "__pycache__").exists()
    for path in (out, out / "vllm", out / "vllm" / "_C.so", out / "vllm" / "n.py"):
        assert path.stat().st_mode & 0o200, path
    assert (tree / "vllm/a.py").read_bytes() == b"a\r\n"


def test_copy_takes_an_empty_folder_and_no_other(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    copy_patched(tree, {}, tmp_path / "empty")
    assert (tmp_path / "empty/vllm/a.py").is_file()
    with pytest.raises(BadInputError, match="exists and is not an empty folder"):
        copy_patched(tree, {}, tmp_path / "empty")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadInputError, match="exists and is not an empty folder"):
        copy_patched(tree, {}, tmp_path / "file")


def test_copy_that_fails_leaves_nothing(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_only(tree)

    def full(changes: object, root: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_changes", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        copy_patched(tree, {}, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_tree_files_lists_links_but_no_byte_code(tree: Path) -> None:
    (tree / "vllm" / "link").symlink_to("sub")
    assert list(tree_files(tree)) == ["vllm/_C.so", "vllm/a.py", "vllm/link", "vllm/sub/b.py"]


def test_find_tree(tree: Path, tmp_path: Path) -> None:
    assert find_tree(tree) == tree
    (tmp_path / "wheel").mkdir()
    tree.rename(tmp_path / "wheel" / "site")
    assert find_tree(tmp_path / "wheel") == tmp_path / "wheel" / "site"
    with pytest.raises(BadInputError, match="neither vllm/ nor site/vllm/") as caught:
        find_tree(tmp_path)
    assert caught.value.fix is not None and "vllm-source" in caught.value.fix
