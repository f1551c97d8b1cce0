from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.profiles.argv import ModelPaths, engine_flags, engine_settings
from hyperqwen.profiles.capabilities import CAPABILITIES
from hyperqwen.profiles.cards import CARDS
from hyperqwen.profiles.layers import Source
from hyperqwen.profiles.profile import GIB, Knob, Profile, knobs, load, parse, read_table, shipped
from hyperqwen.profiles.rules import (
    ALLOCATOR,
    CPU_ONLY,
    CUDA_ONLY,
    RULES,
    SETTLED,
    Context,
    Notice,
    apply,
    expandable_segments,
    refusal,
    rule_rows,
)

EVERYTHING = frozenset(CAPABILITIES)
PATHS = ModelPaths(Path("/models/m"), Path("/models/d"))
KNOBS = {knob.path: knob for knob in knobs()}


@cache
def profile(name: str) -> Profile:
    return load(shipped()[name])


@cache
def big() -> geometries.Geometry:
    return geometries.load("qwen3.8-27b")


def block_tokens(wanted: Profile) -> int:
    """The page law (upstream-facts 1.5), with the bytes of a token in a layer written out."""
    if wanted.speculation.method != "off" and wanted.speculation.tokens == 0:
        raise BadInputError("a drafter without drafts")
    page = 1_634_304 + 20_480 * wanted.speculation.tokens
    size = {"bfloat16": 4096, "fp8": 2048, "int8_per_token_head": 2080, "kvarn_k4v2_g128": 840}
    step = 128 if wanted.cache.dtype.startswith("kvarn") else 16
    return step * math.ceil(page / (step * size.get(wanted.cache.dtype, 1056)))


def context(**changes: Any) -> Context:
    known = Context(geometry=big(), card=CARDS["rtx3090"], capabilities=EVERYTHING, block_tokens=block_tokens)
    return replace(known, **changes)


def without(*names: str) -> frozenset[str]:
    assert set(names) <= EVERYTHING
    return EVERYTHING - set(names)


def of(rule: str, wanted: Profile, where: Context) -> list[Notice]:
    """What the rule alone says."""
    return list(next(known for known in RULES if known.name == rule).apply(wanted, where))


@dataclass(frozen=True)
class Case:
    """One profile with changes that one rule has one thing to say about."""

    rule: str
    base: str
    changes: dict[str, Any]
    level: str
    field: str
    new: Any
    said: str
    where: dict[str, Any] = dataclasses.field(default_factory=dict)


E_MTP = {"speculation.method": "mtp", "speculation.tokens": 3, "speculation.lookup": False}
K15 = {"speculation.tokens": 15, "scheduler.asynchronous": False}
NO_CARD_OF_24 = {"card": CARDS["h200"]}

BACKEND = {"attention.backend": "FLASHINFER"}
DRAFTER = geometries.load_drafter("qwen3.8-27b-dflash2")
OTHER_DRAFTER = {"drafter": replace(DRAFTER, hidden_size=4096)}


def arguments(*words: str) -> dict[str, Any]:
    return {"engine.arguments": list(words)}


CASES = [
    Case(
        "cpu-knobs",
        "demo",
        {"speculation.method": "mtp"},
        "refuse",
        "speculation.method",
        "off",
        "speculation.method is mtp: an engine on the CPU has no such setting",
    ),
    Case("cpu-knobs", "demo", {"parallel.tensor": 2}, "refuse", "parallel.tensor", 1, "on the CPU"),
    Case(
        "cpu-knobs",
        "demo",
        {"parallel.gpus": "0,1"},
        "correct",
        "parallel.gpus",
        "",
        "0,1 (host file /h.toml)",
        {"sources": {"parallel.gpus": Source("host file", "/h.toml")}},
    ),
    Case("cuda-knobs", "B", {"limits.threads": 4}, "refuse", "limits.threads", 1, "only an engine on the CPU"),
    Case(
        "cuda-knobs",
        "B",
        {"limits.threads": 4},
        "correct",
        "limits.threads",
        1,
        "4 (host file /h.toml)",
        {"sources": {"limits.threads": Source("host file", "/h.toml")}},
    ),
    Case(
        "kvarn-capability",
        "E",
        {},
        "refuse",
        "cache.dtype",
        "fp8",
        "use profile D",
        {"capabilities": without("kvarn")},
    ),
    Case(
        "embedding-capability",
        "D",
        {"memory.embedding_in_host": True},
        "refuse",
        "memory.embedding_in_host",
        False,
        "set memory.embedding_in_host to false",
        {"capabilities": without("embedding-in-host")},
    ),
    Case(
        "vision-capability",
        "B",
        {"model.vision": "host"},
        "refuse",
        "model.vision",
        "card",
        "card (0.86 GiB of its memory) or off",
        {"capabilities": without("vision-in-host")},
    ),
    Case(
        "lookup-capability",
        "B",
        {},
        "correct",
        "speculation.lookup",
        False,
        "the answers are the same, and slower where text repeats",
        {"capabilities": without("lookup-drafting")},
    ),
    Case(
        "accelerators",
        "B",
        {},
        "correct",
        "attention.verify",
        "engine",
        "split verification",
        {"capabilities": without("split-kv-verify")},
    ),
    Case(
        "accelerators",
        "B",
        {"attention.prefill": "int8"},
        "correct",
        "attention.prefill",
        "engine",
        "int8 prefill",
        {"capabilities": without("int8-prefill")},
    ),
    Case(
        "accelerators",
        "C",
        {},
        "correct",
        "speculation.adaptive",
        False,
        "adaptive blocks",
        {"capabilities": without("adaptive-block")},
    ),
    Case(
        "accelerators",
        "B",
        {"speculation.chains": True},
        "correct",
        "speculation.chains",
        False,
        "chains",
        {"capabilities": without("chains")},
    ),
    Case(
        "accelerators",
        "D",
        {},
        "correct",
        "speculation.draft_vocabulary",
        False,
        "draft vocabulary",
        {"capabilities": without("draft-vocabulary")},
    ),
    Case(
        "int8-capability",
        "A",
        {},
        "correct",
        "activations.int8",
        "off",
        "mlp: this engine has no int8 activations yet",
        {"capabilities": without("int8-activations")},
    ),
    Case(
        "draft-off", "B", {"speculation.method": "off"}, "correct", "speculation.tokens", 0, "speculation.method is off"
    ),
    Case("draft-tokens", "B", {"speculation.tokens": 0}, "refuse", "speculation.tokens", 7, "to 7, or"),
    Case("draft-tokens", "D", {"speculation.tokens": 0}, "refuse", "speculation.tokens", 3, "to 3, or"),
    Case(
        "draft-tokens",
        "D",
        {"speculation.tokens": 0, "cache.dtype": "bfloat16"},
        "refuse",
        "speculation.tokens",
        4,
        "to 4, or",
    ),
    Case(
        "draft-tokens",
        "B",
        {"speculation.tokens": 0},
        "refuse",
        "speculation.tokens",
        11,
        "to 11, or",
        {"drafter": replace(geometries.load_drafter("qwen3.8-27b-dflash2"), block_size=12)},
    ),
    Case("draft-tokens", "A", {"speculation.method": "ngram"}, "refuse", "speculation.tokens", 1, "to 1, or"),
    Case("lookup-method", "B", {"speculation.method": "mtp"}, "correct", "speculation.lookup", False, "method mtp"),
    Case("lookup-method", "A", {"speculation.chains": True}, "correct", "speculation.chains", False, "method off"),
    Case(
        "draft-block",
        "B",
        K15 | {"speculation.lookup": False},
        "correct",
        "speculation.tokens",
        7,
        "7 instead of 15: the drafter proposes 7",
    ),
    Case("adaptive-needs", "B", {"speculation.adaptive": True}, "correct", "speculation.adaptive", False, "above 7"),
    Case(
        "adaptive-needs",
        "C",
        {"speculation.lookup": False},
        "correct",
        "speculation.adaptive",
        False,
        "needs speculation.lookup",
    ),
    Case(
        "chains-needs",
        "B",
        {"speculation.chains": True, "speculation.lookup": False},
        "correct",
        "speculation.chains",
        False,
        "needs speculation.lookup",
    ),
    Case(
        "chains-needs",
        "B",
        {"speculation.chains": True, "model.vision": "card"},
        "correct",
        "speculation.chains",
        False,
        "model.vision card",
    ),
    # Table 4.4, from its first row to its last.
    Case(
        "async-long-draft",
        "C",
        {"scheduler.asynchronous": True},
        "correct",
        "scheduler.asynchronous",
        False,
        "drafts of 15",
    ),
    Case(
        "kvarn-adaptive",
        "E",
        K15 | {"speculation.adaptive": True, "limits.context_tokens": 221_184},
        "correct",
        "speculation.adaptive",
        False,
        "corrupts the second turn",
    ),
    Case("kvarn-mtp-graphs", "E", E_MTP, "correct", "graphs.mode", "piecewise", "piecewise instead of full"),
    Case(
        "kvarn-mtp-graphs",
        "E",
        E_MTP | {"graphs.mode": "engine"},
        "correct",
        "graphs.mode",
        "piecewise",
        "one prompt length in 128",
    ),
    Case("kvarn-mtp-logprobs", "E", E_MTP, "warn", "speculation.method", "dflash2", "prompt_logprobs are wrong"),
    Case(
        "capture",
        "C",
        {"limits.concurrent_requests": 8},
        "correct",
        "graphs.capture_tokens",
        64,
        "graphs of 128 tokens end the engine at its first full batch; with drafts of 15 more than 4 requests",
    ),
    Case("capture", "B", {"graphs.capture_tokens": 65}, "correct", "graphs.capture_tokens", 64, "64 instead of 65"),
    Case("capture", "E", {"graphs.capture_tokens": 7}, "correct", "graphs.capture_tokens", 16, "takes 8 tokens"),
    Case("kvarn-slots", "E", {"limits.concurrent_requests": 13}, "warn", "limits.concurrent_requests", 12, "24 GB"),
    Case(
        "pool-above-stock",
        "B",
        {"memory.kv_cache_bytes": 5_583_457_485},
        "warn",
        "memory.kv_cache_bytes",
        5_583_457_484,
        "it runs out",
    ),
    Case(
        "pool-above-stock",
        "E",
        {"memory.kv_cache_bytes": 5_261_334_939},
        "warn",
        "memory.kv_cache_bytes",
        5_261_334_938,
        "5 to 10 times slower",
        {"wsl": True},
    ),
    Case("pool-cards", "B", {"parallel.tensor": 2}, "correct", "memory.kv_cache_bytes", 0, "each of 2 takes"),
    Case("tensor-long-draft", "C", {"parallel.tensor": 2}, "warn", "speculation.tokens", 7, "slower than one of 7"),
    Case(
        "fp8-backend",
        "D",
        {"attention.backend": "FLASH_ATTN"},
        "refuse",
        "attention.backend",
        "FLASHINFER",
        "this card is sm86; set attention.backend to FLASHINFER or auto",
    ),
    Case(
        "fp8-backend",
        "D",
        {"attention.backend": "TRITON_ATTN"},
        "refuse",
        "attention.backend",
        "FLASHINFER",
        "sm89 or later",
    ),
    Case(
        "fp8-backend",
        "D",
        {"attention.backend": "FLASH_ATTN"},
        "refuse",
        "attention.backend",
        "FLASHINFER",
        "this card is sm120",
        {"card": CARDS["rtx5090"]},
    ),
    Case("float16-drafts", "B", {"model.dtype": "float16"}, "refuse", "model.dtype", "bfloat16", "bfloat16 alone"),
    Case("kvarn-match-unit", "E", {"cache.match_unit": 64}, "correct", "cache.match_unit", 128, "128 instead of 64"),
    Case("kvarn-match-unit", "E", {"cache.match_unit": 0}, "correct", "cache.match_unit", 128, "tile of 128"),
    Case(
        "arguments-kvarn-block",
        "E",
        arguments("--block_size", "192", "--seed", "1"),
        "refuse",
        "engine.arguments",
        ["--seed", "1"],
        "engine.arguments is --block_size 192: a KVarN cache whose block is not a multiple of 128 is corrupted",
    ),
    Case(
        "expandable-segments",
        "B",
        {"memory.offload_gib": 16},
        "correct",
        ALLOCATOR,
        "expandable_segments:False",
        "addresses that would move",
    ),
    Case(
        "expandable-segments",
        "A",
        {"parallel.tensor": 2},
        "correct",
        ALLOCATOR,
        "expandable_segments:False",
        "capturing graphs ends in 'invalid argument'",
    ),
    Case("expandable-segments", "B", {}, "correct", ALLOCATOR, "expandable_segments:False", "WSL2", {"wsl": True}),
    Case(
        "bf16-drafter",
        "B",
        {"limits.context_tokens": 8192},
        "refuse",
        "memory.kv_cache_bytes",
        3_000_000_000,
        "or quantize the drafter",
        {"drafter_quantized": False},
    ),
    Case(
        "bf16-drafter",
        "B",
        {"memory.kv_cache_bytes": 3_000_000_000},
        "refuse",
        "limits.context_tokens",
        8192,
        "3.5 to 4 GiB",
        {"drafter_quantized": False},
    ),
    Case(
        "kvarn-long-draft",
        "E",
        K15,
        "refuse",
        "limits.context_tokens",
        221_184,
        "limits.context_tokens to 221184, or speculation.tokens to 7",
    ),
    Case("tensor-divides", "A", {"parallel.tensor": 3}, "refuse", "parallel.tensor", 2, "use 1 or 2 or 4 or 8"),
    Case(
        "arguments-pipeline",
        "A",
        arguments("-pp", "3"),
        "refuse",
        "engine.arguments",
        [],
        "64 layers cannot be shared among 3 stages; take it out (parallel.tensor shares the layers' heads), or use 2",
    ),
    Case(
        "int8-fp8-triton",
        "A",
        {"attention.backend": "TRITON_ATTN"},
        "warn",
        "attention.backend",
        "auto",
        "it is slow",
        {"card": CARDS["rtx4090"]},
    ),
    Case("offload-size", "D", {"memory.offload_gib": 8}, "warn", "memory.offload_gib", 16, "8 GiB never did"),
    Case(
        "offload-size",
        "D",
        {"memory.offload_gib": 16},
        "warn",
        "memory.offload_gib",
        21,
        "full, they hold 21 GiB",
        {"working_set": lambda wanted: 20 * GIB + 1},
    ),
    # WSL2, and what vLLM or the hardware refuses.
    Case("wsl-utilization", "A", {}, "correct", "memory.utilization", 0.91, "0.91 instead of 0.94", {"wsl": True}),
    Case("wsl-utilization", "E", {}, "correct", "memory.utilization", 0.88, "0.88 instead of 0.93", {"wsl": True}),
    Case(
        "wsl-utilization",
        "D",
        {"memory.utilization": 0.95},
        "correct",
        "memory.utilization",
        0.93,
        "0.93 instead of 0.95",
        {"wsl": True},
    ),
    Case("utilization", "A", {"memory.utilization": 0.95}, "warn", "memory.utilization", 0.94, "does not measure"),
    Case("utilization", "D", {"memory.utilization": 0.94}, "warn", "memory.utilization", 0.93, "does not measure"),
    Case(
        "async-ngram",
        "A",
        {"speculation.method": "ngram", "speculation.tokens": 4},
        "correct",
        "scheduler.asynchronous",
        False,
        "ngram",
    ),
    Case(
        "greedy-drafts",
        "B",
        {"speculation.sampling": "greedy"},
        "warn",
        "speculation.sampling",
        "probabilistic",
        "by 16 %",
    ),
    Case("mtp-tokens", "D", {"speculation.tokens": 5}, "warn", "speculation.tokens", 4, "4 are fastest"),
    Case("mtp-4-fp8", "D", {"speculation.tokens": 4}, "warn", "speculation.tokens", 3, "illegal memory access"),
    Case("mtp-4-fp8", "D", {"speculation.tokens": 5} | BACKEND, "warn", "speculation.tokens", 3, "fp8", NO_CARD_OF_24),
    Case("drafter-shape", "B", {}, "refuse", "speculation.method", "mtp", "--model-drafter", OTHER_DRAFTER),
    Case("sm80-drafts", "D", {}, "warn", "speculation.method", "off", "sm80", {"card": replace(CARDS["h200"], sm=80)}),
    Case("kvarn-backend", "E", {"attention.backend": "auto"}, "correct", "attention.backend", "KVARN", "kvarn_k4v2"),
    Case(
        "kvarn-backend",
        "E",
        {"attention.backend": "FLASH_ATTN"},
        "refuse",
        "attention.backend",
        "KVARN",
        "does not read cache.dtype kvarn_k4v2_g128",
    ),
    Case(
        "kvarn-backend", "E", {"cache.dtype": "fp8"}, "refuse", "attention.backend", "auto", "to auto, or cache.dtype"
    ),
    Case(
        "per-token-head-backend",
        "B",
        {"cache.dtype": "int8_per_token_head"},
        "refuse",
        "attention.backend",
        "TRITON_ATTN",
        "FLASH_ATTN: it does not read cache.dtype int8_per_token_head",
    ),
    Case("sm75", "A", {}, "refuse", "model.dtype", "float16", "this card is sm75", {"card": CARDS["rtx2080ti"]}),
    Case(
        "split-kv-scope",
        "B",
        {"speculation.method": "off"},
        "correct",
        "attention.verify",
        "engine",
        "nothing to verify",
    ),
    Case(
        "split-kv-scope",
        "D",
        {"attention.verify": "split-kv"},
        "correct",
        "attention.verify",
        "engine",
        "attention.backend auto and cache.dtype fp8",
    ),
    Case(
        "int8-prefill-scope",
        "D",
        {"attention.prefill": "int8"},
        "correct",
        "attention.prefill",
        "engine",
        "cache.dtype fp8",
    ),
    Case(
        "int8-prefill-scope",
        "B",
        {"attention.prefill": "int8", "parallel.tensor": 2},
        "correct",
        "attention.prefill",
        "engine",
        "one card",
    ),
    Case(
        "int8-prefill-scope",
        "B",
        {"attention.prefill": "int8"},
        "correct",
        "attention.prefill",
        "engine",
        "this model has (16, 4, 256)",
        {"geometry": replace(big(), num_attention_heads=16)},
    ),
    Case(
        "prefix-settings", "E", {"cache.prefix": False}, "correct", "cache.retention", "dense", "cache.prefix is false"
    ),
    Case(
        "prefix-settings",
        "B",
        {"cache.prefix": False, "cache.match_unit": 64},
        "correct",
        "cache.match_unit",
        0,
        "cache.prefix is false",
    ),
    Case("match-unit-block", "B", {"cache.match_unit": 100}, "refuse", "cache.match_unit", 64, "block of 448 tokens"),
    # Six blocks at k = 7 (2176) become the published six at k = 15 (2432).
    Case(
        "retention-block",
        "E",
        K15,
        "correct",
        "cache.retention",
        14_592,
        "14592 instead of 13056: it must be a multiple of the block, 2432",
    ),
    Case(
        "batched-slots",
        "A",
        {"limits.concurrent_requests": 200, "limits.batched_tokens": 128},
        "refuse",
        "limits.batched_tokens",
        200,
        "200 slots",
    ),
    Case("card-list", "B", {"parallel.gpus": "zero"}, "refuse", "parallel.gpus", "", "'zero' is no card"),
    Case("card-list", "B", {"parallel.gpus": "0,,1"}, "refuse", "parallel.gpus", "", "'' is no card"),
    Case("card-list", "A", {"parallel.gpus": "1, 1"}, "refuse", "parallel.gpus", "1", "named twice"),
    Case(
        "card-list",
        "A",
        {"parallel.gpus": "0,1,2", "parallel.tensor": 4},
        "refuse",
        "parallel.tensor",
        2,
        "parallel.gpus names 3; set parallel.tensor to 2, or name more cards",
    ),
    Case("card-list", "B", {"parallel.gpus": "3,GPU-1a2b"}, "correct", "parallel.gpus", "3", "parallel.tensor is 1"),
    Case(
        "native-context",
        "E",
        {"limits.context_tokens": 262_145},
        "refuse",
        "limits.context_tokens",
        262_144,
        "positions up to 262144",
    ),
    Case(
        "native-context",
        "A",
        {"limits.context_tokens": 300_000} | arguments("--hf-overrides", "{}"),
        "warn",
        "limits.context_tokens",
        262_144,
        "never measured here",
    ),
    Case(
        "model-parts",
        "D",
        {},
        "refuse",
        "speculation.method",
        "off",
        "has no MTP head",
        {"geometry": replace(big(), mtp_num_hidden_layers=0)},
    ),
    Case(
        "model-parts",
        "B",
        {"model.vision": "card"},
        "refuse",
        "model.vision",
        "off",
        "has no vision tower",
        {"geometry": replace(big(), vision=None)},
    ),
    *(
        Case("arguments-forbidden", "B", arguments("--seed", "1", *words), "refuse", "engine.arguments", new, said)
        for words, new, said in (
            (["--host", "0.0.0.0"], ["--seed", "1"], "engine.arguments is --host: who may connect"),
            (["--port=8000"], ["--seed", "1"], "set server.port"),
            (["--uds", "/s"], ["--seed", "1"], "server.port"),
            (["--trust-remote-code"], ["--seed", "1"], "this model needs none"),
            (["--hf-token", "x"], ["--seed", "1"], "reads the token"),
            (["--config", "f.yaml"], ["--seed", "1"], "one by one"),
            (["--api_key=k"], ["--seed", "1"], "set server.api_key_file"),
        )
    ),
    Case(
        "arguments-vision",
        "B",
        arguments("--no-language-model-only"),
        "refuse",
        "engine.arguments",
        [],
        "placeholders without a word; take it out, and set model.vision to host or card",
    ),
    Case(
        "arguments-vision",
        "B",
        {"model.vision": "card"} | arguments("--language-model-only"),
        "refuse",
        "engine.arguments",
        [],
        "model.vision to off",
    ),
    Case(
        "arguments-log-stats",
        "B",
        {"server.request_metrics": "summary"} | arguments("--disable-log-stats"),
        "refuse",
        "engine.arguments",
        [],
        "server.request_metrics to none",
    ),
    Case(
        "arguments-shadow",
        "B",
        arguments("--max-model-len", "9000"),
        "warn",
        "engine.arguments",
        None,
        "engine.arguments is --max-model-len: it shadows limits.context_tokens; set limits.context_tokens instead",
    ),
    Case("arguments-shadow", "B", arguments("--block-size", "64"), "warn", "engine.arguments", None, "take it out"),
    Case(
        "arguments-shadow",
        "demo",
        arguments("-cc.cudagraph_mode", "FULL", "--compilation-config.mode", "0"),
        "warn",
        "engine.arguments",
        None,
        "in place of everything planned there; set graphs.mode",
    ),
]

QUIET: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("cpu-knobs", "demo", {"graphs.mode": "off", "limits.threads": 2}, {}),
    ("lookup-capability", "D", {"speculation.lookup": True}, {"capabilities": frozenset()}),
    ("accelerators", "B", {"speculation.draft_vocabulary": True}, {"capabilities": without("draft-vocabulary")}),
    ("draft-block", "C", {}, {}),
    ("adaptive-needs", "C", {}, {}),
    ("async-long-draft", "B", {}, {}),
    ("async-long-draft", "D", {"speculation.tokens": 8}, {}),
    ("kvarn-adaptive", "C", {}, {}),
    ("kvarn-adaptive", "E", K15 | {"speculation.adaptive": True, "cache.prefix": False}, {}),
    ("kvarn-mtp-graphs", "E", {}, {}),
    ("kvarn-mtp-graphs", "E", E_MTP | {"graphs.mode": "off"}, {}),
    ("kvarn-mtp-graphs", "D", {"graphs.mode": "full"}, {}),
    ("kvarn-mtp-logprobs", "E", E_MTP | {"cache.prefix": False}, {}),
    ("capture", "B", {}, {}),
    ("capture", "C", {}, {}),
    ("capture", "A", {"limits.concurrent_requests": 128, "graphs.capture_tokens": 128}, {}),
    ("capture", "C", {"limits.concurrent_requests": 8, "graphs.mode": "off"}, {}),
    ("kvarn-slots", "E", {"limits.concurrent_requests": 12}, {}),
    ("kvarn-slots", "E", {"limits.concurrent_requests": 13}, NO_CARD_OF_24),
    ("pool-above-stock", "B", {}, {}),
    ("pool-above-stock", "E", {}, {}),
    ("pool-above-stock", "B", {"memory.kv_cache_bytes": 40 * GIB}, NO_CARD_OF_24),
    ("pool-cards", "D", {"parallel.tensor": 2}, {}),
    ("tensor-long-draft", "C", {}, {}),
    ("tensor-long-draft", "B", {"parallel.tensor": 2}, {}),
    ("fp8-backend", "D", {}, {}),
    ("fp8-backend", "D", {"attention.backend": "FLASHINFER"}, {}),
    ("fp8-backend", "D", {"attention.backend": "TRITON_ATTN"}, {"card": CARDS["rtx4090"]}),
    ("fp8-backend", "D", {"attention.backend": "FLASH_ATTN"}, {"card": CARDS["h200"]}),
    ("fp8-backend", "D", {"attention.backend": "FLASH_ATTN"}, {"card": None}),
    ("float16-drafts", "A", {"model.dtype": "float16"}, {}),
    ("kvarn-match-unit", "E", {"cache.prefix": False, "cache.match_unit": 0}, {}),
    ("kvarn-match-unit", "B", {"cache.match_unit": 64}, {}),
    ("arguments-kvarn-block", "E", arguments("--block-size", "256"), {}),
    ("arguments-kvarn-block", "B", arguments("--block-size", "64"), {}),
    ("expandable-segments", "A", {"parallel.tensor": 2, "parallel.custom_all_reduce": False}, {}),
    ("expandable-segments", "A", {"parallel.tensor": 2, "graphs.mode": "off"}, {}),
    ("bf16-drafter", "B", {}, {}),
    ("mtp-4-fp8", "D", {}, {}),
    ("mtp-4-fp8", "D", {"speculation.tokens": 4, "attention.backend": "auto"}, NO_CARD_OF_24),
    ("mtp-4-fp8", "D", {"speculation.tokens": 4, "cache.dtype": "int8_per_token_head"}, {}),
    ("mtp-4-fp8", "B", {"cache.dtype": "fp8"}, {}),
    ("drafter-shape", "B", {}, {"drafter": DRAFTER}),
    ("drafter-shape", "D", {}, OTHER_DRAFTER),
    ("bf16-drafter", "D", {}, {"drafter_quantized": False}),
    ("bf16-drafter", "B", {}, {"drafter_quantized": False} | NO_CARD_OF_24),
    ("bf16-drafter", "B", {"parallel.tensor": 2}, {"drafter_quantized": False}),
    ("kvarn-long-draft", "E", K15 | {"limits.context_tokens": 221_184}, {}),
    ("kvarn-long-draft", "E", {}, {}),
    ("kvarn-long-draft", "E", K15 | {"memory.kv_cache_bytes": 6 * GIB}, {}),
    *(("tensor-divides", "A", {"parallel.tensor": cards}, {}) for cards in (1, 2, 4, 8)),
    ("arguments-pipeline", "A", arguments("-pp", "2"), {}),
    ("int8-fp8-triton", "A", {}, {}),
    ("offload-size", "D", {}, {}),
    ("offload-size", "D", {"memory.offload_gib": 16}, {}),
    ("wsl-utilization", "A", {}, {}),
    ("wsl-utilization", "B", {}, {"wsl": True}),
    ("utilization", "A", {}, {}),
    ("utilization", "B", {"memory.utilization": 0.95}, {}),
    ("sm80-drafts", "D", {}, {}),
    ("split-kv-scope", "B", {}, {}),
    ("split-kv-scope", "B", {"attention.backend": "auto"}, {}),
    ("split-kv-scope", "D", {"attention.verify": "split-kv", "attention.backend": "TRITON_ATTN"}, {}),
    ("int8-prefill-scope", "B", {"attention.prefill": "int8"}, {}),
    ("match-unit-block", "B", {"cache.match_unit": 64}, {}),
    ("match-unit-block", "B", {"cache.match_unit": 100, "speculation.tokens": 0}, {}),
    ("retention-block", "E", {}, {}),
    ("retention-block", "E", {"cache.retention": "end"}, {}),
    ("retention-block", "E", {"cache.retention": 1}, {"block_tokens": None}),
    ("card-list", "A", {"parallel.gpus": "0, GPU-1a2b", "parallel.tensor": 2}, {}),
    ("native-context", "E", {}, {}),
    ("arguments-forbidden", "B", arguments("--no-trust-remote-code"), {}),
    ("arguments-vision", "B", arguments("--language-model-only"), {}),
    ("arguments-log-stats", "B", arguments("--disable-log-stats"), {}),
    ("arguments-shadow", "B", arguments("--seed", "1"), {}),
    ("sm75", "A", {}, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.base}")
def test_a_rule_names_field_value_and_what_works(case: Case) -> None:
    wanted, where = profile(case.base).with_values(case.changes), context(**case.where)

    notice = next(found for found in of(case.rule, wanted, where) if found.field == case.field)

    assert (notice.level, notice.new) == (case.level, case.new)
    assert case.said in str(notice)
    assert str(notice).startswith(f"{case.level}: {case.field} is ")
    assert "\n" not in str(notice)
    if case.field in KNOBS and case.field != "engine.arguments":
        assert notice.value == wanted.get(case.field)
        assert notice.message.count(case.field) >= 1


@pytest.mark.parametrize(("rule", "base", "changes", "where"), QUIET, ids=lambda value: str(value)[:40])
def test_a_rule_says_nothing_beside_its_row(
    rule: str, base: str, changes: dict[str, Any], where: dict[str, Any]
) -> None:
    assert of(rule, profile(base).with_values(changes), context(**where)) == []


def test_every_rule_and_every_level_has_a_case() -> None:
    assert {(case.rule, case.level) for case in CASES} == {
        (rule.name, level) for rule in RULES for level in rule.levels
    }
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("case", [case for case in CASES if case.level != "warn"], ids=lambda case: case.rule)
def test_what_a_rule_proposes_works(case: Case) -> None:
    if case.field not in KNOBS:
        return
    wanted, where = profile(case.base).with_values(case.changes), context(**case.where)

    after = of(case.rule, wanted.with_values({case.field: case.new}), where)

    assert [notice for notice in after if notice.field == case.field] == []


# All together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_profiles_are_right_as_they_are(name: str) -> None:
    where = context(geometry=geometries.load(profile(name).model.name))

    assert apply(profile(name), where) == (profile(name), ())


def test_profiles_on_an_engine_that_can_do_nothing_yet() -> None:
    """What is asked of the engine is only what it can do; and C, whose drafts need lookup, becomes drafts of 7."""
    plain = context(capabilities=frozenset())
    for name in "ABCD":
        corrected, notices = apply(profile(name), plain)
        assert refusal(notices) is None
        assert engine_settings(corrected) == {}
    reproduction, notices = apply(profile("C"), plain)

    assert reproduction.speculation.tokens == 7
    assert not reproduction.speculation.adaptive
    assert [(notice.level, notice.field) for notice in notices] == [
        ("correct", "speculation.lookup"),
        ("correct", "speculation.adaptive"),
        ("correct", "attention.verify"),
        ("correct", "speculation.tokens"),
    ]
    error = refusal(apply(profile("E"), plain)[1])
    assert error is not None
    assert (error.message, error.fix) == (
        "cache.dtype is kvarn_k4v2_g128: this engine has no KVarN cache yet",
        "use profile D: fp8, up to 150000 tokens",
    )


def test_later_rules_see_what_was_corrected() -> None:
    """Drafts of 15 become 7 for want of lookup, so that nothing is said about their scheduler, graphs or retention."""
    wanted = profile("E").with_values({"speculation.tokens": 15, "limits.concurrent_requests": 4})

    corrected, notices = apply(wanted, context(capabilities=without("lookup-drafting")))

    assert [notice.field for notice in notices] == ["speculation.lookup", "speculation.tokens"]
    assert corrected.scheduler.asynchronous and corrected.cache.retention == 13_056


def test_another_method_takes_its_own_settings_along() -> None:
    """`--speculation-method off` on top of B needs no second flag."""
    corrected, notices = apply(profile("B").with_values({"speculation.method": "off"}), context())

    assert refusal(notices) is None
    assert (corrected.speculation.tokens, corrected.speculation.lookup, corrected.attention.verify) == (
        0,
        False,
        "engine",
    )


def test_refusals_come_first_and_as_one_error() -> None:
    wanted = profile("E").with_values(
        E_MTP | {"model.dtype": "float16", "parallel.tensor": 3, "limits.context_tokens": 262_145}
    )

    _, notices = apply(wanted, context())

    levels = [notice.level for notice in notices]
    assert levels == sorted(levels, key=["refuse", "correct", "warn"].index)
    assert set(levels) == {"refuse", "correct", "warn"}
    error = refusal(notices)
    assert isinstance(error, BadInputError)
    assert error.message.startswith("3 settings do not work:")
    for part in ("model.dtype is float16", "parallel.tensor is 3", "limits.context_tokens is 262145"):
        assert part in error.message
    assert refusal(()) is None


def test_who_set_a_value_is_said() -> None:
    sources = {"parallel.tensor": Source("flag", "--parallel-tensor"), "model.dtype": Source("default")}
    wanted = profile("B").with_values({"parallel.tensor": 3, "model.dtype": "float16"})

    said = "\n".join(map(str, apply(wanted, context(sources=sources))[1]))

    assert "parallel.tensor is 3 (flag --parallel-tensor): num_" in said
    assert "model.dtype is float16: with" in said


@pytest.mark.parametrize("words", [["--api-key", "hunter2"], ["--api_key=hunter2"], ["--hf-token=hunter2"]])
def test_a_secret_in_the_arguments_is_not_repeated(words: list[str]) -> None:
    _, notices = apply(profile("B").with_values({"engine.arguments": words}), context())

    assert refusal(notices) is not None
    assert "hunter2" not in repr(notices)


@pytest.mark.parametrize(
    ("changes", "wsl", "usable"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"memory.offload_gib": 16}, False, False),
        (arguments("--kv-transfer-config", "{}"), False, False),
        ({"parallel.tensor": 2}, False, False),
        ({"parallel.tensor": 2, "parallel.custom_all_reduce": False}, False, True),
        ({"parallel.tensor": 2, "graphs.mode": "off"}, False, True),
    ],
)
def test_expandable_segments(changes: dict[str, Any], wsl: bool, usable: bool) -> None:
    assert expandable_segments(profile("B").with_values(changes), context(wsl=wsl))[0] is usable
    assert expandable_segments(profile("demo"), context()) == (False, "there is no card")


# Values worth trying: bounds, what profiles have, and what rules look for.
NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    12,
    15,
    16,
    31,
    64,
    100,
    128,
    200,
    8192,
    57_344,
    221_185,
    245_760,
    262_145,
    5 * GIB,
    6 * GIB,
)
TEXTS = {"parallel.gpus": ("", "0", "0,1", "1,1", "0,1,2", "x", "GPU-1a")}
ARGUMENTS: tuple[list[str], ...] = (
    [],
    ["--host", "0.0.0.0"],
    ["--no-language-model-only"],
    ["-pp", "3", "--api-key=k"],
    ["--block-size", "100"],
    ["--disable-log-stats", "--max-model-len=1"],
    ["--hf-overrides", "{}"],
)


def values(knob: Knob) -> st.SearchStrategy[Any]:
    numbers = [n for n in NUMBERS if (knob.minimum or 0) <= n <= (knob.maximum or math.inf)]
    return {
        "bool": st.booleans(),
        "int": st.sampled_from(numbers or [knob.default]),
        "float": st.sampled_from([0.5, 0.88, 0.91, 0.93, 0.94, 0.95]),
        "text": st.sampled_from(TEXTS.get(knob.path, (knob.default,))),
        "choice": st.sampled_from(knob.choices or ("",)),
        "choice or int": st.sampled_from([*knob.choices, *(n for n in numbers if n)]),
        "list": st.sampled_from(ARGUMENTS),
    }[knob.kind]


SECTIONS = ("memory", "cache", "attention", "speculation", "graphs", "scheduler", "activations", "parallel", "engine")
OTHERS = ("model.vision", "model.dtype", "server.request_metrics", "limits.concurrent_requests")
TRIED = {
    knob.path: values(knob)
    for knob in knobs()
    if knob.section in SECTIONS or knob.path in (*OTHERS, "limits.context_tokens", "limits.batched_tokens")
}
PROFILES = st.builds(
    lambda name, changes: profile(name).with_values(
        {key: value for key, value in changes.items() if value is not None}
    ),
    st.sampled_from(sorted(shipped())),
    st.fixed_dictionaries({}, optional=TRIED),
)
CONTEXTS = st.builds(
    context,
    geometry=st.sampled_from([None, big(), replace(big(), mtp_num_hidden_layers=0, vision=None)]),
    card=st.sampled_from([None, *(CARDS[name] for name in ("rtx2080ti", "rtx3090", "rtx4090", "rtx5090", "h200"))]),
    capabilities=st.one_of(
        st.just(EVERYTHING), st.just(frozenset()), st.frozensets(st.sampled_from(sorted(EVERYTHING)))
    ),
    wsl=st.booleans(),
    drafter_quantized=st.booleans(),
    block_tokens=st.sampled_from([None, block_tokens]),
    sources=st.sampled_from([{}, {path: Source("host file", "/h.toml") for path in KNOBS}]),
)


@given(PROFILES, CONTEXTS)
def test_any_combination_ends_refused_or_with_nothing_left_to_correct(wanted: Profile, where: Context) -> None:
    corrected, notices = apply(wanted, where)
    again, left = apply(corrected, where)

    assert again == corrected
    assert [notice for notice in left if notice.level == "correct" and notice.field in KNOBS] == []
    assert [notice for notice in left if notice.level != "correct"] == [
        notice for notice in notices if notice.level != "correct"
    ]
    changed = {path for path in KNOBS if wanted.get(path) != corrected.get(path)}
    assert changed <= {notice.field for notice in notices if notice.level == "correct"}


@given(PROFILES, CONTEXTS)
def test_the_nearest_setting_of_a_refusal_works(wanted: Profile, where: Context) -> None:
    corrected, notices = apply(wanted, where)
    declared = {(rule.name, level) for rule in RULES for level in rule.levels}

    for notice in notices:
        assert (notice.rule, notice.level) in declared
        assert notice.fix
        if notice.level == "refuse":
            fixed = corrected.with_values({notice.field: notice.new})
            assert notice not in of(notice.rule, fixed, where)


@given(PROFILES)
def test_what_a_plain_engine_is_asked_for_it_can_do(wanted: Profile) -> None:
    corrected, notices = apply(wanted, context(capabilities=frozenset()))

    if refusal(notices) is None and corrected.device == "cuda":
        assert engine_settings(corrected) == {}


# Rows without a rule, and what rules take for granted ---------------------------------------------------------------


@pytest.mark.parametrize("value", ["", "mlp|linear_attn", ".", "1"])
def test_int8_layers_take_no_pattern(value: str) -> None:
    data = read_table(shipped()["A"], "profile", "A")
    data["activations"]["int8"] = value

    with pytest.raises(BadInputError, match=r"activations\.int8 is"):
        parse(data, "A.toml")


def test_int8_layers_are_in_the_key_of_compiled_code() -> None:
    """vLLM puts additional_config into that key, so three choices are three caches."""
    configs = set()
    for choice in ("off", "mlp", "all"):
        flags = engine_flags(profile("A").with_values({"activations.int8": choice}), PATHS)
        configs.add(flags[flags.index("--additional-config") + 1] if "--additional-config" in flags else "")

    assert len(configs) == 3 and "" in configs


def other_value(knob: Knob, now: Any) -> Any:
    """A value of `knob` that is not `now`."""
    if knob.kind == "bool":
        return not now
    if knob.kind in ("choice", "choice or int"):
        return next(choice for choice in knob.choices if choice != now)
    if knob.kind == "text":
        return "3"
    if knob.kind == "list":
        return ["--seed", "1"]
    return next(n for n in (1, 2, 4, 64, 2000, 0.5) if n != now and (knob.minimum or 0) <= n <= (knob.maximum or n))


# Read by the launcher, the demo or the environment of the engine, not by its flags.
ELSEWHERE = {
    "server.api_key_file",
    "server.start_seconds",
    "limits.threads",
    "chat.max_tokens",
    "chat.temperature",
}
# Only said beside another knob of the server.
BESIDE = {"server.tool_parser", "server.tool_strictness"}


def test_what_the_cpu_does_not_have_is_what_its_flags_ignore() -> None:
    """The list of such knobs is held against the flags themselves, in both directions."""
    base = profile("demo").with_values({"graphs.mode": "engine"})
    plain = engine_flags(base, PATHS)
    ignored = {
        path
        for path, knob in KNOBS.items()
        if engine_flags(base.with_values({path: other_value(knob, base.get(path))}), PATHS) == plain
    }

    paths_given = {"model.name", "model.variant", "model.directory"}
    assert ignored - paths_given - ELSEWHERE - BESIDE == set(CUDA_ONLY)
    assert set(CPU_ONLY) <= ELSEWHERE


def test_the_table_has_every_rule_and_every_row_without_one() -> None:
    rows = rule_rows()

    assert [row[0] for row in rows] == [rule.name for rule in RULES] + [row.name for row in SETTLED]
    assert all(len(row) == 4 and all(row) and "|" not in row[0] for row in rows)
    assert {row[1] for row in rows} >= {"refuse", "correct", "warn", "cannot happen"}
