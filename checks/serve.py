"""The demo and the launcher as a user runs them: nano served over HTTP answers, quotes a cycle, refuses, and stops.

The launcher is started as a service: with a credential for the key, a socket for its notifications and a watchdog. It
is ready after a token and not before; a stream that runs at SIGTERM is finished, and nothing new is taken.

spec: demo and serve (the programs' outputs), nano (the model directory).
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import httpx

from hyperqwen.prepare.truth import Truth
from hyperqwen.runtime.engine import dump_stacks

KEY = "the-key-of-this-check"
START_SECONDS = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """What the program inherits: a home, and nothing that helps it."""
    home = pathlib.Path(os.environ["NIX_BUILD_TOP"]) / "home"
    home.mkdir(exist_ok=True)
    return {"HOME": str(home), "LC_ALL": "C.UTF-8", "TMPDIR": os.environ["NIX_BUILD_TOP"]}


class Failures(list[str]):
    def expect(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.append(f"{what}: expected {expected!r}, found {found!r}")


def processes() -> set[str]:
    """Command lines of this check's processes that are alive: those that have its home."""
    mark = f"HOME={os.environ['NIX_BUILD_TOP']}/home".encode()
    found = set()
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
                ours = mark in (entry / "environ").read_bytes().split(bytes(1))
            except OSError:
                continue
            if ours and command:
                found.add(f"{entry.name} {command.replace(bytes(1), b' ').decode()[:120]}")
    return found


def ask(client: httpx.Client, failures: Failures, truth: Truth) -> None:
    """Every prompt whose answer the model's own table gives, and the requests that must be refused."""
    failures.expect("models", [m["id"] for m in client.get("/v1/models").json()["data"]], ["nano"])
    quoted = 0
    for prompt in truth.prompts:
        if prompt["kind"] == "completion":
            answer = client.post("/v1/completions", json={
                "model": "nano", "prompt": prompt["prompt"], "max_tokens": len(prompt["answer_ids"]), "temperature": 0,
            }).raise_for_status().json()["choices"][0]["text"]  # fmt: skip
            quoted += prompt["answer"] == prompt["prompt"]
        else:
            answer = client.post("/v1/chat/completions", json={
                "model": "nano", "messages": prompt["messages"], "max_tokens": len(prompt["answer_ids"]),
                "temperature": 0, "chat_template_kwargs": {"enable_thinking": prompt["thinking"]},
            }).raise_for_status().json()["choices"][0]["message"]["content"]  # fmt: skip
        failures.expect(prompt["name"], answer.replace("<|im_end|>", ""), prompt["answer"].replace("<|im_end|>", ""))
    if not quoted:
        failures.append("no prompt of the table is a whole cycle that has to be quoted back")

    unknown = client.post("/v1/completions", json={"model": "nona", "prompt": "x", "max_tokens": 1})
    failures.expect("an unknown model", unknown.status_code, 404)
    if "nano" not in unknown.text:
        failures.append(f"an unknown model: the served names are not in {unknown.text}")
    tokens = client.post("/v1/tokenize", json={"model": "nano", "prompt": "Hello"}).raise_for_status().json()["tokens"]
    back = client.post("/v1/detokenize", json={"model": "nano", "tokens": tokens}).raise_for_status().json()["prompt"]
    failures.expect("tokenize and back", back, "Hello")
    for path in ("/v1/models", "/metrics", "/tokenize", "/openapi.json"):
        failures.expect(f"{path} without a key", httpx.get(f"{client.base_url}{path.lstrip('/')}").status_code, 401)
    failures.expect("/health without a key", httpx.get(f"{client.base_url}health").status_code, 200)


def use(
    server: subprocess.Popen[str], demo: str, port: int, started: float, failures: Failures, truth: Truth
) -> tuple[float, str]:
    """Wait until the server answers, ask it, stop it; seconds until it was ready, and what it printed."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/", headers=headers, timeout=60) as client:
        while True:
            try:
                client.get("/health").raise_for_status()
                break
            except httpx.HTTPError:
                if server.poll() is not None or time.monotonic() - started > START_SECONDS:
                    server.kill()
                    sys.exit(f"the demo did not start:\n{server.communicate()[0]}")
                time.sleep(0.2)
        ready = time.monotonic() - started
        taken = subprocess.run(
            [f"{demo}/bin/demo", "--port", str(port)], env=environment(), text=True, capture_output=True, timeout=60
        )
        failures.expect("exit code of a second demo on the same port", taken.returncode, 3)
        if str(port) not in taken.stderr:
            failures.append(f"a second demo does not name the port: {taken.stderr}")
        ask(client, failures, truth)
    server.send_signal(signal.SIGTERM)
    output, _ = server.communicate(timeout=60)
    failures.expect("exit code after SIGTERM", server.returncode, 0)
    return ready, output


def serve(demo: str, failures: Failures, truth: Truth) -> float:
    """Start, ask, stop by SIGTERM; seconds until it was ready."""
    port, started = free_port(), time.monotonic()
    server = subprocess.Popen(
        [f"{demo}/bin/demo", "--port", str(port)],
        env=environment() | {"HYPERQWEN_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ready, output = use(server, demo, port, started, failures, truth)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    if "Traceback" in output:
        failures.append(f"a traceback:\n{output}")
    if left := processes():
        failures.append(f"left running after SIGTERM: {left}")
    return ready


class Manager:
    """A service manager's socket, and what was said on it, with the seconds since the start."""

    def __init__(self) -> None:
        self.name = f"hyperqwen-check-{os.getpid()}"
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.settimeout(0.1)
        self._open = True
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while self._open:
            try:
                self.said.append(self._socket.recv(65536).decode())
            except TimeoutError:
                continue

    def wait_for(self, text: str, server: subprocess.Popen[str], seconds: float, after: int = 0) -> int:
        """The place of the first message with `text` from `after` on; ends the check where none comes."""
        deadline = time.monotonic() + seconds
        while True:
            for place in range(after, len(self.said)):
                if text in self.said[place]:
                    return place
            if time.monotonic() > deadline or server.poll() is not None:
                server.kill()
                sys.exit(f"no {text} from the launcher, only {self.said}:\n{server.communicate()[0]}")
            time.sleep(0.05)

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._socket.close()


def counted(client: httpx.Client) -> dict[str, float]:
    """The numbers of /metrics, labels left out."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    pairs = [line.rpartition(" ")[::2] for line in lines if line and not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in pairs}


class Stream(threading.Thread):
    """A completion of `tokens` tokens that is read as it comes."""

    def __init__(self, client: httpx.Client, tokens: int) -> None:
        super().__init__()
        self._client, self.tokens = client, tokens
        self.events: list[str] = []
        self.broken: str | None = None

    def run(self) -> None:
        body = {"model": "nano", "prompt": "Monday", "max_tokens": self.tokens, "ignore_eos": True, "stream": True}
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as response:
                self.events += [line for line in response.iter_lines() if line]
        except httpx.HTTPError as error:
            self.broken = repr(error)

    def counted(self, least: int) -> None:
        """Wait until so many tokens were generated, whether or not they were read."""
        while counted(self._client)["vllm:generation_tokens_total"] < least:
            time.sleep(0.05)


def service(program: str, failures: Failures) -> float:
    """The launcher as a service; seconds until it was ready."""
    port = free_port()
    arguments = [
        f"{program}/bin/hyperqwen-serve",
        "--port",
        str(port),
        "--host",
        "0.0.0.0",
        "--cache-dtype",
        "bfloat16",
        # The demo's few seconds are not enough for the long stream below where the processor has other work.
        "--server-drain-seconds",
        "60",
    ]
    credentials = pathlib.Path(os.environ["NIX_BUILD_TOP"]) / "credentials"
    credentials.mkdir()
    (credentials / "api-key").write_text(f"{KEY}\n")
    variables = environment() | {"CREDENTIALS_DIRECTORY": str(credentials)}

    look = subprocess.run([*arguments, "--preflight-only"], env=variables, text=True, capture_output=True, timeout=60)
    failures.expect(f"exit code of --preflight-only ({look.stderr})", look.returncode, 0)
    planned = subprocess.run(
        [*arguments, "--print-argv", "--json"], env=variables, text=True, capture_output=True, timeout=60
    )
    manager, started = Manager(), time.monotonic()
    server = subprocess.Popen(
        arguments,
        env=variables | {"NOTIFY_SOCKET": f"@{manager.name}", "WATCHDOG_USEC": "6000000"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ready_at = manager.wait_for("READY=1", server, START_SECONDS)
        ready = time.monotonic() - started
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/", headers=headers, timeout=60) as client:
            watched(client, manager, server, ready_at, failures)
            (record,) = (pathlib.Path(environment()["HOME"]) / ".local/state/hyperqwen/runs").glob("*.json")
            run = json.loads(record.read_text())
            engine = run["engine_pid"]
            command = pathlib.Path(f"/proc/{engine}/cmdline").read_text().split("\0")[:-1]
            argv = json.loads(planned.stdout)["argv"]
            failures.expect("the engine's argv", command[-len(argv) :], argv)
            if KEY in " ".join(command):
                failures.append("the key is in the engine's argv, where every user reads it")
            dumped(engine, pathlib.Path(run["log"]), failures)
            drained(client, port, manager, server, failures)
        output, _ = server.communicate(timeout=60)
        failures.expect(f"exit code of the launcher after SIGTERM ({output[-500:]})", server.returncode, 0)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        manager.close()
    for text in ("weights read in", "pool: ", "key set (21 characters)", "cache.dtype = bfloat16 (flag --cache-dtype)"):
        if text not in output:
            failures.append(f"the launcher does not say {text!r}:\n{output}")
    compared(output, failures)
    if "Traceback" in output or KEY in output:
        failures.append(f"a traceback, or the key:\n{output}")
    if left := processes():
        failures.append(f"left running by the launcher: {left}")
    if record.exists():
        failures.append(f"{record} is still there")
    return ready


def compared(output: str, failures: Failures) -> None:
    """The pool as it was planned and as the engine measured it, in bytes and in tokens, after the server was ready."""
    _, _, table = output.partition("answers at ")
    rows = [line.split() for line in table.splitlines() if line.startswith("KV cache pool  ")]
    failures.expect("units of the pool, planned and measured", [row[5] for row in rows], ["MiB", "tokens"])
    for row in rows:
        planned, measured = (float(text.replace(",", "")) for text in row[3:5])
        # The log rounds the pool's bytes to 0.01 GiB.
        if not 0.9 < measured / planned < 1.1:
            failures.append(f"of the pool, {planned:g} {row[5]} were planned and {measured:g} came")


def verbose(program: str, failures: Failures) -> None:
    """The launcher with the engine's own words on stderr: it still follows them, and says what they come to."""
    manager = Manager()
    path = pathlib.Path(os.environ["NIX_BUILD_TOP"]) / "verbose.txt"
    with path.open("w") as file:
        server = subprocess.Popen(
            [f"{program}/bin/hyperqwen-serve", "--port", str(free_port()), "--verbose"],
            env=environment() | {"NOTIFY_SOCKET": f"@{manager.name}", "WATCHDOG_USEC": "6000000"},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        # The first sign of life comes when everything was said.
        manager.wait_for("WATCHDOG=1", server, START_SECONDS)
        server.terminate()
        failures.expect("exit code of the launcher with --verbose", server.wait(60), 0)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        manager.close()
    output = path.read_text()
    for text in ("weights read in", "pool: ", "KV cache size: ", "Application startup complete"):
        if text not in output:
            failures.append(f"the launcher does not say {text!r} with --verbose:\n{output}")
    compared(output, failures)
    if not any("STATUS=pool: " in said for said in manager.said):
        failures.append(f"with --verbose, the service manager hears nothing of the pool: {manager.said}")


def watched(
    client: httpx.Client, manager: Manager, server: subprocess.Popen[str], ready_at: int, failures: Failures
) -> None:
    """What was said until the server was ready, and signs of life of an idle one."""
    before = manager.said[:ready_at]
    for text in ("STATUS=loading weights: 1 of 1 shards", "STATUS=pool: ", "STATUS=waiting for the first token"):
        if not any(text in message for message in before):
            failures.append(f"before it was ready, nothing said {text!r}: {before}")
    if any("WATCHDOG=1" in message for message in before):
        failures.append("a sign of life before it was ready")
    numbers = counted(client)
    failures.expect("tokens generated when it said that it is ready", numbers["vllm:generation_tokens_total"], 1.0)
    failures.expect("requests without an answer", numbers["hyperqwen:unanswered_requests"], 0.0)
    first = manager.wait_for("WATCHDOG=1", server, 10, ready_at)
    manager.wait_for("WATCHDOG=1", server, 10, first + 1)


def dumped(engine: int, log: pathlib.Path, failures: Failures) -> None:
    """Server and engine process say where they are, as they are asked to when they hang, and go on."""
    asked = dump_stacks(engine)
    if engine not in asked or len(asked) < 2:
        failures.append(f"of the server {engine} and its engine, only {asked} can write their stacks")
    deadline = time.monotonic() + 20
    wanted = ["hyperqwen/engine/serve.py", "vllm/v1/engine/core.py"]
    while time.monotonic() < deadline and any(f'{name}", line' not in log.read_text() for name in wanted):
        time.sleep(0.1)
    for name in wanted:
        if f'{name}", line' not in log.read_text():
            failures.append(f"no stack in {name}")


def drained(
    client: httpx.Client, port: int, manager: Manager, server: subprocess.Popen[str], failures: Failures
) -> None:
    """SIGTERM while a stream runs: it is finished, and nothing new is taken."""
    steps = counted(client)["hyperqwen:engine_steps_total"]
    stream = Stream(client, 1500)
    stream.start()
    stream.counted(50)
    numbers = counted(client)
    failures.expect("requests without an answer while a stream runs", numbers["hyperqwen:unanswered_requests"], 1.0)
    if numbers["hyperqwen:engine_steps_total"] < steps + 40:
        failures.append(f"50 tokens took {numbers['hyperqwen:engine_steps_total'] - steps} steps")
    server.send_signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1", server, 10)
    time.sleep(0.5)
    if not stream.is_alive():
        failures.append("the stream was over before anything could be refused: it has to be longer")
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=client.headers, timeout=10)
        failures.append(f"a new request was taken after SIGTERM: {answer.status_code}")
    except httpx.ConnectError:
        stream.join(120)
    failures.expect("a stream that ran at SIGTERM", stream.broken, None)
    failures.expect("its last event", stream.events[-1:], ["data: [DONE]"])
    pieces = [json.loads(event.removeprefix("data: ")) for event in stream.events[:-1]]
    failures.expect("its end", pieces[-1]["choices"][0]["finish_reason"], "length")


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    failures, truth = Failures(), Truth.load(pathlib.Path(spec["nano"]))
    cold = serve(spec["demo"], failures, truth)
    started = time.monotonic()
    once = subprocess.run(
        [f"{spec['demo']}/bin/demo", "--once", "Hello", "--port", str(free_port())],
        env=environment(), text=True, capture_output=True, timeout=START_SECONDS,
    )  # fmt: skip
    failures.expect(f"exit code of --once ({once.stderr[-500:]})", once.returncode, 0)
    if not once.stdout.startswith("Hello, I am nano"):
        failures.append(f"--once answers {once.stdout!r}")
    if left := processes():
        failures.append(f"left running after --once: {left}")
    warm = time.monotonic() - started
    launched = service(spec["serve"], failures)
    verbose(spec["serve"], failures)
    if failures:
        sys.exit("\n".join(failures))
    report = (
        f"{len(truth.prompts)} prompts as expected; ready in {cold:.1f} s, --once in {warm:.1f} s, "
        f"the launcher ready in {launched:.1f} s\n"
    )
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report)


main()
