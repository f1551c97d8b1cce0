"""What CUDA_HOME points at: nvcc with its headers and libraries where a toolkit has them.

spec: engine (an environment with NVIDIA's wheels), cc (path), libraries (their names, without lib and .so).

FlashInfer compiles its fp8 kernels with it on cards before sm90, the only ones that read an fp8 cache there.
"""

import json
import os
import shutil
import subprocess

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)


def main() -> None:
    out = os.environ["out"]
    source = f"{spec['engine']}/site/nvidia/cu13"
    # nvcc finds the rest beside its own real file, so it is a copy; what it finds may be links.
    shutil.copytree(f"{source}/bin", f"{out}/bin")
    for directory, _, _ in os.walk(f"{out}/bin"):
        os.chmod(directory, 0o755)
    for name in ("include", "nvvm"):
        os.symlink(f"{source}/{name}", f"{out}/{name}")
    os.makedirs(f"{out}/lib64/stubs")
    for name in sorted(os.listdir(f"{source}/lib")):
        stem = name.partition(".")[0].removeprefix("lib")
        if stem in spec["libraries"] and ".alt." not in name:
            link = f"lib{stem}.so" if ".so." in name else name
            os.symlink(f"{source}/lib/{name}", f"{out}/lib64/{link}")
    # -lcuda needs a file to link against; the driver's own is found when the module is loaded.
    stub = os.path.join(os.environ["NIX_BUILD_TOP"], "stub.c")
    with open(stub, "w") as file:
        file.write("int hyperqwen_cuda_stub;\n")
    subprocess.run(
        [f"{spec['cc']}/bin/gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1,--build-id=none"]
        + ["-o", f"{out}/lib64/stubs/libcuda.so", stub],
        check=True,
    )
    missing = [name for name in spec["libraries"] if not any(f"lib{name}." in link for link in os.listdir(f"{out}/lib64"))]
    if missing:
        raise SystemExit(f"{source}/lib has no {', '.join(missing)}")


main()
