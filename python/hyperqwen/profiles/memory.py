"""What a server takes of a card, to the byte: the memory law of vLLM 0.31.0 for a hybrid model.

The pool of keys, values and recurrent states follows from the source (kv_cache_interface.py, core/kv_cache_utils.py,
platforms/interface.py, layers/attention/attention.py), so its figures are exact; checks/memory_law.py asks vLLM itself
for the same numbers. What surrounds the pool (activations, graphs, the context of CUDA) was measured by others; each
such figure says where, and `Figure.measured` marks it. Standard library only: the engine's Python reads this too.

    pool        = blocks of equal size, drawn from by every group of layers
    page        = what one layer needs of a block: attention holds B tokens, a recurrent layer one state
    B           = step * ceil(state / (step * bytes per token)): an attention page covers a state
    block       = layers in a group * page
    a request   = sum over groups: attention ceil(context / B), recurrence k+2 states (k+1 without the prefix cache),
                  a drafter's window ceil(min(window - 1 + tokens in flight, context) / B) + 1
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from hyperqwen.engine.kv_groups import group_size, stock_group_size
from hyperqwen.errors import BadInputError
from hyperqwen.prepare.geometry import Drafter, Geometry, check_tensor_parallel, key_value_heads
from hyperqwen.prepare.weights import SCHEMES, Placement, Scheme, loaded_weights

MIB = 1 << 20
GIB = 1 << 30

CacheType = Literal[
    "bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128", "kvarn_k4v4_g128"
]
Backend = Literal["auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "KVARN", "CPU_ATTN"]

KVARN_TILE = 128
"""Tokens of a KVarN tile: blocks are whole tiles, and a drafter's layers beside it have blocks of one."""

# What was measured, on an RTX 3090 with Qwen3.8-27B and 2048 tokens a step. -----------------------------------------

_MEASURED_WIDTH = 3 * 17_408 + 4 * 5120
_MEASURED_DEPTH = 64 * 5120

OVERHEAD = int(0.41 * GIB)
_OVERHEAD_SOURCE = "HyperQwen's records, RTX 3090: resident 14.26 GiB, of which weights 13.85"

ACTIVATIONS = int(0.45 * GIB)
_ACTIVATIONS_SOURCE = "what the pools published for 0.30 and 0.31 (A, D, MTP) leave; scaled by tokens a step and width"

GRAPHS = int(0.33 * GIB)
GRAPHS_TOKENS = 64
_GRAPHS_SOURCE = "HyperQwen's records, RTX 3090: 0.33 GiB at 64 captured tokens without verify scratch; scaled by both"

UNPROFILED = 631 * MIB
UNPROFILED_PER_SLOT = 650 * MIB // 64
_UNPROFILED_SOURCE = "HyperQwen's records, RTX 3090: 174 MiB left at 0.94 with 64 slots, 650 of them their prefills"

KVARN_SHARE = 0.15
_KVARN_SOURCE = "share of what weights leave of the planned memory; the published KVarN pools fit with all of it taken"

VISION_IN_HOST = 9 * MIB
_VISION_SOURCE = "HyperQwen's records, RTX 3090: 9 MiB resident with the tower in host memory"

WSL_RESERVE = (24_564 - 23_371) * MIB
_WSL_SOURCE = "HyperQwen's records, RTX 3090: 23,371 of 24,564 MiB usable under WSL2"

VERIFY_SEGMENTS = 16
VERIFY_FALLBACK_REQUESTS = 256
VERIFY_QUERY_ROWS = 64
"""Split-KV verification: parts that a sequence is split into, requests that its scratch is sized for unless it knows
better, and query rows that one tile holds; as HyperQwen has them."""

MATERIALIZE_TOKENS = 262_144
"""Most tokens that KVarN's prefill unpacks to 16 bits at once, as HyperQwen has it."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A server to be planned.

    geometry, scheme: the model and its quantization.
    drafter: None (also for n-grams), "mtp", or a DFlash2 drafter. draft_tokens: k.
    context_tokens: longest prompt and answer together. concurrent_requests: slots. resident_requests: how many
        requests of that length the pool must hold at once; vLLM asks for 1 and lets the rest wait.
    batched_tokens: tokens a step. asynchronous: whether two steps are in flight.
    prefix_cache: mamba_cache_mode "align", which keeps one state more per group.
    block_tokens: vLLM's --block-size, the step that blocks are a multiple of; None leaves it to the backend.
    verify_scratch: scratch of split-KV verification: "off", "engine" (sized for 256 requests, as the original does)
        or "slots".
    graph_tokens: largest captured batch, 0 for slots * (k+1) but at most 64. graphs: whether any are captured.
    embedding_in_host, vision: where those weights are.
    cards: tensor parallelism; every figure is per card.
    card_bytes: memory that CUDA reports. utilization: share of it that vLLM plans with.
    kv_cache_bytes: bytes of the pool, None for what utilization leaves.
    grouping: layers in a group as vLLM 0.31.0 has it ("smallest") or with patch kv-group-size ("divisor").
    """

    geometry: Geometry
    scheme: Scheme = SCHEMES["fast"]
    drafter: Drafter | Literal["mtp"] | None = None
    draft_tokens: int = 0
    context_tokens: int = 65_536
    concurrent_requests: int = 8
    resident_requests: int = 1
    batched_tokens: int = 2048
    asynchronous: bool = True
    cache_dtype: CacheType = "bfloat16"
    state_dtype: Literal["float16", "float32", "bfloat16"] = "float16"
    prefix_cache: bool = True
    backend: Backend = "auto"
    block_tokens: int | None = None
    verify_scratch: Literal["off", "engine", "slots"] = "off"
    graphs: bool = True
    graph_tokens: int = 0
    vision: Placement = "off"
    embedding_in_host: bool = False
    cards: int = 1
    card_bytes: int = 24 * GIB
    utilization: float = 0.93
    kv_cache_bytes: int | None = None
    grouping: Literal["smallest", "divisor"] = "smallest"
    kvarn_share: float = KVARN_SHARE
    wsl: bool = False

    def __post_init__(self) -> None:
        for name in ("context_tokens", "concurrent_requests", "resident_requests", "batched_tokens", "card_bytes"):
            if getattr(self, name) < 1:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be from 1")
        if self.draft_tokens < 0 or (self.drafter is not None and self.draft_tokens == 0):
            raise BadInputError(f"draft_tokens is {self.draft_tokens}; a drafter drafts from 1")
        if self.drafter == "mtp" and self.geometry.mtp_num_hidden_layers == 0:
            raise BadInputError(f"drafter is mtp, but {self.geometry.name} has no MTP head", "use another drafter")
        if not 0 < self.utilization <= 1:
            raise BadInputError(f"utilization is {self.utilization}; it must be above 0 and at most 1")
        if self.block_tokens is not None and (self.block_tokens < 1 or self.block_tokens % 16):
            raise BadInputError(f"block_tokens is {self.block_tokens}; it must be a multiple of 16")
        if self.kvarn and (self.block_tokens or KVARN_TILE) % KVARN_TILE:
            raise BadInputError(f"block_tokens is {self.block_tokens}; KVarN needs a multiple of {KVARN_TILE}")

    @property
    def kvarn(self) -> bool:
        return self.cache_dtype.startswith("kvarn")

    @property
    def window_drafter(self) -> Drafter | None:
        """The drafter with a sliding window and weights of its own, where there is one."""
        return self.drafter if isinstance(self.drafter, Drafter) else None

    @property
    def captured_tokens(self) -> int:
        """Largest batch that a graph is captured for."""
        return self.graph_tokens or min(GRAPHS_TOKENS, self.concurrent_requests * (self.draft_tokens + 1))

    @property
    def tokens_in_flight(self) -> int:
        """Tokens that are scheduled and not yet settled (VllmConfig.max_in_flight_tokens)."""
        return self.batched_tokens * (2 if self.asynchronous else 1)


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    kind: "attention", "recurrent" or "window". layers: of this group. block_tokens: tokens in a block. blocks: what a
    request of the full context takes.
    """

    kind: Literal["attention", "recurrent", "window"]
    layers: int
    block_tokens: int
    blocks: int


@dataclass(frozen=True)
class Pool:
    """How the pool is cut, whatever its size.

    token_bytes: keys and values of one token in all attention layers. state_bytes: one recurrent state of one layer,
    as it is. page_bytes: a layer's share of a block. block_bytes: a block. block_tokens: B.
    """

    token_bytes: int
    state_bytes: int
    page_bytes: int
    block_bytes: int
    block_tokens: int
    group_layers: int
    groups: tuple[Group, ...]

    @property
    def blocks_per_request(self) -> int:
        """Blocks of one request at full context."""
        return sum(group.blocks for group in self.groups)

    @property
    def state_blocks_per_request(self) -> int:
        return sum(group.blocks for group in self.groups if group.kind == "recurrent")

    @property
    def window_block_tokens(self) -> int:
        """Tokens in a block of the drafter's layers, 0 without them."""
        return next((group.block_tokens for group in self.groups if group.kind == "window"), 0)


@dataclass(frozen=True)
class Figure:
    """One line of a budget. measured: whether it is an estimate from measurements, which `source` names."""

    key: str
    title: str
    bytes: int
    measured: bool
    source: str


@dataclass(frozen=True)
class Budget:
    """A load on a card. Bytes are per card."""

    load: Load
    pool: Pool
    figures: tuple[Figure, ...]
    host_bytes: int
    kv_cache_bytes: int
    requested_bytes: int
    margin_bytes: int
    problems: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def blocks(self) -> int:
        """Blocks of the pool; one of them is never handed out."""
        return max(0, self.kv_cache_bytes) // self.pool.block_bytes

    @property
    def concurrency(self) -> float:
        """Requests of the full context that the pool holds, as vLLM logs it."""
        return self.blocks / self.pool.blocks_per_request

    @property
    def pool_tokens(self) -> int:
        """What vLLM logs as "GPU KV cache size" (get_kv_cache_capacity)."""
        return int(self.concurrency * self.load.context_tokens)

    @property
    def request_bytes(self) -> int:
        """What one request of the full context takes of the pool."""
        return self.pool.blocks_per_request * self.pool.block_bytes

    @property
    def fixed_request_bytes(self) -> int:
        """What of it is not keys and values of its tokens: states, the drafter's window, rounding."""
        return self.request_bytes - self.load.context_tokens * self.pool.token_bytes

    @property
    def state_bytes_per_request(self) -> int:
        """Pages of recurrent states of one request: k+2 (or k+1) for each recurrent layer."""
        return self.pool.state_blocks_per_request * self.pool.block_bytes

    def figure(self, key: str) -> Figure:
        return next(figure for figure in self.figures if figure.key == key)

    def residents(self, context_tokens: int) -> int:
        """How many requests of `context_tokens` tokens the pool holds at once."""
        pool = cut_pool(replace(self.load, context_tokens=context_tokens))
        return max(0, self.blocks - 1) // pool.blocks_per_request


# The pool ---------------------------------------------------------------------------------------------------------


def token_layer_bytes(cache_dtype: CacheType, heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values in one layer with `heads` key-value heads on this card.

    16-bit and fp8: AttentionSpec.unpadded_page_size_bytes. Per token and head: a float32 scale beside keys and beside
    values (TritonAttentionBackend.customize_spec). KVarN: a tile of 128 tokens and one head holds packed keys, their
    scales (2D+128 halves), packed values, theirs (D+256 halves), as HyperQwen lays it out.
    """
    if cache_dtype == "bfloat16":
        return heads * 2 * head_dim * 2
    if cache_dtype == "fp8":
        return heads * 2 * head_dim
    if cache_dtype == "int8_per_token_head":
        return heads * 2 * (head_dim + 4)
    if cache_dtype == "int4_per_token_head":
        return heads * 2 * (head_dim // 2 + 4)
    value_bits = 2 if cache_dtype == "kvarn_k4v2_g128" else 4
    values = KVARN_TILE * head_dim
    tile = values * 4 // 8 + (2 * head_dim + 128) * 2 + values * value_bits // 8 + (head_dim + 256) * 2
    return heads * -(-tile // KVARN_TILE)


def recurrent_state_bytes(geometry: Geometry, state_dtype: str, draft_tokens: int, cards: int = 1) -> int:
    """One layer's state on one card: the matrices, and the convolution's last inputs with one more column for each
    drafted token (MambaStateShapeCalculator.gated_delta_net_state_shape)."""
    heads = geometry.linear_num_value_heads // cards
    matrices = heads * geometry.linear_value_head_dim * geometry.linear_key_head_dim
    columns = geometry.linear_conv_kernel_dim - 1 + draft_tokens
    return matrices * (4 if state_dtype == "float32" else 2) + geometry.conv_dim // cards * columns * 2


def resolved_backend(load: Load) -> Backend:
    """The attention backend that "auto" becomes. Only FlashInfer reads fp8 on sm86, only Triton scales per token."""
    if load.backend != "auto":
        return load.backend
    if load.kvarn:
        return "KVARN"
    if load.cache_dtype == "bfloat16":
        return "FLASH_ATTN"
    return "FLASHINFER" if load.cache_dtype == "fp8" else "TRITON_ATTN"


def cut_pool(load: Load) -> Pool:
    """How vLLM cuts the pool for this load: block and page sizes, groups, blocks of a request."""
    geometry, cards = load.geometry, load.cards
    backend = resolved_backend(load)
    heads = key_value_heads(geometry.num_key_value_heads, cards)
    token = token_layer_bytes(load.cache_dtype, heads, geometry.head_dim)
    state = recurrent_state_bytes(geometry, load.state_dtype, load.draft_tokens, cards)
    # Platform._align_hybrid_block_size: a multiple of the kernel's smallest block or of --block-size (which
    # CpuPlatform.check_and_update_config sets to 128), whichever is larger.
    kernel, usual = {"KVARN": (KVARN_TILE, KVARN_TILE), "CPU_ATTN": (32, 128)}.get(backend, (16, 16))
    step = max(kernel, load.block_tokens or usual)
    block = step * -(-state // (step * token))
    page = block * token
    attention_block, window_block, window_page = block, 0, 0
    drafter = load.window_drafter
    if drafter is not None:
        window_block, window_page = _window(load, drafter, backend, block)
        page, attention_block, window_block = _unified(page, attention_block, window_page, window_block)

    layers = geometry.attention_layers + (geometry.mtp_num_hidden_layers if load.drafter == "mtp" else 0)
    buckets: list[tuple[Literal["attention", "recurrent", "window"], int, int, int]] = [
        ("recurrent", geometry.recurrent_layers, block, load.draft_tokens + (2 if load.prefix_cache else 1)),
        ("attention", layers, attention_block, -(-load.context_tokens // attention_block)),
    ]
    if drafter is not None:
        tokens = min(drafter.sliding_window - 1 + load.tokens_in_flight, load.context_tokens)
        buckets.append(("window", drafter.num_hidden_layers, window_block, -(-tokens // window_block) + 1))
    counts = [count for _, count, _, _ in buckets]
    size = stock_group_size(counts)
    if load.grouping == "divisor":
        size = group_size(counts, [kind == "window" for kind, _, _, _ in buckets], size)
    groups: list[Group] = []
    for kind, count, tokens, blocks in buckets:
        number = -(-count // size)
        # Layers are dealt out in turn, so that groups differ by one layer at most.
        groups += [Group(kind, len(range(index, count, number)), tokens, blocks) for index in range(number)]
    return Pool(
        token_bytes=layers * token,
        state_bytes=state,
        page_bytes=page,
        block_bytes=max(group.layers for group in groups) * page,
        block_tokens=attention_block,
        group_layers=size,
        groups=tuple(groups),
    )


def _window(load: Load, drafter: Drafter, backend: Backend, block: int) -> tuple[int, int]:
    """Tokens and bytes of a block of the drafter's layers (Attention.get_kv_cache_spec): the largest block that the
    backend runs within that of the model's layers. KVarN leaves them 16 bits and one tile."""
    heads = key_value_heads(drafter.num_key_value_heads, load.cards)
    dtype: CacheType = "bfloat16" if load.kvarn else load.cache_dtype
    token = token_layer_bytes(dtype, heads, drafter.head_dim)
    if backend == "KVARN":
        tokens = KVARN_TILE
    elif backend == "FLASHINFER":
        tokens = 64
    else:
        step = 32 if backend == "CPU_ATTN" else 16
        tokens = block // step * step
    return tokens, tokens * token


def _unified(page: int, block: int, window_page: int, window_block: int) -> tuple[int, int, int]:
    """Page, attention block and window block once all pages are one size (unify_kv_cache_spec_page_size): the smaller
    page gets more tokens where it divides the larger, and is padded where it does not."""
    if window_page < page:
        return page, block, window_block * (page // window_page) if page % window_page == 0 else window_block
    if window_page > page and window_page % page == 0:
        return window_page, block * (window_page // page), window_block
    return window_page, block, window_block


# The card ---------------------------------------------------------------------------------------------------------


def budget(load: Load) -> Budget:
    """What `load` takes of its card. Raises BadInputError for what no card can run (tensor parallelism that does not
    divide the model); what does not fit is in `Budget.problems`."""
    drafter = load.window_drafter
    check_tensor_parallel(
        load.geometry,
        load.cards,
        drafter=drafter,
        quantized=load.scheme.body < 16,
        vision=load.vision != "off",
    )
    pool = cut_pool(load)
    figures, host_bytes = _figures(load)
    taken = sum(figure.bytes for figure in figures if figure.key != "unprofiled")
    requested = math.ceil(load.card_bytes * load.utilization)
    pinned = load.kv_cache_bytes is not None
    kv_bytes = load.kv_cache_bytes if load.kv_cache_bytes is not None else requested - taken
    usable = load.card_bytes - sum(figure.bytes for figure in figures if figure.key == "wsl")
    margin = usable - (sum(figure.bytes for figure in figures if figure.key != "wsl") + max(0, kv_bytes))
    source = (
        "set" if pinned else "utilization * card - all of the above that vLLM profiles (determine_available_memory)"
    )
    figures += (Figure("kv_cache", "KV cache pool", kv_bytes, not pinned, source),)
    found = Budget(load, pool, figures, host_bytes, kv_bytes, requested, margin)
    return replace(found, problems=tuple(_problems(found)))


def _figures(load: Load) -> tuple[tuple[Figure, ...], int]:
    geometry = load.geometry
    weights = loaded_weights(
        geometry,
        load.scheme,
        mtp=load.drafter == "mtp",
        drafter=load.window_drafter,
        vision=load.vision,
        embedding_in_host=load.embedding_in_host,
        cards=load.cards,
    )
    law = "prepare/weights.py: every tensor's shape and type"
    figures = [Figure(f"weights.{part}", f"Weights: {part}", size, False, law) for part, size in weights.card.items()]
    if load.vision == "host":
        figures.append(
            Figure("weights.vision", "Weights: vision, in host memory", VISION_IN_HOST, True, _VISION_SOURCE)
        )
    if resolved_backend(load) == "CPU_ATTN":
        return tuple(figures), weights.host_bytes
    width = _width(geometry, load.cards) / _MEASURED_WIDTH
    activations = int(ACTIVATIONS * width * load.batched_tokens / 2048)
    figures.append(Figure("overhead", "CUDA context, tables, buffers", OVERHEAD, True, _OVERHEAD_SOURCE))
    figures.append(Figure("activations", "Activations at their peak", activations, True, _ACTIVATIONS_SOURCE))
    if load.graphs:
        depth = geometry.num_hidden_layers * geometry.hidden_size / _MEASURED_DEPTH
        graphs = int(GRAPHS * depth * load.captured_tokens / GRAPHS_TOKENS)
        figures.append(Figure("graphs", "CUDA graphs", graphs, True, _GRAPHS_SOURCE))
    if load.verify_scratch != "off":
        figures.append(
            Figure("verify", "Scratch of split-KV verification", verify_scratch_bytes(load), False, "its one buffer")
        )
    if load.kvarn:
        figures.extend(_kvarn(load, weights.card_bytes))
    unprofiled = UNPROFILED + int(UNPROFILED_PER_SLOT * width * load.concurrent_requests)
    figures.append(Figure("unprofiled", "Peak that profiling misses", unprofiled, True, _UNPROFILED_SOURCE))
    if load.wsl:
        figures.append(Figure("wsl", "Kept by Windows", WSL_RESERVE, True, _WSL_SOURCE))
    return tuple(figures), weights.host_bytes


def _width(geometry: Geometry, cards: int) -> int:
    """Values that a token has in flight in the widest layer: both halves of the MLP and their product, and the
    residual stream with its copies."""
    return 3 * geometry.intermediate_size // cards + 4 * geometry.hidden_size


def verify_scratch_bytes(load: Load) -> int:
    """Partial results of split-KV verification: float32 [requests, query heads, rows, segments, head size].

    Rows are the larger of k+1 and what fills a tile of 64 with the queries of one key head. The kernel sizes it for 256
    requests when it is first used outside a server's configuration (960 MiB for the 27B at k <= 9), and need not.
    """
    geometry = load.geometry
    rows = min(VERIFY_QUERY_ROWS, max(load.draft_tokens + 1, VERIFY_QUERY_ROWS // geometry.queries_per_key))
    requests = VERIFY_FALLBACK_REQUESTS if load.verify_scratch == "engine" else load.concurrent_requests
    return requests * geometry.num_attention_heads // load.cards * rows * VERIFY_SEGMENTS * geometry.head_dim * 4


def _kvarn(load: Load, weights: int) -> list[Figure]:
    heads = key_value_heads(load.geometry.num_key_value_heads, load.cards)
    planned = math.ceil(load.card_bytes * load.utilization) - weights - OVERHEAD
    tokens = min(load.context_tokens, MATERIALIZE_TOKENS)
    return [
        Figure(
            "kvarn.side", "KVarN: tiles that are not packed yet", int(max(0, planned) * load.kvarn_share), True,
            _KVARN_SOURCE,
        ),
        Figure(
            "kvarn.prefill", "KVarN: keys and values unpacked for a prefill",
            tokens * heads * load.geometry.head_dim * 2 * 2, False, "keys and values of the context in 16 bits",
        ),
    ]  # fmt: skip


def _problems(found: Budget) -> list[str]:
    load, problems = found.load, []
    needed = found.pool.blocks_per_request * load.resident_requests
    if found.kv_cache_bytes < found.pool.block_bytes:
        short = _mib(found.pool.block_bytes - found.kv_cache_bytes)
        problems.append(f"nothing is left for the pool: {short} MiB short of a single block")
    elif needed > found.blocks - 1:
        who = f"{load.resident_requests} requests" if load.resident_requests > 1 else "a request"
        problems.append(
            f"{needed} blocks are needed for {who} of {load.context_tokens} tokens "
            f"({_mib(needed * found.pool.block_bytes)} MiB), and the pool has {found.blocks} "
            f"({_mib(found.kv_cache_bytes)} MiB), one of which is never used"
        )
    if found.margin_bytes < 0:
        problems.append(f"the card is {_mib(-found.margin_bytes)} MiB too small at the peak")
    free = load.card_bytes - (WSL_RESERVE if load.wsl else 0)
    if found.requested_bytes > free:
        problems.append(
            f"utilization {load.utilization:g} asks for {_mib(found.requested_bytes)} MiB, "
            f"and at most {_mib(free)} are free"
        )
    return problems


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f}"


# The other way round ----------------------------------------------------------------------------------------------


def fits(load: Load) -> bool:
    """Whether the card holds the load and the pool `resident_requests` requests of its full context."""
    return budget(load).fits


def largest_context(load: Load, limit: int | None = None) -> int:
    """Most tokens of context, all else as in `load`, with which it fits; 0 when none does.

    Never above `limit`, by default the model's own context. With `resident_requests` = slots it is the context that
    every slot can have at once.
    """
    most = limit if limit is not None else load.geometry.max_position_embeddings
    return _largest(lambda tokens: fits(replace(load, context_tokens=tokens)), most)


def largest_slots(load: Load, limit: int = 1024) -> int:
    """Most slots that can all hold a request of the full context at once; 0 when not even one can."""
    return _largest(lambda slots: fits(replace(load, concurrent_requests=slots, resident_requests=slots)), limit)


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Largest n in 1..limit for which `holds`, which is false beyond some n; 0 when it is false at 1."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
