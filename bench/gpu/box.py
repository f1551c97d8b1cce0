#!/usr/bin/env python3
"""Bring our engine to a GPU box that has Python, torch and a GPU, but no Nix and no network, and start it there.

What travels is a kit: the site-packages of the pinned vLLM as published, as one xz archive that `shared/tools/gpu-kit`
cuts into the files .kit0/p, .kit1/p, … The checkout travels by itself and is what the box runs: its patches are applied
there, exactly, so that a changed patch needs no other kit.

    here:   bench/gpu/box.py pack --nano NANO               sums of the pieces, and a tokenizer, into .kit0
    there:  bench/gpu/box.py take .kit0                     one call a piece, the first one first
            bench/gpu/box.py open                           unpack, patch, make the models without weights
            bench/gpu/box.py run serve --profile B          any command of ours, for this engine

Needs Python 3.11 and the standard library, but for what `run` starts. Exit codes are those of hyperqwen.errors.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
sys.dont_write_bytecode = True

from hyperqwen.errors import (  # noqa: E402
    BadInputError,
    HyperqwenError,
    MissingError,
    UnsuitableError,
    VerificationError,
)
from hyperqwen.patches.apply import PatchProblems  # noqa: E402
from hyperqwen.patches.files import tree_reader, write_atomic, write_changes  # noqa: E402
from hyperqwen.patches.series import apply_folder  # noqa: E402

PIECE = "p"
SUMS = "kit.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMMAND = "import sys; from hyperqwen.cli import main; main(prog_name='hyperqwen')"
_CHUNK = 1 << 20


def pack(prefix: Path, nano: Path) -> int:
    """Write what the box needs beside the pieces into the first one's folder; returns the number of pieces."""
    folders = _folders(prefix)
    sums = [{"size": (folder / PIECE).stat().st_size, "sha256": _sum(folder / PIECE)} for folder in folders]
    (folders[0] / "nano").mkdir(exist_ok=True)
    for name in TOKENIZER:
        try:
            data = (nano / name).read_bytes()
        except OSError as error:
            raise BadInputError(f"{nano / name}: {error.strerror}", "name nano's folder: ./hq build .#nano") from None
        write_atomic(folders[0] / "nano" / name, data)
    write_atomic(folders[0] / SUMS, (json.dumps({"pieces": sums}, indent=2) + "\n").encode())
    return len(sums)


def take(home: Path, folder: Path) -> tuple[int, list[int]]:
    """Keep a piece of the kit; returns its number, and the numbers that are missing still."""
    (home / "pieces").mkdir(parents=True, exist_ok=True)
    if (folder / SUMS).is_file():
        write_atomic(home / SUMS, (folder / SUMS).read_bytes())
        shutil.copytree(folder / "nano", home / "nano", dirs_exist_ok=True)
    sums = [piece["sha256"] for piece in _sums(home)]
    if not (folder / PIECE).is_file():
        raise MissingError(f"{folder / PIECE} does not exist", "carry that folder to the box")
    found = _sum(folder / PIECE)
    if found not in sums:
        raise VerificationError(f"{folder / PIECE} is no piece of the kit: its sum is {found}", "carry it again")
    number = sums.index(found)
    part = home / "pieces" / f"{number}.part"
    shutil.copyfile(folder / PIECE, part)
    part.rename(home / "pieces" / str(number))
    return number, _missing(home)


def unpack(home: Path) -> list[str]:
    """The kit's site-packages with our patches, a site file for the launcher, and the models; returns what was patched.

    Can be run again: what an interrupted run left is made anew.
    """
    missing = _missing(home)
    if missing:
        raise MissingError(f"the kit lacks the pieces {missing}", "take those first")
    stage, target = home / "site.new", home / "site"
    for old in (stage, target, home / "models"):
        shutil.rmtree(old, ignore_errors=True)
    _extract([home / "pieces" / str(number) for number in range(len(_sums(home)))], stage)
    try:
        changes = apply_folder(ROOT / "patches", tree_reader(stage))
    except PatchProblems as error:
        raise VerificationError(f"the patches do not apply to the kit: {error}", "make it without --patched") from None
    write_changes(changes, stage)
    stage.rename(target)
    write_atomic(home / "site.json", _site_file(home))
    subprocess.run(
        [
            *(sys.executable, "-m", "hyperqwen.prepare.hollow"),
            *("--tokenizer", str(home / "nano"), "--out", str(home / "models")),
        ],
        env=environment(home),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return sorted(changes)


def site(home: Path) -> dict[str, Any]:
    """What `hyperqwen serve` is told about the engine (hyperqwen.runtime.site)."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise UnsuitableError("there is no C compiler (cc), and Triton needs one", "use a box that has one")
    kit = hashlib.sha256((home / SUMS).read_bytes()).hexdigest()[:12]
    return {
        "engine": "cuda",
        # Not resolved: a virtual environment is known by the path that it is called by.
        "engine_python": sys.executable,
        "engine_id": f"box-{kit}",
        "cc": str(Path(compiler).parent),
        "python_path": [str(home / "site"), str(ROOT / "python")],
    }


def _site_file(home: Path) -> bytes:
    return (json.dumps(site(home), indent=2) + "\n").encode()


def environment(home: Path) -> dict[str, str]:
    """Variables for our commands on the box."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(home / "site"), str(ROOT / "python")]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPERQWEN_SERVE_CONFIG": str(home / "site.json"),
        "HYPERQWEN_MODELS": str(home / "models"),
        "HYPERQWEN_MODEL_LOAD_FORMAT": "dummy",
        "HYPERQWEN_CACHE_DIR": str(home / "cache"),
    }


def _extract(pieces: Sequence[Path], stage: Path) -> None:
    """Unpack the archive that the pieces are together, by the fastest means there is.

    Raises:
        VerificationError: it is no archive, or ends too early.
        UnsuitableError: there is no space, or no permission.
    """
    chunks = (chunk for path in pieces for chunk in _chunks(path))
    stage.mkdir()
    if shutil.which("tar") and shutil.which("xz"):
        # xz has all cores for it; Python's own takes minutes with one.
        command = ["tar", "-xJ", "-C", str(stage)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "XZ_OPT": "-T0"}) as tar:
            assert tar.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                for chunk in chunks:
                    tar.stdin.write(chunk)
                tar.stdin.close()
        if tar.returncode:
            raise VerificationError("the kit does not unpack (tar says why above)", "make it again, or free space")
        return
    try:
        with tarfile.open(fileobj=_Stream(chunks), mode="r|xz", bufsize=_CHUNK) as archive:
            # Debian's 3.11 has no filters; what is unpacked is what `pack` took the sums of.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(stage)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise VerificationError(f"the kit does not unpack: {error}", "make it again with gpu-kit") from error
    except OSError as error:
        raise UnsuitableError(
            f"the kit does not unpack: {error}", "free space there, or name another --home"
        ) from error


class _Stream:
    """Chunks as a file that is read from its beginning to its end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        given, self._rest = self._rest[:size], self._rest[size:]
        return given


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folders(prefix: Path) -> list[Path]:
    """PREFIX0, PREFIX1, … as far as they hold a piece."""
    found: list[Path] = []
    while (folder := prefix.with_name(f"{prefix.name}{len(found)}")).joinpath(PIECE).is_file():
        found.append(folder)
    if not found:
        raise MissingError(f"{prefix}0/{PIECE} does not exist", "make the kit: ../shared/tools/gpu-kit --out .kit")
    return found


def _sums(home: Path) -> list[dict[str, Any]]:
    try:
        pieces: list[dict[str, Any]] = json.loads((home / SUMS).read_bytes())["pieces"]
    except FileNotFoundError:
        raise MissingError(f"{home / SUMS} does not exist", "take the folder that `pack` wrote it to, .kit0") from None
    return pieces


def _missing(home: Path) -> list[int]:
    return [number for number in range(len(_sums(home))) if not (home / "pieces" / str(number)).is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench/gpu/box.py", description="Our engine on a GPU box without Nix.")
    parser.add_argument("--home", type=Path, default=Path("/tmp/hyperqwen"), help="folder on the box, with 3 GB")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    packing = commands.add_parser("pack", help="here: sums of the pieces and a tokenizer, into the first one's folder")
    packing.add_argument("--kit", type=Path, default=ROOT / ".kit", help="what gpu-kit was given as --out")
    packing.add_argument("--nano", type=Path, required=True, help="nano's folder")
    taking = commands.add_parser("take", help="there: keep one piece")
    taking.add_argument("folder", type=Path, help="folder of the piece, as in .kit0")
    commands.add_parser("open", help="there: unpack, patch, make the models without weights")
    running = commands.add_parser("run", help="there: a command of ours, as in `run serve --profile B`")
    running.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    try:
        if options.command == "pack":
            print(f"{pack(options.kit, options.nano)} pieces")
        elif options.command == "take":
            number, missing = take(options.home, options.folder)
            print(f"piece {number}; missing: {missing or 'none'}")
        elif options.command == "open":
            print(*unpack(options.home), sep="\n")
        else:
            if (options.home / "site").is_dir():
                # The checkout may lie elsewhere than in the call that unpacked.
                write_atomic(options.home / "site.json", _site_file(options.home))
            os.execve(sys.executable, [sys.executable, "-c", COMMAND, *options.arguments], environment(options.home))
    except HyperqwenError as error:
        print(f"box: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
