"""A stand-in for the engine's interpreter: takes the launcher's socket and pipe, and answers what it asks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SOURCE = """
import http.server, json, os, signal, socket, subprocess, sys, threading, time

LISTEN, STATUS = int(os.environ["HYPERQWEN_LISTEN_FD"]), int(os.environ["HYPERQWEN_STATUS_FD"])
OPTIONS = json.loads({options!r})
FOLDER = {folder!r}

def stage(name):
    os.write(STATUS, name.encode() + b"\\n")

with open(FOLDER + "/seen.part", "w") as file:
    json.dump({{"argv": sys.argv, "environ": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid()}}, file)
# Tests wait for the name: it must not be there before the content is.
os.replace(FOLDER + "/seen.part", FOLDER + "/seen.json")
signal.signal(signal.SIGTERM, signal.SIG_IGN if OPTIONS["deaf"] else lambda *_: os._exit(0))
if OPTIONS["child"]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(FOLDER + "/child.pid", "w") as file:
        file.write(str(child.pid))
print("engine: starting", flush=True)
for name in ("import", "configure", "load", "serve"):
    stage(name)
    if OPTIONS["hang_in"] == name:
        time.sleep(600)
    if OPTIONS["die_in"] == name:
        print("(Core pid=1) ERROR [core.py:1] ValueError: no such tensor", flush=True)
        print("\\n".join("line %d" % number for number in range(30)), flush=True)
        sys.exit(7)
    if OPTIONS["killed_in"] == name:
        os.kill(os.getpid(), signal.SIGKILL)

class Handler(http.server.BaseHTTPRequestHandler):
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
) -> Path:
    """An executable in `folder` that behaves as the engine's python would.

    What it saw goes to `seen.json` and `requests.jsonl` in the folder.

    Args:
        hang_in: stage that never ends.
        die_in: stage in which it exits with 7, after an exception and thirty lines.
        killed_in: stage in which a SIGKILL ends it.
        die_after: seconds of serving after which it exits with 3; 0 for never.
        deaf: whether it ignores SIGTERM.
        child: whether it starts a process of its own, whose number goes to `child.pid`.
        status: HTTP status of every answer.
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
        }
    )
    program = folder / "python3"
    program.write_text(f"#!{sys.executable}\n" + _SOURCE.format(options=options, folder=str(folder)))
    program.chmod(0o755)
    return program


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
