from __future__ import annotations

import asyncio
import importlib
import os
import signal
from types import SimpleNamespace
from typing import Any

from hyperqwen.engine import drain


def state(seconds: int = 30) -> SimpleNamespace:
    """What vLLM keeps with its application: uvicorn's server, and the engine's client."""
    server = SimpleNamespace(
        should_exit=False, force_exit=False, config=SimpleNamespace(timeout_graceful_shutdown=None)
    )
    client = SimpleNamespace(vllm_config=SimpleNamespace(shutdown_timeout=seconds))
    return SimpleNamespace(server=server, engine_client=client)


async def _nothing() -> dict[str, Any]:
    return {}


async def _ignored(_message: Any) -> None:
    return None


async def signalled(condition: Any) -> None:
    """Let the loop deliver a signal."""
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the signal did not arrive")


def started(found: SimpleNamespace) -> Any:
    """Run an application's lifespan up to its start; returns the coroutine of what is to be done then."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete"})

    scope = {"type": "lifespan", "app": SimpleNamespace(state=found)}
    return drain.Drain(app)(scope, _nothing, _ignored)


def test_the_first_signal_closes_the_port_and_gives_time_the_second_gives_none() -> None:
    found = state(30)

    async def main() -> None:
        await started(found)
        os.kill(os.getpid(), signal.SIGTERM)
        await signalled(lambda: found.server.should_exit)
        assert found.server.config.timeout_graceful_shutdown == 30
        assert not found.server.force_exit
        os.kill(os.getpid(), signal.SIGINT)
        await signalled(lambda: found.server.force_exit)
        assert found.engine_client.vllm_config.shutdown_timeout == 0, (
            "the engine would wait for the same requests again"
        )

    asyncio.run(main())


def test_before_the_server_has_started_signals_are_somebody_elses() -> None:
    before = signal.getsignal(signal.SIGTERM)

    async def failing(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no model"})
        assert signal.getsignal(signal.SIGTERM) is before

    asyncio.run(drain.Drain(failing)({"type": "lifespan", "app": None}, _nothing, _ignored))


def test_requests_pass_as_they_are() -> None:
    passed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append((scope, receive, send))

    scope = {"type": "http", "path": "/v1/models"}
    asyncio.run(drain.Drain(app)(scope, _nothing, _ignored))
    assert passed == [(scope, _nothing, _ignored)], "a wrapped stream costs a call for each token"


def test_the_path_that_vllm_imports_it_by() -> None:
    module, _, name = drain.PATH.rpartition(".")
    assert getattr(importlib.import_module(module), name) is drain.Drain
