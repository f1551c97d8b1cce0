"""What this machine is: its distribution, a container or WSL2 around us, and how much memory is there.

Everything is read below a root folder, so that a recorded tree of files is a host like any other. Nothing is kept.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

# Like the kernel's own limit: a ring of links ends there.
_MOST_LINKS = 40


class Kind(StrEnum):
    """What a remedy has to speak of."""

    NIXOS = "nixos"
    DEBIAN = "debian"
    UBUNTU = "ubuntu"
    FEDORA = "fedora"
    ARCH = "arch"
    WSL2 = "wsl2"
    CONTAINER = "container"
    OTHER = "other"


# The family of a distribution by ID or ID_LIKE in os-release; the more specific first, as Ubuntu is like Debian.
_FAMILIES = {
    "nixos": Kind.NIXOS,
    "ubuntu": Kind.UBUNTU,
    "debian": Kind.DEBIAN,
    "fedora": Kind.FEDORA,
    "rhel": Kind.FEDORA,
    "arch": Kind.ARCH,
}
# What the groups of a container's first process are called.
_GROUPS = {
    "kubepods": "kubernetes",
    "docker": "docker",
    "libpod": "podman",
    "containerd": "containerd",
    "lxc": "lxc",
}


@dataclass(frozen=True)
class Problem:
    """One reason why this machine cannot serve, or (`fatal` False) will not serve well.

    code: a stable word for programs, such as "driver-too-old".
    cause: what was found, with the values.
    fix: what to do about it, in one line, for this kind of host.
    """

    code: str
    cause: str
    fix: str
    fatal: bool = True


@dataclass(frozen=True)
class Root:
    """A tree of files whose links, absolute ones too, stay inside: the host's own, or a recorded one."""

    folder: Path = Path("/")

    def real(self, name: str) -> Path | None:
        """The file or folder at `name` with every link followed; None where the way ends."""
        todo, done, links = [part for part in reversed(name.split("/")) if part], self.folder, 0
        while todo:
            part = todo.pop()
            if part in (".", ".."):
                done = done if part == "." or done == self.folder else done.parent
                continue
            try:
                target = os.readlink(done / part)
            except OSError:
                if not os.path.lexists(done / part):
                    return None
                done /= part
                continue
            links += 1
            if links > _MOST_LINKS:
                return None
            done = self.folder if target.startswith("/") else done
            todo += [piece for piece in reversed(target.split("/")) if piece]
        return done

    def inside(self, path: Path) -> str:
        """How a place in this tree is called by those who live in it."""
        return f"/{path.relative_to(self.folder)}"

    def text(self, name: str) -> str | None:
        """The contents of a small file, or None where it cannot be read."""
        place = self.real(name)
        try:
            return None if place is None else place.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, name: str) -> list[str]:
        """The sorted names in a folder; none where it cannot be read."""
        place = self.real(name)
        try:
            return [] if place is None else sorted(os.listdir(place))
        except OSError:
            return []


@dataclass(frozen=True)
class Host:
    """This machine. All sizes are in bytes.

    kind: what remedies speak of: container before WSL2 before the distribution.
    distribution: the family of the files around us (a container's image, a WSL distribution), never WSL2 or CONTAINER.
    title: PRETTY_NAME of os-release.
    container: docker, podman, kubernetes, containerd, lxc, nspawn or other; None on the host itself.
    wsl: version of the Windows Subsystem for Linux, 0 outside.
    kernel: its release.
    memory: what programs may use: the machine's, or a control group's limit where that is less.
    memory_free: what is left of it, the file cache counted as free; None where the kernel does not say.
    swap_free: of it, what is not in use.
    shm_free: space in /dev/shm; None without one.
    """

    kind: Kind
    distribution: Kind
    title: str
    container: str | None
    wsl: int
    kernel: str
    memory: int | None
    memory_free: int | None
    swap: int
    swap_free: int
    shm: int | None
    shm_free: int | None

    @property
    def wsl2(self) -> bool:
        return self.wsl == 2

    def report(self) -> dict[str, object]:
        """Its fields as JSON can carry them."""
        return asdict(self)


def detect(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Host:
    """The host whose files are below `root`, of a process with the variables `environ` (os.environ if None)."""
    tree = Root(root)
    variables = os.environ if environ is None else environ
    release = _os_release(tree)
    kernel = (tree.text("/proc/sys/kernel/osrelease") or "").strip()
    distribution = _distribution(tree, release)
    container = _container(tree, variables)
    wsl = _wsl(kernel, variables)
    memory, memory_free, swap, swap_free = _memory(tree)
    shm = _space(tree, "/dev/shm")
    return Host(
        kind=Kind.CONTAINER if container else Kind.WSL2 if wsl == 2 else distribution,
        distribution=distribution,
        title=release.get("PRETTY_NAME") or release.get("ID") or "an unnamed system",
        container=container,
        wsl=wsl,
        kernel=kernel,
        memory=memory,
        memory_free=memory_free,
        swap=swap,
        swap_free=swap_free,
        shm=None if shm is None else shm[0],
        shm_free=None if shm is None else shm[1],
    )


def _os_release(tree: Root) -> dict[str, str]:
    text = tree.text("/etc/os-release") or tree.text("/usr/lib/os-release") or ""
    fields = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            try:
                fields[name] = "".join(shlex.split(value)[:1])
            except ValueError:  # an unclosed quote
                fields[name] = value.strip("\"'")
    return fields


def _distribution(tree: Root, release: Mapping[str, str]) -> Kind:
    if tree.real("/etc/NIXOS") is not None:
        return Kind.NIXOS
    said = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    return next((family for name, family in _FAMILIES.items() if name in said), Kind.OTHER)


def _container(tree: Root, variables: Mapping[str, str]) -> str | None:
    """Who runs this container. Each sign is one that its runtime leaves for the purpose, but for the groups' names."""
    groups = tree.text("/proc/1/cgroup") or ""
    if "KUBERNETES_SERVICE_HOST" in variables or "kubepods" in groups:
        return "kubernetes"
    if tree.real("/.dockerenv") is not None:
        return "docker"
    if tree.real("/run/.containerenv") is not None:
        return "podman"
    # systemd writes there what runs it, and counts WSL as a container.
    said = (tree.text("/run/systemd/container") or variables.get("container", "")).strip()
    if said and said != "wsl":
        return {"systemd-nspawn": "nspawn", "oci": "other", "lxc-libvirt": "lxc"}.get(said, said)
    return next((runtime for name, runtime in _GROUPS.items() if name in groups), None)


def _wsl(kernel: str, variables: Mapping[str, str]) -> int:
    if "microsoft" in kernel.lower():
        # Version 1 has no kernel of its own, and says that it is this one.
        return 1 if kernel.startswith("4.4.") else 2
    # A kernel that the user built may be called anything.
    return 2 if "WSL_DISTRO_NAME" in variables or "WSL_INTEROP" in variables else 0


def _memory(tree: Root) -> tuple[int | None, int | None, int, int]:
    """(all, free, swap, free swap) in bytes; the first two are None where the kernel does not say."""
    kib = {}
    for line in (tree.text("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        digits = value.strip().split(" ")[0]
        if digits.isdecimal():
            kib[name] = int(digits) * 1024
    total, free = kib.get("MemTotal"), kib.get("MemAvailable")
    for limit, left in _limits(tree):
        total = limit if total is None else min(total, limit)
        free = left if free is None else min(free, left)
    return total, free, kib.get("SwapTotal", 0), kib.get("SwapFree", 0)


def _limits(tree: Root) -> list[tuple[int, int]]:
    """(limit, what is left of it) of the control groups that hold this process, from the innermost to the root."""
    found = []
    group = ""
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            group = line.removeprefix("0::").strip("/")
    places = ["/sys/fs/cgroup"]
    for part in group.split("/") if group and ".." not in group else []:
        places.append(f"{places[-1]}/{part}")
    names = ("memory.max", "memory.current")
    # Version 1 mounts each controller by itself, and says "no limit" with the largest multiple of a page.
    for place, (most, used) in [
        *((place, names) for place in reversed(places)),
        ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ]:
        limit, current = _number(tree, f"{place}/{most}"), _number(tree, f"{place}/{used}")
        if limit is None or limit >= 1 << 60:
            continue
        lines = (tree.text(f"{place}/memory.stat") or "").splitlines()
        stat = dict(line.split(maxsplit=1) for line in lines if " " in line.strip())
        # The file cache of the group is counted as its own but given back when needed.
        cache = sum(int(stat.get(name, "0")) for name in ("inactive_file", "active_file"))
        found.append((limit, max(0, limit - (current or 0) + cache)))
    return found


def _number(tree: Root, name: str) -> int | None:
    text = (tree.text(name) or "").strip()
    return int(text) if text.isdecimal() else None


def _space(tree: Root, name: str) -> tuple[int, int] | None:
    place = tree.real(name)
    if place is None:
        return None
    try:
        seen = os.statvfs(place)
    except OSError:
        return None
    return seen.f_frsize * seen.f_blocks, seen.f_frsize * seen.f_bavail
