"""Take one file out of a .deb: an ar archive that holds a compressed tar. Bare Python 3.9."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from hyperqwen.errors import VerificationError

_MAGIC = b"!<arch>\n"
_HEADER = 60


def member(deb: Path, name: str) -> bytes:
    """The bytes of the regular file `name` (such as ./bin/busybox) of `deb`; VerificationError if it has none."""
    data = _data_archive(deb)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:*") as archive:
            for entry in archive:
                if entry.name.lstrip("./") == name.lstrip("./") and entry.isreg():
                    found = archive.extractfile(entry)
                    if found is not None:
                        return found.read()
    except tarfile.TarError as error:
        raise VerificationError(f"{deb.name}: its data archive cannot be read: {error}") from None
    raise VerificationError(f"{deb.name} holds no file {name}", "correct extract.member in nix/pins/debs.json")


def _data_archive(deb: Path) -> bytes:
    with open(deb, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise VerificationError(f"{deb.name} is not a .deb (no ar archive)")
        while True:
            header = file.read(_HEADER)
            if len(header) < _HEADER:
                raise VerificationError(f"{deb.name} has no data archive")
            length = int(header[48:58])
            if header[:16].startswith(b"data.tar"):
                return file.read(length)
            file.seek(length + length % 2, io.SEEK_CUR)
