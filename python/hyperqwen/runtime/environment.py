"""The environment of the engine's process, built from nothing: a few inherited variables and what the server needs.

An engine that inherits the caller's environment loads the caller's libraries (LD_LIBRARY_PATH), Python packages
(PYTHONPATH, user site) and proxies, and behaves differently on the next box. This one does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

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
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # The worker runs inside the engine's process; it is one process less to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A request for logprobs would otherwise wait for a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # One machine, one process group: neither needs the host's name to resolve nor its network to be up.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key
    return environment
