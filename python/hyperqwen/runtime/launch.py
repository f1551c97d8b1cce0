"""One start of a server, from the claimed port to its end: what `demo` and `serve` have in common."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import click

from hyperqwen.errors import HyperqwenError
from hyperqwen.runtime import measured, records, startup
from hyperqwen.runtime.engine import Engine, EngineError
from hyperqwen.runtime.folders import Folders
from hyperqwen.runtime.measured import Measured
from hyperqwen.runtime.notify import Notifier

if TYPE_CHECKING:
    import socket

    from rich.console import Console
    from rich.progress import Progress as Bar

    from hyperqwen.runtime.client import Client, Reply

STAGES = {
    "import": "importing the engine",
    "configure": "reading the model's configuration",
    "load": "loading the model",
    "serve": "starting the HTTP server",
    "answer": "waiting for the first token",
}
QUESTION = "Who are you?"
# Any text will do: what counts is that a token comes back. This one is in nano's own vocabulary.
PROBE = "Monday"
# Between SIGTERM's deadline for requests and SIGKILL: the engine's own teardown.
TEARDOWN_SECONDS = 20.0
# How much more time a service manager gives while a start moves (EXTEND_TIMEOUT_USEC).
_EXTEND_SECONDS = 300.0
_LOOK_SECONDS = 0.1
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived; not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `Stopped` while the block runs.

    One that is ignored stays so: `nohup` and a shell's `&` start programs that way, which are to outlive a logout.
    """

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise Stopped(signum)

    wanted = [number for number in _STOP if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_signals() -> Iterator[None]:
    """Let signals that have a handler in Python wait until the block has ended, for what must not be torn apart."""
    arrived: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        arrived.append(signum)

    before = {number: signal.signal(number, note) for number in _STOP if callable(signal.getsignal(number))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for signum in arrived:
        signal.raise_signal(signum)


class Progress:
    """What the user and the service manager see until the server is ready.

    A live line on a terminal; elsewhere one line for each stage and for what it came to.
    """

    def __init__(self, console: Console, started: float, notifier: Notifier) -> None:
        self._console = console
        self._started = started
        self._notifier = notifier
        self._bar: Bar | None = None
        self._phase = ""

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        if not self._console.is_terminal:
            yield self
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Bar(*columns, console=self._console, transient=True) as self._bar:
            self._bar.add_task("starting the engine", total=None)
            yield self

    def begin(self, stage: str) -> None:
        """The engine has come to `stage` (a key of STAGES)."""
        self._tell(STAGES.get(stage, stage), lasting=self._bar is None)

    def event(self, event: startup.Event) -> None:
        """The engine's log said so."""
        first = event.phase != self._phase
        self._phase = event.phase
        self._tell(event.text, lasting=event.final or (first and self._bar is None))

    def _tell(self, text: str, lasting: bool) -> None:
        self._notifier.status(text, extend_seconds=_EXTEND_SECONDS)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text)
        if lasting:
            # The engine's words: a bracket in them is a bracket.
            self._console.print(f"{time.monotonic() - self._started:5.1f} s  {text}", highlight=False, markup=False)


@dataclass(frozen=True)
class Limit:
    """Until when the first answer must be there: `seconds` after `started` (monotonic), as the user calls it `name`."""

    started: float
    seconds: float
    name: str

    @property
    def left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def passed(self, engine: Engine, what: str) -> EngineError:
        return engine.failure(
            f"the engine {what} in {self.seconds:g} s ({self.name})",
            f"give it longer: {self.name} {2 * self.seconds:g}",
        )


@dataclass
class Launch:
    """One start of a server.

    command: of ours. profile: its name. model: what clients call the model. flags: of `vllm serve`, all of them.
    environment: of the engine, whole. key: what clients must send; shell_key: how a shell says it. log: the engine's
    file; None puts it on stderr. drain: seconds that running requests get at the end. before_ready: called when a token
    has come, with what the engine measured; raises HyperqwenError where it must not serve. once_ready: called with the
    same afterwards; what it raises is told and ends nothing. every: called twice a second while it serves, with the
    engine.
    """

    command: Literal["demo", "serve"]
    profile: str
    model: str
    python: Path
    flags: Sequence[str]
    environment: Mapping[str, str]
    host: str
    port: int
    listener: socket.socket
    places: Folders
    log: Path | None
    limit: Limit
    notifier: Notifier
    key: str | None = None
    shell_key: str = ""
    drain: float = 0.0
    as_json: bool = False
    every: list[Callable[[Engine, Client, Console], None]] = field(default_factory=list)
    before_ready: Callable[[Measured], None] | None = None
    once_ready: Callable[[Console, Measured], None] | None = None
    ready: bool = False
    measured: Measured = field(default_factory=Measured, init=False)

    @property
    def url(self) -> str:
        return url(self.host, self.port)

    def client(self) -> Client:
        from hyperqwen.runtime.client import Client

        return Client(self.url, self.model, self.key)

    @contextmanager
    def engine(self) -> Iterator[tuple[Engine, Console]]:
        """The engine, on its way up, and a console for messages; the engine is stopped afterwards."""
        if self.log is not None and self.log.exists():
            # What the last run died of is still wanted when the service manager has started the next one.
            self.log.replace(self.log.with_name(f"{self.log.name}.1"))
        engine: Engine | None = None
        try:
            # A signal between the engine's start and this name for it would leave it running without anyone to end it.
            with held_signals():
                engine = Engine.start(
                    self.python,
                    self.flags,
                    self.environment,
                    listener=self.listener,
                    folder=self.places.cache,
                    log=self.log,
                )
            # Only now: the engine has its own ten seconds of imports to do meanwhile.
            from rich.console import Console

            console = Console(stderr=True)
            # Until its end: who wants to stop a server that is still draining has to find it.
            with records.kept(self.places.logs, self._record(engine)):
                try:
                    yield engine, console
                finally:
                    self._stop(engine)
        finally:
            if engine is not None:
                engine.stop()

    def serve(self) -> None:
        """Start, announce the server once a token has come, and watch it until a signal or its end."""
        with self.engine() as (engine, console), self.client() as client:
            self.first_answer(
                engine, console, lambda left: client.complete(PROBE, max_tokens=1, temperature=0.0, timeout=left)
            )
            # The last that it said of its start.
            self._news(engine)
            if self.before_ready is not None:
                self.before_ready(self.measured)
            self.ready = True
            with _not_fatal():
                records.write(self.places.logs, self._record(engine))
            self._announce(time.monotonic() - self.limit.started)
            self.notifier.ready(f"{self.model} answers at {self.url}/v1")
            if self.once_ready is not None:
                with _not_fatal():
                    self.once_ready(console, self.measured)
            while True:
                engine.stages(0.5)
                engine.check()
                for look in self.every:
                    look(engine, client, console)

    def first_answer(self, engine: Engine, console: Console, ask: Callable[[float], Reply]) -> tuple[Reply, float]:
        """The reply of `ask(timeout)` as soon as the server gives one, and the seconds until it was asked."""
        with Progress(console, self.limit.started, self.notifier).shown() as progress:
            wait_until_serving(engine, progress, self.limit, lambda: self._news(engine))
            progress.begin("answer")
            began = time.monotonic()
            return _answer(engine, self.limit, ask), began - self.limit.started

    def _news(self, engine: Engine) -> str:
        """What the engine said since the last call, after what it tells of its memory was kept."""
        text = engine.news()
        self.measured = measured.measured(text, self.measured)
        return text

    def _stop(self, engine: Engine) -> None:
        drains = self.ready and engine.returncode is None
        next_sign = 0.0

        def tick() -> None:
            # Called within the stop, where a second signal kills the engine whenever it comes.
            nonlocal drains, next_sign
            if drains:
                drains = False
                with contextlib.suppress(HyperqwenError):
                    records.write(self.places.logs, self._record(engine, stopping=True))
                self.notifier.stopping("finishing the running requests")
                if self.drain:
                    click.echo(
                        f"stopping: running requests get up to {self.drain:g} s; a second signal ends them at once",
                        err=True,
                    )
            # The end is bounded by the grace; a watchdog has nothing more to find out.
            if self.notifier.watchdog and time.monotonic() >= next_sign:
                next_sign = time.monotonic() + self.notifier.watchdog / 3
                self.notifier.alive()

        engine.stop((self.drain if self.ready else 0.0) + TEARDOWN_SECONDS, tick)

    def _record(self, engine: Engine, *, stopping: bool = False) -> records.Record:
        return records.Record(
            command=self.command,
            profile=self.profile,
            model=self.model,
            host=self.host,
            port=self.port,
            url=f"{self.url}/v1",
            pid=os.getpid(),
            started=records.own_start(),
            engine_pid=engine.pid,
            log=self.log,
            ready=self.ready,
            stopping=stopping,
        )

    def _announce(self, seconds: float) -> None:
        if self.as_json:
            said = {"url": f"{self.url}/v1", "model": self.model, "key": self.key is not None}
            click.echo(json.dumps({**said, "start_s": round(seconds, 3)}))
            return
        click.echo(
            f"{self.model} answers at {self.url}/v1 (ready after {seconds:.1f} s; ctrl-C stops it)\n\n"
            + example(self.url, self.model, None if self.key is None else self.shell_key)
        )


@contextmanager
def _not_fatal() -> Iterator[None]:
    """Tell what goes wrong beside a server that answers, and go on."""
    try:
        yield
    except HyperqwenError as error:
        click.echo(f"hyperqwen: {error.message}; the server runs on", err=True)


def wait_until_serving(engine: Engine, progress: Progress, limit: Limit, news: Callable[[], str]) -> None:
    """Follow the engine until its HTTP server starts; raises EngineError where it ends or takes too long.

    `news` returns what it said since the last call.
    """
    while True:
        stages = engine.stages(_LOOK_SECONDS)
        # Events are of the stage before: what has just begun has said nothing yet.
        for event in startup.events(news()):
            progress.event(event)
        for stage in stages:
            progress.begin(stage)
            if stage == "serve":
                return
        engine.check()
        if limit.left < 0:
            raise limit.passed(engine, "was not ready")


def _answer(engine: Engine, limit: Limit, ask: Callable[[float], Reply]) -> Reply:
    """The reply of `ask(timeout)`, asked again while the server is not there yet."""
    from hyperqwen.runtime.client import Unreachable

    while True:
        left = limit.left
        if left <= 0:
            raise limit.passed(engine, "gave no answer")
        try:
            return ask(left)
        except Unreachable:
            engine.check()
            time.sleep(_LOOK_SECONDS)


def url(host: str, port: int) -> str:
    """Where this machine asks a server that listens on `host`."""
    # A server on all addresses is asked on this machine's own.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def example(address: str, model: str, key: str | None) -> str:
    """A curl command that asks the server; `key` is what a shell puts in for the key, not the key itself."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    header = f' -H "Authorization: Bearer {key}"' if key else ""
    return (
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{header} \\\n  -d {shlex.quote(body)}"
    )
