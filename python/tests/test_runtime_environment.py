from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError
from hyperqwen.runtime.environment import INHERITED, cuda_environment, engine_environment, may_expand_segments

CACHE = Path("/cache/of/engine")
LINKS = Path("/cache/driver-580.65.06-0123")
UUID = "GPU-11111111-aaaa-0000-0000-000000000001"
names = st.sampled_from(
    [
        *INHERITED,
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "VLLM_API_KEY", "PATH", "X"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTORCH_ALLOC_CONF", "TRITON_PTXAS_PATH", "NVIDIA_VISIBLE_DEVICES"),
    ]
)


def cpu(inherited: Mapping[str, str], **how: Any) -> dict[str, str]:
    return engine_environment(inherited, cache=CACHE, threads=1, **how)


def cuda(inherited: Mapping[str, str], **how: Any) -> dict[str, str]:
    plain: dict[str, Any] = {"driver_links": LINKS, "gpus": [UUID], "cc": Path("/cc")}
    return cuda_environment(inherited, cache=CACHE, **plain | how)


both = pytest.mark.parametrize("make", [cpu, cuda])
Make = Callable[..., dict[str, str]]


@both
@given(caller=st.dictionaries(names, st.text(min_size=1)))
def test_nothing_of_the_caller_but_the_allow_list_reaches_the_engine(make: Make, caller: dict[str, str]) -> None:
    made, plain = make(caller), make({})

    differing = {name for name in made if made[name] != plain.get(name)}

    assert differing <= set(INHERITED), f"leaked: {differing - set(INHERITED)}"
    assert all(made[name] == caller[name] for name in INHERITED if name in caller)


@both
def test_nothing_is_fetched_or_reported(make: Make) -> None:
    made = make({})
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert made[name] == "1", name


@both
def test_every_cache_is_below_the_engines_own(make: Make) -> None:
    made = make({"HOME": "/home/someone"})
    others = ("HF_HOME", "VLLM_CONFIG_ROOT", "FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR")
    caches = {name: value for name, value in made.items() if "CACHE" in name or name in others}

    assert len(caches) >= (10 if make is cuda else 6)
    assert [name for name, value in caches.items() if not Path(value).is_relative_to(CACHE)] == []


@both
def test_the_key_is_there_only_when_given(make: Make) -> None:
    assert "VLLM_API_KEY" not in make({"VLLM_API_KEY": "other"})
    assert make({}, api_key="k")["VLLM_API_KEY"] == "k"


@both
def test_paths(make: Make) -> None:
    made = make({}, programs=[Path("/a/bin"), Path("/b/bin")], python_path=[Path("/p"), Path("/q")])

    assert made["PATH"] == ("/a/bin:/b/bin:/cc/bin" if make is cuda else "/a/bin:/b/bin")
    assert made["PYTHONPATH"] == "/p:/q"
    # An empty PATH would mean the working directory.
    assert make({})["PATH"]
    assert "PYTHONPATH" not in make({})


@both
def test_a_user_without_a_home_gets_one(make: Make) -> None:
    assert make({})["HOME"] == str(CACHE)


def test_threads() -> None:
    assert engine_environment({}, cache=CACHE, threads=3)["OMP_NUM_THREADS"] == "3"


def test_of_the_host_the_engine_sees_the_drivers_files_alone() -> None:
    made = cuda({"LD_LIBRARY_PATH": "/usr/lib/x86_64-linux-gnu", "CUDA_HOME": "/usr/local/cuda"})

    assert made["LD_LIBRARY_PATH"] == made["TRITON_LIBCUDA_PATH"] == str(LINKS)
    assert "CUDA_HOME" not in made and "TRITON_PTXAS_PATH" not in made
    assert (made["CC"], made["CXX"]) == ("/cc/bin/cc", "/cc/bin/c++")


def test_pinned_tools_of_cuda() -> None:
    made = cuda({}, ptxas=Path("/cu13/bin/ptxas"), cuda_home=Path("/cu13"))

    assert made["CUDA_HOME"] == "/cu13" and made["PATH"] == "/cc/bin:/cu13/bin"
    assert made["TRITON_PTXAS_PATH"] == made["TRITON_PTXAS_BLACKWELL_PATH"] == "/cu13/bin/ptxas"


def test_cards_in_the_order_given() -> None:
    assert cuda({}, gpus=["GPU-b", "GPU-a"])["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"


def test_the_cpu_engine_has_nothing_of_cuda_and_the_other_way_round() -> None:
    on_cpu, on_cuda = cpu({}), cuda({})
    assert not [name for name in on_cpu if name.startswith(("CUDA_", "FLASHINFER_", "LD_", "PYTORCH_CUDA"))]
    # Several cards need worker processes, and torch.compile stays on.
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"} & set(on_cuda)


@pytest.mark.parametrize(("wsl2", "wanted", "said"), [(False, True, True), (False, False, False), (True, True, False)])
def test_expandable_segments_and_pinned_memory(wsl2: bool, wanted: bool, said: bool) -> None:
    made = cuda({}, wsl2=wsl2, expandable_segments=wanted)

    assert made["PYTORCH_CUDA_ALLOC_CONF"] == f"expandable_segments:{said}"
    assert made.get("VLLM_WSL2_ENABLE_PIN_MEMORY") == ("1" if wsl2 else None)


@pytest.mark.parametrize(
    ("against", "may"),
    [
        ({}, True),
        ({"wsl2": True}, False),
        ({"kv_connector": True}, False),
        ({"custom_all_reduce": True, "graphs": True}, False),
        ({"custom_all_reduce": True}, True),
        ({"graphs": True}, True),
    ],
)
def test_what_speaks_against_expandable_segments(against: dict[str, bool], may: bool) -> None:
    plain = dict.fromkeys(("wsl2", "kv_connector", "custom_all_reduce", "graphs"), False)
    assert may_expand_segments(**plain | against) is may


def test_the_profile_adds_and_does_not_replace() -> None:
    assert cuda({}, variables={"VLLM_FOO": "1", "HF_HUB_OFFLINE": "1"})["VLLM_FOO"] == "1"
    with pytest.raises(BadInputError) as raised:
        cuda({}, variables={"LD_LIBRARY_PATH": "/usr/lib"})
    assert "sets LD_LIBRARY_PATH to '/usr/lib'" in str(raised.value)


def test_the_users_own_names_are_no_way_around_it() -> None:
    """HOME comes from the caller, so a profile may not say otherwise, whether the caller set one or not."""
    for caller in ({}, {"HOME": "/home/someone"}):
        with pytest.raises(BadInputError):
            cuda(caller, variables={"HOME": "/elsewhere"})
