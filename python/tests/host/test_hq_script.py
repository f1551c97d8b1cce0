"""`./hq` as a whole, with stand-ins for the programs of the host: what it installs, asks, fetches and becomes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
HASH = "0000000000000000000000000000000a"
DEBIAN_12 = 'ID=debian\nVERSION_ID="12"\n'

# Every stand-in appends its name, arguments and some variables to one journal.
_RECORD = """#!{python}
import json, os, sys
def record(**more):
    with open({journal!r}, "a") as file:
        names = ("NIX_CONFIG", "GIT_CONFIG_VALUE_0", "DEBIAN_FRONTEND")
        file.write(json.dumps({{"program": {name!r}, "argv": sys.argv[1:],
                               **{{name: os.environ.get(name) for name in names}}, **more}}) + "\\n")
"""


class Host:
    """A machine whose nix, apt-get and sudo are stand-ins, and a checkout with a fetcher that only records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.checkout = folder / "checkout"
        (self.checkout / "python/hyperqwen").mkdir(parents=True)
        (self.checkout / "nix/pins").mkdir(parents=True)
        source = (ROOT / "hq").read_text()
        assert source.count("/etc/os-release") == 2 and source.count("/usr/bin/python3") == 1
        self.release = folder / "os-release"
        self.release.write_text(DEBIAN_12)
        self.system_python = folder / "system-python3"
        source = source.replace("/usr/bin/python3", str(self.system_python))
        (self.checkout / "hq").write_text(source.replace("/etc/os-release", str(self.release)))
        (self.checkout / "hq").chmod(0o755)
        package = ROOT / "python/hyperqwen"
        for name in ("__init__.py", "errors.py", "store.py", "hq.py", "pins/__init__.py", "pins/model.py"):
            target = self.checkout / "python/hyperqwen" / name
            target.parent.mkdir(exist_ok=True)
            shutil.copy(package / name, target)
        self.program(
            self.checkout / "python/hyperqwen/pins/fetch.py",
            "fetch",
            "record()\nsys.exit(int(os.environ.get('FETCH', 0)))",
        )
        for name in ("wheels.json", "debs.json"):
            shutil.copy(ROOT / "nix/pins" / name, self.checkout / "nix/pins")
        for name in ("sh", "dirname", "readlink", "id", "sed", "env", "ls", "cat"):
            found = shutil.which(name)
            assert found, f"this machine has no {name}"
            (self.bin / name).symlink_to(found)
        self.program(
            self.bin / "python3", "python3", f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])"
        )
        self.nix("2.8.0")
        self.program(self.bin / "nix-store", "nix-store", "record()")
        self.program(self.bin / "git", "git", "record()")

    def program(self, path: Path, name: str, body: str) -> None:
        path.write_text(_RECORD.format(python=sys.executable, journal=str(self.journal), name=name) + body + "\n")
        path.chmod(0o755)

    def nix(self, version: str, missing: list[str] | None = None, error: str = "", code: int = 0) -> None:
        """A nix of `version` that lacks `missing` (file names), or whose dry run says `error` and exits with `code`."""
        lines = "".join(f"  /nix/store/{HASH}-{name}.drv\\n" for name in missing or [])
        report = f"these derivations will be built:\\n{lines}" if missing else ""
        self.program(
            self.bin / "nix",
            "nix",
            f"if sys.argv[1:] == ['--version']: print('nix (Nix) {version}'); sys.exit()\n"
            f"record()\n"
            f"if '--dry-run' in sys.argv: sys.stderr.write('{report}' + {error!r}); sys.exit({code})\n"
            "print('nix ran')\n",
        )

    def apt(self, *, works: bool = True) -> None:
        """An apt-get that puts nix on PATH, where it was not."""
        hidden = self.folder / "package"
        (self.bin / "nix").rename(hidden)
        install = f"os.path.exists({str(hidden)!r}) and os.rename({str(hidden)!r}, {str(self.bin / 'nix')!r})"
        self.program(
            self.bin / "apt-get",
            "apt-get",
            f"record()\nif 'install' in sys.argv:\n    {install if works else 'sys.exit(100)'}\n",
        )

    def user(self, number: int) -> None:
        (self.bin / "id").unlink()
        self.program(self.bin / "id", "id", f"print({number})")

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.checkout / "hq"), *arguments],
            cwd=self.folder,
            # A store of the user's own: whether this machine's is to be used is not the question here.
            env={"PATH": str(self.bin), "HOME": str(self.folder), "NIX_REMOTE": str(self.folder / "store"), **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.checkout / "hq"), *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), "HOME": str(self.folder), "NIX_REMOTE": str(self.folder / "store")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def calls(self, program: str) -> list[dict[str, Any]]:
        entries = [json.loads(line) for line in self.journal.read_text().splitlines()] if self.journal.exists() else []
        return [entry for entry in entries if entry["program"] == program]

    def argvs(self, program: str) -> list[list[str]]:
        return [entry["argv"] for entry in self.calls(program)]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def pins() -> list[str]:
    """A wheel, a .debs file and the seed under the name that its derivation has."""
    wheels = json.loads((ROOT / "nix/pins/wheels.json").read_text())["wheels"]
    debs = json.loads((ROOT / "nix/pins/debs.json").read_text())["debs"]
    plain = next(deb for deb in debs if "extract" not in deb)
    seed = next(deb for deb in debs if "extract" in deb)
    return [wheels[0]["file"], plain["file"], seed["extract"]["store_name"], seed["file"]]


def test_with_nothing_missing_it_is_nix(host: Host) -> None:
    done = host.run("run", ".#demo", "--", "--once", "two words")

    assert (done.returncode, done.stdout) == (0, "nix ran\n"), done.stderr
    assert host.argvs("nix") == [["build", "--dry-run", ".#demo"], ["run", ".#demo", "--", "--once", "two words"]]
    assert host.argvs("fetch") == [] and host.argvs("apt-get") == []
    assert "nix-command flakes ca-derivations" in str(host.calls("nix")[-1]["NIX_CONFIG"])


def test_exactly_the_missing_pins_are_fetched(host: Host, pins: list[str]) -> None:
    wheel, deb, seed_name, seed_file = pins
    host.nix("2.8.0", missing=[wheel, deb, seed_name, "hyperqwen-demo"])

    done = host.run("build", ".#demo")

    assert done.returncode == 0, done.stderr
    assert "3 pinned files are not in the store yet" in done.stderr
    (arguments,) = host.argvs("fetch")
    assert arguments[0] == "--files" and set(arguments[1:]) == {wheel, deb, seed_file}
    assert host.argvs("nix")[-1] == ["build", ".#demo"]


def test_the_store_that_was_named_is_the_one_that_is_seeded(host: Host, pins: list[str]) -> None:
    host.nix("2.34.8", missing=[pins[0]])
    host.run("build", "--store", "/elsewhere", ".#demo")

    assert host.argvs("nix")[0] == ["build", "--dry-run", "--store", "/elsewhere", ".#demo"]
    assert host.argvs("fetch") == [["--store", "/elsewhere", "--files", pins[0]]]


def test_a_fetch_that_fails_ends_it(host: Host, pins: list[str]) -> None:
    host.nix("2.8.0", missing=[pins[0]])
    done = host.run("build", ".#demo", FETCH="4")

    assert done.returncode == 4 and done.stdout == ""
    assert host.argvs("nix") == [["build", "--dry-run", ".#demo"]]


def test_what_nix_cannot_evaluate_it_says_itself(host: Host) -> None:
    host.nix("2.8.0", error="error: flake does not provide attribute 'x'\n", code=1)
    done = host.run("build", ".#x")
    assert done.stdout == "nix ran\n" and host.argvs("nix")[-1] == ["build", ".#x"]


def test_a_daemon_without_the_feature(host: Host) -> None:
    host.nix("2.8.0", error="error: experimental Nix feature 'ca-derivations' is disabled\n", code=1)
    done = host.run("build", ".#nano")

    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert "ca-derivations" in done.stderr and "/etc/nix/nix.conf" in done.stderr


def test_a_nix_that_is_too_old(host: Host) -> None:
    host.nix("2.3.16")
    done = host.run("build", ".#nano")
    assert done.returncode == 3 and "2.8 is the oldest" in done.stderr and host.argvs("nix") == []


def test_broken_pin_files(host: Host, pins: list[str]) -> None:
    host.nix("2.8.0", missing=[pins[0]])
    (host.checkout / "nix/pins/wheels.json").write_text('{"schema": 1')
    done = host.run("build", ".#nano")
    assert done.returncode == 2 and "wheels.json" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("release", ["12", "13"])
def test_a_bare_debian_gets_what_is_missing(host: Host, release: str) -> None:
    host.release.write_text(f'ID=debian\nVERSION_ID="{release}"\n')
    host.user(0)
    host.apt()

    done = host.run("build", ".#nano")

    assert (done.returncode, done.stdout) == (0, "nix ran\n"), done.stderr
    assert "installing with apt-get: nix-bin" in done.stderr
    assert host.argvs("apt-get") == [
        ["update", "-q"],
        ["install", "-y", "-q", "--no-install-recommends", "nix-bin"],
    ]
    assert host.calls("apt-get")[1]["DEBIAN_FRONTEND"] == "noninteractive"


def test_another_user_installs_through_sudo(host: Host) -> None:
    host.user(1000)
    host.apt()
    host.program(host.bin / "sudo", "sudo", "record()\nos.execvp(sys.argv[1], sys.argv[1:])")

    done = host.run("build", ".#nano")

    assert done.stdout == "nix ran\n", done.stderr
    assert len(host.calls("sudo")) == 2


def test_another_user_without_sudo_is_told_the_command(host: Host) -> None:
    host.user(1000)
    host.apt()
    done = host.run("build", ".#nano")

    assert done.returncode == 3 and host.argvs("apt-get") == []
    assert "apt-get install --no-install-recommends nix-bin" in done.stderr


def test_an_installation_that_fails(host: Host) -> None:
    host.user(0)
    host.apt(works=False)
    done = host.run("build", ".#nano")
    assert done.returncode == 3 and "apt-get could not install: nix-bin" in done.stderr


def test_git_is_wanted_for_a_checkout_only(host: Host) -> None:
    (host.bin / "git").unlink()
    host.release.write_text("ID=arch\n")
    assert host.run("build", ".#nano").returncode == 0
    (host.checkout / ".git").mkdir()
    done = host.run("build", ".#nano")
    assert done.returncode == 3 and "not found: git" in done.stderr


@pytest.mark.parametrize("text", ["ID=ubuntu\nVERSION_ID=24.04\n", "ID=debian\nVERSION_ID=11\n", "ID=nixos\n", None])
def test_another_system_is_told_what_is_missing(host: Host, text: str | None) -> None:
    host.user(0)
    host.apt()
    host.release.unlink()
    if text is not None:
        host.release.write_text(text)
    done = host.run("build", ".#nano")

    assert done.returncode == 3 and host.argvs("apt-get") == []
    assert "not found: nix\n" in done.stderr


def test_a_python_that_is_too_old(host: Host) -> None:
    host.release.write_text("ID=other\n")
    host.program(host.bin / "python3", "python3", "sys.exit(3)")
    done = host.run("build", ".#nano")
    assert done.returncode == 3 and "not found: python3\n" in done.stderr


def test_the_systems_python_stands_in_for_an_old_one_on_path(host: Host) -> None:
    host.program(host.bin / "python3", "python3", "sys.exit(3)")
    host.program(host.system_python, "python3", f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])")
    done = host.run("build", ".#nano")
    assert done.stdout == "nix ran\n" and host.argvs("apt-get") == [], done.stderr


@pytest.mark.parametrize(("text", "installed"), [(DEBIAN_12, True), ("ID=other\n", False)])
def test_a_python_without_pip(host: Host, text: str, installed: bool) -> None:
    host.user(0)
    host.release.write_text(text)
    probe = f"if '-c' in sys.argv and not os.path.exists({str(host.folder / 'installed')!r}): sys.exit(4)\n"
    run = f"os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])"
    host.program(host.bin / "python3", "python3", probe + run)
    host.program(host.bin / "apt-get", "apt-get", f"record()\nopen({str(host.folder / 'installed')!r}, 'w').close()")

    done = host.run("build", ".#nano")

    # Elsewhere the fetcher says it, if it comes to that: an index may be named by hand.
    assert done.stdout == "nix ran\n", done.stderr
    assert [argv[-1:] for argv in host.argvs("apt-get")] == ([["-q"], ["python3-pip"]] if installed else [])


def test_fetch_goes_to_the_fetcher(host: Host) -> None:
    done = host.run("fetch", "serve-cpu", "--check", FETCH="4")
    assert done.returncode == 4
    assert host.argvs("fetch") == [["serve-cpu", "--check"]] and host.argvs("nix") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_fetcher_is_given_time_to_stop(host: Host, pins: list[str], number: signal.Signals) -> None:
    host.nix("2.8.0", missing=[pins[0]])
    host.program(
        host.checkout / "python/hyperqwen/pins/fetch.py",
        "fetch",
        "import signal, time\n"
        "def stop(number, _):\n    time.sleep(1); record(tidy=True); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop); signal.signal(signal.SIGTERM, stop)\n"
        "record()\ntime.sleep(60)",
    )
    process = host.start("build", ".#demo")
    deadline = time.monotonic() + 20
    while not host.calls("fetch") and time.monotonic() < deadline:
        time.sleep(0.02)
    # As a terminal does: ctrl-C goes to every process of the group, a service manager's SIGTERM to the first.
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=20)

    assert process.returncode == 130 and "Traceback" not in errors
    assert host.calls("fetch")[-1].get("tidy"), "it was killed before it had put things in order"
    assert host.argvs("nix") == [["build", "--dry-run", ".#demo"]]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help(host: Host, arguments: list[str]) -> None:
    done = host.run(*arguments)
    assert done.returncode == 0 and "./hq run .#demo" in done.stdout and host.argvs("nix") == []


def test_it_works_through_a_link_and_writes_nothing(host: Host) -> None:
    link = host.folder / "link"
    link.symlink_to(host.checkout / "hq")
    before = sorted(path for path in host.checkout.rglob("*"))

    done = subprocess.run(
        [str(link), "eval", ".#x"],
        cwd=host.folder,
        env={"PATH": str(host.bin), "HOME": str(host.folder)},
        capture_output=True,
        text=True,
    )

    assert done.stdout == "nix ran\n", done.stderr
    assert sorted(path for path in host.checkout.rglob("*")) == before


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_every_shell_can_read_it(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        program, shell = "/bin/sh", "sh"
    command = [program, "sh", "-n"] if shell == "busybox" else [program, "-n"]
    done = subprocess.run([*command, str(ROOT / "hq")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(ROOT / "hq", os.X_OK)
