#!/usr/bin/env python3
"""Walk every registered route of the server without a key: 401, except for the routes listed here.

    python checks/routes.py                      # vLLM's own application, in this process, no engine
    python checks/routes.py --url URL            # the same requests, over HTTP, to a running server that has a key

The routes come from the application object, with everything that can be turned on turned on (all tasks, development
and tokenizer routes, run-time adapters), not from /openapi.json, which leaves out mounts and WebSockets. Each is asked
with every method, as a WebSocket, and under paths that look like an open one. `OPEN` is written out again and not
imported from hyperqwen.engine.auth: a route that is opened there by mistake is a failure here.

Needs the engine's Python (vLLM importable). Exit code 0: nothing answered that should not; 5: something did; 2: wrong
usage; 3: no vLLM here, or no server at URL.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

KEYS = ("first-key-of-the-walk", "second-key-of-the-walk")
ROOT_PATH = "/behind/proxy"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
SECONDS = 20.0

OPEN: dict[str, set[str]] = {
    "/health": {"GET", "HEAD"},
    "/ping": {"GET", "HEAD", "POST"},
    "/load": {"GET", "HEAD"},
    "/version": {"GET", "HEAD"},
    "/": {"GET", "HEAD"},
    "/api/status": {"GET", "HEAD"},
    "/api/show": {"POST"},
    "/api/experimental/model-recommendations": {"GET", "HEAD"},
}
"""The whole allow-list: path -> methods."""

LOOK_ALIKES = (
    *("/health/", "//health", "/health//", "/HEALTH", "/healthz", "/health/x", "/health/..", "/health\n", "/health "),
    *("/health;x", "/health%2f", "/health/../v1/models", "/health/../metrics", "/v1/../health", "/v1/health", "health"),
    *("/./health", "/version/../v1/models", "/ping/invocations", "/load?", "/api/show/", "/api", "/api/", "", "//"),
)
"""Paths, as the application sees them (percent-decoded), that no key opens by resembling an open one."""

Headers = Sequence[tuple[str, str]]
PREFLIGHT: Headers = (("Origin", "https://app.example"), ("Access-Control-Request-Method", "POST"))


@dataclass(frozen=True)
class Route:
    """A registered path, its parameters filled in; no methods for a WebSocket or a mounted application."""

    kind: str
    path: str
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Probe:
    """One request. `refused`: whether it must be answered 401."""

    kind: str
    method: str
    path: str
    why: str
    refused: bool
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.method if self.kind == 'http' else 'WebSocket'} {self.path!r} ({self.why})"


@dataclass(frozen=True)
class Answer:
    """What came back. Status 0 stands for a WebSocket closed before it was accepted, 101 for an accepted one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Report:
    """Outcome of one walk."""

    surface: str
    routes: int = 0
    requests: int = 0
    failures: list[str] = field(default_factory=list)


class UnknownRouteError(Exception):
    """A kind of route that this walk cannot see into; it would be silently left out."""


def registered(routes: Iterable[Any], prefix: str = "") -> Iterator[Route]:
    """Every route below `routes`, through mounts and host routers. Raises `UnknownRouteError`."""
    from starlette.routing import Host, Mount, WebSocketRoute
    from starlette.routing import Route as HttpRoute

    for route in routes:
        if isinstance(route, HttpRoute):
            yield Route("http", prefix + _filled(route.path), tuple(sorted(route.methods or METHODS)))
        elif isinstance(route, WebSocketRoute):
            yield Route("websocket", prefix + _filled(route.path))
        elif isinstance(route, Mount):
            below = prefix + _filled(route.path)
            # A mounted application decides about every path below its own, whatever routes it shows.
            yield from (Route("mount", below + end) for end in ("", "/", "/anything", "anything"))
            yield from registered(route.routes or (), below)
        elif isinstance(route, Host):
            yield from registered(route.routes or (), prefix)
        else:
            raise UnknownRouteError(f"{type(route).__module__}.{type(route).__qualname__}: {route!r}")


def _filled(path: str) -> str:
    """A path that the pattern matches: `1` fits each of Starlette's converters but uuid, which vLLM does not use."""
    return re.sub(r"\{\w+(?::\w+)?\}", "1", path)


def is_open(path: str, method: str) -> bool:
    return method in OPEN.get(path, ())


def probes_without_key(routes: Sequence[Route], root_path: str = "") -> Iterator[Probe]:
    """Every request of the walk that carries no key, or a wrong one."""
    roots = ("", root_path) if root_path else ("",)
    paths = dict.fromkeys([*(route.path for route in routes), *OPEN])
    for root in roots:
        for path in paths:
            for method in METHODS:
                refused = not is_open(path, method)
                yield Probe("http", method, root + path, "no key", refused)
            yield Probe("websocket", "GET", root + path, "no key", True)
    for path in paths:
        for method, headers in (("OPTIONS", PREFLIGHT[:1]), ("OPTIONS", PREFLIGHT[1:]), ("POST", PREFLIGHT)):
            refused = not is_open(path, method)
            yield Probe("http", method, path, "no true preflight", refused, tuple(headers))
        yield Probe("websocket", "GET", path, "preflight headers", True, tuple(PREFLIGHT))
    for path in LOOK_ALIKES:
        for method in METHODS:
            yield Probe("http", method, path, "looks like an open path", True)
            if root_path and path:
                yield Probe("http", method, root_path + path, "looks like an open path", True)
    if root_path:
        for path in (root_path, root_path + "health", root_path + root_path + "/health", root_path.upper() + "/health"):
            yield Probe("http", "GET", path, "looks like the root path", True)
    for path in (route.path for route in routes if route.path not in OPEN):
        wrong = (
            "Bearer " + KEYS[0][:-1],
            "Bearer " + KEYS[0] + "x",
            KEYS[0],
            "Basic " + KEYS[0],
            "Bearer",
            "Bearer \xff",
        )
        for value in wrong:
            yield Probe("http", "GET", path, "wrong key", True, (("Authorization", value),))
        twice = (("Authorization", "Bearer " + KEYS[0]), ("Authorization", "Bearer nonsense"))
        yield Probe("http", "GET", path, "two Authorization headers", True, twice)


def probes_with_key(routes: Sequence[Route]) -> Iterator[Probe]:
    """Requests that the guard must let through: every key opens every route, and a preflight needs none."""
    for route in routes:
        for key in KEYS:
            headers = (("Authorization", f"Bearer {key}"),)
            for method in route.methods or ("GET",):
                kind = "websocket" if route.kind == "websocket" else "http"
                yield Probe(kind, method, route.path, "right key", False, headers)
        yield Probe("http", "OPTIONS", route.path, "true preflight", False, tuple(PREFLIGHT))


def judge(probe: Probe, answer: Answer) -> str | None:
    """What is wrong with an answer, or None."""
    if not probe.refused:
        if probe.kind == "http" and answer.status != 401:
            if probe.why != "true preflight" or "access-control-allow-methods" in answer.headers:
                return None
            return f"{probe}: passed, but the CORS middleware did not answer it: {answer.status}"
        if probe.kind == "websocket" and answer.status not in (0, 401, 403):
            return None
        return f"{probe}: refused ({answer.status}), should have passed"
    if probe.kind == "websocket":
        return None if answer.status in (0, 401, 403) else f"{probe}: passed ({answer.status}), should be refused"
    if answer.status != 401:
        return f"{probe}: answered {answer.status}, should be 401"
    if not answer.headers.get("www-authenticate", "").startswith("Bearer"):
        return f"{probe}: 401 without a Bearer challenge in WWW-Authenticate"
    if probe.method == "HEAD":
        return None
    try:
        error = json.loads(answer.body)["error"]
        complete = {"message", "type", "param", "code"} <= set(error)
    except (ValueError, LookupError, TypeError):
        complete = False
    return None if complete else f"{probe}: 401 whose body is not an OpenAI error: {answer.body[:80]!r}"


async def ask(app: Any, probe: Probe, denial_response: bool = False) -> Answer:
    """Send one request straight to an ASGI application. An exception of the application counts as 500.

    `denial_response`: whether a WebSocket server offers to answer a handshake with an HTTP response.
    """
    headers = [(k.lower().encode(), v.encode("latin-1")) for k, v in (("Host", "walk.example"), *probe.headers)]
    scope: dict[str, Any] = {
        "type": probe.kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http" if probe.kind == "http" else "ws",
        "path": probe.path,
        "raw_path": quote(probe.path).encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("192.0.2.1", 1),
        "server": ("walk.example", 80),
        "extensions": {"websocket.http.response": {}} if denial_response else {},
    }
    incoming: list[dict[str, Any]] = []
    if probe.kind == "http":
        scope["method"] = probe.method
        incoming += [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    else:
        scope["subprotocols"] = []
        incoming += [{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}]
    outgoing: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop(0) if len(incoming) > 1 else incoming[0]

    async def send(message: dict[str, Any]) -> None:
        outgoing.append(message)

    raised = False
    try:
        await asyncio.wait_for(app(scope, receive, send), SECONDS)
    except Exception:
        # Handlers fail without an engine. What matters is that the request got as far as one.
        raised = True
    return _answer(outgoing, raised)


def _answer(messages: Sequence[dict[str, Any]], raised: bool) -> Answer:
    for message in messages:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message.get("headers", ())}
            body = b"".join(m.get("body", b"") for m in messages if m["type"].endswith("response.body"))
            return Answer(message["status"], headers, body)
        if kind == "websocket.accept":
            return Answer(101)
        if kind == "websocket.close":
            return Answer(0)
    return Answer(500 if raised else 204)


async def walk(surface: str, app: Any, root_path: str = "") -> Report:
    """Send every probe to an application that was built with `KEYS`."""
    routes = list(dict.fromkeys(registered(app.routes)))
    report = Report(surface, len(routes))
    for probe in (*probes_without_key(routes, root_path), *probes_with_key(routes)):
        # Without this extension a refused handshake is a close, with it a response; both servers exist.
        for denial_response in (False, True) if probe.kind == "websocket" else (False,):
            report.requests += 1
            problem = judge(probe, await ask(app, probe, denial_response))
            if problem is not None:
                report.failures.append(problem)
    return report


@dataclass(frozen=True)
class Surface:
    """A way to start the server: its tasks and flags, and whether the environment adds routes."""

    name: str
    tasks: tuple[str, ...]
    flags: tuple[str, ...] = ()
    root_path: str = ""
    development: bool = False


def surfaces() -> tuple[Surface, ...]:
    from typing import get_args

    from vllm.tasks import SupportedTask

    every = tuple(dict.fromkeys(_flat(get_args(SupportedTask))))
    # vLLM keeps its routers, so that what one application adds to them is also in the next: the widest comes last.
    return (
        Surface("as the profiles serve it", ("generate",)),
        Surface("behind a root path", ("generate",), ("--root-path", ROOT_PATH), ROOT_PATH),
        Surface("render only", ("render",)),
        Surface(
            "everything turned on",
            every,
            (
                *("--enable-offline-docs", "--enable-tokenizer-info-endpoint", "--enable-scale-out", "--tokens-only"),
                *("--enable-fault-tolerance", "--enable-request-id-headers"),
                *("--profiler-config", '{"profiler": "cuda"}'),
            ),
            development=True,
        ),
    )


def _flat(values: Iterable[Any]) -> Iterator[str]:
    from typing import get_args

    for value in values:
        if isinstance(value, str):
            yield value
        else:
            yield from _flat(get_args(value))


def build(surface: Surface, keys: Sequence[str] = KEYS) -> Any:
    """vLLM's own application, its real routes and middleware, without an engine behind it.

    The environment variables that add routes hold while the application is built, which is when vLLM reads them.
    """
    from vllm.entrypoints.launchers.app import build_app

    args = arguments([*surface.flags, *(("--api-key", *keys) if keys else ())])
    # Pooling routes depend on what the model can do; "embed" is the task with the most of them.
    model = SimpleNamespace(get_pooling_task=lambda tasks: "embed" if "embed" in tasks else None)
    switches = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_COHERE_API")
    before = {name: os.environ.pop(name, None) for name in switches}
    try:
        os.environ.update(dict.fromkeys(switches, "1" if surface.development else "0"))
        return build_app(args, surface.tasks, model)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def arguments(flags: Sequence[str]) -> Any:
    """`vllm serve`'s parsed arguments, an argparse.Namespace."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "walk/model", *flags])


def over_http(url: str, routes: Sequence[Route]) -> Report:
    """Ask a running server, without a key. Request targets go out as written, which no HTTP library's client does.

    The server may refuse a malformed target with 400 before the application sees it. Raises OSError.
    """
    report = Report(url, len(routes))
    at = urlsplit(url)
    for probe, target in _targets(routes, at.netloc):
        report.requests += 1
        answer = _ask_http(at.scheme, at.netloc, probe, target)
        problem = judge(probe, answer)
        if problem is not None and not (probe.refused and answer.status == 400):
            report.failures.append(f"{problem}; request target {target!r}")
    return report


def _targets(routes: Sequence[Route], netloc: str) -> Iterator[tuple[Probe, str]]:
    for probe in probes_without_key(routes):
        # An open route may start work, and what it answers is the application's own business.
        if probe.refused or probe.method in ("GET", "OPTIONS"):
            yield probe, quote(probe.path, safe="/%;:@=&+,~") or "/x"
    for path in dict.fromkeys(route.path for route in routes if route.path not in OPEN):
        spelled = "/" + "".join("/" if c == "/" else f"%{ord(c):02x}" for c in path[1:])
        for target in (
            *(spelled, f"//{path[1:]}", f"http://{netloc}{path}", f"{path}?/health", f"/health%2f..{path}"),
            *(f"/%2e%2e{path}", f"{path}%3f", f"{path}%00", path.replace("/", "%2f")),
        ):
            yield Probe("http", "GET", path, "odd target", True), target


def _ask_http(scheme: str, netloc: str, probe: Probe, target: str) -> Answer:
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(netloc, timeout=SECONDS)
    try:
        # http.client refuses control characters in a target; everything else goes out as it is.
        connection.putrequest(probe.method, target, skip_accept_encoding=True)
        for name, value in probe.headers:
            connection.putheader(name, value.encode("latin-1"))
        if probe.kind == "websocket":
            upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
            for name, value in {**upgrade, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}.items():
                connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, b"" if response.status == 101 else response.read())
    finally:
        connection.close()


def _print(reports: Sequence[Report], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
        return
    for report in reports:
        outcome = f"{len(report.failures)} FAILED" if report.failures else "ok"
        print(f"{report.surface}: {report.routes} routes, {report.requests} requests, {outcome}")
        for failure in report.failures[:20]:
            print(f"  {failure}")
        if len(report.failures) > 20:
            print(f"  and {len(report.failures) - 20} more (--json has all)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Walk every route of the server without a key.")
    parser.add_argument("--url", help="ask a running server, http://HOST:PORT, instead of the application in process")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    options = parser.parse_args(argv)
    if options.url and (urlsplit(options.url).scheme not in ("http", "https") or not urlsplit(options.url).netloc):
        parser.error(f"--url {options.url}: expected http://HOST:PORT")
    # Handlers without an engine fail by the hundred, which is expected, and each failure would be logged.
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    warnings.simplefilter("ignore")
    try:
        known = surfaces()
    except ImportError as error:
        print(f"error: vLLM cannot be imported ({error}); run this with the engine's Python", file=sys.stderr)
        return 3
    if options.url:
        routes = list(dict.fromkeys(r for surface in known for r in registered(build(surface).routes)))
        try:
            reports = [over_http(options.url, routes)]
        except OSError as error:
            print(f"error: --url {options.url}: {error}; start the server first", file=sys.stderr)
            return 3
    else:
        reports = [asyncio.run(walk(s.name, build(s), s.root_path)) for s in known]
    _print(reports, options.json)
    return 5 if any(report.failures for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
