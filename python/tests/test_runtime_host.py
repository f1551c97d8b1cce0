from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.runtime.host import Host, Kind, Root, detect
from tests.recorded_host import Tree

GIB = 1 << 30
WSL_KERNEL = "6.6.87.2-microsoft-standard-WSL2\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    made.write("/proc/sys/kernel/osrelease", "6.12.43+deb13-amd64\n")
    return made


def seen(tree: Tree, **environ: str) -> Host:
    return detect(tree.root, environ)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"ID": "debian", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"}, Kind.DEBIAN),
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, Kind.UBUNTU),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, Kind.UBUNTU),
        ({"ID": "fedora"}, Kind.FEDORA),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, Kind.FEDORA),
        ({"ID": "arch"}, Kind.ARCH),
        ({"ID": "nixos"}, Kind.NIXOS),
        ({"ID": "opensuse-tumbleweed", "ID_LIKE": "opensuse suse"}, Kind.OTHER),
        ({}, Kind.OTHER),
    ],
)
def test_distributions(tree: Tree, fields: dict[str, str], kind: Kind) -> None:
    tree.release(**fields)

    host = seen(tree)

    assert (host.kind, host.distribution, host.container, host.wsl) == (kind, kind, None, 0)
    assert host.kernel == "6.12.43+deb13-amd64"
    assert host.title == fields.get("PRETTY_NAME", fields.get("ID", "an unnamed system"))


def test_nixos_links_its_release_from_the_store(tree: Tree) -> None:
    tree.write("/nix/store/abc-etc/os-release", 'NAME=NixOS\nID=nixos\nPRETTY_NAME="NixOS 25.11 (Xantusia)"\n')
    tree.link("/etc/static", "/nix/store/abc-etc")
    tree.link("/etc/os-release", "/etc/static/os-release")

    assert (seen(tree).kind, seen(tree).title) == (Kind.NIXOS, "NixOS 25.11 (Xantusia)")


def test_a_release_file_that_a_shell_would_refuse(tree: Tree) -> None:
    tree.write("/usr/lib/os-release", "# a comment\n\nID=arch\nPRETTY_NAME=\"Arch\nBROKEN='\n")

    assert (seen(tree).kind, seen(tree).title) == (Kind.ARCH, "Arch")


@pytest.mark.parametrize(
    ("files", "environ", "name"),
    [
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/run/.containerenv": 'engine="podman-5.4.2"\n'}, {}, "podman"),
        ({"/proc/1/cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-2.scope\n"}, {}, "kubernetes"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"/proc/1/cgroup": "12:memory:/docker/0123\n"}, {}, "docker"),
        ({"/proc/1/cgroup": "0::/lxc.payload.web\n"}, {}, "lxc"),
        ({"/run/systemd/container": "systemd-nspawn\n"}, {}, "nspawn"),
        ({}, {"container": "podman"}, "podman"),
        ({"/run/systemd/container": "wsl\n", "/proc/1/cgroup": "0::/init.scope\n"}, {}, None),
        ({"/proc/1/cgroup": "0::/\n"}, {}, None),
    ],
)
def test_containers(tree: Tree, files: dict[str, str], environ: dict[str, str], name: str | None) -> None:
    tree.release(ID="ubuntu")
    for place, text in files.items():
        tree.write(place, text)

    host = seen(tree, **environ)

    assert host.container == name
    assert (host.kind, host.distribution) == (Kind.CONTAINER if name else Kind.UBUNTU, Kind.UBUNTU)


@pytest.mark.parametrize(
    ("kernel", "environ", "version"),
    [
        (WSL_KERNEL, {}, 2),
        ("4.19.84-microsoft-standard\n", {}, 2),
        ("4.4.0-19041-Microsoft\n", {"WSL_DISTRO_NAME": "Debian"}, 1),
        ("6.9.0-my-own\n", {"WSL_DISTRO_NAME": "Debian"}, 2),
        ("4.4.0\n", {}, 0),
    ],
)
def test_wsl(tree: Tree, kernel: str, environ: dict[str, str], version: int) -> None:
    tree.release(ID="debian")
    tree.write("/proc/sys/kernel/osrelease", kernel)

    host = seen(tree, **environ)

    assert (host.wsl, host.wsl2) == (version, version == 2)
    assert host.kind == (Kind.WSL2 if version == 2 else Kind.DEBIAN)


def test_a_container_on_wsl2_is_both(tree: Tree) -> None:
    tree.write("/proc/sys/kernel/osrelease", WSL_KERNEL)
    tree.write("/.dockerenv")

    assert (seen(tree).kind, seen(tree).wsl2) == (Kind.CONTAINER, True)


MEMINFO = (
    "MemTotal:       32768000 kB\nMemFree:  1 kB\nMemAvailable:   16384000 kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\n"
)


def test_memory_of_a_machine(tree: Tree) -> None:
    tree.write("/proc/meminfo", MEMINFO)

    host = seen(tree)

    assert (host.memory, host.memory_free) == (32768000 * 1024, 16384000 * 1024)
    assert (host.swap, host.swap_free) == (2048 * 1024, 1024 * 1024)
    assert (host.shm, host.shm_free) == (None, None)


@pytest.mark.parametrize(
    ("group", "place"),
    [
        ("0::/\n", "/sys/fs/cgroup"),
        ("0::/system.slice/hyperqwen.service\n", "/sys/fs/cgroup/system.slice/hyperqwen.service"),
        # The limit of a group holds for the groups in it.
        ("0::/system.slice/hyperqwen.service\n", "/sys/fs/cgroup/system.slice"),
    ],
)
def test_a_limit_of_the_control_group_counts(tree: Tree, group: str, place: str) -> None:
    tree.write("/proc/meminfo", MEMINFO)
    tree.write("/proc/self/cgroup", group)
    tree.write(f"{place}/memory.max", f"{8 * GIB}\n")
    tree.write(f"{place}/memory.current", f"{6 * GIB}\n")
    tree.write(f"{place}/memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file {2 * GIB}\n")

    host = seen(tree)

    assert host.memory == 8 * GIB
    assert host.memory_free == 5 * GIB, "the file cache of a group is given back when needed"


def test_limits_of_the_first_version_of_control_groups(tree: Tree) -> None:
    tree.write("/proc/meminfo", MEMINFO)
    tree.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert seen(tree).memory == 32768000 * 1024, "that number is its way to say: no limit"

    tree.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")
    tree.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    assert (seen(tree).memory, seen(tree).memory_free) == (GIB, 0)


def test_an_unlimited_group(tree: Tree) -> None:
    tree.write("/proc/meminfo", MEMINFO)
    tree.write("/sys/fs/cgroup/memory.max", "max\n")
    assert seen(tree).memory == 32768000 * 1024


def test_shared_memory_is_asked_of_the_file_system(tree: Tree) -> None:
    (tree.root / "dev/shm").mkdir(parents=True)
    host = seen(tree)
    assert host.shm is not None and host.shm_free is not None
    assert 0 <= host.shm_free <= host.shm


def test_this_machine_says_something() -> None:
    host = detect()
    assert host.kernel and host.memory and host.memory_free
    assert host.report()["kind"] in [str(kind) for kind in Kind]


def test_links_stay_inside_the_tree(tree: Tree) -> None:
    tree.write("/real/file", "inside")
    tree.link("/a", "/real")
    tree.link("/real/up", "../../../../real/file")
    tree.link("/ring", "/ring2")
    tree.link("/ring2", "/ring")
    root = Root(tree.root)

    assert root.text("/a/file") == "inside"
    assert root.text("/real/up") == "inside", "there is nothing above a root"
    assert root.real("/ring") is None
    assert root.real("/real/file/below") is None
    assert root.inside(tree.root / "real/file") == "/real/file"
    assert root.names("/real") == ["file", "up"] and root.names("/none") == []


part = st.sampled_from(["a", "b", "..", ".", "l"])


@given(name=st.lists(part, max_size=6), target=st.lists(part, min_size=1, max_size=4), absolute=st.booleans())
def test_no_link_leads_out(
    name: list[str], target: list[str], absolute: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "a/b").mkdir(parents=True)
    (root / "a/l").symlink_to(("/" if absolute else "") + "/".join(target))

    real = Root(root).real("/".join(name))

    assert real is None or real == root or root in real.parents
