"""SIGTERM lets running requests finish: no new ones, the streams that run end by themselves or by a deadline.

vLLM 0.31.0 stops its renderer and its engine first and the HTTP server last, so that for as long as requests drain,
every new one gets a 500 for an internal reason. Here the HTTP server stops first: the port is closed at once, idle
connections are closed, and the engine goes when nothing needs it any more. The time is vLLM's `--shutdown-timeout`.

ASGI middleware, because that is where an application is told that the server has started, after vLLM has installed its
own signal handlers. Source: the ASGI lifespan protocol; uvicorn's `Server` (should_exit, force_exit).
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from hyperqwen.engine.auth import App, Message, Receive, Scope, Send

PATH = f"{__name__}.Drain"


class Drain:
    """Passes everything on; once the server has started, SIGTERM and SIGINT are its own."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                state = scope["app"].state
                handle_signals(state.server, state.engine_client.vllm_config)

        await self._app(scope, receive, told)


def handle_signals(server: Any, config: Any) -> None:
    """Stop `server` (uvicorn's) by the first signal in `config.shutdown_timeout` seconds, by the second at once."""

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
            # What follows is the end of the engine, which would wait for the same requests again.
            config.shutdown_timeout = 0
            return
        server.config.timeout_graceful_shutdown = config.shutdown_timeout
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
