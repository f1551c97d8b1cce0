"""FlashInfer compiles a module of its own with our toolkit, as it does at an engine's first start, and loads it.

spec: cuda-home, cc (compiler), busybox, tools (with bwrap), root (folder with python/hyperqwen).

The module is its smallest; that of an fp8 cache takes a processor core nine minutes. It is compiled for all
architectures that this model is known to run on. There is no driver in a sandbox: a library of stubs stands in for it.
"""

import ctypes
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

BUILD = pathlib.Path(os.environ["NIX_BUILD_TOP"])
RESULT = BUILD / "module.json"


def build_module() -> None:
    """In the engine's environment: compile, load and call; what came of it goes to RESULT."""
    import torch
    from flashinfer.jit import env, gen_jit_spec
    from flashinfer.jit.quantization import gen_quantization_module

    module = gen_quantization_module()
    # A source of a larger module, which calls the driver's library by name.
    driver = gen_jit_spec("driver", [env.FLASHINFER_CSRC_DIR / "xqa" / "tensorMap.cpp"], extra_ldflags=["-lcuda"])
    for built in (module, driver):
        built.build()
        # All symbols now, not each at its first call.
        ctypes.CDLL(str(built.jit_library_path), os.RTLD_NOW)
    try:
        module.load().packbits(torch.ones(8, dtype=torch.bool), "little", torch.zeros(1, dtype=torch.uint8))
        answer = "took tensors that are not on a card"
    except Exception as error:
        answer = str(error)
    RESULT.write_text(json.dumps({"library": str(module.jit_library_path), "answer": answer}))


def with_shell(spec: dict[str, Any]) -> list[str]:
    """What to put before a command so that it finds /bin/sh, by which ninja and nvcc start what they start.

    Every host has one, and a Nix sandbox has none.
    """
    if os.path.exists("/bin/sh"):
        return []
    store = str(pathlib.Path(spec["cc"]).parent)
    return [
        f"{spec['tools']}/bin/bwrap", "--unshare-user", "--die-with-parent", "--ro-bind", store, store,
        "--bind", str(BUILD), str(BUILD), "--ro-bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev",
        "--symlink", spec["busybox"], "/bin/sh",
    ]  # fmt: skip


def kernels(library: str) -> dict[str, int]:
    """Number of kernels in a library by architecture, sm_90a as sm_90."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    cuobjdump = pathlib.Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    result = subprocess.run([cuobjdump, "-symbols", library], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = {}
    for part in result.stdout.split("Fatbin elf code:")[1:]:
        (architecture,) = re.findall(r"^arch = (sm_\d+)[af]?$", part, re.MULTILINE)
        found[architecture] = found.get(architecture, 0) + part.count("STO_ENTRY")
    return found


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    # Not the copies that the engine's environment holds of some of them.
    sys.path.insert(0, f"{spec['root']}/python")
    from hyperqwen.profiles.cards import CARDS
    from hyperqwen.runtime.environment import cuda_environment

    home = pathlib.Path(spec["cuda-home"])
    driver = BUILD / "driver"
    driver.mkdir()
    (driver / "libcuda.so.1").symlink_to(home / "lib64" / "stubs" / "libcuda.so")
    architectures = sorted({card.sm for card in CARDS.values() if card.evidence != "none"})

    def module_with(cuda_home: pathlib.Path | None) -> "subprocess.CompletedProcess[str]":
        environment = cuda_environment(
            {"TMPDIR": str(BUILD)},
            cache=BUILD / "cache",
            driver_links=driver,
            gpus=[],
            cc=pathlib.Path(spec["cc"]),
            programs=[pathlib.Path(sys.executable).parent],
            cuda_home=cuda_home,
            # An engine asks its cards.
            variables={"FLASHINFER_CUDA_ARCH_LIST": " ".join(f"{sm // 10}.{sm % 10}" for sm in architectures)},
        )
        return subprocess.run(
            [*with_shell(spec), sys.executable, "-I", "-B", __file__, "module"],
            env={**environment, "NIX_BUILD_TOP": str(BUILD)},
            stderr=subprocess.PIPE,
            text=True,
        )

    # It asks `which` for another toolkit, and the engine's PATH has none: the host's cannot stand in for ours.
    without = module_with(None)
    if RESULT.exists() or "No such file or directory: 'which'" not in without.stderr:
        sys.exit(f"without CUDA_HOME, FlashInfer should find no toolkit; exit status {without.returncode}, and it said:"
                 f"\n{without.stderr}")  # fmt: skip

    began = time.monotonic()
    made = module_with(home)
    if made.returncode or not RESULT.exists():
        sys.exit(f"FlashInfer cannot compile with {home}; exit status {made.returncode}, and it said:\n{made.stderr}")
    print(f"compiled, loaded and called in {time.monotonic() - began:.0f} s")
    result = json.loads(RESULT.read_text())
    if "must be a CUDA tensor" not in result["answer"]:
        sys.exit(f"packbits() was called with tensors of the CPU, and: {result['answer']}")
    counts = kernels(result["library"])
    expected = {f"sm_{sm}" for sm in architectures}
    if counts.keys() != expected or not all(counts.values()):
        sys.exit(f"kernels for {sorted(expected)} expected, found {counts}")
    report = f"{pathlib.Path(result['library']).name} loaded and called; kernels by architecture: {counts}\n"
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report)


if sys.argv[1:] == ["module"]:
    build_module()
else:
    main()
