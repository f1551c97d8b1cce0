"""The environment of the engine's process, built from nothing: a few inherited variables and what the server needs.

An engine that inherits the caller's environment loads the caller's libraries (LD_LIBRARY_PATH), Python packages
(PYTHONPATH, user site) and proxies, and behaves differently on the next box. This one does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperqwen.errors import BadInputError

# Who the user is, how the terminal speaks, where temporary files go: nothing that can change what is loaded.
INHERITED = (
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LOGNAME",
    "NO_COLOR",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
)


def engine_environment(
    inherited: Mapping[str, str],
    *,
    cache: Path,
    threads: int,
    programs: Sequence[Path] = (),
    python_path: Sequence[Path] = (),
    api_key: str | None = None,
) -> dict[str, str]:
    """The variables of an engine on the CPU.

    Args:
        inherited: the caller's environment, of which only `INHERITED` goes on.
        cache: writable folder that belongs to this engine alone; every cache goes below it.
        threads: OpenMP threads.
        programs: folders for PATH.
        python_path: folders for PYTHONPATH, for an engine whose environment does not hold hyperqwen itself.
        api_key: what clients must send; it goes into the environment because argv is for every user to read.
    """
    return _common(inherited, cache, programs, python_path, api_key) | {
        "OMP_NUM_THREADS": str(threads),
        # The worker runs inside the engine's process; it is one process less to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A request for logprobs would otherwise wait for a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }


def cuda_environment(
    inherited: Mapping[str, str],
    *,
    cache: Path,
    driver_links: Path,
    gpus: Sequence[str],
    cc: Path,
    programs: Sequence[Path] = (),
    python_path: Sequence[Path] = (),
    api_key: str | None = None,
    wsl2: bool = False,
    expandable_segments: bool = True,
    ptxas: Path | None = None,
    cuda_home: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables of an engine on NVIDIA cards.

    Args:
        inherited, cache, programs, python_path, api_key: as for `engine_environment`.
        driver_links: folder with links to the driver's files alone (`driver.link_directory`).
        gpus: UUIDs of the cards, in the order in which the engine is to count them.
        cc: folder with bin/cc and bin/c++; Triton compiles the launcher of each kernel.
        wsl2: pinned memory on, which vLLM leaves off there unasked, and expandable segments off, which fail there.
        expandable_segments: torch's allocator grows segments in place; see `may_expand_segments`.
        ptxas: the program, where Triton's own is not to be used.
        cuda_home: folder with bin/nvcc and include of CUDA, for what FlashInfer compiles. Without one it fails where it
            has to: a toolkit of the host's is not found either, for PATH has no `which` to ask for it.
        variables: what the profile sets for the engine beyond these.

    Raises BadInputError where `variables` names one that is decided here.
    """
    # In search order: the compiler's folder has the assembler and linker that it calls.
    folders = [*programs, cc / "bin", *([cuda_home / "bin"] if cuda_home else [])]
    environment = _common(inherited, cache, folders, python_path, api_key) | {
        # The driver's own files and nothing else of the host: its libc would come before ours.
        "LD_LIBRARY_PATH": str(driver_links),
        # Triton would run the host's ldconfig to find libcuda, which NixOS does not have.
        "TRITON_LIBCUDA_PATH": str(driver_links),
        "CC": str(cc / "bin" / "cc"),
        "CXX": str(cc / "bin" / "c++"),
        # By UUID: CUDA counts cards by speed unless told otherwise, and an index would be another card's.
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "TILELANG_CACHE_DIR": str(cache / "tilelang"),
        "TORCH_EXTENSIONS_DIR": str(cache / "torch-extensions"),
        # Its first request would compile for minutes.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Its packages of compiled kernels have another build label than itself; the pins keep them together.
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "FLASHINFER_NO_DOWNLOAD": "1",
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable_segments and not wsl2}",
        # The processes of one machine find each other without a network.
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if wsl2:
        environment["VLLM_WSL2_ENABLE_PIN_MEMORY"] = "1"
    if ptxas is not None:
        # Triton asks by the second name for cards of capability 10 and later.
        environment["TRITON_PTXAS_PATH"] = environment["TRITON_PTXAS_BLACKWELL_PATH"] = str(ptxas)
    if cuda_home is not None:
        environment["CUDA_HOME"] = str(cuda_home)
    for name, value in (variables or {}).items():
        if name in environment and environment[name] != value:
            raise BadInputError(
                f"the profile sets {name} to {value!r}, which the launcher sets to {environment[name]!r}",
                f"leave {name} out of the profile",
            )
        environment[name] = value
    return environment


def may_expand_segments(*, wsl2: bool, kv_connector: bool, custom_all_reduce: bool, graphs: bool) -> bool:
    """Whether torch's allocator may grow its segments in place.

    Not on WSL2; not with a KV connector, where vLLM refuses to start; and not where CUDA graphs capture the custom
    all-reduce of several cards, whose buffers CUDA cannot share between processes if they lie in such segments.
    """
    return not (wsl2 or kv_connector or (custom_all_reduce and graphs))


def _common(
    inherited: Mapping[str, str],
    cache: Path,
    programs: Sequence[Path],
    python_path: Sequence[Path],
    api_key: str | None,
) -> dict[str, str]:
    environment = {name: inherited[name] for name in INHERITED if name in inherited}
    environment.setdefault("HOME", str(cache))
    environment.setdefault("LANG", "C.UTF-8")
    environment |= {
        "PATH": os.pathsep.join(map(str, programs)) or "/nonexistent",
        # Nothing is fetched and nothing is reported while serving.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "XDG_CACHE_HOME": str(cache),
        "XDG_CONFIG_HOME": str(cache / "config"),
        "HF_HOME": str(cache / "huggingface"),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_CONFIG_ROOT": str(cache / "config" / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # One machine, one process group: neither needs the host's name to resolve nor its network to be up.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key
    return environment
