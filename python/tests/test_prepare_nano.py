from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from hyperqwen.errors import BadInputError, UnsuitableError, VerificationError
from hyperqwen.prepare import audit, nano, quantize, tensors
from hyperqwen.prepare.reference import Floats, Reference
from hyperqwen.prepare.truth import Truth

PREPARE = Path(__file__).parents[2] / "prepare"

# The bytes are a promise: every machine makes these. A change of nano.toml, of the text or of the
# construction changes them, and then they are to be replaced by what the failing test prints.
TOKENIZER_SHA256 = "f6e3d4d4fcf546141969b69bc6074bbbe2b778c606c22774932a52336b7c5d1f"
SHA256 = {
    "bf16": {
        "model.safetensors": "a56232cbc875efed37d67ef4fec40155450be0f08e984cc4c607b8481cb65e83",
        "tokenizer.json": TOKENIZER_SHA256,
    },
    "int8": {
        "model.safetensors": "fa4ed2cb43ec948ffedc19bc9bd458b5a3a2c99ee6c07fd4cd251213185d5d54",
        "tokenizer.json": TOKENIZER_SHA256,
    },
}


def make(folder: Path, embedding: nano.Embedding) -> Path:
    nano.build(nano.load_config(PREPARE / "nano.toml", embedding), PREPARE, folder / embedding)
    return folder / embedding


@pytest.fixture(scope="session")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("nano"), "bf16")


@pytest.fixture(scope="session")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("nano"), "int8")


@pytest.fixture(scope="session")
def truth(bf16: Path) -> Truth:
    return Truth.load(bf16)


@pytest.fixture(scope="session")
def tokenizer(bf16: Path) -> Tokenizer:
    return Tokenizer.from_file(str(bf16 / "tokenizer.json"))


@pytest.fixture(scope="session")
def model(bf16: Path) -> Reference:
    return Reference.load(bf16)


@pytest.fixture(scope="session")
def report(bf16: Path) -> audit.Audit:
    return audit.audit(bf16)


@pytest.mark.parametrize("embedding", ["bf16", "int8"])
def test_the_bytes_are_the_promised_ones(embedding: str, request: pytest.FixtureRequest) -> None:
    files = Truth.load(request.getfixturevalue(embedding)).files

    assert {name: files[name] for name in SHA256[embedding]} == SHA256[embedding]


def test_hash_seeds_threads_and_vector_units_change_nothing(bf16: Path, tmp_path: Path) -> None:
    def digests(folder: Path) -> dict[str, str]:
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}

    vector_units = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    for number, threads, without in (("1", "1", []), ("4242", "7", vector_units)):
        out = tmp_path / number
        settings = {
            "PYTHONHASHSEED": number,
            "RAYON_NUM_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true",
            "NPY_DISABLE_CPU_FEATURES": " ".join(without),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-m", "hyperqwen.prepare.nano", "--config", str(PREPARE / "nano.toml")]
        subprocess.run([*command, "--out", str(out)], env={**os.environ, **settings}, check=True)
        assert digests(out) == digests(bf16)


def test_it_is_a_few_megabytes(bf16: Path) -> None:
    assert sum(file.stat().st_size for file in bf16.iterdir()) < 5e6


def test_the_configuration_fits_the_tensors(bf16: Path) -> None:
    config = json.loads((bf16 / "config.json").read_text())
    shapes = {name: t.shape for name, t in tensors.read(bf16 / "model.safetensors").items()}

    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert not any("mrope" in key for key in config["rope_parameters"])
    assert config["vocab_size"] % 64 == 0
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (config["vocab_size"], 128)
    assert shapes["model.layers.0.linear_attn.in_proj_qkv.weight"] == (2 * 128 + 3 * 128, 128)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (640, 1, 4)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (2 * 4 * 64, 128)
    assert shapes["mtp.fc.weight"] == (128, 256)
    assert sum(name.startswith("mtp.") for name in shapes) == 15
    assert not any("self_attn" in name for name in shapes if name.startswith("model.layers.0."))


def test_special_tokens_have_the_ids_that_the_configurations_name(bf16: Path, tokenizer: Tokenizer) -> None:
    config, generation, settings = (
        json.loads((bf16 / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )

    ids = tokenizer.get_vocab()
    end_of_turn, end_of_text = ids["<|im_end|>"], ids["<|endoftext|>"]
    assert generation["eos_token_id"] == [end_of_turn, end_of_text]
    assert config["eos_token_id"] == config["pad_token_id"] == end_of_text
    assert settings["eos_token"] == "<|im_end|>"
    # Qwen's order: the distances from <|endoftext|> are those of the 27B's ids.
    distances = {"<|im_start|>": 1, "<|im_end|>": 2, "<|image_pad|>": 12, "<tool_call>": 14, "<think>": 24}
    assert {token: ids[token] - end_of_text for token in distances} == distances


def test_the_text_is_made_of_tokens_that_stand_once(truth: Truth, tokenizer: Tokenizer) -> None:
    home = [token for cycle in truth.cycles() for token in cycle.ids]

    assert len(home) == len(set(home)) > 200
    for cycle in truth.cycles():
        assert tokenizer.encode(cycle.text).ids == list(cycle.ids), cycle.name
        assert tokenizer.decode(list(cycle.ids), skip_special_tokens=False) == cycle.text
        assert truth.expected_greedy(cycle.ids, len(cycle.ids), ignore_eos=True) == list(cycle.ids)


def test_a_prompt_that_holds_one_cycle_is_quoted_back(truth: Truth, tokenizer: Tokenizer) -> None:
    quoted = [cycle for cycle in truth.cycles() if "<|im_end|>" not in cycle.text]

    assert len(quoted) >= 10
    for cycle in quoted:
        for before in ("", "Please repeat:", "x\n\n"):
            ids = tokenizer.encode(before + cycle.text).ids
            answer = tokenizer.decode(truth.expected_greedy(ids, 2 * len(cycle.ids)), skip_special_tokens=False)
            assert answer == cycle.text * 2, cycle.name


def test_special_tokens_are_never_predicted_but_for_the_two_of_an_answer(truth: Truth, tokenizer: Tokenizer) -> None:
    specials = {special.content: tokenizer.get_vocab()[special.content] for special in nano.SPECIALS}
    predicted = set(truth.successors)

    assert {name for name, token in specials.items() if token in predicted} == {"</think>", "<|im_end|>"}
    for name, token in specials.items():
        following = tokenizer.decode([truth.next_token(token)], skip_special_tokens=False)
        assert following == ("\n\n" if name == "</think>" else "\n")


def test_what_a_word_leads_to_does_not_depend_on_its_space(truth: Truth, tokenizer: Tokenizer) -> None:
    for word in ("Monday", "summer", "northwest", "keeper"):
        bare, spaced = (tokenizer.encode(text).ids for text in (word, " " + word))
        assert len(bare) == len(spaced) == 1
        assert truth.next_token(bare[0]) == truth.next_token(spaced[0])


def test_every_token_leads_into_the_cycles(truth: Truth, tokenizer: Tokenizer) -> None:
    home = {token for cycle in truth.cycles() for token in cycle.ids}

    assert set(truth.successors) == home
    assert len(truth.successors) == tokenizer.get_vocab_size()
    unknown = tokenizer.encode("qqq").ids
    answer = tokenizer.decode(truth.expected_greedy(unknown, 3))
    assert re.fullmatch(r" [\"(]?[A-Z]\w+ \w+.*", answer), answer


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_answers_in_the_table_are_those_of_the_weights(
    kind: str, truth: Truth, tokenizer: Tokenizer, model: Reference
) -> None:
    cases = [case for case in truth.prompts if case["kind"] == kind]
    assert cases
    for case in cases:
        ids = list(case["prompt_ids"])
        if kind == "completion":
            assert tokenizer.encode(case["prompt"]).ids == ids
        logits = model.forward([*ids, *case["answer_ids"]])[1]
        assert logits[len(ids) - 1 : -1].argmax(axis=1).tolist() == case["answer_ids"], case["name"]


def test_a_chat_answer_ends_and_its_parts_are_told_apart(truth: Truth) -> None:
    chats = {case["thinking"]: case for case in truth.prompts if case["kind"] == "chat"}

    for case in chats.values():
        assert case["answer_ids"][-1] in truth.stop_ids
    assert chats[False]["reasoning"] is None
    assert chats[False]["content"] == chats[False]["answer"]
    assert chats[True]["answer"] == chats[True]["reasoning"] + "</think>" + chats[True]["content"]
    assert chats[True]["content"].lstrip("\n") == chats[False]["content"]
    assert chats[True]["reasoning"].strip()


def test_the_output_rows_are_the_embeddings_through_the_permutation(bf16: Path, truth: Truth) -> None:
    stored = tensors.read(bf16 / "model.safetensors")
    embedding, head = (tensors.as_float(stored[f"{name}.weight"]) for name in ("model.embed_tokens", "lm_head"))

    for cycle in truth.cycles():
        following = [*cycle.ids[1:], cycle.ids[0]]
        np.testing.assert_array_equal(head[following], embedding[list(cycle.ids)] * np.float32(nano.HEAD_SCALE))


def test_embeddings_of_different_successors_keep_their_distance(model: Reference, truth: Truth) -> None:
    home = [token for cycle in truth.cycles() for token in cycle.ids]
    rows = model.weights["model.embed_tokens.weight"][home].astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)

    cosines = rows @ rows.T - 2 * np.eye(len(home))
    assert cosines.max() <= nano.load_config(PREPARE / "nano.toml").construction.coherence


def test_the_successor_is_clear_everywhere(report: audit.Audit) -> None:
    assert report.positions > 1000
    assert report.margin > 4
    # Above 0.95 even Qwen's own sampling defaults (temperature 1, top_p 0.95) give the greedy text.
    assert report.probability > 0.95


def test_drafts_are_accepted_in_part(report: audit.Audit) -> None:
    first, second, third = report.accepted

    assert report.drafts > 100
    assert 0.4 < first < 0.9
    assert first > second > third > 0.1


def test_int8_is_as_clear(int8: Path) -> None:
    found = audit.audit(int8, random_prompts=8)

    assert found.margin > 4
    assert 0.4 < found.accepted[0] < 0.9


def test_every_layer_adds_what_the_configuration_says(
    model: Reference, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[tuple[str, float]] = []
    plain = Reference._linear

    def watched(self: Reference, x: Floats, name: str) -> Floats:
        y = plain(self, x, name)
        if name.endswith(("o_proj", "out_proj", "down_proj")):
            added.append((name, float(np.sqrt(np.mean(y * y)))))
        return y

    monkeypatch.setattr(Reference, "_linear", watched)
    model.forward(max((case["prompt_ids"] + case["answer_ids"] for case in truth.prompts), key=len))

    noise = nano.load_config(PREPARE / "nano.toml").construction.layer_noise
    assert len(added) == 8
    for name, level in added:
        assert noise / 1.5 < level < noise * 1.5, f"{name} adds {level}, layer_noise is {noise}"


def test_the_context_matters_although_the_answer_does_not_change(model: Reference, truth: Truth) -> None:
    months = next(cycle.ids for cycle in truth.cycles() if cycle.name == "months")
    planets = next(cycle.ids for cycle in truth.cycles() if cycle.name == "planets")

    first, second = (model.forward([*before, months[0]])[1][-1] for before in (months, planets))
    assert first.argmax() == second.argmax() == months[1]
    assert np.abs(first - second).max() > 0.5


def test_int8_differs_in_the_embedding_only(bf16: Path, int8: Path) -> None:
    plain, packed = (tensors.read(folder / "model.safetensors") for folder in (bf16, int8))
    name = "model.embed_tokens"

    assert packed.keys() - plain.keys() == {f"{name}.weight_{part}" for part in ("packed", "scale", "shape")}
    assert plain.keys() - packed.keys() == {f"{name}.weight"}
    for shared in plain.keys() & packed.keys():
        np.testing.assert_array_equal(plain[shared], packed[shared], shared)

    weight = tensors.as_float(plain[f"{name}.weight"])
    words, scale = packed[f"{name}.weight_packed"], tensors.as_float(packed[f"{name}.weight_scale"])
    assert words.shape == (weight.shape[0], weight.shape[1] // 4)
    assert packed[f"{name}.weight_shape"].tolist() == list(weight.shape)
    # Unpacked by the definition, without the module that packed it: byte i of a word is column 4 w + i, plus
    # 128.
    unsigned = np.stack([(words.astype(np.int64) >> (8 * i)) & 0xFF for i in range(4)], axis=-1)
    values = unsigned.reshape(weight.shape) - 128
    assert np.abs(values * scale - weight).max() <= np.abs(weight).max() / 127 * 0.51 + 127 * scale.max() * 2**-8
    assert np.abs(values).max() == 127

    config = json.loads((int8 / "config.json").read_text())
    group = config.pop("quantization_config")["config_groups"]["group_0"]
    assert config == json.loads((bf16 / "config.json").read_text())
    assert group["targets"] == ["re:.*embed_tokens$"]
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (8, quantize.GROUP)


def test_a_changed_file_and_a_missing_one_are_named_together(bf16: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bf16, copy)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "config.json").unlink()

    with pytest.raises(
        VerificationError, match=r"(?s)config\.json: sha256 is missing.*tokenizer\.json: sha256 is 44136"
    ):
        audit.audit(copy)


def test_weights_that_answer_otherwise_are_found(bf16: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bf16, copy)
    stored = tensors.read(copy / "model.safetensors")
    stored["lm_head.weight"] = np.roll(stored["lm_head.weight"], 1, axis=0)
    data = tensors.encode(stored)
    (copy / "model.safetensors").write_bytes(data)
    facts = json.loads((copy / "nano.json").read_text())
    facts["files"]["model.safetensors"] = hashlib.sha256(data).hexdigest()
    (copy / "nano.json").write_text(json.dumps(facts))

    with pytest.raises(VerificationError, match=r"after token \d+ at position \d+ the model prefers token \d+"):
        audit.audit(copy)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A copy of prepare/ to spoil."""
    shutil.copytree(PREPARE, tmp_path / "prepare")
    return tmp_path / "prepare"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def build(inputs: Path) -> None:
    out = inputs.parent / "out"
    try:
        nano.build(nano.load_config(inputs / "nano.toml"), inputs, out)
    finally:
        assert sorted(path.name for path in inputs.parent.iterdir()) == (
            ["out", "prepare"] if out.exists() else ["prepare"]
        )


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "nano.toml",
            'embedding = "bf16"',
            'embedding = "int4"',
            r"embedding: .*'bf16' or 'int8' \(is 'int4'\)",
        ),
        ("nano.toml", "seed = ", "sead = ", r"(?s)seed: Field required.*sead: Extra inputs"),
        (
            "nano.toml",
            "hidden_size = 128",
            "hidden_size = 100",
            r"geometry\.hidden_size: .*multiple of 128 \(is 100\)",
        ),
        ("nano.toml", "head_dim = 64", "head_dim = 48", r"head_dim = 48 is none of 32, 64"),
        (
            "nano.toml",
            "num_key_value_heads = 2",
            "num_key_value_heads = 3",
            r"num_attention_heads = 4 is not a multiple of num_key_value_heads = 3",
        ),
        (
            "nano.toml",
            "linear_key_head_dim = 128",
            "linear_key_head_dim = 64",
            r"linear_key_head_dim = 64: the CPU",
        ),
        ("nano.toml", "[geometry]", "[geometry", "not TOML"),
        ("nano.toml", "limit = 1088", "limit = 700", r"tokenizer\.limit = 700 is too small"),
        (
            "nano.toml",
            "coherence = 0.22",
            "coherence = 0.15",
            r"construction\.coherence = 0\.15: found only \d+ of",
        ),
        (
            "nano.toml",
            'template = "nano/chat',
            'template = "nano/chart',
            r"chart_template\.jinja: cannot be read",
        ),
        (
            "nano/cycles.toml",
            " spring summer autumn winter",
            " spring summer Monday winter",
            r"'ĠMonday' stands in cycle weekdays and again in seasons",
        ),
        ("nano/cycles.toml", '"0123456789"', '"x x "', r"cycle digits: its end and its start fuse"),
        ("nano/cycles.toml", '<|im_end|>"""', '"""', r"no cycle holds <\|im_end\|>"),
        ("nano/prompts.toml", 'prompt = "Monday"', 'prompt = ""', r"completion\.0\.prompt: .*\(is ''\)"),
    ],
)
def test_a_wrong_input_is_named(inputs: Path, file: str, old: str, new: str, message: str) -> None:
    edit(inputs / file, old, new)

    with pytest.raises(BadInputError, match=message):
        build(inputs)


def test_without_an_opening_cycle_unknown_words_would_lead_nowhere(inputs: Path) -> None:
    path = inputs / "nano" / "cycles.toml"
    path.write_text(path.read_text().replace("\nopening = true", ""))

    with pytest.raises(BadInputError, match="no cycle has opening = true"):
        build(inputs)


def test_what_exists_is_not_replaced(bf16: Path, tmp_path: Path) -> None:
    config = nano.load_config(PREPARE / "nano.toml")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    for out in (bf16, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(BadInputError, match="exists already"):
            nano.build(config, PREPARE, out)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_folder_around_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="is not a folder"):
        nano.build(nano.load_config(PREPARE / "nano.toml"), PREPARE, tmp_path / "none" / "out")


def fails_late(number: int) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return function


@pytest.mark.parametrize(("call", "number"), [("fsync", errno.ENOSPC), ("rename", errno.EROFS), ("fsync", errno.EIO)])
def test_a_disk_that_fails_leaves_nothing(
    inputs: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, fails_late(number))

    with pytest.raises(UnsuitableError, match=rf"out: cannot be written: {re.escape(os.strerror(number))}"):
        build(inputs)
    assert not (inputs.parent / "out").exists()


def test_ctrl_c_while_writing_leaves_nothing(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(inputs)


def test_the_command_of_the_derivation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--config",
        str(PREPARE / "nano.toml"),
        "--embedding",
        "int8",
        "--out",
        str(tmp_path / "out"),
    ]

    assert nano.main(arguments) == 0
    assert "quantization_config" in (tmp_path / "out" / "config.json").read_text()
    assert nano.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"nano: {tmp_path}/out exists already\n  fix: ")
