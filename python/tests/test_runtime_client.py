from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from hyperqwen.errors import BadInputError, HyperqwenError
from hyperqwen.runtime.client import Client, Reply, Unreachable


class Handler(http.server.BaseHTTPRequestHandler):
    status: ClassVar[int] = 200
    body: ClassVar[Any] = None
    got: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.got.append((self.path, sent, self.headers["Authorization"]))
        data = Handler.body if isinstance(Handler.body, bytes) else json.dumps(Handler.body).encode()
        self.send_response(Handler.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def url() -> Iterator[str]:
    Handler.status, Handler.got = 200, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


def ask(client: Client) -> Reply:
    return client.complete("Mon", max_tokens=2, temperature=0.5, timeout=10)


def test_chat_and_completion(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy that does not exist: used, it would make every request fail.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with Client(url, "nano", "sesame") as client:
        Handler.body = {"choices": [{"text": "day", "finish_reason": "length"}], "usage": USAGE}
        assert ask(client) == Reply("day", "length", 5, 2)
        Handler.body = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": USAGE}
        assert client.chat("hello", max_tokens=9, temperature=0, timeout=10) == Reply("hi", "stop", 5, 2)

    (path, sent, key), (chat_path, chat, _) = Handler.got
    assert (path, key) == ("/v1/completions", "Bearer sesame")
    assert sent == {"model": "nano", "prompt": "Mon", "max_tokens": 2, "temperature": 0.5}
    assert chat_path == "/v1/chat/completions"
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(("status", "kind"), [(400, BadInputError), (401, HyperqwenError), (500, HyperqwenError)])
def test_a_refusal_says_what_the_server_said(url: str, status: int, kind: type[HyperqwenError]) -> None:
    Handler.status, Handler.body = status, {"error": {"message": "the prompt is too long"}}
    with (
        Client(url, "nano") as client,
        pytest.raises(HyperqwenError, match=rf"\({status}\): the prompt is too long") as raised,
    ):
        ask(client)
    assert type(raised.value) is kind


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"choices": []}', b'{"choices": [{}], "usage": {}}'])
def test_an_answer_of_another_api(url: str, body: bytes) -> None:
    Handler.body = body
    with Client(url, "nano") as client, pytest.raises(HyperqwenError, match="not one of the OpenAI API"):
        ask(client)


def test_nobody_there() -> None:
    with Client("http://127.0.0.1:9", "nano") as client:
        with pytest.raises(Unreachable, match="no answer from"):
            ask(client)
        with pytest.raises(Unreachable, match=r"no answer from http://127\.0\.0\.1:9/metrics: "):
            client.metrics(timeout=1)
