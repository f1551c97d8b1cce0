"""Triton's own build step compiles its launcher module with our compiler, and Python loads the result.

spec: cc (compiler), runtime (the Python whose headers it includes).

There is no driver in a sandbox: a library of stubs that has every symbol the launcher asks for stands in for it, so
that the link and the load are real and no call is made.
"""

import ctypes
import json
import os
import pathlib
import re
import subprocess
import sys

BUILD = pathlib.Path(os.environ["NIX_BUILD_TOP"])


def stub_driver(source: str, compiler: str) -> pathlib.Path:
    """A libcuda.so.1 with the driver calls that `source` names."""
    calls = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source)))
    if len(calls) < 10:
        sys.exit(f"Triton's launcher names only {calls}: it is not the file that this check knows")
    code = BUILD / "stub.c"
    code.write_text("".join(f"int {call}(void) {{ return 999; }}\n" for call in calls))
    library = BUILD / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, code], check=True)
    return library


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    os.environ.update(
        CC=f"{spec['cc']}/bin/cc", HOME=str(BUILD), TRITON_CACHE_DIR=str(BUILD / "cache"), TMPDIR=str(BUILD)
    )
    import triton
    from triton.runtime import build

    backend = pathlib.Path(triton.__file__).parent / "backends" / "nvidia"
    source = (backend / "driver.c").read_text()
    ctypes.CDLL(str(stub_driver(source, os.environ["CC"])), ctypes.RTLD_GLOBAL)
    (BUILD / "cuda_utils.c").write_text(source)
    library = build._build(
        "cuda_utils", str(BUILD / "cuda_utils.c"), str(BUILD), [str(backend / "lib"), str(BUILD)],
        [str(backend / "include")], ["libcuda.so.1"], [],
    )  # fmt: skip
    module = build._load_module_from_path("cuda_utils", library)
    if not callable(getattr(module, "launch", None)):
        sys.exit(f"the module has no launch(): {dir(module)}")
    with open(os.environ["out"], "w") as file:
        file.write(f"{os.path.getsize(library)} bytes, loaded\n")


main()
