from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import UnsuitableError
from hyperqwen.runtime.notify import Notifier


class Manager:
    """The service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.variable = f"@{address[1:]}" if address[0] == "\0" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.settimeout(5)

    def heard(self) -> list[str]:
        return self._socket.recv(65536).decode().split("\n")

    def silent(self) -> bool:
        self._socket.setblocking(False)
        try:
            self._socket.recv(65536)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(5)
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    found = Manager(str(tmp_path / "notify") if request.param == "path" else f"\0hyperqwen-test-{os.getpid()}")
    yield found
    found.close()


def test_what_the_service_manager_hears(manager: Manager) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.variable})
    assert notifier.active and notifier.watchdog is None

    notifier.status("loading weights: 1 of 8", extend_seconds=1.5)
    assert manager.heard() == ["STATUS=loading weights: 1 of 8", "EXTEND_TIMEOUT_USEC=1500000"]
    notifier.ready("it serves")
    assert manager.heard() == ["READY=1", "STATUS=it serves"]
    notifier.alive()
    assert manager.heard() == ["WATCHDOG=1"]
    notifier.stopping("it ends")
    assert manager.heard() == ["STOPPING=1", "STATUS=it ends"]


def test_no_service_manager() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000000"})
    assert not notifier.active and notifier.watchdog is None
    notifier.ready("nobody hears this")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WATCHDOG_USEC": "180000000"}, 180.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "41"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "42"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(variables: dict[str, str], expected: float | None) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/run/x", **variables}, pid=41).watchdog == expected


@pytest.mark.parametrize("address", ["relative/path", "@", "/", "vsock:2:1"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(UnsuitableError, match="NOTIFY_SOCKET is"):
        Notifier({"NOTIFY_SOCKET": address})


@pytest.mark.parametrize("text", ["", "0", "-5", "soon", "1.5", "٣", "1" * 5000])
def test_a_watchdog_time_that_is_none(text: str) -> None:
    with pytest.raises(UnsuitableError, match="WATCHDOG_USEC is"):
        Notifier({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": text})


def test_a_service_manager_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    notifier = Notifier({"NOTIFY_SOCKET": manager.variable})
    manager.close()
    notifier.ready("nobody hears this")
    (tmp_path / "notify").unlink()
    notifier.alive()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_a_status_cannot_smuggle_in_another_field(text: str) -> None:
    address = f"\0hyperqwen-given-{os.getpid()}"
    manager = Manager(address)
    try:
        Notifier({"NOTIFY_SOCKET": manager.variable}).status(text)
        assert len(manager.heard()) == 1
        assert manager.silent()
    finally:
        manager.close()
