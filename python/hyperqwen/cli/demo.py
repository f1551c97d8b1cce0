"""`hyperqwen demo`: serve nano on this machine's processor, or ask it one thing."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from hyperqwen import errors
from hyperqwen.errors import BadInputError
from hyperqwen.profiles.argv import ModelPaths, engine_flags
from hyperqwen.profiles.profile import Profile, load, shipped
from hyperqwen.runtime import folders, ports, site
from hyperqwen.runtime.environment import engine_environment
from hyperqwen.runtime.keys import resolve_key, shell_key
from hyperqwen.runtime.launch import Launch, Limit, Stopped, stop_signals
from hyperqwen.runtime.notify import Notifier
from hyperqwen.runtime.site import Site

F = TypeVar("F", bound=Callable[..., Any])


def _read_question(text: str) -> str:
    # `echo` and an editor end the last line; that end is not part of the question.
    question = sys.stdin.read().removesuffix("\n") if text == "-" else text
    if not question.strip():
        raise BadInputError("--once has no text", 'say what to ask: --once "Who are you?"')
    return question


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
    parts = site.read(config, "demo")
    model = _model(parts, config)
    profile = load(shipped()["demo"])
    profile = profile.with_values(
        {"server.host": host or profile.server.host, "server.port": port or profile.server.port}
    )
    key = resolve_key(api_key_file, os.environ)
    ports.require_key(profile.server.host, key, "set HYPERQWEN_API_KEY or --api-key-file")
    if max_tokens is not None and max_tokens >= profile.limits.context_tokens:
        raise BadInputError(
            f"--max-tokens {max_tokens} leaves no room for a prompt in {profile.limits.context_tokens} tokens",
            f"use at most {profile.limits.context_tokens - 1}",
        )
    launch: Launch | None = None
    try:
        with stop_signals(), _launch(parts, model, profile, key, cache_dir, verbose) as launch:
            launch.limit = Limit(started, timeout, "--timeout")
            launch.shell_key, launch.as_json = shell_key(api_key_file), as_json
            if question is None:
                launch.serve()
            else:
                _once(launch, profile, question, complete, max_tokens or profile.chat.max_tokens)
    except Stopped as stopped:
        sys.exit(errors.OK if launch is not None and launch.ready and question is None else 128 + stopped.signum)


def _model(parts: Site, config: Path) -> Path:
    if parts.model is None or parts.engine != "cpu":
        raise BadInputError(f"{config} is not the demo's: it needs an engine for the CPU and a model")
    return parts.model


@contextmanager
def _launch(
    parts: Site, model: Path, profile: Profile, key: str | None, cache_dir: Path | None, verbose: bool
) -> Iterator[Launch]:
    """The start of the demo's server; its port is claimed, its folders made, and both are given back afterwards."""
    host, port = profile.server.host, profile.server.port
    with ports.claim(host, port) as listener:
        places = folders.prepare(os.environ, parts.engine_id, cache_dir)
        try:
            if places.note:
                click.echo(f"hyperqwen: {places.note}", err=True)
            yield Launch(
                command="demo",
                profile=profile.name,
                model=profile.model.served_name,
                python=parts.engine_python,
                flags=engine_flags(profile, ModelPaths(model)),
                environment=engine_environment(
                    os.environ,
                    cache=places.cache,
                    threads=profile.limits.threads,
                    programs=parts.programs,
                    python_path=parts.python_path,
                    api_key=key,
                ),
                host=host,
                port=port,
                listener=listener,
                places=places,
                log=None if verbose else places.logs / f"demo-{port}.log",
                limit=Limit(time.monotonic(), profile.server.start_seconds, "--timeout"),
                notifier=Notifier(os.environ),
                key=key,
                drain=profile.server.drain_seconds,
            )
        finally:
            places.discard()


def _once(launch: Launch, profile: Profile, question: str, complete: bool, max_tokens: int) -> None:
    """Answer `question` and stop."""
    with launch.engine() as (engine, console), launch.client() as client:
        ask = client.complete if complete else client.chat
        reply, start = launch.first_answer(
            engine,
            console,
            lambda left: ask(question, max_tokens=max_tokens, temperature=profile.chat.temperature, timeout=left),
        )
        now = time.monotonic() - launch.limit.started
        if not launch.as_json:
            click.echo(reply.text)
            return
        said = {
            "model": launch.model,
            "answer": reply.text,
            "finish_reason": reply.finish_reason,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "start_s": round(start, 3),
            "answer_s": round(now - start, 3),
        }
        click.echo(json.dumps(said, ensure_ascii=False))
