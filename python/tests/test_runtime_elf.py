from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.runtime import elf
from tests.recorded_host import compiled


def test_what_a_linker_wrote() -> None:
    library = elf.read(compiled("libmine.so.3", needs=("libother.so.1", "libthird.so")))

    assert library.soname == "libmine.so.3"
    assert library.needed == ("libother.so.1", "libthird.so")
    assert library.newest_glibc() is None


def test_the_newest_version_counts_as_a_number() -> None:
    newer = elf.read(compiled("libmine.so.3", glibc="GLIBC_2.107"))

    assert newer.versions == {("libc.so.6", "GLIBC_2.107")}
    assert newer.newest_glibc() == (2, 107)
    both = elf.Library(None, (), newer.versions | {("libc.so.6", "GLIBC_2.9"), ("libc.so.6", "GLIBC_PRIVATE")})
    assert both.newest_glibc() == (2, 107)


def test_the_interpreters_own_extension_modules() -> None:
    """Real files of another maker: a module of Python's own is linked with the C library."""
    modules = [path for folder in sys.path for path in Path(folder).glob("_*.cpython-*.so")]
    read = [elf.read(path) for path in modules]

    assert read, "no extension module to look at"
    assert any("libc.so.6" in library.needed for library in read)
    assert all((2, 2) <= (library.newest_glibc() or (2, 2)) < (3,) for library in read)


def patched(path: Path, place: int, data: bytes, into: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[place : place + len(data)] = data
    into.write_bytes(content)
    return into


@pytest.mark.parametrize(
    ("place", "data", "reason"),
    [
        (0, b"#! /bin", "not an ELF file"),
        (4, b"\1\1\1\0\0\0\0\0\0\0\0\0\3\0\3\0", "a 32-bit library (i386)"),
        (18, struct.pack("<H", 183), "a library for aarch64, not x86-64"),
        (5, b"\2", "a library for x86-64, not x86-64"),
        (16, struct.pack("<H", 1), "an ELF file, but not a shared library"),
        (56, struct.pack("<H", 0), "an ELF file without a dynamic section"),
        (56, struct.pack("<H", 60000), "a torn ELF file"),
        (32, struct.pack("<Q", 1 << 63), "a torn ELF file"),
    ],
)
def test_what_the_loader_would_not_take(place: int, data: bytes, reason: str, tmp_path: Path) -> None:
    file = patched(compiled("libmine.so.3"), place, data, tmp_path / "file")

    with pytest.raises(elf.NotLoadable) as raised:
        elf.read(file)

    assert str(raised.value) == reason


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(elf.NotLoadable, match="an empty file"):
        elf.read(tmp_path / "file")


@given(length=st.integers(0, 400), noise=st.binary(max_size=24), place=st.integers(0, 4000))
def test_a_torn_file_has_a_reason(
    length: int, noise: bytes, place: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the bytes, there is an answer or a reason, and no other exception."""
    whole = bytearray(compiled("libmine.so.3", needs=("libother.so.1",), glibc="GLIBC_2.30").read_bytes())
    whole[place : place + len(noise)] = noise
    file = tmp_path_factory.mktemp("torn") / "file"
    for data in (whole, whole[: length * 8]):
        file.write_bytes(data)
        try:
            elf.read(file)
        except elf.NotLoadable as reason:
            assert str(reason)
