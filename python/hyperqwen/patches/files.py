"""The tree that patches apply to, on disk: read without following links, write whole files or none."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hyperqwen.errors import BadInputError
from hyperqwen.patches.apply import Reader, UnsafePath

_SKIPPED = ("__pycache__",)


def find_tree(folder: Path) -> Path:
    """The folder that holds `vllm/`: `folder` itself, or `site` in it, as in an unpacked wheel.

    Raises:
        BadInputError: if neither does.
    """
    for root in (folder, folder / "site"):
        if (root / "vllm").is_dir():
            return root
    raise BadInputError(
        f"{folder} holds neither vllm/ nor site/vllm/",
        "give the unpacked vLLM ('./hq build .#vllm-source' makes one at ./result), or a copy of it",
    )


def tree_reader(root: Path) -> Reader:
    """A reader for `apply_series` over the folder `root`.

    `root` itself may be a link (`result` of a build is one). Below it a link is refused, the file's own name
    included: what is patched must be what is imported.
    """
    base = root.resolve()

    def read(path: str) -> bytes | None:
        here = base
        for part in path.split("/"):
            here = here / part
            if here.is_symlink():
                raise UnsafePath(f"{here.relative_to(base).as_posix()} is a symbolic link in the tree")
        try:
            return here.read_bytes()
        except FileNotFoundError:
            return None
        except (IsADirectoryError, NotADirectoryError) as error:
            raise UnsafePath("not a plain file in the tree") from error

    return read


def overlay_reader(read: Reader, changes: Mapping[str, bytes | None]) -> Reader:
    """A reader of the tree that `read` reads after `changes`."""
    return lambda path: changes[path] if path in changes else read(path)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was: temporary file beside it, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~mask
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_changes(changes: Mapping[str, bytes | None], root: Path) -> None:
    """Write what `apply_series` gave below `root`: files replaced whole, removed files unlinked.

    A file that is a link in `root` (a link farm over a read-only tree) is replaced, its target is left alone.

    Raises:
        UnsafePath: if a folder on the way is a link, before anything is written.
    """
    for path in changes:
        here = root
        for part in path.split("/")[:-1]:
            here = here / part
            if here.is_symlink():
                raise UnsafePath(f"{here} is a symbolic link: {path} would be written outside {root}")
    for path, content in changes.items():
        target = root / path
        if target.is_symlink():
            target.unlink()
        if content is None:
            target.unlink(missing_ok=True)
        else:
            write_atomic(target, content)


def copy_patched(tree: Path, changes: Mapping[str, bytes | None], out: Path) -> None:
    """Make `out` a writable copy of `tree` with `changes`. It appears whole or not at all.

    Raises:
        BadInputError: if `out` exists and is not an empty folder.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise BadInputError(f"{out} exists and is not an empty folder", "name another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        shutil.copytree(
            tree.resolve(),
            stage,
            symlinks=True,
            ignore=shutil.ignore_patterns(*_SKIPPED),
            copy_function=_copy_writable,
            dirs_exist_ok=True,
        )
        # copytree gives folders the modes of a read-only store only after it has filled them.
        for folder, _, _ in os.walk(stage):
            os.chmod(folder, 0o755)
        write_changes(changes, stage)
        if out.exists():
            out.rmdir()
        os.rename(stage, out)
    except BaseException:
        for folder, _, _ in os.walk(stage):
            os.chmod(folder, 0o755)
        shutil.rmtree(stage)
        raise


def _copy_writable(source: str, target: str) -> str:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return target
    shutil.copyfile(source, target)
    os.chmod(target, os.stat(source).st_mode & 0o777 | 0o200)
    return target


def tree_files(root: Path) -> Iterator[str]:
    """Paths of all files and links below `root`, sorted; byte code is not counted."""
    base = root.resolve()
    found = []
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            if not name.endswith(".pyc"):
                found.append(Path(folder, name).relative_to(base).as_posix())
    return iter(sorted(found))
