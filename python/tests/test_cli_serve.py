"""The launcher against a stand-in for the engine, and its argv against golden files.

The golden files are what `hyperqwen serve --profile NAME --print-argv --json` prints. After a change that is meant,
`python -m tests.test_cli_serve` in python/ writes them anew; the difference is for a reviewer to read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperqwen import errors
from hyperqwen.cli.serve import Look, Start, _may_come
from hyperqwen.errors import UnsuitableError
from hyperqwen.profiles.cards import CARDS
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.planner import make_plan
from hyperqwen.profiles.profile import knobs, shipped
from hyperqwen.runtime import ports, records
from hyperqwen.runtime.driver import CUDA, NVML, Survey
from hyperqwen.runtime.notify import Notifier
from hyperqwen.runtime.preflight import Item
from hyperqwen.runtime.site import Site
from hyperqwen.runtime.watchdog import SpillReport
from tests import fake_engine
from tests.test_cli_demo import wait_for
from tests.test_runtime_model_files import write as write_model
from tests.test_runtime_preflight import DRIVER, GPU, HOST

PYTHON_DIR = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"
COMMAND = [sys.executable, "-c", "from hyperqwen.cli import main; main(prog_name='hyperqwen')", "serve"]


class Serve:
    """`hyperqwen serve` with a stand-in for the engine, in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ports.claim("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.environ = {
            "HOME": str(folder / "home"),
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(PYTHON_DIR),
            "HYPERQWEN_SERVE_CONFIG": str(folder / "serve.json"),
            "HYPERQWEN_SERVER_PORT": str(self.port),
            # Else this machine's own would count.
            "HYPERQWEN_HOST_FILE": str(folder / "host.toml"),
        }
        (folder / "host.toml").write_text("")
        write_model(folder / "model", 0)
        self.configure()

    def configure(self, config: dict[str, Any] | None = None, **behaviour: Any) -> None:
        site: dict[str, Any] = {
            "engine": "cpu",
            "engine_python": str(fake_engine.write(self.folder, **behaviour)),
            "engine_id": "abc-engine",
            "model": str(self.folder / "model"),
            "cc": str(self.folder),
        }
        (self.folder / "serve.json").write_text(json.dumps(site | (config or {})))

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], env=self.environ | environ, capture_output=True, text=True, timeout=60
        )

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def started(self) -> bool:
        return (self.folder / "seen.json").exists()


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return Serve(tmp_path)


def printed(name: str) -> str:
    """What --print-argv says of the profile, on a machine with neither GPU nor model."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as empty:
        environ = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(PYTHON_DIR),
            "HYPERQWEN_MODELS": "/models",
            # Whatever this machine's own host file says.
            "HYPERQWEN_HOST_FILE": empty.name,
        }
        command = [*COMMAND, "--profile", name, "--print-argv", "--json"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    # A profile that this engine cannot serve yet is printed all the same, and refused.
    assert done.returncode == (2 if "refuse:" in done.stderr else 0), done.stderr
    return done.stdout


# argv ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shipped()))
def test_the_argv_of_a_profile_is_the_golden_one(name: str) -> None:
    golden = GOLDEN / f"argv-{name}.json"
    assert json.loads(printed(name)) == json.loads(golden.read_text()), (
        "if that is meant: cd python && python -m tests.test_cli_serve"
    )


def test_every_profile_has_a_golden_argv_and_no_other_has() -> None:
    assert {path.name for path in GOLDEN.glob("argv-*.json")} == {f"argv-{name}.json" for name in shipped()}


def test_the_argv_for_a_shell_follows_knobs_and_cards(serve: Serve) -> None:
    flags = ["--context", "4096", "--limits-concurrent-requests", "2", "--gpu", "rtx4090"]
    done = serve.run("--profile", "B", "--print-argv", *flags, HYPERQWEN_SERVER_KEEP_ALIVE_SECONDS="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve --model ")
    assert " --max-model-len 4096 --max-num-seqs 2 " in done.stdout and "keep-alive" not in done.stdout
    assert done.stdout.count("\n") == 1

    small = serve.run("--profile", "B", "--print-argv", "--vram", "12")
    assert small.returncode == 2 and "refuse: " in small.stderr and "--max-model-len" in small.stdout


def test_the_engine_gets_exactly_the_planned_argv(serve: Serve) -> None:
    planned = json.loads(serve.run("--print-argv", "--json", "--chat-thinking", "false").stdout)["argv"]
    process = serve.start("--chat-thinking", "false")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    process.communicate(timeout=20)
    assert fake_engine.seen(serve.folder)["argv"][1:] == ["-P", "-s", "-m", "hyperqwen.engine.serve", *planned]
    assert str(serve.folder / "model") in planned


# A start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_what_it_starts_and_is_ready_after_a_token(serve: Serve, number: signal.Signals) -> None:
    key = serve.folder / "key"
    key.write_text("sesame-street\n")
    key.chmod(0o600)
    (serve.folder / "host.toml").write_text(f'[server]\napi_key_file = "{key}"\n')
    process = serve.start("--context", "1024")
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()

    assert f"nano answers at http://127.0.0.1:{serve.port}/v1" in first
    assert [request["key"] for request in fake_engine.requests(serve.folder)] == ["Bearer sesame-street"]
    process.send_signal(number)
    rest, said = process.stdout.read(), process.stderr.read()
    assert process.wait(20) == 0, said
    assert "demo (demo): nano on the CPU" in said and "1,024 tokens of context, 4 slots" in said
    assert "limits.context_tokens = 1024 (flag --limits-context-tokens)" in said
    assert f"server.port = {serve.port} (environment HYPERQWEN_SERVER_PORT)" in said
    assert f"(host file {serve.folder}/host.toml)" in said
    assert "key set (13 characters)" in said and "sesame" not in said + first + rest
    assert f"$(cat {key})" in rest
    assert "importing the engine" in said and "stopping: running requests get up to" in said
    assert "Traceback" not in said
    assert "sesame" not in " ".join(fake_engine.seen(serve.folder)["argv"])
    ports.claim("127.0.0.1", serve.port).close()


def test_as_json(serve: Serve) -> None:
    process = serve.start("--json")
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=20)
    assert (said["url"], said["model"], said["key"]) == (f"http://127.0.0.1:{serve.port}/v1", "nano", False)


def test_the_engines_time_begins_when_it_is_started(serve: Serve) -> None:
    listener = ports.claim("127.0.0.1", serve.port)
    process = serve.start("--json", "--wait", "30")
    assert process.stdout is not None and process.stderr is not None
    assert "waiting up to" in process.stderr.readline()
    # It looks again every two seconds.
    time.sleep(2.5)
    listener.close()
    said = json.loads(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=20)
    assert said["start_s"] < 4, "what it waited for the port counts as the engine's"


def test_a_server_whose_state_folder_takes_nothing_more_serves_on(serve: Serve) -> None:
    runs = serve.folder / "home/.local/state/hyperqwen/runs"
    # The record of the start was written, and the one that says it is ready cannot be: the engine takes the folder.
    serve.configure(removes=str(runs))
    process = serve.start()
    assert process.stdout is not None and process.stderr is not None
    assert "answers at" in process.stdout.readline()
    time.sleep(0.5)
    assert process.poll() is None
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0 and "Traceback" not in said
    assert said.count("the record of this run cannot be written") == 1 and "the server runs on" in said


def test_an_engine_that_dies_is_explained(serve: Serve) -> None:
    serve.configure(die_in="load")
    done = serve.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended by itself (exit status 7)" in done.stderr and "ValueError: no such tensor" in done.stderr
    assert str(serve.folder / f"home/.local/state/hyperqwen/serve-{serve.port}.log") in done.stderr


POOL = (
    "INFO [cpu_worker.py:260] Explicitly set (0.12/23.54) GiB for KV cache on node 0.",
    "INFO [kv_cache_utils.py:2464] CPU KV cache size: 149,796 tokens, "
    "Maximum concurrency for 2,048 tokens per request: 73.14x",
)


@pytest.mark.parametrize("flags", [(), ("--verbose",)])
def test_planned_and_measured_side_by_side(serve: Serve, flags: tuple[str, ...]) -> None:
    serve.configure(says=POOL)
    process = serve.start(*flags)
    assert process.stdout is not None
    process.stdout.readline()
    # The table comes after the announcement.
    time.sleep(1)
    process.terminate()
    _, said = process.communicate(timeout=20)
    # The plan before the start has such a row, too.
    _, _, beside = said.partition("planned  measured")
    table = [line.split() for line in beside.splitlines() if line.startswith("KV cache pool ")]
    bytes_, tokens = table
    assert bytes_[4:6] == ["123", "MiB"] and bytes_[3] != "-", table
    assert tokens[4:6] == ["149,796", "tokens"] and tokens[6][0] in "+-", table
    assert "pool: 149,796 tokens" in said


def test_verbose_shows_the_engines_words_and_still_reads_them(serve: Serve) -> None:
    serve.configure(says=["Loading weights took 0.50 seconds"])
    process = serve.start("--verbose")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert "engine: starting" in said and "engine: finishing" in said
    assert "weights read in 0.5 s" in said
    assert not list(serve.folder.rglob("*.log"))


def test_a_server_that_nohup_started_outlives_a_logout(serve: Serve) -> None:
    program = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *COMMAND],
        env=serve.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "answers at" in process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    time.sleep(0.7)
    assert process.poll() is None, "the end of the session ended it"
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


# Ends ---------------------------------------------------------------------------------------------------------------


def test_sigterm_waits_for_the_engine_to_finish_and_a_second_one_does_not(serve: Serve) -> None:
    serve.configure(lingers=2)
    process = serve.start()
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0 and time.monotonic() - began >= 1.9

    serve.configure(lingers=30)
    process = serve.start()
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.terminate()
    while "stopping:" not in process.stderr.readline():
        assert process.poll() is None
    assert [run.pid for run in records.found(serve.folder / "home/.local/state/hyperqwen")] == [process.pid]
    began = time.monotonic()
    process.terminate()
    process.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert records.found(serve.folder / "home/.local/state/hyperqwen") == []
    assert not fake_engine.alive(fake_engine.seen(serve.folder)["pid"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_start_that_is_interrupted(serve: Serve, number: signal.Signals, code: int) -> None:
    serve.configure(hang_in="load")
    process = serve.start()
    wait_for(lambda: serve.started, "engine")
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in said
    assert not fake_engine.alive(fake_engine.seen(serve.folder)["pid"])


# A GPU --------------------------------------------------------------------------------------------------------------


def test_the_engine_on_a_gpu_is_told_what_was_planned_and_nothing_of_the_processors(tmp_path: Path) -> None:
    libraries = {name: tmp_path / name for name in (CUDA, NVML)}
    for path in libraries.values():
        path.touch()
    seen = Survey(HOST, replace(DRIVER, libraries=libraries), gpus=(GPU,))
    effective = resolve("B", flags={"memory.utilization": "0.9"})
    plan = make_plan(effective, models=Path("/models"), card=CARDS["rtx3090"])
    site = Site(engine="cuda", engine_python=tmp_path / "bin/python3", engine_id="id", cc=Path("/cc/bin"))
    start = Start(site, effective, Path("/models"), None, Notifier({}), False, False)

    made = start.environment(Look([], plan, (GPU,), seen), tmp_path / "cache", "sesame")

    assert made["CUDA_VISIBLE_DEVICES"] == GPU.uuid and made["VLLM_API_KEY"] == "sesame"
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == plan.environment["PYTORCH_CUDA_ALLOC_CONF"]
    links = Path(made["LD_LIBRARY_PATH"])
    assert links.is_relative_to(tmp_path / "cache") and os.readlink(links / CUDA) == str(libraries[CUDA])
    assert made["CC"] == "/cc/bin/cc" and made["PATH"].split(":")[:2] == [str(tmp_path / "bin"), "/cc/bin"]
    # Each of these would slow an engine on a GPU down, or put its two halves into one process.
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"} & set(made)


def test_a_server_whose_memory_went_to_windows_is_refused_before_it_is_ready(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    held = (12 << 30) + (6 << 30)
    came = replace(GPU, used=GPU.used + held // 2)
    # The engine says less than was planned: what it says counts.
    spill = SpillReport([GPU], 23 << 30, lambda _cards: [came])
    monkeypatch.setattr("hyperqwen.cli.serve._spill", lambda _look: spill)
    for name in ("HOME", "HYPERQWEN_HOST_FILE"):
        monkeypatch.setenv(name, serve.environ[name])
    says = ["Model loading took 12.0 GiB memory and 2.000000 seconds", "Available KV cache memory: 6.0 GiB"]
    serve.configure(says=says)
    effective = resolve("demo", flags={"server.port": str(serve.port), "model.directory": str(serve.folder / "model")})
    plan = make_plan(effective, models=serve.folder, card=None)
    site = Site(engine="cpu", engine_python=serve.folder / "python3", engine_id="id")
    start = Start(site, effective, serve.folder, None, Notifier({}), False, False)

    with pytest.raises(UnsuitableError, match="the engine holds 18,432 MiB of card 0, and only 9,216 MiB") as raised:
        start.serve(Look([], plan, (), None))

    assert raised.value.fix is not None and "memory.kv_cache_bytes" in raised.value.fix
    assert not start.ready and "answers at" not in capfd.readouterr().out
    assert not fake_engine.alive(fake_engine.seen(serve.folder)["pid"])


# The service manager ------------------------------------------------------------------------------------------------


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(f"\0hyperqwen-serve-{os.getpid()}")
        found.settimeout(20)
        yield found


def heard(manager: socket.socket, until: str) -> list[str]:
    found: list[str] = []
    while not any(until in message for message in found):
        found.append(manager.recv(65536).decode())
    return found


def test_a_service_manager_hears_of_every_step_and_the_engine_does_not_know_it(
    serve: Serve, manager: socket.socket
) -> None:
    serve.configure(says=["Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00]"], lingers=1)
    (serve.folder / "api-key").write_text("from-systemd\n")
    process = serve.start(
        NOTIFY_SOCKET=f"@hyperqwen-serve-{os.getpid()}",
        WATCHDOG_USEC="1500000",
        CREDENTIALS_DIRECTORY=str(serve.folder),
    )
    start = heard(manager, "READY=1")
    assert [request["key"] for request in fake_engine.requests(serve.folder)] == ["Bearer from-systemd"]
    assert "STATUS=loading weights: 1 of 2 shards\nEXTEND_TIMEOUT_USEC=300000000" in start
    assert not any("WATCHDOG" in message for message in start)

    fake_engine.metrics(serve.folder, requests=1, tokens=5, steps=5)
    assert len(heard(manager, "WATCHDOG=1")) == 1
    process.terminate()
    assert heard(manager, "STOPPING=1")[-1].startswith("STOPPING=1\nSTATUS=")
    assert heard(manager, "WATCHDOG=1"), "a drain longer than the watchdog's time would be killed"
    process.communicate(timeout=20)
    assert process.returncode == 0
    seen = fake_engine.seen(serve.folder)["environ"]
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "CREDENTIALS_DIRECTORY"} & set(seen)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_no_gpu_is_no_reason_to_serve_on_the_processor(serve: Serve) -> None:
    serve.configure({"engine": "cuda", "model": None})
    empty = serve.folder / "empty"
    empty.mkdir()
    done = serve.run("--profile", "B", HYPERQWEN_DRIVER_DIR=str(empty), HYPERQWEN_MODELS=str(serve.folder / "models"))
    assert done.returncode == 3 and done.stdout == "" and not serve.started
    # The cause, what was searched, the rest of what is missing, and what this machine can do instead.
    assert "driver" in done.stderr and f"{empty}/libcuda.so.1: not there" in done.stderr
    assert f"the model folder {serve.folder}/models/qwen3.8-27b-fast does not exist" in done.stderr
    assert "./hq run .#demo" in done.stderr


def test_waiting_is_for_what_may_come_and_not_for_a_driver(serve: Serve) -> None:
    began = time.monotonic()
    with ports.claim("127.0.0.1", serve.port):
        done = serve.run("--preflight-only", "--wait", "1.5")
    assert done.returncode == 3 and "waiting up to" in done.stderr and time.monotonic() - began >= 1.5
    assert "fail  port: " in done.stdout

    serve.configure({"engine": "cuda", "model": None})
    (serve.folder / "empty").mkdir()
    began = time.monotonic()
    done = serve.run("--preflight-only", "--wait", "60", HYPERQWEN_DRIVER_DIR=str(serve.folder / "empty"))
    assert done.returncode == 3 and time.monotonic() - began < 30


def test_nobody_waits_for_a_port_while_the_model_is_missing(serve: Serve) -> None:
    (serve.folder / "model/tokenizer.json").unlink()
    began = time.monotonic()
    with ports.claim("127.0.0.1", serve.port):
        done = serve.run("--preflight-only", "--wait", "60")
    assert done.returncode == 3 and time.monotonic() - began < 30
    assert "waiting" not in done.stderr and "fail  port: " in done.stdout and "fail  model: " in done.stdout


def test_what_may_come() -> None:
    def item(name: str, **changes: Any) -> Item:
        return Item(name, "fail", "is not there", **changes)

    assert all(_may_come(item(name)) for name in ("cards", "device nodes", "memory of the card", "memory of card 1"))
    assert not _may_come(item("cards", code=errors.USAGE)), "a card that the profile names and this machine never had"
    assert not _may_come(item("model", code=errors.NOT_FOUND)) and not _may_come(item("/dev/shm"))
    assert not _may_come(item("device nodes", searched=("/usr/lib: not there",)))


def test_what_comes_meanwhile_is_found(serve: Serve) -> None:
    listener = ports.claim("127.0.0.1", serve.port)
    process = serve.start("--preflight-only", "--wait", "30")
    assert process.stderr is not None
    assert "waiting up to" in process.stderr.readline()
    listener.close()
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and f"ok    port: {serve.port} on 127.0.0.1 is free" in said


def test_a_look_alone_starts_nothing(serve: Serve) -> None:
    done = serve.run("--preflight-only", "--json")
    items = {item["name"]: item for item in json.loads(done.stdout)}
    assert done.returncode == 0 and not serve.started
    assert set(items) == {"key", "port", "model", "disk of the caches"}
    assert items["model"]["state"] == "ok"

    (serve.folder / "model" / "tokenizer.json").unlink()
    done = serve.run("--preflight-only")
    assert done.returncode == 4 and f"{serve.folder}/model has no tokenizer.json" in done.stderr


def test_everything_that_stands_in_the_way_is_one_message(serve: Serve) -> None:
    shard = serve.folder / "model/model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with ports.claim("0.0.0.0", serve.port):
        done = serve.run("--host", "0.0.0.0")
    assert done.returncode == 2 and not serve.started, done.stderr
    assert "3 things keep this server from starting" in done.stderr
    for part in ("a torn shard", f"port {serve.port} on 0.0.0.0 is in use", "no key is set"):
        assert part in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--profile", "F"], 4, "there is no profile 'F'"),
        (["--profile", "B"], 2, "profile B needs a GPU, and this program's engine is for the processor"),
        (["--context", "long"], 2, "--limits-context-tokens: limits.context_tokens is 'long'"),
        (["--server-tools", "yes"], 2, "server.tools is 'yes'; use true or false"),
        (["--server-port", "70000"], 2, "server.port"),
        (["--cache-dtype", "bf16"], 2, "cache.dtype is 'bf16'"),
        (["--contxt", "5"], 2, "--contxt"),
        (["--gpu", "rtx3090"], 2, "--gpu and --vram are for --print-argv"),
        (["--print-argv", "--gpu", "rtx3099"], 2, "did you mean"),
        (["--print-argv", "--gpu", "rtx3090", "--vram", "24"], 2, "both name a card"),
        (["--print-argv", "--preflight-only"], 2, "exclude each other"),
        (["--print-argv", "--profile", "B", "--parallel-tensor", "3"], 2, "parallel.tensor is 3"),
        (["--wait", "nan"], 2, "nan"),
        (["--wait", "-1"], 2, "--wait"),
        (["--host-file", "/nowhere/host.toml"], 4, "/nowhere/host.toml does not exist"),
    ],
)
def test_wrong_arguments(serve: Serve, arguments: list[str], code: int, said: str) -> None:
    done = serve.run(*arguments)
    assert done.returncode == code and said in done.stderr and not serve.started, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [(0o644, "sesame", "others may read the key file"), (0o600, "", "is empty"), (0o600, "a b", "a space")],
)
def test_a_key_file_that_is_none(serve: Serve, mode: int, text: str, said: str) -> None:
    key = serve.folder / "key"
    key.write_text(text)
    key.chmod(mode)
    done = serve.run("--api-key-file", str(key))
    assert done.returncode == 2 and said in done.stderr and not serve.started
    assert "sesame" not in done.stderr


def test_a_variable_that_is_spelled_wrong_is_refused(serve: Serve) -> None:
    done = serve.run(HYPERQWEN_LIMITS_CONTEXT_TOKEN="5")
    assert done.returncode == 2 and "did you mean HYPERQWEN_LIMITS_CONTEXT_TOKENS?" in done.stderr


def test_a_program_without_an_engine(serve: Serve) -> None:
    del serve.environ["HYPERQWEN_SERVE_CONFIG"]
    done = serve.run("--profile", "B")
    assert done.returncode == 4 and "./hq run .#serve" in done.stderr

    serve.configure({"engine": "cuda"})
    done = serve.run("--profile", "demo", HYPERQWEN_SERVE_CONFIG=str(serve.folder / "serve.json"))
    assert done.returncode == 2 and "./hq run .#demo" in done.stderr


def test_the_help_has_every_knob(serve: Serve) -> None:
    text = serve.run("--help").stdout
    assert [knob.flag for knob in knobs() if knob.flag not in text] == []
    assert "--config" not in text


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for profile in shipped():
        (GOLDEN / f"argv-{profile}.json").write_text(printed(profile))
