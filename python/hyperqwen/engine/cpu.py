"""The processors of this machine, as the kernel describes them.

vLLM's CPU worker asks `lscpu` through a shell. A Nix sandbox and a minimal image have neither, and the worker
dies at start. The kernel's own files say the same, so they are read here: `/sys/devices/system/{cpu,node}`
and, where a sandbox does not mount `/sys`, `/proc/cpuinfo` and `/proc/self/status`.

Patch 0001 calls `logical_cpus`; vLLM then keeps the ones in the process's affinity mask and binds a thread to
a core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NODE = re.compile(r"node(\d+)")


class Cpu(NamedTuple):
    """One logical processor.

    id: the kernel's number of it.
    core: physical core, numbered from 0 over the whole machine (`core_id` repeats in each socket).
    node: NUMA node whose memory is near.
    socket: physical package.
    """

    id: int
    core: int
    node: int
    socket: int


def logical_cpus(root: Path = Path("/"), affinity: Iterable[int] | None = None) -> list[Cpu]:
    """List the processors that are online, by id.

    A processor in `affinity` is listed even where `/sys` does not name it: the kernel lets the process run
    there, while a container's `/sys` may be a summary. What the kernel does not tell is taken as the plainest
    machine: a core for each processor, socket 0, and one NUMA node, the first whose memory the process may
    use.

    Args:
        root: folder that holds `sys` and `proc`.
        affinity: processors that the process may run on; default is the kernel's answer.

    Raises:
        ValueError: a file of the kernel's is not in its documented form; names the file and what it holds.
    """
    allowed = os.sched_getaffinity(0) if affinity is None else set(affinity)
    system = root / "sys/devices/system"
    ids = sorted(allowed | _id_list(system / "cpu/online"))
    nodes = _nodes(system / "node")
    default_node = min(_allowed_nodes(root / "proc/self/status"), default=0)
    by_proc = _cpuinfo(root / "proc/cpuinfo")

    cores: dict[tuple[object, ...], int] = {}
    cpus = []
    for cpu in ids:
        topology = system / f"cpu/cpu{cpu}/topology"
        proc_socket, proc_core = by_proc.get(cpu, (None, None))
        socket = _integer(topology / "physical_package_id")
        if socket is None or socket < 0:  # the kernel writes -1 for "unknown"
            socket = proc_socket or 0
        # `core_cpus_list` is the newer name (Linux 5.3) of `thread_siblings_list`.
        siblings = _id_list(topology / "core_cpus_list") or _id_list(topology / "thread_siblings_list")
        key: tuple[object, ...]
        if siblings:
            key = ("siblings", min(siblings))
        elif proc_core is not None:
            key = ("cpuinfo", socket, proc_core)
        else:
            key = ("alone", cpu)
        cpus.append(Cpu(cpu, cores.setdefault(key, len(cores)), nodes.get(cpu, default_node), socket))
    return cpus


def _read(path: Path) -> str | None:
    """Text of a kernel file, or None where it is missing, unreadable or empty."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _integer(path: Path) -> int | None:
    text = _read(path)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{path}: expected an integer, found {text!r}") from None


def _parse_id_list(text: str, where: str) -> set[int]:
    """Numbers of a kernel list such as `0-3,8`."""
    ids: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if last < first:
            raise ValueError(f"{where}: expected a list such as '0-3,8', found {text!r}")
        ids.update(range(first, last + 1))
    return ids


def _id_list(path: Path) -> set[int]:
    text = _read(path)
    return set() if text is None else _parse_id_list(text, str(path))


def _nodes(folder: Path) -> dict[int, int]:
    """NUMA node of each processor; empty where the kernel has no NUMA support or `/sys` is missing."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    return {
        cpu: int(match[1])
        for entry in entries
        if (match := _NODE.fullmatch(entry.name))
        for cpu in _id_list(entry / "cpulist")
    }


def _allowed_nodes(status: Path) -> set[int]:
    """Nodes whose memory the process may use."""
    for line in (_read(status) or "").splitlines():
        field, _, value = line.partition(":")
        if field == "Mems_allowed_list" and value.strip():
            return _parse_id_list(value.strip(), f"{status}: Mems_allowed_list")
    return set()


def _cpuinfo(path: Path) -> dict[int, tuple[int | None, int | None]]:
    """(socket, core within the socket) of each processor that `/proc/cpuinfo` describes; x86 writes both."""
    found: dict[int, tuple[int | None, int | None]] = {}
    for block in re.split(r"\n\s*\n", _read(path) or ""):
        fields = {
            name.strip(): int(value)
            for name, _, value in (line.partition(":") for line in block.splitlines())
            if name.strip() in ("processor", "physical id", "core id") and value.strip().isdecimal()
        }
        if "processor" in fields:
            found[fields["processor"]] = (fields.get("physical id"), fields.get("core id"))
    return found
