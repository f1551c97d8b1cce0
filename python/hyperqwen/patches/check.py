"""What a series must hold beyond applying: it can be taken back, compiles, and its headers tell the truth."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hyperqwen.patches.apply import Patch, PatchProblems, Problem, Reader, apply_series
from hyperqwen.patches.files import overlay_reader
from hyperqwen.patches.series import Entry, Header, Seam, Series
from hyperqwen.profiles.capabilities import unknown

ENGINE = "hyperqwen.engine"

_DOTTED = re.compile(r"hyperqwen(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)?")


def check_series(series: Series, read: Reader, repository: Path) -> list[Problem]:
    """Check a series against a tree and against the repository that carries it.

    Every patch applies at its own lines; after each one every file that it touches compiles; the whole series
    taken back gives the tree's bytes; each header's seams are defined in `python/` (read, never imported),
    are what the patched code refers to, its tests exist, and the capabilities that it provides are known.

    Returns:
        Every problem; empty if all is well.
    """
    problems = list(series.problems)
    for entry in series.entries:
        if entry.header is not None:
            problems += _check_references_exist(entry.name, entry.header, repository)
    try:
        changes = apply_series(read, series.patches)
    except PatchProblems as error:
        return problems + list(error.problems)

    problems += _check_reversal(series.patches, read, changes)
    done: dict[str, bytes | None] = {}
    for entry in series.entries:
        before = overlay_reader(read, dict(done))
        after = apply_series(before, [entry.patch])
        problems += _check_patched(entry, before, after)
        done.update(after)
    return problems


def _check_reversal(patches: tuple[Patch, ...], read: Reader, changes: dict[str, bytes | None]) -> Iterator[Problem]:
    try:
        back = apply_series(overlay_reader(read, changes), patches, reverse=True)
    except PatchProblems as error:
        for problem in error.problems:
            yield Problem(problem.patch, f"cannot be taken back: {problem}")
        return
    for path, content in changes.items():
        if back.get(path, content) != read(path):
            yield Problem("series", "taking the series back does not give the tree's bytes", file=path)


def _check_patched(entry: Entry, before: Reader, after: dict[str, bytes | None]) -> Iterator[Problem]:
    new: Counter[str] = Counter()
    broken = False
    for path, content in after.items():
        if content is None:
            continue
        try:
            tree = _compile(content, path)
        except (SyntaxError, ValueError) as error:
            line = error.lineno if isinstance(error, SyntaxError) else None
            reason = error.msg if isinstance(error, SyntaxError) else error
            yield Problem(entry.name, f"the patched file does not compile: {reason}", file=path, file_line=line)
            broken = True
            continue
        new += references(tree) - _references_of(before(path), path)
    if entry.header is None or broken:
        return

    seams = {f"{seam.module}.{seam.name}": seam for seam in entry.header.seams}
    line = entry.header.line("Seam")
    for dotted, seam in seams.items():
        if not any(name == dotted or name.startswith(f"{dotted}.") for name in new):
            yield Problem(entry.name, f"Seam: the patch adds no use of {seam}", line=line)
    for name in sorted(new):
        if not any(_within(name, dotted) or _within(dotted, name) for dotted in seams):
            yield Problem(
                entry.name,
                f"the patch adds a use of {name}, which Seam does not name",
                line=line,
                expected=f"a {ENGINE} function, named in Seam",
            )


def _references_of(source: bytes | None, path: str) -> Counter[str]:
    """The references of a file that may not exist, or not compile: then it has none to compare with."""
    try:
        return references(_parse(source or b"", path))
    except (SyntaxError, ValueError):
        return Counter()


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _parse(source: bytes, path: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(source, path)


def _compile(source: bytes, path: str) -> ast.Module:
    """Parse, and compile too: `return` outside a function is no syntax error to the parser."""
    tree = _parse(source, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        compile(tree, path, "exec", dont_inherit=True)
    return tree


def references(tree: ast.Module) -> Counter[str]:
    """Count the names below `hyperqwen` that a module imports, reaches by an import, or holds as a string.

    A string counts because registries name classes so ("package.module:Class"). A module that is imported
    only to reach a name in it is not listed besides that name.
    """
    aliases: dict[str, str] = {}
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if _within(name.name, "hyperqwen"):
                    found[name.name] += 1
                    aliases[name.asname or "hyperqwen"] = name.name if name.asname else "hyperqwen"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _within(node.module or "", "hyperqwen"):
            for name in node.names:
                found[f"{node.module}.{name.name}"] += 1
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            found[node.value.replace(":", ".")] += 1
    for node in ast.walk(tree):
        parts: list[str] = []
        here: ast.AST = node
        while isinstance(here, ast.Attribute):
            parts.insert(0, here.attr)
            here = here.value
        if parts and isinstance(here, ast.Name) and here.id in aliases:
            found[".".join([aliases[here.id], *parts])] += 1
    return Counter(
        {name: count for name, count in found.items() if not any(other.startswith(f"{name}.") for other in found)}
    )


def _check_references_exist(name: str, header: Header, repository: Path) -> Iterator[Problem]:
    for capability in header.provides:
        reason = unknown(capability)
        if reason is not None:
            yield Problem(name, f"Provides: {reason}", line=header.line("Provides"))
    for seam in header.seams:
        reason = seam_error(seam, repository / "python")
        if reason is not None:
            yield Problem(name, f"Seam {seam}: {reason}", line=header.line("Seam"))
    line = header.line("Test")
    for test in header.tests:
        path = repository / test.path
        if not path.is_file():
            yield Problem(name, f"Test {test}: no such file in the repository", line=line)
        elif test.name is not None:
            try:
                names = _defined(_parse(path.read_bytes(), test.path).body)
            except (SyntaxError, ValueError) as error:
                yield Problem(name, f"Test {test}: {test.path} is not Python: {error}", line=line)
                continue
            if test.name not in names:
                yield Problem(name, f"Test {test}: {test.path} defines no {test.name}", line=line)


def seam_error(seam: Seam, source: Path) -> str | None:
    """Why `seam` is not defined below `source`, or None. The module is parsed, not imported."""
    stem = source.joinpath(*seam.module.split("."))
    path = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    if path is None:
        return f"no module {seam.module} in {source}"
    try:
        body = _parse(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        return f"{path} does not compile: {error}"
    reached = seam.module
    for part in seam.name.split("."):
        names = _defined(body)
        if part not in names:
            known = ", ".join(sorted(names)) or "nothing"
            return f"{reached} does not define {part!r} (it defines {known})"
        reached, body = f"{reached}.{part}", names[part]
    return None


def _defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Names that statements define, with the body of a class; imports do not count, `if` and `try` do."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] = []
        elif isinstance(node, ast.Assign):
            names |= {target.id: [] for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = []
        elif isinstance(node, ast.If):
            names |= _defined(node.body) | _defined(node.orelse)
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            names |= _defined(node.body) | _defined(handlers) | _defined(node.orelse) | _defined(node.finalbody)
    return names
