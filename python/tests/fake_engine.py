"""A stand-in for the engine's interpreter: takes the launcher's socket and pipe, and answers what it asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SOURCE = """
import http.server, json, os, shutil, signal, socket, subprocess, sys, threading, time

LISTEN, STATUS = int(os.environ["HYPERQWEN_LISTEN_FD"]), int(os.environ["HYPERQWEN_STATUS_FD"])
OPTIONS = json.loads({options!r})
FOLDER = {folder!r}

def stage(name):
    os.write(STATUS, name.encode() + b"\\n")

with open(FOLDER + "/seen.part", "w") as file:
    json.dump({{"argv": sys.argv, "environ": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}}, file)
# Tests wait for the name: it must not be there before the content is.
os.replace(FOLDER + "/seen.part", FOLDER + "/seen.json")
def end(*_):
    print("engine: finishing", flush=True)
    # As a draining engine: gone only when its last request is answered.
    threading.Timer(OPTIONS["lingers"], os._exit, [0]).start()

signal.signal(signal.SIGTERM, signal.SIG_IGN if OPTIONS["deaf"] else end)
if OPTIONS["child"]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(FOLDER + "/child.pid", "w") as file:
        file.write(str(child.pid))
print("engine: starting", flush=True)
for name in ("import", "configure", "load", "serve"):
    stage(name)
    if name == "load":
        print("".join(line + "\\n" for line in OPTIONS["says"]), end="", flush=True)
    if OPTIONS["hang_in"] == name:
        time.sleep(600)
    if OPTIONS["die_in"] == name:
        print("(Core pid=1) ERROR [core.py:1] ValueError: no such tensor", flush=True)
        print("\\n".join("line %d" % number for number in range(30)), flush=True)
        sys.exit(7)
    if OPTIONS["killed_in"] == name:
        os.kill(os.getpid(), signal.SIGKILL)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        # What a test says that the engine counts; it may change while this runs.
        with open(FOLDER + "/metrics.txt", "rb") as file:
            data = file.read()
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(FOLDER + "/requests.jsonl", "a") as file:
            file.write(json.dumps({{"path": self.path, "body": body, "key": self.headers["Authorization"]}}) + "\\n")
        if OPTIONS["status"] != 200:
            answer = {{"error": {{"message": "too long a prompt"}}}}
        elif self.path.endswith("/chat/completions"):
            text = "you said " + body["messages"][-1]["content"]
            answer = {{"choices": [{{"message": {{"content": text}}, "finish_reason": "stop"}}]}}
        else:
            answer = {{"choices": [{{"text": body["prompt"] + " and on", "finish_reason": "length"}}]}}
        answer["usage"] = {{"prompt_tokens": 3, "completion_tokens": 4}}
        data = json.dumps(answer).encode()
        self.send_response(OPTIONS["status"])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

listener = socket.socket(fileno=LISTEN)
server = http.server.ThreadingHTTPServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
server.socket.close()
server.socket = listener
if OPTIONS["removes"]:
    # With a file in its place, nobody makes the folder anew.
    shutil.rmtree(OPTIONS["removes"])
    open(OPTIONS["removes"], "w").close()
if OPTIONS["die_after"]:
    last_words = "RuntimeError: lost the device"
    threading.Timer(OPTIONS["die_after"], lambda: (print(last_words, flush=True), os._exit(3))).start()
server.serve_forever()
"""


def write(
    folder: Path,
    *,
    hang_in: str = "",
    die_in: str = "",
    killed_in: str = "",
    die_after: float = 0,
    deaf: bool = False,
    child: bool = False,
    status: int = 200,
    lingers: float = 0,
    says: Sequence[str] = (),
    removes: str = "",
) -> Path:
    """An executable in `folder` that behaves as the engine's python would.

    What it saw goes to `seen.json` and `requests.jsonl` in the folder. /metrics is the folder's `metrics.txt`.

    Args:
        hang_in: stage that never ends.
        die_in: stage in which it exits with 7, after an exception and thirty lines.
        killed_in: stage in which a SIGKILL ends it.
        die_after: seconds of serving after which it exits with 3; 0 for never.
        deaf: whether it ignores SIGTERM.
        child: whether it starts a process of its own, whose number goes to `child.pid`.
        status: HTTP status of every answer.
        lingers: seconds between SIGTERM and its end.
        says: lines of its log while it loads.
        removes: folder in whose place it puts a file before it answers.
    """
    options = json.dumps(
        {
            "hang_in": hang_in,
            "die_in": die_in,
            "killed_in": killed_in,
            "die_after": die_after,
            "deaf": deaf,
            "child": child,
            "status": status,
            "lingers": lingers,
            "says": list(says),
            "removes": removes,
        }
    )
    metrics(folder)
    program = folder / "python3"
    program.write_text(f"#!{sys.executable}\n" + _SOURCE.format(options=options, folder=str(folder)))
    program.chmod(0o755)
    return program


def metrics(folder: Path, *, requests: int = 0, tokens: int = 0, steps: int = 0) -> None:
    """Let the engine's /metrics say so from now on."""
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f'vllm:num_requests_running{{engine="0",model_name="nano"}} {float(requests)}',
        "# TYPE vllm:num_requests_waiting gauge",
        'vllm:num_requests_waiting{engine="0",model_name="nano"} 0.0',
        "# TYPE vllm:generation_tokens_total counter",
        f'vllm:generation_tokens_total{{engine="0",model_name="nano"}} {float(tokens)}',
        "# TYPE hyperqwen:engine_steps_total counter",
        f"hyperqwen:engine_steps_total {float(steps)}",
        "# TYPE hyperqwen:unanswered_requests gauge",
        f"hyperqwen:unanswered_requests {float(requests)}",
    ]
    draft = folder / "metrics.part"
    draft.write_text("\n".join(lines) + "\n")
    draft.replace(folder / "metrics.txt")


def seen(folder: Path) -> dict[str, Any]:
    """How the engine was started: argv, environ, cwd, pid."""
    found: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    return found


def requests(folder: Path) -> list[dict[str, Any]]:
    """The requests that it got: path, body, key."""
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def alive(pid: int) -> bool:
    """Whether process `pid` still runs; a zombie, which nobody has reaped yet, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
