from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperqwen.engine.cpu import Cpu, logical_cpus


def id_list(ids: Iterable[int]) -> str:
    """Numbers as the kernel prints them: `0-3,8`."""
    ordered = sorted(ids)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "\n"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_sys(
    root: Path,
    place: Mapping[int, tuple[int, int, int]],
    offline: Iterable[int] = (),
    siblings_file: str = "core_cpus_list",
) -> None:
    """Write /sys for processors at (node, socket, core within the socket).

    An offline one keeps a bare folder, as in the kernel: no topology, no entry in `online` or in its node's
    list.
    """
    system = root / "sys/devices/system"
    online = set(place) - set(offline)
    put(system / "cpu/online", id_list(online))
    put(system / "cpu/possible", id_list(place))
    for cpu, (_, socket, core) in place.items():
        put(system / f"cpu/cpu{cpu}/uevent", "DRIVER=processor\n")
        if cpu in online:
            together = [other for other in online if place[other][1:] == (socket, core)]
            topology = system / f"cpu/cpu{cpu}/topology"
            put(topology / "core_id", f"{core}\n")
            put(topology / "physical_package_id", f"{socket}\n")
            put(topology / siblings_file, id_list(together))
    for node in {node for node, _, _ in place.values()}:
        put(system / f"node/node{node}/cpulist", id_list(cpu for cpu in online if place[cpu][0] == node))
    put(system / "node/possible", "0-3\n")
    put(system / "node/power/control", "auto\n")


# Two sockets of two cores with two threads; x86 firmware numbers the second threads after all first ones.
TWO_SOCKETS = {cpu: (cpu // 2 % 2, cpu // 2 % 2, cpu % 2) for cpu in range(8)}


def test_two_sockets_with_threads_and_two_nodes(tmp_path: Path) -> None:
    write_sys(tmp_path, TWO_SOCKETS)

    cpus = logical_cpus(tmp_path, affinity=range(8))

    assert cpus == [
        Cpu(id=0, core=0, node=0, socket=0),
        Cpu(id=1, core=1, node=0, socket=0),
        Cpu(id=2, core=2, node=1, socket=1),
        Cpu(id=3, core=3, node=1, socket=1),
        Cpu(id=4, core=0, node=0, socket=0),
        Cpu(id=5, core=1, node=0, socket=0),
        Cpu(id=6, core=2, node=1, socket=1),
        Cpu(id=7, core=3, node=1, socket=1),
    ], "core_id 0 and 1 repeat in each socket; the core number may not"


def test_nodes_are_not_sockets(tmp_path: Path) -> None:
    """One socket whose firmware splits the memory: four cores, two nodes."""
    write_sys(tmp_path, {cpu: (cpu // 2, 0, cpu) for cpu in range(4)})

    cpus = logical_cpus(tmp_path, affinity=range(4))

    assert [(cpu.node, cpu.socket) for cpu in cpus] == [(0, 0), (0, 0), (1, 0), (1, 0)]


def test_an_offline_processor_is_not_listed(tmp_path: Path) -> None:
    write_sys(tmp_path, TWO_SOCKETS, offline=(1, 6))

    cpus = logical_cpus(tmp_path, affinity={0, 2, 3, 4, 5, 7})

    assert [cpu.id for cpu in cpus] == [0, 2, 3, 4, 5, 7]
    assert {cpu.id: cpu.node for cpu in cpus} == {0: 0, 2: 1, 3: 1, 4: 0, 5: 0, 7: 1}
    cores = {cpu.id: cpu.core for cpu in cpus}
    assert cores[0] == cores[4] and cores[3] == cores[7], cores
    assert len(set(cores.values())) == 4, cores


def test_affinity_narrows_nothing_that_sys_knows(tmp_path: Path) -> None:
    """vLLM narrows the list itself; core numbers must not depend on who asks."""
    write_sys(tmp_path, TWO_SOCKETS)

    assert logical_cpus(tmp_path, affinity={5}) == logical_cpus(tmp_path, affinity=range(8))


def test_a_processor_that_sys_hides_is_still_listed(tmp_path: Path) -> None:
    """A container's /sys says two processors, but the process is bound to the machine's sixth and seventh."""
    write_sys(tmp_path, {0: (0, 0, 0), 1: (0, 0, 1)})

    cpus = logical_cpus(tmp_path, affinity={5, 6})

    assert [cpu.id for cpu in cpus] == [0, 1, 5, 6]
    assert len({cpu.core for cpu in cpus}) == 4, "an unknown core is a core of its own"


def test_the_older_name_of_the_siblings_file(tmp_path: Path) -> None:
    write_sys(tmp_path, TWO_SOCKETS, siblings_file="thread_siblings_list")

    assert len({cpu.core for cpu in logical_cpus(tmp_path, affinity=range(8))}) == 4


def test_no_numa_in_the_kernel(tmp_path: Path) -> None:
    put(tmp_path / "sys/devices/system/cpu/online", "0-3\n")

    assert logical_cpus(tmp_path, affinity=range(4)) == [Cpu(id, id, 0, 0) for id in range(4)]


def test_missing_sys_falls_back_to_affinity(tmp_path: Path) -> None:
    assert logical_cpus(tmp_path, affinity={3, 9}) == [Cpu(3, 0, 0, 0), Cpu(9, 1, 0, 0)]


def test_missing_sys_uses_cpuinfo_and_the_allowed_node(tmp_path: Path) -> None:
    """As in a Nix sandbox, which mounts /proc alone.

    vLLM binds threads to processors of an allowed node, so a default of node 0 would leave it none here.
    """
    put(
        tmp_path / "proc/cpuinfo",
        "".join(
            f"processor\t: {cpu}\nmodel name\t: Some CPU @ 2.00GHz\nphysical id\t: {cpu // 4}\n"
            f"core id\t\t: {cpu % 2}\nflags\t\t: fpu\n\n"
            for cpu in range(8)
        ),
    )
    put(tmp_path / "proc/self/status", "Name:\tpython3\nMems_allowed:\t2\nMems_allowed_list:\t1\n")

    cpus = logical_cpus(tmp_path, affinity=range(8))

    assert [cpu.core for cpu in cpus] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [cpu.socket for cpu in cpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {cpu.node for cpu in cpus} == {1}


def test_cpuinfo_of_another_architecture_tells_no_cores(tmp_path: Path) -> None:
    put(tmp_path / "proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 50.00\n\nprocessor\t: 1\nBogoMIPS\t: 50.00\n")

    assert logical_cpus(tmp_path, affinity={0, 1}) == [Cpu(0, 0, 0, 0), Cpu(1, 1, 0, 0)]


def test_an_unknown_socket_is_socket_zero(tmp_path: Path) -> None:
    write_sys(tmp_path, {0: (0, -1, 0), 1: (0, -1, 1)})

    assert [cpu.socket for cpu in logical_cpus(tmp_path, affinity={0, 1})] == [0, 0]


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("cpu/online", "0-x", "a list such as '0-3,8', found '0-x'"),
        ("cpu/online", "3-1", "a list such as '0-3,8', found '3-1'"),
        ("node/node1/cpulist", "1 2", "a list such as '0-3,8', found '1 2'"),
        ("cpu/cpu1/topology/physical_package_id", "one", "an integer, found 'one'"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, file: str, text: str, expected: str) -> None:
    write_sys(tmp_path, TWO_SOCKETS)
    path = tmp_path / "sys/devices/system" / file
    path.write_text(text)

    with pytest.raises(ValueError) as caught:
        logical_cpus(tmp_path, affinity=range(8))

    assert str(caught.value) == f"{path}: expected {expected}"


@st.composite
def machines(draw: st.DrawFn) -> tuple[dict[int, tuple[int, int, int]], set[int]]:
    """A machine of up to 3 sockets x 4 cores x 4 threads with shuffled numbers, some processors offline."""
    threads = draw(st.integers(1, 4))
    cores = [
        (draw(st.integers(0, 3)), socket, core)
        for socket in range(draw(st.integers(1, 3)))
        for core in draw(st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True))
    ]
    slots = [core for core in cores for _ in range(threads)]
    numbers = draw(st.permutations(range(len(slots))))
    place = dict(zip(numbers, slots, strict=True))
    offline = draw(st.sets(st.sampled_from(range(len(slots))), max_size=len(slots) - 1))
    return place, offline


@settings(max_examples=40, deadline=None)
@given(machine=machines())
def test_any_machine(machine: tuple[dict[int, tuple[int, int, int]], set[int]]) -> None:
    place, offline = machine
    online = sorted(set(place) - offline)
    with TemporaryDirectory() as folder:
        write_sys(Path(folder), place, offline)
        cpus = logical_cpus(Path(folder), affinity=online[:1])

    assert [cpu.id for cpu in cpus] == online
    assert [(cpu.node, cpu.socket) for cpu in cpus] == [place[cpu][:2] for cpu in online]
    for a in cpus:
        for b in cpus:
            assert (a.core == b.core) == (place[a.id][1:] == place[b.id][1:]), (a, b)
    assert {cpu.core for cpu in cpus} == set(range(len({place[cpu][1:] for cpu in online})))


def test_this_machine_without_starting_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"started a program: {args}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "system", refuse)

    cpus = logical_cpus()

    assert os.sched_getaffinity(0) <= {cpu.id for cpu in cpus}
    assert len({cpu.id for cpu in cpus}) == len(cpus)
