"""`hyperqwen serve`: look whether a profile can run here, say what it comes to, and serve it."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperqwen import errors
from hyperqwen.cli.knobs import given_flags, knob_options
from hyperqwen.cli.plan import card_of, default_card, show
from hyperqwen.cli.profile import host_file_option
from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles.layers import Effective, redacted, resolve, shown
from hyperqwen.profiles.planner import Plan, make_plan, models_folder
from hyperqwen.profiles.profile import knobs
from hyperqwen.profiles.rules import ALLOCATOR
from hyperqwen.runtime import driver, folders, keys, measured, ports, preflight, site
from hyperqwen.runtime.environment import cuda_environment, engine_environment
from hyperqwen.runtime.host import detect
from hyperqwen.runtime.launch import Launch, Limit, Stopped, stop_signals
from hyperqwen.runtime.measured import Measured
from hyperqwen.runtime.notify import Notifier
from hyperqwen.runtime.preflight import Item
from hyperqwen.runtime.site import Site
from hyperqwen.runtime.watchdog import SpillReport, Watchdog

if TYPE_CHECKING:
    from rich.console import Console

    from hyperqwen.runtime.client import Client
    from hyperqwen.runtime.engine import Engine
    from hyperqwen.runtime.gpu import Gpu

# What may come by itself after a boot: the driver's nodes, and the memory of a server that is still ending.
_MAY_COME = ("device nodes", "cards", "memory of the card", "memory of card", "port")
_WAIT_SECONDS = 2.0


@click.command(context_settings={"show_default": True})
@click.option(
    "--profile",
    envvar="HYPERQWEN_PROFILE",
    show_envvar=True,
    metavar="NAME|FILE",
    help="A to E, demo, a title such as single, or a file.  [default: B; demo with an engine for the CPU]",
)
@host_file_option
@click.option(
    "--models", type=click.Path(path_type=Path), help="Folder with the prepared models; else HYPERQWEN_MODELS."
)
@click.option(
    "--wait", type=click.FloatRange(0, 86400), default=0, help="Seconds to wait for the GPU to be there and free."
)
@click.option("--preflight-only", is_flag=True, help="Look whether it could start, say what was found, and stop.")
@click.option("--print-argv", is_flag=True, help="Print the engine's flags and variables, and stop. Needs no GPU.")
@click.option("--gpu", metavar="NAME", help="With --print-argv: the card to plan for, else rtx3090.")
@click.option("--vram", type=click.FloatRange(1, 2048), metavar="GIB", help="With --print-argv: a card by its memory.")
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    envvar="HYPERQWEN_CACHE_DIR",
    show_envvar=True,
    help="Folder for caches and the log, in place of hyperqwen/ in the XDG cache and state folders.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("--verbose", is_flag=True, help="Show the engine's log instead of keeping it in a file.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="HYPERQWEN_SERVE_CONFIG",
    # For the programs that Nix builds, which set it; whoever runs those has no use for another.
    hidden=True,
    help="JSON file that says where the engine is.",
)
@knob_options
@click.pass_context
def command(
    context: click.Context,
    profile: str | None,
    host_file: Path | None,
    models: Path | None,
    wait: float,
    preflight_only: bool,
    print_argv: bool,
    gpu: str | None,
    vram: float | None,
    cache_dir: Path | None,
    as_json: bool,
    verbose: bool,
    config: Path | None,
) -> None:
    """Serve a profile (OpenAI API), after a look whether this machine can.

    Nothing is started when something stands in the way: one message says all of it. The server counts as ready once a
    token was generated. SIGTERM and ctrl-C let running requests finish for server.drain_seconds, a second one does not;
    that is exit 0 once it serves, and 143 or 130 before.

    Every knob of the profile is an option, and a variable of the same name.
    """
    if math.isnan(wait):
        raise BadInputError("--wait is nan", "use seconds from 0 to 86400")
    if (gpu is not None or vram is not None) and not print_argv:
        raise BadInputError("--gpu and --vram are for --print-argv; a start plans for the card that is there")
    if print_argv and preflight_only:
        raise BadInputError("--print-argv and --preflight-only exclude each other", "give one of them")
    parts = None if config is None else site.read(config, "serve")
    effective = _effective(context, profile, host_file, parts)
    folder = models_folder(os.environ, models)
    if print_argv:
        card = card_of(gpu, vram) or default_card(effective.profile.device)
        plan = make_plan(effective, models=folder, card=card)
        _print_argv(plan, as_json)
        context.exit(errors.USAGE if plan.refusals else errors.OK)
    if parts is None:
        raise MissingError(
            "this program does not say where an engine is", "serve with `./hq run .#serve -- --profile NAME`"
        )
    _require_device(effective, parts)
    notifier = Notifier(os.environ)
    start = Start(parts, effective, folder, cache_dir, notifier, as_json, verbose)
    try:
        with stop_signals():
            look = start.look(wait)
            if preflight_only:
                _report(look.items, as_json)
                preflight.refuse(look.items)
                return
            preflight.refuse(look.items)
            start.serve(look)
    except Stopped as stopped:
        sys.exit(errors.OK if start.ready else 128 + stopped.signum)


def _effective(context: click.Context, profile: str | None, host_file: Path | None, parts: Site | None) -> Effective:
    chosen = profile if profile is not None else "demo" if parts is not None and parts.engine == "cpu" else "B"
    found = resolve(chosen, host_file=host_file, environ=os.environ, flags=given_flags(context))
    return found if parts is None else parts.with_own_model(found)


def _may_come(item: Item) -> bool:
    """Whether what is missing may come by itself: not a value that is wrong, and not a driver that is not installed."""
    return item.code == errors.UNSUITABLE and not item.searched and item.name.startswith(_MAY_COME)


def _compare(look: Look, console: Console, seen: Measured) -> None:
    """Say what the engine measured of its memory beside what was planned."""
    if look.plan.budget is None:
        return
    rows = measured.side_by_side(look.plan.budget, seen)
    for line in measured.lines(rows) if rows else ():
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _require_device(effective: Effective, parts: Site) -> None:
    profile = effective.profile
    if profile.device == parts.engine:
        return
    if profile.device == "cpu":
        raise BadInputError(
            f"profile {profile.name} is for the processor, and this program's engine is for GPUs",
            "./hq run .#demo serves it",
        )
    raise BadInputError(
        f"profile {profile.name} needs a GPU, and this program's engine is for the processor",
        f"./hq run .#serve -- --profile {profile.name}",
    )


def _print_argv(plan: Plan, as_json: bool) -> None:
    """The engine's flags and the variables that the plan sets: JSON, or words for a shell."""
    if as_json:
        said = {"profile": plan.profile.name, "argv": list(plan.argv), "environment": dict(plan.environment)}
        click.echo(json.dumps(said, indent=2))
    else:
        words = [f"{name}={value}" for name, value in plan.environment.items()]
        click.echo(shlex.join([*words, "vllm", "serve", *plan.argv]))
    for notice in plan.notices:
        click.echo(str(notice), err=True)


def _report(items: list[Item], as_json: bool) -> None:
    """What the look found, on stdout."""
    if as_json:
        click.echo(json.dumps([item.report() for item in items], indent=2))
        return
    for item in items:
        click.echo(f"{item.state:4}  {item.name}: {item.found}")


@dataclass(frozen=True)
class Look:
    """What one look at the machine found: the items, and with which plan on which cards it would start."""

    items: list[Item]
    plan: Plan
    cards: tuple[Gpu, ...]
    seen: driver.Survey | None


@dataclass
class Start:
    """One start of the server."""

    parts: Site
    effective: Effective
    models: Path
    cache_dir: Path | None
    notifier: Notifier
    as_json: bool
    verbose: bool
    launch: Launch | None = None

    @property
    def ready(self) -> bool:
        return self.launch is not None and self.launch.ready

    def look(self, wait: float) -> Look:
        """Look at everything that a start needs; up to `wait` seconds again while what is missing may come by itself.

        Raises BadInputError for a plan that is refused, whatever the machine.
        """
        deadline, told = time.monotonic() + wait, ""
        while True:
            found = self._look_once()
            failing = [item for item in found.items if item.state == "fail"]
            left = deadline - time.monotonic()
            # One thing that will not come by waiting, and waiting for the others is in vain.
            if not failing or not all(map(_may_come, failing)) or left <= 0:
                return found
            said = f"waiting up to {left:.0f} s: {failing[0].name}: {failing[0].found.splitlines()[0]}"
            self.notifier.status(said, extend_seconds=left + _WAIT_SECONDS)
            if failing[0].name != told:
                told = failing[0].name
                click.echo(said, err=True)
            time.sleep(min(_WAIT_SECONDS, max(0.05, left)))

    def _look_once(self) -> Look:
        wanted = self.effective.profile
        seen: driver.Survey | None = None
        cards: tuple[Gpu, ...] = ()
        items: list[Item] = []
        card = default_card("cpu") if wanted.device == "cpu" else None
        if wanted.device == "cuda":
            seen = driver.survey()
            items += preflight.machine(seen)
            if seen.driver.usable and seen.nvml_error is None:
                more, cards = preflight.chosen_cards(seen, wanted)
                items += more
            card = preflight.card_of(cards) if cards else None
        host = detect() if seen is None else seen.host
        plan = make_plan(self.effective, models=self.models, card=card, wsl=host.wsl2)
        plan.require_ok()
        profile = plan.profile
        if cards and plan.budget is not None:
            planned = preflight.planned_bytes(plan.budget)
            items += preflight.card_memory(cards, planned, wsl2=host.wsl2, budget=plan.budget)
        items += [preflight.key(profile, os.environ), preflight.port(profile)]
        items += preflight.model(profile, plan.paths)
        if wanted.device == "cuda":
            items.append(preflight.compiler(self.parts.cc))
        pinned = plan.budget.host_bytes if plan.budget is not None else 0
        cache = folders.cache_folder(os.environ, self.parts.engine_id, self.cache_dir)
        items += preflight.host_resources(profile, host, cache, pinned=pinned)
        return Look(items, plan, cards, seen)

    def serve(self, look: Look) -> None:
        """Say what is started, start it, and serve until a signal."""
        # The engine's time begins here: what was waited for before is none of it.
        started = time.monotonic()
        profile = look.plan.profile
        server = profile.server
        file = preflight.key_file(profile)
        key = keys.resolve_key(file, os.environ)
        with ports.claim(server.host, server.port) as listener:
            places = folders.prepare(os.environ, self.parts.engine_id, self.cache_dir)
            try:
                if places.note:
                    click.echo(f"hyperqwen: {places.note}", err=True)
                log = None if self.verbose else places.logs / f"serve-{server.port}.log"
                self.launch = Launch(
                    command="serve",
                    profile=profile.name,
                    model=profile.model.served_name,
                    python=self.parts.engine_python,
                    flags=look.plan.argv,
                    environment=self.environment(look, places.cache, key),
                    host=server.host,
                    port=server.port,
                    listener=listener,
                    places=places,
                    log=log,
                    limit=Limit(started, server.start_seconds, "--server-start-seconds"),
                    notifier=self.notifier,
                    key=key,
                    shell_key=keys.shell_key(file, keys.credential_file(os.environ)),
                    drain=server.drain_seconds,
                    as_json=self.as_json,
                    every=self._watchdog(),
                )
                spill = _spill(look)
                if spill is not None:
                    self.launch.before_ready = lambda seen: spill.settle(seen.held_bytes)
                    self.launch.every.append(_telling(spill))
                self.launch.once_ready = lambda console, seen: _compare(look, console, seen)
                self._introduce(look, key)
                self.launch.serve()
            finally:
                places.discard()

    def environment(self, look: Look, cache: Path, key: str | None) -> dict[str, str]:
        """All variables of the engine."""
        profile, parts = look.plan.profile, self.parts
        if profile.device == "cpu" or look.seen is None:
            return engine_environment(
                os.environ,
                cache=cache,
                threads=profile.limits.threads,
                programs=parts.programs,
                python_path=parts.python_path,
                api_key=key,
            ) | dict(look.plan.environment)
        if parts.cc is None:
            raise MissingError("the program's configuration names no C compiler", "start it through `./hq run .#serve`")
        return cuda_environment(
            os.environ,
            cache=cache,
            driver_links=driver.link_directory(look.seen.driver, cache),
            gpus=[card.uuid for card in look.cards],
            cc=parts.cc.parent,
            programs=[parts.engine_python.parent],
            python_path=parts.python_path,
            api_key=key,
            wsl2=look.seen.host.wsl2,
            expandable_segments=look.plan.environment.get(ALLOCATOR, "").endswith(":True"),
            ptxas=parts.ptxas,
            cuda_home=parts.cuda_home,
            variables=look.plan.environment,
        )

    def _watchdog(self) -> list[Callable[[Engine, Client, Console], None]]:
        if not self.notifier.watchdog:
            return []
        patience = min(5.0, self.notifier.watchdog / 3)
        dog: Watchdog | None = None

        def look(engine: Engine, client: Client, console: Console) -> None:
            nonlocal dog
            if dog is None:
                dog = Watchdog(
                    self.notifier,
                    lambda: client.metrics(timeout=patience),
                    lambda text: console.print(f"hyperqwen: {text}", highlight=False, markup=False, soft_wrap=True),
                    engine.dump,
                )
            dog.look()

        return [look]

    def _introduce(self, look: Look, key: str | None) -> None:
        """Say on stderr what is about to start: the plan, what was changed and where, and what does not stand well."""
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        plan = look.plan
        show(plan, console)
        for card in look.cards:
            console.print(f"card {card.index}: {card.name}, {card.uuid}", markup=False)
        profile = plan.profile
        console.print(
            f"{profile.limits.context_tokens:,} tokens of context, {profile.limits.concurrent_requests} slots; "
            f"model {plan.paths.model}; key {redacted(key or '')}",
            markup=False,
            soft_wrap=True,
        )
        for knob in knobs():
            source = plan.sources[knob.path]
            if source.kind not in ("default", "profile"):
                said = f"{knob.path} = {shown(knob, profile.get(knob.path))} ({source})"
                console.print(said, markup=False, soft_wrap=True)
        for item in look.items:
            if item.state == "warn":
                console.print(f"warning: {item.name}: {item.found}; {item.fix}", markup=False, soft_wrap=True)


def _spill(look: Look) -> SpillReport | None:
    """On WSL2, what looks whether the cards' memory has gone to the host's."""
    if look.seen is None or not look.seen.host.wsl2 or look.plan.budget is None or look.seen.driver.nvml is None:
        return None
    from hyperqwen.runtime.gpu import Nvml

    library = look.seen.driver.nvml

    def again(cards: Sequence[Gpu]) -> list[Gpu]:
        with Nvml(library) as nvml:
            return [nvml.again(card) for card in cards]

    held = look.plan.budget.load.card_bytes - look.plan.budget.margin_bytes
    return SpillReport(look.cards, held, again)


def _telling(spill: SpillReport) -> Callable[[Engine, Client, Console], None]:
    """A look now and then while the server serves, and a line where something is new."""

    def watch(_engine: Engine, _client: Client, console: Console) -> None:
        said = spill.look()
        if said:
            console.print(f"hyperqwen: {said}", highlight=False, markup=False, soft_wrap=True)

    return watch
