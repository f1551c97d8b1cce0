"""What an engine can do is what its patches' headers say, and they can say nothing unheard of."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyperqwen import share
from hyperqwen.errors import BadInputError
from hyperqwen.patches.make import diff, header_text
from hyperqwen.profiles.capabilities import CAPABILITIES, provided, providers, unknown

HEADER = {
    "Subject": "one",
    "Kind": "fix",
    "Reason": "two",
    "Upstream": "none known",
    "Retires": "when three",
    "Seam": "none",
    "Test": "checks/engine/test_x.py",
}


def series(tmp_path: Path, *provides: str | None) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    names = []
    for number, value in enumerate(provides, 1):
        names.append(f"{number:04}-p.patch")
        fields = HEADER | ({} if value is None else {"Provides": value})
        change = {f"vllm/{number}.py": (b"x\n", b"y\n")}
        (folder / names[-1]).write_bytes(header_text(fields).encode() + diff(change))
    (folder / "series").write_text("\n".join(names))
    return folder


def test_what_the_headers_say_together(tmp_path: Path) -> None:
    folder = series(tmp_path, "kvarn", None, "kv-group-size, kvarn")
    assert provided(folder) == {"kvarn", "kv-group-size"}
    assert providers(folder) == {"kvarn": ("0001-p.patch", "0003-p.patch"), "kv-group-size": ("0003-p.patch",)}


def test_no_patches_no_capabilities(tmp_path: Path) -> None:
    assert provided(series(tmp_path)) == frozenset()


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        provided(series(tmp_path, "kvarn", "kv-groupsize"))
    assert "0002-p.patch: Provides: there is no capability 'kv-groupsize'; did you mean 'kv-group-size'?" in str(
        caught.value
    )


def test_a_name_like_no_other_gets_the_list() -> None:
    reason = unknown("zzz")
    assert reason is not None and all(name in reason for name in CAPABILITIES)
    assert [unknown(name) for name in CAPABILITIES] == [None] * len(CAPABILITIES)


def test_an_unsound_series_is_refused(tmp_path: Path) -> None:
    folder = series(tmp_path, "kvarn")
    (folder / "series").write_text("0001-p.patch\n0002-gone.patch\n")
    with pytest.raises(BadInputError, match=r"cannot read 0002-gone\.patch"):
        provided(folder)


def test_this_engine() -> None:
    assert provided(share.folder("patches")) >= {"quantized-embedding", "kv-group-size", "torch-topk-selector"}
