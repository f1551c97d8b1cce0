"""Patch 0005: a packed token embedding loads, is looked up exactly, and serves the text of the bf16 model.

Runs in the engine's environment. HYPERQWEN_NANO and HYPERQWEN_NANO_INT8 name the two forms of one nano
checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import vocab_parallel_embedding as vocab
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)

from hyperqwen.engine.embedding import (
    EmbeddingScheme,
    shared_token_embedding_method,
    token_embedding_method,
)
from hyperqwen.engine.embedding_gather import gather_dequantize
from hyperqwen.engine.embedding_method import QuantizedTokenEmbedding

NAME = "model.embed_tokens"
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Packed:
    """An embedding of random codes: what a checkpoint stores, and the values it stands for."""

    codes: np.ndarray
    scale: torch.Tensor
    words: torch.Tensor
    bits: int
    group_size: int

    def rows(self, ids: Any, dtype: torch.dtype) -> torch.Tensor:
        """The reference: float64 code times float64 scale, which is exact, rounded once."""
        scale = np.repeat(self.scale.double().cpu().numpy(), self.group_size, axis=1)
        return torch.from_numpy((self.codes * scale)[np.asarray(ids)]).to(dtype)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        shape = torch.tensor(self.codes.shape, dtype=torch.int64)
        return {"weight_packed": self.words, "weight_scale": self.scale, "weight_shape": shape}


def packed(vocabulary: int, hidden: int, bits: int, group_size: int, seed: int) -> Packed:
    """Codes over the whole range, scales of both signs and many sizes.

    The words are made from bytes, not by the shifts of the code under test.
    """
    random = np.random.default_rng(seed)
    offset = 2 ** (bits - 1)
    codes = random.integers(-offset, offset, (vocabulary, hidden))
    codes[0], codes[-1] = -offset, offset - 1
    stored = (codes + offset).astype(np.uint8)
    data = stored if bits == 8 else stored[:, 0::2] | stored[:, 1::2] << 4
    words = torch.from_numpy(np.ascontiguousarray(data).view("<i4").astype(np.int32))
    scale = random.standard_normal((vocabulary, hidden // group_size)) * 10.0 ** random.integers(-6, 3)
    return Packed(codes, torch.from_numpy(scale).to(torch.bfloat16), words, bits, group_size)


@pytest.fixture
def seed() -> int:
    """Fresh each run; pytest prints it with a failure."""
    return secrets.randbits(32)


SHAPES = [(8, 128, 128), (8, 640, 128), (8, 36, 12), (8, 4, 4), (4, 128, 128), (4, 640, 32), (4, 24, 6)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "hidden", "group_size"), SHAPES)
def test_rows_are_exact(bits: int, hidden: int, group_size: int, dtype: torch.dtype, device: str, seed: int) -> None:
    embedding = packed(101, hidden, bits, group_size, seed)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 101, (3, 17)))
    ids[0, 0], ids[0, 1], ids[0, 2] = 0, 100, 100
    # A row that nobody asked for must not be touched: one NaN of it in a result would show.
    others = torch.ones(101, dtype=torch.bool)
    others[ids.reshape(-1)] = False
    scale = embedding.scale.clone()
    scale[others] = torch.nan
    words = embedding.words.clone()

    for shape in [(3, 17), (51,), (1, 51)]:
        wanted = ids.reshape(shape)
        rows = gather_dequantize(
            wanted.to(device),
            words.to(device),
            scale.to(device),
            bits=bits,
            group_size=group_size,
            dtype=dtype,
        )
        expected = embedding.rows(wanted, dtype)
        assert rows.dtype == dtype and rows.shape == (*shape, hidden)
        assert torch.equal(rows.cpu(), expected), f"seed {seed}: {(rows.cpu() != expected).sum()} values differ"
    assert torch.equal(words, embedding.words), "the stored words were changed"


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_rows_of_few_or_no_ids(shape: tuple[int, ...], seed: int) -> None:
    embedding = packed(5, 16, 8, 8, seed)
    ids = torch.full(shape, 3, dtype=torch.int64)

    rows = gather_dequantize(ids, embedding.words, embedding.scale, bits=8, group_size=8, dtype=torch.float32)

    assert torch.equal(rows, embedding.rows(ids, torch.float32).reshape(*shape, 16))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_words_are_those_of_compressed_tensors(bits: int, seed: int) -> None:
    embedding = packed(33, 256, bits, 128, seed)

    words = pack_to_int32(torch.from_numpy(embedding.codes.astype(np.int8)), bits, packed_dim=1)

    assert torch.equal(words, embedding.words), f"seed {seed}"


@pytest.mark.parametrize("bits", [4, 8])
def test_no_result_depends_on_data_by_shape_or_by_host_copy(bits: int) -> None:
    """What a CUDA graph needs. Fake tensors have no data, so asking for any raises."""
    with FakeTensorMode():
        words = torch.empty(1000, 512 * bits // 32, dtype=torch.int32)
        scale = torch.empty(1000, 4, dtype=torch.bfloat16)
        ids = torch.empty(7, dtype=torch.int64)
        rows = gather_dequantize(ids, words, scale, bits=bits, group_size=128, dtype=torch.bfloat16)

    assert rows.shape == (7, 512)


def test_one_trace_serves_every_number_of_tokens(seed: int) -> None:
    """vLLM compiles the model around the embedding once, for any number of tokens."""
    embedding = packed(50, 128, 8, 64, seed)

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        return gather_dequantize(ids, embedding.words, embedding.scale, bits=8, group_size=64, dtype=torch.bfloat16)

    traces = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal traces
        traces += 1
        forward: Callable[..., Any] = graph.forward
        return forward

    compiled = torch.compile(look_up, backend=count, fullgraph=True)
    for tokens in (2, 3, 50, 128):
        ids = torch.arange(tokens) % 50
        torch._dynamo.mark_dynamic(ids, 0)
        assert torch.equal(compiled(ids), embedding.rows(ids, torch.bfloat16))
    assert traces == 1


@contextmanager
def layer(
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: int,
    hidden: int,
    method: Any,
    rank: int = 0,
    ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[vocab.VocabParallelEmbedding]:
    """vLLM's own embedding layer as rank `rank` of `ranks` sees it; the sum over the ranks is the test's."""
    with monkeypatch.context() as patch, set_current_vllm_config(VllmConfig()):
        patch.setattr(vocab, "get_tensor_model_parallel_rank", lambda: rank)
        patch.setattr(vocab, "get_tensor_model_parallel_world_size", lambda: ranks)
        patch.setattr(vocab, "tensor_model_parallel_all_reduce", lambda tensor: tensor)
        with torch.compiler.set_stance("force_eager"):
            yield vocab.VocabParallelEmbedding(vocabulary, hidden, params_dtype=dtype, quant_method=method)


def load(module: vocab.VocabParallelEmbedding, tensors: dict[str, torch.Tensor]) -> None:
    """As vLLM's loaders do: each tensor through its parameter's loader, then the method's last step."""
    parameters = dict(module.named_parameters())
    for name, tensor in tensors.items():
        parameters[name].weight_loader(parameters[name], tensor)
    module.quant_method.process_weights_after_loading(module)


def quantized(bits: int, group_size: int) -> QuantizedTokenEmbedding:
    return QuantizedTokenEmbedding(EmbeddingScheme(bits, group_size), NAME)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("vocabulary", "ranks"), [(128, 1), (100, 1), (128, 2), (100, 2), (70, 4), (64, 8)])
def test_every_rank_holds_its_rows_and_the_sum_is_the_embedding(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, ranks: int, bits: int, seed: int
) -> None:
    embedding = packed(vocabulary, 64, bits, 32, seed)
    ids = torch.randperm(vocabulary)
    total = torch.zeros(vocabulary, 64, dtype=torch.bfloat16)
    held = 0
    for rank in range(ranks):
        with layer(monkeypatch, vocabulary, 64, quantized(bits, 32), rank, ranks) as module:
            load(module, embedding.tensors)
            total += module(ids)
            held += module.weight_packed.shape[0]
            own = module.shard_indices.org_vocab_end_index - module.shard_indices.org_vocab_start_index
            padding = torch.arange(own, module.weight_packed.shape[0])
            assert not module.quant_method.embedding(module, padding).any(), f"rank {rank}: padding is not zero"

    assert torch.equal(total, embedding.rows(ids, torch.bfloat16)), f"seed {seed}"
    assert held == (vocabulary + 63) // 64 * 64, "the ranks together hold the padded vocabulary once"


def test_the_result_has_the_model_s_dtype_and_not_the_scale_s(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    embedding = packed(64, 64, 8, 32, seed)
    with layer(monkeypatch, 64, 64, quantized(8, 32), dtype=torch.float16) as module:
        load(module, embedding.tensors)
        assert torch.equal(module(torch.arange(64)), embedding.rows(range(64), torch.float16))


def test_another_lookup_can_take_the_place_of_the_reference(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    embedding = packed(64, 64, 4, 32, seed)
    asked: list[dict[str, Any]] = []

    def gather(ids: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, **how: Any) -> torch.Tensor:
        asked.append(how)
        return gather_dequantize(ids, words, scale, **how)

    method = QuantizedTokenEmbedding(EmbeddingScheme(4, 32), NAME, gather=gather)
    with layer(monkeypatch, 64, 64, method) as module:
        load(module, embedding.tensors)
        assert torch.equal(module(torch.arange(64)), embedding.rows(range(64), torch.bfloat16))
    assert asked == [{"bits": 4, "group_size": 32, "dtype": torch.bfloat16}]


def test_a_draft_can_ask_for_the_dense_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads `weight` of the target before it shares the embedding with a DFlash draft; it may be no tensor."""
    with layer(monkeypatch, 64, 64, quantized(8, 32)) as module:
        assert module.weight is None
        assert set(dict(module.named_parameters())) == {"weight_packed", "weight_scale", "weight_shape"}


MALFORMED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "packed for another width": (
        {"weight_packed": torch.zeros(100, 8, dtype=torch.int32)},
        f"{NAME}.weight_packed is torch.int32 [100, 8], not torch.int32 [100, 16]",
    ),
    "packed along the vocabulary": (
        {"weight_packed": torch.zeros(25, 64, dtype=torch.int32)},
        f"{NAME}.weight_packed is torch.int32 [25, 64], not torch.int32 [100, 16]",
    ),
    "bytes instead of words": (
        {"weight_packed": torch.zeros(100, 64, dtype=torch.uint8)},
        f"{NAME}.weight_packed is torch.uint8 [100, 64], not torch.int32 [100, 16]",
    ),
    "another vocabulary": (
        {"weight_packed": torch.zeros(99, 16, dtype=torch.int32)},
        f"{NAME}.weight_packed is torch.int32 [99, 16], not torch.int32 [100, 16]",
    ),
    "scales of another group size": (
        {"weight_scale": torch.ones(100, 1, dtype=torch.bfloat16)},
        f"{NAME}.weight_scale is torch.bfloat16 [100, 1], not torch.bfloat16 [100, 2]",
    ),
    "scales of another type": (
        {"weight_scale": torch.ones(100, 2, dtype=torch.float16)},
        f"{NAME}.weight_scale is torch.float16 [100, 2], not torch.bfloat16 [100, 2]",
    ),
    "a shape that contradicts the tensors": (
        {"weight_shape": torch.tensor([100, 32])},
        f"{NAME}.weight_shape holds [100, 32], not [100, 64]",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, case: str, seed: int) -> None:
    changed, message = MALFORMED[case]
    with layer(monkeypatch, 100, 64, quantized(8, 32)) as module, pytest.raises(ValueError) as caught:
        load(module, {**packed(100, 64, 8, 32, seed).tensors, **changed})
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["weight_packed", "weight_scale", "weight_shape"])
def test_a_missing_tensor_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str, seed: int) -> None:
    tensors = packed(100, 64, 8, 32, seed).tensors
    del tensors[missing]
    with layer(monkeypatch, 100, 64, quantized(8, 32)) as module, pytest.raises(ValueError) as caught:
        load(module, tensors)
    assert str(caught.value) == (
        f"quantized token embedding: missing from the checkpoint: {NAME}.{missing}. Prepare the checkpoint again"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch, value: float, seed: int) -> None:
    tensors = packed(100, 64, 8, 32, seed).tensors
    tensors["weight_scale"][37, 1] = value
    with layer(monkeypatch, 100, 64, quantized(8, 32)) as module, pytest.raises(ValueError) as caught:
        load(module, tensors)
    assert f"{NAME}.weight_scale has 1 of 256 values that are not finite" in str(caught.value)


def test_made_up_weights_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's "dummy" load format fills floating-point tensors only, and calls no loader."""
    method = QuantizedTokenEmbedding(EmbeddingScheme(8, 32), NAME, loads_bytes=False)
    with layer(monkeypatch, 100, 64, method) as module:
        module.weight_scale.data.uniform_(-1e-3, 1e-3)
        method.process_weights_after_loading(module)
        assert module(torch.arange(100)).isfinite().all()


def test_use_as_an_output_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        layer(monkeypatch, 100, 64, quantized(8, 32)) as module,
        pytest.raises(RuntimeError, match="not for use as lm_head"),
    ):
        module.quant_method.apply(module, torch.zeros(1, 64))


def model_config(*groups: tuple[str, dict[str, Any]], ignore: tuple[str, ...] = (), **text: Any) -> Any:
    """A VllmConfig as far as the seam looks, with vLLM's own reading of `quantization_config`."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    config = {
        "format": "pack-quantized",
        "ignore": list(ignore),
        "config_groups": {
            f"group_{number}": {"targets": [target], "weights": {**weights, **changed}}
            for number, (target, changed) in enumerate(groups)
        },
    }
    return SimpleNamespace(
        quant_config=CompressedTensorsConfig.from_config(config),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(
                **{
                    "hidden_size": 256,
                    "tie_word_embeddings": False,
                    "mtp_use_dedicated_embeddings": False,
                    **text,
                }
            )
        ),
    )


EMBEDDING_TARGETS = [
    "re:.*embed_tokens$",
    "model.embed_tokens",
    "model.language_model.embed_tokens",
    "Embedding",
]


@pytest.mark.parametrize("target", EMBEDDING_TARGETS)
@pytest.mark.parametrize("name", [NAME, "language_model.model.embed_tokens"])
def test_a_group_that_targets_the_embedding_is_found(target: str, name: str) -> None:
    config = model_config(("Linear", {"num_bits": 4}), (target, {}))

    for method in (token_embedding_method(config, name), shared_token_embedding_method(config)):
        assert method is not None, f"{target} was not matched"
        assert method.scheme == EmbeddingScheme(bits=8, group_size=128)


def test_groups_for_other_modules_leave_it_alone() -> None:
    config = model_config(("Linear", {}), ("re:.*lm_head$", {}), (r"re:^mtp\..*", {"num_bits": 4}))

    assert token_embedding_method(config, NAME) is None
    assert shared_token_embedding_method(config) is None, "MTP's layers are packed, the shared embedding is not"


def test_a_group_for_mtp_does_not_decide_about_the_shared_embedding() -> None:
    config = model_config((r"re:^mtp\..*", {"num_bits": 4}), ("re:.*embed_tokens$", {"num_bits": 8}))

    method = shared_token_embedding_method(config)

    assert method is not None and method.scheme.bits == 8


@pytest.mark.parametrize("entry", ["re:.*embed_tokens$", NAME, "model.language_model.embed_tokens"])
def test_an_ignored_embedding_is_left_alone(entry: str) -> None:
    config = model_config(("re:.*embed_tokens$", {}), ignore=(entry,))

    assert token_embedding_method(config, NAME) is None


def test_a_tied_output_head_is_refused() -> None:
    config = model_config(("re:.*embed_tokens$", {}), tie_word_embeddings=True)

    with pytest.raises(ValueError, match="tie_word_embeddings is true"):
        token_embedding_method(config, NAME)


def test_an_embedding_of_mtp_s_own_is_refused() -> None:
    config = model_config(("re:.*embed_tokens$", {}), mtp_use_dedicated_embeddings=True)

    assert token_embedding_method(config, NAME) is not None
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings is true"):
        shared_token_embedding_method(config)


def test_an_asymmetric_scheme_is_refused() -> None:
    config = model_config(("re:.*embed_tokens$", {"symmetric": False}))

    with pytest.raises(ValueError, match="symmetric is False, not True"):
        token_embedding_method(config, NAME)


PROMPTS = ["def main():\n    import os, sys", "class Foo(object):", "return self.x + 1 for the"]
TOKENS = 40


def checkpoint(variable: str) -> Path:
    path = os.environ.get(variable)
    assert path, f"{variable} must name a checkpoint of nano"
    return Path(path)


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(
            model=str(model),
            max_model_len=512,
            max_num_seqs=4,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=False,
            **options,
        )
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


@dataclass(frozen=True)
class Served:
    """What one engine did. `rows` is the whole embedding, looked up; `bytes` is what the layer keeps."""

    tokens: list[list[int]]
    rows: torch.Tensor
    bytes: int
    shared: bool
    accepted: int


def serve(model: Path, draft_tokens: int = 0) -> Served:
    from vllm import SamplingParams

    options: dict[str, Any] = {}
    if draft_tokens:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": draft_tokens}
    with engine(model, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        embed = runner.model.model.embed_tokens
        return Served(
            tokens=[list(output.outputs[0].token_ids) for output in outputs],
            rows=embed(torch.arange(embed.org_vocab_size)),
            bytes=sum(parameter.numel() * parameter.element_size() for parameter in embed.parameters()),
            shared=bool(draft_tokens) and runner.drafter.model.model.embed_tokens is embed,
            accepted=sum(
                metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_accepted_tokens"
            ),
        )


@pytest.fixture(scope="module")
def served() -> dict[str, Served]:
    bf16, int8 = checkpoint("HYPERQWEN_NANO"), checkpoint("HYPERQWEN_NANO_INT8")
    return {"bf16": serve(bf16), "int8": serve(int8), "int8 with MTP": serve(int8, draft_tokens=3)}


def stored(model: Path) -> dict[str, np.ndarray]:
    """The embedding's tensors and the head, as float32 or integers, straight from the file."""
    (file,) = model.glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        found = {
            name.removeprefix("model.embed_tokens."): tensors.get_tensor(name)
            for name in tensors.keys()  # noqa: SIM118
            if name.startswith("model.embed_tokens.") or name == "lm_head.weight"
        }
    return {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in found.items()}


def test_the_engine_looks_up_what_the_checkpoint_stores(served: dict[str, Served]) -> None:
    tensors = stored(checkpoint("HYPERQWEN_NANO_INT8"))
    assert "weight" not in tensors, "HYPERQWEN_NANO_INT8 has an unquantized embedding"
    codes = tensors["weight_packed"].view(np.uint8).astype(np.float64) - 128
    group_size = codes.shape[1] // tensors["weight_scale"].shape[1]
    values = codes * np.repeat(tensors["weight_scale"].astype(np.float64), group_size, axis=1)
    expected = torch.from_numpy(values).to(torch.bfloat16)

    for name in ("int8", "int8 with MTP"):
        assert torch.equal(served[name].rows, expected), name
    assert torch.equal(served["bf16"].rows.float(), torch.from_numpy(stored(checkpoint("HYPERQWEN_NANO"))["weight"]))


def test_the_packed_form_is_not_expanded(served: dict[str, Served]) -> None:
    rows = served["int8"].rows
    vocabulary, hidden = rows.shape

    assert served["bf16"].bytes == vocabulary * hidden * 2
    assert served["int8"].bytes <= vocabulary * (hidden + 2 * hidden // 32) + 16, "codes, scales and the shape"


def test_greedy_text_is_that_of_the_bf16_model(served: dict[str, Served]) -> None:
    assert served["int8"].tokens == served["bf16"].tokens


def test_greedy_text_is_the_same_with_mtp(served: dict[str, Served]) -> None:
    assert served["int8 with MTP"].tokens == served["bf16"].tokens
    assert served["int8 with MTP"].shared, "the draft kept an embedding of its own"
    assert served["int8 with MTP"].accepted > 0, "no draft was accepted: the draft reads a wrong embedding"


def test_greedy_text_follows_the_stored_weights(served: dict[str, Served]) -> None:
    """After token t nano prefers the row of lm_head that is aligned with t's embedding; layers are noise."""
    tensors = stored(checkpoint("HYPERQWEN_NANO"))
    following = (tensors["lm_head.weight"] @ tensors["weight"].T).argmax(axis=0)

    for tokens in served["int8"].tokens:
        assert tokens[1:] == [int(following[token]) for token in tokens[:-1]]
    assert len({token for tokens in served["int8"].tokens for token in tokens}) > 10, "a constant would pass too"


def edited(tmp_path: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """A copy of the int8 checkpoint with its tensors and its config changed."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint("HYPERQWEN_NANO_INT8"), model, copy_function=shutil.copyfile)
    model.chmod(0o755)
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    config = json.loads((model / "config.json").read_text())
    edit(tensors, config)
    save_file(tensors, file, metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_the_engine_refuses_a_checkpoint_without_scales(tmp_path: Path) -> None:
    """vLLM does not look for missing tensors in a quantized model: without our check it serves noise."""
    model = edited(tmp_path, lambda tensors, config: tensors.__delitem__(f"{NAME}.weight_scale"))

    with (
        pytest.raises(Exception, match=rf"missing from the checkpoint: {NAME}\.weight_scale"),
        engine(model),
    ):
        raise AssertionError("the engine started")


def test_the_engine_refuses_a_tied_head(tmp_path: Path) -> None:
    def tie(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors["lm_head.weight"]
        config["tie_word_embeddings"] = True

    with pytest.raises(Exception, match="tie_word_embeddings is true"), engine(edited(tmp_path, tie)):
        raise AssertionError("the engine started")
