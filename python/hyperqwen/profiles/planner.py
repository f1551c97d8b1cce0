"""From an effective profile to a plan: what will be started, what it takes of the card, and what stands in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hyperqwen import share
from hyperqwen.errors import BadInputError, HyperqwenError, MissingError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.prepare.geometry import Drafter, Geometry
from hyperqwen.prepare.weights import SCHEMES
from hyperqwen.profiles import memory, rules
from hyperqwen.profiles.argv import ModelPaths, capture_tokens, engine_flags, model_paths
from hyperqwen.profiles.capabilities import provided
from hyperqwen.profiles.cards import Card
from hyperqwen.profiles.layers import Effective, Source
from hyperqwen.profiles.memory import Budget, Load
from hyperqwen.profiles.profile import Profile
from hyperqwen.profiles.rules import Context, Notice

MODELS = "HYPERQWEN_MODELS"

_SPARE = 4 * memory.GIB
"""Bytes; what a pool leaves of the very card that it was made for is less."""


@dataclass(frozen=True)
class Plan:
    """What a profile comes to.

    profile: with the corrections. sources: where each value came from before them. budget: None where the card is not
    known. lacking: capabilities that this engine does not have and that the profile cannot do without. argv: flags of
    `vllm serve`. environment: variables that the profile decides.
    """

    profile: Profile
    sources: Mapping[str, Source]
    notices: tuple[Notice, ...]
    geometry: Geometry
    card: Card | None
    budget: Budget | None
    paths: ModelPaths
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    lacking: tuple[str, ...]

    @property
    def refusals(self) -> tuple[Notice, ...]:
        return tuple(notice for notice in self.notices if notice.level == "refuse")

    def require_ok(self) -> None:
        """Raise BadInputError with everything that keeps this plan from starting."""
        refusal = rules.refusal(self.notices)
        if refusal is not None:
            raise refusal

    def report(self) -> dict[str, Any]:
        """The plan as JSON has it; bytes everywhere."""
        return {
            "name": self.profile.name,
            "title": self.profile.title,
            "device": self.profile.device,
            "ok": not self.refusals,
            "profile": self.profile.model_dump(exclude={"name", "title", "summary", "device"}),
            "notices": [asdict(notice) for notice in self.notices],
            "model": self.geometry.name,
            "card": None if self.card is None else asdict(self.card),
            "budget": None if self.budget is None else budget_report(self.budget),
            "capabilities": {"lacking": list(self.lacking)},
            "argv": list(self.argv),
            "environment": dict(self.environment),
        }


def make_plan(
    effective: Effective,
    *,
    models: Path,
    card: Card | None = None,
    geometry: Geometry | None = None,
    drafter: Drafter | None = None,
    capabilities: frozenset[str] | None = None,
    wsl: bool = False,
) -> Plan:
    """Plan `effective` for `card`.

    Args:
        models: folder with the prepared models, where the profile names none.
        card: None plans without memory.
        geometry: else the one that the profile's model has in prepare/models.
        drafter: else the one in the profile's folder, and without such a folder the one in prepare/models.
        capabilities: of the engine; else those of this package's own patch series.

    Raises MissingError for a model without a geometry. Everything that is wrong with the profile itself is a notice.
    """
    if capabilities is None:
        capabilities = provided(share.folder("patches"))
    geometry = geometry or geometries.load(effective.profile.model.name)
    quantized = True
    if drafter is None:
        drafter, quantized = _drafter(effective.profile, models)

    def loaded(profile: Profile) -> Load:
        return load_of(profile, geometry, drafter, card, capabilities, wsl, drafter_quantized=quantized)

    context = Context(
        geometry=geometry,
        card=card if effective.profile.device == "cuda" else None,
        capabilities=capabilities,
        wsl=wsl,
        sources=effective.sources,
        drafter=drafter,
        drafter_quantized=quantized,
        block_tokens=lambda profile: memory.cut_pool(loaded(profile)).block_tokens,
        working_set=lambda profile: _working_set(loaded(profile)),
    )
    profile, notices = rules.apply(effective.profile, context)
    budget = None
    if card is not None and not any(notice.field == "parallel.tensor" for notice in notices if notice.new is not None):
        load = loaded(profile)
        budget = memory.budget(load)
        notices = (*_unfit(profile, budget), *notices, *_unused(effective, budget))
    expandable, _ = rules.expandable_segments(profile, context)
    paths = model_paths(profile, models)
    return Plan(
        profile=profile,
        sources=effective.sources,
        notices=notices,
        geometry=geometry,
        card=card,
        budget=budget,
        paths=paths,
        argv=tuple(engine_flags(profile, paths)),
        environment={rules.ALLOCATOR: f"expandable_segments:{expandable}"} if profile.device == "cuda" else {},
        lacking=lacking(profile, capabilities),
    )


def load_of(
    profile: Profile,
    geometry: Geometry,
    drafter: Drafter | None,
    card: Card | None,
    capabilities: frozenset[str],
    wsl: bool = False,
    *,
    drafter_quantized: bool = True,
) -> Load:
    """`profile` as the memory law takes it."""
    # A drafter of no tokens is refused by a rule, which asks for the load of what it refuses.
    method = profile.speculation.method if profile.speculation.tokens else "off"
    cpu = profile.device == "cpu"
    scheme = SCHEMES["bf16" if cpu else profile.model.variant]
    return Load(
        geometry=geometry,
        scheme=scheme if drafter_quantized else replace(scheme, drafter=16),
        drafter=drafter if method == "dflash2" else "mtp" if method == "mtp" else None,
        draft_tokens=profile.speculation.tokens if method != "off" else 0,
        context_tokens=profile.limits.context_tokens,
        concurrent_requests=profile.limits.concurrent_requests,
        batched_tokens=profile.limits.batched_tokens,
        asynchronous=profile.scheduler.asynchronous,
        cache_dtype=profile.cache.dtype,
        state_dtype="float32" if cpu else profile.cache.state_dtype,
        prefix_cache=profile.cache.prefix,
        backend="CPU_ATTN" if cpu else profile.attention.backend,
        verify_scratch="off" if profile.attention.verify == "engine" else "slots",
        graphs=profile.graphs.mode != "off",
        graph_tokens=capture_tokens(profile),
        vision=profile.model.vision,
        embedding_in_host=profile.memory.embedding_in_host,
        cards=profile.parallel.tensor,
        card_bytes=(card or Card.of_vram(24)).total_bytes,
        utilization=profile.memory.utilization,
        kv_cache_bytes=profile.memory.kv_cache_bytes or None,
        grouping="divisor" if "kv-group-size" in capabilities else "smallest",
        wsl=wsl,
    )


def lacking(profile: Profile, capabilities: frozenset[str]) -> tuple[str, ...]:
    """What `profile` cannot do without and the engine does not have."""
    needed = {
        "kvarn": profile.cache.dtype.startswith("kvarn") or profile.attention.backend == "KVARN",
        "embedding-in-host": profile.memory.embedding_in_host,
        "vision-in-host": profile.model.vision == "host",
    }
    return tuple(name for name, wanted in needed.items() if wanted and name not in capabilities)


def models_folder(environ: Mapping[str, str], given: Path | None = None) -> Path:
    """Where prepared models are: `given`, else HYPERQWEN_MODELS, else hyperqwen/models among the user's data.

    Raises BadInputError for a variable that is set and empty, or that is no absolute path.
    """
    if given is not None:
        return given.absolute()
    if MODELS in environ:
        if not environ[MODELS].startswith("/"):
            raise BadInputError(
                f"{MODELS} is {environ[MODELS]!r}", "name the folder by its absolute path, or unset the variable"
            )
        return Path(environ[MODELS])
    data = environ.get("XDG_DATA_HOME", "")
    # The specification: a relative path in the variable is to be ignored.
    root = Path(data) if data.startswith("/") else Path(environ.get("HOME") or os.sep) / ".local/share"
    return root / "hyperqwen" / "models"


def budget_report(budget: Budget) -> dict[str, Any]:
    """A budget as JSON has it; bytes everywhere."""
    pool, load = budget.pool, budget.load
    return {
        "fits": budget.fits,
        "problems": list(budget.problems),
        "figures": [asdict(figure) for figure in budget.figures],
        "card_bytes": load.card_bytes,
        "requested_bytes": budget.requested_bytes,
        "margin_bytes": budget.margin_bytes,
        "host_bytes": budget.host_bytes,
        "pool": {
            "bytes": budget.kv_cache_bytes,
            "blocks": budget.blocks,
            "tokens": budget.pool_tokens,
            "concurrency": round(budget.concurrency, 4),
            "block_tokens": pool.block_tokens,
            "block_bytes": pool.block_bytes,
            "page_bytes": pool.page_bytes,
            "group_layers": pool.group_layers,
            "groups": [asdict(group) for group in pool.groups],
        },
        "request": {
            "token_bytes": pool.token_bytes,
            "state_bytes": pool.state_bytes,
            "states_bytes": budget.state_bytes_per_request,
            "blocks": pool.blocks_per_request,
            "bytes": budget.request_bytes,
        },
        "residents": budget.residents(load.context_tokens),
        "largest_context": memory.largest_context(load),
        "largest_context_all_slots": memory.largest_context(replace(load, resident_requests=load.concurrent_requests)),
        "largest_slots": memory.largest_slots(load),
    }


def _drafter(profile: Profile, models: Path) -> tuple[Drafter | None, bool]:
    """The drafter that `profile` would load, and whether its weights are in 4 bits."""
    folder = model_paths(profile, models).drafter
    if folder is not None:
        # What is absent, torn or no drafter's is for the look before a start to report.
        with suppress(HyperqwenError, OSError, ValueError, TypeError, AttributeError):
            config = folder / "config.json"
            content = json.loads(config.read_text(encoding="utf-8"))
            found = geometries.drafter_from_config(content, folder.name, str(config))
            return found, content.get("quantization_config") is not None
    return _published_drafter(profile.model.name), True


def _published_drafter(model: str) -> Drafter | None:
    try:
        return geometries.load_drafter(f"{model}-dflash2")
    except MissingError:
        return None


def _working_set(load: Load) -> int:
    pool = memory.cut_pool(load)
    return pool.blocks_per_request * pool.block_bytes * load.concurrent_requests * load.cards


def _unfit(profile: Profile, budget: Budget) -> tuple[Notice, ...]:
    """Why the plan does not fit, as one refusal that names the nearest setting that does."""
    if budget.fits:
        return ()
    load = budget.load
    said = "; ".join(budget.problems)
    context = memory.largest_context(load, profile.limits.context_tokens)
    if context >= 16:
        fix = f"use --context {context}"
        left = replace(load, kv_cache_bytes=None)
        if load.kv_cache_bytes is not None and memory.fits(left):
            fix += f", or --memory-kv-cache-bytes 0: this card has room for {memory.largest_context(left):,} tokens"
        return (_memory("limits.context_tokens", load.context_tokens, said, fix, context),)
    if load.kv_cache_bytes is not None:
        left = replace(load, kv_cache_bytes=None)
        if memory.fits(left):
            bytes_ = memory.budget(left).kv_cache_bytes // memory.MIB * memory.MIB
            fix = f"use --memory-kv-cache-bytes {bytes_}, or 0 for what memory.utilization leaves"
            return (_memory("memory.kv_cache_bytes", load.kv_cache_bytes, said, fix, bytes_),)
        context = memory.largest_context(left, profile.limits.context_tokens)
        if context >= 16:
            fix = f"use --memory-kv-cache-bytes 0 --context {context}"
            return (_memory("memory.kv_cache_bytes", load.kv_cache_bytes, said, fix, 0),)
    higher = next((step / 100 for step in range(1, 98) if memory.fits(replace(load, utilization=step / 100))), None)
    if higher is not None:
        fix = f"use --memory-utilization {higher:g} or more"
        return (_memory("memory.utilization", load.utilization, said, fix, higher),)
    fix = "use a larger card, more cards (--parallel-tensor 2), or a smaller model"
    return (_memory("model.name", load.geometry.name, said, fix, None),)


def _unused(effective: Effective, budget: Budget) -> tuple[Notice, ...]:
    """That a pool which the profile sets for its own card leaves most of a larger one unused."""
    load, field = budget.load, "memory.kv_cache_bytes"
    left = replace(load, kv_cache_bytes=None)
    if effective.profile.device != "cuda":
        return ()
    if load.kv_cache_bytes is None or effective.sources[field].kind != "profile" or budget.margin_bytes < _SPARE:
        return ()
    larger = memory.budget(left)
    if not (budget.fits and larger.fits):
        return ()
    why = (
        f"{field} is {load.kv_cache_bytes} (profile {effective.profile.name}), which is made for another card: "
        f"{budget.margin_bytes // memory.MIB:,} MiB of this one stay unused"
    )
    fix = f"--memory-kv-cache-bytes 0 makes the pool {larger.pool_tokens:,} tokens instead of {budget.pool_tokens:,}"
    return (Notice("warn", "pool-below-card", field, load.kv_cache_bytes, why, fix, 0),)


def _memory(field: str, value: Any, said: str, fix: str, new: Any) -> Notice:
    return Notice("refuse", "memory", field, value, f"{field} is {value}: {said}", fix, new)
