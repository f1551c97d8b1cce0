"""The demo's unit really started, by what of systemd a build can be: its commands, environment, credential, system call
rules, notify socket and watchdog. Stopped while it loads, it has not failed; started again, it gets ready, answers,
shows life, drains and stops.

spec: unit (folder with lib/systemd/system), tools (systemd-analyze, libseccomp), confine (confine.py).
"""

import contextlib
import json
import os
import pathlib
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

KEY = "the-key-of-this-check"
# The unit's own watchdog is minutes; the launcher takes its pace from the variable.
WATCHDOG_SECONDS = 6.0
PREFIXES = ("/var/lib/", "/var/cache/")

# What a process may and may not do under the unit's rules: errno by name, or "" where it has to work.
RULES = {
    "socket AF_PACKET": "EAFNOSUPPORT",
    "socket AF_VSOCK": "EAFNOSUPPORT",
    "socket AF_NETLINK": "",
    "chown": "EPERM",
    "ptrace": "EPERM",
    "unshare": "EPERM",
    "sched_setaffinity": "",
}
PROBE = """
import ctypes, errno, json, os, socket

c = ctypes.CDLL(None, use_errno=True)

def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

tried = {
    "socket AF_PACKET": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "socket AF_VSOCK": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
    "socket AF_NETLINK": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "chown": lambda: os.chown(os.environ["TMPDIR"], os.getuid(), -1),
    "ptrace": lambda: call(c.ptrace, 0, 0, 0, 0),
    "unshare": lambda: call(c.unshare, 1 << 28),
    "sched_setaffinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
}
found = {}
for name, function in tried.items():
    try:
        function()
        found[name] = ""
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, str(error.errno))
print(json.dumps(found))
"""


class Service:
    """A unit's [Service], and the process that it describes."""

    def __init__(self, file: pathlib.Path, root: pathlib.Path) -> None:
        self.file, self.root = file, root
        self.values: dict[str, list[str]] = {}
        section = ""
        for line in file.read_text().splitlines():
            if line.startswith("["):
                section = line
            elif section == "[Service]" and line and not line.startswith("#"):
                key, _, value = line.partition("=")
                self.values.setdefault(key, []).append(value)
        root.mkdir()
        self.notified: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(root / "notify"))

    def one(self, key: str) -> str:
        (value,) = self.values[key]
        return value

    def command(self, key: str) -> list[str]:
        text = self.one(key)
        if "%" in text or "$" in text:
            sys.exit(f"{key} has something to expand, which this check does not do: {text}")
        return shlex.split(text.lstrip("-"))

    def environment(self, port: int) -> dict[str, str]:
        """Variables as systemd sets them; folders of the host are moved below the build's own."""
        folders = {}
        for key, top in (("State", "/var/lib"), ("Cache", "/var/cache"), ("Runtime", "/run")):
            folder = pathlib.Path(f"{self.root}{top}/{self.one(f'{key}Directory')}")
            folder.mkdir(parents=True, mode=int(self.one(f"{key}DirectoryMode"), 8))
            folders[f"{key.upper()}_DIRECTORY"] = str(folder)
        name, _, _ = self.one("LoadCredential").partition(":")
        credentials = self.root / "credentials"
        credentials.mkdir(mode=0o700)
        (credentials / name).write_text(KEY + "\n")
        # An access list for the service's user shows as the group's bits.
        (credentials / name).chmod(0o440)
        given = dict(pair.split("=", 1) for pair in self.values["Environment"])
        for variable, value in given.items():
            if value.startswith(PREFIXES):
                given[variable] = f"{self.root}{value}"
        # What the optional EnvironmentFile of a host would say.
        given["HYPERQWEN_SERVER_PORT"] = str(port)
        # The demo's own is for an idle machine; what runs at SIGTERM here is long, and a builder may have much to do.
        given["HYPERQWEN_SERVER_DRAIN_SECONDS"] = "60"
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
            "LANG": "C.UTF-8",
            "TMPDIR": os.environ["NIX_BUILD_TOP"],
            "NOTIFY_SOCKET": str(self.root / "notify"),
            "WATCHDOG_USEC": str(round(WATCHDOG_SECONDS * 1e6)),
            "CREDENTIALS_DIRECTORY": str(credentials),
            **folders,
            **given,
        }

    def hear(self, seconds: float) -> list[str]:
        """The lines of what arrives within `seconds`; at once when something does."""
        ready, _, _ = select.select([self._socket], [], [], max(0.0, seconds))
        if not ready:
            return []
        lines = self._socket.recv(65536).decode().splitlines()
        self.notified += lines
        return lines

    def count(self, line: str, seconds: float) -> int:
        """How often `line` is said within `seconds`."""
        end, times = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0:
            times += self.hear(left).count(line)
        return times


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(service: Service, confine: list[str], environment: dict[str, str]) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen(
        [*confine, *service.command("ExecStart")], env=environment, cwd="/", start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()


def until_loading(service: Service, process: "subprocess.Popen[bytes]") -> None:
    """Until the launcher has said what it does: from then on it takes signals."""
    end = time.monotonic() + float(service.one("TimeoutStartSec"))
    while not any(line.startswith("STATUS=") for line in service.hear(1.0)):
        if process.poll() is not None:
            sys.exit(f"ended with {process.returncode} while it loaded; it had said {service.notified}")
        if time.monotonic() > end:
            sys.exit(f"said nothing of its loading; it had said {service.notified}")


def until_ready(service: Service, process: "subprocess.Popen[bytes]") -> float:
    began = time.monotonic()
    limit = float(service.one("TimeoutStartSec"))
    while "READY=1" not in service.hear(1.0):
        if process.poll() is not None:
            sys.exit(f"ended with {process.returncode} before it was ready; it had said {service.notified}")
        if time.monotonic() - began > limit:
            sys.exit(f"not ready in {limit:g} s; it had said {service.notified}")
    return time.monotonic() - began


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    (unit,) = pathlib.Path(spec["unit"], "lib/systemd/system").iterdir()
    service = Service(unit, pathlib.Path(os.environ["NIX_BUILD_TOP"]) / "host")
    port, problems, report = free_port(), [], []

    def expect(what: str, found: Any, expected: Any) -> None:
        if found != expected:
            problems.append(f"{what}: expected {expected!r}, found {found!r}")

    confine = [sys.executable, "-I", "-B", spec["confine"], spec["tools"], str(unit)]
    environment = service.environment(port)
    probe = subprocess.run(
        [*confine, sys.executable, "-I", "-c", PROBE], env=environment, check=True, stdout=subprocess.PIPE
    )
    expect("calls under the unit's rules", json.loads(probe.stdout), RULES)
    with started(service, confine, environment) as process:
        until_loading(service, process)
        process.send_signal(signal.SIGTERM)
        status = process.wait(float(service.one("TimeoutStopSec")))
        clean = [0, *(int(word) for word in service.one("SuccessExitStatus").split())]
        if status not in clean:
            problems.append(f"SIGTERM while it loads: exit status {status}, which is a failure beside {clean}")
        report.append(f"SIGTERM while it loads: exit status {status}, which the unit counts as a success\n")
        service.count("", 0.2)
        expect("READY=1 before SIGTERM", "READY=1" in service.notified, False)
        # What the first life said is no sign of the second.
        service.notified.clear()
    with started(service, confine, environment) as process:
        report.append(f"READY=1 after {until_ready(service, process):.0f} s, in the unit's system call rules\n")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            prompt: dict[str, Any] = {"model": "nano", "prompt": "Who?", "max_tokens": 8, "temperature": 0}
            headers = {"Authorization": f"Bearer {KEY}"}
            expect("status without the key", client.post("/v1/completions", json=prompt).status_code, 401)
            answer = client.post("/v1/completions", json=prompt, headers=headers)
            expect("status with the credential's key", answer.status_code, 200)
            if answer.status_code == 200:
                expect("tokens", answer.json()["usage"]["completion_tokens"], 8)

            idle = service.count("WATCHDOG=1", 2 * WATCHDOG_SECONDS)
            if idle < 2:
                problems.append(f"idle: {idle} signs of life in two watchdog times, at least 2 expected")
            report.append(
                f"{idle} signs of life in {2 * WATCHDOG_SECONDS:g} s; a watchdog time without one is the end\n"
            )

            long = {**prompt, "max_tokens": 1500, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=long, headers=headers) as stream:
                lines = (line for line in stream.iter_lines() if line)
                next(lines)
                # KillMode=mixed: to the main process alone.
                process.send_signal(signal.SIGTERM)
                rest = list(lines)
            expect("end of the stream that was running at SIGTERM", rest[-1:], ["data: [DONE]"])
            report.append(f"SIGTERM: the running request got its other {len(rest) - 1} events\n")
        began = time.monotonic()
        try:
            expect("exit status", process.wait(float(service.one("TimeoutStopSec"))), 0)
        except subprocess.TimeoutExpired:
            problems.append(f"still there {service.one('TimeoutStopSec')} s after SIGTERM")
        report.append(f"ended {time.monotonic() - began:.1f} s after the last answer\n")
        service.count("", 0.2)
        if "STOPPING=1" not in service.notified:
            problems.append("STOPPING=1 was not said")
    if any(KEY in line for line in service.notified):
        problems.append("the key is in what was said to the service manager")
    if problems:
        sys.exit("\n".join(problems))
    print("".join(report))
    with open(os.environ["out"], "w") as file:
        file.writelines(report)


main()
