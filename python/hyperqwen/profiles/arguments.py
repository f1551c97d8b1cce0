"""Flags that a profile gives the engine beside the plan (engine.arguments), read as vLLM's parser reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

PLANNED: Mapping[str, str | None] = {
    "--additional-config": None,
    "--api-server-count": None,
    "--async-scheduling": "scheduler.asynchronous",
    "--attention-backend": "attention.backend",
    "--attention-config": "attention.backend",
    "--block-size": None,
    "--compilation-config": "graphs.mode",
    "--cudagraph-capture-sizes": "graphs.capture_tokens",
    "--data-parallel-size": None,
    "--default-chat-template-kwargs": "chat.thinking",
    "--device-ids": "parallel.gpus",
    "--device-memory-utilization": "memory.utilization",
    "--disable-custom-all-reduce": "parallel.custom_all_reduce",
    "--dtype": "model.dtype",
    "--enable-auto-tool-choice": "server.tools",
    "--enable-force-include-usage": "server.request_metrics",
    "--enable-log-requests": None,
    "--enable-per-request-metrics": "server.request_metrics",
    "--enable-prefix-caching": "cache.prefix",
    "--enable-prompt-tokens-details": None,
    "--enforce-eager": "graphs.mode",
    "--gdn-prefill-backend": "attention.gdn_prefill",
    "--gpu-memory-utilization": "memory.utilization",
    "--kv-cache-dtype": "cache.dtype",
    "--kv-cache-memory-bytes": "memory.kv_cache_bytes",
    "--kv-offloading-size": "memory.offload_gib",
    "--language-model-only": "model.vision",
    "--limit-mm-per-prompt": "model.vision",
    "--load-format": "model.load_format",
    "--mamba-cache-mode": "cache.prefix",
    "--mamba-ssm-cache-dtype": "cache.state_dtype",
    "--max-cudagraph-capture-size": "graphs.capture_tokens",
    "--max-model-len": "limits.context_tokens",
    "--max-num-batched-tokens": "limits.batched_tokens",
    "--max-num-seqs": "limits.concurrent_requests",
    "--mm-processor-kwargs": "model.vision",
    "--model": "model.directory",
    "--optimization-level": "graphs.mode",
    "--per-request-spec-decode-metrics": "server.request_metrics",
    "--pipeline-parallel-size": None,
    "--prefix-cache-retention-interval": "cache.retention",
    "--prefix-match-unit": "cache.match_unit",
    "--quantization": None,
    "--reasoning-parser": "server.reasoning_parser",
    "--served-model-name": "model.served_name",
    "--shutdown-timeout": "server.drain_seconds",
    "--spec-method": "speculation.method",
    "--spec-model": "model.drafter",
    "--spec-tokens": "speculation.tokens",
    "--speculative-config": "speculation.method",
    "--sse-keep-alive-interval": "server.keep_alive_seconds",
    "--tensor-parallel-size": "parallel.tensor",
    "--tool-call-parser": "server.tool_parser",
    "--tool-strict-level": "server.tool_strictness",
}
"""Flags of `vllm serve` that a plan sets or counts with, and the knob for each (None: there is none)."""

FORBIDDEN: Mapping[str, tuple[str, str]] = {
    "--api-key": ("every user of this machine reads the key there", "put it into a file and set server.api_key_file"),
    "--config": ("a file of flags would shadow the plan unseen", "put its flags into engine.arguments one by one"),
    "--hf-token": ("every user of this machine reads the token there", "take it out: serving fetches nothing"),
    "--host": ("who may connect without a key is decided by server.host", "set server.host"),
    "--port": ("readiness and health are asked for at server.port", "set server.port"),
    "--trust-remote-code": ("code in the model's folder would run here", "take it out: this model needs none"),
    "--uds": ("readiness and health are asked for at server.port", "take it out, and set server.host and server.port"),
}
"""Flags that no profile may have: why, and what to do instead."""

_SECRET = frozenset({"--api-key", "--hf-token"})
_OTHERS = ("--disable-log-stats", "--hf-overrides", "--kv-transfer-config")
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-dc": "--diffusion-config",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-q": "--quantization",
    "-O": "--optimization-level",
}
_KNOWN = (*FORBIDDEN, *PLANNED, *_OTHERS)
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True)
class Flag:
    """One flag: its full name without "no-" and whether it had that, as it was spelled (without its value), its values,
    and the words it takes up."""

    name: str
    spelled: str
    negated: bool
    values: tuple[str, ...]
    span: tuple[int, int]

    @property
    def number(self) -> int:
        """Its value; 0 where it has none that is a whole number, which vLLM will say itself."""
        value = self.values[0] if self.values else ""
        return int(value) if value.isascii() and value.isdigit() else 0


def parse(arguments: list[str]) -> list[Flag]:
    """The flags among `arguments`. vLLM takes underscores for dashes, a value after "=" as well as in the next words,
    one part of a JSON value after a dot, and the start of a name where that is enough; so all of that is read here."""
    starts = [index for index, word in enumerate(arguments) if _FLAG.match(word)]
    found = []
    for start, end in pairwise([*starts, len(arguments)]):
        spelled, equals, value = arguments[start].partition("=")
        values = ((value,) if equals else ()) + tuple(arguments[start + 1 : end])
        name, negated = _name(spelled)
        if not spelled.startswith("--") and spelled not in _SHORT and spelled[:2] in _SHORT:
            values = (spelled[2:], *values)
        found.append(Flag(name, spelled, negated, values, (start, end)))
    return found


def secrets(arguments: list[str]) -> list[str]:
    """The keys and tokens among `arguments`, in whichever spelling of their flags."""
    found: list[str] = []
    for flag in parse(arguments):
        if flag.name in _SECRET:
            end = flag.span[1]
            # A key may begin as a flag does: vLLM would refuse it, and it is no less a key.
            found += flag.values or arguments[end : end + 1]
    return [value for value in dict.fromkeys(found) if value]


def without(arguments: list[str], flag: Flag) -> list[str]:
    """`arguments` less `flag` and its values."""
    start, end = flag.span
    return arguments[:start] + arguments[end:]


def _short(spelled: str) -> str:
    """What argparse takes a word with one dash for: a flag, one letter's flag with its value, or the only flag that
    begins so."""
    if spelled in _SHORT:
        return _SHORT[spelled]
    if spelled[:2] in _SHORT:
        return _SHORT[spelled[:2]]
    longer = [flag for flag in _SHORT if flag.startswith(spelled)]
    return _SHORT[longer[0]] if len(longer) == 1 else spelled


def _name(spelled: str) -> tuple[str, bool]:
    """The full name, and whether it was negated."""
    if not spelled.startswith("--"):
        return _short(spelled), False
    name = spelled.partition(".")[0].replace("_", "-")
    negated = name.startswith("--no-")
    if negated:
        name = "--" + name.removeprefix("--no-")
    if name not in _KNOWN:
        name = next((flag for flag in _KNOWN if flag.startswith(name)), name)
    return name, negated
