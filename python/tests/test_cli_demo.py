from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.runtime import ports
from tests import fake_engine

COMMAND = [sys.executable, "-c", "from hyperqwen.cli import main; main(prog_name='hyperqwen')", "demo"]
PYTHON_DIR = Path(__file__).resolve().parent.parent


class Demo:
    """`hyperqwen demo` with a stand-in for the engine, in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with ports.claim("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        self.environ = {
            "HOME": str(folder / "home"),
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": str(PYTHON_DIR),
            "HYPERQWEN_DEMO_CONFIG": str(folder / "demo.json"),
            "HYPERQWEN_DEMO_PORT": str(self.port),
            "LD_LIBRARY_PATH_PROBE": "caller",
        }
        self.configure()

    def configure(self, config: dict[str, Any] | None = None, **behaviour: Any) -> None:
        (self.folder / "model").mkdir(exist_ok=True)
        program = fake_engine.write(self.folder, **behaviour)
        paths: dict[str, Any] = {
            "engine": "cpu",
            "engine_python": str(program),
            "model": str(self.folder / "model"),
            "engine_id": "abc-engine-cpu",
            "cc": "/cc/bin",
        }
        (self.folder / "demo.json").write_text(json.dumps(paths | (config or {})))

    def run(self, *arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments], env=self.environ | environ, input=stdin, capture_output=True, text=True, timeout=60
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *arguments], env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def started(self) -> bool:
        return (self.folder / "seen.json").exists()


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def secret(file: Path) -> None:
    file.write_text("sesame\n")
    file.chmod(0o600)


def test_once_prints_the_answer_alone(demo: Demo) -> None:
    done = demo.run("--once", "good day")

    assert (done.returncode, done.stdout) == (0, "you said good day\n"), done.stderr
    assert "importing the engine" in done.stderr and "first token" in done.stderr
    request: Any = fake_engine.requests(demo.folder)[0]
    assert request["body"]["max_tokens"] == 64 and request["body"]["temperature"] == 0
    assert not fake_engine.alive(int(str(fake_engine.seen(demo.folder)["pid"])))


def test_once_reads_stdin_completes_and_counts(demo: Demo) -> None:
    done = demo.run("--once", "-", "--complete", "--json", "--max-tokens", "5", stdin="Monday\n")

    answer = json.loads(done.stdout)
    assert answer["answer"] == "Monday and on" and answer["finish_reason"] == "length"
    assert (answer["model"], answer["prompt_tokens"], answer["completion_tokens"]) == ("nano", 3, 4)
    request: Any = fake_engine.requests(demo.folder)[0]
    assert request["path"] == "/v1/completions" and request["body"]["max_tokens"] == 5


def test_only_the_last_line_end_of_stdin_is_not_the_questions(demo: Demo) -> None:
    demo.run("--once", "-", stdin=" one\ntwo \n\n")
    request: Any = fake_engine.requests(demo.folder)[0]
    assert request["body"]["messages"][-1]["content"] == " one\ntwo \n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_announces_itself_after_a_token_and_stops_cleanly(demo: Demo, number: signal.Signals) -> None:
    demo.configure(child=True)
    process = demo.start()
    assert process.stdout is not None and process.stderr is not None
    first = process.stdout.readline()

    assert f"nano answers at http://127.0.0.1:{demo.port}/v1" in first
    assert len(fake_engine.requests(demo.folder)) == 1, "ready was said before a token came"
    process.send_signal(number)
    rest, errors = process.stdout.read(), process.stderr.read()
    assert process.wait(20) == 0, errors
    assert "curl http://127.0.0.1" in rest
    assert "Traceback" not in errors
    for pid in (int(str(fake_engine.seen(demo.folder)["pid"])), int((demo.folder / "child.pid").read_text())):
        wait_for(lambda pid=pid: not fake_engine.alive(pid), f"end of process {pid}")  # type: ignore[misc]
    ports.claim("127.0.0.1", demo.port).close()


def test_serve_as_json(demo: Demo) -> None:
    process = demo.start("--json")
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=20)

    assert (said["url"], said["model"], said["key"]) == (f"http://127.0.0.1:{demo.port}/v1", "nano", False)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_start_that_is_interrupted(demo: Demo, number: signal.Signals, code: int) -> None:
    demo.configure(hang_in="load")
    process = demo.start()
    wait_for(lambda: demo.started, "engine")
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)

    assert process.returncode == code
    assert "Traceback" not in errors
    assert not fake_engine.alive(int(str(fake_engine.seen(demo.folder)["pid"])))


def test_an_engine_that_dies_at_start(demo: Demo) -> None:
    demo.configure(die_in="configure")
    done = demo.run()

    assert (done.returncode, done.stdout) == (1, "")
    assert "ended by itself (exit status 7)" in done.stderr and "ValueError: no such tensor" in done.stderr
    log = demo.folder / f"home/.local/state/hyperqwen/demo-{demo.port}.log"
    assert str(log) in done.stderr and "line 3" in log.read_text()


def test_an_engine_that_dies_while_serving(demo: Demo) -> None:
    demo.configure(die_after=0.5)
    done = demo.run()

    assert done.returncode == 1
    assert "nano answers at" in done.stdout
    assert "exit status 3" in done.stderr and "RuntimeError: lost the device" in done.stderr


def test_an_engine_that_is_too_slow(demo: Demo) -> None:
    demo.configure(hang_in="load")
    done = demo.run("--timeout", "1")

    assert done.returncode == 1
    assert "was not ready in 1 s (--timeout)" in done.stderr and "--timeout 2" in done.stderr


def test_verbose_shows_the_engines_words(demo: Demo) -> None:
    done = demo.run("--once", "x", "--verbose")

    assert done.stdout == "you said x\n"
    assert "engine: starting" in done.stderr
    assert not list(demo.folder.rglob("*.log"))


def test_a_port_in_use_is_found_out_before_anything_starts(demo: Demo) -> None:
    with ports.claim("127.0.0.1", demo.port):
        done = demo.run()

    assert done.returncode == 3
    assert f"port {demo.port} on 127.0.0.1 is in use by" in done.stderr and f"process {os.getpid()}" in done.stderr
    assert "--port" in done.stderr and not demo.started


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", ""])
def test_a_wrong_port(demo: Demo, port: str) -> None:
    done = demo.run("--port", port)

    assert done.returncode == 2 and not demo.started
    assert "port" in done.stderr.lower() and "Traceback" not in done.stderr


def test_the_environment_twin_of_an_option(demo: Demo) -> None:
    done = demo.run(HYPERQWEN_DEMO_PORT="70000")
    assert done.returncode == 2 and "HYPERQWEN_DEMO_PORT" in done.stderr and "70000" in done.stderr


def test_the_key_reaches_the_engine_and_the_question_but_no_argv(demo: Demo) -> None:
    secret(demo.folder / "key")
    done = demo.run("--once", "x", "--api-key-file", str(demo.folder / "key"))

    assert done.returncode == 0, done.stderr
    seen: Any = fake_engine.seen(demo.folder)
    assert seen["environ"]["VLLM_API_KEY"] == "sesame"
    assert "sesame" not in " ".join(seen["argv"])
    assert fake_engine.requests(demo.folder)[0]["key"] == "Bearer sesame"


@pytest.mark.parametrize("twin", [False, True])
def test_the_example_takes_the_key_from_where_the_server_did(demo: Demo, twin: bool) -> None:
    file = demo.folder / "my key"
    secret(file)
    if twin:
        demo.environ["HYPERQWEN_DEMO_API_KEY_FILE"] = str(file)
    process = demo.start(*([] if twin else ["--api-key-file", str(file)]))
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]
    process.terminate()
    process.communicate(timeout=20)

    assert f""" -H "Authorization: Bearer $(cat '{file}')" """ in said[2], said
    assert "sesame" not in "".join(said)


def test_the_example_names_the_variable_that_holds_the_key(demo: Demo) -> None:
    demo.environ["HYPERQWEN_API_KEY"] = "sesame"
    process = demo.start()
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]
    process.terminate()
    process.communicate(timeout=20)

    assert ' -H "Authorization: Bearer $HYPERQWEN_API_KEY" ' in said[2], said


def test_two_keys_are_refused(demo: Demo) -> None:
    secret(demo.folder / "key")
    done = demo.run("--api-key-file", str(demo.folder / "key"), HYPERQWEN_API_KEY="sesame")
    assert done.returncode == 2 and "two keys are given: HYPERQWEN_API_KEY and the key file" in done.stderr
    assert not demo.started


def test_the_help_is_for_those_who_start_it(demo: Demo) -> None:
    text = demo.run("--help").stdout
    assert "--api-key-file" in text and "--config" not in text


def test_an_empty_key_is_refused(demo: Demo) -> None:
    done = demo.run("--once", "x", HYPERQWEN_API_KEY="")
    assert done.returncode == 2 and "HYPERQWEN_API_KEY is empty" in done.stderr and not demo.started


def test_other_machines_only_with_a_key(demo: Demo) -> None:
    done = demo.run("--host", "0.0.0.0")
    assert done.returncode == 2 and "no key is set" in done.stderr and not demo.started

    done = demo.run("--host", "0.0.0.0", "--once", "x", HYPERQWEN_API_KEY="sesame")
    assert (done.returncode, done.stdout) == (0, "you said x\n"), done.stderr


def test_the_engines_environment_is_its_own(demo: Demo) -> None:
    demo.run("--once", "x")
    seen: Any = fake_engine.seen(demo.folder)

    assert "LD_LIBRARY_PATH_PROBE" not in seen["environ"] and "PYTHONPATH" not in seen["environ"]
    assert seen["environ"]["PATH"] == f"{demo.folder}:/cc/bin"
    assert seen["environ"]["VLLM_CACHE_ROOT"] == f"{demo.folder}/home/.cache/hyperqwen/abc-engine-cpu/vllm"


def test_a_cache_folder_that_cannot_be(demo: Demo) -> None:
    (demo.folder / "file").write_text("")
    done = demo.run("--once", "x", "--cache-dir", str(demo.folder / "file/below"))
    assert done.returncode == 3 and "cannot be used" in done.stderr and not demo.started

    done = demo.run("--once", "x", HOME=str(demo.folder / "file"))
    assert done.returncode == 0 and "caches of this run are in" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--once", "  "], "--once has no text"),
        (["--complete"], "--complete has nothing to go on after"),
        (["--max-tokens", "2048"], "--max-tokens 2048 leaves no room"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--timeout", "0"], "timeout"),
        (["--prot", "1"], "--port"),
    ],
)
def test_wrong_arguments(demo: Demo, arguments: list[str], said: str) -> None:
    done = demo.run(*arguments)
    assert done.returncode == 2 and said in done.stderr and not demo.started, done.stderr


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({"modle": "x"}, 2, "modle is not a field; did you mean 'model'?"),
        ({"engine_id": "../up"}, 2, "engine_id is '../up'"),
        ({"model": "/nowhere/nano"}, 3, "is gone: /nowhere/nano"),
    ],
)
def test_a_wrong_configuration(demo: Demo, config: dict[str, Any], code: int, said: str) -> None:
    demo.configure(config)
    done = demo.run("--once", "x")
    assert done.returncode == code and said in done.stderr, done.stderr


def test_no_configuration(demo: Demo) -> None:
    done = demo.run(HYPERQWEN_DEMO_CONFIG=str(demo.folder / "none.json"))
    assert done.returncode == 4 and "does not exist" in done.stderr


def test_a_question_that_the_server_refuses(demo: Demo) -> None:
    demo.configure(status=400)
    done = demo.run("--once", "x")
    assert done.returncode == 2 and "too long a prompt" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("timeout", ["nan", "inf", "0", "-1"])
def test_a_time_limit_is_a_number_of_seconds(demo: Demo, timeout: str) -> None:
    done = demo.run("--timeout", timeout)
    assert done.returncode == 2 and timeout in done.stderr and "Traceback" not in done.stderr
    assert not demo.started


def test_a_variable_that_is_spelled_wrong_is_refused(demo: Demo) -> None:
    done = demo.run(HYPERQWEN_DEMO_PROT="18021")
    assert done.returncode == 2 and "HYPERQWEN_DEMO_PROT" in done.stderr and "HYPERQWEN_DEMO_PORT" in done.stderr
    assert not demo.started
