"""Claim the server's port before the engine starts, or say who has it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path

from hyperqwen.errors import BadInputError, UnsuitableError

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


def is_loopback_address(host: str) -> bool:
    """Whether `host` is an address that only its own machine reaches. A name is none, not even localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`: an address, or localhost as this machine resolves it."""
    addresses = {host}
    if host == "localhost":
        with contextlib.suppress(socket.gaierror, UnicodeError):
            addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return all(is_loopback_address(address) for address in addresses)


def require_key(host: str, key: str | None, how: str) -> None:
    """Raise BadInputError for a server that other machines reach and that asks for no key; `how` is how to set one."""
    if key is None and not is_loopback(host):
        raise BadInputError(f"host {host!r} is open to other machines, and no key is set", f"{how}, or use 127.0.0.1")


def claim(host: str, port: int) -> socket.socket:
    """A listening socket on `host`:`port`, for a child to inherit: from here on nobody else gets the port.

    Raises BadInputError for a host that is not this machine's, UnsuitableError for a port that is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise BadInputError(
            f"host {host!r} has no address ({error.strerror})", "use 127.0.0.1, or an address of this machine"
        ) from None
    except (UnicodeError, ValueError):
        # A name that idna cannot encode (too long, an empty part), or one with a zero byte.
        raise BadInputError(f"host {host[:80]!r} is no name", "use 127.0.0.1, or an address of this machine") from None
    try:
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UnsuitableError(f"this machine cannot listen on {host}: {error.strerror}", "use 127.0.0.1") from None
    try:
        # Without it, connections of a server that just stopped would block the port for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _explained(error, host, port) from None
    return listener


def _explained(error: OSError, host: str, port: int) -> BadInputError | UnsuitableError:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port) or "another program (of another user: this one may not see which)"
        free = next((other for other in range(port + 1, min(port + 100, 65536)) if _is_free(host, other)), None)
        other = f"choose another with --port, such as --port {free}" if free else "choose another with --port"
        return UnsuitableError(f"port {port} on {host} is in use by {holder}", f"stop that, or {other}")
    if error.errno == errno.EACCES:
        return UnsuitableError(
            f"port {port} on {host} may not be used: {error.strerror}", "choose a port above 1023 with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return BadInputError(
            f"host {host!r} is not an address of this machine", "use 127.0.0.1, or an address that `ip addr` shows"
        )
    return UnsuitableError(f"cannot listen on {host} port {port}: {error.strerror}", "choose another --host or --port")


def _is_free(host: str, port: int) -> bool:
    try:
        claim_quietly = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        return False
    claim_quietly.close()
    return True


def holder_of(port: int, proc: Path = Path("/proc")) -> str | None:
    """The program that listens on TCP `port`, as "NAME (process PID)", where this user may see it."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port, proc)}
    if not sockets:
        return None
    for process in sorted(
        (entry for entry in proc.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name)
    ):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) in sockets for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                name = command or (process / "comm").read_text().strip()
                return f"{name if len(name) <= 100 else name[:99] + '…'!s} (process {process.name})"
    return None


def _listening(port: int, proc: Path) -> set[str]:
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes
