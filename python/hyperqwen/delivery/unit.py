"""The systemd unit of a profile. One list of directives makes the plain unit file and the NixOS module's serviceConfig.

Written for systemd 252 (Debian 12) and later. Every exception from the sandbox carries its reason, which the unit shows
as a comment. `checks/units.py` holds the result against systemd's own tools.
"""

from __future__ import annotations

import ipaddress
import re
import signal
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from hyperqwen.errors import BadInputError, HyperqwenError
from hyperqwen.patches.files import write_atomic
from hyperqwen.profiles.layers import find, shown
from hyperqwen.profiles.profile import Profile, knobs, load
from hyperqwen.runtime.keys import CREDENTIAL, SERVICE_KEY
from hyperqwen.runtime.ports import is_loopback_address

Device = Literal["cuda", "cpu"]
Value = bool | int | str | list[str]

MODELS = "/var/lib/hyperqwen/models"
"""Where a service sees the prepared models, wherever the host has them."""

GPU_WAIT_SECONDS = 300
WATCHDOG_SECONDS = 60
"""Without a sign of life for so long, systemd ends it; the launcher stops giving them some minutes into a stall."""
START_MARGIN_SECONDS = GPU_WAIT_SECONDS + 30
"""Seconds over the launcher's own limit, which says what was slow. The wait for the card has the same timeout."""
STOP_MARGIN_SECONDS = 30
"""Seconds after the drain for the engine to end; what is left then is killed."""

TERMINATED = 128 + signal.SIGTERM
"""The launcher's exit status for SIGTERM before it is ready."""

WIDTH = 120
# What systemd takes in a path without quotes, escapes and specifiers.
_PATH = re.compile(r"/[A-Za-z0-9._/+@-]*")
_BARE = re.compile(r"[A-Za-z0-9._/+@:=,-]+")
_NETWORK_NAMES = frozenset({"any", "localhost", "link-local", "multicast"})


@dataclass(frozen=True)
class Directive:
    """One key of a unit. A list gives one line an item, an empty text resets the key; `why` becomes a comment."""

    key: str
    value: Value
    why: str = ""

    def lines(self) -> list[str]:
        values = self.value if isinstance(self.value, list) else [self.value]
        return [f"{self.key}={_text(value)}" for value in values]


@dataclass(frozen=True)
class Unit:
    """A unit file: its name, and sections of directives in the order in which they are written."""

    name: str
    sections: Mapping[str, tuple[Directive, ...]]

    def get(self, section: str, key: str) -> Value:
        """The value of `key`; raises KeyError where the section does not have it."""
        for directive in self.sections[section]:
            if directive.key == key:
                return directive.value
        raise KeyError(f"[{section}] {key}")

    def text(self) -> str:
        """The file, ending in a newline."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"# Made by hyperqwen.delivery.unit; `systemctl edit {self.name}` changes it for this host."
        for section, directives in self.sections.items():
            yield f"\n[{section}]"
            for directive in directives:
                if directive.why:
                    yield from textwrap.wrap(
                        directive.why,
                        WIDTH,
                        initial_indent="# ",
                        subsequent_indent="# ",
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                yield from directive.lines()
        yield ""


_LIFE = (
    Directive("Type", "notify", "Started means that the first token has come out, not that a port is open."),
    Directive("NotifyAccess", "main"),
    Directive(
        "WatchdogSec",
        WATCHDOG_SECONDS,
        "Fed while the engine makes progress or has nothing to do; /health answers while the engine hangs.",
    ),
    Directive("Restart", "on-failure"),
    Directive("RestartSec", 20, "A process that was killed needs seconds to give the card's memory back."),
    Directive(
        "RestartPreventExitStatus",
        "2 3 4 5",
        "Bad input, an unsuitable host, a missing file, wrong bytes: the next start would only say the same.",
    ),
    Directive(
        "SuccessExitStatus", TERMINATED, "What the launcher ends with when SIGTERM comes before READY: nothing failed."
    ),
    Directive("KillMode", "mixed", "SIGTERM goes to the launcher alone, which lets running requests finish."),
    Directive("LimitNOFILE", 65536),
    Directive("LimitCORE", 0, "A core dump would hold prompts and the key."),
)

_SANDBOX = (
    Directive("DynamicUser", True),
    Directive("UMask", "0077"),
    Directive("StateDirectoryMode", "0700"),
    Directive("CacheDirectoryMode", "0700"),
    Directive("RuntimeDirectoryMode", "0700"),
    Directive("CapabilityBoundingSet", ""),
    Directive("AmbientCapabilities", ""),
    Directive("NoNewPrivileges", True),
    Directive("KeyringMode", "private"),
    Directive("LockPersonality", True),
    Directive("PrivateIPC", True),
    Directive("PrivateMounts", True),
    Directive("PrivateTmp", True),
    Directive(
        "PrivateUsers",
        True,
        "On: CUDA works in a user namespace, for the driver's nodes are open to every user, or to the group that a "
        "drop-in's SupplementaryGroups= names.",
    ),
    Directive("ProtectClock", True),
    Directive("ProtectControlGroups", True),
    Directive("ProtectHome", True),
    Directive("ProtectHostname", True),
    Directive("ProtectKernelLogs", True),
    Directive("ProtectKernelModules", True),
    Directive("ProtectKernelTunables", True),
    Directive("ProtectProc", "invisible"),
    Directive("ProtectSystem", "strict"),
    Directive("RemoveIPC", True),
    Directive("RestrictNamespaces", True),
    Directive("RestrictRealtime", True),
    Directive("RestrictSUIDSGID", True),
    Directive("SystemCallArchitectures", "native"),
    Directive("SystemCallErrorNumber", "EPERM"),
    Directive(
        "SystemCallFilter",
        ["@system-service", "~@privileged"],
        "@resources, which is in the first set, stays: NCCL and OpenMP bind threads to cores.",
    ),
    Directive(
        "MemoryDenyWriteExecute",
        False,
        "Off: numba (n-gram drafts) and oneDNN (the CPU's products) write the code that they run.",
    ),
    Directive("ProcSubset", "all", "Not pid: the launcher and CUDA read /proc/meminfo, /proc/cpuinfo, /proc/driver."),
    Directive(
        "RestrictAddressFamilies",
        ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"],
        "AF_NETLINK: Gloo and NCCL list the interfaces. AF_UNIX: the engine's processes and systemd's notify socket.",
    ),
)

_DEVICES: Mapping[Device, tuple[Directive, ...]] = {
    "cuda": (
        Directive(
            "PrivateDevices",
            False,
            "Off: it would hide the card. The policy is closed but for the driver's nodes, by their groups in "
            "/proc/devices, and WSL2's. Old drivers call nvidia nvidia-frontend: shut out, one that is too old would "
            "look like none.",
        ),
        Directive("DevicePolicy", "closed"),
        Directive(
            "DeviceAllow",
            [
                "char-nvidia rw",
                "char-nvidiactl rw",
                "char-nvidia-frontend rw",
                "char-nvidia-uvm rw",
                "char-nvidia-caps rw",
                "/dev/dxg rw",
            ],
        ),
        Directive(
            "LimitMEMLOCK",
            "infinity",
            "Host memory that the card reads is pinned; whether that counts as locked is the driver's affair.",
        ),
    ),
    "cpu": (Directive("PrivateDevices", True), Directive("DevicePolicy", "closed")),
}


def service_config(
    profile: Profile,
    *,
    program: str,
    changes: Mapping[str, Any] | None = None,
    key: str | None = SERVICE_KEY,
    models: str = MODELS,
    clients: Sequence[str] = (),
) -> Unit:
    """The unit that serves `profile`.

    Args:
        program: absolute path of hyperqwen-serve.
        changes: knobs that this unit sets over the profile ("server.host" to "0.0.0.0"); they become flags and so win
            over the host file and the environment file.
        key: the host's key file, handed over as a credential; None serves without a key.
        models: the host's folder of prepared models, which may be below /home. Bound to `MODELS` if it is elsewhere.
        clients: for a server beyond loopback, the networks that may reach it: "192.168.0.0/16", or "any".

    Raises BadInputError with all problems.
    """
    changes = changes or {}
    wrong = sorted(set(changes) - {knob.path for knob in knobs()})
    if wrong:
        raise BadInputError(f"no knob is called {', '.join(wrong)}", "use the names of docs/profiles.md")
    profile = profile.with_values(changes)
    _check(profile, program, key, models, clients)
    flags = [word for knob in knobs() if knob.path in changes for word in (knob.flag, shown(knob, changes[knob.path]))]
    command = " ".join(quoted(word) for word in [program, "--profile", profile.name, "--verbose", *flags])
    unit = Unit(
        f"hyperqwen-{profile.name}.service",
        {
            "Unit": tuple(_unit(profile, key, models)),
            "Service": tuple(_service(profile, command, key, models, clients)),
            "Install": (Directive("WantedBy", "multi-user.target"),),
        },
    )
    return unit


def nixos_service_config(device: Device) -> dict[str, Value]:
    """What every unit of that device has in [Service], as NixOS's serviceConfig takes it and JSON can carry it.

    The module adds what an instance decides: the Exec lines, folders, the credential, times, and IPAddressAllow, which
    lets in loopback alone here.
    """
    return {directive.key: directive.value for directive in (*_LIFE, *_SANDBOX, *_DEVICES[device], *_network(()))}


def quoted(word: str) -> str:
    """`word` as one argument of an Exec line, with nothing for systemd to expand."""
    if _BARE.fullmatch(word):
        return word
    escapes = {'"': '\\"', "\\": "\\\\", "%": "%%", "$": "$$"}
    return '"' + "".join(escapes.get(c, f"\\x{ord(c):02x}" if ord(c) < 0x20 else c) for c in word) + '"'


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is for its own machine alone.

    localhost is taken at its word: the unit is written for another machine, whose launcher resolves the name.
    """
    return host == "localhost" or is_loopback_address(host)


def _unit(profile: Profile, key: str | None, models: str) -> Iterator[Directive]:
    yield Directive("Description", f"HyperQwen {profile.name} ({profile.title})".replace("%", "%%"))
    after = ["network.target"]
    if profile.device == "cuda":
        # Loads the module before this unit's device policy is made: a group that /proc/devices does not list yet would
        # be left out of it, and the nodes would then stay closed however long the wait.
        module = "modprobe@nvidia_uvm.service"
        after += ["nvidia-persistenced.service", module]
        yield Directive(
            "Wants",
            module,
            "The device policy below knows what /proc/devices lists when this unit starts: the module comes first.",
        )
    if not is_loopback(profile.server.host):
        yield Directive("Wants", "network-online.target", "The address to listen on has to be there.")
        after.append("network-online.target")
    yield Directive("After", " ".join(after))
    if key is not None:
        yield Directive("AssertPathExists", key, "Refused by name, rather than served without a key.")
    if models != MODELS:
        yield Directive("AssertPathIsDirectory", models)
    yield Directive("StartLimitIntervalSec", 3600, "The budget of restarts: five in an hour, then it stays failed.")
    yield Directive("StartLimitBurst", 5)


def _service(
    profile: Profile, command: str, key: str | None, models: str, clients: Sequence[str]
) -> Iterator[Directive]:
    name = f"hyperqwen/{profile.name}"
    if profile.device == "cuda":
        yield Directive(
            "ExecStartPre",
            f"-{command} --preflight-only --wait {GPU_WAIT_SECONDS}",
            "Waits for /dev/nvidia-uvm and a free card. Its failure is ignored: the start below finds the same, and a "
            "restart is decided on the exit status of the main process alone.",
        )
    yield Directive(
        "ExecStart",
        command,
        "--verbose: what the engine says is the journal's to keep and to bound, not a file's that only root finds.",
    )
    yield from _LIFE
    yield Directive(
        "TimeoutStartSec",
        profile.server.start_seconds + START_MARGIN_SECONDS,
        "The first start compiles kernels for minutes; before this, the launcher ends one that takes too long itself.",
    )
    yield Directive("TimeoutStopSec", profile.server.drain_seconds + STOP_MARGIN_SECONDS)
    yield Directive(
        "EnvironmentFile",
        f"-/etc/hyperqwen/{profile.name}.env",
        "Knobs of this host, HYPERQWEN_SECTION_KEY=value; /etc/hyperqwen/host.toml counts as well. No key in either.",
    )
    yield Directive(
        "Environment",
        [
            f"HOME=/var/lib/{name}",
            f"HYPERQWEN_CACHE_DIR=/var/cache/{name}",
            f"HYPERQWEN_MODELS={MODELS}",
        ],
    )
    yield Directive("StateDirectory", name)
    yield Directive("CacheDirectory", name)
    yield Directive("RuntimeDirectory", name)
    if models != MODELS:
        yield Directive("BindReadOnlyPaths", f"{models}:{MODELS}")
    if key is not None:
        yield Directive("LoadCredential", f"{CREDENTIAL}:{key}")
    yield from _SANDBOX
    yield from _DEVICES[profile.device]
    yield from _network(clients)


def _network(clients: Sequence[str]) -> Iterator[Directive]:
    yield Directive(
        "IPAddressDeny",
        "any",
        "Both ways: nothing is fetched or reported. A server beyond loopback names its clients' networks here.",
    )
    yield Directive("IPAddressAllow", ["localhost", *clients])


def _check(profile: Profile, program: str, key: str | None, models: str, clients: Sequence[str]) -> None:
    problems = []
    for what, path in (("program", program), ("key", key), ("models", models)):
        if path is not None and not _PATH.fullmatch(path):
            problems.append(f"{what} is {path!r}: give an absolute path of letters, digits and . _ - + @ /")
    host = profile.server.host
    if is_loopback(host):
        if clients:
            problems.append(
                f"clients is {', '.join(clients)}, but server.host is {host}: leave clients out, or change server.host"
            )
    else:
        if key is None:
            problems.append(f"server.host is {host} and there is no key: name a key file, or listen on 127.0.0.1")
        if not clients:
            problems.append(
                f"server.host is {host} and nobody may reach it: name the clients' networks (192.168.0.0/16), or any"
            )
    problems += [f"clients has {text!r}: {problem}" for text in clients if (problem := _network_problem(text))]
    if problems:
        raise BadInputError("\n".join(problems))


def _network_problem(text: str) -> str | None:
    if text in _NETWORK_NAMES:
        return None
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        return f"{error}; write it as in 192.168.0.0/16 or fd00::/8, or any"
    return None


def _text(value: bool | int | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


@click.command()
@click.option("--profile", required=True, help="Name or file of the profile.")
@click.option("--program", required=True, help="Absolute path of hyperqwen-serve.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write lib/systemd/system below.")
def main(profile: str, program: str, out: Path) -> None:
    """Write a profile's unit, as a package of units has it. Takes nothing from this host."""
    try:
        unit = service_config(load(find(profile)), program=program)
        folder = out / "lib" / "systemd" / "system"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / unit.name, unit.text().encode())
    except HyperqwenError as error:
        click.echo(f"unit: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
