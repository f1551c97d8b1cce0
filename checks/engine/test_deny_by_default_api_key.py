"""patches/0002: with a key configured, every route that is not listed needs it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import routes
import uvicorn
from routes import KEYS, Probe, Route, Surface, arguments, ask, build, over_http, registered, surfaces, walk
from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

from hyperqwen.engine import auth

SURFACES = surfaces()
SERVED = SURFACES[0]


def status(app: Any, method: str, path: str, *headers: tuple[str, str]) -> int:
    return asyncio.run(ask(app, Probe("http", method, path, "", False, headers))).status


def shown(failures: list[str]) -> str:
    return "\n".join([f"{len(failures)} wrong answers", *failures[:10]])


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_no_route_answers_without_a_key_and_all_do_with_one(surface: Surface) -> None:
    report = asyncio.run(walk(surface.name, build(surface), surface.root_path))
    assert not report.failures, shown(report.failures)


def test_the_walk_sees_the_routes_that_stock_vllm_leaves_open() -> None:
    everything = {route.path for route in registered(build(SURFACES[-1]).routes)}
    assert everything >= {"/invocations", "/metrics", "/metrics/anything", "/tokenize", "/docs", "/openapi.json"}
    assert everything >= {"/collective_rpc", "/update_weights", "/v1/load_lora_adapter", "/v1/realtime", "/pooling"}
    assert everything >= {"/start_profile", "/inference/v1/generate", "/fault_tolerance/status", "/v1/responses/1"}


def test_the_walk_fails_when_a_route_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "OPEN", {**auth.OPEN, "/metrics": frozenset({"GET"})})
    failures = asyncio.run(walk("hole", build(SERVED))).failures
    assert failures and all("GET '/metrics'" in failure for failure in failures), shown(failures)


def test_the_walk_fails_when_a_listed_route_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "OPEN", {path: ok for path, ok in auth.OPEN.items() if path != "/health"})
    failures = asyncio.run(walk("closed", build(SERVED))).failures
    assert failures and all("'/health'" in failure for failure in failures), shown(failures)


def test_the_walk_refuses_a_kind_of_route_that_it_does_not_know() -> None:
    with pytest.raises(routes.UnknownRouteError, match="object"):
        list(registered([object()]))


def test_what_a_plugin_adds_is_guarded() -> None:
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount
    from starlette.routing import Route as HttpRoute

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("reached")

    app = build(SERVED)
    app.router.routes.insert(0, HttpRoute("/plugin", answer))
    app.router.routes.insert(0, Mount("/mounted", routes=[HttpRoute("/health", answer)]))
    for path in ("/plugin", "/mounted/health"):
        assert status(app, "GET", path) == 401
        assert status(app, "GET", path, ("Authorization", f"Bearer {KEYS[1]}")) == 200
    assert not asyncio.run(walk("plugin", app)).failures


def test_without_a_key_configured_nothing_asks_for_one() -> None:
    app = build(SERVED, keys=())
    codes = {path: status(app, "GET", path) for path in ("/version", "/metrics", "/openapi.json", "/nowhere")}
    assert codes == {"/version": 200, "/metrics": 200, "/openapi.json": 200, "/nowhere": 404}


def test_the_key_of_the_environment_guards_and_the_flag_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    environment = ("Authorization", "Bearer from-environment")
    assert status(build(SERVED, keys=()), "GET", "/metrics") == 401
    assert status(build(SERVED, keys=()), "GET", "/metrics", environment) == 200
    assert status(build(SERVED), "GET", "/metrics", environment) == 401
    assert status(build(SERVED), "GET", "/metrics", ("Authorization", f"Bearer {KEYS[0]}")) == 200


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        (["--api-key", ""], None, "--api-key, value 1"),
        (["--api-key", ""], "set", "--api-key, value 1"),
        (["--api-key", "good", ""], None, "--api-key, value 2"),
        ([], "", "VLLM_API_KEY"),
        (["--api-key", "ends with\n"], None, "--api-key, value 1"),
        (["--api-key", "good", "--grpc"], None, "--grpc"),
    ],
)
def test_a_key_that_would_guard_nothing_stops_the_server_before_it_loads_a_model(
    flags: list[str],
    environment: str | None,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if environment is not None:
        monkeypatch.setenv("VLLM_API_KEY", environment)
    args = arguments(flags)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        validate_parsed_serve_args(args)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {named}") and message.count("\n") == 1
    assert "good" not in message


def test_a_program_that_skips_the_start_check_gets_no_unguarded_application() -> None:
    with pytest.raises(ValueError, match="value 1: the key is empty"):
        build(SERVED, keys=("",))


@contextmanager
def serving(app: Any, implementation: str) -> Iterator[str]:
    """The application behind uvicorn, which is what `vllm serve` runs, on a free port of this machine."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http=implementation, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "uvicorn did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize("implementation", ["h11", "httptools"])
def test_no_spelling_of_a_request_target_gets_past_a_real_server(implementation: str) -> None:
    app = build(SURFACES[-1])
    known: list[Route] = list(dict.fromkeys(registered(app.routes)))
    with serving(app, implementation) as url:
        report = over_http(url, known)
    assert report.requests > len(known) * len(routes.METHODS)
    assert not report.failures, shown(report.failures)
