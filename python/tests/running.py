"""Servers as the commands for them see them: a process that takes SIGTERM, its record, its log, and its HTTP side."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hyperqwen.runtime import records
from hyperqwen.runtime.records import Record

# Says that it is there; ends by the first SIGTERM after `drain` seconds, or by the second at once.
_LAUNCHER = """
import os, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
print("up", flush=True)
while not told or (len(told) < 2 and time.monotonic() < told[0] + float(sys.argv[1])):
    time.sleep(0.02)
"""
METRICS = """\
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total {generated}
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total 12
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting 0
"""


@contextmanager
def launcher(logs: Path, *, drain: float = 0.0, **values: object) -> Iterator[tuple[subprocess.Popen[str], Record]]:
    """A process that ends as a launcher does, with its record in `logs`; `values` are the record's."""
    process = subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(drain)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        kept = record(pid=process.pid, started=psutil.Process(process.pid).create_time(), **values)
        records.write(logs, kept)
        yield process, kept
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def record(**changes: object) -> Record:
    """A record of profile B on its usual port."""
    port = changes.get("port", 18020)
    values: dict[str, object] = {
        "command": "serve",
        "profile": "B",
        "model": "qwen3.8-27b",
        "host": "127.0.0.1",
        "port": port,
        "url": f"http://127.0.0.1:{port}/v1",
        "ready": True,
    }
    return Record.model_validate(values | changes)


class Http:
    """A server's HTTP side: /health with `status`, /metrics for those who send `key`.

    running: requests in flight; step: tokens that come between two looks.
    """

    def __init__(self) -> None:
        self.status, self.running, self.step, self.key = 200, 0, 0, ""
        self.generated = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, status = "", outer.status
                if self.path == "/metrics":
                    outer.generated += outer.step
                    body = METRICS.format(generated=outer.generated, running=outer.running)
                    right = not outer.key or self.headers["Authorization"] == f"Bearer {outer.key}"
                    status = 200 if right else 401
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
