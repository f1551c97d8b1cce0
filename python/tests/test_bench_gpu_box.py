"""bench/gpu/box.py: a kit in pieces becomes the patched engine, whole or not at all."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.patches.make import diff, header_text
from hyperqwen.prepare import bpe, geometry, nano
from hyperqwen.runtime import site

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench/gpu/box.py"

_spec = importlib.util.spec_from_file_location("gpu_box", SCRIPT)
assert _spec is not None and _spec.loader is not None
box: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(box)

HEADER = {
    "Subject": "one",
    "Kind": "fix",
    "Reason": "two",
    "Upstream": "none known",
    "Retires": "when three",
    "Seam": "none",
    "Test": "checks/engine/test_x.py",
}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one patch, a kit of several pieces in it, and nano's tokenizer; returns the checkout."""
    checkout = tmp_path / "checkout"
    (checkout / "patches").mkdir(parents=True)
    (checkout / "python").symlink_to(ROOT / "python")
    (checkout / "prepare").symlink_to(ROOT / "prepare")
    change = {"vllm/a.py": (b"x = 1\n", b"x = 2\n")}
    (checkout / "patches/0001-one.patch").write_bytes(header_text(HEADER).encode() + diff(change))
    (checkout / "patches/series").write_text("0001-one.patch\n")
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in {"vllm/a.py": b"x = 1\n", "vllm/b.bin": os.urandom(5000), "other.py": b"y = 1\n"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    pieces = [data.getvalue()[start : start + 2000] for start in range(0, len(data.getvalue()), 2000)]
    assert len(pieces) == 3
    for number, piece in enumerate(pieces):
        (checkout / f".kit{number}").mkdir()
        (checkout / f".kit{number}/p").write_bytes(piece)
    source = tmp_path / "nano"
    source.mkdir()
    vocabulary = bpe.Vocabulary(tuple(bpe.byte_alphabet()), (), nano.SPECIALS)
    (source / "tokenizer.json").write_text(bpe.tokenizer(vocabulary).to_str())
    (source / "tokenizer_config.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(box, "ROOT", checkout)
    return checkout


def run(home: Path, *arguments: str) -> int:
    code: int = box.main(["--home", str(home), *arguments])
    return code


def taken(kit: Path, home: Path) -> None:
    assert box.pack(kit / ".kit", kit.parent / "nano") == 3
    for number in range(3):
        assert run(home, "take", str(kit / f".kit{number}")) == 0


@pytest.mark.parametrize("programs", [True, False], ids=["as the machine has it", "without tar and xz"])
def test_from_pieces_to_an_engine(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], programs: bool
) -> None:
    home = tmp_path / "home"
    which = box.shutil.which
    compiler = str(tmp_path / "bin/cc")
    monkeypatch.setattr(
        box.shutil, "which", lambda name: compiler if name == "cc" else which(name) if programs else None
    )
    taken(kit, home)
    assert capsys.readouterr().out.splitlines()[-1] == "piece 2; missing: none"
    for _ in range(2):  # Once more over what is there already.
        assert run(home, "open") == 0
        assert capsys.readouterr().out == "vllm/a.py\n"
    assert (home / "site/vllm/a.py").read_text() == "x = 2\n"
    assert ((home / "site/other.py").read_text(), (home / "site/vllm/b.bin").stat().st_size) == ("y = 1\n", 5000)
    parts = site.read(home / "site.json", "serve")
    assert (parts.engine, parts.cc, parts.engine_python) == ("cuda", tmp_path / "bin", Path(sys.executable))
    assert parts.python_path == [home / "site", kit / "python"]
    assert geometry.load(home / "models/qwen3.8-27b-fast").num_hidden_layers == 64
    assert geometry.load_drafter(home / "models/qwen3.8-27b-dflash2").num_hidden_layers == 5


def test_pieces_come_in_any_order_after_the_first(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    box.pack(kit / ".kit", kit.parent / "nano")
    assert run(home, "take", str(kit / ".kit2")) == 4
    assert "take the folder that `pack` wrote it to" in capsys.readouterr().err
    assert [run(home, "take", str(kit / f".kit{number}")) for number in (0, 2)] == [0, 0]
    assert capsys.readouterr().out == "piece 0; missing: [1, 2]\npiece 2; missing: [1]\n"
    assert run(home, "open") == 4
    assert "the kit lacks the pieces [1]" in capsys.readouterr().err
    assert not (home / "site").exists()


def test_a_torn_piece_is_refused(kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    taken(kit, home)
    (kit / ".kit1/p").write_bytes((kit / ".kit1/p").read_bytes()[:-1])
    assert run(home, "take", str(kit / ".kit1")) == 5
    assert "is no piece of the kit" in capsys.readouterr().err


@pytest.mark.parametrize("programs", [True, False])
def test_what_is_no_archive(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], programs: bool
) -> None:
    if not programs:
        monkeypatch.setattr(box.shutil, "which", lambda name: None)
    (kit / ".kit1/p").write_bytes(b"x" * 2000)
    taken(kit, tmp_path / "home")
    assert run(tmp_path / "home", "open") == 5
    assert "the kit does not unpack" in capsys.readouterr().err
    assert not (tmp_path / "home/site").exists()


def test_patches_that_do_not_fit_the_kit(kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = kit / "patches/0001-one.patch"
    patch.write_bytes(patch.read_bytes().replace(b"-x = 1", b"-x = 7"))
    taken(kit, tmp_path / "home")
    assert run(tmp_path / "home", "open") == 5
    assert "the patches do not apply to the kit" in capsys.readouterr().err
    assert not (tmp_path / "home/site").exists()


def test_no_kit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "pack", "--kit", str(tmp_path / ".kit"), "--nano", str(tmp_path)) == 4
    assert "make the kit: ../shared/tools/gpu-kit" in capsys.readouterr().err


def test_run_is_our_command_with_the_boxs_variables(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--home", str(tmp_path), "run", "patches", "list", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "0007-kv-group-size.patch" in [row["name"] for row in json.loads(result.stdout)]
    assert box.environment(tmp_path)["HYPERQWEN_MODEL_LOAD_FORMAT"] == "dummy"
