#!/usr/bin/env python3
"""Ask vLLM itself for the KV pools that hyperqwen.profiles.memory predicts: they have to be the same to the block.

    python checks/memory_law.py            # with the engine's Python; --json for the figures

For every load: vLLM aligns the block size (Platform._align_hybrid_block_size), its layers say what they keep
(Attention and MambaBase.get_kv_cache_spec, the backend's customize_spec), and get_kv_cache_configs groups, divides
and refuses. None of that is written again here. Only the objects it reads are ours: namespaces with a profile's
values, since a real configuration of a 27B model for CUDA needs CUDA. Two backends cannot be loaded here:
FlashInfer's for want of its library, KVarN's because this engine has none. Stand-ins say what block sizes they run
and how large KVarN's tokens are; the rest of the law is held to vLLM for them as well.

Each deliberate error in CONTROLS has to be found, or the comparison shows nothing. Exit code 0: all equal; 5: not;
2: wrong usage; 3: no vLLM here.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from hyperqwen.prepare import geometry
from hyperqwen.prepare.geometry import Drafter, key_value_heads
from hyperqwen.prepare.weights import SCHEMES, checkpoint_tensors
from hyperqwen.profiles.memory import GIB, Load, Pool, cut_pool, largest_context, resolved_backend, token_layer_bytes

QWEN = geometry.load("qwen3.8-27b")
DRAFTER = geometry.load_drafter("qwen3.8-27b-dflash2")
PIN = 5_583_457_484
# A card on which only the pool can be too small: what surrounds it is not vLLM's to say here.
ROOM = Load(geometry=QWEN, card_bytes=1 << 50, kv_cache_bytes=PIN)

PROFILES = {
    "A": replace(ROOM, context_tokens=150_000, cache_dtype="fp8", kv_cache_bytes=7_366_246_400),
    "B": replace(ROOM, drafter=DRAFTER, draft_tokens=7),
    "C": replace(ROOM, drafter=DRAFTER, draft_tokens=15, context_tokens=57_344, asynchronous=False),
    "D": replace(
        ROOM, drafter="mtp", draft_tokens=3, context_tokens=150_000, cache_dtype="fp8", kv_cache_bytes=7_647_264_768
    ),
    "E": replace(
        ROOM,
        drafter=DRAFTER,
        draft_tokens=7,
        context_tokens=245_760,
        cache_dtype="kvarn_k4v2_g128",
        kv_cache_bytes=5_261_334_938,
    ),
    "int8": replace(ROOM, drafter=DRAFTER, draft_tokens=7, context_tokens=131_072, cache_dtype="int8_per_token_head"),
    "demo": replace(
        ROOM,
        geometry=geometry.load("nano"),
        backend="CPU_ATTN",
        context_tokens=2048,
        state_dtype="float32",
        kv_cache_bytes=128 << 20,
    ),
}

MEMBERS = (
    QWEN,
    replace(
        QWEN, name="small", hidden_size=2560, num_hidden_layers=32, num_attention_heads=16, linear_num_value_heads=32
    ),
    replace(QWEN, name="large", hidden_size=8192, num_hidden_layers=96, num_key_value_heads=8, num_attention_heads=64),
    replace(QWEN, name="odd", num_hidden_layers=30, full_attention_interval=3, head_dim=128),
)


def cases() -> Iterator[tuple[str, Load]]:
    """The profiles, and members of the family with every drafter, type, grouping and number of cards."""
    for name, load in PROFILES.items():
        for grouping in ("smallest", "divisor"):
            for prefix_cache in (True, False):
                label = f"{name}, {grouping}, {'with' if prefix_cache else 'without'} prefix cache"
                yield label, replace(load, grouping=grouping, prefix_cache=prefix_cache)
    types = ("bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128", "kvarn_k4v4_g128")
    drafters: tuple[tuple[Any, int], ...] = ((None, 0), ("mtp", 3), (DRAFTER, 7), (DRAFTER, 15))
    for member in MEMBERS:
        for drafter, tokens in drafters:
            for cache_dtype in types:
                for cards in (1, 2, 4):
                    for state_dtype, batched, context in (("float16", 2048, 65_536), ("float32", 8192, 3000)):
                        name = drafter.name if isinstance(drafter, Drafter) else str(drafter)
                        yield (
                            f"{member.name}, {name} {tokens}, {cache_dtype}, {cards} cards, {state_dtype}",
                            replace(
                                ROOM,
                                geometry=member,
                                drafter=drafter,
                                draft_tokens=tokens,
                                cache_dtype=cache_dtype,
                                cards=cards,
                                state_dtype=state_dtype,
                                batched_tokens=batched,
                                context_tokens=context,
                                asynchronous=cards != 2,
                                grouping="divisor" if cards != 4 else "smallest",
                                kv_cache_bytes=6 * GIB + 12_345,
                            ),
                        )


# vLLM's answer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What both sides say of a load. groups: (kind, layers, tokens of a block), sorted."""

    block_tokens: int
    page_bytes: int
    groups: tuple[tuple[str, int, int], ...]
    blocks: int
    pool_tokens: int
    admitted: bool
    largest_context: int


def of_law(load: Load, cut: Callable[[Load], Pool] = cut_pool) -> Answer:
    """The law's answer. `cut`: the law, or one with a deliberate error."""
    pool = cut(load)
    blocks = (load.kv_cache_bytes or 0) // pool.block_bytes
    return Answer(
        pool.block_tokens,
        pool.page_bytes,
        tuple(sorted((group.kind, group.layers, group.block_tokens) for group in pool.groups)),
        blocks,
        int(blocks / pool.blocks_per_request * load.context_tokens),
        pool.blocks_per_request <= blocks - 1,
        largest_context(load) if cut is cut_pool else 0,
    )


def of_vllm(load: Load) -> Answer:
    """vLLM's."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    config = _configuration(load)
    specs = _specs(load, config)
    kinds = {FullAttentionSpec: "attention", MambaSpec: "recurrent", SlidingWindowSpec: "window"}
    size = load.kv_cache_bytes or 0
    with _grouping(load.grouping):
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
        try:
            (pool,) = kv_cache_utils.get_kv_cache_configs(config, [dict(specs)], [size])
            admitted = True
        except ValueError as error:
            if "KV cache is needed" not in str(error):
                raise
            pool, admitted = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, size), False
        tokens, _ = kv_cache_utils.get_kv_cache_capacity(config, pool)
        most = _largest_context(load, config, groups, size)
    found = [(kinds[type(group.kv_cache_spec)], group) for group in groups]
    (attention,) = {group.kv_cache_spec.block_size for kind, group in found if kind == "attention"}
    (page,) = {group.kv_cache_spec.page_size_bytes for group in groups}
    cut = sorted(
        (kind, len(group.layer_names), attention_tokens(load, config, kind, group.kv_cache_spec.block_size))
        for kind, group in found
    )
    return Answer(attention, page, tuple(cut), pool.num_blocks, tokens, admitted, most)


def attention_tokens(load: Load, config: Any, kind: str, tokens: int) -> int:
    """Tokens of a block. A state's are the aligned size; without the prefix cache vLLM gives it the whole context."""
    return config.aligned_block_size if kind == "recurrent" else tokens


def _largest_context(load: Load, config: Any, groups: Any, size: int) -> int:
    """vLLM's own estimate, up to the model's context, less the block that it keeps."""
    from vllm.v1.core import kv_cache_utils

    before = config.model_config.max_model_len
    config.model_config.max_model_len = load.geometry.max_position_embeddings
    try:
        usable = size - kv_cache_utils._pool_bytes_per_block(groups)
        return kv_cache_utils._estimate_max_model_len_from_groups(config, groups, usable)
    finally:
        config.model_config.max_model_len = before


@contextmanager
def _grouping(wanted: str) -> Iterator[None]:
    """vLLM as it is with patch kv-group-size, or as it was without."""
    from vllm.v1.core import kv_cache_utils

    patched = getattr(kv_cache_utils, "kv_group_size", None)
    if wanted == "divisor":
        if patched is None:
            raise MissingPatchError
        yield
        return
    if patched is not None:
        kv_cache_utils.kv_group_size = lambda layers, sliding, stock: stock
    try:
        yield
    finally:
        if patched is not None:
            kv_cache_utils.kv_group_size = patched


class MissingPatchError(Exception):
    """This engine has no patch kv-group-size."""


def _configuration(load: Load) -> Any:
    """What vLLM reads of its configuration for a load, and its own properties over it."""
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    from vllm.platforms.interface import Platform
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_layout import KVCacheLayout

    shape = load.geometry
    heads = key_value_heads(shape.num_key_value_heads, load.cards)
    backend = _backend(load)
    on_cpu = resolved_backend(load) == "CPU_ATTN"
    cache_dtype = "auto" if load.cache_dtype == "bfloat16" or load.kvarn else load.cache_dtype
    speculative = SimpleNamespace(
        num_speculative_tokens=load.draft_tokens,
        method="mtp" if load.drafter == "mtp" else "dflash",
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        use_multi_module_mtp=lambda: False,
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=load.context_tokens,
            original_max_model_len=load.context_tokens,
            dtype=torch.bfloat16,
            use_mla=False,
            architecture="Qwen3_5ForCausalLM",
            hf_config=SimpleNamespace(model_type="qwen3_5"),
            hf_text_config=shape,
            get_num_kv_heads=lambda parallel: heads,
            get_head_size=lambda: shape.head_dim,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=load.cards,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype,
            # CpuPlatform.check_and_update_config sets 128; elsewhere it is the backend's.
            block_size=load.block_tokens or (128 if on_cpu else backend.get_preferred_block_size(16)),
            user_specified_block_size=load.block_tokens is not None,
            mamba_cache_mode="align" if load.prefix_cache else "none",
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=load.state_dtype,
            mamba_block_size=None,
            user_specified_mamba_block_size=False,
            mamba_page_size_padded=None,
            skip_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
            use_kda_recoverssm=False,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=load.batched_tokens,
            async_scheduling=load.asynchronous,
            disable_hybrid_kv_cache_manager=False,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=speculative if load.draft_tokens else None,
        diffusion_config=None,
        use_v2_model_runner=True,
    )
    for name in ("max_concurrent_batches", "max_in_flight_tokens", "num_speculative_tokens"):
        setattr(config, name, getattr(VllmConfig, name).fget(config))
    config.num_prefill_lookahead_tokens = VllmConfig.num_prefill_lookahead_tokens.fget(config)
    resolve = ModelRegistry.resolve_model_cls
    try:
        # The registry would start a process to look the class up by a real configuration.
        ModelRegistry.resolve_model_cls = lambda *args, **kwargs: (Qwen3_5ForCausalLM, "Qwen3_5ForCausalLM")
        Platform._align_hybrid_block_size(config, backend)
    finally:
        ModelRegistry.resolve_model_cls = resolve
    config.aligned_block_size = config.cache_config.block_size
    if config.cache_config.mamba_block_size is None:
        # ModelConfig's own default without "align".
        config.cache_config.mamba_block_size = load.context_tokens
    config.state_dtypes = tuple(Qwen3_5ForCausalLM.get_mamba_state_dtype_from_config(config))
    config.state_shapes = tuple(Qwen3_5ForCausalLM.get_mamba_state_shape_from_config(config))
    config.torch_dtype = torch.bfloat16 if cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache_dtype]
    return config


def _specs(load: Load, config: Any) -> dict[str, Any]:
    """What every layer says that it keeps, in the order of registration."""
    import torch
    from vllm.model_executor.layers.attention.attention import Attention, AttentionType
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    shape, backend = load.geometry, _backend(load)

    def attention(heads: int, head_dim: int, window: int | None, of: Any, dtype: Any, cache_dtype: str) -> Any:
        layer = SimpleNamespace(
            attn_type=AttentionType.DECODER,
            kv_cache_dtype=cache_dtype,
            kv_cache_torch_dtype=dtype,
            sliding_window=window,
            attn_backend=of,
            num_kv_heads=key_value_heads(heads, load.cards),
            head_size=head_dim,
            head_size_v=head_dim,
        )
        return of.customize_spec(Attention.get_kv_cache_spec(layer, config))

    cache_dtype = config.cache_config.cache_dtype
    full = attention(shape.num_key_value_heads, shape.head_dim, None, backend, config.torch_dtype, cache_dtype)
    recurrent = SimpleNamespace(
        get_state_shape=lambda: config.state_shapes,
        get_state_dtype=lambda: config.state_dtypes,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        is_kv_cache_tp_replicated=False,
    )
    state = MambaBase.get_kv_cache_spec(recurrent, config)
    specs = {
        f"layers.{index}": full if shape.is_attention(index) else state for index in range(shape.num_hidden_layers)
    }
    if load.drafter == "mtp":
        specs |= {f"mtp.{index}": full for index in range(shape.mtp_num_hidden_layers)}
    drafter = load.window_drafter
    if drafter is not None:
        of = _OneTile if load.kvarn else backend
        dtype = torch.bfloat16 if load.kvarn else config.torch_dtype
        window = attention(
            drafter.num_key_value_heads, drafter.head_dim, drafter.sliding_window, of, dtype, cache_dtype
        )
        specs |= {f"drafter.{index}": window for index in range(drafter.num_hidden_layers)}
    return specs


class _OneTile:
    """The backend of a drafter's layers beside KVarN: 16 bits, in blocks of one tile."""

    @staticmethod
    def is_mla() -> bool:
        return False

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[int]:
        return [128]


class _FlashInferSizes(_OneTile):
    """FlashInfer's backend, whose module needs the library: FlashInferBackend.get_supported_kernel_block_sizes."""

    @staticmethod
    def get_preferred_block_size(default: int) -> int:
        return default

    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[int]:
        return [16, 32, 64]


def _backend(load: Load) -> Any:
    """vLLM's attention backend, as far as sizes go."""
    name = resolved_backend(load)
    if name == "KVARN":
        size = token_layer_bytes(load.cache_dtype, 1, load.geometry.head_dim)

        class KvarnSizes(_OneTile):
            @staticmethod
            def get_preferred_block_size(default: int) -> int:
                return 128

            @staticmethod
            def customize_spec(spec: Any) -> Any:
                return replace(spec, state_content_bytes=size)

        return KvarnSizes
    if name == "CPU_ATTN":
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    if name == "TRITON_ATTN":
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        return TritonAttentionBackend
    if name == "FLASHINFER":
        return _FlashInferSizes
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    return FlashAttentionBackend


# Comparison -------------------------------------------------------------------------------------------------------


def _fewer_states(load: Load) -> Pool:
    pool = cut_pool(load)
    return replace(pool, groups=tuple(replace(g, blocks=g.blocks - (g.kind == "recurrent")) for g in pool.groups))


def _no_partial_window(load: Load) -> Pool:
    pool = cut_pool(load)
    return replace(pool, groups=tuple(replace(g, blocks=g.blocks - (g.kind == "window")) for g in pool.groups))


def _synchronous_window(load: Load) -> Pool:
    pool = cut_pool(load)
    single = cut_pool(replace(load, asynchronous=not load.asynchronous))
    return replace(pool, groups=single.groups)


def _other_grouping(load: Load) -> Pool:
    return cut_pool(replace(load, grouping="smallest" if load.grouping == "divisor" else "divisor"))


def _no_convolution_columns(load: Load) -> Pool:
    return cut_pool(replace(load, drafter=None, draft_tokens=0)) if load.draft_tokens else cut_pool(load)


def _unpadded(load: Load) -> Pool:
    pool = cut_pool(load)
    return replace(pool, block_bytes=max(g.layers for g in pool.groups) * pool.state_bytes)


CONTROLS: dict[str, Callable[[Load], Pool]] = {
    "one state less in a group": _fewer_states,
    "no block for a window that starts within one": _no_partial_window,
    "another number of steps in flight": _synchronous_window,
    "the other grouping": _other_grouping,
    "no column of the convolution for a draft": _no_convolution_columns,
    "pages of a state's size": _unpadded,
}
"""Laws with one error each."""


def differences(law: Answer, vllm: Answer) -> dict[str, tuple[Any, Any]]:
    ours, theirs = asdict(law), asdict(vllm)
    return {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]}


def inventory(folder: Path) -> list[str]:
    """How the tensors of an unquantized checkpoint differ from those that its config.json leads us to expect."""
    expected = {t.name: list(t.shape) for t in checkpoint_tensors(geometry.load(folder), SCHEMES["bf16"])}
    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return [
        f"{name}: {found.get(name, 'missing')} in {folder}, {expected.get(name, 'unknown')} in the inventory"
        for name in sorted(set(expected) | set(found))
        if expected.get(name) != found.get(name)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the planner's memory law with vLLM's own pools.")
    parser.add_argument("--model", type=Path, help="compare the inventory of tensors with this checkpoint as well")
    parser.add_argument("--json", action="store_true", help="print every load's figures as JSON")
    options = parser.parse_args(argv)
    try:
        import vllm.v1.core.kv_cache_utils
    except ImportError as error:
        print(f"error: vLLM cannot be imported ({error}); run this with the engine's Python", file=sys.stderr)
        return 3
    # vLLM warns of every pool that it is asked for.
    logging.disable(logging.ERROR)
    answers: dict[str, tuple[Load, Answer]] = {}
    failures = [] if options.model is None else inventory(options.model)
    for label, load in cases():
        try:
            vllm = of_vllm(load)
        except MissingPatchError:
            failures.append(f"{label}: this engine has no patch kv-group-size")
            continue
        answers[label] = (load, vllm)
        for key, (ours, theirs) in differences(of_law(load), vllm).items():
            failures.append(f"{label}: {key} is {theirs} in vLLM, and {ours} in the law")
    missed = []
    for name, wrong in CONTROLS.items():
        found = sum(
            bool(differences(of_law(load, wrong), replace(vllm, largest_context=0))) for load, vllm in answers.values()
        )
        if not found:
            missed.append(name)
        elif not options.json:
            print(f"control: {name}: told apart on {found} of {len(answers)} loads")
    failures += [f"control: {name}: not told apart from the law" for name in missed]
    if options.json:
        print(json.dumps({"loads": {k: asdict(v) for k, (_, v) in answers.items()}, "failures": failures}, indent=1))
    else:
        for name in PROFILES:
            _, vllm = answers[f"{name}, divisor, with prefix cache"]
            print(f"{name}: blocks of {vllm.block_tokens} tokens, {vllm.blocks} blocks, {vllm.pool_tokens:,} tokens")
        print(f"{len(answers)} loads, {len(failures)} differences")
        for failure in failures[:20]:
            print(f"  {failure}")
    return 5 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
