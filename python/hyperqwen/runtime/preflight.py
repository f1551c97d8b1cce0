"""What must hold before a server starts: each thing looked at by itself, with what was found and what to do about it.

`serve` refuses on the first look-through with everything that fails, in one message; `doctor` shows all of it.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hyperqwen import errors
from hyperqwen.errors import BadInputError, HyperqwenError, MissingError, UnsuitableError, VerificationError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.prepare.geometry import Geometry
from hyperqwen.profiles import memory
from hyperqwen.profiles.argv import ModelPaths
from hyperqwen.profiles.cards import Card, find
from hyperqwen.profiles.memory import GIB, MIB, Budget
from hyperqwen.profiles.profile import Profile
from hyperqwen.runtime import driver, keys, model_files, ports
from hyperqwen.runtime.host import Host, Problem

if TYPE_CHECKING:
    from hyperqwen.runtime.gpu import Gpu

DEMO = "without a GPU: ./hq run .#demo serves a small model on the processor"
# Estimates: two processes with torch and CUDA, and one more for each further card. Weights are mapped, and the kernel
# takes those pages back.
_ENGINE_RAM, _CARD_RAM = 6 * GIB, 3 * GIB
# Compiled kernels of one engine, and the least with which one starts at all.
_CACHE_DISK, _LEAST_DISK = 4 * GIB, 512 * MIB
# Fewer tokens than this are no conversation.
_LEAST_CONTEXT = 16
_SEARCH_CODES = frozenset({"no-driver", "override"})
_NODE_CODES = frozenset({"no-device", "no-permission"})

State = Literal["ok", "warn", "fail", "skip"]
_KINDS: dict[int, type[HyperqwenError]] = {
    errors.USAGE: BadInputError,
    errors.UNSUITABLE: UnsuitableError,
    errors.NOT_FOUND: MissingError,
    errors.UNVERIFIED: VerificationError,
}


@dataclass(frozen=True)
class Item:
    """One thing that was looked at.

    name: of the thing, a few words. found: what was there, with the values. fix: what to do, in one line; for `fail`
    and `warn`. searched: the places that were looked at, for what was not found. code: exit code of a failure.
    """

    name: str
    state: State
    found: str
    fix: str | None = None
    searched: tuple[str, ...] = ()
    code: int = errors.UNSUITABLE

    def report(self) -> dict[str, object]:
        """Its fields as JSON can carry them."""
        return asdict(self)


def refuse(items: Iterable[Item]) -> None:
    """Raise one error that lists everything that fails; what the user wrote wrong decides the exit code first."""
    failing = [item for item in items if item.state == "fail"]
    if not failing:
        return
    kind = _KINDS.get(min(item.code for item in failing), UnsuitableError)
    if len(failing) == 1:
        raise kind(_lines(failing[0]), failing[0].fix)
    lines = [f"{len(failing)} things keep this server from starting:"]
    for item in failing:
        lines.append(f"- {item.name}: {_lines(item)}")
        if item.fix:
            lines.append(f"  fix: {item.fix}")
    raise kind("\n".join(lines))


def _lines(item: Item) -> str:
    if not item.searched:
        return item.found
    return "\n".join([item.found, "  searched:", *(f"    {place}" for place in item.searched)])


def look(name: str, see: Callable[[], str | Item]) -> Item:
    """The item that `see` finds: its own, `ok` with the text that it returns, or `fail` with the error it raises."""
    try:
        seen = see()
    except HyperqwenError as error:
        return Item(name, "fail", error.message, error.fix, code=error.exit_code)
    return seen if isinstance(seen, Item) else Item(name, "ok", seen)


def summary(items: Sequence[Item]) -> State:
    """The worst state of all."""
    return next((state for state in ("fail", "warn", "ok") if any(item.state == state for item in items)), "skip")


# The machine ------------------------------------------------------------------------------------------------------


def machine(seen: driver.Survey) -> list[Item]:
    """Driver, device nodes and NVML, as one look found them."""
    items = []
    for name, problems, well in (
        ("driver", [p for p in seen.driver.problems if p.code not in _NODE_CODES], _driver_text(seen.driver)),
        ("device nodes", [p for p in seen.driver.problems if p.code in _NODE_CODES], "there, and for this user"),
    ):
        items += [_of_problem(name, problem, seen.driver) for problem in problems] or [Item(name, "ok", well)]
    if not seen.driver.usable:
        items.append(Item("cards", "skip", "not asked: the driver is not usable"))
    elif seen.nvml_error is not None:
        items.append(Item("cards", "fail", seen.nvml_error, "`nvidia-smi` should say the same; `dmesg` may say why"))
    # Said once, with the first of them: what this machine can do as it is.
    first = next((place for place, item in enumerate(items) if item.state == "fail"), None)
    if first is not None and "./hq run .#demo" not in (items[first].fix or ""):
        items[first] = replace(items[first], fix=f"{items[first].fix}; {DEMO}")
    return items


def _driver_text(found: driver.Driver) -> str:
    kind = f" ({found.module_kind} module)" if found.module_kind else ""
    return f"{found.version or 'of unknown version'}{kind}"


def _of_problem(name: str, problem: Problem, found: driver.Driver) -> Item:
    searched: tuple[str, ...] = ()
    if problem.code in _SEARCH_CODES and driver.CUDA not in found.libraries:
        searched = tuple(f"{entry.path}: {entry.finding}" for entry in found.searched)
    return Item(name, "fail" if problem.fatal else "warn", problem.cause, problem.fix, searched)


def chosen_cards(seen: driver.Survey, profile: Profile) -> tuple[list[Item], tuple[Gpu, ...]]:
    """The cards that the profile names, or would take."""
    from hyperqwen.runtime import gpu

    try:
        cards = gpu.select(seen.gpus, profile.parallel.gpus, count=profile.parallel.tensor, field="parallel.gpus")
    except HyperqwenError as error:
        return [Item("cards", "fail", error.message, error.fix, code=error.exit_code)], ()
    said = "; ".join(f"{card.index} = {card.name}, {card.total / GIB:.1f} GiB" for card in cards)
    return [Item("cards", "ok", said)], cards


def card_of(cards: Sequence[Gpu]) -> Card:
    """The card to plan for: the smallest of those chosen.

    NVML counts what the driver keeps for itself; CUDA does not. A card of a known name has CUDA's own count, unless its
    memory is another than the name says, as of a modified one.
    """
    least = min(cards, key=lambda card: card.total)
    usable = least.total - (least.reserved or 0)
    sm = least.capability[0] * 10 + least.capability[1]
    try:
        known = find(least.name)
    except BadInputError:
        return Card("this", least.name, sm, usable)
    return known if abs(known.total_bytes - usable) < usable * 0.03 else Card(known.name, least.name, sm, usable)


def planned_bytes(budget: Budget) -> int:
    """What a start takes of each card: what is planned, or what vLLM wants to find free before it begins."""
    return max(budget.requested_bytes, budget.load.card_bytes - budget.margin_bytes)


def card_memory(cards: Sequence[Gpu], planned: int, *, wsl2: bool, budget: Budget | None = None) -> list[Item]:
    """Whether each card has `planned` bytes free, and who holds them and what would fit where not.

    Args:
        budget: that `planned` is of; without it the remedy is a word of advice, and no number.
    """
    from hyperqwen.runtime import gpu

    items = []
    for card in cards:
        if budget is None or planned <= card.free:
            problem = gpu.shortage(card, planned, wsl2=wsl2)
        else:
            problem = gpu.shortage(card, planned, wsl2=wsl2, smaller=smaller_plan(budget, card.free))
        name = "memory of the card" if len(cards) == 1 else f"memory of card {card.index}"
        well = f"{card.free / MIB:,.0f} of {card.total / MIB:,.0f} MiB free, {planned / MIB:,.0f} planned"
        items.append(Item(name, "ok", well) if problem is None else Item(name, "fail", problem.cause, problem.fix))
    return items


def smaller_plan(budget: Budget, free: int) -> str | None:
    """The settings, in words, with which `budget` takes no more than `free` bytes of its card: the largest pool, and
    the longest context (never longer than planned) that it holds. None where no pool of any size fits.
    """
    load = budget.load
    beside = planned_bytes(budget) - budget.requested_bytes if load.kv_cache_bytes is None else 0
    share = min(load.utilization, math.floor((free - beside) / load.card_bytes * 1000) / 1000)
    if share <= 0:
        return None
    less, said = replace(load, utilization=share), []
    if load.kv_cache_bytes is not None:
        over = load.card_bytes - memory.budget(less).margin_bytes - free
        pool = load.kv_cache_bytes if over <= 0 else (load.kv_cache_bytes - over) // MIB * MIB
        if pool <= 0:
            return None
        less = replace(less, kv_cache_bytes=pool)
        said += [f"--memory-kv-cache-bytes {pool}"] if over > 0 else []
    said += [f"--memory-utilization {share:g}"] if share < load.utilization else []
    context = memory.largest_context(less, load.context_tokens)
    if context < _LEAST_CONTEXT or planned_bytes(memory.budget(replace(less, context_tokens=context))) > free:
        return None
    return f"use {' '.join(said)} --context {context}"


def host_resources(
    profile: Profile, host: Host, cache: Path, *, pinned: int = 0, shm: Path = Path("/dev/shm")
) -> list[Item]:
    """Memory of the host, /dev/shm and the disk of the caches.

    Args:
        cache: folder of the engine's caches, or the one that it will be made in.
        pinned: bytes of weights that stay in the host's memory, and cannot be swapped.
        shm: where vLLM puts evicted pages.
    """
    items = [_ram(profile, host, pinned)] if profile.device == "cuda" else []
    offload = profile.memory.offload_gib * GIB
    left = left_behind(shm) if profile.device == "cuda" else {}
    if offload or left:
        items.append(_shm(offload, host, left))
    return [*items, _disk(cache)]


def _ram(profile: Profile, host: Host, pinned: int) -> Item:
    fixed = pinned + profile.memory.offload_gib * GIB
    needed = fixed + _ENGINE_RAM + (profile.parallel.tensor - 1) * _CARD_RAM
    if host.memory_free is None:
        return Item("memory of the host", "skip", f"the kernel does not say; {needed / GIB:.1f} GiB are needed")
    free = host.memory_free
    said = f"{needed / GIB:.1f} GiB needed, {free / GIB:.1f} free" + (
        f" and {host.swap_free / GIB:.1f} of swap" if host.swap_free else ""
    )
    fix = "end other programs, or lower memory.offload_gib; in a container or WSL2, raise its memory limit"
    if fixed > free or needed > free + host.swap_free:
        return Item("memory of the host", "fail", said, fix)
    return Item("memory of the host", "warn" if needed > free else "ok", said, fix if needed > free else None)


def left_behind(shm: Path) -> dict[Path, int]:
    """Files of evicted pages in `shm` that no process maps, each with the bytes that it takes of the host's memory.

    An engine that was killed while it started leaves them: vLLM 0.31.0 (v1/kv_offload/cpu/shared_offload_region.py)
    makes vllm_offload_ENGINE.mmap, and takes the name away once every worker has mapped the file. Each is its owner's
    alone (mode 0600); one of another user, whose processes may not be looked into, is left out, since one of them may
    map it. Processes of another container with the same /dev/shm are not seen.
    """
    files: dict[Path, os.stat_result] = {}
    for path in sorted(shm.glob("vllm_offload_*.mmap")):
        # An engine that starts takes its own away.
        with suppress(FileNotFoundError):
            files[path] = path.stat()
    if not files:
        return {}
    mapped: set[tuple[int, int]] = set()
    hidden: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            owner = process.stat().st_uid
            try:
                mapped |= _mapped_files((process / "maps").read_text(errors="replace"))
            except PermissionError:
                # One of this user's own that may not be looked into guards secrets (ssh-agent, an init): no engine.
                hidden |= {owner} - {os.getuid()}
    return {
        path: seen.st_blocks * 512
        for path, seen in files.items()
        if (seen.st_dev, seen.st_ino) not in mapped and seen.st_uid not in hidden
    }


def _mapped_files(maps: str) -> set[tuple[int, int]]:
    """Device and inode of every file in a /proc/PID/maps (proc_pid_maps(5))."""
    found = set()
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) > 4 and words[4] != "0":
            major, _, minor = words[3].partition(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(words[4])))
    return found


def _shm(offload: int, host: Host, left: Mapping[Path, int]) -> Item:
    name = "/dev/shm"
    if host.shm_free is None:
        return Item(name, "fail", "there is none, and evicted pages go there", "mount a tmpfs there")
    said = f"{offload / GIB:.1f} GiB for evicted pages, {host.shm_free / GIB:.1f} free"
    remove = None
    if left:
        held, names = sum(left.values()) / GIB, ", ".join(map(str, left))
        said += f"; {held:.1f} GiB held by {len(left)} that no process uses: {names}"
        remove = f"rm {shlex.join(map(str, left))}"
    if offload > host.shm_free:
        larger = f"mount -o remount,size={offload // GIB + 1}G /dev/shm (a container: --shm-size)"
        fix = f"{larger}, or lower memory.offload_gib"
        return Item(name, "fail", said, f"{remove}; if that is not enough, {fix}" if remove else fix)
    return Item(name, "warn" if left else "ok", said, remove)


def _disk(cache: Path) -> Item:
    place = cache
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Item("disk of the caches", "warn", f"{place} does not say: {error.strerror}", "name another --cache-dir")
    said = f"{free / GIB:.1f} GiB free at {place}"
    fix = "free some, or name a folder elsewhere: --cache-dir"
    if free < _LEAST_DISK:
        return Item("disk of the caches", "fail", said, fix)
    return Item("disk of the caches", "warn" if free < _CACHE_DISK else "ok", said, fix if free < _CACHE_DISK else None)


# The server -------------------------------------------------------------------------------------------------------


def key_file(profile: Profile) -> Path | None:
    """The key file that the profile names."""
    return Path(profile.server.api_key_file) if profile.server.api_key_file else None


def key(profile: Profile, environ: Mapping[str, str]) -> Item:
    """The key, and whether the address needs one. Of the key itself, its length is shown."""

    def see() -> str:
        file, host = key_file(profile), profile.server.host
        found = keys.resolve_key(file, environ)
        ports.require_key(host, found, "name a key file (server.api_key_file; make one: hyperqwen keygen FILE)")
        if found is None:
            return f"none; only this machine reaches {host}"
        credential = keys.credential_file(environ)
        where = keys.VARIABLE if keys.VARIABLE in environ else f"the credential {credential}" if credential else file
        return f"set ({len(found)} characters) from {where}"

    return look("key", see)


def port(profile: Profile) -> Item:
    """Whether the port can be had; it is given back at once."""
    host, number = profile.server.host, profile.server.port

    def see() -> str:
        ports.claim(host, number).close()
        return f"{number} on {host} is free"

    return look("port", see)


def model(profile: Profile, paths: ModelPaths, geometry: Geometry | None = None) -> list[Item]:
    """The model's folder, and the drafter's: whether they are whole, and those that were planned for.

    Args:
        geometry: what was planned for; else, as in `make_plan`, the one that the profile's model has.
    """
    planned = geometry or geometries.load(profile.model.name)
    weights = profile.model.load_format != "dummy"
    seen = model_files.check(paths.model, weights=weights)
    if not seen.troubles:
        other = model_files.other_model(
            paths.model, planned, vision=profile.model.vision != "off", mtp=profile.speculation.method == "mtp"
        )
        seen = replace(seen, troubles=(other,) if other else ())
    items = _files("model", seen, weights)
    wants_head = profile.speculation.method == "mtp" and profile.speculation.draft_vocabulary and weights
    if wants_head and not seen.troubles and not any(name.startswith("mtp.draft_lm_head.") for name in seen.tensors):
        items.append(
            Item(
                "draft vocabulary",
                "warn",
                f"{paths.model} has no mtp.draft_lm_head: drafts go over the whole vocabulary, and slower",
                "prepare the model with a draft head, or set speculation.draft_vocabulary to false",
            )
        )
    if paths.drafter is not None:
        drafter = model_files.check(paths.drafter, weights=weights, tokenizer=False)
        if not drafter.troubles:
            other = model_files.other_drafter(paths.drafter, planned)
            drafter = replace(drafter, troubles=(other,) if other else ())
        items += _files("drafter", drafter, weights)
    return items


def _files(name: str, seen: model_files.Files, weights: bool) -> list[Item]:
    if seen.troubles:
        return [Item(name, "fail", trouble.cause, trouble.fix, code=trouble.code) for trouble in seen.troubles]
    held = f"{seen.shards} shards, {seen.size / GIB:.2f} GiB" if weights else "settings alone: its weights are random"
    return [Item(name, "ok", f"{seen.folder}: {held}")]


def compiler(cc: Path | None) -> Item:
    """The C compiler that Triton's launchers are built with; `cc` is the bin folder that has it."""
    if cc is not None and os.access(cc / "cc", os.X_OK):
        return Item("C compiler", "ok", str(cc / "cc"))
    found = "the program's configuration names none" if cc is None else f"{cc / 'cc'} is not there"
    return Item("C compiler", "fail", found, "start it through `./hq run .#serve`, which brings one")
