"""The NVIDIA driver of this host: where its libraries are, which version, and whether the kernel's half fits.

The engine brings its own C library and CUDA; of the host it needs the driver's few files and nothing else. The host's
library folder on the loader's path would put the host's libc before ours, so what goes there is a folder of links to
exactly those files. docs/driver.md says what is searched and why.
"""

from __future__ import annotations

import argparse
import grp
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hyperqwen.errors import HyperqwenError, UnsuitableError
from hyperqwen.runtime import elf
from hyperqwen.runtime.host import Host, Kind, Problem, Root, detect

if TYPE_CHECKING:
    from hyperqwen.runtime.gpu import Gpu

OVERRIDE = "HYPERQWEN_DRIVER_DIR"
# CUDA 13.0's minor-version compatibility begins there (NVIDIA, CUDA 13.0 release notes, table 2).
MINIMUM = "580.65.06"
# On WSL2 the version is the Windows driver's, which counts its releases differently: only the branch can be compared.
WSL_MINIMUM = "580"

CUDA = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"
JIT = "libnvidia-ptxjitcompiler.so.1"
_DXCORE = "libdxcore.so"
# Opened by libcuda by name while it works: the compilers of PTX and of link-time optimized code.
_OPENED = (JIT, "libnvidia-nvvm.so.4", "libnvidia-nvvm70.so.4", _DXCORE)
# What the engine's own C library brings; a driver may need these of whoever loads it.
_OURS = re.compile(
    r"(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libutil|libresolv|libgcc_s|libstdc\+\+|libz)\.so\.\d+\Z"
)
_VERSION = re.compile(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)\Z")
_MODULE = re.compile(r"^NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", re.MULTILINE)
# The CUDA toolkit has libraries of the drivers' names to link with; a real libcuda has tens of megabytes.
_STUB_BYTES = 1 << 20
_CACHE = "/etc/ld.so.cache"
_WSL_STORE = "/usr/lib/wsl/drivers"
_FOLDERS = {
    "nixos": ("/run/opengl-driver/lib",),
    "wsl2": ("/usr/lib/wsl/lib",),
    "container": ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"),
    "debian": ("/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/nvidia/current"),
    "fedora": ("/usr/lib64", "/usr/lib64/nvidia"),
    "arch": ("/usr/lib", "/usr/lib/nvidia"),
}


@dataclass(frozen=True)
class Finding:
    """One place that was looked at, and what was there."""

    path: str
    finding: str


@dataclass(frozen=True)
class Driver:
    """What was found of a driver. Incomplete where `problems` has a fatal one.

    version: of its libraries, "580.65.06"; on WSL2 the Windows driver's, and None until NVML was asked.
    module_version: of the loaded kernel module; None where there is none or it cannot be seen.
    module_kind: "open" or "proprietary", where the module says it.
    libraries: by the name that a program asks for, the file itself.
    searched: every place that was looked at, in order.
    problems: what keeps it from working, fatal ones first.
    """

    version: str | None
    module_version: str | None
    module_kind: str | None
    libraries: Mapping[str, Path]
    searched: tuple[Finding, ...]
    problems: tuple[Problem, ...]

    @property
    def usable(self) -> bool:
        return not any(problem.fatal for problem in self.problems)

    @property
    def nvml(self) -> Path | None:
        """The library that answers for the cards, usable or not."""
        return self.libraries.get(NVML)

    def require(self) -> None:
        """Raise UnsuitableError with every fatal problem, and what was searched where no driver was found."""
        fatal = [problem for problem in self.problems if problem.fatal]
        if not fatal:
            return
        lines = [problem.cause for problem in fatal]
        if CUDA not in self.libraries:
            lines += ["searched:", *(f"  {entry.path}: {entry.finding}" for entry in self.searched)]
        raise UnsuitableError("\n".join(lines), "; then ".join(dict.fromkeys(problem.fix for problem in fatal)))

    def report(self) -> dict[str, object]:
        """Everything as JSON can carry it."""
        return {
            "usable": self.usable,
            "version": self.version,
            "module_version": self.module_version,
            "module_kind": self.module_kind,
            "libraries": {name: str(path) for name, path in self.libraries.items()},
            "searched": [{"path": entry.path, "finding": entry.finding} for entry in self.searched],
            "problems": [
                {"code": entry.code, "cause": entry.cause, "fix": entry.fix, "fatal": entry.fatal}
                for entry in self.problems
            ],
        }


def find(
    host: Host,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    nvml_version: str | None = None,
    glibc: tuple[int, ...] | None = None,
) -> Driver:
    """The driver of `host`, whose files are below `root`. Reads only; every problem is in the result.

    Args:
        environ: variables of this process (os.environ if None), of which HYPERQWEN_DRIVER_DIR alone is read.
        nvml_version: what NVML says, where it was asked already: the only version there is on WSL2.
        glibc: version of the engine's C library; None for that of this process, which is the same one in a build.
    """
    variables = os.environ if environ is None else environ
    search = _Search(Root(root), host, variables.get(OVERRIDE))
    search.libraries()
    version = search.version or nvml_version
    module_version, module_kind = _module(search.root)
    found = Driver(version, module_version, module_kind, search.found, tuple(search.findings), ())
    problems = [
        *search.problems,
        *_version_problems(found, host, search.root, search.is_compat),
        *_node_problems(host, search.root, variables),
        *_abi_problems(search, _own_glibc() if glibc is None else glibc),
    ]
    if any(problem.code == "no-card" for problem in problems):
        # Whatever else is missing, a driver would not help.
        problems = [problem for problem in problems if problem.code == "no-card"]
    problems.sort(key=lambda problem: not problem.fatal)
    return replace(found, problems=tuple(problems))


def link_directory(driver: Driver, into: Path) -> Path:
    """A folder in `into` that holds links to the driver's files alone, for LD_LIBRARY_PATH and Triton.

    Its name follows from the driver's version and files, so that an update makes another one and leaves the folder of a
    running engine alone. A folder that is there but wrong is put right link by link: none is missing at any time.
    Raises UnsuitableError without a usable driver or where nothing can be written.
    """
    driver.require()
    links = {name: str(path) for name, path in driver.libraries.items()}
    # Some ask for the name that a development package would have.
    links["libcuda.so"] = links[CUDA]
    key = hashlib.sha256(json.dumps(links, sort_keys=True).encode()).hexdigest()[:12]
    folder = into / f"driver-{driver.version or 'unversioned'}-{key}"
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_dir():
            _make(folder, links)
        _repair(folder, links)
    except OSError as error:
        raise UnsuitableError(
            f"the links to the driver cannot be made in {into}: {error.strerror}", "name a cache folder to write in"
        ) from None
    return folder


def _make(folder: Path, links: Mapping[str, str]) -> None:
    draft = Path(tempfile.mkdtemp(prefix=".driver-", dir=folder.parent))
    try:
        for name, target in links.items():
            (draft / name).symlink_to(target)
        try:
            draft.rename(folder)
        except OSError:
            # Two starts may race: whoever comes second finds the folder there, and only looks it through.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _repair(folder: Path, links: Mapping[str, str]) -> None:
    for name, target in links.items():
        place = folder / name
        if place.is_symlink() and os.readlink(place) == target:
            continue
        draft = folder / f".{name}.{os.getpid()}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        draft.replace(place)
    for name in os.listdir(folder):
        if name not in links and not name.startswith("."):
            (folder / name).unlink()


class _Search:
    """Looks for libraries in an order of places, and keeps what it saw."""

    def __init__(self, root: Root, host: Host, override: str | None) -> None:
        self.root, self.host, self.override = root, host, override
        self.findings: list[Finding] = []
        self.problems: list[Problem] = []
        self.found: dict[str, Path] = {}
        self.read: dict[str, elf.Library] = {}
        self.version: str | None = None
        self.is_compat = False

    def libraries(self) -> None:
        """Fill `found`: libcuda first, then what belongs to it, from the same place before others."""
        folders = list(self._folders())
        home = next((folder for folder in folders if self._take(CUDA, folder)), None)
        if home is None:
            self.problems.append(self._no_library(CUDA, "the CUDA driver"))
            return
        self.version = self._version_of(CUDA, home)
        self.is_compat = _is_compat(home) or _is_compat(self.root.inside(self.found[CUDA]))
        beside = self.root.inside(self.found[CUDA].parent)
        store = [f"{_WSL_STORE}/{name}" for name in self.root.names(_WSL_STORE)] if self.host.wsl2 else []
        order = list(dict.fromkeys([home, beside, *store, *folders]))
        for name in (NVML, *_OPENED):
            if not any(self._take(name, folder, quiet=True) for folder in order):
                self._missed(name, order)
        self._follow(order)

    def _missed(self, name: str, order: Iterable[str]) -> None:
        if name == NVML or (name == _DXCORE and self.host.wsl2):
            self.findings.append(Finding(name, f"in none of {', '.join(order)} in a version that fits"))
            what = "the driver's management library" if name == NVML else "the way to the Windows driver"
            self.problems.append(self._no_library(name, what))
        elif name == JIT and not self.host.wsl2:
            self.problems.append(
                Problem(
                    "no-jit",
                    f"{JIT} does not lie with {self.root.inside(self.found[CUDA])}: a kernel that has no code for this "
                    "card but PTX would fail with CUDA error 221",
                    _install(self.host),
                    fatal=False,
                )
            )

    def _follow(self, order: list[str]) -> None:
        """Take what the libraries are linked with, and the part that newer drivers split off."""
        if self.version is not None:
            for name in (f"libnvidia-gpucomp.so.{self.version}", f"libnvidia-tileiras.so.{self.version}"):
                any(self._take(name, folder, quiet=True) for folder in order)
        todo = list(self.found)
        while todo:
            user = todo.pop()
            for name in self.read[user].needed:
                if _OURS.match(name) or name in self.found:
                    continue
                if any(self._take(name, folder, quiet=True) for folder in order):
                    todo.append(name)
                else:
                    self.problems.append(
                        Problem(
                            "library-needs",
                            f"{self.root.inside(self.found[user])} needs {name}, which is not beside it",
                            f"reinstall the driver: {_install(self.host)}",
                        )
                    )

    def _folders(self) -> Iterator[str]:
        """Places of libcuda, the likely ones for this host first; what the loader's cache says comes last."""
        if self.override:
            yield self.override
            return
        kinds = [str(self.host.kind), str(self.host.distribution), "wsl2" if self.host.wsl2 else "", *_FOLDERS]
        # Ubuntu's files lie where Debian's do.
        names = dict.fromkeys("debian" if kind == "ubuntu" else kind for kind in kinds)
        fixed = [folder for name in names for folder in _FOLDERS.get(name, ())]
        yield from fixed
        yield from (folder for folder in self._cached() if folder not in fixed)

    def _cached(self) -> list[str]:
        place = self.root.real(_CACHE)
        if place is None:
            self.findings.append(Finding(_CACHE, "not there"))
            return []
        try:
            paths = cached_paths(place.read_bytes(), CUDA)
        except (OSError, ValueError) as error:
            self.findings.append(Finding(_CACHE, f"not readable: {error}"))
            return []
        self.findings.append(Finding(_CACHE, f"names {', '.join(paths)}" if paths else f"has no 64-bit {CUDA}"))
        return [str(PurePosixPath(path).parent) for path in paths]

    def _take(self, name: str, folder: str, quiet: bool = False) -> bool:
        """Take `name` from `folder` where it is good; say what was there, unless `quiet` and nothing was."""
        place = f"{folder}/{name}"
        inside = self.root.real(folder)
        if inside is None or not os.path.lexists(inside / name):
            if not quiet:
                self.findings.append(Finding(place, "not there"))
            return False
        verdict = self._judge(name, place)
        self.findings.append(Finding(place, verdict or "taken"))
        return verdict is None

    def _judge(self, name: str, place: str) -> str | None:
        """Why the file at `place` is not taken as `name`, or None when it was."""
        real = self.root.real(place)
        if real is None:
            return "a dangling link"
        called = self.root.inside(real)
        if "stubs" in PurePosixPath(place).parts or "stubs" in PurePosixPath(called).parts:
            return "a stub of the CUDA toolkit, to link with only"
        if name == CUDA and not self.override and (_is_compat(place) or _is_compat(called)):
            return (
                "a forward-compatibility library, which works on data-centre cards only; "
                f"there, {OVERRIDE} can name its folder"
            )
        try:
            library = elf.read(real)
            size = real.stat().st_size
        except elf.NotLoadable as error:
            return str(error)
        except OSError as error:
            return f"not readable: {error.strerror}"
        if name == CUDA and size < _STUB_BYTES and not self.host.wsl2:
            return f"a stub: {size} bytes, where a driver has tens of megabytes"
        version = _version(called)
        if name != CUDA and version and self.version and version != self.version and not self.is_compat:
            return f"of driver {version}, but {CUDA} is of {self.version}"
        self.found[name], self.read[name] = real, library
        return None

    def _version_of(self, name: str, folder: str) -> str | None:
        """The version in the file's own name, or, for a file mounted under a short one, of its twin's beside it."""
        real = self.found[name]
        version = _version(self.root.inside(real))
        if version is not None:
            return version
        stem = name.rsplit(".so", 1)[0]
        for other in self.root.names(folder):
            twin = self.root.real(f"{folder}/{other}")
            if other.startswith(f"{stem}.so.") and _version(other) and twin is not None and twin.samefile(real):
                return _version(other)
        return None

    def _no_library(self, name: str, what: str) -> Problem:
        if self.override:
            return Problem(
                "override",
                f"{OVERRIDE} is {self.override!r}, where {name} ({what}) is not usable",
                f"name the folder that holds {CUDA} and {NVML}, or unset {OVERRIDE}",
            )
        # One line each would bury it: what is there but unusable is the news.
        seen = [
            f"{entry.path} is {entry.finding}"
            for entry in self.findings
            if entry.path.endswith(f"/{name}") and entry.finding != "not there"
        ]
        cause = f"{what} ({name}) was not found {_place(self.host)}"
        return Problem("no-driver", f"{cause}: {'; '.join(seen)}" if seen else cause, _install(self.host))


def cached_paths(data: bytes, soname: str) -> list[str]:
    """The paths that the loader's cache (/etc/ld.so.cache, `data`) has for the 64-bit x86 library `soname`.

    Raises ValueError for bytes that are no such cache. glibc's dl-cache.h describes the format; before 2.32 it
    lay after a table of an older one.
    """
    magic = b"glibc-ld.so.cache1.1"
    start = data.find(magic)
    if start < 0:
        raise ValueError("no loader cache of a format that glibc has written since 2002")
    view = data[start:]
    try:
        (count,) = struct.unpack_from("<I", view, len(magic))
        entries = [struct.unpack_from("<iIIIQ", view, 48 + 24 * index) for index in range(min(count, len(view) // 24))]
        if len(entries) != count:
            raise ValueError("a torn loader cache")
        # glibc 2 and x86-64, in two bytes of flags.
        return [
            _text(view, value)
            for flags, key, value, _, _ in entries
            if flags & 0xFFFF == 0x0303 and _text(view, key) == soname
        ]
    except (struct.error, UnicodeDecodeError):
        raise ValueError("a torn loader cache") from None


def _text(data: bytes, place: int) -> str:
    return data[place : data.index(b"\0", place)].decode()


def _module(root: Root) -> tuple[str | None, str | None]:
    """(version, kind) of the kernel module, as far as it shows itself."""
    text = root.text("/proc/driver/nvidia/version") or ""
    said = _MODULE.search(f"{text}\n")
    kind = None
    if said is not None:
        kind = "open" if "Open Kernel Module" in text else "proprietary"
    version = said.group(1) if said else (root.text("/sys/module/nvidia/version") or "").strip() or None
    return version, kind


def _version_problems(driver: Driver, host: Host, root: Root, is_compat: bool) -> list[Problem]:
    problems = []
    minimum = WSL_MINIMUM if host.wsl2 else MINIMUM
    if driver.version is not None and _number(driver.version) < _number(minimum):
        problems.append(
            Problem(
                "driver-too-old",
                f"driver {driver.version} is too old: CUDA 13.0 needs {minimum} or later",
                _update(host),
            )
        )
    if host.wsl2:
        return problems
    if driver.module_version is None:
        return [*problems, *_module_problems(driver, host, root)]
    if driver.version is None or driver.version == driver.module_version:
        return problems
    if is_compat and _number(driver.module_version) < _number(driver.version):
        problems.append(
            Problem(
                "forward-compatibility",
                f"{CUDA} of {driver.version} works with kernel module {driver.module_version} by forward "
                "compatibility, which data-centre cards have and others refuse with CUDA error 804",
                f"on another card: {_update(host)}",
                fatal=False,
            )
        )
        return problems
    problems.append(
        Problem(
            "reboot-needed",
            f"reboot needed: module {driver.module_version} is loaded, libraries are {driver.version}",
            "restart the container: its libraries are of another driver than the host's"
            if host.container
            else "reboot (the driver was updated while its module was in use)",
        )
    )
    return problems


def _module_problems(driver: Driver, host: Host, root: Root) -> list[Problem]:
    """Problems where no module shows itself."""
    if host.container and _cards(root):
        # A sandbox of its own kernel has neither /proc/driver nor /sys/module, and works: NVML knows.
        return []
    buses = root.names("/sys/bus/pci/devices")
    vendors = {(root.text(f"/sys/bus/pci/devices/{bus}/vendor") or "").strip() for bus in buses}
    if buses and not host.container and "0x10de" not in vendors:
        return [
            Problem(
                "no-card",
                "no NVIDIA card is on this machine's PCI bus",
                "use a machine with an NVIDIA card; without one: ./hq run .#demo",
            )
        ]
    if root.real("/sys/module/nouveau") is not None:
        return [
            Problem(
                "nouveau",
                "the module nouveau drives the card; CUDA needs NVIDIA's own",
                f"{_install(host)}; nouveau must not be loaded, so reboot afterwards",
            )
        ]
    if CUDA not in driver.libraries and not host.container:
        # That nothing is installed was said already.
        return []
    return [
        Problem(
            "no-module",
            f"NVIDIA's kernel module is not loaded {_place(host)}",
            _give(host) if host.container else f"sudo modprobe nvidia; if that fails: {_install(host)}",
        )
    ]


def _cards(root: Root) -> list[str]:
    return [name for name in root.names("/dev") if re.fullmatch(r"nvidia\d+", name)]


def _node_problems(host: Host, root: Root, environ: Mapping[str, str]) -> list[Problem]:
    """Problems with the files in /dev through which a program reaches the card."""
    nodes = ["/dev/dxg"] if host.wsl2 else ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    if not host.wsl2:
        nodes += [f"/dev/{name}" for name in _cards(root)] or ["/dev/nvidia0"]
    missing = [node for node in nodes if (place := root.real(node)) is None or place.is_dir()]
    problems = []
    if missing:
        if host.wsl2:
            fix = "run `wsl --update` in Windows and restart it (`wsl --shutdown`): the GPU is not given to this kernel"
        elif host.container:
            fix = _give(host)
        else:
            fix = "sudo nvidia-modprobe -u -c=0"
        problems.append(Problem("no-device", f"{', '.join(missing)} {_are(missing)} not there", fix))
    closed = [node for node in nodes if node not in missing and not _may_use(root.real(node))]
    if closed:
        problems.append(
            Problem(
                "no-permission",
                f"{', '.join(closed)} {_are(closed)} not for this user",
                _admit(root, closed[0], host, environ),
            )
        )
    return problems


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _may_use(place: Path | None) -> bool:
    return place is not None and os.access(place, os.R_OK | os.W_OK)


# What a group is called where a user namespace does not map it.
_NO_GROUP = 65534


def _admit(root: Root, node: str, host: Host, environ: Mapping[str, str]) -> str:
    """How this user gets at `node`."""
    place = root.real(node)
    mode = place.stat() if place is not None else None
    if host.container or mode is None or not mode.st_mode & stat.S_IWGRP or mode.st_gid == 0:
        return f"let this user read and write it: ls -l {node} shows whose it is"
    try:
        group = grp.getgrgid(mode.st_gid).gr_name
    except KeyError:
        group = str(mode.st_gid)
    # A desktop's terminals have the first of them as well, a service of the system never the second.
    if "INVOCATION_ID" in environ and "TERM" not in environ:
        if mode.st_gid == _NO_GROUP:
            # PrivateUsers= hides whose the node is.
            group = f"GROUP, the one that ls -l {node} shows outside of the service"
        return f"sudo systemctl edit the service, add [Service] SupplementaryGroups={group}; then restart it"
    return f"sudo usermod -aG {group} $USER, then log in again"


def _abi_problems(search: _Search, glibc: tuple[int, ...]) -> list[Problem]:
    problems = []
    for name, library in search.read.items():
        needs = library.newest_glibc()
        if needs is not None and needs > glibc:
            problems.append(
                Problem(
                    "glibc",
                    f"{search.root.inside(search.found[name])} needs glibc {_dotted(needs)}, and the engine's is "
                    f"{_dotted(glibc)}",
                    f"use NVIDIA's own build of the driver, which needs less: {_install(search.host)}",
                )
            )
    return problems


def _own_glibc() -> tuple[int, ...]:
    """The C library of this process: launcher and engine run on the same one."""
    said = os.confstr("CS_GNU_LIBC_VERSION") or ""
    number = said.removeprefix("glibc ")
    if not number.replace(".", "").isdecimal():
        raise HyperqwenError(f"the C library of this process is not glibc but {said or 'another one'}")
    return tuple(int(part) for part in number.split("."))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _version(path: str) -> str | None:
    match = _VERSION.search(path)
    return match.group(1) if match else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _is_compat(path: str) -> bool:
    return any(part == "compat" or part.startswith("cuda-compat") for part in PurePosixPath(path).parts)


def _place(host: Host) -> str:
    if host.container:
        return f"in this container ({host.container})"
    return "in WSL2" if host.wsl2 else f"on this host ({host.title})"


def _give(host: Host) -> str:
    """How a container gets the GPU and the driver's libraries."""
    if host.container == "kubernetes":
        return "ask for the GPU in the pod's limits: nvidia.com/gpu: 1 (needs NVIDIA's device plugin on the node)"
    return (
        "start the container with --device nvidia.com/gpu=all (or --gpus all) and "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility; needs nvidia-container-toolkit on the host"
    )


_INSTALL = {
    Kind.NIXOS: (
        'set hardware.graphics.enable = true; services.xserver.videoDrivers = [ "nvidia" ]; '
        "hardware.nvidia.open = true; then nixos-rebuild switch and reboot"
    ),
    Kind.DEBIAN: "sudo apt install nvidia-open from NVIDIA's own repository (Debian's driver is older), then reboot",
    Kind.UBUNTU: "sudo apt install nvidia-driver-580-open, then reboot",
    Kind.FEDORA: "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda (RPM Fusion), then reboot",
    Kind.ARCH: "sudo pacman -S nvidia-open nvidia-utils, then reboot",
    Kind.WSL2: (
        f"install NVIDIA's driver {WSL_MINIMUM} or later in Windows, then `wsl --shutdown`; install none inside WSL"
    ),
    Kind.OTHER: f"install NVIDIA's driver {MINIMUM} or later, then reboot",
}
_UPDATE = {
    Kind.NIXOS: (
        "set hardware.nvidia.package = config.boot.kernelPackages.nvidiaPackages.latest; "
        "then nixos-rebuild switch and reboot"
    ),
    Kind.FEDORA: "sudo dnf upgrade --refresh akmod-nvidia xorg-x11-drv-nvidia-cuda, then reboot",
    Kind.ARCH: "sudo pacman -Syu, then reboot",
    Kind.WSL2: f"update NVIDIA's driver in Windows to {WSL_MINIMUM} or later, then `wsl --shutdown`",
    Kind.CONTAINER: f"update the driver on the container's host to {MINIMUM} or later",
}


def _install(host: Host) -> str:
    return _give(host) if host.container else _INSTALL[host.kind]


def _update(host: Host) -> str:
    return _UPDATE.get(host.kind) or _INSTALL[host.kind]


@dataclass(frozen=True)
class Survey:
    """What one look at this machine found.

    gpus: none where NVML could not be asked; `nvml_error` says why.
    cuda: the newest version of CUDA that the driver knows.
    """

    host: Host
    driver: Driver
    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] | None = None
    nvml_error: str | None = None

    @property
    def usable(self) -> bool:
        return self.driver.usable and bool(self.gpus)

    def report(self) -> dict[str, object]:
        """Everything as JSON can carry it."""
        return {
            "usable": self.usable,
            "host": self.host.report(),
            "driver": self.driver.report(),
            "nvml_error": self.nvml_error,
            "cuda": None if self.cuda is None else _dotted(self.cuda),
            "gpus": [card.report() for card in self.gpus],
        }


def survey(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Survey:
    """Host, driver and cards of this machine. NVML is asked even of an unusable driver: it often says more."""
    host = detect(root, environ)
    driver = find(host, root=root, environ=environ)
    if driver.nvml is None:
        return Survey(host, driver, nvml_error=f"{NVML} was not found")
    # Only here: who looks for files alone need not load seven thousand lines of pynvml.
    from hyperqwen.runtime.gpu import Nvml

    try:
        with Nvml(driver.nvml) as nvml:
            driver = find(host, root=root, environ=environ, nvml_version=nvml.driver_version())
            return Survey(host, driver, nvml.gpus(), nvml.cuda_version())
    except UnsuitableError as error:
        return Survey(host, driver, nvml_error=str(error))


def main(arguments: list[str] | None = None) -> int:
    """Print what there is; exit 0 where the driver is usable and answers for a card, 3 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m hyperqwen.runtime.driver", description="What CUDA finds on this machine."
    )
    parser.add_argument("--json", action="store_true", help="as one JSON document")
    parser.add_argument("--links", type=Path, metavar="DIR", help="also make the folder of links in DIR, and name it")
    chosen = parser.parse_args(arguments)
    seen = survey()
    report = seen.report()
    if chosen.links is not None:
        try:
            report["links"] = str(link_directory(seen.driver, chosen.links))
        except UnsuitableError as error:
            print(error, file=sys.stderr)
    print(json.dumps(report, indent=2) if chosen.json else "\n".join(_lines(report)))
    return 0 if seen.usable else UnsuitableError.exit_code


def _lines(value: object, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _lines(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _lines(inner, f"{name}[{index}]")
    elif value is not None:
        yield f"{name} = {value}"


if __name__ == "__main__":
    sys.exit(main())
