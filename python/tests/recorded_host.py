"""Hosts as trees of files, their shared libraries made by a compiler, and an NVML that answers what a test recorded."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperqwen.runtime.driver import CUDA, JIT, NVML
from hyperqwen.runtime.host import Root

SOURCE = Path(__file__).parent / "recorded_nvml.c"
KNOWN = "580.65.06"
# A real libcuda has 96 MB; the file is sparse.
REAL_SIZE = 8 << 20
# For the whole run: each takes a tenth of a second to compile, and the trees hold copies.
_MADE = tempfile.TemporaryDirectory(prefix="hyperqwen-recorded-")


def compiler() -> str:
    """The C compiler: the pinned one in a check, the host's elsewhere."""
    found = os.environ.get("TESTS_CC") or shutil.which("cc")
    if found is None:
        raise RuntimeError("no C compiler: set TESTS_CC")
    return found


@functools.cache
def compiled(soname: str, needs: tuple[str, ...] = (), glibc: str | None = None, source: Path | None = None) -> Path:
    """A shared library that is called `soname`, is linked with `needs`, and uses a symbol of version `glibc`."""
    folder = Path(tempfile.mkdtemp(dir=_MADE.name))
    build = functools.partial(_build, folder)
    linked = [build(name, "int there;", soname=name) for name in needs]
    text = "int here(void) { return 1; }"
    if glibc is not None:
        (folder / "map").write_text(f"{glibc} {{ global: newest; }};\n")
        script = f"-Wl,--version-script,{folder / 'map'}"
        linked.append(build("libc.so.6", "int newest(void) { return 1; }", script, soname="libc.so.6"))
        text = "int newest(void); int here(void) { return newest(); }"
    if source is not None:
        text = source.read_text()
    return build(soname, text, "-Wl,--no-as-needed", *map(str, linked), soname=soname)


def _build(folder: Path, name: str, text: str, *flags: str, soname: str) -> Path:
    source, made = folder / f"{name}.c", folder / name
    source.write_text(text)
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-nostdlib", "-O1", f"-Wl,-soname,{soname}", str(source), *flags, "-o", made],
        check=True,
    )
    return made


class Tree:
    """A host's root folder in the making. `folder` is where its driver is to be found, once it has one."""

    def __init__(self, root: Path, folder: str = "") -> None:
        self.root = root
        self.folder = folder

    def place(self, name: str) -> Path:
        """Where `name` lies, its folder made; links to folders lead to others of the tree, never out of it."""
        folder, _, last = name.rpartition("/")
        made = Root(self.root).real(folder) or self.root / folder.lstrip("/")
        made.mkdir(parents=True, exist_ok=True)
        return made / last

    def write(self, name: str, data: str | bytes = "") -> Path:
        place = self.place(name)
        place.write_bytes(data.encode() if isinstance(data, str) else data)
        return place

    def link(self, name: str, target: str) -> None:
        self.place(name).symlink_to(target)

    def release(self, **fields: str) -> None:
        self.write("/etc/os-release", "".join(f'{name}="{value}"\n' for name, value in fields.items()))

    def library(self, place: str, soname: str, *, size: int = REAL_SIZE, **how: Any) -> Path:
        """A real library at `place`, filled up to `size` bytes."""
        made = self.write(place)
        shutil.copyfile(compiled(soname, **how), made)
        if made.stat().st_size < size:
            os.truncate(made, size)
        return made

    def driver(self, folder: str, version: str = KNOWN, links_in: str | None = None) -> None:
        """The files of a driver of `version` in `folder`, and the links with the short names in `links_in`."""
        for soname in (CUDA, NVML, JIT):
            real = f"{soname.rpartition('.')[0]}.{version}"
            self.library(f"{folder}/{real}", soname)
            self.link(f"{links_in or folder}/{soname}", f"{folder}/{real}" if links_in else real)
        self.library(f"{folder}/libnvidia-gpucomp.so.{version}", f"libnvidia-gpucomp.so.{version}")

    def module(self, version: str = KNOWN, *, is_open: bool = True) -> None:
        """The loaded kernel module, as it shows itself."""
        name = "NVIDIA UNIX Open Kernel Module for x86_64" if is_open else "NVIDIA UNIX x86_64 Kernel Module"
        self.write(
            "/proc/driver/nvidia/version",
            f"NVRM version: {name}  {version}  Release Build  (dvs-builder@U22-I3)  Sun Jul 27 07:03:08 UTC 2025\n"
            "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n",
        )
        self.write("/sys/module/nvidia/version", f"{version}\n")

    def nodes(self, *names: str) -> None:
        for name in names or ("nvidiactl", "nvidia-uvm", "nvidia0"):
            self.write(f"/dev/{name}")

    def card_on_bus(self) -> None:
        self.write("/sys/bus/pci/devices/0000:00:00.0/vendor", "0x8086\n")
        self.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")

    def without(self, *names: str) -> None:
        for name in names:
            place = self.place(name)
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))


class Card(ctypes.Structure):
    """A card as recorded_nvml.c knows it; `missing` names the questions that it has no answer to."""

    _fields_ = (
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 96),
        *((name, ctypes.c_ulonglong) for name in ("total", "free", "used", "reserved", "reasons", "missing")),
        *(
            (name, ctypes.c_uint)
            for name in (
                *("major", "minor", "power", "limit", "clock", "memory_clock"),
                *("mig", "display", "busy", "computing", "drawing"),
            )
        ),
        ("process", _Process * 8),
    )


MISSING = {
    name: 1 << bit
    for bit, name in enumerate(
        ("memory_v2", "power", "limit", "clocks", "reasons", "mig", "display", "busy", "processes", "names")
    )
}


def card(
    values: Mapping[str, int | bytes],
    computing: Sequence[tuple[int, int]] = (),
    drawing: Sequence[tuple[int, int]] = (),
    missing: Sequence[str] = (),
) -> Card:
    """A card with these values; programs as (pid, bytes)."""
    made = Card(
        **values, missing=sum(MISSING[name] for name in missing), computing=len(computing), drawing=len(drawing)
    )
    for place, (pid, used) in enumerate([*computing, *drawing]):
        made.process[place] = _Process(pid, used)
    return made


class Recorded:
    """The compiled NVML at `path`; what it answers is set by a call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.record.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)

    def answers(self, *cards: Card, start: int = 0) -> None:
        """From now on NVML has these cards, and its start returns the code `start`."""
        held = (Card * max(1, len(cards)))(*cards)
        if self._library.record(start, len(cards), ctypes.byref(held)) != ctypes.sizeof(Card):
            raise AssertionError("recorded_nvml.c and Card differ")
