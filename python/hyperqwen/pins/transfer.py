"""Bring one pinned file from one place: HTTP with resume, or a local file.

A file gets its name once its size and sha256 are the pin's. Runs on a bare Python 3.9 (standard library only).
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperqwen.errors import HyperqwenError, MissingError, UnsuitableError, VerificationError

CHUNK = 256 * 1024
IDLE_TRIES = 5

# A network failure in any of its forms; OSError covers ssl.SSLError, timeouts and refused connections.
_NETWORK = (OSError, http.client.HTTPException)


class Stopped(Exception):
    """The run is ending (ctrl-C, or another file's fatal error); what has arrived stays for the next run."""


class Absent(MissingError):
    """The place does not have the file (HTTP 404, no such local file); another may."""


class NoAnswer(UnsuitableError):
    """One place does not give the file: it cannot be reached, or it refuses. Another place may."""


class MismatchError(VerificationError):
    """A file's size or sha256 is not the pin's; holds both values."""

    def __init__(self, file: str, what: str, expected: object, actual: object, origin: str) -> None:
        super().__init__(f"{file}: wrong {what} from {origin}\n    expected {expected}\n    actual   {actual}")


@dataclass(frozen=True)
class Wanted:
    """The file to bring: its name for messages, its size in bytes, its sha256 in hex."""

    file: str
    size: int
    sha256: str


@dataclass
class Access:
    """How this host reaches HTTP servers.

    `proxies` maps a scheme to a proxy URL, None means the environment's. `logins` maps host[:port] to user, password.
    """

    cafile: str | None = None
    client_cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxies: Mapping[str, str] | None = None
    timeout: float = 30.0
    logins: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._openers: dict[bool, urllib.request.OpenerDirector] = {}
        self._netrc: Any = None

    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        """Open `url`; raises urllib's errors as they are. Credentials never follow a redirect to another host."""
        plain, login = split_login(url)
        request = urllib.request.Request(
            plain, headers={"User-Agent": "hyperqwen-fetch", "Accept-Encoding": "identity", **(headers or {})}
        )
        netloc = urllib.parse.urlsplit(plain).netloc
        login = login or self.logins.get(netloc) or self._from_netrc(netloc)
        if login:
            token = b64encode(f"{login[0]}:{login[1]}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {token}")
        return self._opener(netloc).open(request, timeout=self.timeout)

    def read(
        self, url: str, headers: Mapping[str, str] | None = None, stop: threading.Event | None = None
    ) -> tuple[bytes, str, str]:
        """The whole body of a small document, its content type and its final URL; raises Absent or UnsuitableError."""
        failure: BaseException | None = None
        for attempt in range(IDLE_TRIES):
            try:
                with self.get(url, headers) as response:
                    return response.read(), response.headers.get_content_type(), response.geturl()
            except urllib.error.HTTPError as error:
                failure = _final(error, url)
                if not _passing(error.code):
                    raise failure from None
            except _NETWORK as error:
                failure = error
                if _is_tls(error):
                    break
            if stop is not None and stop.wait(_pause(attempt)):
                raise Stopped
        raise unreachable(url, failure)

    def _opener(self, netloc: str) -> urllib.request.OpenerDirector:
        host = netloc.rpartition(":")[0] or netloc
        trusted = netloc in self.trusted_hosts or host in self.trusted_hosts
        with self._lock:
            if trusted not in self._openers:
                context = ssl.create_default_context(cafile=self.cafile)
                if self.client_cert:
                    context.load_cert_chain(self.client_cert)
                if trusted:
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
                proxy = urllib.request.ProxyHandler(None if self.proxies is None else dict(self.proxies))
                self._openers[trusted] = urllib.request.build_opener(
                    urllib.request.HTTPSHandler(context=context), proxy
                )
            return self._openers[trusted]

    def _from_netrc(self, netloc: str) -> tuple[str, str] | None:
        import netrc

        if self._netrc is None:
            try:
                self._netrc = netrc.netrc()
            except (OSError, netrc.NetrcParseError):
                self._netrc = False
        if not self._netrc:
            return None
        host = netloc.rpartition(":")[0] or netloc
        found = self._netrc.hosts.get(host)
        return (found[0], found[2] or "") if found else None


def split_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """`url` without user and password, and these."""
    parts = urllib.parse.urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    login, _, netloc = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    return (
        urllib.parse.urlunsplit(parts._replace(netloc=netloc)),
        (urllib.parse.unquote(user), urllib.parse.unquote(password)),
    )


def unreachable(url: str, failure: BaseException | None) -> NoAnswer:
    """The error for a server that does not answer after the tries that a short outage deserves."""
    shown = split_login(url)[0]
    if isinstance(failure, HyperqwenError):
        return NoAnswer(failure.message, "try again later, or name another place with --index or --mirror")
    reason = getattr(failure, "reason", None) or failure
    fix = "check the network and the proxy, or name another place with --index or --mirror"
    if _is_tls(failure):
        fix = "install ca-certificates, or set pip's `cert` to the bundle that holds the server's authority"
    return NoAnswer(f"cannot reach {shown}: {reason}", fix)


def _is_tls(error: BaseException | None) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError) or isinstance(
        getattr(error, "reason", None), ssl.SSLCertVerificationError
    )


def _passing(code: int) -> bool:
    return code in (408, 425, 429) or code >= 500


def _final(error: urllib.error.HTTPError, url: str) -> HyperqwenError:
    shown = split_login(url)[0]
    if error.code in (404, 410):
        return Absent(f"{shown}: HTTP {error.code}")
    if error.code in (401, 403, 407):
        return NoAnswer(
            f"{shown}: HTTP {error.code} {error.reason}", "give the index's login in its URL or in ~/.netrc"
        )
    return NoAnswer(f"{shown}: HTTP {error.code} {error.reason}", "try again later, or name another place")


def _pause(attempt: int) -> float:
    return min(0.5 * 2.0**attempt, 8.0)


def sha256_of(path: Path, stop: threading.Event | None = None) -> str:
    """The sha256 (hex) of a file, read in pieces; raises Stopped."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
            if stop is not None and stop.is_set():
                raise Stopped
    return digest.hexdigest()


def disk_error(error: OSError, place: Path) -> UnsuitableError | None:
    """The error for a full disk, quota or file-size limit; None for any other OSError."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return UnsuitableError(
        f"no disk space left in {place} ({os.strerror(error.errno)})",
        "free space there, or set XDG_CACHE_HOME to a larger disk; then run it again: what has arrived is kept",
    )


def check_local(wanted: Wanted, path: Path, stop: threading.Event | None = None) -> None:
    """Compare a local file with the pin; raises Absent or MismatchError."""
    try:
        size = path.stat().st_size
        if size != wanted.size:
            raise MismatchError(wanted.file, "size", f"{wanted.size} bytes", f"{size} bytes", str(path))
        actual = sha256_of(path, stop)
    except FileNotFoundError:
        raise Absent(f"{path}: no such file") from None
    except OSError as error:
        raise UnsuitableError(f"{path}: cannot be read: {error.strerror}", "make the file readable") from None
    if actual != wanted.sha256:
        raise MismatchError(wanted.file, "sha256", wanted.sha256, actual, str(path))


def copy_checked(wanted: Wanted, source: Path, target: Path, stop: threading.Event | None = None) -> None:
    """Copy `source` to `target` (temp file, fsync, rename) and verify what was written; raises as check_local does."""
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shutil.copyfile(source, temp)
        check_local(wanted, temp, stop)
        with open(temp, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temp, target)
    except OSError as error:
        raise disk_error(error, target.parent) or UnsuitableError(
            f"{target}: {error.strerror}", "choose a writable folder"
        ) from None
    finally:
        temp.unlink(missing_ok=True)


class Download:
    """One file over HTTP into `part`, from where an earlier run stopped.

    `moved(count, by_wire)` is called as bytes arrive; not by wire are those of an earlier run and dropped ones (< 0).
    """

    def __init__(
        self, wanted: Wanted, access: Access, part: Path, stop: threading.Event, moved: Callable[[int, bool], None]
    ) -> None:
        self.wanted = wanted
        self.access = access
        self.part = part
        self.stop = stop
        self.moved = moved
        self.at = 0
        self.digest = hashlib.sha256()

    def run(self, url: str) -> None:
        """Bring all of `url`; afterwards `part` is the pinned file.

        Raises Absent, MismatchError (the part is removed), Stopped, or UnsuitableError (server unreachable, disk full:
        the part stays).
        """
        resumed = self._take_up()
        try:
            self._arrive(url)
            actual = self.digest.hexdigest()
            if actual != self.wanted.sha256 and resumed:
                # The old part may be from a broken disk or another server: the file deserves one try from its start.
                self._restart()
                self._arrive(url)
                actual = self.digest.hexdigest()
            if actual != self.wanted.sha256:
                raise MismatchError(self.wanted.file, "sha256", self.wanted.sha256, actual, split_login(url)[0])
        except MismatchError:
            self._restart()
            self.part.unlink(missing_ok=True)
            raise

    def _take_up(self) -> bool:
        try:
            have = self.part.stat().st_size
        except FileNotFoundError:
            return False
        if have > self.wanted.size:
            self.part.unlink()
            return False
        with open(self.part, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                self.digest.update(block)
                if self.stop.is_set():
                    raise Stopped
        self.at = have
        self.moved(have, False)
        return have > 0

    def _restart(self) -> None:
        self.moved(-self.at, False)
        self.at = 0
        self.digest = hashlib.sha256()
        if self.part.exists():
            os.truncate(self.part, 0)

    def _arrive(self, url: str) -> None:
        idle, furthest = 0, self.at
        failure: BaseException | None = None
        while self.at < self.wanted.size:
            try:
                self._once(url)
                failure = None
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 416 and self.at:
                    self._check_declared(error.headers.get("Content-Range", "").rpartition("/")[2], url)
                    failure = ConnectionError(f"the file ends at {self.at} of {self.wanted.size} bytes")
                    self._restart()
                elif _passing(error.code):
                    failure = _final(error, url)
                else:
                    raise _final(error, url) from None
            except _NETWORK as error:
                if isinstance(error, OSError):
                    full = disk_error(error, self.part.parent)
                    if full:
                        raise full from None
                if _is_tls(error):
                    raise unreachable(url, error) from None
                failure = error
            if self.at >= self.wanted.size:
                break
            # Only new ground counts: a file that is sent again and again, and never whole, would otherwise not end.
            idle = 0 if self.at > furthest else idle + 1
            furthest = max(furthest, self.at)
            if idle == IDLE_TRIES:
                raise unreachable(
                    url, failure or ConnectionError(f"the connection closes at {self.at} of {self.wanted.size} bytes")
                )
            if self.stop.wait(_pause(idle)):
                raise Stopped

    def _once(self, url: str) -> None:
        headers = {"Range": f"bytes={self.at}-"} if self.at else {}
        with self.access.get(url, headers) as response:
            self._check_size(response, url)
            if self.at and response.status != 206:
                self._restart()
            # Unbuffered, so that a kill at any moment leaves what was counted, and no more.
            with open(self.part, "ab", buffering=0) as out:
                while True:
                    if self.stop.is_set():
                        raise Stopped
                    # read1 takes what is there, so that a slow line still shows progress and keeps it when stopped.
                    block = response.read1(CHUNK)
                    if not block:
                        return
                    if self.at + len(block) > self.wanted.size:
                        raise MismatchError(
                            self.wanted.file,
                            "size",
                            f"{self.wanted.size} bytes",
                            f"{self.at + len(block)} bytes or more",
                            split_login(url)[0],
                        )
                    self._write(out, block)

    def _write(self, out: Any, block: bytes) -> None:
        view = memoryview(block)
        while view:
            count = out.write(view)
            self.digest.update(view[:count])
            self.at += count
            self.moved(count, True)
            view = view[count:]

    def _check_size(self, response: Any, url: str) -> None:
        """Refuse a file of another size before its bytes are worth a minute of anyone's line."""
        if response.status == 206:
            span = response.headers.get("Content-Range", "")
            start, _, total = span.partition(" ")[2].partition("/")
            if not start.startswith(f"{self.at}-"):
                raise http.client.HTTPException(f"asked for bytes from {self.at}, the server sends {span!r}")
            self._check_declared(total, url)
        elif response.headers.get("Content-Encoding", "identity") == "identity":
            self._check_declared(response.headers.get("Content-Length", ""), url)

    def _check_declared(self, total: str, url: str) -> None:
        if total.isdigit() and int(total) != self.wanted.size:
            raise MismatchError(
                self.wanted.file, "size", f"{self.wanted.size} bytes", f"{total} bytes", split_login(url)[0]
            )
