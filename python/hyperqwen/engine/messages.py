"""The words of vLLM's log that our own programs read, as vLLM 0.31.0's source has them.

Patterns are made from these texts, and checks/engine/test_log_messages.py looks each one up in the source that is built
here: a release that words one differently fails there, and not in front of a user. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

_PLACE = re.compile(r"%(?:\.\d+)?[sdfr]|\{\}")
_NUMBER = r"(-?[\d,]+(?:\.\d+)?)"


@dataclass(frozen=True)
class Message:
    """A message of vLLM's log.

    file: of vLLM's source, below vllm/. text: its words there, or how they begin; %s, %d, %.2f and {} stand for values.
    names: what each value is, None for one that is of no interest. A name that ends in _bytes is in GiB in the log.
    """

    file: str
    text: str
    names: tuple[str | None, ...] = ()

    @property
    def begin(self) -> str:
        """Its words before the first value."""
        return _PLACE.split(self.text)[0]


START = Message("v1/engine/core.py", "Initializing a V1 LLM engine (v%s) with config: %s")
"""Where an engine begins to speak: a file may hold the words of several."""

# One for each of two runners: which one an engine takes depends on the model.
_RUNNERS = ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")
_LOADED = ("Model loading took %s GiB memory and %.6f seconds", ("weights_bytes", None))
_CAPTURED = ("Graph capturing finished in %.0f secs, took %.2f GiB", (None, "graphs_bytes"))

MEMORY = (
    *(Message(file, text, names) for file in _RUNNERS for text, names in (_LOADED, _CAPTURED)),
    Message("v1/worker/gpu_worker.py", "Available KV cache memory: %s GiB", ("pool_bytes",)),
    Message(
        "v1/worker/gpu_worker.py",
        "Initial free memory {} GiB, reserved {} GiB memory for KV Cache as specified by kv_cache_memory_bytes",
        ("free_bytes", "pool_bytes"),
    ),
    Message(
        "v1/worker/gpu_worker.py",
        "Free memory on device ({}/{} GiB) on startup. Desired GPU memory utilization is ({}, {} GiB). "
        "Actual usage is {} GiB for consumed memory (weights + non-torch), {} GiB for peak activation, "
        "and {} GiB for CUDAGraph memory.",
        ("free_bytes", "total_bytes", None, "requested_bytes", "consumed_bytes", "peak_bytes", "graphs_bytes"),
    ),
    Message(
        "v1/worker/gpu_worker.py",
        "CUDA graph pool memory: %s GiB (actual), %s GiB (estimated), difference",
        ("graphs_bytes", "graphs_estimate_bytes"),
    ),
    Message(
        "v1/worker/cpu_worker.py", "Explicitly set ({}/{}) GiB for KV cache on node", ("pool_bytes", "total_bytes")
    ),
    Message("platforms/interface.py", "Setting attention block size to %d tokens", ("block_tokens",)),
    Message(
        "v1/core/kv_cache_utils.py",
        "%s KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
        (None, "pool_tokens", "context_tokens", "concurrency"),
    ),
)
"""Each value by a name of `hyperqwen.runtime.measured.Measured`."""

_WEIGHTS = "model_executor/model_loader/weight_utils.py"
SHARDS = (Message(_WEIGHTS, "Loading safetensors checkpoint shards"), Message(_WEIGHTS, "Multi-thread loading shards"))
CAPTURES = (
    Message(_RUNNERS[0], "Capturing CUDA graphs ({}, {})"),
    Message("v1/worker/gpu/cudagraph_utils.py", "Capturing CUDA graphs"),
    Message("v1/worker/gpu/spec_decode/dflash/speculator.py", "Capturing {} CUDA graphs"),
    Message("v1/worker/gpu/spec_decode/autoregressive/speculator.py", "Capturing decode CUDA graphs"),
)
"""What progress bars are called, before ": 38%" and "3/8"."""

WEIGHTS_READ = Message("model_executor/model_loader/default_loader.py", "Loading weights took %.2f seconds", ("s",))
LOADED = tuple(Message(file, _LOADED[0], ("gib", "s")) for file in _RUNNERS)
TRACED = Message("compilation/backends.py", "Dynamo bytecode transform time: %.2f s", ("s",))
COMPILES = Message("compilation/backends.py", "Compiling a graph for compile range %s takes %.2f s", (None, "s"))
COMPILED = Message("compilation/monitor.py", "torch.compile took %.2f s in total", ("s",))
POOL_MEMORY = Message("v1/worker/gpu_worker.py", "Available KV cache memory: %s GiB", ("gib",))
POOL = Message(
    "v1/core/kv_cache_utils.py",
    "%s KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
    (None, "tokens", "context", "requests"),
)
CAPTURED = tuple(Message(file, _CAPTURED[0], ("s", "gib")) for file in _RUNNERS)
SET_UP = Message("v1/engine/core.py", "init engine (profile, create kv cache, warmup model) took %.2f s", ("s",))

STARTUP = (*SHARDS, *CAPTURES, WEIGHTS_READ, *LOADED, TRACED, COMPILES, COMPILED, POOL_MEMORY, POOL, *CAPTURED, SET_UP)
"""What moves while an engine starts; `hyperqwen.runtime.startup` shows it."""

GROUP_TOKENS = Message("v1/core/kv_cache_utils.py", "kv cache group sizes %s")
"""Tokens in a block of each group, as a list."""

GRAPHS_UNPLANNED = Message("v1/worker/gpu_worker.py", "CUDA graph memory profiling is disabled")
"""What graphs were estimated at is not taken off the pool."""

_LOGGER = "entrypoints/serve/utils/request_logger.py"
CONTENT = (
    Message(_LOGGER, "Request %s details: prompt: %r"),
    Message(_LOGGER, "Request %s JSON body: %s"),
    Message(_LOGGER, "Received request %s: params: %s"),
    Message(_LOGGER, "Generated response %s%s"),
    Message("entrypoints/serve/middleware/log_response.py", "response_body={%s}"),
    Message("entrypoints/chat_utils.py", "Input prompt: %s"),
    Message("entrypoints/anthropic/serving.py", "Received messages request %s"),
)
"""What repeats a prompt, an answer, or a request's parameters (grammars, stop words)."""


@cache
def pattern(message: Message) -> re.Pattern[str]:
    """The pattern of `message`, with a group for each value that has a name.

    Raises ValueError for one whose names are not as many as its values.
    """
    pieces = _PLACE.split(message.text)
    names = message.names or (None,) * (len(pieces) - 1)
    if len(pieces) != len(names) + 1:
        raise ValueError(f"{message.text!r} has {len(pieces) - 1} values, and {len(names)} names")
    groups = [*(_NUMBER if name else r".*?" for name in names), ""]
    return re.compile("".join(re.escape(piece) + group for piece, group in zip(pieces, groups, strict=True)))


def values(message: Message, line: str) -> Iterator[tuple[str, str]] | None:
    """The named values of `message` in `line`, as text; None where it is another message."""
    found = pattern(message).search(line)
    if found is None:
        return None
    return zip((name for name in message.names if name), found.groups(), strict=True)
