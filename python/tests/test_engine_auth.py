from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.engine import auth
from hyperqwen.engine.auth import OPEN, InvalidKeyError, KeyMiddleware, check_serve_arguments, configured_keys

KEYS = ("alpha-key", "beta-key")
PASSED = 204

Headers = Sequence[tuple[bytes, bytes]]
BEARER: Headers = [(b"authorization", b"Bearer alpha-key")]
ORIGIN = (b"origin", b"https://app.example")
WANTED = (b"access-control-request-method", b"POST")


class Server:
    """An application behind the middleware: it says 204 or accepts, and remembers which scopes got through."""

    def __init__(self, keys: Sequence[str] = KEYS) -> None:
        self.reached: list[dict[str, Any]] = []
        self.middleware = KeyMiddleware(self.app, keys)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(dict(scope))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": PASSED, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.accept"})

    def ask(self, path: str, method: str = "GET", headers: Headers = (), **scope: Any) -> list[dict[str, Any]]:
        return self.send({"type": "http", "method": method, "path": path, "headers": list(headers), **scope})

    def connect(self, path: str, headers: Headers = (), **scope: Any) -> list[dict[str, Any]]:
        return self.send({"type": "websocket", "path": path, "headers": list(headers), **scope})

    def send(self, scope: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            raise AssertionError("the guard must decide without reading the body")

        async def send(message: Any) -> None:
            sent.append(dict(message))

        asyncio.run(self.middleware(scope, receive, send))
        return sent


def status(messages: list[dict[str, Any]]) -> int:
    return int(messages[0]["status"])


def test_the_open_routes_are_exactly_these() -> None:
    read = {"GET", "HEAD"}
    assert dict(OPEN) == {
        "/health": read,
        "/ping": read | {"POST"},
        "/load": read,
        "/version": read,
        "/": read,
        "/api/status": read,
        "/api/experimental/model-recommendations": read,
        "/api/show": {"POST"},
    }


@pytest.mark.parametrize("path", [*OPEN, "/v1/models", "/metrics", "/anything", "", "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_without_a_key_only_the_listed_methods_of_the_listed_paths_pass(path: str, method: str) -> None:
    server = Server()
    open_ = method in OPEN.get(path, ())
    assert status(server.ask(path, method)) == (PASSED if open_ else 401)
    assert len(server.reached) == open_


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/v1/chat/completions", "/invocations", "/metrics", "/docs", "/openapi.json", "/static/x"),
        *("/health/", "//health", "/HEALTH", "/healthz", "/health/x", "/health/../v1/models", "/health\n", "/health;x"),
        *("/health%2f", "/%68ealth", "health", "/load/", "/ping/invocations", "/api", "/api/show/x", "//", "/./health"),
    ],
)
def test_a_path_that_resembles_an_open_one_needs_the_key(path: str) -> None:
    server = Server()
    assert [status(server.ask(path, method)) for method in ("GET", "POST")] == [401, 401]
    assert not server.reached, "reached the application without a key"
    assert status(server.ask(path, headers=BEARER)) == PASSED


@given(
    path=st.text(), method=st.sampled_from(["GET", "POST", "OPTIONS"]), root=st.sampled_from(["", "/r", "/health", "/"])
)
def test_no_path_opens_by_accident(path: str, method: str, root: str) -> None:
    scope = {"type": "http", "method": method, "path": path, "root_path": root, "headers": []}
    passed = status(Server().send(scope)) == PASSED
    assert passed == (method in OPEN.get(starlette_route_path(path, root), ()))


def starlette_route_path(path: str, root: str) -> str:
    """What Starlette 1.10's router matches, statement by statement."""
    if not root:
        return path
    if not path.startswith(root):
        return path
    if path == root:
        return ""
    if path[len(root)] == "/":
        return path[len(root) :]
    return path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/llm/health", PASSED),
        ("/health", PASSED),  # the router takes it too: a proxy may have stripped the prefix
        ("/llm/v1/models", 401),
        ("/llmhealth", 401),
        ("/llm", 401),
        ("/llm/", PASSED),
        ("/llm//health", 401),
        ("/llm/llm/health", 401),
        ("/LLM/health", 401),
        ("/llm/health/", 401),
    ],
)
def test_root_path_is_removed_as_the_router_removes_it(path: str, expected: int) -> None:
    assert status(Server().ask(path, root_path="/llm")) == expected


@pytest.mark.parametrize("root", ["/", "/hea", "/llm/"])
def test_root_path_that_does_not_end_at_a_slash_is_not_removed(root: str) -> None:
    assert status(Server().ask("/health", root_path=root)) == PASSED
    assert status(Server().ask(root + "health", root_path=root)) == (PASSED if root == "/" else 401)


def test_root_path_that_is_itself_an_open_path_opens_nothing() -> None:
    assert status(Server().ask("/health", root_path="/health")) == 401
    assert status(Server().ask("/health/v1/models", root_path="/health")) == 401
    assert status(Server().ask("/health/health", root_path="/health")) == PASSED


@pytest.mark.parametrize(
    "value",
    [b"Bearer alpha-key", b"Bearer beta-key", b"bearer alpha-key", b"BEARER beta-key", b"Bearer   alpha-key"],
)
def test_every_configured_key_is_accepted_and_the_scheme_in_any_case(value: bytes) -> None:
    assert status(Server().ask("/v1/models", headers=[(b"Authorization", value)])) == PASSED


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"alpha-key"],
        [b"Basic alpha-key"],
        [b"Beareralpha-key"],
        [b"Bearer alpha-ke"],
        [b"Bearer alpha-keyy"],
        [b"Bearer ALPHA-KEY"],
        [b"Bearer alpha-key beta-key"],
        [b"Bearer alpha-key,beta-key"],
        [b"Bearer \xff\xfe"],
        [b"Bearer \x00"],
        [b"\xff\xfe"],
        [b"Bearer " + b"x" * 100_000],
        [b"Bearer alpha-key", b"Bearer alpha-key"],
        [b"Bearer wrong", b"Bearer alpha-key"],
        [b"Bearer alpha-key", b""],
    ],
)
def test_anything_but_one_header_with_one_right_key_is_401(values: list[bytes]) -> None:
    server = Server()
    sent = server.ask("/v1/models", headers=[(b"authorization", value) for value in values])
    assert status(sent) == 401
    assert not server.reached


@given(value=st.binary(max_size=64))
def test_no_bytes_in_the_header_crash_the_guard_or_pass_it(value: bytes) -> None:
    assert status(Server().ask("/v1/models", headers=[(b"authorization", value)])) == 401


def test_a_refusal_is_an_openai_error_with_a_challenge_and_without_the_key() -> None:
    for headers, error in (([], b""), ([(b"authorization", b"Bearer sesame")], b', error="invalid_token"')):
        start, body = Server().ask("/v1/models", headers=headers)
        sent = dict(start["headers"])
        assert sent[b"www-authenticate"] == b'Bearer realm="hyperqwen"' + error
        assert sent[b"content-type"] == b"application/json"
        assert sent[b"content-length"] == str(len(body["body"])).encode()
        parsed = json.loads(body["body"])["error"]
        assert {"type": "AuthenticationError", "param": None, "code": 401}.items() <= parsed.items()
        assert parsed["message"]
        assert not any(secret in body["body"] for secret in (b"sesame", b"alpha-key", b"beta-key"))


@pytest.mark.parametrize(
    ("method", "headers", "passes"),
    [
        ("OPTIONS", [ORIGIN, WANTED], True),
        ("OPTIONS", [], False),
        ("OPTIONS", [ORIGIN], False),
        ("OPTIONS", [WANTED], False),
        ("OPTIONS", [(b"origin", b""), WANTED], False),
        ("OPTIONS", [ORIGIN, (b"access-control-request-method", b"")], False),
        ("POST", [ORIGIN, WANTED], False),
        ("GET", [ORIGIN, WANTED], False),
        ("options", [ORIGIN, WANTED], False),
    ],
)
def test_only_a_true_preflight_needs_no_key(method: str, headers: Headers, passes: bool) -> None:
    assert status(Server().ask("/v1/chat/completions", method, headers)) == (PASSED if passes else 401)


def test_a_websocket_needs_the_key_on_every_path_and_gets_no_preflight() -> None:
    server = Server()
    for path in ("/v1/realtime", *OPEN):
        assert server.connect(path) == [{"type": "websocket.close", "code": 1008, "reason": "API key required"}]
        assert server.connect(path, [ORIGIN, WANTED], method="OPTIONS")[0]["type"] == "websocket.close"
    assert not server.reached
    assert server.connect("/v1/realtime", BEARER) == [{"type": "websocket.accept"}]


def test_a_websocket_is_refused_with_401_where_the_server_can_send_it() -> None:
    start, body = Server().connect("/v1/realtime", extensions={"websocket.http.response": {}})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["type"] == "websocket.http.response.body"
    assert json.loads(body["body"])["error"]["code"] == 401


def test_lifespan_passes_and_an_unknown_protocol_does_not() -> None:
    server = Server()
    server.send({"type": "lifespan"})
    assert [scope["type"] for scope in server.reached] == ["lifespan"]
    with pytest.raises(ValueError, match="webtransport"):
        server.send({"type": "webtransport", "path": "/health", "headers": BEARER})
    assert len(server.reached) == 1


@pytest.mark.parametrize("key", [b"alpha-key", b"beta-key", b"neither"])
def test_every_key_is_compared_in_constant_time_whichever_matches(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare))
    Server().ask("/v1/models", headers=[(b"authorization", b"Bearer " + key)])
    assert len(compared) == len(KEYS)
    assert {len(side) for pair in compared for side in pair} == {32}, "compare digests: keys differ in length"


def test_the_guard_refuses_to_guard_nothing() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        Server(keys=())


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (None, None, ()),
        (None, "k1", ("k1",)),
        (["k1", "k2"], None, ("k1", "k2")),
        (["k1"], "k2", ("k1",)),
        (["k1"], "", ("k1",)),
        (["!~sk-09_AZ.+/="], None, ("!~sk-09_AZ.+/=",)),
    ],
)
def test_configured_keys(
    arguments: list[str | None] | None, environment: str | None, expected: tuple[str, ...]
) -> None:
    assert configured_keys(arguments, environment) == expected


@pytest.mark.parametrize(
    ("arguments", "environment", "field", "fix"),
    [
        ([""], None, "--api-key, value 1", "empty"),
        ([None], None, "--api-key, value 1", "empty"),
        ([None], "fallback", "--api-key, value 1", "empty"),
        (["secret", ""], None, "--api-key, value 2", "empty"),
        (None, "", "VLLM_API_KEY", "empty"),
        (None, "secret\n", "VLLM_API_KEY", "white space"),
        ([" secret"], None, "--api-key, value 1", "white space"),
        ([" "], None, "--api-key, value 1", "white space"),
        (["sec ret"], None, "--api-key, value 1", "character 4 of 7"),
        (["schlüssel"], None, "--api-key, value 1", "character 5 of 9"),
        (["sec\x00ret"], None, "--api-key, value 1", "character 4 of 7"),
    ],
)
def test_a_key_that_nobody_could_send_is_refused_by_field_and_never_shown(
    arguments: list[str | None] | None, environment: str | None, field: str, fix: str
) -> None:
    with pytest.raises(InvalidKeyError) as caught:
        configured_keys(arguments, environment)
    message = str(caught.value)
    assert message.startswith(field + ":")
    assert fix in message
    assert "secret" not in message and "schl" not in message


def serve(api_key: list[str | None] | None = None, grpc: bool = False, **environ: str) -> None:
    check_serve_arguments(SimpleNamespace(api_key=api_key, grpc=grpc), environ)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"api_key": [None]}, "--api-key"),
        ({"VLLM_API_KEY": ""}, "VLLM_API_KEY"),
        ({"api_key": ["k"], "grpc": True}, "--grpc"),
        ({"VLLM_API_KEY": "k", "grpc": True}, "--grpc"),
        ({"api_key": ["k"], "VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
    ],
)
def test_the_server_does_not_start_with_keys_that_guard_nothing(
    arguments: dict[str, Any], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        serve(**arguments)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {field}") and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [{}, {"grpc": True}, {"api_key": ["k"]}, {"api_key": ["k"], "VLLM_USE_RUST_FRONTEND": "0"}, {"VLLM_API_KEY": "k"}],
)
def test_the_server_starts_with_valid_keys_or_none(
    arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(**arguments)
    assert capsys.readouterr().err == ""
