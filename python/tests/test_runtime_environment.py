from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.runtime.environment import INHERITED, engine_environment

CACHE = Path("/cache/of/engine")
names = st.sampled_from(
    [*INHERITED, "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "VLLM_API_KEY", "PATH", "X"]
)


@given(st.dictionaries(names, st.text(min_size=1)))
def test_nothing_of_the_caller_but_the_allow_list_reaches_the_engine(caller: dict[str, str]) -> None:
    made = engine_environment(caller, cache=CACHE, threads=1)
    plain = engine_environment({}, cache=CACHE, threads=1)

    differing = {name for name in made if made[name] != plain.get(name)}

    assert differing <= set(INHERITED), f"leaked: {differing - set(INHERITED)}"
    assert all(made[name] == caller[name] for name in INHERITED if name in caller)


def test_nothing_is_fetched_or_reported() -> None:
    made = engine_environment({}, cache=CACHE, threads=1)

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert made[name] == "1", name


def test_every_cache_is_below_the_engines_own() -> None:
    made = engine_environment({"HOME": "/home/someone"}, cache=CACHE, threads=1)
    caches = {name: value for name, value in made.items() if "CACHE" in name or name in ("HF_HOME", "VLLM_CONFIG_ROOT")}

    assert len(caches) >= 6
    assert [name for name, value in caches.items() if not Path(value).is_relative_to(CACHE)] == []


def test_the_key_is_there_only_when_given() -> None:
    assert "VLLM_API_KEY" not in engine_environment({"VLLM_API_KEY": "other"}, cache=CACHE, threads=1)
    assert engine_environment({}, cache=CACHE, threads=1, api_key="k")["VLLM_API_KEY"] == "k"


def test_paths_and_threads() -> None:
    made = engine_environment(
        {}, cache=CACHE, threads=3, programs=[Path("/a/bin"), Path("/b/bin")], python_path=[Path("/p"), Path("/q")]
    )

    assert made["PATH"] == "/a/bin:/b/bin"
    assert made["PYTHONPATH"] == "/p:/q"
    assert made["OMP_NUM_THREADS"] == "3"
    # An empty PATH would mean the working directory.
    assert engine_environment({}, cache=CACHE, threads=1)["PATH"]
    assert "PYTHONPATH" not in engine_environment({}, cache=CACHE, threads=1)


def test_a_user_without_a_home_gets_one() -> None:
    assert engine_environment({}, cache=CACHE, threads=1)["HOME"] == str(CACHE)
