"""What CUDA_HOME points at: nvcc, and its headers and libraries where a toolkit has them.

spec: engine (an environment with NVIDIA's wheels), cc (compiler).

FlashInfer compiles what it needs at first use. On cards before sm89 nothing but it reads an fp8 cache.
"""

import json
import os
import re
import shutil
import subprocess
import sys

with open(os.environ["specPath"]) as file:
    spec = json.load(file)

STUB = 34  # CUDA_ERROR_STUB_LIBRARY


def released(toolkit: str, nvcc: str) -> None:
    """Stop unless compiler and headers are of one release: with others, every compilation would fail."""
    with open(f"{toolkit}/include/cuda_runtime_api.h") as file:
        (number,) = re.findall(r"^#define CUDART_VERSION +(\d+)$", file.read(), re.MULTILINE)
    headers = f"{int(number) // 1000}.{int(number) % 1000 // 10}"
    said = subprocess.run([nvcc, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    (compiler,) = re.findall(r"release ([\d.]+),", said)
    if compiler != headers:
        sys.exit(f"nvcc is of CUDA {compiler} and its headers are of {headers}: pin wheels of one release")


def stub_driver(toolkit: str, library: str) -> None:
    """Something for -lcuda to link against, with all functions of cuda.h; a module loads the driver's own in its place.

    All of them, for the linker drops a library that has nothing of what a module calls, and the module then finds no
    driver when it is loaded.
    """
    compiler = f"{spec['cc']}/bin/gcc"
    # Preprocessed, for macros give functions the names that the driver has (cuMemAlloc_v2).
    header = subprocess.run(
        [compiler, "-E", f"{toolkit}/include/cuda.h"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    functions = sorted(set(re.findall(r"\bCUresult\s+(cu\w+)\(", header)))
    code = "".join(f"int {name}(void) {{ return {STUB}; }}\n" for name in functions)
    subprocess.run(
        [compiler, "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1,--build-id=none", "-x", "c", "-", "-o", library],
        check=True,
        input=code.encode(),
    )


def main() -> None:
    out, toolkit = os.environ["out"], f"{spec['engine']}/site/nvidia/cu13"
    for name in ("bin", "lib64/stubs"):
        os.makedirs(f"{out}/{name}")
    for name in ("include", "nvvm"):
        os.symlink(f"{toolkit}/{name}", f"{out}/{name}")
    for name in os.listdir(f"{toolkit}/bin"):
        if name != "nvcc":
            os.symlink(f"{toolkit}/bin/{name}", f"{out}/bin/{name}")
    # No link: it looks for all the others around its own real file.
    shutil.copy(f"{toolkit}/bin/nvcc", f"{out}/bin/nvcc")
    for name in os.listdir(f"{toolkit}/lib"):
        stem, shared, _ = name.partition(".so")
        if shared or name.endswith(".a"):
            # By the name that -l looks for, which the wheels' libX.so.13 is not.
            os.symlink(f"{toolkit}/lib/{name}", f"{out}/lib64/{stem}{shared}")
    stub_driver(toolkit, f"{out}/lib64/stubs/libcuda.so")
    released(toolkit, f"{out}/bin/nvcc")


main()
