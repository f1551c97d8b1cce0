from __future__ import annotations

import os
import socket

import pytest

from hyperqwen.errors import BadInputError, UnsuitableError
from hyperqwen.runtime import ports


def test_a_claimed_port_is_taken_and_its_holder_named() -> None:
    with ports.claim("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UnsuitableError) as raised:
            ports.claim("127.0.0.1", port)

    message = str(raised.value)
    assert f"port {port} on 127.0.0.1 is in use" in message
    assert f"(process {os.getpid()})" in message
    suggested = int(message.rpartition("--port ")[2])
    with ports.claim("127.0.0.1", suggested) as other:
        assert other.getsockname()[1] == suggested


def test_a_client_may_connect_before_anyone_accepts() -> None:
    with ports.claim("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=5) as client:
        assert client.getpeername() == listener.getsockname()


def test_a_port_can_be_claimed_again_at_once() -> None:
    with ports.claim("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        client = socket.create_connection(address)
        connection, _ = listener.accept()
        # The side that closes first keeps the connection's ghost (TIME_WAIT) on its port.
        connection.close()
        client.close()
    with ports.claim(*address) as again:
        assert again.getsockname() == address


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_a_host_of_another_machine(host: str) -> None:
    with pytest.raises((BadInputError, UnsuitableError), match=r"not an address of this machine|cannot listen"):
        ports.claim(host, 18020)


def test_a_host_that_is_none() -> None:
    with pytest.raises(BadInputError, match=r"host 'not a host' has no address"):
        ports.claim("not a host", 18020)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("example", False),
        ("", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert ports.is_loopback(host) is expected


def test_nobody_holds_a_free_port() -> None:
    with ports.claim("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    assert ports.holder_of(port) is None


@pytest.mark.parametrize("host", ["a" * 300, "a..b"])
def test_a_host_that_no_name_can_be(host: str) -> None:
    with pytest.raises(BadInputError, match="is no name"):
        ports.claim(host, 0)
