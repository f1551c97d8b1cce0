"""Which settings do not go together, and what becomes of them: refused, corrected with a notice, or warned about.

Each rule is one row of what is known to refuse, corrupt or slow down the engine (vLLM 0.31.0), or of what the engine's
patches cannot do yet. `apply` puts all of them over a profile until none has anything left to correct. Nothing here
counts memory: whether a plan fits is the planner's budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from hyperqwen.errors import BadInputError
from hyperqwen.prepare.geometry import CARDS_LIMIT, Drafter, Geometry, check_tensor_parallel
from hyperqwen.profiles.arguments import FORBIDDEN, PLANNED, parse, without
from hyperqwen.profiles.argv import CAPTURE_LIMIT
from hyperqwen.profiles.layers import Source, shown
from hyperqwen.profiles.profile import GIB, Profile, knobs, load, shipped

if TYPE_CHECKING:
    from hyperqwen.profiles.cards import Card

Level = Literal["refuse", "correct", "warn"]
Device = Literal["cuda", "cpu", "any"]

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable with which PyTorch's allocator is told about expandable segments."""

TILE = 128
"""Tokens of a KVarN tile: what is quantized together, and so what every boundary of its cache has to fall on."""

_LEVELS: tuple[Level, ...] = ("refuse", "correct", "warn")
_PASSES = 10


@dataclass(frozen=True)
class Context:
    """What a profile is judged against. None: not known, and the rules that need it say nothing.

    Args:
        capabilities: what the engine's patches provide (`capabilities.provided`).
        sources: knob to the layer that set it, for messages.
        drafter: the DFlash2 drafter; else it is taken for the published one, with blocks of 8.
        drafter_quantized: whether its weights are in 4 bits, as prepared.
        block_tokens: the scheduler's block of a profile, in tokens (the page law).
        working_set: bytes that a profile's slots hold in the pool when each is full, over all cards.
    """

    geometry: Geometry | None = None
    card: Card | None = None
    capabilities: frozenset[str] = frozenset()
    wsl: bool = False
    sources: Mapping[str, Source] = field(default_factory=dict)
    drafter: Drafter | None = None
    drafter_quantized: bool = True
    block_tokens: Callable[[Profile], int] | None = None
    working_set: Callable[[Profile], int] | None = None

    @property
    def drafter_tokens(self) -> int:
        """Tokens that the drafter proposes in one pass: its block less the anchor."""
        return 7 if self.drafter is None else self.drafter.block_size - 1


@dataclass(frozen=True)
class Notice:
    """What a rule says about one setting.

    field: a knob's path, or for what no knob decides the environment variable. message: a sentence that names both
    field and value. fix: the next step. new: the value after the correction, or the nearest one that works.
    """

    level: Level
    rule: str
    field: str
    value: Any
    message: str
    fix: str
    new: Any = None

    def __str__(self) -> str:
        said = f"{self.level}: {self.message}"
        return said if self.level == "correct" else f"{said}; {self.fix}"


@dataclass(frozen=True)
class _Found:
    level: Level
    field: str
    why: str
    fix: str = ""
    new: Any = None
    value: Any = None


Finder = Callable[[Profile, Context], Iterator[_Found]]


@dataclass(frozen=True)
class Rule:
    """One row: what it does, why, and what it has to know.

    row: the reason in one line, as the docs' table has it. source: where it is known from. needs: attributes of the
    context without which it says nothing. device: profiles that it looks at.
    """

    name: str
    levels: tuple[Level, ...]
    row: str
    source: str
    finder: Finder
    needs: tuple[str, ...] = ()
    device: Device = "cuda"

    def apply(self, profile: Profile, context: Context) -> Iterator[Notice]:
        """What this rule has to say about `profile`."""
        if self.device not in ("any", profile.device):
            return
        if any(getattr(context, name) is None for name in self.needs):
            return
        for found in self.finder(profile, context):
            yield _notice(self.name, found, profile, context)


def _notice(rule: str, found: _Found, profile: Profile, context: Context) -> Notice:
    known = found.field in _knobs()
    value = profile.get(found.field) if known and found.value is None else found.value
    source = context.sources.get(found.field)
    by = f" ({source})" if source is not None and source.kind != "default" else ""
    if found.level == "correct":
        message = f"{found.field} is {_text(found.new)} instead of {_text(value)}{by}: {found.why}"
        fix = f"set {found.field} to {_text(found.new)}"
    else:
        message = f"{found.field} is {_text(value)}{by}: {found.why}"
        fix = found.fix or f"set {found.field} to {_text(found.new)}"
    return Notice(found.level, rule, found.field, value, message, fix, found.new)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return shown(_knobs()["engine.arguments"], value) if isinstance(value, list) else str(value)


@cache
def _knobs() -> dict[str, Any]:
    return {knob.path: knob for knob in knobs()}


def apply(profile: Profile, context: Context) -> tuple[Profile, tuple[Notice, ...]]:
    """`profile` with every correction, and all notices: refusals, corrections, warnings.

    Rules see what the ones before them corrected, and are gone through again until nothing changes; so nothing is left
    to correct in what comes back, except variables of the environment, which are no part of a profile. Refusals and
    warnings are about the profile that comes back.
    """
    corrections: list[Notice] = []
    for _ in range(_PASSES):
        before, others = profile, []
        for rule in RULES:
            for notice in rule.apply(profile, context):
                if notice.level == "correct" and notice.field in _knobs():
                    corrections.append(notice)
                    profile = profile.with_values({notice.field: notice.new})
                else:
                    others.append(notice)
        if profile == before:
            found = [*corrections, *others]
            return profile, tuple(sorted(found, key=lambda notice: _LEVELS.index(notice.level)))
    raise RuntimeError(f"rules correct each other without end: {', '.join(map(str, corrections[-4:]))}")


def refusal(notices: tuple[Notice, ...]) -> BadInputError | None:
    """One error with everything that was refused; None where nothing was."""
    refused = [notice for notice in notices if notice.level == "refuse"]
    if not refused:
        return None
    if len(refused) == 1:
        return BadInputError(refused[0].message, refused[0].fix)
    lines = [f"{len(refused)} settings do not work:", *(f"  {notice.message}; {notice.fix}" for notice in refused)]
    return BadInputError("\n".join(lines), "correct what is named above")


def expandable_segments(profile: Profile, context: Context) -> tuple[bool, str]:
    """Whether PyTorch's allocator may use expandable segments, and why.

    They keep memory whole where a card is nearly full; where they fail, they fail at start.
    """
    if profile.device != "cuda":
        return False, "there is no card"
    if context.wsl:
        return False, "they do not work on WSL2"
    if profile.memory.offload_gib or any(
        flag.name == "--kv-transfer-config" for flag in parse(profile.engine.arguments)
    ):
        return False, "vLLM refuses them where pages leave the card: they are copied by addresses that would move"
    if profile.parallel.tensor > 1 and profile.parallel.custom_all_reduce and profile.graphs.mode != "off":
        return False, "with vLLM's own all-reduce between cards, capturing graphs ends in 'invalid argument'"
    return True, "a card that is nearly full fragments less with them"


# Rules ------------------------------------------------------------------------------------------------------------

_RULES: list[Rule] = []


def _rule(
    name: str, *levels: Level, row: str, source: str, needs: tuple[str, ...] = (), device: Device = "cuda"
) -> Callable[[Finder], Finder]:
    def register(finder: Finder) -> Finder:
        _RULES.append(Rule(name, levels, row, source, finder, needs, device))
        return finder

    return register


def _refuse(path: str, why: str, *, new: Any = None, fix: str = "", value: Any = None) -> _Found:
    return _Found("refuse", path, why, fix, new, value)


def _correct(path: str, new: Any, why: str) -> _Found:
    return _Found("correct", path, why, new=new)


def _warn(path: str, why: str, *, new: Any = None, fix: str = "", value: Any = None) -> _Found:
    return _Found("warn", path, why, fix, new, value)


def _kvarn(profile: Profile) -> bool:
    return profile.cache.dtype.startswith("kvarn")


def _drafts(profile: Profile) -> bool:
    return profile.speculation.method != "off"


def _long_draft(profile: Profile, context: Context) -> bool:
    return profile.speculation.method == "dflash2" and profile.speculation.tokens > context.drafter_tokens


def _small(context: Context) -> bool:
    """Whether what was measured on cards of 24 GB counts: on those, and where the card is not known."""
    return context.card is None or context.card.total_bytes <= 24 * GIB


def _counted(count: Callable[[Profile], int] | None, profile: Profile) -> int | None:
    """What the planner counts for `profile`; None where it cannot be counted, for which another rule refuses it."""
    try:
        return None if count is None else count(profile)
    except BadInputError:
        return None


@cache
def _shipped_pool(name: str) -> int:
    """Bytes of the pool that the shipped profile `name` pins."""
    return load(shipped()[name]).memory.kv_cache_bytes


def _stock_pool(profile: Profile) -> int:
    return _shipped_pool("E" if _kvarn(profile) else "B")


# What only one kind of device has.

CUDA_ONLY = (
    "model.drafter",
    "model.vision",
    "limits.batched_tokens",
    "memory.utilization",
    "memory.embedding_in_host",
    "memory.offload_gib",
    "cache.dtype",
    "cache.state_dtype",
    "cache.retention",
    "cache.match_unit",
    "attention.backend",
    "attention.verify",
    "attention.prefill",
    "attention.gdn_prefill",
    "speculation.method",
    "speculation.tokens",
    "speculation.sampling",
    "speculation.lookup",
    "speculation.adaptive",
    "speculation.chains",
    "speculation.draft_vocabulary",
    "graphs.mode",
    "graphs.capture_tokens",
    "scheduler.asynchronous",
    "activations.int8",
    "parallel.tensor",
    "parallel.gpus",
    "parallel.custom_all_reduce",
)
"""Knobs that an engine on the CPU does not have. graphs.mode may be off there, which it always is."""

CPU_ONLY = ("limits.threads",)


@_rule(
    "cpu-knobs",
    "refuse",
    "correct",
    row="a knob of the card in a profile for the CPU does nothing; one of the host file's is left out",
    source="profiles/argv.py",
    device="cpu",
)
def _cpu_knobs(profile: Profile, context: Context) -> Iterator[_Found]:
    yield from _inert(CUDA_ONLY, "an engine on the CPU has no such setting", profile, context)


@_rule(
    "cuda-knobs",
    "refuse",
    "correct",
    row="limits.threads in a profile for a card does nothing; the host file's is left out",
    source="profiles/argv.py",
)
def _cuda_knobs(profile: Profile, context: Context) -> Iterator[_Found]:
    yield from _inert(CPU_ONLY, "only an engine on the CPU has this setting", profile, context)


def _inert(paths: tuple[str, ...], why: str, profile: Profile, context: Context) -> Iterator[_Found]:
    for path in paths:
        value, default = profile.get(path), _knobs()[path].default
        if value == default or (path, value) == ("graphs.mode", "off"):
            continue
        source = context.sources.get(path)
        # A host file is written for every profile of that host.
        if source is not None and source.kind == "host file":
            yield _correct(path, default, why)
        else:
            yield _refuse(path, why, new=default, fix=f"leave it at {_text(default)!r}")


# What the engine's patches do not provide yet.


@_rule(
    "kvarn-capability",
    "refuse",
    row="a KVarN cache needs an engine that has it",
    source="capability kvarn",
)
def _kvarn_capability(profile: Profile, context: Context) -> Iterator[_Found]:
    if _kvarn(profile) and "kvarn" not in context.capabilities:
        yield _refuse(
            "cache.dtype",
            "this engine has no KVarN cache yet",
            new="fp8",
            fix="use profile D: fp8, up to 150000 tokens",
        )


@_rule(
    "embedding-capability",
    "refuse",
    row="an embedding in host memory needs an engine that can; without it 1.25 GiB less fit on the card",
    source="capability embedding-in-host",
)
def _embedding_capability(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.memory.embedding_in_host and "embedding-in-host" not in context.capabilities:
        yield _refuse("memory.embedding_in_host", "this engine cannot keep the embedding in host memory yet", new=False)


@_rule(
    "vision-capability",
    "refuse",
    row="a vision tower in host memory needs an engine that can; on the card it takes 0.86 GiB",
    source="capability vision-in-host",
)
def _vision_capability(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.model.vision == "host" and "vision-in-host" not in context.capabilities:
        yield _refuse(
            "model.vision",
            "this engine cannot keep the vision tower in host memory yet",
            new="card",
            fix="set model.vision to card (0.86 GiB of its memory) or off",
        )


@_rule(
    "lookup-capability",
    "correct",
    row="without lookup drafting the answers are the same, and slower where text repeats",
    source="capability lookup-drafting",
)
def _lookup_capability(profile: Profile, context: Context) -> Iterator[_Found]:
    spec = profile.speculation
    if spec.method == "dflash2" and spec.lookup and "lookup-drafting" not in context.capabilities:
        yield _correct(
            "speculation.lookup",
            False,
            "this engine has no lookup drafting yet; the answers are the same, and slower where text repeats",
        )


@_rule(
    "accelerators",
    "correct",
    row="what only makes the engine faster is left out where the engine lacks it",
    source="capabilities adaptive-block, chains, draft-vocabulary, split-kv-verify, int8-prefill",
)
def _accelerators(profile: Profile, context: Context) -> Iterator[_Found]:
    spec, attention = profile.speculation, profile.attention
    for wanted, path, capability, plain, what in (
        (spec.adaptive, "speculation.adaptive", "adaptive-block", False, "adaptive blocks"),
        (spec.chains, "speculation.chains", "chains", False, "chains"),
        (
            spec.method == "mtp" and spec.draft_vocabulary,
            "speculation.draft_vocabulary",
            "draft-vocabulary",
            False,
            "draft vocabulary",
        ),
        (attention.verify == "split-kv", "attention.verify", "split-kv-verify", "engine", "split verification"),
        (attention.prefill == "int8", "attention.prefill", "int8-prefill", "engine", "int8 prefill"),
    ):
        if wanted and capability not in context.capabilities:
            yield _correct(path, plain, f"this engine has no {what} yet; nothing but speed is lost")


@_rule(
    "int8-capability",
    "correct",
    row="int8 activations are left out where the engine lacks them: more exact, and without their +30 % in batches",
    source="capability int8-activations",
)
def _int8_capability(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.activations.int8 != "off" and "int8-activations" not in context.capabilities:
        yield _correct(
            "activations.int8",
            "off",
            "this engine has no int8 activations yet; answers are more exact, and batches lack their +30 %",
        )


# What drafting consists of.


@_rule(
    "draft-off",
    "correct",
    row="without a drafter there are no drafts: their tokens would only take state pages",
    source="HyperQwen",
)
def _draft_off(profile: Profile, context: Context) -> Iterator[_Found]:
    if not _drafts(profile) and profile.speculation.tokens:
        yield _correct("speculation.tokens", 0, "speculation.method is off")


@_rule("draft-tokens", "refuse", row="a drafter with drafts of 0 tokens is refused by vLLM", source="HyperQwen")
def _draft_tokens(profile: Profile, context: Context) -> Iterator[_Found]:
    spec = profile.speculation
    if _drafts(profile) and spec.tokens == 0:
        mtp = 4 if profile.cache.dtype == "bfloat16" else 3
        nearest = {"dflash2": context.drafter_tokens, "mtp": mtp, "ngram": 1}[spec.method]
        yield _refuse(
            "speculation.tokens",
            f"speculation.method {spec.method} has nothing to draft",
            new=nearest,
            fix=f"set speculation.tokens to {nearest}, or speculation.method to off",
        )


@_rule(
    "lookup-method",
    "correct",
    row="lookup, adaptive blocks and chains belong to the DFlash2 drafter; other methods have none of them",
    source="HyperQwen",
)
def _lookup_method(profile: Profile, context: Context) -> Iterator[_Found]:
    spec = profile.speculation
    if spec.method == "dflash2":
        return
    for key in ("lookup", "adaptive", "chains"):
        if getattr(spec, key):
            yield _correct(f"speculation.{key}", False, f"with speculation.method {spec.method} there is none")


@_rule(
    "draft-block",
    "correct",
    row="the DFlash2 drafter proposes 7 tokens; only lookup fills the positions behind them",
    source="HyperQwen",
)
def _draft_block(profile: Profile, context: Context) -> Iterator[_Found]:
    if _long_draft(profile, context) and not profile.speculation.lookup:
        yield _correct(
            "speculation.tokens",
            context.drafter_tokens,
            f"the drafter proposes {context.drafter_tokens}, and without speculation.lookup nothing fills the rest",
        )


@_rule(
    "adaptive-needs",
    "correct",
    row="an adaptive block switches between 7 and more tokens: it needs lookup and k > 7",
    source="HyperQwen",
)
def _adaptive_needs(profile: Profile, context: Context) -> Iterator[_Found]:
    spec = profile.speculation
    if spec.method == "dflash2" and spec.adaptive and not (spec.lookup and _long_draft(profile, context)):
        yield _correct(
            "speculation.adaptive",
            False,
            f"it needs speculation.lookup and speculation.tokens above {context.drafter_tokens}",
        )


@_rule(
    "chains-needs",
    "correct",
    row="chains draft from the history that lookup keeps, and vLLM's multimodal path has none",
    source="HyperQwen",
)
def _chains_needs(profile: Profile, context: Context) -> Iterator[_Found]:
    spec = profile.speculation
    if spec.method != "dflash2" or not spec.chains:
        return
    if not spec.lookup:
        yield _correct("speculation.chains", False, "it needs speculation.lookup")
    elif profile.model.vision != "off":
        yield _correct("speculation.chains", False, f"there are none with model.vision {profile.model.vision}")


@_rule(
    "async-long-draft",
    "correct",
    row="k > 7 with asynchronous scheduling: the shorter draft that is asked for is ignored, "
    "and the adaptive block is dead without a word",
    source="HyperQwen",
)
def _async_long_draft(profile: Profile, context: Context) -> Iterator[_Found]:
    if _long_draft(profile, context) and profile.scheduler.asynchronous:
        yield _correct(
            "scheduler.asynchronous",
            False,
            f"with drafts of {profile.speculation.tokens} an asynchronous scheduler cannot shorten the next one "
            "(this costs less than 1 %)",
        )


@_rule("async-ngram", "correct", row="vLLM refuses n-gram drafts with asynchronous scheduling", source="vLLM 0.31.0")
def _async_ngram(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.speculation.method == "ngram" and profile.scheduler.asynchronous:
        yield _correct("scheduler.asynchronous", False, "vLLM refuses it with speculation.method ngram")


@_rule(
    "float16-drafts",
    "refuse",
    row="float16 with any drafter: a Triton kernel does not compile, it is written for bfloat16",
    source="HyperQwen",
)
def _float16_drafts(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.model.dtype == "float16" and _drafts(profile):
        yield _refuse(
            "model.dtype",
            f"with speculation.method {profile.speculation.method} a kernel does not compile: it takes bfloat16 alone",
            new="bfloat16",
            fix="set model.dtype to bfloat16, or speculation.method to off",
        )


@_rule(
    "greedy-drafts",
    "warn",
    row="greedy drafts count as certain for sampled requests: acceptance drops by 16 %",
    source="HyperQwen",
)
def _greedy_drafts(profile: Profile, context: Context) -> Iterator[_Found]:
    spec = profile.speculation
    if spec.method in ("dflash2", "mtp") and spec.sampling == "greedy":
        yield _warn(
            "speculation.sampling",
            "drafts count as certain then, and acceptance of sampled requests drops by 16 %",
            new="probabilistic",
        )


@_rule("mtp-tokens", "warn", row="MTP drafts of more than 4 tokens are slower than of 4", source="HyperQwen")
def _mtp_tokens(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.speculation.method == "mtp" and profile.speculation.tokens > 4:
        yield _warn("speculation.tokens", "each MTP draft is a pass of its own, and 4 are fastest", new=4)


@_rule(
    "mtp-4-fp8",
    "warn",
    row="MTP drafts of 4 over an fp8 cache that FlashInfer reads ended in an illegal memory access when a request "
    "ended beside another; on vLLM 0.31 it was not shown to be gone",
    source="HyperQwen, vLLM 0.27 and 0.28",
    needs=("card",),
)
def _mtp_4_fp8(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.card is not None
    spec, backend = profile.speculation, profile.attention.backend
    if spec.method != "mtp" or spec.tokens < 4 or profile.cache.dtype != "fp8":
        return
    if backend == "FLASHINFER" or (backend == "auto" and context.card.sm < 90):
        yield _warn(
            "speculation.tokens",
            "with an fp8 cache, vLLM 0.27 and 0.28 ended in an illegal memory access, and 0.31 was not shown not to",
            new=3,
        )


@_rule(
    "sm80-drafts",
    "warn",
    row="drafts of any kind on sm80 can end in a memory fault; the cause is open",
    source="HyperQwen",
    needs=("card",),
)
def _sm80_drafts(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.card is not None
    if context.card.sm == 80 and _drafts(profile):
        yield _warn(
            "speculation.method", "drafts on sm80 can end in a memory fault whose cause is not known", new="off"
        )


@_rule(
    "drafter-shape",
    "refuse",
    row="a DFlash2 drafter reads the model's hidden states and speaks through its embedding: widths and vocabulary "
    "have to be the model's",
    source="vLLM 0.31.0",
    needs=("geometry", "drafter"),
)
def _drafter_shape(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.geometry is not None and context.drafter is not None
    if profile.speculation.method != "dflash2":
        return
    wrong = unlike_target(context.drafter, context.geometry)
    if wrong:
        new = "mtp" if context.geometry.mtp_num_hidden_layers else "off"
        yield _refuse(
            "speculation.method",
            f"the drafter {context.drafter.name} is not one of {context.geometry.name}: {'; '.join(wrong)}",
            new=new,
            fix=f"use --speculation-method {new}, or name a drafter of this model: --model-drafter",
        )


def unlike_target(drafter: Drafter, target: Geometry) -> list[str]:
    """What of `drafter` keeps it from drafting for `target`; nothing for one that can."""
    wrong = [
        f"its {field} is {getattr(drafter, field)}, and the model's {getattr(target, field)}"
        for field in ("hidden_size", "vocab_size")
        if getattr(drafter, field) != getattr(target, field)
    ]
    beyond = [layer for layer in drafter.target_layer_ids if layer >= target.num_hidden_layers]
    if beyond:
        wrong.append(f"its target_layer_ids has {beyond}, and the model has {target.num_hidden_layers} layers")
    return wrong


# Caches and the kernels that read them.


@_rule(
    "sm75",
    "refuse",
    row="cards before sm80 have no bfloat16, and neither FLASH_ATTN nor FLASHINFER",
    source="vLLM 0.31.0",
    needs=("card",),
)
def _sm75(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.card is not None
    sm = context.card.sm
    if sm >= 80:
        return
    if profile.model.dtype == "bfloat16":
        yield _refuse("model.dtype", f"it takes sm80 or later, and this card is sm{sm}", new="float16")
    if profile.attention.backend in ("FLASH_ATTN", "FLASHINFER"):
        yield _refuse("attention.backend", f"it takes sm80 or later, and this card is sm{sm}", new="TRITON_ATTN")
    if profile.cache.dtype == "fp8":
        yield _refuse("cache.dtype", f"nothing reads fp8 on sm{sm}", new="int8_per_token_head")


@_rule(
    "kvarn-backend",
    "refuse",
    "correct",
    row="a KVarN cache and the KVARN backend go together, and neither with anything else",
    source="HyperQwen",
)
def _kvarn_backend(profile: Profile, context: Context) -> Iterator[_Found]:
    backend, dtype = profile.attention.backend, profile.cache.dtype
    if _kvarn(profile) and backend == "auto":
        yield _correct("attention.backend", "KVARN", f"it is what reads cache.dtype {dtype}")
    elif _kvarn(profile) and backend != "KVARN":
        yield _refuse("attention.backend", f"it does not read cache.dtype {dtype}", new="KVARN")
    elif not _kvarn(profile) and backend == "KVARN":
        yield _refuse(
            "attention.backend",
            f"it does not read cache.dtype {dtype}",
            new="auto",
            fix="set attention.backend to auto, or cache.dtype to kvarn_k4v2_g128",
        )


@_rule(
    "per-token-head-backend",
    "refuse",
    row="int8_per_token_head and int4_per_token_head caches are read by TRITON_ATTN alone",
    source="HyperQwen, vLLM 0.31.0",
)
def _per_token_head_backend(profile: Profile, context: Context) -> Iterator[_Found]:
    backend, dtype = profile.attention.backend, profile.cache.dtype
    if dtype.endswith("_per_token_head") and backend in ("FLASH_ATTN", "FLASHINFER"):
        yield _refuse("attention.backend", f"it does not read cache.dtype {dtype}", new="TRITON_ATTN")


@_rule(
    "fp8-backend",
    "refuse",
    row="fp8 keys and values on sm86: FlashInfer alone reads them (FLASH_ATTN from sm90, TRITON_ATTN from sm89)",
    source="HyperQwen, vLLM 0.31.0",
    needs=("card",),
)
def _fp8_backend(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.card is not None
    backend, sm = profile.attention.backend, context.card.sm
    if profile.cache.dtype != "fp8" or sm < 80:
        return
    # FlashAttention 3 and 4 read fp8 and exist for these two families; elsewhere it is version 2.
    if backend == "FLASH_ATTN" and sm // 10 not in (9, 10):
        needs = "sm90 or sm100"
    elif backend == "TRITON_ATTN" and sm < 89:
        needs = "sm89 or later"
    else:
        return
    yield _refuse(
        "attention.backend",
        f"it reads cache.dtype fp8 on {needs}, and this card is sm{sm}",
        new="FLASHINFER",
        fix="set attention.backend to FLASHINFER or auto",
    )


@_rule(
    "int8-fp8-triton",
    "warn",
    row="int8 activations with fp8 keys and values through TRITON_ATTN are slow",
    source="HyperQwen",
)
def _int8_fp8_triton(profile: Profile, context: Context) -> Iterator[_Found]:
    fp8_triton = profile.cache.dtype == "fp8" and profile.attention.backend == "TRITON_ATTN"
    if profile.activations.int8 != "off" and fp8_triton:
        yield _warn("attention.backend", "with cache.dtype fp8 and activations.int8 it is slow", new="auto")


# Pairs of backend and cache type whose verification the split kernel can do.
_SPLIT_KV = {
    ("auto", "bfloat16"),
    ("FLASH_ATTN", "bfloat16"),
    ("auto", "int8_per_token_head"),
    ("TRITON_ATTN", "int8_per_token_head"),
    ("TRITON_ATTN", "fp8"),
}


@_rule(
    "split-kv-scope",
    "correct",
    row="the split kernel verifies bfloat16 under FLASH_ATTN, int8 and fp8 under TRITON_ATTN; its scratch is dead else",
    source="HyperQwen",
)
def _split_kv_scope(profile: Profile, context: Context) -> Iterator[_Found]:
    backend, dtype = profile.attention.backend, profile.cache.dtype
    if profile.attention.verify != "split-kv":
        return
    if not _drafts(profile):
        yield _correct("attention.verify", "engine", "without drafts there is nothing to verify")
    elif (backend, dtype) not in _SPLIT_KV:
        yield _correct(
            "attention.verify",
            "engine",
            f"the split kernel is not used with attention.backend {backend} and cache.dtype {dtype}",
        )


@_rule(
    "int8-prefill-scope",
    "correct",
    row="the int8 prefill kernel is for 24 query and 4 KV heads of 256, bfloat16 keys, FLASH_ATTN and one card",
    source="HyperQwen",
)
def _int8_prefill_scope(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.attention.prefill != "int8":
        return
    backend, dtype = profile.attention.backend, profile.cache.dtype
    geometry = context.geometry
    shape = None if geometry is None else _head_shape(geometry)
    if backend not in ("auto", "FLASH_ATTN") or dtype != "bfloat16":
        why = f"the int8 kernel is not used with attention.backend {backend} and cache.dtype {dtype}"
    elif profile.parallel.tensor > 1:
        why = "the int8 kernel is for all heads on one card"
    elif shape not in (None, (24, 4, 256)):
        why = f"the int8 kernel is for (24, 4, 256) query heads, KV heads and width, and this model has {shape}"
    else:
        return
    yield _correct("attention.prefill", "engine", why)


def _head_shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim


@_rule(
    "prefix-settings",
    "correct",
    row="without a prefix cache there is nothing to retain or to match",
    source="vLLM 0.31.0",
)
def _prefix_settings(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.cache.prefix:
        return
    if profile.cache.retention != "dense":
        yield _correct("cache.retention", "dense", "cache.prefix is false")
    if profile.cache.match_unit:
        yield _correct("cache.match_unit", 0, "cache.prefix is false")


@_rule(
    "kvarn-match-unit",
    "correct",
    row="a KVarN cache with matches that are not on its tiles of 128 tokens is corrupted",
    source="HyperQwen",
)
def _kvarn_match_unit(profile: Profile, context: Context) -> Iterator[_Found]:
    if _kvarn(profile) and profile.cache.prefix and profile.cache.match_unit != TILE:
        yield _correct(
            "cache.match_unit", TILE, f"matches that do not fall on a tile of {TILE} tokens corrupt a KVarN cache"
        )


@_rule(
    "match-unit-block",
    "refuse",
    row="vLLM refuses a match unit that does not divide the block",
    source="vLLM 0.31.0",
    needs=("block_tokens",),
)
def _match_unit_block(profile: Profile, context: Context) -> Iterator[_Found]:
    unit = profile.cache.match_unit
    block = _counted(context.block_tokens, profile) if profile.cache.prefix and unit else None
    if block is not None and block % unit:
        nearest = next(number for number in range(min(unit, block), 0, -1) if block % number == 0)
        yield _refuse("cache.match_unit", f"it does not divide the block of {block} tokens", new=nearest)


@_rule(
    "retention-block",
    "correct",
    row="vLLM refuses a retention that is not a multiple of the block; the next one up is taken",
    source="HyperQwen, vLLM 0.31.0",
    needs=("block_tokens",),
)
def _retention_block(profile: Profile, context: Context) -> Iterator[_Found]:
    retention = profile.cache.retention
    if not profile.cache.prefix or not isinstance(retention, int):
        return
    block = _counted(context.block_tokens, profile)
    if block is not None and retention % block:
        # Upwards: states at fewer places never take more room than was asked for.
        yield _correct(
            "cache.retention", math.ceil(retention / block) * block, f"it must be a multiple of the block, {block}"
        )


@_rule(
    "kvarn-adaptive",
    "correct",
    row="k > 7 with KVarN and a prefix cache: a block that changes its length corrupts the second turn "
    "(38 of 793 tokens verbatim, 794 of 794 with a fixed one)",
    source="HyperQwen",
)
def _kvarn_adaptive(profile: Profile, context: Context) -> Iterator[_Found]:
    if _kvarn(profile) and profile.cache.prefix and _long_draft(profile, context) and profile.speculation.adaptive:
        yield _correct(
            "speculation.adaptive",
            False,
            "with a KVarN prefix cache a block that changes its length corrupts the second turn",
        )


@_rule(
    "kvarn-mtp-graphs",
    "correct",
    row="MTP with KVarN under full graphs: after a cache hit one prompt length in 128 breaks",
    source="HyperQwen",
)
def _kvarn_mtp_graphs(profile: Profile, context: Context) -> Iterator[_Found]:
    mode = profile.graphs.mode
    if _kvarn(profile) and profile.speculation.method == "mtp" and mode not in ("piecewise", "off"):
        yield _correct(
            "graphs.mode",
            "piecewise",
            "full graphs of MTP over a KVarN cache break one prompt length in 128 after a cache hit",
        )


@_rule(
    "kvarn-mtp-logprobs",
    "warn",
    row="MTP with KVarN and a prefix cache: prompt_logprobs are wrong (+23 % perplexity, NaN)",
    source="HyperQwen",
)
def _kvarn_mtp_logprobs(profile: Profile, context: Context) -> Iterator[_Found]:
    if _kvarn(profile) and profile.speculation.method == "mtp" and profile.cache.prefix:
        yield _warn(
            "speculation.method",
            "with a KVarN prefix cache prompt_logprobs are wrong",
            new="dflash2",
            fix="set speculation.method to dflash2 or cache.prefix to false where prompt_logprobs are used",
        )


@_rule(
    "kvarn-slots",
    "warn",
    row="KVarN with drafts and more than 12 slots dies at the first prompt (24 GB)",
    source="HyperQwen",
)
def _kvarn_slots(profile: Profile, context: Context) -> Iterator[_Found]:
    if _kvarn(profile) and _drafts(profile) and profile.limits.concurrent_requests > 12 and _small(context):
        yield _warn(
            "limits.concurrent_requests",
            "with a KVarN cache and drafts, more than 12 left a 24 GB card too little for its first prompt",
            new=12,
        )


@_rule(
    "kvarn-long-draft",
    "refuse",
    row="KVarN with drafts of 15 at 245760 tokens needs 5.16 GiB of a pool of 4.90: 221184 fit",
    source="HyperQwen",
)
def _kvarn_long_draft(profile: Profile, context: Context) -> Iterator[_Found]:
    pool = profile.memory.kv_cache_bytes
    if (
        _kvarn(profile)
        and _long_draft(profile, context)
        and profile.limits.context_tokens > 221_184
        and 0 < pool <= _shipped_pool("E")
    ):
        yield _refuse(
            "limits.context_tokens",
            f"with drafts of {profile.speculation.tokens} it needs more than the pool's {pool} bytes",
            new=221_184,
            fix=f"set limits.context_tokens to 221184, or speculation.tokens to {context.drafter_tokens}",
        )


# Graphs, the pool and the card's memory.


@_rule(
    "capture",
    "correct",
    row="graphs of batches above 64 tokens (k = 15 with 8 slots: 128) end the engine at the first full batch",
    source="HyperQwen",
)
def _capture(profile: Profile, context: Context) -> Iterator[_Found]:
    if not _drafts(profile) or profile.graphs.mode == "off":
        return
    step = profile.speculation.tokens + 1
    wanted, set_to = profile.limits.concurrent_requests * step, profile.graphs.capture_tokens
    if set_to > CAPTURE_LIMIT or (set_to == 0 and wanted > CAPTURE_LIMIT):
        yield _correct(
            "graphs.capture_tokens",
            CAPTURE_LIMIT,
            f"graphs of {set_to or wanted} tokens end the engine at its first full batch; with drafts of {step - 1} "
            f"more than {CAPTURE_LIMIT // step} requests at a time run without",
        )
    elif 0 < set_to < step:
        yield _correct(
            "graphs.capture_tokens",
            min(CAPTURE_LIMIT, wanted),
            f"one request alone takes {step} tokens in a step, its draft and one more",
        )


@_rule(
    "batched-slots",
    "refuse",
    row="vLLM refuses fewer tokens in a step than slots",
    source="vLLM 0.31.0",
)
def _batched_slots(profile: Profile, context: Context) -> Iterator[_Found]:
    limits = profile.limits
    if limits.batched_tokens < limits.concurrent_requests:
        yield _refuse(
            "limits.batched_tokens",
            f"{limits.concurrent_requests} slots take a token each in every step",
            new=limits.concurrent_requests,
        )


@_rule(
    "pool-cards",
    "correct",
    row="a pinned pool with several cards strands memory, as each card gets that pin (137,210 of 302,223 tokens)",
    source="HyperQwen",
)
def _pool_cards(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.parallel.tensor > 1 and profile.memory.kv_cache_bytes:
        yield _correct(
            "memory.kv_cache_bytes",
            0,
            f"it was measured for one card; each of {profile.parallel.tensor} takes what memory.utilization leaves",
        )


@_rule(
    "pool-above-stock",
    "warn",
    row="a pool above the shipped profile's: out of memory later on Linux, 5 to 10 times slower on WSL2 (24 GB)",
    source="HyperQwen",
)
def _pool_above_stock(profile: Profile, context: Context) -> Iterator[_Found]:
    pool, stock = profile.memory.kv_cache_bytes, _stock_pool(profile)
    if pool > stock and _small(context):
        later = "Windows moves it to host memory without a word, 5 to 10 times slower" if context.wsl else "it runs out"
        yield _warn(
            "memory.kv_cache_bytes",
            f"above {stock} a 24 GB card has too little left for a long prompt: {later}",
            new=stock,
        )


@_rule(
    "utilization",
    "warn",
    row="utilization above 0.94 in batches or 0.93 with drafts: steps that vLLM does not measure run out (24 GB)",
    source="HyperQwen",
)
def _utilization(profile: Profile, context: Context) -> Iterator[_Found]:
    limit = 0.93 if _drafts(profile) else 0.94
    if not profile.memory.kv_cache_bytes and profile.memory.utilization > limit and _small(context):
        yield _warn(
            "memory.utilization",
            "the recurrent layers take memory in a full step that vLLM does not measure beforehand",
            new=limit,
        )


@_rule(
    "bf16-drafter",
    "refuse",
    row="a drafter in 16 bits (3.5 to 4 GiB) fits at no context unless the pool is 3,000,000,000 bytes "
    "and the context 8192 (24 GB)",
    source="HyperQwen",
)
def _bf16_drafter(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.speculation.method != "dflash2" or context.drafter_quantized or not _small(context):
        return
    if profile.parallel.tensor > 1:
        return
    why = "the drafter's weights are in 16 bits and take 3.5 to 4 GiB of the card"
    fix = "set memory.kv_cache_bytes to 3000000000 and limits.context_tokens to 8192, or quantize the drafter"
    if not 0 < profile.memory.kv_cache_bytes <= 3_000_000_000:
        yield _refuse("memory.kv_cache_bytes", why, new=3_000_000_000, fix=fix)
    if profile.limits.context_tokens > 8192:
        yield _refuse("limits.context_tokens", why, new=8192, fix=fix)


@_rule(
    "offload-size",
    "warn",
    row="a tier in host memory that is smaller than the live conversations stores pages and never serves one",
    source="HyperQwen",
)
def _offload_size(profile: Profile, context: Context) -> Iterator[_Found]:
    tier = profile.memory.offload_gib
    live = _counted(context.working_set, profile) if tier else None
    needed = 16 if live is None else math.ceil(live / GIB)
    if 0 < tier < needed:
        known = "16 GiB served, 8 GiB never did" if live is None else f"full, they hold {needed} GiB"
        yield _warn(
            "memory.offload_gib",
            f"a tier that is smaller than all live conversations never serves a page ({known})",
            new=min(needed, 1024),
        )


@_rule(
    "expandable-segments",
    "correct",
    row="expandable segments are off with an offload tier or KV connector (vLLM refuses them), with several cards, "
    "vLLM's all-reduce and graphs (capture aborts; 6.4 % faster than without that all-reduce), and on WSL2",
    source="HyperQwen",
)
def _expandable(profile: Profile, context: Context) -> Iterator[_Found]:
    usable, why = expandable_segments(profile, context)
    if not usable:
        yield _Found("correct", ALLOCATOR, why, new="expandable_segments:False", value="expandable_segments:True")


@_rule(
    "wsl-utilization",
    "correct",
    row="WSL2: utilization at most 0.91 in batches, 0.88 with KVarN and 0.93 else, as Windows keeps 0.5 GiB "
    "and what is too much goes to host memory without a word",
    source="HyperQwen",
)
def _wsl_utilization(profile: Profile, context: Context) -> Iterator[_Found]:
    limit = 0.88 if _kvarn(profile) else 0.93 if _drafts(profile) else 0.91
    if context.wsl and profile.memory.utilization > limit:
        yield _correct(
            "memory.utilization",
            limit,
            "on WSL2 Windows keeps part of the card, and what does not fit becomes slow host memory without a word",
        )


# Cards.


@_rule(
    "tensor-divides",
    "refuse",
    row="a number of cards that cannot share the heads (three: the model has 4 KV heads); 1, 2, 4 and 8 can",
    source="HyperQwen",
    needs=("geometry",),
)
def _tensor_divides(profile: Profile, context: Context) -> Iterator[_Found]:
    cards = profile.parallel.tensor
    problem = _unshared(profile, context, cards)
    if problem is None:
        return
    working = [number for number in range(1, CARDS_LIMIT + 1) if _unshared(profile, context, number) is None]
    yield _refuse(
        "parallel.tensor",
        problem,
        new=min(working, key=lambda number: (abs(number - cards), number)),
        fix=f"use {' or '.join(map(str, working))}",
    )


def _unshared(profile: Profile, context: Context, cards: int) -> str | None:
    """Why that many cards cannot share the model; None where they can, or where no model is known."""
    if context.geometry is None:
        return None
    vision = profile.model.vision != "off"
    drafter = context.drafter if profile.speculation.method == "dflash2" else None
    try:
        check_tensor_parallel(context.geometry, cards, drafter=drafter, vision=vision)
    except BadInputError as error:
        return error.message.partition(", but ")[2]
    return None


@_rule(
    "tensor-long-draft",
    "warn",
    row="k > 7 with several cards is slower than 7 (27 % with 2, 154 to 89 tokens/s with 4)",
    source="HyperQwen",
)
def _tensor_long_draft(profile: Profile, context: Context) -> Iterator[_Found]:
    if profile.parallel.tensor > 1 and _long_draft(profile, context):
        yield _warn(
            "speculation.tokens",
            f"with {profile.parallel.tensor} cards a long draft is slower than one of {context.drafter_tokens}",
            new=context.drafter_tokens,
        )


_CARD = re.compile(r"[0-9]+\Z|(?:GPU|MIG)-[0-9A-Za-z/-]+\Z")


@_rule(
    "card-list",
    "refuse",
    "correct",
    row="parallel.gpus names each card once, and as many as parallel.tensor",
    source="vLLM 0.31.0",
)
def _card_list(profile: Profile, context: Context) -> Iterator[_Found]:
    if not profile.parallel.gpus:
        return
    names = [name.strip() for name in profile.parallel.gpus.split(",")]
    wrong = [name for name in names if not _CARD.match(name)]
    if wrong:
        yield _refuse(
            "parallel.gpus",
            f"{wrong[0]!r} is no card",
            new="",
            fix="name indices or UUIDs as nvidia-smi -L has them, with commas between",
        )
    elif len(set(names)) < len(names):
        yield _refuse("parallel.gpus", "a card is named twice", new=",".join(dict.fromkeys(names)))
    elif len(names) < profile.parallel.tensor:
        fits = next(number for number in range(len(names), 0, -1) if _unshared(profile, context, number) is None)
        yield _refuse(
            "parallel.tensor",
            f"parallel.gpus names {len(names)}",
            new=fits,
            fix=f"set parallel.tensor to {fits}, or name more cards in parallel.gpus",
        )
    elif len(names) > profile.parallel.tensor:
        yield _correct(
            "parallel.gpus", ",".join(names[: profile.parallel.tensor]), f"parallel.tensor is {profile.parallel.tensor}"
        )


# The model.


@_rule(
    "native-context",
    "refuse",
    "warn",
    row="a context above the model's own positions (262144) needs other rotary parameters: vLLM refuses it",
    source="HyperQwen, vLLM 0.31.0",
    needs=("geometry",),
    device="any",
)
def _native_context(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.geometry is not None
    native = context.geometry.max_position_embeddings
    if profile.limits.context_tokens <= native:
        return
    why = f"the model was trained on positions up to {native}"
    if any(flag.name == "--hf-overrides" for flag in parse(profile.engine.arguments)):
        yield _warn("limits.context_tokens", f"{why}, and what is longer was never measured here", new=native)
    else:
        yield _refuse("limits.context_tokens", why, new=native)


@_rule(
    "model-parts",
    "refuse",
    row="a model without an MTP head or a vision tower can neither draft with the one nor see with the other",
    source="HyperQwen",
    needs=("geometry",),
)
def _model_parts(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.geometry is not None
    if profile.speculation.method == "mtp" and context.geometry.mtp_num_hidden_layers == 0:
        yield _refuse("speculation.method", f"{context.geometry.name} has no MTP head", new="off")
    if profile.model.vision != "off" and context.geometry.vision is None:
        yield _refuse("model.vision", f"{context.geometry.name} has no vision tower", new="off")


# Flags beside the plan.


@_rule(
    "arguments-forbidden",
    "refuse",
    row="engine.arguments with a secret, with code of the model's, or with an address that no check has seen",
    source="the launcher's own",
    device="any",
)
def _arguments_forbidden(profile: Profile, context: Context) -> Iterator[_Found]:
    arguments = profile.engine.arguments
    for flag in parse(arguments):
        if flag.name in FORBIDDEN and not flag.negated:
            why, fix = FORBIDDEN[flag.name]
            # Only the flag: what stands behind it may be the secret.
            yield _refuse("engine.arguments", why, new=without(arguments, flag), fix=fix, value=flag.spelled)


@_rule(
    "arguments-vision",
    "refuse",
    row="--language-model-only turned round in engine.arguments: pictures become placeholders without a word",
    source="HyperQwen",
    device="any",
)
def _arguments_vision(profile: Profile, context: Context) -> Iterator[_Found]:
    arguments = profile.engine.arguments
    for flag in parse(arguments):
        off = profile.model.vision == "off"
        if flag.name == "--language-model-only" and flag.negated == off:
            yield _refuse(
                "engine.arguments",
                f"with model.vision {profile.model.vision} pictures would become placeholders without a word",
                new=without(arguments, flag),
                fix=f"take it out, and set model.vision to {'host or card' if off else 'off'}",
                value=flag.spelled,
            )


@_rule(
    "arguments-pipeline",
    "refuse",
    row="three stages: 64 layers cannot be shared evenly",
    source="HyperQwen",
    needs=("geometry",),
    device="any",
)
def _arguments_pipeline(profile: Profile, context: Context) -> Iterator[_Found]:
    assert context.geometry is not None
    arguments, layers = profile.engine.arguments, context.geometry.num_hidden_layers
    for flag in parse(arguments):
        if flag.name != "--pipeline-parallel-size" or not flag.number:
            continue
        stages = flag.number
        if layers % stages:
            nearest = next(number for number in range(min(stages, layers), 0, -1) if layers % number == 0)
            yield _refuse(
                "engine.arguments",
                f"{layers} layers cannot be shared among {stages} stages",
                new=without(arguments, flag),
                fix=f"take it out (parallel.tensor shares the layers' heads), or use {nearest}",
                value=f"{flag.spelled} {stages}",
            )


@_rule(
    "arguments-kvarn-block",
    "refuse",
    row="a KVarN cache with a block that is not a multiple of its tile of 128 tokens is corrupted",
    source="HyperQwen",
)
def _arguments_kvarn_block(profile: Profile, context: Context) -> Iterator[_Found]:
    arguments = profile.engine.arguments
    for flag in parse(arguments):
        if flag.name == "--block-size" and _kvarn(profile) and flag.number % TILE:
            yield _refuse(
                "engine.arguments",
                f"a KVarN cache whose block is not a multiple of {TILE} is corrupted",
                new=without(arguments, flag),
                fix="take it out: the plan sets it",
                value=f"{flag.spelled} {flag.number}",
            )


@_rule(
    "arguments-log-stats",
    "refuse",
    row="metrics in every answer come from the statistics that --disable-log-stats switches off",
    source="HyperQwen, vLLM 0.31.0",
    device="any",
)
def _arguments_log_stats(profile: Profile, context: Context) -> Iterator[_Found]:
    arguments = profile.engine.arguments
    for flag in parse(arguments):
        if flag.name == "--disable-log-stats" and profile.server.request_metrics != "none":
            yield _refuse(
                "engine.arguments",
                f"server.request_metrics {profile.server.request_metrics} needs the statistics",
                new=without(arguments, flag),
                fix="take it out, or set server.request_metrics to none",
                value=flag.spelled,
            )


@_rule(
    "arguments-shadow",
    "warn",
    row="a flag in engine.arguments that the plan sets too: the engine follows the flag, and the plan is wrong",
    source="HyperQwen",
    device="any",
)
def _arguments_shadow(profile: Profile, context: Context) -> Iterator[_Found]:
    for flag in parse(profile.engine.arguments):
        if flag.name not in PLANNED:
            continue
        knob = PLANNED[flag.name]
        whole = ", and puts its one part in place of everything planned there" if "." in flag.spelled else ""
        yield _warn(
            "engine.arguments",
            f"it shadows {knob or 'what the plan sets itself'}{whole}",
            fix=f"set {knob} instead" if knob else "take it out",
            value=flag.spelled,
        )


RULES: tuple[Rule, ...] = tuple(_RULES)
"""All rules, in the order in which they are applied."""


# Rows without a rule ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settled:
    """A known trap that no profile can step into, and why."""

    name: str
    row: str
    why: str


SETTLED = (
    Settled(
        "int8-empty",
        "an empty type of int8 activations ends vLLM at start",
        "activations.int8 is off, mlp or all; off gives the engine no setting at all",
    ),
    Settled(
        "int8-warm-cache",
        "int8 layers changed over a warm compile cache: KeyError input_global_scale",
        "the setting travels in --additional-config, which is part of the key of compiled code",
    ),
    Settled(
        "int8-pattern",
        'int8 layers "mlp|linear_attn" crash the compiler even with a clean cache',
        "activations.int8 takes no pattern",
    ),
)
"""Rows of the same table that need no rule."""


def rule_rows() -> list[list[str]]:
    """Rows of the docs' table: name, what happens, why, source."""
    rows = [[rule.name, " or ".join(rule.levels), rule.row, rule.source] for rule in RULES]
    return rows + [[row.name, "cannot happen", f"{row.row}: {row.why}", "HyperQwen"] for row in SETTLED]
