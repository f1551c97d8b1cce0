"""Nix store paths of fixed-output files, and the few store operations that seeding needs.

Paths are computed here rather than asked of Nix, so that 250 pins cost microseconds and a path can be known without
Nix. The rules are those of the Nix manual, "Complete store path calculation". Runs on a bare Python 3.9.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hyperqwen.errors import HyperqwenError, UnsuitableError, VerificationError

DEFAULT_STORE_DIR = "/nix/store"

_BASE32 = "0123456789abcdfghijklmnpqrsvwxyz"
_NAME = re.compile(r"(?!\.)[A-Za-z0-9+\-._?=]{1,211}\Z")
_ARG_BYTES = 64 * 1024


def is_store_name(name: str) -> bool:
    """Whether Nix accepts `name` as the name part of a store path (2.8 is the strictest: no leading dot)."""
    return _NAME.match(name) is not None


def base32(data: bytes) -> str:
    """`data` in Nix's base 32: digits from the last byte's top bits downwards, without e, o, t and u."""
    digits = (len(data) * 8 + 4) // 5
    number = int.from_bytes(data, "little")
    return "".join(_BASE32[(number >> (5 * i)) & 31] for i in reversed(range(digits)))


def _fold(digest: bytes, size: int = 20) -> bytes:
    folded = bytearray(size)
    for i, byte in enumerate(digest):
        folded[i % size] ^= byte
    return bytes(folded)


def fixed_path(name: str, sha256: str, *, recursive: bool = False, store_dir: str = DEFAULT_STORE_DIR) -> str:
    """The store path of a fixed-output file.

    `sha256` is 64 hex digits: of the file's bytes, or with `recursive` of its NAR (`nar_sha256`). Raises ValueError for
    a name that Nix would refuse.
    """
    if not is_store_name(name):
        raise ValueError(f"{name!r} is not a legal store name")
    if recursive:
        kind, inner = "source", sha256
    else:
        kind, inner = "output:out", hashlib.sha256(f"fixed:out:sha256:{sha256}:".encode()).hexdigest()
    digest = hashlib.sha256(f"{kind}:sha256:{inner}:{store_dir}:{name}".encode()).digest()
    return f"{store_dir}/{base32(_fold(digest))}-{name}"


def _nar_string(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data + b"\0" * (-len(data) % 8)


def nar_sha256(path: str | os.PathLike[str]) -> str:
    """The sha256 (hex) of the NAR of a file, symlink or directory tree, as `nix-hash --type sha256` prints it.

    Of the modes only a file's owner x bit is part of a NAR. Raises ValueError for a socket, pipe or device.
    """
    digest = hashlib.sha256()
    _hash_strings(digest, b"nix-archive-1")
    _hash_node(digest, Path(path))
    return digest.hexdigest()


def _hash_strings(digest: hashlib._Hash, *words: bytes) -> None:
    for word in words:
        digest.update(_nar_string(word))


def _hash_node(digest: hashlib._Hash, path: Path) -> None:
    status = path.lstat()
    _hash_strings(digest, b"(", b"type")
    if stat.S_ISLNK(status.st_mode):
        _hash_strings(digest, b"symlink", b"target", os.fsencode(os.readlink(path)))
    elif stat.S_ISDIR(status.st_mode):
        _hash_strings(digest, b"directory")
        for name in sorted(os.fsencode(name) for name in os.listdir(path)):
            _hash_strings(digest, b"entry", b"(", b"name", name, b"node")
            _hash_node(digest, path / os.fsdecode(name))
            _hash_strings(digest, b")")
    elif stat.S_ISREG(status.st_mode):
        _hash_strings(digest, b"regular")
        if status.st_mode & stat.S_IXUSR:
            _hash_strings(digest, b"executable", b"")
        _hash_strings(digest, b"contents")
        digest.update(status.st_size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
        digest.update(b"\0" * (-status.st_size % 8))
    else:
        raise ValueError(f"{path} is neither a file, a symlink nor a directory")
    _hash_strings(digest, b")")


class Store(Protocol):
    """What seeding asks of a store; `NixStore` is the real one."""

    @property
    def store_dir(self) -> str:
        """The directory that store paths are computed for."""
        ...

    def invalid(self, paths: Sequence[str]) -> set[str]:
        """Those of `paths` that the store does not hold."""
        ...

    def add_fixed(self, files: Sequence[Path], *, recursive: bool = False) -> list[str]:
        """Copy `files` into the store under their base names; the store paths, in the same order."""
        ...

    def delete(self, path: str) -> None:
        """Remove a path that nothing refers to."""
        ...

    def real_path(self, path: str) -> Path:
        """Where the bytes of a store path lie on this machine's disk."""
        ...

    def disk(self) -> Path:
        """An existing directory on the file system that the store's bytes go to."""
        ...


class NixStore:
    """The store that the `nix-store` program reaches: directly as root, through the daemon, or `url` (`--store`)."""

    def __init__(
        self, url: str | None = None, *, program: str = "nix-store", environ: Mapping[str, str] | None = None
    ) -> None:
        self.url = url
        self.program = program
        self._environ = dict(os.environ if environ is None else environ)

    @property
    def store_dir(self) -> str:
        return self._environ.get("NIX_STORE_DIR", DEFAULT_STORE_DIR).rstrip("/")

    @property
    def available(self) -> bool:
        """Whether the program is there; says nothing about the store behind it."""
        return shutil.which(self.program, path=self._environ.get("PATH")) is not None

    def invalid(self, paths: Sequence[str]) -> set[str]:
        if self._unmade():
            return set(paths)
        found: set[str] = set()
        for batch in _batches(paths):
            found.update(self._run("--check-validity", "--print-invalid", *batch).split())
        return found

    def add_fixed(self, files: Sequence[Path], *, recursive: bool = False) -> list[str]:
        flags = ["--recursive"] if recursive else []
        added: list[str] = []
        for batch in _batches([str(file) for file in files]):
            added += self._run("--add-fixed", *flags, "sha256", *batch).split()
        if len(added) != len(files):
            raise VerificationError(f"nix-store --add-fixed named {len(added)} paths for {len(files)} files")
        return added

    def delete(self, path: str) -> None:
        self._run("--delete", path)

    def real_path(self, path: str) -> Path:
        root = self._root()
        return Path(root + path) if root else Path(path)

    def disk(self) -> Path:
        place = self.real_path(self.store_dir)
        while not place.exists():
            place = place.parent
        return place

    @property
    def _place(self) -> str:
        return self.url or self._environ.get("NIX_REMOTE", "")

    def _root(self) -> str:
        """The folder that `nix/store` is in, absolute; "" where that is the machine's own root, or not to be known."""
        found = re.search(r"[?&]root=([^&]+)", self._place)
        root = found.group(1) if found else self._place.partition("?")[0]
        # What has a slash and no scheme is a path to Nix, from the working directory if need be.
        if not found and ("/" not in root or "://" in root):
            return ""
        return os.path.abspath(root).rstrip("/")

    def _unmade(self) -> bool:
        """Whether this is a folder in which Nix would have to make a store, which it does even to answer a question."""
        root = self._root()
        # Behind a scheme somebody else keeps the store, and with `state` the database is in a place of its own.
        if not root or "://" in self._place or re.search(r"[?&]state=", self._place):
            return False
        return not os.path.exists(f"{root}/nix/var/nix/db")

    def _environment(self) -> dict[str, str]:
        environment = dict(self._environ)
        if os.geteuid() == 0 and not group_exists("nixbld"):
            # Root without build users: Nix warns on every call unless it is told that there are none.
            environment["NIX_CONFIG"] = f"{environment.get('NIX_CONFIG', '')}\nbuild-users-group =".lstrip("\n")
        return environment

    def _run(self, *arguments: str) -> str:
        command = [self.program, *(["--store", self.url] if self.url else []), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=self._environment(), check=False)
        except FileNotFoundError:
            raise UnsuitableError(
                f"the program {self.program} is not on PATH",
                "install Nix 2.8 or newer, or start through ./hq, which does",
            ) from None
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.strip() or f"exit status {done.returncode}, no message"
        # The last two are how SQLite, which keeps the store's register, says the same.
        full = ("No space left on device", "Disk quota exceeded", "disk I/O error", "database or disk is full")
        if any(words in said for words in full):
            raise UnsuitableError(
                f"no disk space left in {self.disk()}: {said}", "free space (nix-collect-garbage) and run it again"
            )
        if "Permission denied" in said or "cannot connect to" in said.lower():
            raise UnsuitableError(
                f"the Nix store cannot be reached: {said}",
                "start the Nix daemon and be in its group (nix-users on Debian), run as root, or pass --store DIR",
            )
        raise HyperqwenError(f"{' '.join(command[:4])} … failed: {said}")


def _batches(arguments: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    size = 0
    for argument in arguments:
        if batch and size + len(argument) > _ARG_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(argument)
        size += len(argument) + 1
    if batch:
        yield batch


def group_exists(name: str) -> bool:
    """Whether this machine has a group called `name`."""
    import grp

    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True
