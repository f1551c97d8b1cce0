"""API keys, deny by default: with a key configured, a request without it reaches nothing that is not listed here.

vLLM 0.31.0 guards the path prefixes /v1, /v2, /inference and /cohere and leaves the rest open: /invocations generates
text, /metrics and /tokenize answer, the development routes load weights. Here it is the other way round. `OPEN` is the
whole list of what needs no key; a route that a later vLLM, a plugin or a mounted application adds is guarded because
nobody listed it.

Pure ASGI on the standard library: no web framework is imported.
Source: the ASGI HTTP and WebSocket message formats; RFC 9110 11.6 (401 and its challenge); RFC 6750 3 (Bearer).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_READ = frozenset({"GET", "HEAD"})

HEALTH_ROUTES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "/health": _READ,
        # SageMaker's container contract probes /ping with either method.
        "/ping": _READ | {"POST"},
        "/load": _READ,
        "/version": _READ,
    }
)
"""Probes: they say that the server lives, how many requests it holds and which version it is."""

COMPATIBILITY_ROUTES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "/": _READ,
        "/api/status": _READ,
        "/api/experimental/model-recommendations": _READ,
        "/api/show": frozenset({"POST"}),
    }
)
"""What Ollama's clients ask, without a key, before they let a user choose a server. Constant answers, no inference.

A server that does not have these routes answers 404.
"""

OPEN: Mapping[str, frozenset[str]] = MappingProxyType({**HEALTH_ROUTES, **COMPATIBILITY_ROUTES})
"""Route path, exactly as registered -> the methods that need no key. Nothing else is open."""


class InvalidKeyError(ValueError):
    """A key configuration that cannot mean what its author wanted. The message never holds the key."""


class ServeArguments(Protocol):
    """The parsed arguments of `vllm serve` that matter here."""

    api_key: Sequence[str | None] | None
    grpc: bool


def configured_keys(arguments: Sequence[str | None] | None, environment: str | None) -> tuple[str, ...]:
    """The keys that the server accepts; none means that it was not asked for any.

    `arguments` is what `--api-key` left (None when the option is absent), `environment` the value of VLLM_API_KEY (None
    when unset). The option takes precedence over the variable, as in vLLM.

    Raises `InvalidKeyError` for an empty key, which vLLM takes for "no key needed", and for one that no client can
    send back in a header unchanged. vLLM's parser turns `--api-key ""` into None: that is an empty key too.
    """
    if arguments is not None:
        return tuple(_checked(key, f"--api-key, value {i}") for i, key in enumerate(arguments, 1))
    if environment is not None:
        return (_checked(environment, "VLLM_API_KEY"),)
    return ()


def _checked(key: str | None, field: str) -> str:
    if not key:
        raise InvalidKeyError(f"{field}: the key is empty; give a key, or leave it out altogether to serve without one")
    if key != key.strip():
        raise InvalidKeyError(
            f"{field}: the key begins or ends with white space, which HTTP strips from a header; "
            "remove it (a key read from a file often ends with a newline)"
        )
    if position := next((i for i, c in enumerate(key, 1) if not "!" <= c <= "~"), 0):
        raise InvalidKeyError(
            f"{field}: character {position} of {len(key)} cannot be sent in an Authorization header; "
            "use visible ASCII characters without spaces"
        )
    return key


def check_serve_arguments(args: ServeArguments, environ: Mapping[str, str] = os.environ) -> None:
    """Stop the server before it loads a model when its keys are invalid or would guard nothing.

    Prints one line to stderr and raises `SystemExit(2)`.
    """
    try:
        keys = configured_keys(args.api_key, environ.get("VLLM_API_KEY"))
        if keys and args.grpc:
            raise InvalidKeyError(
                "--grpc: this front end does not check API keys; serve HTTP, or remove the key and guard the port"
            )
        if keys and environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
            raise InvalidKeyError(
                "VLLM_USE_RUST_FRONTEND: this front end guards some path prefixes only; unset it, or remove the key"
            )
    except InvalidKeyError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class KeyMiddleware:
    """ASGI middleware: 401 for every request that is not in `OPEN`, not a CORS preflight and carries no valid key.

    `keys` are what `configured_keys` returned, at least one. HTTP requests and WebSocket handshakes are checked alike;
    `lifespan` passes; any other scope type raises ValueError, because a protocol that is unknown here is unguarded.
    """

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        if not keys:
            raise ValueError("keys: KeyMiddleware needs at least one key; do not add it to a server without keys")
        self._app = app
        # Digests have one length, so that the comparison does not tell how long a key is.
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._app(scope, receive, send)
        elif kind == "http":
            if _is_open(scope) or _is_preflight(scope) or (problem := self._problem(scope)) is None:
                await self._app(scope, receive, send)
            else:
                await _refuse_http(send, problem)
        elif kind == "websocket":
            if (problem := self._problem(scope)) is None:
                await self._app(scope, receive, send)
            else:
                await _refuse_websocket(scope, send, problem)
        else:
            raise ValueError(f"scope type {kind!r}: the API key check knows http, websocket and lifespan")

    def _problem(self, scope: Scope) -> _Problem | None:
        """Why this request is refused, or None when its key is one of ours."""
        values = _header(scope, b"authorization")
        # Of two headers a proxy in front may have checked the other one.
        if len(values) != 1:
            return _NO_KEY
        scheme, _, key = values[0].partition(b" ")
        key = key.strip(b" ")
        if scheme.lower() != b"bearer" or not key:
            return _NO_KEY
        return None if self._accepts(key) else _WRONG_KEY

    def _accepts(self, key: bytes) -> bool:
        """Compare with every key, so that the time does not tell which one matched."""
        digest = hashlib.sha256(key).digest()
        accepted = False
        for known in self._digests:
            accepted |= hmac.compare_digest(digest, known)
        return accepted


class _Problem:
    """A refusal: the message for the client and the challenge of the WWW-Authenticate header."""

    def __init__(self, message: str, challenge: bytes) -> None:
        body = {"error": {"message": message, "type": "AuthenticationError", "param": None, "code": 401}}
        self.body = json.dumps(body).encode()
        self.headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body)).encode()),
            (b"www-authenticate", challenge),
        ]


# RFC 6750 3.1: no error code for a request that showed no key.
_NO_KEY = _Problem(
    "This server requires an API key: send exactly one header `Authorization: Bearer KEY`.",
    b'Bearer realm="hyperqwen"',
)
_WRONG_KEY = _Problem(
    "The API key is not one that this server accepts.",
    b'Bearer realm="hyperqwen", error="invalid_token"',
)


def route_path(scope: Scope) -> str:
    """The path that the router will match: `path` without `root_path`, where a proxy's prefix was left on.

    Follows Starlette's `get_route_path` case by case; anything looser would open a path that the router reads
    differently. The server has percent-decoded `path` before either looks at it.
    """
    path: str = scope["path"]
    root: str = scope.get("root_path") or ""
    rest = path.removeprefix(root)
    return rest if len(rest) < len(path) and rest[:1] in ("", "/") else path


def _is_open(scope: Scope) -> bool:
    return scope["method"] in OPEN.get(route_path(scope), ())


def _is_preflight(scope: Scope) -> bool:
    """Whether a browser asks for permission, which it does without credentials. The CORS middleware answers it.

    All three marks are needed: OPTIONS without them goes to a route, which needs the key.
    """
    return (
        scope["method"] == "OPTIONS"
        and any(_header(scope, b"origin"))
        and any(_header(scope, b"access-control-request-method"))
    )


def _header(scope: Scope, name: bytes) -> list[bytes]:
    headers: Iterable[tuple[bytes, bytes]] = scope.get("headers") or ()
    return [bytes(value) for key, value in headers if bytes(key).lower() == name]


async def _refuse_http(send: Send, problem: _Problem) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": list(problem.headers)})
    await send({"type": "http.response.body", "body": problem.body})


async def _refuse_websocket(scope: Scope, send: Send, problem: _Problem) -> None:
    """Refuse the handshake: 401 where the server can answer it with a response, else a close, which becomes 403."""
    if "websocket.http.response" in (scope.get("extensions") or {}):
        start = {"type": "websocket.http.response.start", "status": 401, "headers": list(problem.headers)}
        await send(start)
        await send({"type": "websocket.http.response.body", "body": problem.body})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": "API key required"})
