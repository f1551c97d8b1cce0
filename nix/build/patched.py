"""The vLLM source with the patch series applied: links to the unpacked source, real files where a patch changed one.

spec: source (unpacked text of the wheel), series (the patches folder), applier (folder that holds hyperqwen/patches),
omit (patches to leave out: the negative controls of their tests).
"""

import json
import os
import py_compile
import shutil
import sys
from pathlib import Path

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path.insert(0, spec["applier"])

from hyperqwen.patches.apply import PatchProblems
from hyperqwen.patches.files import tree_reader
from hyperqwen.patches.series import apply_folder, read_series

SOURCE = f"{spec['source']}/site"
SITE = f"{os.environ['out']}/site"


def series_without(omit: list[str]) -> Path:
    """The patches folder, or a copy of it that lacks `omit` in both the folder and the series.

    Later patches to a file that an omitted one changes go with it: their context may be what it left.
    """
    folder = Path(spec["series"])
    if not omit:
        return folder
    files: set[str] = set()
    for entry in read_series(folder).entries:
        own_files = {file.path for file in entry.patch.files}
        if entry.name in omit or own_files & files:
            omit = [*omit, entry.name] if entry.name not in omit else omit
            files |= own_files
    print(f"without {', '.join(omit)}")
    copy = Path(os.environ["NIX_BUILD_TOP"]) / "patches"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(*omit))
    series = copy / "series"
    series.chmod(0o644)
    lines = series.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.strip() not in omit]
    if len(lines) - len(kept) != len(omit):
        sys.exit(f"the series does not list each of {omit} once")
    series.write_text("".join(kept))
    return copy


def own(directory: str) -> None:
    """Make `directory` (relative to the site) a real one whose entries are links to the source's."""
    if parent := os.path.dirname(directory):
        # First: below a linked parent, the source's own directory would look like ours.
        own(parent)
    target = f"{SITE}/{directory}"
    if os.path.isdir(target) and not os.path.islink(target):
        return
    if os.path.islink(target):
        os.remove(target)
    os.makedirs(target)
    origin = f"{SOURCE}/{directory}"
    for name in sorted(os.listdir(origin)) if os.path.isdir(origin) else []:
        os.symlink(f"{origin}/{name}", f"{target}/{name}")


def replace(path: str, content: bytes | None) -> None:
    """Give `path` new bytes and byte code, or remove both."""
    directory, name = os.path.split(path)
    own(directory)
    own(f"{directory}/__pycache__")
    code = f"{SITE}/{directory}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    for old in (f"{SITE}/{path}", code):
        if os.path.lexists(old):
            os.remove(old)
    if content is None:
        return
    with open(f"{SITE}/{path}", "wb") as file:
        file.write(content)
    try:
        py_compile.compile(
            f"{SITE}/{path}",
            cfile=code,
            dfile=f"site/{path}",
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    except py_compile.PyCompileError as error:
        cause = error.exc_value
        if not isinstance(cause, SyntaxError):
            raise
        sys.exit(f"{path}, line {cause.lineno}: {cause.msg}, after the series")


def main() -> None:
    try:
        changed = apply_folder(series_without(spec["omit"]), tree_reader(Path(SOURCE)))
    except PatchProblems as problems:
        sys.exit(str(problems))
    own("vllm")
    for path, content in sorted(changed.items()):
        replace(path, content)
    print(f"{len(changed)} files changed by the series")


main()
