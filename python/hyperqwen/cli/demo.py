"""`hyperqwen demo`: serve nano on this machine's processor, or ask it one thing."""

from __future__ import annotations

import difflib
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperqwen import errors
from hyperqwen.errors import BadInputError, MissingError, UnsuitableError
from hyperqwen.profiles.profile import Profile, engine_flags, load
from hyperqwen.runtime import folders, ports
from hyperqwen.runtime.engine import Engine, EngineError
from hyperqwen.runtime.environment import engine_environment
from hyperqwen.runtime.keys import resolve_key, shell_key
from hyperqwen.runtime.problems import describe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from hyperqwen.runtime.client import Client, Reply

F = TypeVar("F", bound=Callable[..., Any])

STAGES = {
    "import": "importing the engine",
    "configure": "reading the model's configuration",
    "load": "loading the model",
    "serve": "starting the HTTP server",
    "answer": "waiting for the first token",
}
QUESTION = "Who are you?"
# A word of nano's own vocabulary; which one does not matter, only that a token comes back.
PROBE = "Monday"


class Paths(BaseModel):
    """What Nix bakes into the wrapper: where the parts of the demo are.

    engine_python: interpreter of the engine's environment.
    model: nano's folder.
    profile: demo.toml.
    engine_id: names the engine's cache folder; another engine, another name.
    cc: folder of a C compiler, for PATH.
    python_path: folders for PYTHONPATH, where the engine's environment does not hold hyperqwen itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine_python: Path
    model: Path
    profile: Path
    engine_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    cc: Path | None = None
    python_path: list[Path] = []


class Stopped(BaseException):
    """SIGINT, SIGTERM or SIGHUP arrived; not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Progress:
    """What the user sees until the server is ready: a live line on a terminal, one line for each stage elsewhere."""

    def __init__(self, console: Console, started: float) -> None:
        self._console = console
        self._started = started
        self._bar: Bar | None = None

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        if not self._console.is_terminal:
            yield self
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=self._console, transient=True) as self._bar:
            self._bar.add_task("starting the engine", total=None)
            yield self

    def begin(self, stage: str) -> None:
        text = STAGES.get(stage, stage)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text)
        else:
            self._console.print(f"{time.monotonic() - self._started:5.1f} s  {text}", highlight=False)


def read_paths(file: Path) -> Paths:
    """The demo's configuration file; raises MissingError, BadInputError, or UnsuitableError for a path that is gone."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingError(
            f"the demo's configuration {file} does not exist", "start it through `./hq run .#demo`, which makes it"
        ) from None
    except ValueError as error:
        raise BadInputError(f"{file} is not JSON: {error}") from None
    try:
        paths = Paths.model_validate(data)
    except ValidationError as error:
        raise BadInputError(describe(error, Paths, str(file))) from None
    for field in ("engine_python", "model", "profile"):
        place = getattr(paths, field)
        if not place.exists():
            raise UnsuitableError(
                f"{field} of {file} is gone: {place}", "it was probably garbage-collected; run `./hq run .#demo` again"
            )
    return paths


@contextmanager
def stop_signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into `Stopped` while the block runs."""

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise Stopped(signum)

    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_question(text: str) -> str:
    # `echo` and an editor end the last line; that end is not part of the question.
    question = sys.stdin.read().removesuffix("\n") if text == "-" else text
    if not question.strip():
        raise BadInputError("--once has no text", 'say what to ask: --once "Who are you?"')
    return question


@dataclass(frozen=True)
class _Limit:
    """Until when the first answer must be there: `seconds` (--timeout) after `started` (monotonic)."""

    started: float
    seconds: float

    @property
    def left(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def passed(self, engine: Engine, what: str) -> EngineError:
        return engine.failure(
            f"the engine {what} in {self.seconds:g} s (--timeout)",
            f"give it longer: --timeout {2 * self.seconds:g}",
        )


def _wait_until_serving(engine: Engine, progress: Progress, limit: _Limit) -> None:
    while True:
        for stage in engine.stages(0.1):
            progress.begin(stage)
            if stage == "serve":
                return
        engine.check()
        if limit.left < 0:
            raise limit.passed(engine, "was not ready")


def _first_answer(engine: Engine, limit: _Limit, ask: Any) -> Reply:
    """The reply of `ask(timeout)`, asked again while the server is not there yet."""
    from hyperqwen.runtime.client import Unreachable

    while True:
        left = limit.left
        if left <= 0:
            raise limit.passed(engine, "gave no answer")
        try:
            reply: Reply = ask(left)
            return reply
        except Unreachable:
            engine.check()
            time.sleep(0.1)


def _url(host: str, port: int) -> str:
    # A server on all addresses is asked on this machine's own.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _example(url: str, model: str, key: str | None) -> str:
    """A curl command that asks the server; `key` is what a shell puts in for the key, not the key itself."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": QUESTION}]})
    header = f' -H "Authorization: Bearer {key}"' if key else ""
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\\n  -d {shlex.quote(body)}"


def _option(*names: str, **settings: Any) -> Callable[[F], F]:
    """An option with a twin in the environment, which the help and every error about its value name."""
    twin = "HYPERQWEN_DEMO_" + names[0].removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=twin, show_envvar=True, **settings)


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """A twin that is spelled wrong would otherwise be one that does nothing."""
    known = [str(option.envvar) for option in command.params if isinstance(option, click.Option) and option.envvar]
    for name in sorted(environ):
        if name.startswith("HYPERQWEN_DEMO_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise BadInputError(
                f"the variable {name} is not one of the demo's{f'; did you mean {near[0]}?' if near else ''}",
                f"unset it, or use one of: {', '.join(known)}",
            )


@click.command(context_settings={"show_default": True})
@click.option(
    "--once", metavar="TEXT", help="Start, answer TEXT, print the answer alone on stdout, stop. '-' reads stdin."
)
@click.option("--complete", is_flag=True, help="With --once: go on after TEXT instead of answering it.")
@_option("--port", type=click.IntRange(1, 65535), help="TCP port; the profile says 18020.")
@_option("--host", help="Address to listen on; the profile says 127.0.0.1.")
@_option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="File with the key that clients must send. HYPERQWEN_API_KEY may hold the key itself; not both.",
)
@_option("--max-tokens", type=click.IntRange(1), help="Longest answer of --once; the profile says 64.")
@_option("--timeout", type=click.FloatRange(1, 86400), default=300, help="Seconds until the first answer.")
@_option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Folder for caches and the log, in place of hyperqwen/ in the XDG cache and state folders.",
)
@_option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@_option("--verbose", is_flag=True, help="Show the engine's log instead of keeping it in a file.")
@_option(
    "--config",
    type=click.Path(path_type=Path),
    required=True,
    # For the program that Nix builds, which sets it; whoever runs that has no use for another.
    hidden=True,
    help="JSON file that says where the engine and the model are.",
)
def command(
    once: str | None,
    complete: bool,
    port: int | None,
    host: str | None,
    api_key_file: Path | None,
    max_tokens: int | None,
    timeout: float,
    cache_dir: Path | None,
    as_json: bool,
    verbose: bool,
    config: Path,
) -> None:
    """Serve nano, the model that ships with hyperqwen, on this machine's processor (OpenAI API).

    The server stops on ctrl-C or SIGTERM. That is exit 0 once it serves; before that, and with --once, it is 130
    (143 for SIGTERM), because what was asked for was not done.
    """
    started = time.monotonic()
    _refuse_unknown_variables(os.environ)
    if math.isnan(timeout):
        raise BadInputError("--timeout (HYPERQWEN_DEMO_TIMEOUT) is nan", "use seconds from 1 to 86400")
    question = None if once is None else _read_question(once)
    if complete and question is None:
        raise BadInputError("--complete has nothing to go on after", "give the text: --once TEXT --complete")
    paths = read_paths(config)
    profile = load(paths.profile)
    host, port = host or profile.server.host, port or profile.server.port
    key = resolve_key(api_key_file, os.environ)
    if key is None and not ports.is_loopback(host):
        raise BadInputError(
            f"host {host!r} is open to other machines, and no key is set",
            "set HYPERQWEN_API_KEY or --api-key-file, or use 127.0.0.1",
        )
    if max_tokens is not None and max_tokens >= profile.limits.context_tokens:
        raise BadInputError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in {profile.limits.context_tokens} tokens",
            f"use at most {profile.limits.context_tokens - 1}",
        )
    limit = _Limit(started, timeout)
    run = _Run(paths, profile, host, port, key, shell_key(api_key_file), limit, as_json, verbose, cache_dir)
    try:
        with stop_signals():
            if question is None:
                run.serve()
            else:
                run.once(question, complete, max_tokens or profile.answer.max_tokens)
    except Stopped as stopped:
        sys.exit(errors.OK if run.ready and question is None else 128 + stopped.signum)


@dataclass
class _Run:
    """One start of the server and what is done with it."""

    paths: Paths
    profile: Profile
    host: str
    port: int
    key: str | None
    shell_key: str
    limit: _Limit
    as_json: bool
    verbose: bool
    cache_dir: Path | None
    ready: bool = False

    @property
    def url(self) -> str:
        return _url(self.host, self.port)

    @contextmanager
    def engine(self) -> Iterator[tuple[Engine, Console]]:
        """The engine, on its way up, and a console for messages; both are cleared away afterwards."""
        listener = ports.claim(self.host, self.port)
        places = folders.prepare(os.environ, self.paths.engine_id, self.cache_dir)
        environment = engine_environment(
            os.environ,
            cache=places.cache,
            threads=self.profile.limits.threads,
            programs=[self.paths.engine_python.parent, *([self.paths.cc] if self.paths.cc else [])],
            python_path=self.paths.python_path,
            api_key=self.key,
        )
        try:
            engine = Engine.start(
                self.paths.engine_python,
                engine_flags(self.profile, self.paths.model, host=self.host, port=self.port),
                environment,
                listener=listener,
                folder=places.cache,
                log=None if self.verbose else places.logs / f"demo-{self.port}.log",
            )
            try:
                # Only now: the engine has its own ten seconds of imports to do meanwhile.
                from rich.console import Console

                console = Console(stderr=True)
                if places.note:
                    console.print(f"hyperqwen: {places.note}", highlight=False, soft_wrap=True)
                yield engine, console
            finally:
                engine.stop()
        finally:
            listener.close()
            places.discard()

    def client(self) -> Client:
        from hyperqwen.runtime.client import Client

        return Client(self.url, self.profile.server.model_name, self.key)

    def once(self, question: str, complete: bool, max_tokens: int) -> None:
        with self.engine() as (engine, console), self.client() as client:
            ask = client.complete if complete else client.chat
            with Progress(console, self.limit.started).shown() as progress:
                _wait_until_serving(engine, progress, self.limit)
                progress.begin("answer")
                began = time.monotonic()
                temperature = self.profile.answer.temperature
                reply = _first_answer(
                    engine,
                    self.limit,
                    lambda left: ask(question, max_tokens=max_tokens, temperature=temperature, timeout=left),
                )
            now = time.monotonic()
            if self.as_json:
                click.echo(
                    json.dumps(
                        {
                            "model": self.profile.server.model_name,
                            "answer": reply.text,
                            "finish_reason": reply.finish_reason,
                            "prompt_tokens": reply.prompt_tokens,
                            "completion_tokens": reply.completion_tokens,
                            "start_s": round(began - self.limit.started, 3),
                            "answer_s": round(now - began, 3),
                        },
                        ensure_ascii=False,
                    )
                )
            else:
                click.echo(reply.text)

    def serve(self) -> None:
        with self.engine() as (engine, console):
            with Progress(console, self.limit.started).shown() as progress, self.client() as client:
                _wait_until_serving(engine, progress, self.limit)
                progress.begin("answer")
                _first_answer(
                    engine,
                    self.limit,
                    lambda left: client.complete(PROBE, max_tokens=1, temperature=0.0, timeout=left),
                )
            self.ready = True
            self._announce(time.monotonic() - self.limit.started)
            while True:
                engine.stages(0.5)
                engine.check()

    def _announce(self, seconds: float) -> None:
        model = self.profile.server.model_name
        if self.as_json:
            click.echo(
                json.dumps(
                    {"url": f"{self.url}/v1", "model": model, "key": self.key is not None, "start_s": round(seconds, 3)}
                )
            )
            return
        click.echo(
            f"{model} answers at {self.url}/v1 (ready after {seconds:.1f} s; ctrl-C stops it)\n\n"
            + _example(self.url, model, None if self.key is None else self.shell_key)
        )
