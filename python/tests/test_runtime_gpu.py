from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError, UnsuitableError
from hyperqwen.runtime.gpu import MIB, Gpu, Nvml, Process, SpillWatch, select, shortage
from tests.recorded_host import SOURCE, Card, Recorded, card, compiled

GIB = 1 << 30
UUIDS = ("GPU-11111111-aaaa-0000-0000-000000000001", "GPU-11112222-bbbb-0000-0000-000000000002")
RTX3090: dict[str, int | bytes] = {
    "name": b"NVIDIA GeForce RTX 3090",
    "uuid": UUIDS[0].encode(),
    "total": 24 * GIB,
    "free": 23 * GIB,
    "used": GIB // 2,
    "reserved": GIB // 2,
    "major": 8,
    "minor": 6,
    "power": 31_500,
    "limit": 250_000,
    "clock": 1695,
    "memory_clock": 9751,
    "reasons": 0x4 | 0x20,
    "mig": 0,
    "display": 1,
    "busy": 3,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    shutil.copyfile(compiled("libnvidia-ml.so.1", source=SOURCE), made)
    return made


@pytest.fixture
def recorded(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """The library, with pynvml as in a fresh process."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    made = Recorded(library)
    yield made
    made.answers()


def asked(recorded: Recorded, *cards: Card) -> tuple[Gpu, ...]:
    recorded.answers(*cards)
    with Nvml(recorded.path) as nvml:
        return nvml.gpus()


def test_what_a_card_says(recorded: Recorded) -> None:
    (gpu,) = asked(recorded, card(RTX3090, computing=[(4242, 5 * GIB), (7, 6 * GIB)], drawing=[(4242, 5 * GIB)]))

    assert gpu == Gpu(
        index=0,
        uuid=UUIDS[0],
        name="NVIDIA GeForce RTX 3090",
        total=24 * GIB,
        free=23 * GIB,
        used=GIB,
        reserved=GIB // 2,
        capability=(8, 6),
        power=31.5,
        power_limit=250.0,
        clock=1695,
        memory_clock=9751,
        throttled=("power limit", "thermal slowdown"),
        mig=False,
        display=True,
        busy=3,
        processes=(Process(7, "/usr/bin/other", 6 * GIB), Process(4242, "/usr/bin/blender", 5 * GIB)),
    )
    assert gpu.report()["processes"] == (
        {"pid": 7, "name": "/usr/bin/other", "used": 6 * GIB},
        {"pid": 4242, "name": "/usr/bin/blender", "used": 5 * GIB},
    )


def test_what_the_driver_says(recorded: Recorded) -> None:
    recorded.answers(card(RTX3090))
    with Nvml(recorded.path) as nvml:
        assert nvml.driver_version() == "580.65.06"
        assert nvml.cuda_version() == (13, 1)


def test_what_a_card_does_not_say_is_none(recorded: Recorded) -> None:
    missing = ["memory_v2", "power", "limit", "clocks", "reasons", "mig", "display", "busy", "processes", "names"]

    (gpu,) = asked(recorded, card(RTX3090, missing=missing))

    silent = ("reserved", "power", "power_limit", "clock", "memory_clock", "throttled", "mig", "display", "busy")
    assert [name for name in silent if getattr(gpu, name) is not None] == []
    assert (gpu.total, gpu.free, gpu.used, gpu.processes) == (24 * GIB, 23 * GIB, GIB, ())


def test_a_process_that_the_driver_cannot_name_or_weigh(recorded: Recorded) -> None:
    unknown = 2**64 - 1
    (gpu,) = asked(recorded, card(RTX3090, computing=[(os.getpid(), unknown), (2**31 - 1, unknown)], missing=["names"]))

    ours, gone = gpu.processes
    assert ours.name == Path("/proc/self/comm").read_text().strip() and ours.used is None
    assert str(gone) == f"a program that cannot be named (process {2**31 - 1}): an unknown amount"


def test_the_same_card_again_after_another_one_dropped_out(recorded: Recorded) -> None:
    second = RTX3090 | {"uuid": UUIDS[1].encode()}
    _, before = asked(recorded, card(RTX3090), card(second))

    recorded.answers(card(second | {"free": 2 * GIB}))
    with Nvml(recorded.path) as nvml:
        now = nvml.again(before)
        recorded.answers(card(RTX3090))
        with pytest.raises(UnsuitableError, match="Not Found"):
            nvml.again(before)

    assert (now.index, now.uuid, now.free) == (1, UUIDS[1], 2 * GIB)


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded", "nvidia-modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch", "reboot: the loaded module is of another"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions", "/dev/nvidiactl"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost", "fell off the bus"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error", "dmesg"),
    ],
)
def test_a_driver_that_does_not_start(recorded: Recorded, code: int, said: str, fix: str) -> None:
    recorded.answers(start=code)

    with pytest.raises(UnsuitableError) as raised, Nvml(recorded.path):
        raise AssertionError("it started")

    assert said in raised.value.message and str(recorded.path) in raised.value.message
    assert fix in (raised.value.fix or "")


@pytest.mark.parametrize("what", ["missing", "text", "no functions"])
def test_a_library_that_does_not_load(what: str, recorded: Recorded, tmp_path: Path) -> None:
    place = tmp_path / "libnvidia-ml.so.1"
    if what == "text":
        place.write_text("GROUP ( /usr/lib/libnvidia-ml.so.580 )\n" * 100)
    elif what == "no functions":
        shutil.copyfile(compiled("libnvidia-ml.so.1"), place)

    with pytest.raises(UnsuitableError) as raised, Nvml(place):
        raise AssertionError("it started")

    said = {"missing": "No such file", "text": "invalid ELF header", "no functions": "Function Not Found"}[what]
    assert said in raised.value.message and str(place) in raised.value.message


def test_one_process_does_not_mix_two_drivers(recorded: Recorded, tmp_path: Path) -> None:
    other = tmp_path / "libnvidia-ml.so.1"
    shutil.copyfile(recorded.path, other)
    asked(recorded, card(RTX3090))

    with pytest.raises(UnsuitableError, match=f"another management library before {other}"):
        Nvml(other)


def test_the_bare_name_needs_no_loader_path(recorded: Recorded) -> None:
    """In a process of its own, whose loader could not find the library by its name."""
    code = (
        "import pathlib, sys, hyperqwen.runtime.gpu as g\nwith g.Nvml(pathlib.Path(sys.argv[1])) as n: print(n.gpus())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    command = [sys.executable, "-c", code, str(recorded.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "()\n"), done.stderr


def made(index: int, **fields: object) -> Gpu:
    plain = Gpu(
        index=index,
        uuid=UUIDS[index] if index < len(UUIDS) else f"GPU-{index:08x}",
        name="NVIDIA GeForce RTX 3090",
        total=24 * GIB,
        free=23 * GIB,
        used=GIB,
        reserved=GIB // 2,
        capability=(8, 6),
        power=30.0,
        power_limit=350.0,
        clock=210,
        memory_clock=405,
        throttled=(),
        mig=False,
        display=False,
        busy=0,
        processes=(),
    )
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


TWO = (made(0), made(1))


@pytest.mark.parametrize(
    ("spec", "count", "indices"),
    [
        (None, None, [0]),
        ("", 2, [0, 1]),
        ("1", None, [1]),
        (" 1 , 0 ", 2, [1, 0]),
        ("all", None, [0, 1]),
        (UUIDS[1], 1, [1]),
        ("GPU-11112", None, [1]),
        (f"{UUIDS[1]},0", None, [1, 0]),
    ],
)
def test_cards_that_are_there(spec: str | None, count: int | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in select(TWO, spec, count=count)] == indices


@pytest.mark.parametrize(
    ("spec", "count", "error", "said"),
    [
        ("2", None, BadInputError, "gpus is '2'; there is no card 2"),
        ("0,5", None, BadInputError, "gpus is '0,5'; there is no card 5"),
        ("-1", None, BadInputError, "'-1' is neither a card's index nor its UUID"),
        ("0,,1", None, BadInputError, "'' is neither"),
        ("0 1", None, BadInputError, "'0 1' is neither"),
        ("rtx3090", None, BadInputError, "'rtx3090' is neither"),
        ("GPU-ffff", None, BadInputError, "there is no card GPU-ffff"),
        ("GPU-1111", None, BadInputError, "GPU-1111 begins the UUIDs of 2 cards"),
        ("GPU-", None, BadInputError, "'GPU-' is neither"),
        ("MIG-1234", None, BadInputError, "MIG-1234 is a MIG instance"),
        ("0,0", None, BadInputError, "names card 0 twice"),
        (f"0,{UUIDS[0]}", None, BadInputError, "names card 0 twice"),
        ("0", 2, BadInputError, "which is 1 card, and the model is split over 2"),
        ("all", 1, BadInputError, "which is 2 cards, and the model is split over 1"),
        (None, 4, UnsuitableError, "4 cards wanted and 2 cards there"),
        ("٣", None, BadInputError, "'٣' is neither"),
    ],
)
def test_cards_that_are_not_there(spec: str | None, count: int | None, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        select(TWO, spec, count=count)

    assert said in str(raised.value)
    if "no card" in said or "neither" in said:
        assert f"0 = NVIDIA GeForce RTX 3090 ({UUIDS[0]}); 1 = " in str(raised.value), "it lists what there is"


def test_no_card_and_a_card_in_pieces() -> None:
    with pytest.raises(UnsuitableError, match="sees no card"):
        select((), "0")
    with pytest.raises(UnsuitableError, match=r"card 1 .* is cut into MIG instances"):
        select((TWO[0], made(1, mig=True)), "1")


@given(st.permutations(range(6)), st.integers(1, 6))
def test_the_order_is_the_users(order: list[int], count: int) -> None:
    cards = tuple(made(index) for index in range(6))
    chosen = select(cards, ",".join(map(str, order[:count])), count=count)
    assert [gpu.index for gpu in chosen] == order[:count]


def test_a_plan_that_fits() -> None:
    assert shortage(made(0), 23 * GIB) is None


def test_who_holds_the_memory_is_named() -> None:
    gpu = made(0, free=20 * GIB, processes=(Process(4242, "/usr/bin/blender", 3 * GIB),))

    problem = shortage(gpu, 22 * GIB)

    assert problem is not None and problem.fatal and problem.code == "gpu-in-use"
    assert (
        "needs 22,528 MiB of card 0 (NVIDIA GeForce RTX 3090), and 20,480 MiB of 24,576 MiB are free" in problem.cause
    )
    assert "/usr/bin/blender (process 4242): 3,072 MiB" in problem.cause


def test_on_wsl2_the_remedy_is_in_windows() -> None:
    problem = shortage(made(0, free=20 * GIB), 22 * GIB, wsl2=True)
    assert problem is not None and problem.fatal
    assert "shared memory" in problem.cause and "Windows" in problem.fix


@pytest.mark.parametrize("wsl2", [False, True])
def test_a_plan_that_never_fits_is_not_the_fault_of_others(wsl2: bool) -> None:
    problem = shortage(made(0), 24 * GIB - 100 * MIB, wsl2=wsl2)
    assert problem is not None and problem.code == "plan-too-large"


def test_memory_that_did_not_come_into_the_card_is_a_spill() -> None:
    watch = SpillWatch(made(0, used=2 * GIB))
    held = 20 * GIB

    assert watch.look(made(0, used=22 * GIB), held) is None
    assert watch.look(made(0, used=22 * GIB - SpillWatch.TOLERANCE), held) is None, "others come and go a little"
    problem = watch.look(made(0, used=22 * GIB - SpillWatch.TOLERANCE - MIB), held)

    assert problem is not None and problem.code == "spill" and not problem.fatal
    assert "holds 20,480 MiB of card 0, and only 19,967 MiB came" in problem.cause


def test_a_busy_card_at_little_power_is_one_that_waits_for_the_bus() -> None:
    watch = SpillWatch(made(0, used=0))
    waits = made(0, used=20 * GIB, busy=100, power=120.0, power_limit=450.0)
    works = made(0, used=20 * GIB, busy=100, power=330.0, power_limit=450.0)
    idle = made(0, used=20 * GIB, busy=2, power=40.0, power_limit=450.0)

    for other in (works, idle, made(0, used=20 * GIB, busy=100, power=None)):
        looks = [watch.look(waits, 20 * GIB) for _ in range(SpillWatch.LOOKS - 1)]
        assert [*looks, watch.look(other, 20 * GIB)] == [None] * SpillWatch.LOOKS, "not in a row"
    last = [watch.look(waits, 20 * GIB) for _ in range(SpillWatch.LOOKS)][-1]

    assert last is not None and not last.fatal
    assert "100 % busy at 120 of 450 W" in last.cause
