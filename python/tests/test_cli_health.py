from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hyperqwen.cli.health import command
from hyperqwen.errors import BadInputError, HyperqwenError

KEY = "secret"


class Server(ThreadingHTTPServer):
    """An engine as a client sees it: `requests` in flight, and tokens that grow by `pace` from look to look."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.pace = 0
        self.tokens = 100
        self.answer = 1
        self.hangs = False
        self.asked: list[str] = []

    @property
    def port(self) -> str:
        return str(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "nano"}]}))
            return
        self.server.tokens += self.server.pace
        self.reply(
            f"vllm:generation_tokens_total {self.server.tokens}\nvllm:iteration_tokens_total_sum {self.server.tokens}\n"
            f"vllm:num_requests_running {self.server.requests}\nvllm:num_requests_waiting 0\n"
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["model"], body["max_tokens"]) == ("nano", 1)
        self.server.asked.append(self.path)
        if self.server.hangs:
            time.sleep(3)
        usage = {"prompt_tokens": 1, "completion_tokens": self.server.answer}
        self.reply(json.dumps({"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage}))

    def reply(self, text: str) -> None:
        known = self.headers.get("Authorization") == f"Bearer {KEY}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(text.encode() if known else b"{}")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def health(server: Server, *arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(
        command,
        ["--timeout", "1", *arguments],
        env={"HYPERQWEN_API_KEY": KEY, "HYPERQWEN_SERVER_PORT": server.port, **environ},
    )


def test_idle_server_is_asked_for_a_token(server: Server) -> None:
    result = health(server, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["by"], found["requests"]) == ("token", 0)
    assert server.asked == ["/v1/completions"]


def test_busy_server_is_judged_by_its_counters_alone(server: Server) -> None:
    server.requests, server.pace, server.hangs = 3, 7, True
    result = health(server, "--json")
    assert json.loads(result.stdout)["by"] == "progress"
    assert server.asked == []


def test_server_without_progress_is_not_healthy(server: Server) -> None:
    server.requests = 3
    result = health(server)
    assert isinstance(result.exception, HyperqwenError)
    assert "no progress in 1 s: 3 requests in flight" in str(result.exception)
    assert server.asked == []


def test_idle_server_that_hangs_is_not_healthy(server: Server) -> None:
    server.hangs = True
    result = health(server)
    assert isinstance(result.exception, HyperqwenError)
    assert "no answer from" in str(result.exception)


def test_answer_without_a_token_is_not_healthy(server: Server) -> None:
    server.answer = 0
    assert "without a token" in str(health(server).exception)


def test_key_comes_from_the_same_places_as_the_servers(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    runner = CliRunner()
    environ = {"HYPERQWEN_SERVER_PORT": server.port, "HYPERQWEN_SERVER_API_KEY_FILE": str(file)}
    assert runner.invoke(command, ["--timeout", "1"], env=environ).exit_code == 0
    file.write_text("other")
    result = runner.invoke(command, ["--timeout", "1"], env=environ)
    assert "does not accept this key" in str(result.exception)


def test_no_server_is_not_healthy(server: Server) -> None:
    result = health(server, "--url", "http://127.0.0.1:9/")
    assert isinstance(result.exception, HyperqwenError)
    assert "no answer from http://127.0.0.1:9/v1/models" in str(result.exception)
    assert result.exception.fix == "no server on port 9: start one, or name another with --port"


def test_a_server_with_a_key_says_that_none_was_given(server: Server) -> None:
    result = CliRunner().invoke(command, ["--port", server.port, "--timeout", "1"], env={"HYPERQWEN_API_KEY": None})
    assert "wants a key, and none was given" in str(result.exception)


def test_two_keys_are_one_too_many(server: Server, tmp_path: Path) -> None:
    result = health(server, "--api-key-file", str(tmp_path / "key"))
    assert isinstance(result.exception, BadInputError)
