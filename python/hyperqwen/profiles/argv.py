"""A profile as the flags of `vllm serve` (0.31.0). The key is never among them: every user can read argv."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperqwen.errors import BadInputError
from hyperqwen.profiles.profile import Profile

CAPTURE_LIMIT = 64
"""Tokens of the largest batch captured unless the profile says otherwise: 128 ends the engine at the first batch."""

SIXTEEN_BITS = "bfloat16"
"""Cache type of 16 bits; vLLM's "auto", which is the type of activations."""

_GRAPHS = {"full": "FULL", "piecewise": "PIECEWISE", "both": "FULL_AND_PIECEWISE"}


@dataclass(frozen=True)
class ModelPaths:
    """Folders of the prepared model and of the DFlash2 drafter (None where the profile has none)."""

    model: Path
    drafter: Path | None = None


def model_paths(profile: Profile, models: Path) -> ModelPaths:
    """Where the profile's files are: its own `directory` and `drafter`, else the usual names below `models`.

    Both are absolute. Raises BadInputError for one that begins with "~".
    """
    name = profile.model.name
    model = profile.model.directory or str(models / (name if profile.model.variant == "base" else f"{name}-fast"))
    drafter = profile.model.drafter or str(models / f"{name}-dflash2")
    drafted = profile.speculation.method == "dflash2"
    return ModelPaths(
        _absolute(model, "model.directory" if profile.model.directory else "the models folder (--models)"),
        _absolute(drafter, "model.drafter" if profile.model.drafter else "the models folder (--models)")
        if drafted
        else None,
    )


def _absolute(text: str, field: str) -> Path:
    # The engine runs in another folder than its launcher; and "~" is a shell's to read, of which there is none here.
    if text.startswith("~"):
        raise BadInputError(f"{field}: {text} begins with ~", f"write it in full: {os.path.expanduser(text)}")
    return Path(text).absolute()


def capture_tokens(profile: Profile) -> int:
    """Tokens of the largest batch that graphs are captured for: what was set, or slots x (k+1) up to the limit."""
    if profile.graphs.capture_tokens:
        return profile.graphs.capture_tokens
    return min(CAPTURE_LIMIT, profile.limits.concurrent_requests * (profile.speculation.tokens + 1))


def engine_settings(profile: Profile) -> dict[str, Any]:
    """What only our own engine code reads. It travels in vLLM's additional configuration, which is part of the key of
    compiled code: a graph that was compiled with other settings is never replayed."""
    spec = profile.speculation
    found: dict[str, Any] = {}
    if spec.lookup:
        found["lookup"] = {"adaptive": spec.adaptive, "chains": spec.chains}
    if spec.method == "mtp" and spec.draft_vocabulary:
        found["draft_vocabulary"] = True
    if profile.attention.verify != "engine":
        found["verify_attention"] = profile.attention.verify
    if profile.attention.prefill != "engine":
        found["prefill_attention"] = profile.attention.prefill
    if profile.activations.int8 != "off":
        found["int8_activations"] = profile.activations.int8
    if profile.memory.embedding_in_host:
        found["embedding_in_host"] = True
    if profile.model.vision == "host":
        found["vision_in_host"] = True
    return found


def engine_flags(profile: Profile, paths: ModelPaths) -> list[str]:
    """The flags that make `vllm serve` the server that `profile` describes."""
    flags = [
        "--model", str(paths.model),
        "--served-model-name", profile.model.served_name,
        "--load-format", profile.model.load_format,
        "--dtype", profile.model.dtype,
        "--host", profile.server.host,
        "--port", str(profile.server.port),
        "--api-server-count", "1",
        "--max-model-len", str(profile.limits.context_tokens),
        "--max-num-seqs", str(profile.limits.concurrent_requests),
    ]  # fmt: skip
    flags += _cuda(profile, paths) if profile.device == "cuda" else _cpu(profile)
    flags += _interface(profile)
    return flags + list(profile.engine.arguments)


def _cpu(profile: Profile) -> list[str]:
    flags = ["--no-enable-prefix-caching"] if not profile.cache.prefix else ["--enable-prefix-caching"]
    if profile.memory.kv_cache_bytes:
        flags += ["--kv-cache-memory-bytes", str(profile.memory.kv_cache_bytes)]
    # The CPU's Gated-DeltaNet kernels know bfloat16 states and graphs do not exist there.
    return [*flags, "--enforce-eager"]


def _cuda(profile: Profile, paths: ModelPaths) -> list[str]:
    memory, cache, attention, parallel = profile.memory, profile.cache, profile.attention, profile.parallel
    flags = [
        "--max-num-batched-tokens", str(profile.limits.batched_tokens),
        "--gpu-memory-utilization", f"{memory.utilization:g}",
        "--kv-cache-dtype", "auto" if cache.dtype == SIXTEEN_BITS else cache.dtype,
        "--mamba-ssm-cache-dtype", cache.state_dtype,
    ]  # fmt: skip
    if memory.kv_cache_bytes:
        flags += ["--kv-cache-memory-bytes", str(memory.kv_cache_bytes)]
    if cache.dtype.startswith("kvarn"):
        # A tile of the cache is 128 tokens, and a block is whole tiles.
        flags += ["--block-size", "128"]
    if cache.prefix:
        retention = {"dense": "None", "end": "0"}.get(str(cache.retention), str(cache.retention))
        flags += ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
        flags += ["--prefix-cache-retention-interval", retention]
        if cache.match_unit:
            flags += ["--prefix-match-unit", str(cache.match_unit)]
    else:
        flags.append("--no-enable-prefix-caching")
    if attention.backend != "auto":
        flags += ["--attention-backend", attention.backend]
    if attention.gdn_prefill != "auto":
        flags += ["--gdn-prefill-backend", attention.gdn_prefill]
    speculative = _speculative(profile, paths)
    if speculative:
        flags += ["--speculative-config", _json(speculative)]
    flags += _compilation(profile)
    flags.append("--async-scheduling" if profile.scheduler.asynchronous else "--no-async-scheduling")
    if parallel.tensor > 1:
        flags += ["--tensor-parallel-size", str(parallel.tensor)]
        if not parallel.custom_all_reduce:
            flags.append("--disable-custom-all-reduce")
    if memory.offload_gib:
        flags += ["--kv-offloading-size", str(memory.offload_gib)]
    flags += _vision(profile)
    settings = engine_settings(profile)
    if settings:
        flags += ["--additional-config", _json({"hyperqwen": settings})]
    return flags


def _speculative(profile: Profile, paths: ModelPaths) -> dict[str, Any]:
    spec = profile.speculation
    if spec.method == "off":
        return {}
    method = {"dflash2": "dflash"}.get(spec.method, spec.method)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": spec.tokens}
    if paths.drafter is not None:
        config["model"] = str(paths.drafter)
        if profile.cache.dtype != SIXTEEN_BITS:
            # The drafter's own cache stays in 16 bits: its window is short, and the target's backend may not take it.
            config |= {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "auto"}
    if spec.method != "ngram":
        # Without it the drafts count as certain, and acceptance of sampled requests drops by a sixth.
        config["draft_sample_method"] = spec.sampling
    return config


def _compilation(profile: Profile) -> list[str]:
    if profile.graphs.mode == "off":
        return ["--enforce-eager"]
    config: dict[str, Any] = {
        "max_cudagraph_capture_size": capture_tokens(profile),
        "custom_ops": ["+rms_norm", "+silu_and_mul"],
    }
    if profile.graphs.mode in _GRAPHS:
        config["cudagraph_mode"] = _GRAPHS[profile.graphs.mode]
    return ["--compilation-config", _json(config)]


def _vision(profile: Profile) -> list[str]:
    if profile.model.vision == "off":
        return ["--language-model-only"]
    # One picture of at most 2048 tokens: vLLM reserves memory for the largest one that it may get.
    return [
        "--limit-mm-per-prompt", _json({"image": {"count": 1}}),
        "--mm-processor-kwargs", _json({"size": {"shortest_edge": 65536, "longest_edge": 2097152}}),
    ]  # fmt: skip


def _interface(profile: Profile) -> list[str]:
    server = profile.server
    flags = ["--no-enable-log-requests", "--enable-prompt-tokens-details"]
    if server.reasoning_parser != "none":
        flags += ["--reasoning-parser", server.reasoning_parser]
    if server.tools:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", server.tool_parser]
        flags += ["--tool-strict-level", server.tool_strictness]
    if server.keep_alive_seconds:
        flags += ["--sse-keep-alive-interval", str(server.keep_alive_seconds)]
    if server.request_metrics != "none":
        flags += ["--enable-per-request-metrics", "--enable-force-include-usage"]
        flags += ["--per-request-spec-decode-metrics", server.request_metrics]
    if not profile.chat.thinking:
        flags += ["--default-chat-template-kwargs", _json({"enable_thinking": False})]
    if server.drain_seconds:
        flags += ["--shutdown-timeout", str(server.drain_seconds)]
    return flags


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
