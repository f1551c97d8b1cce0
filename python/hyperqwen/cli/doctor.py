"""`hyperqwen doctor`: everything that a start would look at, and what runs already. It changes nothing."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hyperqwen import __version__, errors
from hyperqwen.cli.knobs import given_flags, knob_options
from hyperqwen.cli.plan import default_card, gib, mib
from hyperqwen.cli.profile import host_file_option
from hyperqwen.errors import HyperqwenError
from hyperqwen.profiles.argv import model_paths
from hyperqwen.profiles.layers import Effective, resolve
from hyperqwen.profiles.planner import Plan, budget_report, make_plan, models_folder
from hyperqwen.profiles.profile import Profile
from hyperqwen.runtime import driver, folders, keys, preflight, records, site
from hyperqwen.runtime.preflight import Item
from hyperqwen.runtime.site import Site

if TYPE_CHECKING:
    from hyperqwen.profiles.cards import Card
    from hyperqwen.profiles.rules import Notice
    from hyperqwen.runtime.bundle import Scrubber
    from hyperqwen.runtime.gpu import Gpu
    from hyperqwen.runtime.records import Record

HEALTHY, NOT_RIGHT, ENVIRONMENT = 0, 1, 2
"""Exit codes of this command alone: all well; something of ours is not; the machine cannot."""

ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.5
_LOG_BYTES = 1 << 18
_SHOWN_ERRORS = 3
# An error that vLLM or we logged, or the last line of a traceback.
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL) \d\d-\d\d |(?:\A|\] )(?:\w+\.)*\w+(?:Error|Exception): ")
# For an error that says in its message alone what is wrong.
_FIX = "mend what the message names"
_FIXES = {
    "configuration": "mend it where it is set (host file, variable or flag); hyperqwen profile show B lists every knob",
    "engine": "start it through ./hq run .#serve, which says where its engine is",
}
_LEFT_OUT = re.compile(r"this engine has no (.+?) yet")
_BAD_CLOCKS = ("thermal", "brake", "hardware slowdown")

About = Literal["host", "hyperqwen"]
profile_option = click.option(
    "--profile",
    envvar="HYPERQWEN_PROFILE",
    show_envvar=True,
    default="B",
    show_default=True,
    metavar="NAME|FILE",
    help="A to E, demo, a title such as single, or a file.",
)
models_option = click.option(
    "--models", type=click.Path(path_type=Path), help="Folder with the prepared models; else HYPERQWEN_MODELS."
)
cache_option = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    envvar="HYPERQWEN_CACHE_DIR",
    show_envvar=True,
    help="As the server was given it: its logs are there.",
)
config_option = click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="HYPERQWEN_SERVE_CONFIG",
    hidden=True,
    help="Where the engine is.",
)


@dataclass(frozen=True)
class Check:
    """An item, and whether it is about the machine or about what this user set up."""

    about: About
    item: Item

    def report(self) -> dict[str, object]:
        return {"about": self.about, **self.item.report()}


@dataclass(frozen=True)
class Examination:
    """What one look found. Of what could not be read (a plan, a profile), the reason is among the checks."""

    profile: str
    effective: Effective | None
    plan: Plan | None
    seen: driver.Survey
    parts: Site | None
    logs: Path | None
    servers: tuple[Record, ...]
    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """Of `doctor`: a machine that cannot comes first, since nothing that is set up better would help."""
        failing = [check for check in self.checks if check.item.state == "fail"]
        if any(check.about == "host" and check.item.code == errors.UNSUITABLE for check in failing):
            return ENVIRONMENT
        return NOT_RIGHT if failing else HEALTHY

    def report(self) -> dict[str, object]:
        """Everything as JSON has it."""
        seen = self.seen.report()
        return {
            "version": __version__,
            "state": preflight.summary([check.item for check in self.checks]),
            "exit": self.exit_code,
            "profile": self.profile,
            "checks": [check.report() for check in self.checks],
            "plan": None if self.plan is None else plan_summary(self.plan),
            "servers": [record.model_dump(mode="json") for record in self.servers],
            "logs": None if self.logs is None else str(self.logs),
            "engine": None if self.parts is None else self.parts.model_dump(mode="json"),
            "host": seen["host"],
            "driver": seen["driver"],
            "nvml_error": seen["nvml_error"],
            "cuda": seen["cuda"],
            "gpus": seen["gpus"],
        }


@click.command()
@profile_option
@host_file_option
@models_option
@cache_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text: with all that was found.")
@click.option("--verbose", is_flag=True, help="Also print every place that was searched, and every cache.")
@config_option
@knob_options
@click.pass_context
def command(
    context: click.Context,
    profile: str,
    host_file: Path | None,
    models: Path | None,
    cache_dir: Path | None,
    as_json: bool,
    verbose: bool,
    config: Path | None,
) -> None:
    """Look at this machine and at what is set up, and say what is wrong and how to mend it. Nothing is changed.

    Exit codes, which are not those of other commands: 0 when all is well (warnings may remain), 1 when something that
    you set up is not right (a knob, the model, the key, the port, a server), 2 when the machine cannot (driver, card,
    memory, disk), and also for a wrong command line.

    Every knob of the profile is an option here as well, as `serve` lists them.
    """
    found = examine(
        profile,
        host_file=host_file,
        models=models,
        cache_dir=cache_dir,
        config=config,
        flags=given_flags(context),
        environ=os.environ,
    )
    if as_json:
        click.echo(json.dumps(found.report(), indent=2, default=str))
    else:
        _show(found, verbose)
    context.exit(found.exit_code)


def hide_knobs(command: click.Command) -> None:
    """Leave the knobs out of the help of `command`, which takes them all: `serve` has the list."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and (parameter.name or "").startswith("knob_"):
            parameter.hidden = True


hide_knobs(command)


def examine(
    profile: str,
    *,
    host_file: Path | None,
    models: Path | None,
    cache_dir: Path | None,
    config: Path | None,
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    root: Path = Path("/"),
) -> Examination:
    """Look at everything. What cannot be looked at is a check that fails; only a bug is raised.

    Args:
        root: of the tree in which the driver is looked for.
    """
    return _Look(profile, host_file, models, cache_dir, config, flags, environ, root).examine()


@dataclass
class _Look:
    name: str
    host_file: Path | None
    models: Path | None
    cache_dir: Path | None
    config: Path | None
    flags: Mapping[str, str]
    environ: Mapping[str, str]
    root: Path

    def __post_init__(self) -> None:
        self.checks: list[Check] = []
        self.effective: Effective | None = None
        self.plan: Plan | None = None
        self.parts: Site | None = None
        self.cards: tuple[Gpu, ...] = ()
        self.logs = folders.logs_folder(self.environ, self.cache_dir)
        self.servers: list[Record] = []

    def examine(self) -> Examination:
        self.seen = driver.survey(self.root, self.environ)
        self._see("host", "host", lambda: _host(self.seen))
        self._see("hyperqwen", "engine", self._engine)
        self._see("hyperqwen", "configuration", self._configuration)
        self._see("host", "driver", self._machine)
        self._see("hyperqwen", "servers", self._records)
        self._see("hyperqwen", "plan", self._plan)
        self._see("host", "memory of the card", self._card_memory)
        self._see("hyperqwen", "key", self._key_item)
        self._see("hyperqwen", "port", self._port)
        self._see("hyperqwen", "model", self._model)
        self._see("hyperqwen", "C compiler", self._compiler)
        self._see("host", "caches", lambda: _caches(self._cache.parent))
        self._see("host", "disk", self._resources)
        for record in self.servers:
            self._see("hyperqwen", f"server on port {record.port}", partial(_server, record, self._key()))
        self._see("hyperqwen", "logs", self._log_errors)
        return Examination(
            profile=self.name,
            effective=self.effective,
            plan=self.plan,
            seen=self.seen,
            parts=self.parts,
            logs=self.logs,
            servers=tuple(self.servers),
            checks=tuple(self.checks),
        )

    @property
    def profile(self) -> Profile | None:
        """The profile with the plan's corrections, where there is one."""
        if self.plan is not None:
            return self.plan.profile
        return None if self.effective is None else self.effective.profile

    def _see(self, about: About, name: str, see: Callable[[], str | Item | Iterable[Item]]) -> None:
        """Add what `see` finds; what keeps it from finding anything is a check that fails."""
        try:
            seen = see()
            found = [Item(name, "ok", seen)] if isinstance(seen, str) else [seen] if isinstance(seen, Item) else [*seen]
        except HyperqwenError as error:
            found = [Item(name, "fail", error.message, error.fix or _FIXES.get(name, _FIX), code=error.exit_code)]
        except OSError as error:
            said = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            found = [Item(name, "fail", said, "see whether that is what it should be, and may be read")]
        self.checks += [Check(about, item) for item in found]

    def _engine(self) -> str | Item:
        if self.config is None:
            said = "this program brings none; `./hq run .#serve` does, and its compiler with it"
            return Item("engine", "skip", said)
        self.parts = site.read(self.config, "serve")
        return f"{self.parts.engine_id}, for {'GPUs' if self.parts.engine == 'cuda' else 'the processor'}"

    def _configuration(self) -> str:
        found = resolve(self.name, host_file=self.host_file, environ=self.environ, flags=self.flags)
        self.effective = found if self.parts is None else self.parts.with_own_model(found)
        self.name = found.profile.name
        layers = [str(source) for source in found.sources.values() if source.kind not in ("default", "profile")]
        counted = ", ".join(f"{layers.count(layer)} from {layer}" for layer in dict.fromkeys(layers))
        return f"profile {found.profile.name} ({found.profile.title})" + (f"; {counted}" if counted else "")

    def _machine(self) -> Iterator[Item]:
        if self.effective is not None and self.effective.profile.device == "cpu":
            yield Item("driver", "skip", f"profile {self.name} runs on the processor")
            return
        yield from preflight.machine(self.seen)
        yield from map(_card, self.seen.gpus)
        if self.seen.driver.usable and self.seen.nvml_error is None and self.effective is not None:
            items, self.cards = preflight.chosen_cards(self.seen, self.effective.profile)
            yield from items

    def _records(self) -> str | Iterable[Item]:
        if self.logs is None:
            return [Item("servers", "skip", "HOME is not set: there is no usual place for their records")]
        self.servers = records.found(self.logs, tidy=False)
        return [] if self.servers else f"none runs that keeps its records in {self.logs}"

    def _plan(self) -> Iterator[Item]:
        if self.effective is None:
            yield Item("plan", "skip", "not made: the configuration is not right")
            return
        card: Card | None = None
        if self.effective.profile.device == "cpu":
            card = default_card("cpu")
        elif self.cards:
            card = preflight.card_of(self.cards)
        models = models_folder(self.environ, self.models)
        self.plan = plan = make_plan(self.effective, models=models, card=card, wsl=self.seen.host.wsl2)
        if plan.refusals:
            said = "\n".join(notice.message for notice in plan.refusals)
            yield Item("plan", "fail", said, "; ".join(notice.fix for notice in plan.refusals), code=errors.USAGE)
            return
        left_out = {id(notice): name for notice in plan.notices if (name := _left_out(notice))}
        if left_out:
            yield Item("plan", "ok", f"left out, this engine has none yet: {', '.join(left_out.values())}")
        for notice in plan.notices:
            if id(notice) in left_out:
                continue
            # A correction has been made; a warning is for the user to act on.
            yield Item("plan", "ok" if notice.level == "correct" else "warn", notice.message, notice.fix)
        limits = plan.profile.limits
        asked = f"{limits.context_tokens:,} tokens of context, {limits.concurrent_requests} slots"
        if plan.budget is None or plan.card is None:
            said = f"whether it fits is not known without a card (hyperqwen plan {self.name} --gpu NAME)"
            yield Item("plan", "ok", f"{asked}; {said}")
            return
        yield Item(
            "plan",
            "ok",
            f"{asked} fit on {plan.card.title}: pool of {mib(plan.budget.kv_cache_bytes)} MiB for "
            f"{plan.budget.pool_tokens:,} tokens, {mib(plan.budget.margin_bytes)} MiB left",
        )

    def _card_memory(self) -> Iterator[Item]:
        if not self.cards or self.plan is None or self.plan.budget is None:
            return
        planned = preflight.planned_bytes(self.plan.budget)
        ours = {record.engine_pid: record for record in self.servers if record.engine_pid is not None}
        items = preflight.card_memory(self.cards, planned, wsl2=self.seen.host.wsl2, budget=self.plan.budget)
        for card, item in zip(self.cards, items, strict=True):
            holder = _holder(card, ours) if item.state == "fail" else None
            if holder is None:
                yield item
            else:
                held = f"held by the server on port {holder.port} (profile {holder.profile}, process {holder.pid})"
                yield Item(item.name, "ok", held)

    def _key_item(self) -> Iterable[Item]:
        return [] if self.profile is None else [preflight.key(self.profile, self.environ)]

    def _port(self) -> str | Iterable[Item]:
        if self.profile is None:
            return []
        own = next((record for record in self.servers if record.port == self.profile.server.port), None)
        if own is not None:
            return f"{own.port} is in use by our server (profile {own.profile}, process {own.pid})"
        return [preflight.port(self.profile)]

    def _model(self) -> Iterable[Item]:
        profile = self.profile
        if profile is None:
            return []
        if profile.device == "cpu" and not profile.model.directory:
            return [Item("model", "skip", "the demo brings its own: ./hq run .#demo")]
        paths = self.plan.paths if self.plan else model_paths(profile, models_folder(self.environ, self.models))
        return preflight.model(profile, paths)

    def _compiler(self) -> Iterable[Item]:
        if self.parts is None or self.parts.engine != "cuda":
            return []
        return [preflight.compiler(self.parts.cc)]

    @property
    def _cache(self) -> Path:
        engine = self.parts.engine_id if self.parts is not None else "engine"
        return folders.cache_folder(self.environ, engine, self.cache_dir)

    def _resources(self) -> Iterator[Item]:
        if self.profile is None:
            return
        pinned = self.plan.budget.host_bytes if self.plan is not None and self.plan.budget is not None else 0
        for item in preflight.host_resources(self.profile, self.seen.host, self._cache, pinned=pinned):
            if item.state == "fail" and self.servers:
                # A server that runs has taken its share already; what is short is short for one more.
                yield replace(item, state="warn", found=f"{item.found} (for one more server)")
            else:
                yield item

    def _log_errors(self) -> Iterator[Item]:
        from hyperqwen.runtime.bundle import Scrubber, known_secrets, secret_files

        logs = {record.log for record in self.servers if record.log is not None}
        if not logs and self.logs is not None:
            logs = set(last_logs(self.logs)[:1])
        file = None if self.profile is None else preflight.key_file(self.profile)
        secrets = Scrubber(known_secrets(self.environ, secret_files(self.environ, [file] if file else [])))
        for log in sorted(logs):
            yield _errors(log, secrets)

    def _key(self) -> str | None:
        try:
            return keys.resolve_key(None if self.profile is None else preflight.key_file(self.profile), self.environ)
        except HyperqwenError:
            # The check of the key has said so.
            return None


def last_logs(folder: Path) -> list[Path]:
    """Logs of servers in `folder`, the newest first; not those that a later run put aside."""
    found = []
    for path in [*folder.glob("serve-*.log"), *folder.glob("demo-*.log")]:
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    return [path for _, path in sorted(found, reverse=True)]


def plan_summary(plan: Plan) -> dict[str, object]:
    """What a reader wants to know of a plan first; `hyperqwen plan --json` has the rest."""
    return {
        "profile": plan.profile.name,
        "ok": not plan.refusals,
        "model": plan.geometry.name,
        "card": None if plan.card is None else plan.card.title,
        "context_tokens": plan.profile.limits.context_tokens,
        "concurrent_requests": plan.profile.limits.concurrent_requests,
        "notices": [str(notice) for notice in plan.notices],
        "budget": None if plan.budget is None else budget_report(plan.budget),
    }


def _left_out(notice: Notice) -> str | None:
    """What the engine lacks for `notice`, where the plan goes on without it."""
    about = notice.rule == "accelerators" or notice.rule.endswith("-capability")
    said = _LEFT_OUT.search(notice.message) if about and notice.level == "correct" else None
    return said and said[1]


def _host(seen: driver.Survey) -> Item:
    host = seen.host
    around = f" in {host.container}" if host.container else " on WSL2" if host.wsl2 else ""
    memory = "" if host.memory is None else f"; {gib(host.memory)} GiB of memory"
    free = "" if host.memory_free is None else f", {gib(host.memory_free)} free"
    return Item(
        "host", "ok", f"{host.title}{around} ({host.kind.value}), kernel {host.kernel or 'unknown'}{memory}{free}"
    )


def _card(card: Gpu) -> Item:
    power = "" if card.power_limit is None else f", power limit {card.power_limit:.0f} W"
    said = f"{card.name}, {mib(card.total)} MiB, {mib(card.free)} free{power}"
    if card.processes:
        said += "; held by " + "; ".join(map(str, card.processes))
    slow = [reason for reason in card.throttled or () if any(word in reason for word in _BAD_CLOCKS)]
    if slow:
        return Item(
            f"card {card.index}", "warn", f"{said}; slowed down: {', '.join(slow)}", "look at cooling and power supply"
        )
    return Item(f"card {card.index}", "ok", said)


def _holder(card: Gpu, ours: Mapping[int, Record]) -> Record | None:
    """Our server that holds `card`: each engine's processes are a group of their own."""
    for process in card.processes:
        try:
            group = os.getpgid(process.pid)
        except OSError:
            continue
        if group in ours:
            return ours[group]
    return None


def _caches(folder: Path) -> Item:
    engines = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if not engines:
        return Item("caches", "ok", f"none yet in {folder}: the first start compiles")
    sizes = {path.name: sum(_sizes(path)) for path in engines}
    count = f"{len(sizes)} engine" + ("s" if len(sizes) > 1 else "")
    found = f"{folder}: {mib(sum(sizes.values()))} MiB of {count}; all may be removed while no server runs"
    return Item("caches", "ok", found, searched=tuple(f"{name}: {mib(size)} MiB" for name, size in sizes.items()))


def _sizes(folder: Path) -> Iterator[int]:
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue


def _server(record: Record, key: str | None) -> Item:
    """Whether a running server answers, and whether it works on what it was asked."""
    import httpx

    from hyperqwen.runtime.client import Client
    from hyperqwen.runtime.watchdog import counters

    name = f"server on port {record.port}"
    who = f"profile {record.profile}, process {record.pid}"
    age = max(0.0, time.time() - record.started)
    if not record.ready:
        return Item(name, "ok", f"{who}: starting for {age:.0f} s; no token yet")
    if record.stopping:
        return Item(name, "ok", f"{who}: finishing its last requests")
    url = record.url.removesuffix("/v1")
    mend = f"read its log (hyperqwen logs --port {record.port}); if it stays so, restart it"
    try:
        status = httpx.get(f"{url}/health", timeout=ANSWER_SECONDS, trust_env=False).status_code
    except httpx.HTTPError as error:
        said = f"{who}: no answer from {url}/health: {error or type(error).__name__}"
        return Item(name, "fail", said, mend, code=errors.FAILURE)
    if status != httpx.codes.OK:
        return Item(name, "fail", f"{who}: {url}/health answers {status}", mend, code=errors.FAILURE)
    try:
        with Client(url, record.model, key) as client:
            first = now = counters(client.metrics(timeout=ANSWER_SECONDS))
            deadline = time.monotonic() + ANSWER_SECONDS
            while now.requests and now.moving == first.moving and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                now = counters(client.metrics(timeout=ANSWER_SECONDS))
    except HyperqwenError as error:
        said = f"{who}: /health answers 200, but whether it works is not seen: {error.message}"
        return Item(name, "warn", said, error.fix or "give its key: --server-api-key-file FILE")
    if now.requests and now.moving == first.moving:
        return Item(name, "warn", f"{who}: no progress in {ANSWER_SECONDS:.0f} s ({now})", mend)
    doing = f"{now.requests} requests in flight, and its counters move" if now.requests else "idle"
    return Item(
        name, "ok", f"{who}: /health answers 200; {doing}; {now.generated:,.0f} tokens generated in {age:.0f} s"
    )


def _errors(log: Path, secrets: Scrubber) -> Item:
    """The last errors of a log, without secrets."""
    name = f"log {log.name}"
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _LOG_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return Item(name, "warn", f"{log} cannot be read: {error.strerror}", "look at it as the user who serves")
    found = [line.strip() for line in secrets.log(text).splitlines() if _ERROR.search(line)]
    if not found:
        return Item(name, "ok", f"{log}: no errors")
    last = [line if len(line) <= 200 else line[:199] + "…" for line in found[-_SHOWN_ERRORS:]]
    port = log.stem.rpartition("-")[2]
    said = "\n".join([f"{log}: {len(found)} lines with errors, the last:", *last])
    return Item(name, "warn", said, f"hyperqwen logs --port {port}")


def _show(found: Examination, verbose: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    colours = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
    width = max(len(check.item.name) for check in found.checks)
    above = ""
    for check in found.checks:
        item = check.item
        console.print(f"[{colours[item.state]}]{item.state:4}[/]  {item.name:{width}}  ", end="")
        # One cause often fails several lines, of which the first may add to what mends them.
        fix = item.fix or ""
        lines = _lines(replace(item, fix="as above") if fix and above.startswith(fix) else item, verbose)
        above = above if fix and above.startswith(fix) else fix
        console.print(lines[0], markup=False)
        for line in lines[1:]:
            console.print(f"{'':{width + 8}}{line}", markup=False)
    counts = [sum(check.item.state == state for check in found.checks) for state in ("fail", "warn")]
    verdict = {
        HEALTHY: "all is well" if not counts[1] else "nothing stands in the way",
        NOT_RIGHT: "something that is set up here is not right",
        ENVIRONMENT: "this machine cannot, as it is",
    }[found.exit_code]
    console.print(f"\n{verdict}: {counts[0]} failing, {counts[1]} to look at (exit {found.exit_code})")


def _lines(item: Item, verbose: bool) -> Sequence[str]:
    lines = item.found.splitlines() or [""]
    if item.searched and verbose:
        lines += [*([] if item.state == "ok" else ["searched:"]), *(f"  {place}" for place in item.searched)]
    elif item.searched and item.state == "ok":
        lines[-1] += " (each: --verbose)"
    elif item.searched:
        lines.append(f"({len(item.searched)} places were searched: --verbose)")
    if item.fix and item.state in ("fail", "warn"):
        lines.append(f"fix: {item.fix}")
    return lines
