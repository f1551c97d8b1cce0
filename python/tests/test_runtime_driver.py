from __future__ import annotations

import grp
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import UnsuitableError
from hyperqwen.runtime import driver as runtime_driver
from hyperqwen.runtime.driver import CUDA, JIT, NVML, Driver, cached_paths, find, link_directory
from hyperqwen.runtime.host import Problem, detect
from tests.recorded_host import KNOWN, Tree

GPUCOMP = f"libnvidia-gpucomp.so.{KNOWN}"
OLDER, NEWER = "535.183.01", "590.44.01"
NEWEST_GLIBC = (2, 36)


def seen(tree: Tree, *, nvml_version: str | None = None, **environ: str) -> Driver:
    host = detect(tree.root, environ)
    return find(host, root=tree.root, environ=environ, nvml_version=nvml_version, glibc=NEWEST_GLIBC)


def codes(driver: Driver) -> list[str]:
    return [problem.code for problem in driver.problems]


def finding(driver: Driver, path: str) -> str:
    return next(entry.finding for entry in driver.searched if entry.path == path)


def problem(driver: Driver, code: str) -> Problem:
    return next(entry for entry in driver.problems if entry.code == code)


# What each system's root folder looks like with a working driver: where it lies, and the word for its remedies.


def nixos(tree: Tree) -> str:
    store = f"/nix/store/0abc-nvidia-x11-{KNOWN}-6.12.43/lib"
    tree.release(ID="nixos", PRETTY_NAME="NixOS 25.11 (Xantusia)")
    tree.driver(store)
    # Each file of the driver's folder is linked from a folder that holds those of all graphics drivers.
    for soname in (CUDA, NVML, JIT, GPUCOMP):
        tree.link(f"/nix/store/0abd-graphics-drivers/lib/{soname}", f"{store}/{soname}")
    tree.link("/run/opengl-driver", "/nix/store/0abd-graphics-drivers")
    return "/run/opengl-driver/lib"


def debian(tree: Tree) -> str:
    tree.release(ID="debian", PRETTY_NAME="Debian GNU/Linux 12 (bookworm)")
    library = "/usr/lib/x86_64-linux-gnu"
    tree.driver(f"{library}/nvidia/current")
    # The alternatives system leads from the usual place to the chosen driver.
    for soname in (CUDA, NVML, JIT):
        tree.link(f"{library}/{soname}", f"/etc/alternatives/nvidia--{soname}-x86_64-linux-gnu")
        tree.link(f"/etc/alternatives/nvidia--{soname}-x86_64-linux-gnu", f"{library}/nvidia/current/{soname}")
    return library


def ubuntu(tree: Tree) -> str:
    tree.release(ID="ubuntu", ID_LIKE="debian", PRETTY_NAME="Ubuntu 24.04.3 LTS")
    tree.driver("/usr/lib/x86_64-linux-gnu")
    tree.library("/usr/lib/i386-linux-gnu/libcuda.so.1", CUDA)
    return "/usr/lib/x86_64-linux-gnu"


def fedora(tree: Tree) -> str:
    tree.release(ID="fedora", PRETTY_NAME="Fedora Linux 43 (Workstation Edition)")
    tree.driver("/usr/lib64")
    # 32-bit libraries have their own folder there, of a name that elsewhere is the 64-bit one.
    as_32_bit(tree.library("/usr/lib/libcuda.so.1", CUDA))
    return "/usr/lib64"


def arch(tree: Tree) -> str:
    tree.release(ID="arch", PRETTY_NAME="Arch Linux")
    tree.driver("/usr/lib")
    tree.link("/usr/lib64", "lib")
    return "/usr/lib"


def docker(tree: Tree) -> str:
    tree.release(ID="debian", PRETTY_NAME="Debian GNU/Linux 13 (trixie)")
    tree.write("/.dockerenv")
    # The device interface mounts the files and runs ldconfig: the module of the host shows through /proc.
    tree.driver("/usr/lib/x86_64-linux-gnu")
    return "/usr/lib/x86_64-linux-gnu"


def kubernetes(tree: Tree) -> str:
    tree.release(ID="ubuntu", PRETTY_NAME="Ubuntu 24.04.3 LTS")
    tree.write("/proc/1/cgroup", "0::/kubepods/burstable/pod1/2\n")
    tree.driver("/usr/local/nvidia/lib64")
    return "/usr/local/nvidia/lib64"


SYSTEMS = {make.__name__: make for make in (nixos, debian, ubuntu, fedora, arch, docker, kubernetes)}
REMEDIES = {
    "nixos": "hardware.nvidia",
    "debian": "apt install",
    "ubuntu": "apt install nvidia-driver-580-open",
    "fedora": "akmod-nvidia",
    "arch": "pacman",
    "docker": "--device nvidia.com/gpu=all",
    "kubernetes": "nvidia.com/gpu: 1",
}


def as_32_bit(file: Path) -> None:
    with file.open("r+b") as open_file:
        open_file.seek(4)
        open_file.write(b"\1")
        open_file.seek(18)
        open_file.write(struct.pack("<H", 3))


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tree(tmp_path: Path, system: str) -> Tree:
    made = Tree(tmp_path / "root")
    made.folder = SYSTEMS[system](made)
    made.module()
    made.nodes()
    made.card_on_bus()
    return made


@pytest.fixture
def plain(tmp_path: Path) -> Tree:
    """Ubuntu: one system where the answer does not depend on which."""
    made = Tree(tmp_path / "root")
    made.folder = ubuntu(made)
    made.module()
    made.nodes()
    made.card_on_bus()
    return made


def test_a_working_system(tree: Tree) -> None:
    driver = seen(tree)

    assert driver.problems == () and driver.usable
    assert (driver.version, driver.module_version, driver.module_kind) == (KNOWN, KNOWN, "open")
    assert set(driver.libraries) == {CUDA, NVML, JIT, GPUCOMP}
    assert all(path.is_file() and not path.is_symlink() for path in driver.libraries.values())
    assert {path.parent for path in driver.libraries.values()} == {driver.libraries[CUDA].parent}
    assert finding(driver, f"{tree.folder}/{CUDA}") == "taken"
    driver.require()
    json.dumps(driver.report())


def test_the_likely_place_comes_first(tree: Tree) -> None:
    looked = [entry.path for entry in seen(tree).searched if entry.path.endswith(f"/{CUDA}")]
    # In a container the mounts come before the image's own folders, whether they are there or not.
    assert looked[0] == f"{tree.folder}/{CUDA}" or looked[0].startswith("/usr/local/nvidia/")
    assert looked[-1] == f"{tree.folder}/{CUDA}", "and nothing after it is looked at"


def test_the_links_are_the_drivers_files_and_nothing_else(tree: Tree, tmp_path: Path) -> None:
    driver = seen(tree)
    tree.write(f"{tree.folder}/libc.so.6", "the host's own")

    folder = link_directory(driver, tmp_path / "cache")

    assert {path.name for path in folder.iterdir()} == {CUDA, NVML, JIT, GPUCOMP, "libcuda.so"}
    assert all(path.is_symlink() and path.samefile(driver.libraries[path.name]) for path in folder.glob("lib*.so.*"))
    assert folder.parent == tmp_path / "cache" and KNOWN in folder.name
    assert list(folder.parent.iterdir()) == [folder]
    assert link_directory(driver, tmp_path / "cache") == folder


def test_no_driver(tree: Tree, system: str) -> None:
    tree.without("/proc/driver", "/sys/module", "/dev")
    for path in sorted(tree.root.rglob("libcuda*")):
        path.unlink()

    driver = seen(tree)

    assert not driver.usable and driver.version is None
    missing = problem(driver, "no-driver")
    assert "libcuda.so.1) was not found" in missing.cause and REMEDIES[system] in missing.fix
    with pytest.raises(UnsuitableError) as raised:
        driver.require()
    assert f"{tree.folder}/{CUDA}: not there" in str(raised.value), "it says what was searched"
    assert str(raised.value).count(missing.fix) == 1, "the same remedy is said once"


def test_an_old_driver(tree: Tree, system: str) -> None:
    # The same tree with another number in every name, link and small text.
    fresh = Tree(tree.root.parent / "old")
    for path in tree.root.rglob("*"):
        place = fresh.root / str(path.relative_to(tree.root)).replace(KNOWN, OLDER)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            place.symlink_to(os.readlink(path).replace(KNOWN, OLDER))
        elif path.is_file():
            data = path.read_bytes()
            place.write_bytes(data.replace(KNOWN.encode(), OLDER.encode()) if len(data) < 1000 else data)

    driver = seen(fresh)

    assert (driver.version, driver.module_version) == (OLDER, OLDER)
    assert codes(driver) == ["driver-too-old"]
    old = driver.problems[0]
    assert old.cause == f"driver {OLDER} is too old: CUDA 13.0 needs 580.65.06 or later"
    words = {"nixos": "hardware.nvidia", "arch": "-Syu", "docker": "container's host", "kubernetes": "container's host"}
    assert words.get(system, REMEDIES[system]) in old.fix


@pytest.mark.parametrize("module", [OLDER, NEWER])
def test_an_update_without_a_reboot(tree: Tree, system: str, module: str) -> None:
    tree.module(module, is_open=False)

    driver = seen(tree)

    assert codes(driver) == ["reboot-needed"] and driver.module_kind == "proprietary"
    assert driver.problems[0].cause == f"reboot needed: module {module} is loaded, libraries are {KNOWN}"
    assert ("restart the container" if system in ("docker", "kubernetes") else "reboot") in driver.problems[0].fix


def test_no_module(tree: Tree, system: str) -> None:
    tree.without("/proc/driver", "/sys/module", "/dev")

    driver = seen(tree)

    assert codes(driver) == ["no-module", "no-device"]
    assert REMEDIES[system] in driver.problems[0].fix
    assert "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 are not there" in driver.problems[1].cause


def test_only_a_32_bit_library(tree: Tree, system: str) -> None:
    as_32_bit(next(path for path in tree.root.rglob(f"libcuda.so.{KNOWN}")))

    driver = seen(tree)

    assert "no-driver" in codes(driver)
    assert finding(driver, f"{tree.folder}/{CUDA}") == "a 32-bit library (i386)"
    assert f"{tree.folder}/{CUDA} is a 32-bit library (i386)" in problem(driver, "no-driver").cause


def test_a_dangling_link(tree: Tree) -> None:
    next(path for path in tree.root.rglob(f"libcuda.so.{KNOWN}")).unlink()

    driver = seen(tree)

    assert "no-driver" in codes(driver)
    assert finding(driver, f"{tree.folder}/{CUDA}") == "a dangling link"


def test_only_a_stub_that_a_link_leads_to(tree: Tree) -> None:
    """What an image's author does to link a program without a driver."""
    stub = "/usr/local/cuda-13.0/targets/x86_64-linux/lib/stubs/libcuda.so"
    tree.library(stub, CUDA)
    place = next(path for path in tree.root.rglob(f"libcuda.so.{KNOWN}"))
    place.unlink()
    place.symlink_to(stub)

    driver = seen(tree)

    assert "no-driver" in codes(driver)
    assert finding(driver, f"{tree.folder}/{CUDA}") == "a stub of the CUDA toolkit, to link with only"


def test_a_stub_that_was_copied_is_known_by_its_size(plain: Tree) -> None:
    plain.without(f"{plain.folder}/{CUDA}")
    plain.library(f"{plain.folder}/{CUDA}", CUDA, size=64_000)

    assert finding(seen(plain), f"{plain.folder}/{CUDA}").startswith("a stub: ")


def test_a_file_that_is_no_library(plain: Tree) -> None:
    plain.write(f"{plain.folder}/libcuda.so.{KNOWN}", "INPUT(libcuda.so.1)\n")
    assert finding(seen(plain), f"{plain.folder}/{CUDA}") == "not an ELF file"


def test_libraries_of_two_drivers_do_not_mix(plain: Tree) -> None:
    plain.without(f"{plain.folder}/{NVML}")
    plain.library(f"/usr/lib64/libnvidia-ml.so.{NEWER}", NVML)
    plain.link(f"/usr/lib64/{NVML}", f"libnvidia-ml.so.{NEWER}")

    driver = seen(plain)

    assert codes(driver) == ["no-driver"] and NVML not in driver.libraries and driver.nvml is None
    assert finding(driver, f"/usr/lib64/{NVML}") == f"of driver {NEWER}, but {CUDA} is of {KNOWN}"


def test_parts_of_one_driver_in_two_folders(plain: Tree) -> None:
    plain.without(f"{plain.folder}/{NVML}", f"{plain.folder}/libnvidia-ml.so.{KNOWN}")
    plain.library(f"/usr/lib64/libnvidia-ml.so.{KNOWN}", NVML)
    plain.link(f"/usr/lib64/{NVML}", f"libnvidia-ml.so.{KNOWN}")

    assert seen(plain).nvml == plain.root / f"usr/lib64/libnvidia-ml.so.{KNOWN}"


def test_versions_are_numbers(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "root")
    tree.driver("/usr/lib64", "1005.9.01")
    tree.module("1005.9.01")
    tree.nodes()

    assert seen(tree).usable


def test_what_is_fatal_comes_first(plain: Tree) -> None:
    plain.without(f"{plain.folder}/{JIT}")
    plain.module(OLDER)
    assert codes(seen(plain)) == ["reboot-needed", "no-jit"]


def test_a_driver_without_its_compiler_works_with_a_word(plain: Tree) -> None:
    plain.without(f"{plain.folder}/{JIT}")

    driver = seen(plain)

    assert driver.usable and codes(driver) == ["no-jit"] and not driver.problems[0].fatal
    assert "error 221" in driver.problems[0].cause


def test_what_the_libraries_are_linked_with_comes_along(plain: Tree) -> None:
    plain.library(f"{plain.folder}/libcuda.so.{KNOWN}", CUDA, needs=("libnvidia-new.so.1", "libm.so.6", "libdl.so.2"))
    plain.library(f"{plain.folder}/libnvidia-new.so.1", "libnvidia-new.so.1", needs=("libnvidia-newer.so.1",))
    plain.library(f"{plain.folder}/libnvidia-newer.so.1", "libnvidia-newer.so.1")

    assert {"libnvidia-new.so.1", "libnvidia-newer.so.1"} < set(seen(plain).libraries)

    plain.without(f"{plain.folder}/libnvidia-newer.so.1")
    driver = seen(plain)
    assert codes(driver) == ["library-needs"]
    assert "libnvidia-new.so.1 needs libnvidia-newer.so.1, which is not beside it" in driver.problems[0].cause


def test_a_driver_for_a_newer_c_library(plain: Tree) -> None:
    plain.library(f"{plain.folder}/libcuda.so.{KNOWN}", CUDA, glibc="GLIBC_2.38")

    driver = seen(plain)

    assert codes(driver) == ["glibc"]
    assert f"libcuda.so.{KNOWN} needs glibc 2.38, and the engine's is 2.36" in driver.problems[0].cause
    plain.library(f"{plain.folder}/libcuda.so.{KNOWN}", CUDA, glibc="GLIBC_2.4")
    assert seen(plain).usable


def test_the_c_library_of_this_process_is_the_engines(plain: Tree) -> None:
    plain.library(f"{plain.folder}/libcuda.so.{KNOWN}", CUDA, glibc="GLIBC_2.199")
    driver = find(detect(plain.root, {}), root=plain.root, environ={})
    running = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    assert f"needs glibc 2.199, and the engine's is {running}" in problem(driver, "glibc").cause


def test_a_file_mounted_under_its_short_name(plain: Tree) -> None:
    """Some mount the file itself as libcuda.so.1: its version is that of the other name of the same file."""
    plain.without(f"{plain.folder}/{CUDA}")
    os.link(plain.root / plain.folder[1:] / f"libcuda.so.{KNOWN}", plain.root / plain.folder[1:] / CUDA)
    assert seen(plain).version == KNOWN

    plain.without(f"{plain.folder}/libcuda.so.{KNOWN}")
    assert seen(plain).version is None
    plain.library(f"{plain.folder}/libcuda.so.{NEWER}", CUDA)
    assert seen(plain).version is None, "that is another file"
    assert seen(plain, nvml_version=KNOWN).version == KNOWN
    assert codes(seen(plain, nvml_version=OLDER)) == ["driver-too-old", "reboot-needed"]


def test_the_user_may_name_the_folder(plain: Tree) -> None:
    plain.driver("/opt/nvidia/lib", NEWER)
    plain.module(NEWER)

    driver = seen(plain, HYPERQWEN_DRIVER_DIR="/opt/nvidia/lib")

    assert driver.usable and driver.version == NEWER


def test_a_folder_that_the_user_named_is_not_replaced(plain: Tree) -> None:
    driver = seen(plain, HYPERQWEN_DRIVER_DIR="/opt/nvidia/lib")

    assert codes(driver) == ["override"] and driver.libraries == {}
    assert "HYPERQWEN_DRIVER_DIR is '/opt/nvidia/lib'" in driver.problems[0].cause
    assert [entry.path for entry in driver.searched] == [f"/opt/nvidia/lib/{CUDA}"]


@pytest.fixture
def compat(plain: Tree) -> Tree:
    """An image of NVIDIA's with forward-compatibility libraries, on a host with an older driver."""
    for path in [*plain.root.rglob("lib*.so*")]:
        path.unlink()
    plain.driver("/usr/lib/x86_64-linux-gnu", OLDER)
    plain.without(f"/usr/lib/x86_64-linux-gnu/{CUDA}")
    plain.library(f"/usr/local/cuda-13.0/compat/libcuda.so.{KNOWN}", CUDA)
    plain.link(f"/usr/local/cuda-13.0/compat/{CUDA}", f"libcuda.so.{KNOWN}")
    plain.module(OLDER)
    plain.write("/etc/ld.so.cache", cache([("/usr/local/cuda-13.0/compat/libcuda.so.1", X86_64)]))
    return plain


def test_forward_compatibility_is_not_taken_unasked(compat: Tree) -> None:
    driver = seen(compat)

    assert codes(driver) == ["no-driver"]
    assert "works on data-centre cards only" in finding(driver, f"/usr/local/cuda-13.0/compat/{CUDA}")


def test_forward_compatibility_is_taken_where_the_user_names_it(compat: Tree) -> None:
    for soname in (NVML, JIT):
        compat.link(f"/usr/local/cuda-13.0/compat/{soname}", f"/usr/lib/x86_64-linux-gnu/{soname}")

    driver = seen(compat, HYPERQWEN_DRIVER_DIR="/usr/local/cuda-13.0/compat")

    assert driver.usable and codes(driver) == ["forward-compatibility"]
    assert (driver.version, driver.module_version) == (KNOWN, OLDER)
    assert "CUDA error 804" in driver.problems[0].cause


def test_no_card_is_said_alone(plain: Tree) -> None:
    plain.without("/sys/bus/pci/devices/0000:01:00.0", "/proc/driver", "/sys/module", "/dev")
    for path in [*plain.root.rglob("lib*.so*")]:
        path.unlink()

    driver = seen(plain)

    assert codes(driver) == ["no-card"] and "./hq run .#demo" in driver.problems[0].fix


def test_nouveau_has_the_card(plain: Tree) -> None:
    plain.without("/proc/driver", "/sys/module", "/dev")
    plain.write("/sys/module/nouveau/initstate", "live\n")

    assert codes(seen(plain)) == ["nouveau", "no-device"]


@pytest.mark.parametrize(
    ("node", "others"), [("nvidiactl", ["nvidia-uvm", "nvidia0"]), ("nvidia-uvm", ["nvidiactl", "nvidia3"])]
)
def test_a_device_file_is_missing(plain: Tree, node: str, others: list[str]) -> None:
    plain.without("/dev")
    plain.nodes(*others)

    driver = seen(plain)

    assert codes(driver) == ["no-device"]
    assert driver.problems[0].cause == f"/dev/{node} is not there"
    assert driver.problems[0].fix == "sudo nvidia-modprobe -u -c=0"


def test_a_folder_in_place_of_a_device_file(plain: Tree) -> None:
    """What docker makes of a bind mount whose source is not there."""
    plain.without("/dev/nvidia-uvm")
    (plain.root / "dev/nvidia-uvm").mkdir()
    assert codes(seen(plain)) == ["no-device"]


def test_a_device_file_of_others(plain: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run as root here and there, to whom every file is open.
    allowed = os.access

    def denied(path: os.PathLike[str], mode: int) -> bool:
        return "nvidia0" not in str(path) and allowed(path, mode)

    monkeypatch.setattr(os, "access", denied)
    (plain.root / "dev/nvidia0").chmod(0o660)

    driver = seen(plain)

    assert codes(driver) == ["no-permission"]
    assert driver.problems[0].cause == "/dev/nvidia0 is not for this user"
    assert "usermod -aG" in driver.problems[0].fix or "ls -l /dev/nvidia0" in driver.problems[0].fix


def test_a_service_gets_at_a_groups_device_file_by_its_unit(plain: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic user is no user that anyone could add to a group."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "nvidia0" not in str(path) and allowed(path, mode))
    gid = os.getgid() or 44
    node = plain.root / "dev/nvidia0"
    os.chown(node, -1, gid)
    node.chmod(0o660)
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = str(gid)

    (problem,) = seen(plain, INVOCATION_ID="a").problems
    assert problem.code == "no-permission"
    assert f"SupplementaryGroups={group};" in problem.fix and "usermod" not in problem.fix
    # A terminal of a desktop, which systemd started as well.
    (problem,) = seen(plain, INVOCATION_ID="a", TERM="xterm").problems
    assert problem.fix == f"sudo usermod -aG {group} $USER, then log in again"
    # In the user namespace of PrivateUsers= the group is nobody's.
    monkeypatch.setattr(runtime_driver, "_NO_GROUP", gid)
    (problem,) = seen(plain, INVOCATION_ID="a").problems
    assert "ls -l /dev/nvidia0 shows outside" in problem.fix and f"SupplementaryGroups={group}" not in problem.fix


def test_a_sandbox_that_hides_the_module(tree: Tree, system: str) -> None:
    """A container with a kernel of its own shows the device files and no /proc/driver."""
    tree.without("/proc/driver", "/sys/module", "/sys/bus")

    driver = seen(tree)

    hidden = system in ("docker", "kubernetes")
    assert codes(driver) == ([] if hidden else ["no-module"])


# WSL2: the driver is Windows', its libraries are mounted, and the version is Windows' to say.


@pytest.fixture
def wsl(tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "root")
    made.release(ID="ubuntu", PRETTY_NAME="Ubuntu 24.04.3 LTS")
    made.write("/proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
    made.folder = "/usr/lib/wsl/lib"
    made.library(f"{made.folder}/libcuda.so.1.1", CUDA, size=0)
    made.link(f"{made.folder}/{CUDA}", "libcuda.so.1.1")
    for soname in (NVML, "libdxcore.so"):
        made.library(f"{made.folder}/{soname}", soname, size=0)
    made.library(f"/usr/lib/wsl/drivers/nv_dispi.inf_amd64_0123/{JIT}", JIT, size=0)
    made.nodes("dxg")
    return made


def test_wsl2(wsl: Tree) -> None:
    driver = seen(wsl, nvml_version="581.57")

    assert driver.usable and driver.problems == ()
    assert (driver.version, driver.module_version) == ("581.57", None)
    assert set(driver.libraries) == {CUDA, NVML, JIT, "libdxcore.so"}


def test_wsl2_before_nvml_was_asked(wsl: Tree) -> None:
    driver = seen(wsl)
    assert driver.usable and driver.version is None, "the file's name says 1.1, which is no driver's version"


def test_wsl2_with_an_old_windows_driver(wsl: Tree) -> None:
    driver = seen(wsl, nvml_version="566.36")
    assert codes(driver) == ["driver-too-old"] and "Windows" in driver.problems[0].fix
    assert seen(wsl, nvml_version="580.12").usable, "Windows counts its own releases: only the branch says anything"


def test_wsl2_with_a_linux_driver_inside(wsl: Tree) -> None:
    """The mistake of every guide: its libraries hide Windows' own from the loader, but not from us."""
    wsl.driver("/usr/lib/x86_64-linux-gnu", KNOWN)
    driver = seen(wsl, nvml_version="581.57")
    assert driver.usable
    assert driver.libraries[CUDA] == wsl.root / "usr/lib/wsl/lib/libcuda.so.1.1"


def test_wsl2_without_its_gpu(wsl: Tree) -> None:
    wsl.without("/dev/dxg", f"{wsl.folder}/libdxcore.so")
    driver = seen(wsl, nvml_version="581.57")
    assert sorted(codes(driver)) == ["no-device", "no-driver"]
    assert "wsl --update" in problem(driver, "no-device").fix


def test_wsl2_links(wsl: Tree, tmp_path: Path) -> None:
    folder = link_directory(seen(wsl, nvml_version="581.57"), tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == {CUDA, "libcuda.so", NVML, JIT, "libdxcore.so"}


# The loader's cache as a file.

X86_64, X32, I386 = 0x0303, 0x0803, 0x0003


def cache(entries: list[tuple[str, int]], *, old: bool = False) -> bytes:
    """A cache as ldconfig writes it: `entries` are paths with their flags."""
    head, strings, rows = 48 + 24 * len(entries), b"", b""
    for path, flags in entries:
        key, value = head + len(strings), head + len(strings) + len(path.rpartition("/")[2]) + 1
        strings += f"{path.rpartition('/')[2]}\0{path}\0".encode()
        rows += struct.pack("<iIIIQ", flags, key, value, 0, 0)
    new = b"glibc-ld.so.cache1.1" + struct.pack("<II", len(entries), len(strings)) + bytes(20) + rows + strings
    return (b"ld.so-1.7.0\0" + struct.pack("<I", 1) + bytes(16) + new) if old else new


ENTRIES = [
    ("/usr/lib/i386-linux-gnu/libcuda.so.1", I386),
    ("/usr/libx32/libcuda.so.1", X32),
    ("/opt/driver/libcuda.so.1", X86_64),
    ("/opt/driver/libcuda.so", X86_64),
    ("/usr/lib/other/libcuda.so.1", X86_64),
]


@pytest.mark.parametrize("old", [False, True])
def test_the_loaders_cache(old: bool) -> None:
    assert cached_paths(cache(ENTRIES, old=old), CUDA) == ["/opt/driver/libcuda.so.1", "/usr/lib/other/libcuda.so.1"]


def test_a_driver_that_only_the_loaders_cache_knows(plain: Tree) -> None:
    for path in [*plain.root.rglob("lib*.so*")]:
        path.unlink()
    plain.driver("/opt/driver")
    plain.write("/etc/ld.so.cache", cache(ENTRIES))

    driver = seen(plain)

    assert driver.usable
    assert finding(driver, "/etc/ld.so.cache") == "names /opt/driver/libcuda.so.1, /usr/lib/other/libcuda.so.1"


@pytest.mark.parametrize("data", [b"", b"nonsense", cache(ENTRIES)[:100], cache(ENTRIES)[:170]])
def test_a_torn_cache_is_no_reason_to_fail(data: bytes, plain: Tree) -> None:
    for path in [*plain.root.rglob("lib*.so*")]:
        path.unlink()
    plain.write("/etc/ld.so.cache", data)

    driver = seen(plain)

    assert finding(driver, "/etc/ld.so.cache").startswith("not readable: ")
    assert "no-driver" in codes(driver)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_cache_of_any_bytes_has_paths_or_a_reason(noise: bytes, place: int) -> None:
    data = bytearray(cache(ENTRIES))
    data[place : place + len(noise)] = noise
    try:
        paths = cached_paths(bytes(data), CUDA)
    except ValueError as reason:
        assert str(reason)
    else:
        assert all(isinstance(path, str) for path in paths)


# The folder of links.


def test_an_update_leaves_the_folder_of_a_running_engine_alone(plain: Tree, tmp_path: Path) -> None:
    before = link_directory(seen(plain), tmp_path / "cache")
    plain.driver(plain.folder + "/newer", NEWER)
    plain.without(f"{plain.folder}/{CUDA}", f"{plain.folder}/{NVML}", f"{plain.folder}/{JIT}")
    for soname in (CUDA, NVML, JIT):
        plain.link(f"{plain.folder}/{soname}", f"newer/{soname}")
    plain.module(NEWER)

    after = link_directory(seen(plain), tmp_path / "cache")

    assert before != after and NEWER in after.name
    assert os.readlink(before / CUDA).endswith(KNOWN) and os.readlink(after / CUDA).endswith(NEWER)


def test_a_folder_of_links_is_put_right(plain: Tree, tmp_path: Path) -> None:
    folder = link_directory(seen(plain), tmp_path / "cache")
    (folder / CUDA).unlink()
    (folder / CUDA).symlink_to("/nowhere")
    (folder / JIT).unlink()
    (folder / "libc.so.6").symlink_to("/lib/x86_64-linux-gnu/libc.so.6")

    again = link_directory(seen(plain), tmp_path / "cache")

    assert again == folder
    assert {path.name for path in folder.iterdir()} == {CUDA, NVML, JIT, GPUCOMP, "libcuda.so"}
    assert (folder / CUDA).samefile(seen(plain).libraries[CUDA])


def test_many_starts_at_once(plain: Tree, tmp_path: Path) -> None:
    driver = seen(plain)
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(link_directory(driver, tmp_path / "cache"))) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 12 and len(set(made)) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [made[0].name]


def test_another_start_that_comes_first(plain: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for the folder and its making, another process makes it."""
    driver = seen(plain)
    make = tempfile.mkdtemp

    def slowly(**how: Any) -> Any:
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        link_directory(driver, tmp_path / "cache")
        return make(**how)

    monkeypatch.setattr(tempfile, "mkdtemp", slowly)
    folder = link_directory(driver, tmp_path / "cache")

    assert tempfile.mkdtemp is make, "it was the second"
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_an_unusable_driver_gets_no_links(plain: Tree, tmp_path: Path) -> None:
    plain.module(OLDER)
    with pytest.raises(UnsuitableError, match="reboot needed"):
        link_directory(seen(plain), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_place_that_cannot_be_written(plain: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsuitableError, match=r"links to the driver cannot be made in .*: Not a directory"):
        link_directory(seen(plain), tmp_path / "file/cache")


def test_a_bare_machine_as_a_program_sees_it() -> None:
    """The real survey of this machine, whatever it is: an exit status and a document that agree."""
    command = [sys.executable, "-m", "hyperqwen.runtime.driver", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)

    assert done.returncode == (0 if said["usable"] else UnsuitableError.exit_code)
    assert said["usable"] == (said["driver"]["usable"] and bool(said["gpus"]))
    assert said["driver"]["searched"]
    lines = subprocess.run(command[:-1], capture_output=True, text=True, check=False).stdout
    assert f"driver.usable = {said['driver']['usable']}" in lines
