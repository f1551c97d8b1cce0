"""Read Debian packages; shared by the builders that start from .debs."""

import io
import os
import shutil
import sys
import tarfile


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
