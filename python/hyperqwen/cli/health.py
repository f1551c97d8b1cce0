"""`hyperqwen health`: whether a running server generates tokens."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import httpx

from hyperqwen.errors import HyperqwenError
from hyperqwen.runtime.client import Client, Unreachable
from hyperqwen.runtime.keys import resolve_key
from hyperqwen.runtime.watchdog import counters

# Any text will do: what counts is that a token comes back.
PROBE = "Monday"
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Health:
    """What was found: `requests` in flight, the way it was told (progress or token), and after how many seconds."""

    requests: int
    by: str
    seconds: float


def check(
    client: Client,
    *,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Health:
    """See the server at work within `timeout` seconds, or raise HyperqwenError.

    With requests in flight, the engine's counters have to move: a request of its own could wait behind them. With none,
    it is asked for one token.
    """
    started = clock()
    first = counters(client.metrics(timeout=timeout))
    while first.requests:
        sleep(POLL_SECONDS)
        left = started + timeout - clock()
        if left <= 0:
            raise HyperqwenError(
                f"no progress in {timeout:g} s: {first}", "read the server's log; if it stays so, restart the server"
            )
        now = counters(client.metrics(timeout=left))
        if now.moving != first.moving:
            return Health(now.requests, "progress", round(clock() - started, 3))
        if not now.requests:
            # They were dropped by their clients; it is free to answer one of ours.
            break
    reply = client.complete(
        PROBE, max_tokens=1, temperature=0.0, timeout=max(started + timeout - clock(), POLL_SECONDS)
    )
    if reply.completion_tokens < 1:
        raise HyperqwenError("the server answered without a token", "read its log")
    return Health(0, "token", round(clock() - started, 3))


def served_model(url: str, key: str | None, timeout: float) -> str:
    """The name that clients call the server's model; raises HyperqwenError where it does not say."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, timeout=timeout, trust_env=False)
    except httpx.ConnectError as error:
        at = httpx.URL(url)
        where = f"port {at.port}" if at.host in ("127.0.0.1", "localhost", "::1") else str(at)
        raise Unreachable(
            f"no answer from {url}/v1/models: {error}",
            f"no server on {where}: start one, or name another with --port",
        ) from None
    except httpx.HTTPError as error:
        raise Unreachable(f"no answer from {url}/v1/models: {error or type(error).__name__}") from None
    if response.status_code == httpx.codes.UNAUTHORIZED:
        said = "does not accept this key" if key else "wants a key, and none was given"
        raise HyperqwenError(f"{url} {said}", "give the server's: --api-key-file FILE")
    try:
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
        raise HyperqwenError(
            f"{url}/v1/models names no model ({response.status_code}): is it a hyperqwen server?"
        ) from None


@click.command(context_settings={"show_default": True})
@click.option("--url", metavar="URL", help="Server to ask; else 127.0.0.1 and the port.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=18020,
    envvar="HYPERQWEN_SERVER_PORT",
    show_envvar=True,
    help="Port of the server on this machine.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    envvar="HYPERQWEN_SERVER_API_KEY_FILE",
    show_envvar=True,
    help="File with the server's key. HYPERQWEN_API_KEY may hold the key itself.",
)
@click.option("--timeout", type=click.FloatRange(1, 600), default=20, help="Seconds until a token must be seen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(url: str | None, port: int, api_key_file: Path | None, timeout: float, as_json: bool) -> None:
    """Exit 0 if the server generates tokens, 1 if it does not.

    /health is not asked: it answers while the engine hangs. With requests in flight the engine's counters have to move;
    without any, the server is asked for one token.
    """
    place = (url or f"http://127.0.0.1:{port}").rstrip("/")
    key = resolve_key(api_key_file, os.environ)
    with Client(place, served_model(place, key, timeout), key) as client:
        found = check(client, timeout=timeout)
    if as_json:
        click.echo(json.dumps({"url": place, **asdict(found)}))
    elif found.by == "token":
        click.echo(f"{place} answers: one token in {found.seconds:.1f} s")
    else:
        click.echo(f"{place} works: {found.requests} requests in flight, and its counters move")
