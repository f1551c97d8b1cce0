"""What a shared library's ELF header says: for which machine it is, its name, and what it needs of others.

Only the program headers and the dynamic section are read: a driver library has a hundred megabytes.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MACHINES = {3: "i386", 40: "arm", 62: "x86-64", 183: "aarch64", 243: "riscv"}
_X86_64 = 62
_ET_DYN = 3
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 1, 5, 10, 14
_DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
# Real tables have some hundred kilobytes, and real chains some ten links; a torn file may claim anything.
_MOST_BYTES = 1 << 26
_MOST_LINKS = 1 << 10


class NotLoadable(ValueError):
    """Why the loader of a 64-bit x86 program would not take a file."""


@dataclass(frozen=True)
class Library:
    """The dynamic section of a shared library.

    soname: the name under which the loader knows it, where it has one.
    needed: names of the libraries that it is linked with.
    versions: (library, version) pairs of the symbol versions that it needs, such as ("libc.so.6", "GLIBC_2.17").
    """

    soname: str | None
    needed: tuple[str, ...]
    versions: frozenset[tuple[str, str]]

    def newest_glibc(self) -> tuple[int, ...] | None:
        """The lowest glibc version that satisfies all GLIBC_x.y needs, or None without any."""
        numbers = [name.removeprefix("GLIBC_") for _, name in self.versions if name.startswith("GLIBC_")]
        return max((tuple(map(int, n.split("."))) for n in numbers if n.replace(".", "").isdecimal()), default=None)


def read(path: Path) -> Library:
    """The dynamic section of the file at `path`. Raises NotLoadable with the reason, OSError where it can't be read."""
    with path.open("rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF":
            raise NotLoadable("not an ELF file" if head else "an empty file")
        if len(head) < 64:
            raise NotLoadable("a torn ELF file")
        (kind, machine) = struct.unpack_from("<HH", head, 16)
        if head[4] != 2:
            raise NotLoadable(f"a 32-bit library ({_MACHINES.get(machine, machine)})")
        if head[5] != 1 or machine != _X86_64:
            raise NotLoadable(f"a library for {_MACHINES.get(machine, f'machine {machine}')}, not x86-64")
        if kind != _ET_DYN:
            raise NotLoadable("an ELF file, but not a shared library")
        try:
            return _Dynamic(file, head).library()
        except NotLoadable:
            raise
        except (struct.error, LookupError, ValueError):
            raise NotLoadable("a torn ELF file") from None


class _Dynamic:
    """Reads through the program headers' map from addresses to places in the file."""

    def __init__(self, file: BinaryIO, head: bytes) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        (offset,) = struct.unpack_from("<Q", head, 32)
        (size, count) = struct.unpack_from("<HH", head, 54)
        table = self._at(offset, size * count)
        headers: list[tuple[int, ...]] = [struct.unpack_from("<IIQQQQ", table, size * n) for n in range(count)]
        self._loads = [(address, place, length) for kind, _, place, address, _, length in headers if kind == _PT_LOAD]
        self._dynamic = next(((place, length) for kind, _, place, _, _, length in headers if kind == _PT_DYNAMIC), None)

    def library(self) -> Library:
        if self._dynamic is None:
            raise NotLoadable("an ELF file without a dynamic section")
        entries: dict[int, list[int]] = {}
        for tag, value in struct.iter_unpack("<QQ", self._at(*self._dynamic)):
            if tag == 0:
                break
            entries.setdefault(tag, []).append(value)
        strings = self._at(self._place(entries[_DT_STRTAB][0]), entries[_DT_STRSZ][0]) if _DT_STRTAB in entries else b""
        names = [_name(strings, value) for value in entries.get(_DT_SONAME, [])]
        return Library(
            names[0] if names else None,
            tuple(_name(strings, value) for value in entries.get(_DT_NEEDED, [])),
            frozenset(self._versions(entries, strings)),
        )

    def _versions(self, entries: dict[int, list[int]], strings: bytes) -> list[tuple[str, str]]:
        """A chain of libraries, each with a chain of versions; both link by distances."""
        if _DT_VERNEED not in entries:
            return []
        found = []
        place = self._place(entries[_DT_VERNEED][0])
        for _ in range(min(entries[_DT_VERNEEDNUM][0], _MOST_LINKS)):
            _, count, library, versions, after = struct.unpack("<HHIII", self._at(place, 16))
            entry = place + versions
            for _ in range(min(count, _MOST_LINKS)):
                _, _, _, version, step = struct.unpack("<IHHII", self._at(entry, 16))
                found.append((_name(strings, library), _name(strings, version)))
                entry += step
            place += after
        return found

    def _place(self, address: int) -> int:
        for start, place, length in self._loads:
            if start <= address < start + length:
                return place + address - start
        raise NotLoadable("a torn ELF file")

    def _at(self, place: int, length: int) -> bytes:
        if length > _MOST_BYTES or place + length > self._size:
            raise NotLoadable("a torn ELF file")
        self._file.seek(place)
        return self._file.read(length)


def _name(strings: bytes, place: int) -> str:
    return strings[place : strings.index(b"\0", place)].decode()
