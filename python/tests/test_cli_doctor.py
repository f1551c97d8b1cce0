from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hyperqwen.cli import doctor
from hyperqwen.cli.doctor import ENVIRONMENT, HEALTHY, NOT_RIGHT, Examination, _show
from hyperqwen.runtime import ports, records
from hyperqwen.runtime.driver import NVML
from hyperqwen.runtime.preflight import Item
from tests import running
from tests.recorded_host import KNOWN, SOURCE, Card, Recorded, Tree, card, compiled
from tests.running import Http, launcher
from tests.test_runtime_gpu import GIB, RTX3090
from tests.test_runtime_model_files import write as write_model

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
COMMAND = [sys.executable, "-c", "from hyperqwen.cli import main; main(prog_name='hyperqwen')", "doctor"]


class Machine:
    """A recorded Debian with a driver and a card, a model without weights, and a user with a home of their own."""

    def __init__(self, folder: Path) -> None:
        self.tree = Tree(folder / "root")
        self.tree.release(ID="debian", PRETTY_NAME="Debian GNU/Linux 13 (trixie)")
        self.tree.driver(LIBRARIES)
        self.nvml = Path(f"{self.tree.root}{LIBRARIES}/libnvidia-ml.so.{KNOWN}")
        self.nvml.unlink()
        made = compiled(NVML, source=SOURCE)
        self.nvml.write_bytes(made.read_bytes())
        self.tree.module()
        self.tree.nodes()
        self.tree.card_on_bus()
        self.tree.write("/proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")
        self.home = folder / "home"
        self.home.mkdir()
        self.logs = self.home / ".local/state/hyperqwen"
        self.models = folder / "models"
        for name in ("qwen3.8-27b-fast", "qwen3.8-27b-dflash2"):
            write_model(self.models / name, of=name.removesuffix("-fast"))
        self.environ = {"HOME": str(self.home)}
        with ports.claim("127.0.0.1", 0) as free:
            self.port = int(free.getsockname()[1])
        self.flags = {"server.port": str(self.port), "model.load_format": "dummy"}

    def answers(self, *cards: Card) -> None:
        Recorded(self.nvml).answers(*cards)

    def examine(self, profile: str = "B", **changes: Any) -> Examination:
        given: dict[str, Any] = {
            "host_file": None,
            "models": self.models,
            "cache_dir": None,
            "config": None,
            "flags": self.flags,
            "environ": self.environ,
            "root": self.tree.root,
        }
        return doctor.examine(profile, **(given | changes))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    made = Machine(tmp_path)
    made.answers(card(RTX3090))
    yield made
    made.answers()


def items(found: Examination, name: str) -> list[Item]:
    return [check.item for check in found.checks if check.item.name == name]


def item(found: Examination, name: str) -> Item:
    (one,) = items(found, name)
    return one


def failing(found: Examination) -> list[str]:
    return [check.item.name for check in found.checks if check.item.state == "fail"]


def test_a_machine_that_can(machine: Machine) -> None:
    found = machine.examine()

    assert (found.exit_code, failing(found)) == (HEALTHY, []), found.checks
    assert "Debian GNU/Linux 13 (trixie)" in item(found, "host").found and "64.00 GiB" in item(found, "host").found
    assert item(found, "driver").found == f"{KNOWN} (open module)"
    assert "RTX 3090, 24,576 MiB, 23,552 free, power limit 250 W" in item(found, "card 0").found
    assert "fit on" in items(found, "plan")[-1].found and "RTX 3090" in items(found, "plan")[-1].found
    assert found.plan is not None and found.plan.budget is not None
    assert item(found, "memory of the card").state == "ok"
    assert item(found, "key").found == "none; only this machine reaches 127.0.0.1"
    assert item(found, "port").found == f"{machine.port} on 127.0.0.1 is free"
    assert str(machine.models / "qwen3.8-27b-fast") in item(found, "model").found
    assert item(found, "engine").state == "skip" and "none runs" in item(found, "servers").found


def test_nothing_is_written(machine: Machine, tmp_path: Path) -> None:
    stale = records.write(machine.logs, running.record(pid=2**22 - 1, started=1.0))
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    machine.examine()
    assert stale.exists(), "a record was removed"
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_report_is_json(machine: Machine) -> None:
    said = json.loads(json.dumps(machine.examine().report(), default=str))
    assert (said["exit"], said["profile"]) == (0, "B")
    assert {check["about"] for check in said["checks"]} == {"host", "hyperqwen"}
    assert said["gpus"][0]["name"] == "NVIDIA GeForce RTX 3090" and said["driver"]["version"] == KNOWN
    assert said["plan"]["ok"] and said["plan"]["budget"]["pool"]["tokens"] > 0
    assert all(check["fix"] for check in said["checks"] if check["state"] in ("warn", "fail"))


def test_no_driver_is_the_machines_fault(machine: Machine) -> None:
    machine.tree.without(LIBRARIES, "/proc/driver", "/sys/module", "/dev")
    found = machine.examine(flags=machine.flags | {"server.host": "0.0.0.0"})
    assert found.exit_code == ENVIRONMENT
    assert "key" in failing(found), "what else is wrong is still said"
    (first, *_) = items(found, "driver")
    assert first.state == "fail" and first.searched and "./hq run .#demo" in (first.fix or "")
    assert "not known without a card" in items(found, "plan")[-1].found


def test_one_fix_is_printed_once(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = machine.examine(models=tmp_path / "none")
    fix = item(found, "model").fix
    assert fix and item(found, "drafter").fix == fix
    _show(found, verbose=False)
    said = capsys.readouterr().out
    assert said.count(fix) == 1 and said.count("fix: as above") == 1


def test_what_the_engine_lacks_is_one_line(machine: Machine) -> None:
    said = [entry.found for entry in items(machine.examine(), "plan")]
    assert said[0] == "left out, this engine has none yet: lookup drafting, split verification"
    assert not any("instead of" in line for line in said)


def test_caches_are_counted_and_listed_on_request(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("aaa-engine-cuda", "bbb-engine-cuda"):
        (machine.home / ".cache/hyperqwen" / name).mkdir(parents=True)
        (machine.home / ".cache/hyperqwen" / name / "kernel").write_bytes(bytes(3 << 20))
    found = machine.examine()
    assert "6 MiB of 2 engines" in item(found, "caches").found
    _show(found, verbose=False)
    assert "aaa-engine-cuda" not in capsys.readouterr().out
    _show(found, verbose=True)
    assert "  bbb-engine-cuda: 3 MiB\n" in capsys.readouterr().out


def test_a_card_that_others_hold(machine: Machine) -> None:
    machine.answers(card(RTX3090 | {"free": 4 * GIB, "used": 20 * GIB}, computing=[(os.getpid(), 19 * GIB)]))
    found = machine.examine()
    assert (found.exit_code, failing(found)) == (ENVIRONMENT, ["memory of the card"])
    assert str(os.getpid()) in item(found, "memory of the card").found
    assert "held by" in item(found, "card 0").found


def test_a_card_that_our_server_holds(machine: Machine) -> None:
    machine.answers(card(RTX3090 | {"free": 4 * GIB, "used": 20 * GIB}, computing=[(os.getpid(), 19 * GIB)]))
    mine = os.getpgid(os.getpid())
    with launcher(machine.logs, port=machine.port, ready=False, engine_pid=mine) as (process, _):
        found = machine.examine()
    assert (found.exit_code, failing(found)) == (HEALTHY, [])
    assert f"held by the server on port {machine.port}" in item(found, "memory of the card").found
    assert f"in use by our server (profile B, process {process.pid})" in item(found, "port").found


def test_a_card_that_is_too_small(machine: Machine) -> None:
    machine.answers(card(RTX3090 | {"total": 12 * GIB, "free": 12 * GIB, "used": 0, "reserved": 0}))
    found = machine.examine()
    assert found.exit_code != HEALTHY
    refused = items(found, "plan")[-1]
    assert refused.state == "fail" and refused.fix and ("context" in refused.fix or "larger card" in refused.fix)


def test_a_card_that_is_slowed_down_is_pointed_at(machine: Machine) -> None:
    machine.answers(card(RTX3090 | {"reasons": pynvml.nvmlClocksEventReasonHwThermalSlowdown}))
    found = machine.examine()
    assert found.exit_code == HEALTHY and item(found, "card 0").state == "warn"
    assert "hardware thermal slowdown" in item(found, "card 0").found


def test_a_card_that_is_not_there_is_the_users_fault(machine: Machine) -> None:
    found = machine.examine(flags=machine.flags | {"parallel.gpus": "3"})
    assert (found.exit_code, failing(found)) == (NOT_RIGHT, ["cards"])


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"server.host": "0.0.0.0"}, "key", "no key is set"),
        ({"server.api_key_file": "/nowhere/key"}, "key", "/nowhere/key does not exist"),
        ({"model.directory": "/nowhere/model"}, "model", "/nowhere/model does not exist"),
        ({"limits.context_tokens": "yes"}, "configuration", "limits.context_tokens is 'yes'"),
        ({"parallel.tensor": "3"}, "plan", "parallel.tensor"),
    ],
)
def test_what_the_user_set_up_wrong(machine: Machine, changes: dict[str, str], name: str, said: str) -> None:
    machine.answers(*[card(RTX3090 | {"uuid": f"GPU-{number}".encode()}) for number in range(4)])
    found = machine.examine(flags=machine.flags | changes)
    assert found.exit_code == NOT_RIGHT
    wrong = next(entry for entry in items(found, name) if entry.state == "fail")
    assert said in wrong.found and wrong.fix


def test_a_port_of_another_program(machine: Machine) -> None:
    with ports.claim("127.0.0.1", machine.port):
        found = machine.examine()
    assert (found.exit_code, failing(found)) == (NOT_RIGHT, ["port"])
    assert f"process {os.getpid()}" in item(found, "port").found


def test_an_unknown_profile_hides_nothing_of_the_machine(machine: Machine) -> None:
    found = machine.examine("F")
    assert (found.exit_code, failing(found)) == (NOT_RIGHT, ["configuration"])
    assert item(found, "driver").state == "ok" and item(found, "plan").state == "skip"


@pytest.mark.parametrize("place", [".local/state/hyperqwen/runs", ".cache/hyperqwen", "host.toml", "key"])
def test_what_cannot_be_read_is_said_and_the_rest_is_seen(machine: Machine, place: str) -> None:
    wrong = machine.home / place
    wrong.parent.mkdir(parents=True, exist_ok=True)
    if place in ("host.toml", "key"):
        wrong.mkdir()
    else:
        wrong.write_text("in the way")
    machine.environ["HYPERQWEN_HOST_FILE"] = str(machine.home / "host.toml")
    if place != "host.toml":
        (machine.home / "host.toml").write_text("")
    if place == "key":
        machine.environ["HYPERQWEN_SERVER_API_KEY_FILE"] = str(wrong)
    found = machine.examine()
    assert item(found, "driver").state == "ok"
    if place.startswith("."):
        assert "Traceback" not in str(found.report())
    else:
        assert str(wrong) in next(entry.found for entry in (c.item for c in found.checks) if entry.state == "fail")
        assert found.exit_code == NOT_RIGHT


def test_the_demo_needs_no_card(machine: Machine) -> None:
    machine.tree.without(LIBRARIES, "/dev")
    found = machine.examine("demo", flags={"server.port": str(machine.port)})
    assert (found.exit_code, failing(found)) == (HEALTHY, [])
    assert item(found, "driver").state == "skip" and item(found, "model").state == "skip"


def test_the_engine_of_a_program(machine: Machine, tmp_path: Path) -> None:
    config = tmp_path / "serve.json"
    config.write_text(json.dumps({"engine": "cuda", "engine_python": sys.executable, "engine_id": "abc", "cc": "/no"}))
    found = machine.examine(config=config)
    assert item(found, "engine").found == "abc, for GPUs"
    assert item(found, "C compiler").state == "fail" and found.exit_code == NOT_RIGHT

    config.write_text(json.dumps({"engine": "cuda", "engine_python": "/gone/python", "engine_id": "abc"}))
    assert "is gone: /gone/python" in item(machine.examine(config=config), "engine").found


def test_the_keys_length_and_no_more(machine: Machine) -> None:
    machine.environ["HYPERQWEN_API_KEY"] = "correct-horse-battery"
    found = machine.examine()
    assert "set (21 characters)" in item(found, "key").found
    assert "correct-horse" not in json.dumps(found.report(), default=str)


def test_caches_and_their_size(machine: Machine) -> None:
    folder = machine.home / ".cache/hyperqwen/abc-engine/vllm"
    folder.mkdir(parents=True)
    (folder / "kernel").write_bytes(bytes(3 << 20))
    seen = item(machine.examine(), "caches")
    assert seen.found.startswith(f"{folder.parent.parent}: 3 MiB of 1 engine;") and seen.searched == (
        "abc-engine: 3 MiB",
    )


# Servers that run -------------------------------------------------------------------------------------------------


@pytest.fixture
def http() -> Iterator[Http]:
    made = Http()
    yield made
    made.stop()


def served(machine: Machine, http: Http, **environ: str) -> Item:
    with launcher(machine.logs, port=http.port):
        found = machine.examine(environ=machine.environ | environ)
    return item(found, f"server on port {http.port}")


def test_a_server_that_has_nothing_to_do(machine: Machine, http: Http) -> None:
    http.generated = 1234
    seen = served(machine, http)
    assert seen.state == "ok" and "/health answers 200; idle; 1,234 tokens generated" in seen.found


def test_a_server_that_works(machine: Machine, http: Http) -> None:
    http.running, http.step, http.key = 2, 5, "sesame"
    seen = served(machine, http, HYPERQWEN_API_KEY="sesame")
    assert seen.state == "ok" and "2 requests in flight, and its counters move" in seen.found


def test_a_server_that_hangs(machine: Machine, http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ANSWER_SECONDS", 1.0)
    http.running = 1
    seen = served(machine, http)
    assert seen.state == "warn" and "no progress in 1 s (1 requests in flight" in seen.found
    assert f"hyperqwen logs --port {http.port}" in (seen.fix or "")


def test_a_server_that_wants_another_key(machine: Machine, http: Http) -> None:
    http.key = "sesame"
    seen = served(machine, http, HYPERQWEN_API_KEY="other")
    assert seen.state == "warn" and "whether it works is not seen" in seen.found and "401" in seen.found


def test_a_server_that_is_unwell(machine: Machine, http: Http) -> None:
    http.status = 503
    seen = served(machine, http)
    assert seen.state == "fail" and "/health answers 503" in seen.found


def test_a_server_that_does_not_answer(machine: Machine) -> None:
    with launcher(machine.logs, port=machine.port):
        found = machine.examine()
    assert found.exit_code == NOT_RIGHT
    assert "no answer from" in item(found, f"server on port {machine.port}").found


def test_a_server_that_starts(machine: Machine) -> None:
    with launcher(machine.logs, port=machine.port, ready=False):
        seen = item(machine.examine(), f"server on port {machine.port}")
    assert seen.state == "ok" and "no token yet" in seen.found


def test_a_server_that_stops(machine: Machine) -> None:
    with launcher(machine.logs, port=machine.port, stopping=True):
        seen = item(machine.examine(), f"server on port {machine.port}")
    assert seen.state == "ok" and "finishing its last requests" in seen.found


def test_the_last_errors_of_the_last_log(machine: Machine) -> None:
    machine.logs.mkdir(parents=True)
    log = machine.logs / "serve-18020.log"
    log.write_text("INFO 12-01 05:03:19 [core.py:1] all well\n")
    assert item(machine.examine(), "log serve-18020.log").state == "ok"

    record = "(EngineCore pid=1) ERROR 12-01 05:03:19 [core.py:1]"
    log.write_text("".join(f"{record} number {number}\n" for number in range(9)) + f"{record} ValueError: key sesame\n")
    machine.environ["HYPERQWEN_API_KEY"] = "sesame"
    seen = item(machine.examine(), "log serve-18020.log")
    assert seen.state == "warn" and "10 lines with errors" in seen.found and "number 8" in seen.found
    assert "number 6" not in seen.found and "sesame" not in seen.found and seen.fix == "hyperqwen logs --port 18020"


# The command ------------------------------------------------------------------------------------------------------


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(Path(doctor.__file__).parents[2])}
    return subprocess.run([*COMMAND, *arguments], env=given | environ, capture_output=True, text=True, timeout=60)


def test_the_real_machine_whatever_it_is(tmp_path: Path) -> None:
    done = run("--json", HOME=str(tmp_path))
    said = json.loads(done.stdout)
    assert done.returncode == said["exit"] and done.returncode in (NOT_RIGHT, ENVIRONMENT), "there is no model"
    assert "model" in {check["name"] for check in said["checks"] if check["state"] == "fail"}
    assert not list(tmp_path.iterdir()) and done.stderr == ""


def test_as_text(tmp_path: Path) -> None:
    with ports.claim("127.0.0.1", 0) as free:
        port = str(free.getsockname()[1])
    done = run("--profile", "demo", "--port", port, HOME=str(tmp_path))
    assert done.returncode == HEALTHY, done.stdout
    assert "\x1b" not in done.stdout and done.stdout.splitlines()[-1] == "all is well: 0 failing, 0 to look at (exit 0)"

    done = run("--profile", "F", HOME=str(tmp_path))
    assert "fail  configuration" in done.stdout and "fix: use one of A, B, C, D, E, demo" in done.stdout


def test_a_wrong_command_line() -> None:
    assert run("--prot", "1").returncode == 2
