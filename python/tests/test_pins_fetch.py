"""Fetching from a server that cuts, swaps, drops and stalls, into a folder or a stand-in for nix-store."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import (
    BadInputError,
    HyperqwenError,
    MissingError,
    UnsuitableError,
    VerificationError,
)
from hyperqwen.pins import fetch, transfer
from hyperqwen.pins.model import Extract, Pin, PinSet, render
from hyperqwen.pins.sources import Candidate, DebSources
from hyperqwen.pins.transfer import Absent, Access, Download, MismatchError, Wanted
from hyperqwen.store import fixed_path, nar_sha256

PYTHON_DIR = Path(fetch.__file__).parents[2]


def payload(name: str, size: int) -> bytes:
    """Bytes that differ from file to file and do not repeat within one."""
    seed = hashlib.sha256(name.encode()).digest()
    return b"".join(hashlib.sha256(seed + i.to_bytes(4, "big")).digest() for i in range(size // 32 + 1))[:size]


def wheel(name: str, size: int = 5000, group: str = "tools") -> tuple[Pin, bytes]:
    data = payload(name, size)
    file = f"{name}-1.0-py3-none-any.whl"
    return Pin("wheel", name, "1.0", file, size, hashlib.sha256(data).hexdigest(), (group,)), data


@dataclass
class Behaviour:
    """How the server treats one path; `drops` counts the answers that end early, `busy` those that are 503."""

    data: bytes
    ranges: bool = True
    drop_at: int | None = None
    drops: int = 0
    busy: int = 0
    length: bool = True
    total: bool = False
    delay_s: float = 0.0
    status: int = 200
    redirect: str = ""
    kind: str = "application/octet-stream"


@dataclass
class Server:
    """A loopback HTTP server; `requests` are (path, Range header, Authorization header)."""

    url: str = ""
    files: dict[str, Behaviour] = field(default_factory=dict)
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)

    def put(self, path: str, data: bytes, **how: Any) -> str:
        self.files[path] = Behaviour(data, **how)
        return f"{self.url}/{path}"

    def ranges(self, path: str) -> list[str | None]:
        return [asked for where, asked, _ in self.requests if where == path]


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Requests are kept in `server.requests`, not printed."""

        def do_GET(self) -> None:
            path = self.path.lstrip("/")
            asked = self.headers.get("Range")
            server.requests.append((path, asked, self.headers.get("Authorization")))
            how = server.files.get(path)
            if how is None or how.status != 200 or how.busy:
                code = 404 if how is None else how.status if how.status != 200 else 503
                if how is not None and how.busy:
                    how.busy -= 1
                self.send_response(code)
                if how is not None and how.redirect:
                    self.send_header("Location", how.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = int(asked[len("bytes=") : -1]) if asked and how.ranges else 0
            if start and start >= len(how.data):
                self.send_response(416)
                if how.total:
                    self.send_header("Content-Range", f"bytes */{len(how.data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Type", how.kind)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(how.data) - 1}/{len(how.data)}")
            if how.length:
                self.send_header("Content-Length", str(len(how.data) - start))
            self.end_headers()
            end = len(how.data)
            if how.drop_at is not None and how.drops:
                how.drops -= 1
                end = min(end, how.drop_at)
            for at in range(start, end, 1000):
                self.wfile.write(how.data[at : min(at + 1000, end)])
                if how.delay_s:
                    server.arrived.set()
                    time.sleep(how.delay_s)
            self.close_connection = True

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(found))
    http.daemon_threads = True
    found.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield found
    http.shutdown()
    http.server_close()
    thread.join(5)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, no netrc of the host's, a cache of the test's own, and short pauses between tries."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(transfer, "_pause", lambda attempt: 0.01)


class FolderStore:
    """A store in a folder: names and hashes as in Nix, no Nix."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(parents=True, exist_ok=True)
        self.calls: list[list[str]] = []
        self.spoil: str | None = None
        self.full_after: int | None = None

    @property
    def store_dir(self) -> str:
        return str(self.root)

    def invalid(self, paths: Sequence[str]) -> set[str]:
        return {path for path in paths if not Path(path).exists()}

    def add_fixed(self, files: Sequence[Path], *, recursive: bool = False) -> list[str]:
        self.calls.append([file.name for file in files])
        if self.full_after is not None and len(self.calls) > self.full_after:
            raise UnsuitableError(f"no disk space left in {self.root}")
        added = []
        for file in files:
            if file.name == self.spoil:
                file.write_bytes(b"changed under our hands")
            digest = nar_sha256(file) if recursive else hashlib.sha256(file.read_bytes()).hexdigest()
            path = Path(fixed_path(file.name, digest, recursive=recursive, store_dir=self.store_dir))
            if file.is_dir():
                shutil.copytree(file, path)
            else:
                shutil.copyfile(file, path)
            added.append(str(path))
        return added

    def delete(self, path: str) -> None:
        Path(path).unlink()

    def real_path(self, path: str) -> Path:
        return Path(path)

    def disk(self) -> Path:
        return self.root

    def names(self) -> set[str]:
        return {path.name.partition("-")[2] for path in self.root.iterdir()}


class Places:
    """Candidates by package name, for tests of the engine alone."""

    def __init__(self, **candidates: list[Candidate]) -> None:
        self.by_name = candidates

    def prepare(self, pins: Sequence[Pin]) -> None:
        """Nothing to ask of the host."""

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        yield from self.by_name.get(pin.name, [])

    def access(self, pin: Pin) -> Access:
        return Access(timeout=5.0)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def seed(
    pins: Sequence[Pin], store: FolderStore, places: fetch.Sources, jobs: int = 2, err: io.StringIO | None = None
) -> fetch.Outcome:
    return fetch.seed(
        pins, store, fetch.Workspace(fetch.cache_dir()), lambda stop: places, jobs=jobs, err=err or io.StringIO()
    )


def cached() -> set[str]:
    """What is left in the cache, its lock aside."""
    return {path.name for path in fetch.cache_dir().rglob("*") if path.name != ".lock"}


def put_part(pin: Pin, data: bytes) -> Path:
    part = fetch.Workspace(fetch.cache_dir()).part(pin)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(data)
    return part


# One file, over the wire.


def download(server: Server, tmp_path: Path, pin: Pin, path: str = "f") -> tuple[Path, list[tuple[int, bool]]]:
    part = tmp_path / "f.part"
    moves: list[tuple[int, bool]] = []
    wanted = Wanted(pin.file, pin.size, pin.sha256)
    Download(wanted, Access(timeout=5.0), part, threading.Event(), lambda n, wire: moves.append((n, wire))).run(
        f"{server.url}/{path}"
    )
    return part, moves


def test_a_file_arrives_whole_and_is_counted(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a", 700_000)
    server.put("f", data)
    part, moves = download(server, tmp_path, pin)
    assert part.read_bytes() == data
    assert sum(n for n, _ in moves) == len(data) and all(wire for _, wire in moves)
    assert server.ranges("f") == [None]


def test_a_dropped_connection_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a", 50_000)
    server.put("f", data, drop_at=20_000, drops=1)
    part, moves = download(server, tmp_path, pin)
    assert part.read_bytes() == data
    assert server.ranges("f") == [None, "bytes=20000-"]
    assert sum(n for n, _ in moves) == len(data)


def test_an_earlier_part_is_taken_up(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a", 50_000)
    server.put("f", data)
    (tmp_path / "f.part").write_bytes(data[:30_000])
    part, moves = download(server, tmp_path, pin)
    assert part.read_bytes() == data
    assert server.ranges("f") == ["bytes=30000-"]
    assert moves[0] == (30_000, False), "bytes of an earlier run are not speed"


def test_a_complete_part_needs_no_server(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    (tmp_path / "f.part").write_bytes(data)
    download(server, tmp_path, pin)
    assert server.requests == []


@pytest.mark.parametrize("kept", [3000, 5000])
def test_a_spoilt_part_is_dropped_and_the_file_brought_anew(server: Server, tmp_path: Path, kept: int) -> None:
    pin, data = wheel("a")
    server.put("f", data)
    (tmp_path / "f.part").write_bytes(b"x" * kept)
    part, moves = download(server, tmp_path, pin)
    assert part.read_bytes() == data
    assert sum(n for n, _ in moves) == len(data)


def test_a_part_that_is_too_long_is_dropped(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data)
    (tmp_path / "f.part").write_bytes(data + b"more")
    assert download(server, tmp_path, pin)[0].read_bytes() == data


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a", 50_000)
    server.put("f", data, ranges=False, drop_at=20_000, drops=1)
    part, moves = download(server, tmp_path, pin)
    assert part.read_bytes() == data
    assert sum(n for n, _ in moves) == len(data)


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data, busy=3)
    assert download(server, tmp_path, pin)[0].read_bytes() == data
    assert len(server.requests) == 4


def test_a_truncated_file_is_refused_with_both_sizes(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data[:4000])
    with pytest.raises(MismatchError) as caught:
        download(server, tmp_path, pin)
    assert "expected 5000 bytes" in str(caught.value) and "actual   4000 bytes" in str(caught.value)
    assert not (tmp_path / "f.part").exists()


def test_a_file_truncated_after_an_earlier_part_is_refused(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data[:4000])
    (tmp_path / "f.part").write_bytes(data[:3000])
    with pytest.raises(MismatchError, match="4000 bytes"):
        download(server, tmp_path, pin)
    assert not (tmp_path / "f.part").exists()


def test_right_size_and_wrong_bytes_are_refused_with_both_hashes(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    wrong = b"\0" + data[1:]
    server.put("f", wrong)
    with pytest.raises(MismatchError) as caught:
        download(server, tmp_path, pin)
    assert pin.sha256 in str(caught.value) and hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert not (tmp_path / "f.part").exists()


def test_a_file_without_end_is_cut_off(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data + b"x" * 3_000_000, length=False)
    with pytest.raises(MismatchError, match="bytes or more"):
        download(server, tmp_path, pin)


def test_a_server_that_always_stops_early_is_given_up(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data, drop_at=2000, drops=99)
    with pytest.raises(UnsuitableError, match="cannot reach"):
        download(server, tmp_path, pin)
    assert (tmp_path / "f.part").read_bytes() == data[:2000], "what arrived stays"


def test_a_truncated_file_without_a_length_is_given_up(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data[:4000], length=False)
    with pytest.raises(UnsuitableError, match="the file ends at 4000 of 5000 bytes"):
        download(server, tmp_path, pin)
    assert len(server.requests) < 20, "it is not asked for without end"


def test_an_end_that_the_server_names_is_a_wrong_size(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    server.put("f", data[:3000], total=True)
    (tmp_path / "f.part").write_bytes(data[:3000])
    with pytest.raises(MismatchError, match="actual   3000 bytes"):
        download(server, tmp_path, pin)


def test_a_missing_file_is_absent_and_a_forbidden_one_says_so(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    with pytest.raises(Absent, match="404"):
        download(server, tmp_path, pin)
    server.put("f", data, status=403)
    with pytest.raises(UnsuitableError, match="403"):
        download(server, tmp_path, pin)


def test_no_server_at_all(tmp_path: Path) -> None:
    pin, _ = wheel("a")
    with pytest.raises(UnsuitableError, match="check the network"):
        download(Server(url="http://127.0.0.1:9"), tmp_path, pin)


def test_a_login_stays_with_its_host(server: Server, tmp_path: Path) -> None:
    pin, data = wheel("a")
    elsewhere = server.url.replace("127.0.0.1", "localhost")
    server.put("real", data)
    server.put("f", b"", status=302, redirect=f"{elsewhere}/real")
    url = server.url.replace("http://", "http://me:s%40crt@")
    wanted = Wanted(pin.file, pin.size, pin.sha256)
    Download(wanted, Access(), tmp_path / "p", threading.Event(), lambda n, wire: None).run(f"{url}/f")
    sent = {path: login for path, _, login in server.requests}
    assert sent["f"] == "Basic bWU6c0BjcnQ=" and sent["real"] is None


def test_a_password_is_never_shown(server: Server, tmp_path: Path) -> None:
    pin, _ = wheel("a")
    url = server.url.replace("http://", "http://me:secret@")
    with pytest.raises(Absent) as caught:
        Download(Wanted(pin.file, 1, pin.sha256), Access(), tmp_path / "p", threading.Event(), lambda n, w: None).run(
            f"{url}/f"
        )
    assert "secret" not in str(caught.value)


# Many files, into a store.


def test_what_is_missing_is_added_and_the_cache_is_empty(server: Server, store: FolderStore) -> None:
    made = [wheel(f"w{i}", 1000 * (i + 1)) for i in range(7)]
    places = Places(**{pin.name: [Candidate(url=server.put(pin.file, data))] for pin, data in made})
    pins = [pin for pin, _ in made]
    outcome = seed(pins, store, places, jobs=3)
    assert sorted(outcome.added) == sorted(pin.file for pin in pins) and not outcome.failed and outcome.valid == 0
    for pin, data in made:
        assert Path(pin.store_path(store.store_dir)).read_bytes() == data
    assert cached() == set()
    before = len(server.requests)
    again = seed(pins, store, places)
    assert (again.valid, again.added) == (7, [])
    assert len(server.requests) == before, "nothing is asked for when nothing is missing"


def test_bad_files_are_refused_and_the_good_ones_added(server: Server, store: FolderStore) -> None:
    good, data = wheel("good")
    cut, cut_data = wheel("cut")
    swapped, swapped_data = wheel("swapped")
    gone, _ = wheel("gone")
    places = Places(
        good=[Candidate(url=server.put("good", data))],
        cut=[Candidate(url=server.put("cut", cut_data[:-1]))],
        swapped=[Candidate(url=server.put("swapped", swapped_data[:-1] + b"\0"))],
        gone=[Candidate(url=f"{server.url}/gone")],
    )
    outcome = seed([good, cut, swapped, gone], store, places)
    assert store.names() == {good.file}
    assert {name: error.exit_code for name, error in outcome.failed.items()} == {
        cut.file: 5,
        swapped.file: 5,
        gone.file: 4,
    }
    error = fetch.summary_error(outcome.failed)
    assert error.exit_code == 5
    for word in ("3 files failed", "expected 5000 bytes", "actual   4999 bytes", swapped.sha256, "404", "--mirror"):
        assert word in str(error)
    assert cached() == set(), "no corrupt part stays"


def test_the_next_place_is_tried_when_one_has_other_bytes(server: Server, store: FolderStore, tmp_path: Path) -> None:
    pin, data = wheel("a")
    local = tmp_path / "links" / pin.file
    local.parent.mkdir()
    local.write_bytes(b"\0" + data[1:])
    places = Places(
        a=[Candidate(path=local), Candidate(url=server.put("bad", data[:9])), Candidate(url=server.put("good", data))]
    )
    err = io.StringIO()
    assert seed([pin], store, places, err=err).added == [pin.file]
    assert err.getvalue().count("refused, trying elsewhere") == 2
    assert local.exists(), "a file that is not ours is not removed"


def test_a_local_file_is_used_where_it_lies(store: FolderStore, tmp_path: Path) -> None:
    pin, data = wheel("a")
    local = tmp_path / "links" / pin.file
    local.parent.mkdir()
    local.write_bytes(data)
    assert seed([pin], store, Places(a=[Candidate(path=local)])).added == [pin.file]
    assert local.read_bytes() == data and cached() == set()


def test_a_file_that_changes_while_it_is_added_does_not_stay(store: FolderStore, tmp_path: Path) -> None:
    pin, data = wheel("a")
    local = tmp_path / pin.file
    local.write_bytes(data)
    store.spoil = pin.file
    with pytest.raises(VerificationError, match="changed while it was added"):
        seed([pin], store, Places(a=[Candidate(path=local)]))
    assert store.names() == set()


def test_a_kept_file_is_verified_before_it_is_used(server: Server, store: FolderStore) -> None:
    pin, data = wheel("a")
    kept = fetch.cache_dir() / pin.sha256 / pin.file
    kept.parent.mkdir(parents=True)
    kept.write_bytes(data)
    assert seed([pin], store, Places()).added == [pin.file]
    shutil.rmtree(store.root)
    store.root.mkdir()
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"\0" * pin.size)
    assert seed([pin], store, Places(a=[Candidate(url=server.put("a", data))])).added == [pin.file]
    assert Path(pin.store_path(store.store_dir)).read_bytes() == data


def test_a_large_set_is_added_in_batches(server: Server, store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "BATCH_FILES", 3)
    monkeypatch.setattr(fetch, "AHEAD_BYTES", 4000)
    made = [wheel(f"w{i:02}", 1000) for i in range(20)]
    places = Places(**{pin.name: [Candidate(url=server.put(pin.file, data))] for pin, data in made})
    assert len(seed([pin for pin, _ in made], store, places, jobs=4).added) == 20
    assert len(store.calls) > 3, "the store is not kept waiting for the last file"
    assert sorted(name for call in store.calls for name in call) == sorted(pin.file for pin, _ in made)


def test_an_unreachable_server_ends_the_run_at_once(server: Server, store: FolderStore) -> None:
    made = [wheel(f"w{i:02}") for i in range(40)]
    places = Places(**{pin.name: [Candidate(url="http://127.0.0.1:9/x")] for pin, _ in made})
    with pytest.raises(UnsuitableError, match="cannot reach"):
        seed([pin for pin, _ in made], store, places)


def test_a_store_that_is_full_ends_the_run_and_keeps_what_arrived(server: Server, store: FolderStore) -> None:
    pin, data = wheel("a")
    store.full_after = 0
    places = Places(a=[Candidate(url=server.put("a", data))])
    with pytest.raises(UnsuitableError, match="no disk space left"):
        seed([pin], store, places)
    assert pin.file in cached()
    store.full_after = None
    server.files.clear()
    assert seed([pin], store, places).added == [pin.file], "the second run needs no server"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(122, "Disk quota exceeded")])
def test_a_full_cache_disk_is_one_error(
    server: Server, store: FolderStore, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    pin, data = wheel("a", 600_000)
    places = Places(a=[Candidate(url=server.put("a", data))])
    write = Download._write
    written: list[int] = []

    def full(self: Download, out: Any, block: bytes) -> None:
        if written:
            raise error
        written.append(len(block))
        write(self, out, block)

    monkeypatch.setattr(Download, "_write", full)
    with pytest.raises(UnsuitableError, match="no disk space left") as caught:
        seed([pin], store, places)
    assert str(fetch.cache_dir()) in str(caught.value) and "run it again" in str(caught.value)
    monkeypatch.setattr(Download, "_write", write)
    assert seed([pin], store, places).added == [pin.file]
    assert server.ranges("a")[-1] == f"bytes={written[0]}-", "the second run goes on where the disk was full"


def test_too_little_space_is_said_before_anything_moves(
    server: Server, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, data = wheel("a")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UnsuitableError) as caught:
        seed([pin], store, Places(a=[Candidate(url=server.put("a", data))]))
    for word in ("not enough disk space", "67.1 MB needed", "1.0 kB free", str(store.root), str(fetch.cache_dir())):
        assert word in str(caught.value)
    assert server.requests == []


def test_a_second_run_waits_and_takes_what_the_first_left(server: Server, store: FolderStore) -> None:
    first, first_data = wheel("first", 30_000)
    second, second_data = wheel("second")
    slow = Places(first=[Candidate(url=server.put("first", first_data, delay_s=0.01))])
    both = Places(
        first=[Candidate(url=server.put("never", b""))], second=[Candidate(url=server.put("second", second_data))]
    )
    results: list[fetch.Outcome] = []
    thread = threading.Thread(target=lambda: results.append(seed([first], store, slow)))
    thread.start()
    assert server.arrived.wait(5)
    err = io.StringIO()
    outcome = seed([first, second], store, both, err=err)
    thread.join(10)
    assert results[0].added == [first.file]
    assert outcome.added == [second.file], "the first run's file is there by then"
    assert f"process {os.getpid()}" in err.getvalue() and "waiting" in err.getvalue()
    assert server.ranges("never") == []


def test_the_lock_is_the_kernels_and_dies_with_its_process(store: FolderStore) -> None:
    workspace = fetch.Workspace(fetch.cache_dir())
    with workspace.lock(lambda text: None) as waited:
        assert not waited
        with open(fetch.cache_dir() / ".lock") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with workspace.lock(lambda text: None) as waited:
        assert not waited


def test_a_cache_that_cannot_be_made_is_named(
    tmp_path: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pin, _ = wheel("a")
    with pytest.raises(UnsuitableError, match="XDG_CACHE_HOME"):
        seed([pin], store, Places())


# The seed: a program out of a .deb.


def make_deb(path: Path, member: str, program: bytes) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as tar:
        info = tarfile.TarInfo(member)
        info.size = len(program)
        tar.addfile(info, io.BytesIO(program))
    body = b"!<arch>\n"
    for name, data in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", archive.getvalue())):
        body += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        )
    path.write_bytes(body)


def seed_pin(tmp_path: Path, mirror: Path) -> Pin:
    pool = mirror / "pool/main/b/busybox"
    pool.mkdir(parents=True)
    deb = pool / "busybox-static_1.0_amd64.deb"
    make_deb(deb, "./bin/busybox", b"\x7fELF program")
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/busybox").write_bytes(b"\x7fELF program")
    (tree / "bin/busybox").chmod(0o755)
    data = deb.read_bytes()
    return Pin(
        "deb",
        "busybox-static",
        "1:1.0",
        "busybox-static_1-1.0_amd64.deb",
        len(data),
        hashlib.sha256(data).hexdigest(),
        ("seed",),
        "pool/main/b/busybox/busybox-static_1.0_amd64.deb",
        Extract("./bin/busybox", "bin/busybox", "busybox-1.0", nar_sha256(tree)),
    )


class Mirror(Places):
    """A local Debian mirror."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.debs = DebSources([str(root)])

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        return self.debs.candidates(pin)


def test_the_seed_enters_the_store_as_a_tree_with_its_program(tmp_path: Path, store: FolderStore) -> None:
    pin = seed_pin(tmp_path, tmp_path / "mirror")
    assert seed([pin], store, Mirror(tmp_path / "mirror")).added == ["busybox-1.0"]
    program = Path(pin.store_path(store.store_dir)) / "bin/busybox"
    assert program.read_bytes() == b"\x7fELF program" and program.stat().st_mode & 0o777 == 0o755
    assert store.names() == {"busybox-1.0"}, "the .deb itself does not enter the store"
    assert cached() == set()


def test_another_program_in_the_right_deb_is_refused(tmp_path: Path, store: FolderStore) -> None:
    pin = seed_pin(tmp_path, tmp_path / "mirror")
    assert pin.extract is not None
    wrong = Pin(**{**pin.__dict__, "extract": Extract("./bin/busybox", "bin/busybox", "busybox-1.0", "0" * 64)})
    outcome = seed([wrong], store, Mirror(tmp_path / "mirror"))
    said = str(outcome.failed[pin.file])
    assert "0" * 64 in said and pin.extract.nar_sha256 in said
    assert store.names() == set()


def test_a_renamed_deb_is_added_under_its_store_name(tmp_path: Path, store: FolderStore) -> None:
    data = payload("libssl3", 3000)
    pool = tmp_path / "mirror/pool/main/o/openssl"
    pool.mkdir(parents=True)
    (pool / "libssl3_3.0~deb12_amd64.deb").write_bytes(data)
    pin = Pin(
        "deb",
        "libssl3",
        "3.0~deb12",
        "libssl3_3.0-deb12_amd64.deb",
        3000,
        hashlib.sha256(data).hexdigest(),
        ("runtime",),
        "pool/main/o/openssl/libssl3_3.0~deb12_amd64.deb",
    )
    assert seed([pin], store, Mirror(tmp_path / "mirror")).added == [pin.file]
    assert (pool / "libssl3_3.0~deb12_amd64.deb").read_bytes() == data


@pytest.mark.parametrize("data", [b"", b"no ar archive", b"!<arch>\n", b"!<arch>\n" + b"x" * 30])
def test_what_is_no_deb(tmp_path: Path, data: bytes) -> None:
    from hyperqwen.pins.deb import member

    (tmp_path / "x.deb").write_bytes(data)
    with pytest.raises(VerificationError, match=r"x\.deb"):
        member(tmp_path / "x.deb", "./bin/busybox")


def test_a_deb_without_the_member(tmp_path: Path) -> None:
    from hyperqwen.pins.deb import member

    make_deb(tmp_path / "x.deb", "./bin/other", b"x")
    with pytest.raises(VerificationError, match=r"holds no file \./bin/busybox"):
        member(tmp_path / "x.deb", "./bin/busybox")


# The command.


@dataclass
class Checkout:
    """Pin files, a package index on the server, and the command on them."""

    folder: Path
    server: Server
    store: FolderStore
    made: list[tuple[Pin, bytes]]

    def run(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        code = fetch.run(
            ["--pins", str(self.folder), *arguments], store=self.store, stdin=io.StringIO(stdin), out=out, err=err
        )
        return code, out.getvalue(), err.getvalue()


@pytest.fixture
def checkout(tmp_path: Path, server: Server, store: FolderStore) -> Checkout:
    made = [wheel("alpha", 3000, "tools"), wheel("beta", 4000, "kernels"), wheel("gamma", 5000, "tools")]
    write_checkout(tmp_path / "pins", server, made)
    return Checkout(tmp_path / "pins", server, store, made)


def write_checkout(folder: Path, server: Server, made: list[tuple[Pin, bytes]]) -> None:
    folder.mkdir()
    pins = PinSet(tuple(pin for pin, _ in made), ())
    (folder / "wheels.json").write_text(render(pins, "wheel"))
    (folder / "debs.json").write_text(render(pins, "deb"))
    for pin, data in made:
        server.put(f"files/{pin.file}", data)
        page = {
            "meta": {"api-version": "1.0"},
            "name": pin.name,
            "files": [{"filename": pin.file, "url": f"../../files/{pin.file}", "hashes": {"sha256": pin.sha256}}],
        }
        server.put(f"simple/{pin.name}/", json.dumps(page).encode(), kind="application/vnd.pypi.simple.v1+json")


def test_check_lists_what_is_missing_and_fetches_nothing(checkout: Checkout) -> None:
    code, out, err = checkout.run("--check", "tools")
    assert code == 4
    assert [line.split("\t")[0] for line in out.splitlines()] == [
        "alpha-1.0-py3-none-any.whl",
        "gamma-1.0-py3-none-any.whl",
    ]
    assert "2 of 2 pins are missing (8.0 kB)" in err
    assert checkout.server.requests == [] and checkout.store.names() == set()


def test_check_of_a_store_that_is_not_there_makes_none(checkout: Checkout, tmp_path: Path) -> None:
    out, err, place = io.StringIO(), io.StringIO(), tmp_path / "none"
    arguments = ["--pins", str(checkout.folder), "--check", "--store", str(place)]
    assert fetch.run(arguments, out=out, err=err) == 4
    assert "3 of 3 pins are missing" in err.getvalue() and len(out.getvalue().splitlines()) == 3
    assert not place.exists()


def test_fetch_then_check(checkout: Checkout) -> None:
    index = f"{checkout.server.url}/simple"
    code, out, err = checkout.run("--index", index)
    assert code == 0 and out == "" and "3 files (12.0 kB) added" in err
    assert checkout.run("--check")[0] == 0
    code, out, _ = checkout.run("--check", "--json")
    assert json.loads(out) == {"pins": 3, "missing": [], "missing_bytes": 0}


def test_single_files_by_argument_stdin_and_package(checkout: Checkout) -> None:
    index = f"{checkout.server.url}/simple/"
    assert checkout.run("--index", index, "--files", "beta-1.0-py3-none-any.whl")[0] == 0
    assert checkout.store.names() == {"beta-1.0-py3-none-any.whl"}
    named = f"/nix/store/{'0' * 32}-alpha-1.0-py3-none-any.whl.drv\n"
    code, out, _ = checkout.run("--index", index, "--json", "--files", "-", stdin=named)
    assert code == 0 and json.loads(out)["added"] == ["alpha-1.0-py3-none-any.whl"]
    assert checkout.run("--index", index, "--pin", "Gamma")[0] == 0
    assert len(checkout.store.names()) == 3


def test_an_index_without_the_file_is_a_missing_pin(checkout: Checkout) -> None:
    checkout.server.files.pop("simple/beta/")
    with pytest.raises(MissingError) as caught:
        checkout.run("--index", f"{checkout.server.url}/simple", "kernels")
    for word in ("beta-1.0-py3-none-any.whl", checkout.made[1][0].sha256, "404", "--import"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jobs", "0"], "--jobs is 0"),
        (["--jobs", "99"], "--jobs is 99"),
        (["--check", "--import", "."], "--check and --import together"),
        (["--import", "/does/not/exist"], "is not a folder"),
        (["desktop"], "'desktop' does not exist"),
        (["tools", "--pin", "alpha"], "either groups or single files"),
    ],
)
def test_wrong_arguments(checkout: Checkout, arguments: list[str], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        checkout.run(*arguments)


def test_export_then_import_without_a_network(checkout: Checkout, tmp_path: Path, store: FolderStore) -> None:
    index = f"{checkout.server.url}/simple"
    checkout.run("--index", index, "kernels")
    folder = tmp_path / "usb"
    code, _, err = checkout.run("--export", str(folder), "--index", index)
    assert code == 0 and "3 files" in err
    assert store.names() == {"beta-1.0-py3-none-any.whl"}, "an export adds nothing to the store"
    lines = [line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    assert sums == {pin.file: pin.sha256 for pin, _ in checkout.made}
    assert "files/beta-1.0-py3-none-any.whl" in {path for path, _, _ in checkout.server.requests[:3]}
    asked = len(checkout.server.requests)
    code, _, err = checkout.run("--export", str(folder))
    assert code == 0 and "all 3 files are in" in err
    assert checkout.run("--import", str(folder))[0] == 0
    assert store.names() == {pin.file for pin, _ in checkout.made}
    assert len(checkout.server.requests) == asked, "neither needs the network again"
    assert {path.name for path in folder.iterdir()} == {*sums, "SHA256SUMS", ".lock"}


def test_an_export_replaces_what_is_wrong_and_adds_to_its_sums(checkout: Checkout, tmp_path: Path) -> None:
    index = f"{checkout.server.url}/simple"
    folder = tmp_path / "usb"
    checkout.run("--export", str(folder), "--index", index, "kernels")
    (folder / "beta-1.0-py3-none-any.whl").write_bytes(b"x" * 4000)
    assert "replaced" in checkout.run("--export", str(folder), "--index", index)[2]
    for pin, data in checkout.made:
        assert (folder / pin.file).read_bytes() == data
    assert len((folder / "SHA256SUMS").read_text().splitlines()) == 3


def test_an_import_refuses_wrong_bytes_and_says_what_is_not_there(checkout: Checkout, tmp_path: Path) -> None:
    folder = tmp_path / "usb"
    folder.mkdir()
    (folder / "alpha-1.0-py3-none-any.whl").write_bytes(checkout.made[0][1])
    (folder / "beta-1.0-py3-none-any.whl").write_bytes(b"x" * 4000)
    with pytest.raises(HyperqwenError) as caught:
        checkout.run("--import", str(folder))
    assert caught.value.exit_code == 5
    for word in ("2 files failed", checkout.made[1][0].sha256, f"gamma-1.0-py3-none-any.whl is not in {folder}"):
        assert word in str(caught.value)
    assert checkout.store.names() == {"alpha-1.0-py3-none-any.whl"}


# The program, as a process of its own.

STAND_IN = """#!{python}
import os, shutil, sys
sys.path.insert(0, {path!r})
from pathlib import Path
from hyperqwen.pins.transfer import sha256_of
from hyperqwen.store import fixed_path
root = Path(os.environ["NIX_STORE_DIR"])
if sys.argv[1] == "--check-validity":
    print("\\n".join(path for path in sys.argv[3:] if not Path(path).exists()))
else:
    for file in map(Path, sys.argv[3:]):
        path = fixed_path(file.name, sha256_of(file), store_dir=str(root))
        shutil.copyfile(file, path)
        print(path)
"""


@dataclass
class Program:
    checkout: Checkout
    env: dict[str, str]

    def start(self, *arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
        def restrict() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        command = [sys.executable, "-m", "hyperqwen.pins.fetch", "--pins", str(self.checkout.folder), *arguments]
        return subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=restrict
        )

    def run(self, *arguments: str, limit: int | None = None) -> tuple[int, str, str]:
        process = self.start(*arguments, limit=limit)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def program(checkout: Checkout, tmp_path: Path) -> Program:
    stand_in = tmp_path / "bin" / "nix-store"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN.format(python=sys.executable, path=str(PYTHON_DIR)))
    stand_in.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{stand_in.parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(PYTHON_DIR),
        "NIX_STORE_DIR": checkout.store.store_dir,
    }
    return Program(checkout, env)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_soon_and_the_next_goes_on(program: Program, number: int, code: int) -> None:
    server, index = program.checkout.server, f"{program.checkout.server.url}/simple"
    big, data = wheel("beta", 4000, "kernels")
    server.put(f"files/{big.file}", data, delay_s=1.5)
    process = program.start("--index", index, "--pin", "beta")
    assert server.arrived.wait(30)
    part = fetch.cache_dir() / f"{big.sha256}.part"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
        time.sleep(0.02)
    process.send_signal(number)
    sent = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert time.monotonic() - sent < 15
    assert "run it again" in err and "Traceback" not in err
    kept = part.stat().st_size
    assert 0 < kept < 4000 and part.read_bytes() == data[:kept]
    server.put(f"files/{big.file}", data)
    assert program.run("--index", index, "--pin", "beta")[0] == 0
    assert server.ranges(f"files/{big.file}")[-1] == f"bytes={kept}-"
    assert program.checkout.store.names() == {big.file}


def test_a_file_size_limit_is_reported_like_a_full_disk(program: Program) -> None:
    index = f"{program.checkout.server.url}/simple"
    code, _, err = program.run("--index", index, "--pin", "gamma", limit=2000)
    assert code == 3
    assert "no disk space left" in err and "XDG_CACHE_HOME" in err and "Traceback" not in err
    assert program.run("--index", index, "--pin", "gamma")[0] == 0
    assert program.checkout.server.ranges("files/gamma-1.0-py3-none-any.whl")[-1] == "bytes=2000-"


def test_two_processes_at_once_share_the_work(program: Program) -> None:
    server, index = program.checkout.server, f"{program.checkout.server.url}/simple"
    for pin, data in program.checkout.made:
        server.put(f"files/{pin.file}", data, delay_s=0.05)
    processes = [program.start("--index", index) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert program.checkout.store.names() == {pin.file for pin, _ in program.checkout.made}
    for pin, data in program.checkout.made:
        assert Path(pin.store_path(program.checkout.store.store_dir)).read_bytes() == data
        assert len(server.ranges(f"files/{pin.file}")) == 1, "each file is brought once"


def test_errors_are_one_message_without_a_traceback(program: Program) -> None:
    (program.checkout.folder / "wheels.json").write_text("{}")
    code, out, err = program.run("--check")
    assert code == 2 and out == "" and "Traceback" not in err
    assert "'wheels' is missing" in err and err.startswith("hyperqwen fetch: ")


def test_nothing_to_do_is_fast(program: Program) -> None:
    index = f"{program.checkout.server.url}/simple"
    assert program.run("--index", index)[0] == 0
    began = time.monotonic()
    code, _, err = program.run()
    assert code == 0 and "all 3 files are in the store" in err
    assert time.monotonic() - began < 5
    modules = subprocess.run(
        [sys.executable, "-c", "import sys, hyperqwen.pins.fetch; print(*sys.modules)"],
        env=program.env,
        text=True,
        capture_output=True,
        check=True,
    ).stdout.split()
    heavy = {"ssl", "urllib.request", "http.client", "pydantic", "packaging", "click"} & set(modules)
    assert not heavy, "imports that only a download needs"


def test_help_names_every_group(program: Program) -> None:
    code, out, _ = program.run("--help")
    assert code == 0
    for word in ("serve-cuda", "serve-cpu", "--export", "--import", "--mirror", "--index"):
        assert word in out
