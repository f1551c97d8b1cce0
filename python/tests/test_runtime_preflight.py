from __future__ import annotations

import json
import mmap
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hyperqwen import errors
from hyperqwen.errors import BadInputError, HyperqwenError, MissingError, UnsuitableError, VerificationError
from hyperqwen.profiles.argv import ModelPaths
from hyperqwen.profiles.cards import CARDS
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.memory import Budget
from hyperqwen.profiles.planner import make_plan
from hyperqwen.profiles.profile import GIB, MIB, Profile, load, shipped
from hyperqwen.runtime import ports, preflight
from hyperqwen.runtime.driver import CUDA, NVML, Driver, Finding, Survey
from hyperqwen.runtime.gpu import Gpu, Process
from hyperqwen.runtime.host import Host, Kind, Problem
from hyperqwen.runtime.preflight import Item
from tests.test_runtime_model_files import config_of
from tests.test_runtime_model_files import write as write_model

HOST = Host(
    kind=Kind.DEBIAN,
    distribution=Kind.DEBIAN,
    title="Debian GNU/Linux 13",
    container=None,
    wsl=0,
    kernel="6.12.0",
    memory=64 * GIB,
    memory_free=48 * GIB,
    swap=0,
    swap_free=0,
    shm=32 * GIB,
    shm_free=32 * GIB,
)
DRIVER = Driver(
    version="580.95.05",
    module_version="580.95.05",
    module_kind="open",
    libraries=MappingProxyType({CUDA: Path("/lib/libcuda.so.1"), NVML: Path("/lib/libnvidia-ml.so.1")}),
    searched=(Finding("/lib/libcuda.so.1", "taken"),),
    problems=(),
)
GPU = Gpu(
    index=0,
    uuid="GPU-aaaa",
    name="NVIDIA GeForce RTX 3090",
    total=24_576 * MIB,
    free=24_200 * MIB,
    used=376 * MIB,
    reserved=318 * MIB,
    capability=(8, 6),
    power=25.0,
    power_limit=350.0,
    clock=210,
    memory_clock=405,
    throttled=(),
    mig=False,
    display=False,
    busy=0,
    processes=(),
)


def survey(**changes: Any) -> Survey:
    return replace(Survey(HOST, DRIVER, gpus=(GPU, replace(GPU, index=1, uuid="GPU-bbbb"))), **changes)


def profile(name: str = "B", **values: Any) -> Profile:
    return load(shipped()[name]).with_values({key.replace("__", "."): value for key, value in values.items()})


# Refusals -----------------------------------------------------------------------------------------------------------


def fail(name: str, code: int = errors.UNSUITABLE) -> Item:
    return Item(name, "fail", f"{name} is wrong", f"mend {name}", code=code)


def test_nothing_fails() -> None:
    preflight.refuse(
        [Item("a", "ok", "well"), Item("b", "warn", "so so", "mend b"), Item("c", "skip", "not looked at")]
    )


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        ((errors.UNSUITABLE,), UnsuitableError),
        ((errors.UNSUITABLE, errors.USAGE), BadInputError),
        ((errors.UNVERIFIED, errors.NOT_FOUND), MissingError),
        ((errors.UNVERIFIED,), VerificationError),
        ((errors.NOT_FOUND, errors.UNSUITABLE, errors.UNVERIFIED), UnsuitableError),
    ],
)
def test_one_error_lists_all_and_what_the_user_wrote_decides_its_code(
    codes: tuple[int, ...], kind: type[HyperqwenError]
) -> None:
    items = [fail(f"thing {number}", code) for number, code in enumerate(codes)]
    with pytest.raises(HyperqwenError) as raised:
        preflight.refuse([Item("well", "ok", "it is"), *items])
    assert type(raised.value) is kind
    for item in items:
        assert item.found in str(raised.value) and f"fix: {item.fix}" in str(raised.value)
    assert "it is" not in str(raised.value)


def test_a_look_that_raises_is_a_failure_with_the_errors_code() -> None:
    def missing() -> str:
        raise MissingError("no such file", "make it")

    assert preflight.look("x", missing) == Item("x", "fail", "no such file", "make it", code=errors.NOT_FOUND)
    assert preflight.look("x", lambda: "there") == Item("x", "ok", "there")
    item = Item("y", "skip", "not looked at")
    assert preflight.look("x", lambda: item) is item


@pytest.mark.parametrize(
    ("states", "worst"),
    [((), "skip"), (("skip", "ok"), "ok"), (("ok", "warn"), "warn"), (("warn", "fail", "ok"), "fail")],
)
def test_the_worst_of_all(states: tuple[preflight.State, ...], worst: str) -> None:
    assert preflight.summary([Item("x", state, "") for state in states]) == worst


# The machine --------------------------------------------------------------------------------------------------------


def test_a_machine_that_is_well() -> None:
    items = preflight.machine(survey())
    assert [(item.name, item.state) for item in items] == [("driver", "ok"), ("device nodes", "ok")]
    assert items[0].found == "580.95.05 (open module)"


def test_no_driver_says_what_was_searched_and_names_the_demo_once() -> None:
    problems = (
        Problem("no-driver", "libcuda.so.1 was not found", "install it"),
        Problem("no-module", "the module is not loaded", "sudo modprobe nvidia"),
        Problem("no-device", "/dev/nvidia0 is not there", "sudo nvidia-modprobe"),
    )
    none = replace(DRIVER, version=None, libraries={}, problems=problems, searched=(Finding("/usr/lib", "not there"),))
    items = preflight.machine(survey(driver=none, gpus=(), nvml_error="not found"))

    assert [(item.name, item.state) for item in items] == [
        ("driver", "fail"),
        ("driver", "fail"),
        ("device nodes", "fail"),
        ("cards", "skip"),
    ]
    assert items[0].searched == ("/usr/lib: not there",) and items[1].searched == ()
    assert [("./hq run .#demo" in (item.fix or "")) for item in items[:3]] == [True, False, False]
    with pytest.raises(UnsuitableError, match=r"searched:\n    /usr/lib: not there"):
        preflight.refuse(items)


def test_a_problem_that_is_not_fatal_is_a_warning_and_nvml_can_fail_by_itself() -> None:
    soft = Problem("forward-compatibility", "works by compatibility", "update", fatal=False)
    items = preflight.machine(survey(driver=replace(DRIVER, problems=(soft,)), gpus=(), nvml_error="no answer"))
    assert [(item.name, item.state, item.found) for item in items] == [
        ("driver", "warn", "works by compatibility"),
        ("device nodes", "ok", "there, and for this user"),
        ("cards", "fail", "no answer"),
    ]


def test_the_cards_that_the_profile_names() -> None:
    items, cards = preflight.chosen_cards(survey(), profile(parallel__gpus="1"))
    assert [card.index for card in cards] == [1] and items[0].state == "ok" and "RTX 3090" in items[0].found

    items, cards = preflight.chosen_cards(survey(), profile(parallel__gpus="7"))
    assert cards == () and items[0].state == "fail" and items[0].code == errors.USAGE
    assert "parallel.gpus is '7'; there is no card 7" in items[0].found and "GPU-bbbb" in str(items[0].fix)

    items, cards = preflight.chosen_cards(survey(), profile(parallel__tensor=4))
    assert cards == () and items[0].code == errors.UNSUITABLE and "4 cards" in items[0].found


def test_the_card_to_plan_for() -> None:
    assert preflight.card_of([GPU]) == CARDS["rtx3090"], "a known card has CUDA's own count"

    modified = preflight.card_of([replace(GPU, name="NVIDIA GeForce RTX 4090", total=48 * GIB, capability=(8, 9))])
    assert (modified.sm, modified.total_bytes) == (89, 48 * GIB - 318 * MIB)

    strange = preflight.card_of([replace(GPU, name="NVIDIA X1", total=20 * GIB, reserved=None, capability=(12, 1))])
    assert (strange.title, strange.sm, strange.total_bytes) == ("NVIDIA X1", 121, 20 * GIB)

    laptop = replace(GPU, name="NVIDIA GeForce RTX 4090 Laptop GPU", total=16_376 * MIB, capability=(8, 9))
    found = preflight.card_of([laptop])
    assert (found.title, found.sm, found.total_bytes) == (laptop.name, 89, 16_376 * MIB - 318 * MIB)

    server = replace(GPU, name="NVIDIA A100-SXM4-80GB", total=81_920 * MIB, reserved=600 * MIB, capability=(8, 0))
    assert preflight.card_of([server]) == CARDS["a100-80"]

    smaller = replace(GPU, index=1, name="NVIDIA GeForce RTX 3060", total=12_288 * MIB)
    assert preflight.card_of([GPU, smaller]).name == "rtx3060", "the smallest decides"


def test_memory_that_another_program_holds_is_told_with_its_holder() -> None:
    plan = make_plan(resolve("B"), models=Path("/models"), card=CARDS["rtx3090"])
    assert plan.budget is not None
    planned = preflight.planned_bytes(plan.budget)
    assert planned >= 0.93 * CARDS["rtx3090"].total_bytes - MIB, (
        "vLLM wants its share of the card free before it starts"
    )

    (well,) = preflight.card_memory([GPU], planned, wsl2=False)
    assert well.state == "ok" and f"{planned / MIB:,.0f} planned" in well.found

    held = replace(GPU, free=20 * GIB, processes=(Process(4711, "blender", 3 * GIB),))
    (item,) = preflight.card_memory([held], planned, wsl2=False)
    assert item.state == "fail" and "blender (process 4711): 3,072 MiB" in item.found

    (spill,) = preflight.card_memory([replace(held, processes=())], planned, wsl2=True)
    assert spill.state == "fail" and "shared memory" in spill.found

    names = [item.name for item in preflight.card_memory([GPU, replace(GPU, index=1)], planned, wsl2=False)]
    assert names == ["memory of card 0", "memory of card 1"]


@pytest.mark.parametrize(
    ("name", "flags", "free", "wanted"),
    [
        ("B", {}, 22 * GIB, ["memory.utilization"]),
        ("B", {}, 20 * GIB, ["memory.kv_cache_bytes", "memory.utilization"]),
        # vLLM asks for little of the card: the pin alone is too large.
        ("B", {"memory.utilization": "0.5"}, 20 * GIB, ["memory.kv_cache_bytes"]),
        ("A", {}, 22 * GIB, ["memory.utilization"]),
        ("D", {}, 21 * GIB, ["memory.utilization"]),
    ],
)
def test_what_would_fit_into_what_is_free_is_named_and_fits(
    name: str, flags: dict[str, str], free: int, wanted: list[str]
) -> None:
    def planned(**changes: str) -> Budget:
        effective = resolve(name, flags=flags | {key.replace("__", "."): text for key, text in changes.items()})
        found = make_plan(effective, models=Path("/models"), card=CARDS["rtx3090"])
        assert found.budget is not None
        return found.budget

    budget = planned()
    needed = preflight.planned_bytes(budget)
    held = replace(GPU, free=free, processes=(Process(4711, "blender", 2 * GIB),))
    (item,) = preflight.card_memory([held], needed, wsl2=False, budget=budget)
    assert item.state == "fail" and "blender (process 4711)" in item.found
    named = dict(re.findall(r"--([a-z-]+) ([0-9.]+)", str(item.fix)))
    context = named.pop("context")
    knobs = {"memory-kv-cache-bytes": "memory.kv_cache_bytes", "memory-utilization": "memory.utilization"}
    assert [knobs[option] for option in named] == wanted

    settings = {knobs[option].replace(".", "__"): text for option, text in named.items()}
    less = planned(**settings, limits__context_tokens=context)
    assert less.fits and preflight.planned_bytes(less) <= free
    if int(context) < budget.load.context_tokens:
        assert not planned(**settings, limits__context_tokens=str(int(context) + 1)).fits
    assert free - preflight.planned_bytes(less) < 64 * MIB, "no more is given up than has to be"


def test_where_no_pool_fits_those_who_hold_the_card_are_the_remedy() -> None:
    budget = make_plan(resolve("B"), models=Path("/models"), card=CARDS["rtx3090"]).budget
    assert budget is not None
    held = replace(GPU, free=12 * GIB, processes=(Process(4711, "blender", 12 * GIB),))
    (item,) = preflight.card_memory([held], preflight.planned_bytes(budget), wsl2=False, budget=budget)
    assert "blender (process 4711)" in item.found
    assert item.fix == "stop those, choose another card, since no pool of any size fits into what is free"
    (windows,) = preflight.card_memory([held], preflight.planned_bytes(budget), wsl2=True, budget=budget)
    assert "Task Manager" in str(windows.fix) and "no pool of any size fits" in str(windows.fix)


def states(items: list[Item]) -> dict[str, str]:
    return {item.name: item.state for item in items}


@pytest.mark.parametrize(
    ("free", "swap", "pinned", "offload", "expected"),
    [
        (48, 0, 0, 0, "ok"),
        (5, 0, 0, 0, "fail"),
        (5, 4, 0, 0, "warn"),
        # Pinned memory cannot be swapped.
        (5, 40, 7, 0, "fail"),
        (20, 0, 0, 16, "fail"),
        (24, 0, 0, 16, "ok"),
        (None, 0, 0, 0, "skip"),
    ],
)
def test_memory_of_the_host(
    tmp_path: Path, free: int | None, swap: int, pinned: int, offload: int, expected: str
) -> None:
    host = replace(HOST, memory_free=None if free is None else free * GIB, swap_free=swap * GIB)
    wanted = profile(memory__offload_gib=offload)
    items = preflight.host_resources(wanted, host, tmp_path, pinned=pinned * GIB)
    assert states(items)["memory of the host"] == expected


def test_evicted_pages_need_room_in_dev_shm(tmp_path: Path) -> None:
    wanted = profile(memory__offload_gib=16)
    assert "/dev/shm" not in states(preflight.host_resources(profile(), HOST, tmp_path))
    assert states(preflight.host_resources(wanted, HOST, tmp_path))["/dev/shm"] == "ok"
    small = preflight.host_resources(wanted, replace(HOST, shm_free=GIB // 16), tmp_path)
    assert states(small)["/dev/shm"] == "fail" and any("size=17G" in str(item.fix) for item in small)
    assert states(preflight.host_resources(wanted, replace(HOST, shm_free=None), tmp_path))["/dev/shm"] == "fail"


def test_evicted_pages_that_a_killed_engine_left_are_named_and_kept(tmp_path: Path) -> None:
    stale, live, other = (tmp_path / name for name in ("vllm_offload_a b.mmap", "vllm_offload_c.mmap", "sem.x"))
    for path in (stale, live, other):
        path.write_bytes(b"x" * MIB)
    with live.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert preflight.left_behind(tmp_path) == {stale: stale.stat().st_blocks * 512}
        (item,) = [
            item
            for item in preflight.host_resources(profile(), HOST, tmp_path, shm=tmp_path)
            if item.name == "/dev/shm"
        ]
    assert (item.state, item.fix) == ("warn", f"rm '{stale}'")
    assert str(stale) in item.found and str(live) not in item.found and stale.exists()

    full = preflight.host_resources(
        profile(memory__offload_gib=16), replace(HOST, shm_free=GIB), tmp_path, shm=tmp_path
    )
    (item,) = [item for item in full if item.name == "/dev/shm"]
    assert item.state == "fail" and str(item.fix).startswith(f"rm '{stale}' {live}; if that is not enough, mount")

    stale.unlink()
    live.unlink()
    assert "/dev/shm" not in states(preflight.host_resources(profile(), HOST, tmp_path, shm=tmp_path))


@pytest.mark.parametrize(("free", "expected"), [(100 * GIB, "ok"), (GIB, "warn"), (100 * MIB, "fail")])
def test_disk_of_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: str) -> None:
    asked = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return type("Usage", (), {"free": free})

    monkeypatch.setattr("shutil.disk_usage", usage)
    items = preflight.host_resources(profile("demo"), HOST, tmp_path / "not/made/yet")
    assert states(items) == {"disk of the caches": expected}
    assert asked == [tmp_path], "the nearest folder that is there says how much room there is"


# The server ---------------------------------------------------------------------------------------------------------


def test_the_key_is_told_by_its_length_and_its_place(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame-street\n")
    file.chmod(0o600)
    item = preflight.key(profile(server__api_key_file=str(file), server__host="0.0.0.0"), {})
    assert (item.state, item.found) == ("ok", f"set (13 characters) from {file}")

    item = preflight.key(profile(server__host="0.0.0.0"), {"HYPERQWEN_API_KEY": "sesame"})
    assert item.found == "set (6 characters) from HYPERQWEN_API_KEY"
    (tmp_path / "api-key").write_text("credential")
    item = preflight.key(profile(), {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    assert item.found == f"set (10 characters) from the credential {tmp_path / 'api-key'}"
    assert preflight.key(profile(), {}).found == "none; only this machine reaches 127.0.0.1"


def test_a_server_for_others_without_a_key(tmp_path: Path) -> None:
    item = preflight.key(profile(server__host="0.0.0.0"), {})
    assert (item.state, item.code) == ("fail", errors.USAGE)
    assert "host '0.0.0.0' is open to other machines" in item.found and "keygen" in str(item.fix)

    (tmp_path / "key").write_text("\n")
    (tmp_path / "key").chmod(0o600)
    item = preflight.key(profile(server__api_key_file=str(tmp_path / "key")), {})
    assert (item.state, item.code) == ("fail", errors.USAGE) and "is empty" in item.found
    item = preflight.key(profile(server__api_key_file=str(tmp_path / "none")), {})
    assert (item.state, item.code) == ("fail", errors.NOT_FOUND)


def test_the_port() -> None:
    with ports.claim("127.0.0.1", 0) as listener:
        number = listener.getsockname()[1]
        item = preflight.port(profile(server__port=number))
        assert item.state == "fail" and f"port {number} on 127.0.0.1 is in use" in item.found
    assert preflight.port(profile(server__port=number)).state == "ok"
    # It was given back.
    ports.claim("127.0.0.1", number).close()


def test_the_models_folders(tmp_path: Path) -> None:
    paths = ModelPaths(write_model(tmp_path / "model", of="qwen3.8-27b"), tmp_path / "drafter")
    items = preflight.model(profile(), paths)
    assert [(item.name, item.state) for item in items] == [("model", "ok"), ("drafter", "fail")]
    assert "2 shards" in items[0].found and items[1].code == errors.NOT_FOUND

    write_model(tmp_path / "drafter", 0, "qwen3.8-27b-dflash2")
    (tmp_path / "model" / "tokenizer.json").unlink()
    items = preflight.model(profile(), paths)
    assert [(item.name, item.state) for item in items] == [("model", "fail"), ("drafter", "ok")]
    assert items[0].found == f"{tmp_path / 'model'} has no tokenizer.json"

    dummy = write_model(tmp_path / "dummy", of="qwen3.8-27b")
    for shard in dummy.glob("*.safetensors*"):
        shard.unlink()
    (item,) = preflight.model(profile(model__load_format="dummy"), ModelPaths(dummy))
    assert item.state == "ok" and "random" in item.found


def test_a_folder_with_another_model_than_was_planned_for(tmp_path: Path) -> None:
    # Whole folders, each of which the engine would load: nano as the model, and a drafter of another width.
    paths = ModelPaths(write_model(tmp_path / "model", of="nano"), tmp_path / "drafter")
    write_model(tmp_path / "drafter", 0, "qwen3.8-27b-dflash2")
    items = preflight.model(profile(), paths)
    assert [(item.name, item.state, item.code) for item in items if item.state == "fail"] == [
        ("model", "fail", errors.USAGE)
    ]
    assert "hidden_size is 128, planned 5120" in items[0].found
    with pytest.raises(BadInputError, match=r"is not of qwen3\.8-27b"):
        preflight.refuse(items)
    assert preflight.model(profile("demo"), ModelPaths(paths.model))[0].state == "ok"

    config = config_of("qwen3.8-27b-dflash2", hidden_size=4096)
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    write_model(tmp_path / "model", of="qwen3.8-27b")
    (_, drafter) = preflight.model(profile(), paths)
    assert (drafter.state, drafter.code) == ("fail", errors.USAGE)
    assert "its hidden_size is 4096, and the model's 5120" in drafter.found


def test_a_model_without_a_draft_head_is_slower(tmp_path: Path) -> None:
    paths = ModelPaths(write_model(tmp_path / "model", of="qwen3.8-27b"))
    wanted = profile("D", speculation__draft_vocabulary=True)
    assert states(preflight.model(wanted, paths)) == {"model": "ok", "draft vocabulary": "warn"}
    assert states(preflight.model(profile("D", speculation__draft_vocabulary=False), paths)) == {"model": "ok"}


def test_the_compiler(tmp_path: Path) -> None:
    assert preflight.compiler(None).state == "fail"
    assert preflight.compiler(tmp_path).state == "fail"
    (tmp_path / "cc").touch(0o755)
    assert preflight.compiler(tmp_path).state == "ok"
