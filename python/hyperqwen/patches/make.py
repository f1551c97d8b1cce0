"""Write patches: from an edited copy of the tree, or by moving a patch to where its context stands now."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from hyperqwen.errors import BadInputError
from hyperqwen.patches.apply import (
    CONTEXT,
    NO_NEWLINE,
    FilePatch,
    Patch,
    PatchProblems,
    Problem,
    Reader,
    apply_series,
    parse,
    path_error,
    reanchor,
    split_lines,
)
from hyperqwen.patches.files import overlay_reader, tree_files, tree_reader, write_atomic
from hyperqwen.patches.series import FIELDS, OPTIONAL, SERIES, Series, next_name, parse_header

_WIDTH = 100
_SHOWN = 20

Opcode = tuple[str, int, int, int, int]
Changes = Mapping[str, tuple[bytes | None, bytes | None]]
"""Path to the file's content before and after; None where there is no file."""


class EditError(BadInputError):
    """An edited tree, or a patch to refresh, from which no patch can be made."""


def _opcodes(old: list[bytes], new: list[bytes]) -> list[Opcode]:
    """Edit steps over the whole files. Common ends are cut off first: the matcher is quadratic at worst."""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle = SequenceMatcher(
        None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False
    ).get_opcodes()
    codes: list[Opcode] = [("equal", 0, head, 0, head)] if head else []
    codes += [(tag, a + head, b + head, c + head, d + head) for tag, a, b, c, d in middle]
    if tail:
        codes.append(("equal", len(old) - tail, len(old), len(new) - tail, len(new)))
    return codes


def _groups(codes: list[Opcode]) -> list[list[Opcode]]:
    """Split edit steps into hunks with `CONTEXT` lines around each; hunks that would touch are one."""
    groups: list[list[Opcode]] = [[]]
    for index, (tag, a, b, c, d) in enumerate(codes):
        if tag != "equal":
            groups[-1].append((tag, a, b, c, d))
            continue
        first, last = index == 0, index == len(codes) - 1
        if not first and not last and b - a <= 2 * CONTEXT:
            groups[-1].append((tag, a, b, c, d))
            continue
        if not first:
            keep = min(CONTEXT, b - a)
            groups[-1].append((tag, a, a + keep, c, c + keep))
        if not last:
            if not first:
                groups.append([])
            keep = min(CONTEXT, b - a)
            groups[-1].append((tag, b - keep, b, d - keep, d))
    return [group for group in groups if any(tag != "equal" for tag, *_ in group)]


def _range(start: int, count: int) -> str:
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"


def file_diff(path: str, old: bytes | None, new: bytes | None) -> bytes:
    """The diff of one file in git's form, without an index line; empty where nothing changes.

    Raises:
        ValueError: for an empty file that is added or removed, which has no lines to show.
    """
    if old == new:
        return b""
    if not old and not new:
        raise ValueError(f"{path}: an empty file cannot be added or removed by a patch; give it a line")
    before, after = split_lines(old or b""), split_lines(new or b"")
    out = [f"diff --git a/{path} b/{path}\n".encode()]
    if old is None:
        out.append(b"new file mode 100644\n")
    if new is None:
        out.append(b"deleted file mode 100644\n")
    out.append(f"--- {'/dev/null' if old is None else f'a/{path}'}\n".encode())
    out.append(f"+++ {'/dev/null' if new is None else f'b/{path}'}\n".encode())

    def side(tag: str, lines: Sequence[bytes]) -> None:
        for line in lines:
            out.append(tag.encode() + line)
            if not line.endswith(b"\n"):
                out.append(b"\n" + NO_NEWLINE + b"\n")

    for group in _groups(_opcodes(before, after)):
        a, c = group[0][1], group[0][3]
        b, d = group[-1][2], group[-1][4]
        out.append(f"@@ -{_range(a, b - a)} +{_range(c, d - c)} @@\n".encode())
        for tag, a, b, c, d in group:
            if tag == "equal":
                side(" ", before[a:b])
            else:
                side("-", before[a:b])
                side("+", after[c:d])
    return b"".join(out)


def diff(changes: Changes) -> bytes:
    """The diff of several files, sorted by path."""
    return b"".join(file_diff(path, *changes[path]) for path in sorted(changes))


def header_text(fields: Mapping[str, str]) -> str:
    """A patch's header from its fields, long values wrapped onto indented lines; an optional one may be missing."""
    lines: list[str] = []
    for field in (*FIELDS, *(name for name in OPTIONAL if name in fields)):
        value = " ".join(fields[field].split())
        if field == "Subject":
            lines.append(f"{field}: {value}")
            continue
        lines += textwrap.wrap(
            f"{field}: {value}",
            _WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n\n"


@dataclass(frozen=True, slots=True)
class Written:
    """A patch file: its path, the files that it touches, hunks that were moved, and whether its bytes are new."""

    path: Path
    files: tuple[str, ...]
    moves: tuple[str, ...] = ()
    changed: bool = True


def new_patch(series: Series, name: str, tree: Path, edited: Path, fields: Mapping[str, str]) -> Written:
    """Write a patch for what differs between `tree` and `edited`, and add it to the end of the series.

    `tree` is the unpacked vLLM, without or with the series applied; `edited` is an edited copy of either.

    Args:
        name: the patch's name; its number and suffix are added where they are missing.
        fields: the header's fields, by their names in `series.FIELDS` and `series.OPTIONAL`.

    Raises:
        EditError: for a name that is none or is taken; if the copy holds something that a patch cannot carry,
            or nothing new.
        PatchProblems: if the series, the header or the new patch is not right; nothing is written then.
    """
    if series.all_problems:
        raise PatchProblems(series.all_problems)
    taken = _namesake(series, name)
    if taken is not None:
        raise EditError(
            f"patch name {name!r}: the series has a patch of that name, {taken}",
            f"change it with 'hyperqwen patches refresh {taken} --tree TREE --edited COPY', or choose another name",
        )
    try:
        full = next_name(series, name)
    except ValueError as error:
        raise EditError(str(error)) from None
    header = header_text(fields)
    found = parse_header(header.splitlines(), full)[1]
    if found:
        raise PatchProblems(found)

    pristine, base = base_readers(series, tree_reader(tree))
    changes = edits(series, pristine, base, tree, edited)
    if not changes:
        raise EditError(
            f"nothing to write: {edited} does not differ from {tree} with the series applied",
            "edit a .py file of the copy first",
        )
    data = header.encode() + _checked_diff(changes, full)
    apply_series(pristine, [*series.patches, parse(data, full)])

    path = series.folder / full
    write_atomic(path, data)
    order = series.folder / SERIES
    text = order.read_text(encoding="utf-8")
    end = "" if not text or text.endswith("\n") else "\n"
    try:
        write_atomic(order, f"{text}{end}{full}\n".encode())
    except BaseException:
        path.unlink()
        raise
    return Written(path, tuple(sorted(changes)))


def _namesake(series: Series, name: str) -> str | None:
    """The patch of the series that has this name, whatever the numbers."""

    def words(text: str) -> str:
        return re.sub(r"^\d{4}-", "", text).removesuffix(".patch")

    return next((entry.name for entry in series.entries if words(entry.name) == words(name)), None)


def _checked_diff(changes: Changes, name: str) -> bytes:
    """The diff, after it has been applied forth and back in memory with the right bytes as the result."""
    try:
        data = diff(changes)
    except ValueError as error:
        raise EditError(str(error)) from None
    patch = parse(data, name)
    forth = apply_series(lambda path: changes[path][0], [patch])
    back = apply_series(lambda path: changes[path][1], [patch], reverse=True)
    for path, (old, new) in changes.items():
        if forth.get(path, old) != new or back.get(path, new) != old:
            raise AssertionError(f"the diff of {path} does not give back what it was made from")
    return data


def base_readers(series: Series, read: Reader) -> tuple[Reader, Reader]:
    """Readers of the tree without and with the series, whichever of the two `read` reads.

    Raises:
        PatchProblems: if the series neither applies to the tree nor can be taken back from it.
    """
    try:
        return read, overlay_reader(read, apply_series(read, series.patches))
    except PatchProblems as error:
        try:
            return overlay_reader(read, apply_series(read, series.patches, reverse=True)), read
        except PatchProblems:
            raise error from None


def edits(
    series: Series, pristine: Reader, base: Reader, tree: Path, edited: Path
) -> dict[str, tuple[bytes | None, bytes | None]]:
    """What an edited copy adds to the series: path to content before (series applied) and after.

    The copy may have been made from the tree with the series or without it (see `holds_series`). Without, edits to
    files that the series changes too are moved onto the patched ones.

    Raises:
        EditError: for changed files that a patch cannot carry, with all of them named.
    """
    read_edited = tree_reader(edited)
    touched = {file.path for patch in series.patches for file in patch.files}
    paths = set(tree_files(tree)) | set(tree_files(edited)) | touched
    without_series = not holds_series(touched, pristine, base, read_edited)
    refused: list[str] = []
    changes: dict[str, tuple[bytes | None, bytes | None]] = {}
    for path in sorted(paths):
        reason = path_error(path)
        if reason is not None:
            if not _same_file(tree / path, edited / path):
                refused.append(f"{path}: {reason}")
            continue
        start = pristine(path) if without_series else base(path)
        old, new = base(path), read_edited(path)
        if new == start:
            continue
        if b"\r\n" in (old or b"") + (new or b""):
            refused.append(f"{path}: the file has CRLF line ends, which a patch may not hold")
        elif without_series and path in touched:
            moved = _onto(path, start, new, old)
            if moved is None:
                refused.append(
                    f"{path}: the series changes this file too, at the place of your edit; edit a copy that "
                    "has the series applied ('hyperqwen patches apply --tree TREE --out COPY' makes one)"
                )
            else:
                changes[path] = (old, moved)
        else:
            changes[path] = (old, new)
    if refused:
        shown = refused[:_SHOWN] + [f"and {len(refused) - _SHOWN} more"] * (len(refused) > _SHOWN)
        raise EditError(f"{edited} has changes that a patch cannot carry:\n  " + "\n  ".join(shown))
    return changes


def holds_series(touched: Collection[str], pristine: Reader, base: Reader, edited: Reader) -> bool:
    """Whether an edited copy was made with the series: fewer lines then differ from `base` than from `pristine`.

    Raises:
        EditError: if as many differ from both, so that the copy could be either.
    """
    with_series = without = 0
    for path in touched:
        before, after, now = (split_lines(read(path) or b"") for read in (pristine, base, edited))
        with_series += _distance(after, now)
        without += _distance(before, now)
    if with_series == without and any(pristine(path) != base(path) for path in touched):
        raise EditError(
            "cannot tell whether the edited copy has the series applied",
            "make the copy with 'hyperqwen patches apply --tree TREE --out COPY' and edit that",
        )
    return with_series <= without


def _distance(old: list[bytes], new: list[bytes]) -> int:
    return sum(b - a + d - c for tag, a, b, c, d in _opcodes(old, new) if tag != "equal")


def _same_file(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    if not (one.is_file() and other.is_file()) or one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while block := left.read(1 << 20):
            if block != right.read(1 << 20):
                return False
    return True


def _onto(path: str, start: bytes | None, new: bytes | None, old: bytes | None) -> bytes | None:
    """The edit from `start` to `new`, made to `old`; None where it does not fit in exactly one way."""
    if start is None or new is None or old is None:
        return None
    moved = reanchor(parse(file_diff(path, start, new), path).files[0], old)
    return None if moved is None else moved[0]


def refresh_patch(series: Series, name: str, tree: Path, edited: Path | None = None) -> Written:
    """Rewrite the diff of one patch of the series for `tree`; its header stays as it is.

    A patch that makes the same of the tree as it stands is left alone, so that what git wrote into it and the applier
    does not read (index lines, the function after @@) is not lost.

    Without `edited`, each hunk moves to the one place where its context stands now. With it, the patch
    becomes what differs between the tree with the earlier patches and the edited copy, which has no later
    patches applied.

    Args:
        tree: the unpacked vLLM without any patch.

    Raises:
        EditError: if a hunk is found nowhere or in several places, or nothing is left of the patch.
        PatchProblems: if an earlier patch does not apply.
    """
    entry = next((entry for entry in series.entries if entry.name in (name, f"{name}.patch")), None)
    if entry is None:
        known = ", ".join(entry.name for entry in series.entries) or "nothing"
        raise EditError(f"no patch {name!r} in {series.folder / SERIES}", f"name one of {known}")
    earlier = series.until(entry.name)
    read = tree_reader(tree)
    base = overlay_reader(read, apply_series(read, earlier.patches))
    moves: list[str] = []
    if edited is None:
        if entry.patch.problems:
            raise PatchProblems(entry.patch.problems)
        changes, moves = _moved(entry.patch, base)
    else:
        changes = edits(earlier, read, base, tree, edited)
    if not changes:
        raise EditError(
            f"nothing is left of {entry.name}: the tree holds its result already",
            f"remove the patch and its line in {SERIES}",
        )
    path = series.folder / entry.name
    if _makes(entry.patch, changes):
        return Written(path, tuple(sorted(changes)), changed=False)
    header = "".join(f"{line}\n" for line in entry.patch.header).rstrip("\n") + "\n\n"
    write_atomic(path, header.encode() + _checked_diff(changes, entry.name))
    return Written(path, tuple(sorted(changes)), tuple(moves))


def _makes(patch: Patch, changes: Changes) -> bool:
    """Whether `patch`, at its own lines, does just these changes, and undoes them."""

    def before(path: str) -> bytes | None:
        return changes[path][0] if path in changes else None

    def after(path: str) -> bytes | None:
        return changes[path][1] if path in changes else None

    if patch.problems:
        return False
    try:
        forth = apply_series(before, [patch])
        back = apply_series(after, [patch], reverse=True)
    except PatchProblems:
        return False
    return forth == {path: new for path, (_, new) in changes.items()} and back == {
        path: old for path, (old, _) in changes.items()
    }


def _moved(patch: Patch, base: Reader) -> tuple[dict[str, tuple[bytes | None, bytes | None]], list[str]]:
    changes: dict[str, tuple[bytes | None, bytes | None]] = {}
    moves: list[str] = []
    problems: list[Problem] = []
    for file in patch.files:
        content = base(file.path)
        if content is not None and file.old is not None and file.new is not None:
            moved = reanchor(file, content)
            if moved is not None:
                changes[file.path] = (content, moved[0])
                moves += _move_lines(file, moved[1])
                continue
        # New and removed files, and whatever has no single place, are judged as the applier judges them.
        try:
            result = apply_series(base, [Patch(patch.name, (), (file,))])
        except PatchProblems as error:
            problems += error.problems
            continue
        changes[file.path] = (content, result[file.path])
    if problems:
        raise PatchProblems(problems)
    return {path: pair for path, pair in changes.items() if pair[0] != pair[1]}, moves


def _move_lines(file: FilePatch, places: list[int]) -> list[str]:
    return [
        f"{file.path}, hunk {number}: line {hunk.old_index + 1} -> {place + 1}"
        for number, (hunk, place) in enumerate(zip(file.hunks, places, strict=True), 1)
        if hunk.old_index != place
    ]
