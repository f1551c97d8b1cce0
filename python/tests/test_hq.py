from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen import hq
from hyperqwen.cli import demo
from hyperqwen.errors import BadInputError, UnsuitableError

S = "x86_64-linux"
HASH = "0000000000000000000000000000000a"

# As 2.8.0 prints it: a heading for what is built, another for what a cache has.
REPORT_2_8 = f"""\
warning: Git tree '/home/u/hyperqwen' is dirty
these 3 derivations will be built:
  /nix/store/{HASH}-busybox-1.35.0.drv
  /nix/store/{HASH}-torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.drv
  /nix/store/{HASH}-libgcc-s1_12.2.0-14+deb12u1_amd64.deb.drv
these 2 paths will be fetched (0.04 MiB download, 0.20 MiB unpacked):
  /nix/store/{HASH}-hello-2.12
  /nix/store/{HASH}-glibc-2.36
"""
# As 2.34.8 prints it on a terminal that has colours.
REPORT_2_34 = (
    f"\x1b[35;1mwarning:\x1b[0m Git tree '/x' is dirty\n"
    f"this derivation will be built:\n  /nix/store/{HASH}-demo.drv\n"
    f"\x1b[0mthis path will be fetched (1.0 KiB download, 2.0 KiB unpacked):\n  /nix/store/{HASH}-x\n"
)


def test_what_would_be_built() -> None:
    assert sorted(hq.derivations(REPORT_2_8)) == [
        "busybox-1.35.0",
        "libgcc-s1_12.2.0-14+deb12u1_amd64.deb",
        "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    ]
    assert hq.derivations(REPORT_2_34) == {"demo": f"/nix/store/{HASH}-demo.drv"}
    assert hq.derivations("warning: nothing to do\n") == {}


def test_a_store_elsewhere() -> None:
    assert hq.derivations(f"  /home/u/st/nix/store/{HASH}-a.drv\n") == {"a": f"/home/u/st/nix/store/{HASH}-a.drv"}


@given(st.text())
def test_any_output_can_be_read(text: str) -> None:
    assert all(path.endswith(f"-{name}.drv") for name, path in hq.derivations(text).items())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("build", [["."]]),
        ("build .#nano .#demo", [[".#nano", ".#demo"]]),
        ("build --no-link -L .#nano", [[".#nano"]]),
        ("build -o out .#nano", [[".#nano"]]),
        ("build .#nano --out-link out --max-jobs 2 --option cores 1", [[".#nano"]]),
        ("--option a b build .#nano", [[".#nano"]]),
        ("run", [["."]]),
        ("run .#demo", [[".#demo"]]),
        ("run .#demo -- --once x --port 1", [[".#demo"]]),
        ("run .#demo more words", [[".#demo"]]),
        ("run .#apps.x86_64-linux.demo", [[".#packages.x86_64-linux.demo"]]),
        ("run -L /c#apps.x86_64-linux.demo.program", [["/c#packages.x86_64-linux.demo"]]),
        ("shell .#tools .#nano -c hyperqwen --help", [[".#tools", ".#nano"]]),
        ("shell .#tools --command sh", [[".#tools"]]),
        ("develop", [[f".#devShells.{S}.default"], ["."]]),
        ("develop .#x -c make", [[f".#devShells.{S}.x"], [".#x"]]),
        ("flake check", [[f".#packages.{S}.checks-all"]]),
        ("flake check -L /c --keep-going", [[f"/c#packages.{S}.checks-all"]]),
        ("fmt", [[f".#formatter.{S}"]]),
        ("profile install .#tools", [[".#tools"]]),
        ("build --expr 1+1", [[]]),
    ],
)
def test_what_a_command_line_builds(line: str, expected: list[list[str]]) -> None:
    request = hq.request_of(line.split(), S)
    assert request is not None, "seen as building nothing"
    assert request.candidates == expected


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        "build --help",
        "build .#x --dry-run",
        "eval .#x",
        "flake check --no-build",
        "flake metadata .",
        "flake show",
        "log .#x",
        "path-info .#x",
        "registry list",
        "repl",
        "run --help",
        "store gc",
    ],
)
def test_what_builds_nothing(line: str) -> None:
    assert hq.request_of(line.split(), S) is None


def test_the_question_repeats_what_changes_the_answer_and_nothing_else() -> None:
    line = "build -L --override-input a b --store /s .#x -o out --impure --rebuild --option cores 2"
    request = hq.request_of(line.split(), S)
    assert request is not None
    assert " ".join(request.shared) == "--override-input a b --store /s --impure --option cores 2"
    assert request.store == "/s"


WORDS = [
    "build",
    "run",
    "flake",
    "check",
    "-o",
    "--option",
    "--store",
    "-c",
    "--",
    ".#demo",
    "a",
    "--dry-run",
    "--expr",
]


@given(st.lists(st.sampled_from(WORDS)))
def test_any_command_line_is_understood_or_left_to_nix(argv: list[str]) -> None:
    request = hq.request_of(argv, S)
    if request is not None:
        words = [word for candidate in request.candidates for word in candidate]
        assert all(word in (*argv, ".") or "#" in word for word in words)


@pytest.mark.parametrize(
    "text",
    [
        "nix (Nix) 2.8.0\n",
        "nix (Nix) 2.34.8",
        "nix (Lix, like Nix) 2.91.1",
        "nix (Determinate Nix 3.6.2) 2.29.0",
        "nix (Nix) 2.24.0pre20240813_abcdef",
        "nix (Nix) 3.0",
    ],
)
def test_a_nix_that_will_do(text: str) -> None:
    hq.check_version(text)


@pytest.mark.parametrize("text", ["nix (Nix) 2.7.0", "nix (Nix) 2.3.16\n", "nix (Nix) 1.11.2", "", "nix"])
def test_a_nix_that_is_too_old(text: str) -> None:
    with pytest.raises(UnsuitableError, match=r"2\.8 is the oldest"):
        hq.check_version(text)


def settings(config: str) -> dict[str, str]:
    """What Nix makes of NIX_CONFIG: the last line of a setting wins, extra- adds."""
    found: dict[str, str] = {}
    for line in config.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip().startswith("extra-"):
            name = key.strip().removeprefix("extra-")
            found[name] = f"{found.get(name, '')} {value.strip()}".strip()
        elif equals:
            found[key.strip()] = value.strip()
    return found


def test_root_without_build_users_gets_a_sandbox_that_needs_none() -> None:
    made = settings(hq.nix_config({}, root=True, build_users=False, substituters_set=False))

    assert made["sandbox"] == "true" and made["build-users-group"] == "" and made["substituters"] == ""
    assert made["experimental-features"].split() == ["nix-command", "flakes", "ca-derivations"]


def test_where_no_sandbox_can_be_made_nix_is_told_so() -> None:
    made = settings(hq.nix_config({}, root=True, build_users=False, substituters_set=False, sandbox=False))
    assert made["sandbox"] == "false"


def test_others_keep_their_sandbox_and_their_caches() -> None:
    assert set(settings(hq.nix_config({}, root=False, build_users=True, substituters_set=True))) == {
        "experimental-features"
    }
    assert "build-users-group" not in settings(hq.nix_config({}, root=True, build_users=True, substituters_set=True))


def test_what_the_user_sets_wins_and_no_feature_is_lost() -> None:
    user = {"NIX_CONFIG": "sandbox = relaxed\nexperimental-features = recursive-nix\ncores = 3"}

    made = settings(hq.nix_config(user, root=True, build_users=False, substituters_set=False))

    assert made["sandbox"] == "relaxed" and made["cores"] == "3"
    assert made["experimental-features"].split() == ["recursive-nix", "nix-command", "flakes", "ca-derivations"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("substituters = file:///cache\n", True),
        ("cores = 1\nextra-substituters = x", True),
        ("binary-caches=", True),
        ("# substituters = x", False),
        ("trusted-substituters = x", False),
        ("", False),
    ],
)
def test_whether_binary_caches_were_chosen(text: str, expected: bool) -> None:
    assert hq.names_substituters(["cores = 2", text]) is expected


def test_a_checkout_of_ones_own_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert hq.trusting_git({}, tmp_path, os.getuid()) == {}
    assert hq.trusting_git({}, tmp_path / ".git", 99999) == {}, "a tarball has no git to ask"


def test_a_checkout_of_another_user_is_trusted_for_this_call(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    added = hq.trusting_git({"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_0": "user.name"}, tmp_path, 99999)

    assert added == {
        "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_2": "safe.directory",
        "GIT_CONFIG_VALUE_2": str(tmp_path),
    }


def test_root_reads_the_checkout_of_another_user_as_under_sudo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    status = tmp_path.stat()
    other = os.stat_result((status.st_mode, 1, 1, 1, 4242, 4242, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda *_args, **_keywords: other)

    assert hq.trusting_git({}, tmp_path, 0)["SUDO_UID"] == "4242"


def test_a_store_that_this_user_may_write(tmp_path: Path) -> None:
    (tmp_path / "var/nix/db").mkdir(parents=True)
    assert hq.store_trouble(tmp_path, tmp_path / "none") is None


def test_no_store_and_no_daemon(tmp_path: Path) -> None:
    assert "does not exist" in str(hq.store_trouble(tmp_path / "nix", tmp_path / "socket"))
    (tmp_path / "nix").mkdir()
    assert "no Nix daemon answers" in str(hq.store_trouble(tmp_path / "nix", tmp_path / "socket"))


def test_a_daemon_that_answers(tmp_path: Path) -> None:
    (tmp_path / "nix").mkdir()
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "socket"))
        daemon.listen()
        assert hq.store_trouble(tmp_path / "nix", tmp_path / "socket") is None


def test_the_feature_that_a_daemon_lacks() -> None:
    said = "error: experimental Nix feature 'ca-derivations' is disabled; use '--extra-experimental-features …'"
    assert hq.feature_trouble(said) == "ca-derivations"
    assert hq.feature_trouble("error: experimental feature 'flakes' is disabled") == "flakes"
    assert hq.feature_trouble("error: attribute 'x' missing") is None


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("run .#demo --port 18021", "run .#demo -- --port 18021"),
        ("-L run .#demo -L --port=1 --json", "-L run .#demo -L -- --port=1 --json"),
        ("run .#demo --once x -- --complete", "run .#demo -- --once x --complete"),
        ("run -f x.nix demo --max-tokens 3", "run -f x.nix demo -- --max-tokens 3"),
    ],
)
def test_an_option_of_the_program_before_the_separator(line: str, right: str) -> None:
    with pytest.raises(BadInputError) as raised:
        hq.check_separator(line.split())
    assert "is no option of Nix" in str(raised.value)
    assert str(raised.value).endswith(f"arguments of the program go after --: ./hq {right}")


def test_the_right_command_line_is_quoted_for_a_shell() -> None:
    with pytest.raises(BadInputError) as raised:
        hq.check_separator(["run", ".#demo", "--once", "Who?"])
    assert str(raised.value).endswith("./hq run .#demo -- --once 'Who?'")


@pytest.mark.parametrize(
    "line",
    [
        "run .#demo -- --port 1",
        "run .#demo --timeout 3 --json --verbose --debug -L",
        "run .#demo --argstr --port 1 --override-input --host x",
        "run -- .#demo --port 1",
        "build .#demo --port 1",
        "fetch --host x",
        "shell .#demo -c demo --port 1",
        "run",
        "",
    ],
)
def test_what_is_left_to_nix(line: str) -> None:
    hq.check_separator(line.split())


def test_the_options_of_the_demo_that_nix_does_not_know() -> None:
    own = {name for option in demo.command.params for name in option.opts}
    assert own - hq._DEMO_OPTIONS == {"--config", "--json", "--timeout", "--verbose"}
    assert own > hq._DEMO_OPTIONS
    assert not hq._DEMO_OPTIONS & set(hq._VALUES)


@pytest.mark.parametrize(
    ("line", "writable", "expected"),
    [
        ("build .#x", True, "build .#x"),
        ("build .#x", False, "build --no-link .#x"),
        ("build -o out .#x", False, "build -o out .#x"),
        ("run .#x", False, "run .#x"),
    ],
)
def test_the_result_link(line: str, writable: bool, expected: str) -> None:
    assert hq.with_no_link(line.split(), writable) == expected.split()
