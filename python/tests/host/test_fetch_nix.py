"""Seeding a real Nix store: `python3 -m pytest python/tests/host` as root on a box with Nix.

Every store here lies below the test's own temporary folder; /nix/store is neither read nor written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.pins import fetch
from hyperqwen.pins.model import Extract, Pin, PinSet, render
from hyperqwen.store import NixStore, base32, fixed_path, nar_sha256

PYTHON_DIR = Path(fetch.__file__).parents[2]


class _Files(SimpleHTTPRequestHandler):
    """Serves a folder; the wheel `slow` a little at a time."""

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        pause = 0.05 if "slow" in self.path else 0.0
        try:
            for block in iter(lambda: source.read(100_000), b""):
                outputfile.write(block)
                time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


@dataclass
class Box:
    """A checkout's pins, a server that has their bytes, and stores to put them in."""

    root: Path
    url: str
    pins: PinSet

    def command(self, *arguments: str) -> list[str]:
        index, mirror = f"{self.url}/simple", f"{self.url}/debian"
        base = [sys.executable, "-m", "hyperqwen.pins.fetch", "--pins", str(self.root / "pins")]
        return [*base, "--index", index, "--mirror", mirror, *arguments]

    def environment(self, **extra: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NIX_", "PIP_", "XDG_"))}
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            kept.pop(name, None)
        return {**kept, "PYTHONPATH": str(PYTHON_DIR), "XDG_CACHE_HOME": str(self.root / "cache"), **extra}

    def fetch(self, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(**extra),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


def _wheel(root: Path, name: str, size: int) -> Pin:
    data = hashlib.sha256(name.encode()).digest() * (size // 32)
    file = f"{name}-1.0-py3-none-any.whl"
    digest = hashlib.sha256(data).hexdigest()
    page = root / "www" / "simple" / name
    page.mkdir(parents=True)
    (root / "www" / file).write_bytes(data)
    (page / "index.html").write_text(f'<a href="../../{file}#sha256={digest}">{file}</a>')
    return Pin("wheel", name, "1.0", file, len(data), digest, ("tools",))


def _seed(root: Path) -> Pin:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        info = tarfile.TarInfo("./bin/busybox")
        info.size = 9
        tar.addfile(info, io.BytesIO(b"a program"))
    data = archive.getvalue()
    deb = b"!<arch>\n" + f"{'data.tar.xz':<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data
    pool = root / "www/debian/pool/main/b/busybox"
    pool.mkdir(parents=True)
    (pool / "busybox-static_1.0~x_amd64.deb").write_bytes(deb)
    tree = root / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/busybox").write_bytes(b"a program")
    (tree / "bin/busybox").chmod(0o755)
    return Pin(
        "deb",
        "busybox-static",
        "1:1.0~x",
        "busybox-static_1-1.0-x_amd64.deb",
        len(deb),
        hashlib.sha256(deb).hexdigest(),
        ("seed",),
        "pool/main/b/busybox/busybox-static_1.0~x_amd64.deb",
        Extract("./bin/busybox", "bin/busybox", "busybox-1.0", nar_sha256(tree)),
    )


@pytest.fixture
def box() -> Iterator[Box]:
    # pytest's own folders are closed to other users, and one test becomes another user.
    with tempfile.TemporaryDirectory(prefix="hyperqwen-host-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        with _serving(Path(name)) as found:
            yield found


@contextmanager
def _serving(tmp_path: Path) -> Iterator[Box]:
    pins = PinSet((_wheel(tmp_path, "alpha", 64_000), _wheel(tmp_path, "slow", 6_400_000)), (_seed(tmp_path),))
    (tmp_path / "pins").mkdir()
    for kind in ("wheel", "deb"):
        (tmp_path / "pins" / f"{kind}s.json").write_text(render(pins, kind))
    www = str(tmp_path / "www")
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Files(*args, directory=www))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield Box(tmp_path, f"http://127.0.0.1:{server.server_address[1]}", pins)
    server.shutdown()
    server.server_close()


def nix(*arguments: str, **extra: str) -> str:
    env = {**os.environ, "NIX_CONFIG": "build-users-group =", **extra}
    return subprocess.run(arguments, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_hashes_and_paths_are_nixs_own(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_bytes(os.urandom(100_003))
    (tree / "B").write_text("")
    (tree / "a-link").symlink_to("sub/file")
    (tree / "run").write_text("#!x")
    (tree / "run").chmod(0o755)
    assert nar_sha256(tree) == nix("nix-hash", "--type", "sha256", str(tree))
    for path, recursive in ((tree, True), (tree / "sub" / "file", False), (tree / "run", True)):
        flags = ["--recursive"] if recursive else []
        digest = nar_sha256(path) if recursive else hashlib.sha256(path.read_bytes()).hexdigest()
        added = nix("nix-store", "--store", store, "--add-fixed", *flags, "sha256", str(path))
        assert fixed_path(path.name, digest, recursive=recursive) == added
        assert NixStore(store).add_fixed([path], recursive=recursive) == [added]
        assert NixStore(store).invalid([added, fixed_path("absent", "0" * 64)]) == {fixed_path("absent", "0" * 64)}
        assert base32(bytes.fromhex(digest)) == nix("nix-hash", "--type", "sha256", "--to-base32", digest)


def test_a_bare_store_is_seeded_and_what_is_there_is_left(box: Box) -> None:
    store = str(box.root / "store")
    assert box.fetch("--check", "--store", store).returncode == 4
    first = box.fetch("--store", store)
    assert first.returncode == 0, first.stderr
    real = Path(store + box.pins.debs[0].store_path()) / "bin/busybox"
    assert real.read_bytes() == b"a program" and os.access(real, os.X_OK)
    for pin in box.pins.all:
        nix("nix-store", "--store", store, "--verify-path", pin.store_path())
    assert "nixbld" not in first.stderr
    asked = json.loads(box.fetch("--json", "--store", store).stdout)
    assert (asked["already"], asked["added"]) == (3, [])
    assert [path.name for path in (box.root / "cache/hyperqwen/fetch").iterdir()] == [".lock"]


def test_an_export_of_a_store_seeds_another(box: Box) -> None:
    first, second, folder = (str(box.root / name) for name in ("first", "second", "usb"))
    assert box.fetch("--store", first, "--pin", "alpha").returncode == 0
    (box.root / "www" / box.pins.wheels[0].file).unlink()
    out = box.fetch("--store", first, "--export", folder)
    assert out.returncode == 0, out.stderr
    checked = subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    (box.root / "www").rename(box.root / "gone")
    back = box.fetch("--store", second, "--import", folder)
    assert back.returncode == 0, back.stderr
    assert box.fetch("--store", second, "--check").returncode == 0


def test_wrong_bytes_never_reach_the_store(box: Box) -> None:
    store = str(box.root / "store")
    wheel = box.root / "www" / box.pins.wheels[0].file
    wheel.write_bytes(b"\0" + wheel.read_bytes()[1:])
    out = box.fetch("--store", store, "--pin", "alpha")
    assert out.returncode == 5
    assert box.pins.wheels[0].sha256 in out.stderr and hashlib.sha256(wheel.read_bytes()).hexdigest() in out.stderr
    assert list(Path(store).glob("nix/store/*alpha*")) == []


def test_an_ordinary_user_seeds_through_the_daemon(box: Box) -> None:
    """nobody may not write the store, and needs no trust to add a fixed-output file."""
    state = {
        "NIX_STORE_DIR": str(box.root / "nix/store"),
        "NIX_STATE_DIR": str(box.root / "nix/var"),
        "NIX_LOG_DIR": str(box.root / "nix/log"),
        "NIX_CONF_DIR": str(box.root / "nix/etc"),
        "NIX_DAEMON_SOCKET_PATH": str(box.root / "socket"),
    }
    # Without NIX_REMOTE a daemon whose state folder is not there yet becomes a client of its own socket.
    config = "build-users-group =\nallowed-users = *"
    daemon_env = {**os.environ, **state, "NIX_CONFIG": config, "NIX_REMOTE": "local"}
    daemon = subprocess.Popen(
        ["nix-daemon"], env=daemon_env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    home = box.root / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    try:
        deadline = time.monotonic() + 20
        while not (box.root / "socket").exists():
            assert daemon.poll() is None and time.monotonic() < deadline, "the daemon did not start"
            time.sleep(0.05)
        client = {
            "NIX_STORE_DIR": state["NIX_STORE_DIR"],
            "NIX_REMOTE": f"unix://{box.root / 'socket'}",
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        python = os.path.realpath("/usr/bin/python3")
        command = [*drop, python, *box.command()[1:]]
        # The checkout may lie where nobody cannot look.
        shutil.copytree(PYTHON_DIR / "hyperqwen", box.root / "source" / "hyperqwen")
        client["PYTHONPATH"] = str(box.root / "source")
        done = subprocess.run(command, env=box.environment(**client), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        for pin in box.pins.all:
            path = Path(pin.store_path(state["NIX_STORE_DIR"]))
            assert path.exists() and path.stat().st_uid == 0, "the daemon owns what it added"
    finally:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait(20)


_ON_A_SMALL_DISK = """
import os, subprocess, sys, time
from pathlib import Path
disk, command = Path(sys.argv[1]), sys.argv[2:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90m", "tmpfs", str(disk)], check=True)
process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
folder = disk / "hyperqwen" / "fetch"
deadline = time.monotonic() + 60
while time.monotonic() < deadline and sum(p.stat().st_size for p in folder.glob("*.part")) < 500_000:
    time.sleep(0.01)
filler = disk / "filler"
with open(filler, "wb", buffering=0) as out:
    try:
        while True:
            out.write(bytes(1 << 16))
    except OSError as error:
        print("filled:", error, file=sys.stderr)
_, said = process.communicate(timeout=60)
kept = sum(p.stat().st_size for p in folder.glob("*.part"))
filler.unlink()
again = subprocess.run(command, stderr=subprocess.PIPE, text=True)
print(process.returncode, kept, again.returncode)
sys.stderr.write(said)
"""


def test_a_disk_that_fills_up_midway_is_one_error_and_the_next_run_goes_on(box: Box) -> None:
    disk = box.root / "disk"
    disk.mkdir()
    store = str(box.root / "store")
    script = ["unshare", "--mount", sys.executable, "-c", _ON_A_SMALL_DISK, str(disk)]
    done = subprocess.run(
        [*script, *box.command("--store", store, "--pin", "slow", "--quiet")],
        env=box.environment(XDG_CACHE_HOME=str(disk)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    code, kept, again = map(int, done.stdout.split())
    assert code == 3 and again == 0
    assert 500_000 <= kept < 6_400_000, "what had arrived is kept"
    assert "filled: " in done.stderr
    assert done.stderr.count("no disk space left") == 1 and "Traceback" not in done.stderr
    assert NixStore(store).invalid([box.pins.wheels[1].store_path()]) == set()


def test_too_small_a_disk_is_refused_before_anything_is_asked(box: Box) -> None:
    disk = box.root / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    command = box.command("--store", str(box.root / "store"), "--pin", "slow")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, str(disk), *command],
        env=box.environment(XDG_CACHE_HOME=str(disk)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "not enough disk space" in done.stderr and "1.0 MB free" in done.stderr and str(disk) in done.stderr
