from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen import share
from hyperqwen.delivery.unit import (
    MODELS,
    START_MARGIN_SECONDS,
    STOP_MARGIN_SECONDS,
    Directive,
    Unit,
    is_loopback,
    nixos_service_config,
    quoted,
    service_config,
)
from hyperqwen.errors import BadInputError
from hyperqwen.profiles.profile import Profile, load, shipped
from hyperqwen.runtime import ports

PROGRAM = "/nix/store/0c0c-serve/bin/hyperqwen-serve"
PROFILES = {name: load(path) for name, path in shipped().items()}
GPU = sorted(name for name, profile in PROFILES.items() if profile.device == "cuda")


@pytest.fixture(params=sorted(PROFILES))
def profile(request: pytest.FixtureRequest) -> Profile:
    return PROFILES[request.param]


def lines(unit: Unit) -> list[str]:
    return unit.text().splitlines()


def parsed(text: str) -> dict[str, dict[str, list[str]]]:
    """A unit file as systemd reads it: sections of keys with the values of all their lines."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            sections[line[1:-1]] = {}
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            list(sections.values())[-1].setdefault(key, []).append(value)
    return sections


def unquoted(text: str) -> list[str]:
    """Words of an Exec line as systemd.service(5) says: quotes, escapes, then specifiers and variables."""
    words, at = [], 0
    while at < len(text):
        if text[at] == " ":
            at += 1
            continue
        word = ""
        if text[at] == '"':
            at += 1
            while text[at] != '"':
                if text[at] == "\\" and text[at + 1] == "x":
                    word += chr(int(text[at + 2 : at + 4], 16))
                    at += 4
                elif text[at] == "\\":
                    word += text[at + 1]
                    at += 2
                else:
                    word += text[at]
                    at += 1
            at += 1
        else:
            end = text.find(" ", at)
            word = text[at:] if end < 0 else text[at:end]
            at += len(word)
        assert not re.search(r"(?<!%)(?:%%)*%(?!%)", word), "a specifier"
        assert not re.search(r"(?<!\$)(?:\$\$)*\$(?!\$)", word), "a variable"
        words.append(word.replace("%%", "%").replace("$$", "$"))
    return words


def test_a_unit_reads_back_as_what_was_meant(profile: Profile) -> None:
    unit = service_config(profile, program=PROGRAM)
    sections = parsed(unit.text())
    assert list(sections) == ["Unit", "Service", "Install"]
    for name, directives in unit.sections.items():
        meant: dict[str, list[str]] = {}
        for directive in directives:
            meant.setdefault(directive.key, []).extend(line.partition("=")[2] for line in directive.lines())
        assert sections[name] == meant
    assert unit.name == f"hyperqwen-{profile.name}.service"
    assert unit.text().endswith("\n") and not unit.text().endswith("\n\n")
    assert max(map(len, lines(unit))) <= 120


def test_the_times_are_the_profiles(profile: Profile) -> None:
    service = parsed(service_config(profile, program=PROGRAM).text())["Service"]
    assert service["TimeoutStartSec"] == [str(profile.server.start_seconds + START_MARGIN_SECONDS)]
    assert service["TimeoutStopSec"] == [str(profile.server.drain_seconds + STOP_MARGIN_SECONDS)]
    slow = profile.with_values({"server.drain_seconds": 600, "server.start_seconds": 7200})
    service = parsed(service_config(slow, program=PROGRAM).text())["Service"]
    assert (service["TimeoutStartSec"], service["TimeoutStopSec"]) == (["7530"], ["630"])


def test_the_program_starts_with_the_profile_alone(profile: Profile) -> None:
    """A flag would win over /etc/hyperqwen/host.toml, which then could not change it."""
    service = parsed(service_config(profile, program=PROGRAM).text())["Service"]
    assert service["ExecStart"] == [f"{PROGRAM} --profile {profile.name} --verbose"]


@pytest.mark.parametrize("name", GPU)
def test_a_unit_with_a_gpu_waits_for_it_and_sees_nothing_else(name: str) -> None:
    sections = parsed(service_config(PROFILES[name], program=PROGRAM).text())
    service = sections["Service"]
    (wait,) = service["ExecStartPre"]
    assert wait.startswith(f"-{PROGRAM} --profile {name} --verbose --preflight-only --wait ")
    assert int(wait.split()[-1]) < int(service["TimeoutStartSec"][0])
    assert service["PrivateDevices"] == ["no"] and service["DevicePolicy"] == ["closed"]
    assert {value.split()[0] for value in service["DeviceAllow"]} == {
        "char-nvidia",
        "char-nvidia-caps",
        "char-nvidia-frontend",
        "char-nvidia-uvm",
        "char-nvidiactl",
        "/dev/dxg",
    }
    module = "modprobe@nvidia_uvm.service"
    assert module in sections["Unit"]["Wants"] and module in sections["Unit"]["After"][0].split()


def test_a_unit_without_a_gpu_has_no_devices() -> None:
    sections = parsed(service_config(PROFILES["demo"], program=PROGRAM).text())
    service = sections["Service"]
    assert service["PrivateDevices"] == ["yes"]
    assert not {"ExecStartPre", "DeviceAllow", "LimitMEMLOCK"} & set(service)
    assert "nvidia" not in " ".join(sections["Unit"]["After"])


def test_what_the_sandbox_leaves_open_says_why(profile: Profile) -> None:
    unit = service_config(profile, program=PROGRAM)
    given = {d.key: d for d in unit.sections["Service"]}
    exceptions = ["MemoryDenyWriteExecute", "ProcSubset", "RestrictAddressFamilies", "SystemCallFilter"]
    if profile.device == "cuda":
        exceptions += ["PrivateDevices", "LimitMEMLOCK", "ExecStartPre"]
    assert [key for key in exceptions if len(given[key].why) < 20] == []
    # Whatever else is off or open has to be listed above, with its reason.
    weak = {key for key, d in given.items() if d.value is False or d.value in ("all", "infinity")}
    assert weak <= set(exceptions)


def test_bad_input_and_the_like_do_not_start_again(profile: Profile) -> None:
    service = parsed(service_config(profile, program=PROGRAM).text())["Service"]
    assert service["Restart"] == ["on-failure"]
    assert service["RestartPreventExitStatus"][0].split() == ["2", "3", "4", "5"]
    assert service["SuccessExitStatus"] == ["143"]


def test_no_key_in_the_unit_only_where_it_is(profile: Profile) -> None:
    sections = parsed(service_config(profile, program=PROGRAM, key="/run/keys/api").text())
    assert sections["Service"]["LoadCredential"] == ["api-key:/run/keys/api"]
    assert sections["Unit"]["AssertPathExists"] == ["/run/keys/api"]
    without = parsed(service_config(profile, program=PROGRAM, key=None).text())
    assert "LoadCredential" not in without["Service"] and "AssertPathExists" not in without["Unit"]


def test_models_elsewhere_are_bound_to_their_place() -> None:
    plain = parsed(service_config(PROFILES["B"], program=PROGRAM).text())
    assert "BindReadOnlyPaths" not in plain["Service"]
    assert f"HYPERQWEN_MODELS={MODELS}" in plain["Service"]["Environment"]
    sections = parsed(service_config(PROFILES["B"], program=PROGRAM, models="/home/me/models").text())
    assert sections["Service"]["BindReadOnlyPaths"] == [f"/home/me/models:{MODELS}"]
    assert sections["Service"]["ProtectHome"] == ["yes"]
    assert sections["Unit"]["AssertPathIsDirectory"] == ["/home/me/models"]
    assert f"HYPERQWEN_MODELS={MODELS}" in sections["Service"]["Environment"]


def test_loopback_lets_in_nobody_else(profile: Profile) -> None:
    service = parsed(service_config(profile, program=PROGRAM).text())["Service"]
    assert (service["IPAddressDeny"], service["IPAddressAllow"]) == (["any"], ["localhost"])


def test_beyond_loopback_lets_in_the_networks_named() -> None:
    unit = service_config(
        PROFILES["B"],
        program=PROGRAM,
        changes={"server.host": "0.0.0.0", "server.port": 8000},
        clients=("192.168.0.0/16", "fd00::/8"),
    )
    sections = parsed(unit.text())
    service = sections["Service"]
    assert service["ExecStart"] == [f"{PROGRAM} --profile B --verbose --server-host 0.0.0.0 --server-port 8000"]
    assert service["IPAddressDeny"] == ["any"]
    assert service["IPAddressAllow"] == ["localhost", "192.168.0.0/16", "fd00::/8"]
    assert (
        "network-online.target" in sections["Unit"]["After"][0] and "network-online.target" in sections["Unit"]["Wants"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": "bin/serve"}, "program is 'bin/serve'"),
        ({"program": "/opt/a b/serve"}, "program is '/opt/a b/serve'"),
        ({"key": "/etc/a:b"}, "key is '/etc/a:b'"),
        ({"models": "models"}, "models is 'models'"),
        ({"models": "/srv/%h"}, "models is '/srv/%h'"),
        ({"changes": {"server.host": "0.0.0.0"}}, "server.host is 0.0.0.0 and nobody may reach it"),
        ({"changes": {"server.host": "0.0.0.0"}, "clients": ("any",), "key": None}, "there is no key"),
        ({"clients": ("192.168.0.0/16",)}, "server.host is 127.0.0.1"),
        ({"changes": {"server.host": "::"}, "clients": ("192.168.0.1/16",)}, "clients has '192.168.0.1/16'"),
        ({"changes": {"server.host": "::"}, "clients": ("everyone",)}, "clients has 'everyone'"),
        ({"changes": {"server.hots": "::"}}, "no knob is called server.hots"),
    ],
)
def test_bad_input_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        service_config(PROFILES["B"], **{"program": PROGRAM, **arguments})  # type: ignore[arg-type]


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(BadInputError) as caught:
        service_config(PROFILES["B"], program="serve", key="key", clients=("any",))
    assert len(str(caught.value).splitlines()) == 3


@given(st.lists(st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"])), max_size=4))
def test_a_quoted_word_is_that_word_to_systemd(words: list[str]) -> None:
    text = " ".join(map(quoted, words))
    assert "\n" not in text
    assert unquoted(text) == words


def test_quoting_is_for_words_that_need_it() -> None:
    assert [quoted(word) for word in ("--a-b", "/x/y=z", "a b", "", "100%", "$HOME", '"', ";")] == [
        "--a-b",
        "/x/y=z",
        '"a b"',
        '""',
        '"100%%"',
        '"$$HOME"',
        '"\\""',
        '";"',
    ]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("box", False), ("192.168.1.2", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_localhost_is_not_asked_of_the_machine_that_writes_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(*_: object, **__: object) -> list[object]:
        return [(2, 1, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", elsewhere)
    assert is_loopback("localhost") and not ports.is_loopback("localhost")


def test_nixos_gets_what_the_unit_has(profile: Profile) -> None:
    config = nixos_service_config(profile.device)
    assert json.loads(json.dumps(config)) == config
    unit = service_config(profile, program=PROGRAM)
    assert {key: unit.get("Service", key) for key in config} == config
    # What is left is what an instance decides.
    rest = {directive.key for directive in unit.sections["Service"]} - set(config)
    assert rest - {"ExecStartPre"} == {
        "CacheDirectory",
        "Environment",
        "EnvironmentFile",
        "ExecStart",
        "LoadCredential",
        "RuntimeDirectory",
        "StateDirectory",
        "TimeoutStartSec",
        "TimeoutStopSec",
    }


def test_no_key_is_given_twice(profile: Profile) -> None:
    """In serviceConfig a key is an attribute: a second one would replace the first without a word."""
    keys = [directive.key for directive in service_config(profile, program=PROGRAM).sections["Service"]]
    assert len(keys) == len(set(keys))


def test_a_directive_as_text() -> None:
    assert Directive("A", True).lines() == ["A=yes"]
    assert Directive("A", False).lines() == ["A=no"]
    assert Directive("A", 20).lines() == ["A=20"]
    assert Directive("A", "").lines() == ["A="]
    assert Directive("A", ["x", "y"]).lines() == ["A=x", "A=y"]
    with pytest.raises(KeyError, match=r"\[Unit\] A"):
        Unit("u.service", {"Unit": ()}).get("Unit", "A")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-m", "hyperqwen.delivery.unit", *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def test_a_package_of_a_unit(tmp_path: Path) -> None:
    done = run("--profile", str(share.folder("profiles") / "B.toml"), "--program", PROGRAM, "--out", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file == tmp_path / "lib/systemd/system/hyperqwen-B.service"
    assert file.read_text() == service_config(PROFILES["B"], program=PROGRAM).text()


def test_a_unit_that_cannot_be_is_not_written(tmp_path: Path) -> None:
    done = run("--profile", "B", "--program", shlex.quote("bin/serve"), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "program is 'bin/serve'" in done.stderr
    assert not (tmp_path / "out").exists()
