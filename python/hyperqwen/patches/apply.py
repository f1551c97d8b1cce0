"""Parse unified diffs as git writes them and apply them exactly.

A hunk goes to the line that its header names and nowhere else, every context and removed line must be equal
byte for byte, and a patch touches `.py` files inside the tree only. GNU patch and `git apply` both accept a
hunk that has moved; after a re-pin that puts a change into the wrong function, so here it is a problem like
any other.

Everything works on bytes in memory. The caller gives a function that reads a file of the tree and gets back
the files that change; nothing is written here. All problems of all patches are found before the first is
reported.

    patch = parse(path.read_bytes(), path.name)
    changes = apply_series(reader, [patch])            # {"vllm/x.py": b"...", "vllm/gone.py": None}
    original = apply_series(patched_reader, [patch], reverse=True)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

CONTEXT = 3
"""Unchanged lines that a hunk needs before and after its change, except where the file begins or ends."""

NO_NEWLINE = rb"\ No newline at end of file"

Reader = Callable[[str], bytes | None]
"""Reads the file at a `/`-separated path below the tree; None where there is none. Raises `UnsafePath`."""

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?")
_GIT_LINE = re.compile(rb"diff --git a/(\S+) b/(\S+)")
_INDEX_LINE = re.compile(rb"index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: 100644)?")
_VERSION = re.compile(rb"\d+(?:\.\w+)+.*")
_COMPONENT = re.compile(r"[A-Za-z0-9_.+-]+")
_UNSUPPORTED: tuple[tuple[bytes, str], ...] = (
    (b"rename ", "renames a file; remove the old one and add the new one"),
    (b"copy ", "copies a file; add the new one in full"),
    (b"similarity index ", "renames or copies a file"),
    (b"dissimilarity index ", "rewrites a file; make the diff without -B"),
    (b"old mode ", "changes a file's mode"),
    (b"new mode ", "changes a file's mode"),
    (b"GIT binary patch", "changes a binary file; a patch touches .py files only"),
    (b"Binary files ", "changes a binary file; a patch touches .py files only"),
)


class UnsafePath(Exception):
    """A reader's refusal: the path leads through a symbolic link, or is not a plain file."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a patch, and where: in the patch, and in the file that it changes.

    `line` counts lines of the patch and `file_line` lines of the file, both from 1; `hunk` counts the hunks
    of a file from 1. What does not apply is None.
    """

    patch: str
    what: str
    line: int | None = None
    file: str | None = None
    hunk: int | None = None
    file_line: int | None = None
    expected: str | None = None
    found: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = self.patch if self.line is None else f"{self.patch}:{self.line}"
        place = [] if self.file is None else [self.file]
        if self.hunk is not None:
            place.append(f"hunk {self.hunk}")
        if self.file_line is not None:
            place.append(f"file line {self.file_line}")
        parts = [where, ", ".join(place), self.what] if place else [where, self.what]
        values = [
            f"{label} {value}"
            for label, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        ]
        if values:
            parts.append(", ".join(values))
        return ": ".join(parts) + (f" ({self.hint})" if self.hint else "")


class PatchProblems(Exception):
    """Every problem of a patch or a series, in the order of the series."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a hunk: `tag` is " ", "-" or "+"; `data` keeps the line end, which a file's last may lack."""

    tag: str
    data: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Hunk:
    """One changed place. `line` is its header's line in the patch; starts and counts are the header's."""

    line: int
    old_start: int
    old_count: int
    new_start: int
    new_count: int
    lines: tuple[Line, ...]

    @property
    def old(self) -> list[Line]:
        return [line for line in self.lines if line.tag != "+"]

    @property
    def new(self) -> list[Line]:
        return [line for line in self.lines if line.tag != "-"]

    @property
    def old_index(self) -> int:
        """Index of the first old line, from 0. A count of 0 makes the start the line *before* the place."""
        return self.old_start - 1 if self.old_count else self.old_start

    @property
    def new_index(self) -> int:
        return self.new_start - 1 if self.new_count else self.new_start

    @property
    def leading(self) -> int:
        """Context lines before the first change."""
        return next((i for i, line in enumerate(self.lines) if line.tag != " "), len(self.lines))

    @property
    def trailing(self) -> int:
        """Context lines after the last change."""
        return next((i for i, line in enumerate(reversed(self.lines)) if line.tag != " "), len(self.lines))

    def inverted(self) -> Hunk:
        flip = {" ": " ", "-": "+", "+": "-"}
        return Hunk(
            self.line,
            self.new_start,
            self.new_count,
            self.old_start,
            self.old_count,
            tuple(replace(line, tag=flip[line.tag]) for line in self.lines),
        )


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The change of one file: `old` is None for a new file, `new` is None for a removed one.

    `sound` is False where the parser found a problem; such a change is never applied.
    """

    line: int
    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...]
    sound: bool = True

    @property
    def path(self) -> str:
        path = self.new if self.old is None else self.old
        if path is None:
            raise ValueError("a file patch without a path")
        return path

    def inverted(self) -> FilePatch:
        return replace(self, old=self.new, new=self.old, hunks=tuple(hunk.inverted() for hunk in self.hunks))


@dataclass(frozen=True, slots=True)
class Patch:
    """A parsed patch: `header` is the text before the first diff line, `problems` is what is wrong."""

    name: str
    header: tuple[str, ...]
    files: tuple[FilePatch, ...]
    problems: tuple[Problem, ...] = ()

    def inverted(self) -> Patch:
        return replace(self, files=tuple(file.inverted() for file in reversed(self.files)))


def show(data: bytes) -> str:
    """A line of a file in a message: quoted, shortened, and with a missing line end pointed out."""
    text = data.decode("utf-8", "backslashreplace")
    bare = text.removesuffix("\n")
    short = bare if len(bare) <= 100 else bare[:97] + "..."
    return repr(short) if text.endswith("\n") else f"{short!r} without a newline"


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their ends, split at LF only: a lone CR or a form feed is part of a line, as for git."""
    lines = content.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def path_error(path: str) -> str | None:
    """Why `path` may not be touched by a patch, or None."""
    parts = path.split("/")
    if path.startswith("/"):
        return "the path is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "the path has an empty, '.' or '..' component"
    if not all(_COMPONENT.fullmatch(part) for part in parts):
        return "the path has a character other than letters, digits and _ . + -"
    if any(part.endswith(".py") for part in parts[:-1]):
        return "the path has a folder named like a Python file"
    if not path.endswith(".py"):
        return "the file is not a .py file"
    return None


def parse(data: bytes, name: str) -> Patch:
    """Parse a patch.

    Args:
        data: the patch file, whole and undecoded (text mode would hide CRLF).
        name: what messages call it.

    Raises:
        PatchProblems: with everything that is wrong with it.
    """
    patch = scan(data, name)
    if patch.problems:
        raise PatchProblems(patch.problems)
    return patch


def scan(data: bytes, name: str) -> Patch:
    """Like `parse`, but returns what could be read, with its problems, for a report about a whole series."""
    return _Parser(data, name).patch()


class _Parser:
    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self.bad_paths: set[str] = set()
        self.at = 0
        self.lines = data.split(b"\n")
        end = self.lines.pop()
        if end:
            self.problem("the last line has no line end: the patch is cut off", line=len(self.lines) + 1)
            self.lines.append(end)
        if b"\0" in data:
            self.problem("a NUL byte: this is not a text patch", line=data[: data.index(b"\0")].count(b"\n") + 1)
            self.lines = []
        if not self.line(len(self.lines) - 1) and self.signed(len(self.lines) - 3):
            self.lines.pop()
        if self.signed(len(self.lines) - 2):
            self.problem("the signature of git format-patch is no part of a patch: remove it", line=len(self.lines) - 1)
            del self.lines[-2:]
        returns = [number for number, line in enumerate(self.lines, 1) if line.endswith(b"\r")]
        if returns:
            self.problem(
                f"CRLF line ends ({len(returns)} of {len(self.lines)} lines): save the patch with LF",
                line=returns[0],
            )
            self.lines = [line.removesuffix(b"\r") for line in self.lines]

    def problem(
        self,
        what: str,
        *,
        line: int | None = None,
        file: str | None = None,
        hunk: int | None = None,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.problems.append(
            Problem(
                self.name,
                what,
                line=self.at + 1 if line is None else line,
                file=file,
                hunk=hunk,
                expected=expected,
                found=found,
                hint=hint,
            )
        )

    def line(self, index: int) -> bytes:
        return self.lines[index] if 0 <= index < len(self.lines) else b""

    def signed(self, index: int) -> bool:
        """Whether git's "-- " and its version stand at the index."""
        return index >= 0 and self.lines[index] == b"-- " and bool(_VERSION.fullmatch(self.line(index + 1)))

    def starts_file(self, index: int) -> bool:
        here = self.line(index)
        return here.startswith(b"diff --git ") or (
            here.startswith(b"--- ") and self.line(index + 1).startswith(b"+++ ")
        )

    def patch(self) -> Patch:
        broken = bool(self.problems)
        header = self.header()
        files: list[FilePatch] = []
        while self.at < len(self.lines):
            if self.starts_file(self.at):
                file = self.file()
                if file is None:
                    continue
                if any(file.path == other.path for other in files):
                    self.problem("a second change of the same file", line=file.line, file=file.path)
                    continue
                files.append(replace(file, sound=False) if broken else file)
            else:
                self.stray()
        if not files and not self.problems:
            self.problem("the patch changes no file", line=max(1, len(self.lines)))
        return Patch(self.name, header, tuple(files), tuple(self.problems))

    def header(self) -> tuple[str, ...]:
        header = []
        while self.at < len(self.lines) and not self.starts_file(self.at):
            line = self.lines[self.at]
            if line.startswith((b"@@ ", b"--- ", b"+++ ", *(prefix for prefix, _ in _UNSUPPORTED))):
                self.problem("a diff line before the first 'diff --git' or '---' line", found=show(line + b"\n"))
            text = line.decode("utf-8", "backslashreplace")
            if text.encode() != line:
                self.problem("the header is not UTF-8", found=show(line + b"\n"))
            header.append(text)
            self.at += 1
        return tuple(header)

    def stray(self) -> None:
        """One problem for a run of lines that belong to nothing."""
        first = self.at
        while self.at < len(self.lines) and not self.starts_file(self.at):
            self.at += 1
        count = self.at - first
        self.problem(
            f"{count} line{'s' * (count != 1)} outside any hunk",
            line=first + 1,
            expected="'diff --git', '---', '@@' or the end of the patch",
            found=show(self.lines[first] + b"\n"),
        )

    def file(self) -> FilePatch | None:
        start, known = self.at, len(self.problems)
        self.bad_paths.clear()
        git_path, mode = self.extended_header()
        if not (self.line(self.at).startswith(b"--- ") and self.line(self.at + 1).startswith(b"+++ ")):
            if len(self.problems) == known:
                self.problem(
                    "no '---' and '+++' lines: nothing is changed here",
                    line=start + 1,
                    file=git_path,
                    hint="an empty file cannot be added or removed: give it a line" if mode else None,
                )
            return None if git_path is None else FilePatch(start + 1, git_path, git_path, (), sound=False)

        names_at = self.at
        old = self.name_line(b"--- ", "a/")
        self.at += 1
        new = self.name_line(b"+++ ", "b/")
        self.at += 1
        path = old or new or git_path
        if len(self.problems) == known:
            self.check_names(names_at + 1, old, new, git_path, mode)
        hunks = self.hunks(path)
        if len(self.problems) == known:
            self.check_whole(old, new, hunks)
        if path is None:
            return None
        return FilePatch(start + 1, old if old or new else path, new, hunks, len(self.problems) == known)

    def extended_header(self) -> tuple[str | None, str | None]:
        """Read `diff --git` and what follows it; return its path, and "new" or "deleted" where it says so."""
        if not self.line(self.at).startswith(b"diff --git "):
            return None, None
        match = _GIT_LINE.fullmatch(self.lines[self.at])
        path = None
        if match is None or match[1] != match[2]:
            self.problem(
                "not as git writes it, or a rename",
                expected="'diff --git a/PATH b/PATH' with one PATH twice",
                found=show(self.lines[self.at] + b"\n"),
            )
        else:
            path = match[1].decode("utf-8", "backslashreplace")
            self.check_path(path)
        self.at += 1

        mode = None
        while self.at < len(self.lines) and not self.starts_file(self.at):
            line = self.lines[self.at]
            kind = re.fullmatch(rb"(new|deleted) file mode (\d+)", line)
            reason = next((reason for prefix, reason in _UNSUPPORTED if line.startswith(prefix)), None)
            if line.startswith(b"@@ "):
                break
            if kind is not None:
                mode = kind[1].decode()
                if kind[2] != b"100644":
                    self.problem(
                        "only plain files can be added or removed",
                        file=path,
                        expected="mode 100644",
                        found=f"mode {kind[2].decode()}",
                    )
            elif reason is not None:
                self.problem(reason, file=path, found=show(line + b"\n"))
            elif not _INDEX_LINE.fullmatch(line):
                self.problem("not a line that git writes here", file=path, found=show(line + b"\n"))
            self.at += 1
        return path, mode

    def name_line(self, marker: bytes, prefix: str) -> str | None:
        text = self.lines[self.at][len(marker) :].decode("utf-8", "backslashreplace")
        if text == "/dev/null":
            return None
        if not text.startswith(prefix):
            self.problem("not a name as git writes it", expected=f"{prefix}PATH or /dev/null", found=repr(text))
            return None
        path = text.removeprefix(prefix)
        self.check_path(path)
        return path

    def check_path(self, path: str) -> None:
        reason = path_error(path)
        if reason is not None and path not in self.bad_paths:
            self.bad_paths.add(path)
            self.problem(reason, found=repr(path))

    def check_names(self, line: int, old: str | None, new: str | None, git_path: str | None, mode: str | None) -> None:
        path = old or new
        if path is None:
            self.problem("both names are /dev/null", line=line)
        elif old is not None and new is not None and old != new:
            self.problem("renames a file; remove the old one and add the new one", line=line, file=old, found=new)
        elif git_path is not None and git_path != path:
            self.problem("the 'diff --git' line names another file", line=line, file=path, found=git_path)
        elif mode is not None and mode != ("new" if old is None else "deleted" if new is None else ""):
            self.problem(f"'{mode} file mode', but the names do not say so", line=line, file=path)

    def check_whole(self, old: str | None, new: str | None, hunks: tuple[Hunk, ...]) -> None:
        """A new and a removed file is one hunk of the whole file."""
        if old is not None and new is not None:
            return
        verb, other = ("adds", "old") if old is None else ("removes", "new")
        for number, hunk in enumerate(hunks, 1):
            count, start = (hunk.old_count, hunk.old_start) if old is None else (hunk.new_count, hunk.new_start)
            if count or start or number > 1:
                self.problem(
                    f"a patch that {verb} a file has one hunk, of the whole file",
                    line=hunk.line,
                    file=old or new,
                    hunk=number,
                    expected=f"{other} side 0,0",
                    found=f"{other} side {start},{count}",
                )

    def hunks(self, path: str | None) -> tuple[Hunk, ...]:
        hunks: list[Hunk] = []
        number = 0
        end: int | None = 0
        delta: int | None = 0
        while self.line(self.at).startswith(b"@@"):
            number += 1
            known = len(self.problems)
            hunk = self.hunk(path, number)
            if hunk is None:
                end = delta = None
                continue
            hunks.append(hunk)
            if len(self.problems) > known:
                # The counts of a broken hunk say nothing about where the later ones ought to be.
                end = delta = None
                continue
            if end is not None and hunk.old_index < end:
                self.problem(
                    "the hunk begins before the end of the one before it",
                    line=hunk.line,
                    file=path,
                    hunk=number,
                    expected=f"an old line from {end + 1}",
                    found=str(hunk.old_start),
                )
            if delta is not None and hunk.new_index != hunk.old_index + delta:
                right = hunk.old_index + delta + (1 if hunk.new_count else 0)
                self.problem(
                    "the new line number does not follow from the hunks before",
                    line=hunk.line,
                    file=path,
                    hunk=number,
                    expected=f"+{right}",
                    found=f"+{hunk.new_start}",
                )
            if hunk.leading < CONTEXT and hunk.old_index > 0:
                self.problem(
                    f"{hunk.leading} context lines before the change",
                    line=hunk.line,
                    file=path,
                    hunk=number,
                    expected=f"{CONTEXT}, or a hunk that begins at line 1",
                    hint="make the diff with -U3",
                )
            end = hunk.old_index + hunk.old_count
            if delta is not None:
                delta += hunk.new_count - hunk.old_count
        if number == 0:
            self.problem("no hunk follows the file names", file=path)
        return tuple(hunks)

    def hunk(self, path: str | None, number: int) -> Hunk | None:
        header_at = self.at
        match = _HUNK.fullmatch(self.lines[header_at])
        self.at += 1
        if match is None:
            self.problem(
                "not a hunk header",
                line=header_at + 1,
                file=path,
                hunk=number,
                expected="'@@ -LINE,COUNT +LINE,COUNT @@'",
                found=show(self.lines[header_at] + b"\n"),
            )
            self.at = self.body_end()
            return None
        old_start, old_count, new_start, new_count = (1 if text is None else int(text) for text in match.groups())
        known = len(self.problems)
        lines = self.body(path, number, old_count, new_count)
        hunk = Hunk(header_at + 1, old_start, old_count, new_start, new_count, lines)
        found = (len(hunk.old), len(hunk.new))
        if found != (old_count, new_count):
            self.problem(
                "the header's counts are not those of the lines below it",
                line=header_at + 1,
                file=path,
                hunk=number,
                expected=f"{old_count} old and {new_count} new lines",
                found=f"{found[0]} old and {found[1]} new",
            )
        elif (old_count and not old_start) or (new_count and not new_start):
            self.problem("a hunk with lines begins at line 0", line=header_at + 1, file=path, hunk=number)
        if len(self.problems) == known and hunk.leading == len(lines):
            self.problem("the hunk changes nothing", line=header_at + 1, file=path, hunk=number)
        for side in (hunk.old, hunk.new):
            for line in side[:-1]:
                if not line.data.endswith(b"\n"):
                    self.problem(
                        "lines follow the one that is marked as the file's end without a newline",
                        line=line.number,
                        file=path,
                        hunk=number,
                    )
        return hunk

    def body_end(self) -> int:
        """Where the hunk's lines stop, whatever its header counts.

        `---`, `+++`, `@@` in a row are the next file: as lines of a hunk they would be a hunk without
        trailing context that another one follows, which is refused anyway.
        """
        at = self.at
        while at < len(self.lines):
            if self.lines[at][:1] not in (b" ", b"+", b"-", b"\\", b""):
                break
            if (
                self.lines[at].startswith(b"--- ")
                and self.line(at + 1).startswith(b"+++ ")
                and self.line(at + 2).startswith(b"@@")
            ):
                break
            at += 1
        return at

    def body(self, path: str | None, number: int, old_count: int, new_count: int) -> tuple[Line, ...]:
        end = self.body_end()
        lines: list[Line] = []
        for index in range(self.at, end):
            text = self.lines[index]
            if text.startswith(b"\\"):
                if text != NO_NEWLINE or not lines or not lines[-1].data.endswith(b"\n"):
                    self.problem(
                        "a marker that git does not write here",
                        line=index + 1,
                        file=path,
                        hunk=number,
                        expected=f"{NO_NEWLINE.decode()!r} after a line of the hunk",
                        found=show(text + b"\n"),
                    )
                else:
                    lines[-1] = replace(lines[-1], data=lines[-1].data.removesuffix(b"\n"))
            else:
                lines.append(Line(text[:1].decode() or " ", text[1:] + b"\n", index + 1))

        def too_long() -> bool:
            old = sum(line.tag != "+" for line in lines)
            return old > old_count or len(lines) - sum(line.tag == "-" for line in lines) > new_count

        while lines and not self.lines[lines[-1].number - 1] and end == lines[-1].number and too_long():
            lines.pop()
            end -= 1
        for line in lines:
            if not self.lines[line.number - 1]:
                self.problem(
                    "an empty context line must hold one space",
                    line=line.number,
                    file=path,
                    hunk=number,
                    hint="an editor has stripped it",
                )
        self.at = end
        return tuple(lines)


def find(lines: list[bytes], hunk: Hunk) -> list[int]:
    """Indices (from 0) in `lines` at which the whole old side of `hunk` stands."""
    old = [line.data for line in hunk.old]
    if not old:
        return []
    starts = range(len(lines) - len(old) + 1)
    return [at for at in starts if lines[at] == old[0] and lines[at : at + len(old)] == old]


def splice(lines: Sequence[bytes], places: Sequence[tuple[int, Hunk]]) -> bytes:
    """`lines` with each hunk's old side, at the index given with it, replaced by the new side."""
    out: list[bytes] = []
    at = 0
    for start, hunk in places:
        out += lines[at:start]
        out += [line.data for line in hunk.new]
        at = start + len(hunk.old)
    out += lines[at:]
    return b"".join(out)


def reanchor(file: FilePatch, content: bytes) -> tuple[bytes, list[int]] | None:
    """Apply the hunks of a modified file wherever their old side stands exactly once, in order.

    This is for refreshing a patch and for reporting what comes after one that has moved; `apply_series` never
    uses the result as its own.

    Returns:
        The new content and the index of each hunk's old side, or None where a hunk is not found exactly once.
    """
    lines = split_lines(content)
    places: list[tuple[int, Hunk]] = []
    end = 0
    for hunk in file.hunks:
        found = find(lines, hunk)
        if len(found) != 1 or found[0] < end:
            return None
        places.append((found[0], hunk))
        end = found[0] + len(hunk.old)
    return splice(lines, places), [start for start, _ in places]


def _moved_hint(lines: list[bytes], hunk: Hunk) -> str | None:
    places = [at + 1 for at in find(lines, hunk)]
    if len(places) == 1:
        return f"context found at line {places[0]}: refresh the patch"
    if places:
        shown = ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")
        return f"context found at lines {shown}: refresh the patch by hand"
    new = [line.data for line in hunk.new]
    start = hunk.new_index
    if new and lines[start : start + len(new)] == new:
        return "the file holds the new lines already: applied before?"
    return None


def _hunk_problems(patch: str, file: FilePatch, number: int, hunk: Hunk, lines: list[bytes]) -> Iterator[Problem]:
    start, old = hunk.old_index, hunk.old
    wrong = [
        (offset, line)
        for offset, line in enumerate(old)
        if start + offset >= len(lines) or lines[start + offset] != line.data
    ]
    if wrong:
        offset, line = wrong[0]
        at = start + offset
        more = f", and {len(wrong) - 1} more of the hunk's lines" if len(wrong) > 1 else ""
        yield Problem(
            patch,
            f"the {'context' if line.tag == ' ' else 'removed'} line differs{more}",
            line=line.number,
            file=file.path,
            hunk=number,
            file_line=at + 1,
            expected=show(line.data),
            found=show(lines[at]) if at < len(lines) else f"the end of the file, which has {len(lines)} lines",
            hint=_moved_hint(lines, hunk),
        )
        return
    end = start + len(old)
    if start > len(lines):
        yield Problem(
            patch,
            "the hunk begins after the end of the file",
            line=hunk.line,
            file=file.path,
            hunk=number,
            expected=f"a line up to {len(lines)}",
            found=str(start),
        )
    elif end < len(lines) and hunk.new and not hunk.new[-1].data.endswith(b"\n"):
        yield Problem(
            patch,
            "the new last line has no newline, but the file goes on",
            line=hunk.new[-1].number,
            file=file.path,
            hunk=number,
            file_line=end + 1,
            found=show(lines[end]),
        )
    elif end < len(lines) and hunk.trailing < CONTEXT and file.new is not None:
        yield Problem(
            patch,
            f"{hunk.trailing} context lines after the change",
            line=hunk.line,
            file=file.path,
            hunk=number,
            file_line=end + 1,
            expected=f"{CONTEXT}, or a hunk that reaches the end of the file",
            found=f"{len(lines) - end} more lines in the file",
            hint="make the diff with -U3, or refresh the patch",
        )


def _apply_file(patch: str, file: FilePatch, content: bytes | None) -> tuple[bytes | None, list[Problem], bool]:
    """The file's new content, the problems, and whether the content is usable to judge what comes after."""
    if file.old is None:
        result = splice([], [(0, hunk) for hunk in file.hunks])
        if content is None:
            return result, [], True
        hint = "the same content: applied before?" if content == result else None
        return (
            content,
            [Problem(patch, "a new file must not exist in the tree", line=file.line, file=file.path, hint=hint)],
            False,
        )
    if content is None:
        return None, [Problem(patch, "the tree has no such file", line=file.line, file=file.path)], False

    lines = split_lines(content)
    problems = [
        problem
        for number, hunk in enumerate(file.hunks, 1)
        for problem in _hunk_problems(patch, file, number, hunk, lines)
    ]
    if problems:
        moved = reanchor(file, content) if file.new is not None else None
        return (content, problems, False) if moved is None else (moved[0], problems, True)

    result = splice(lines, [(hunk.old_index, hunk) for hunk in file.hunks])
    if file.new is None:
        if result:
            left = len(split_lines(result))
            problems.append(
                Problem(
                    patch,
                    "a removed file must be removed whole",
                    line=file.line,
                    file=file.path,
                    file_line=len(lines) - left + 1,
                    found=f"{left} more lines in the file",
                )
            )
        return None, problems, not problems
    if result == content:
        problems.append(Problem(patch, "the patch leaves the file as it is", line=file.line, file=file.path))
    return result, problems, True


def apply_series(read: Reader, patches: Sequence[Patch], *, reverse: bool = False) -> dict[str, bytes | None]:
    """Apply patches one after the other to a tree, in memory.

    Args:
        read: reads a file of the tree, which stays as it is.
        patches: in the order of the series, for `reverse` too.
        reverse: take the patches back, last one first; what a series has made becomes what it was, byte for
            byte.

    Returns:
        The files that differ from the tree: path to new content, None for a file that is gone.

    Raises:
        PatchProblems: if anything at all is wrong, with every problem of every patch.
    """
    order = [patch.inverted() for patch in reversed(patches)] if reverse else patches
    problems: list[Problem] = []
    original: dict[str, bytes | None] = {}
    tree: dict[str, bytes | None] = {}
    lost: dict[str, str] = {}
    for patch in order:
        problems += patch.problems
        for file in patch.files:
            path = file.path
            if path in lost:
                problems.append(
                    Problem(
                        patch.name,
                        f"not judged, since {lost[path]} has problems in the same file",
                        line=file.line,
                        file=path,
                    )
                )
                continue
            if not file.sound:
                lost[path] = patch.name
                continue
            if path not in tree:
                try:
                    original[path] = tree[path] = read(path)
                except (UnsafePath, OSError) as error:
                    problems.append(Problem(patch.name, str(error), line=file.line, file=path))
                    lost[path] = patch.name
                    continue
            result, found, usable = _apply_file(patch.name, file, tree[path])
            problems += found
            if usable:
                tree[path] = result
            else:
                lost[path] = patch.name
    if problems:
        raise PatchProblems(problems)
    return {path: content for path, content in tree.items() if content != original[path]}
