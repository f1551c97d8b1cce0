"""The demo as a user runs it: nano served over HTTP answers, quotes a prompt's cycle, refuses, and stops cleanly.

spec: demo (the program's output), nano (the model directory).
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx

from hyperqwen.prepare.truth import Truth

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
    if failures:
        sys.exit("\n".join(failures))
    warm = time.monotonic() - started
    report = f"{len(truth.prompts)} prompts as expected; ready in {cold:.1f} s, --once in {warm:.1f} s\n"
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report)


main()
