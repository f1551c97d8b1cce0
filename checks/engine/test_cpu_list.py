"""Patch 0001: the CPU worker lists its processors without a shell and without lscpu.

Runs in the engine's environment. HYPERQWEN_NANO names a checkpoint of nano.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import LogicalCPUInfo, get_allowed_cpu_list
from vllm.utils.ompmultiprocessing import OMPProcessManager

from hyperqwen.engine import cpu
from hyperqwen.engine.cpu import Cpu

# A process whose machine holds no program but this Python: starting any other fails as it would there.
BARE_MACHINE = """
import json, os, sys

started = []

def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.spawn", "os.system"):
        program = os.fsdecode(arguments[1] if event == "os.spawn" else arguments[0] or arguments[1][0])
        if program != sys.executable:
            started.append(f"{program} {arguments[1:2]}")
            raise FileNotFoundError(2, "No such file or directory", program)

sys.addaudithook(refuse)

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_model_len=128, max_num_seqs=1, enforce_eager=True)
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
output = llm.generate(["import os"], greedy, use_tqdm=False)
print(json.dumps({"tokens": list(output[0].outputs[0].token_ids), "started": started}))
"""


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError(f"this machine holds no other program: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "system", refuse)


@pytest.mark.usefixtures("no_programs")
def test_the_list_is_this_process_s_affinity() -> None:
    cpus = get_allowed_cpu_list()

    assert {info.id for info in cpus} == os.sched_getaffinity(0)
    assert all(isinstance(info, LogicalCPUInfo) for info in cpus)


@pytest.mark.usefixtures("no_programs")
def test_the_list_narrows_with_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    try:
        os.sched_setaffinity(0, {last})
        assert [info.id for info in get_allowed_cpu_list()] == [last]
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("no_programs")
def test_each_worker_binds_one_thread_a_core_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of four cores with two threads: vLLM groups by our core number and splits by our node."""
    machine = [Cpu(id, core=id % 8, node=id % 8 // 4, socket=id % 8 // 4) for id in range(16)]
    monkeypatch.setattr(cpu, "logical_cpus", lambda: machine)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0, 1])
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(local_world_size=2, data_parallel_rank_local=None, _api_process_count=1),
        kv_transfer_config=None,
    )

    manager = OMPProcessManager(config)

    assert manager.cpu_lists == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_the_engine_answers_on_a_machine_without_programs(tmp_path: Path) -> None:
    model = os.environ.get("HYPERQWEN_NANO")
    assert model, "HYPERQWEN_NANO must name a checkpoint of nano"
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    done = subprocess.run(
        [sys.executable, "-c", BARE_MACHINE, model],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["tokens"]) == 4
    assert not [program for program in result["started"] if "lscpu" in program or "/sh " in program], result
