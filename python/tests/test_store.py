"""Store paths and NAR hashes against what Nix itself printed; the nix-store program by a stand-in."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import HyperqwenError, UnsuitableError, VerificationError
from hyperqwen.store import NixStore, base32, fixed_path, is_store_name, nar_sha256

HELLO = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
DIGITS = "0123456789abcdfghijklmnpqrsvwxyz"


@pytest.mark.parametrize(
    ("name", "sha256", "recursive", "path"),
    [
        ("store-golden.txt", HELLO, False, "/nix/store/g2s7n3hhw5p2nzwrvavj3fw9mjh3rkcz-store-golden.txt"),
        (
            "busybox-1.35.0",
            "494cdad037cf7d0a75ee816fc060b92663de1309602aff43c2f9ce55dade4c40",
            True,
            "/nix/store/5brm60281334v62h2y1w67vg56v5bjiz-busybox-1.35.0",
        ),
    ],
)
def test_paths_are_those_that_nix_gives(name: str, sha256: str, recursive: bool, path: str) -> None:
    assert fixed_path(name, sha256, recursive=recursive) == path


def test_the_store_directory_is_part_of_the_path() -> None:
    there = fixed_path("store-golden.txt", HELLO, store_dir="/other/store")
    assert there.startswith("/other/store/")
    assert Path(there).name != Path(fixed_path("store-golden.txt", HELLO)).name


def test_base32_of_a_sha256_is_nix_hashs() -> None:
    assert base32(bytes.fromhex(HELLO)) == "00xyyr3fi8l6hb839bv3f7yb86yjv7xi1cgh1xnhipym4asvb4aq"


@given(st.binary(max_size=64))
def test_base32_keeps_every_bit(data: bytes) -> None:
    text = base32(data)
    number = 0
    for digit in text:
        number = number << 5 | DIGITS.index(digit)
    assert len(text) == -(-len(data) * 8 // 5)
    assert number.to_bytes(len(data) + 1, "little")[: len(data)] == data


@pytest.mark.parametrize("name", ["", ".hidden", "a~b", "a b", "ä", "a/b", "x" * 212, "a\n"])
def test_names_that_nix_refuses(name: str) -> None:
    assert not is_store_name(name)
    with pytest.raises(ValueError, match="legal"):
        fixed_path(name, HELLO)


def _tree(root: Path) -> Path:
    tree = root / "t"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "eight").write_text("abcdefgh")
    (tree / "empty").write_bytes(b"")
    (tree / "link").symlink_to("d/eight")
    (tree / "run").write_text("hello\n")
    (tree / "run").chmod(0o755)
    (tree / "Z").write_text("z")
    return tree


def test_nar_hashes_are_nix_hashs(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    plain = tmp_path / "plain"
    plain.write_text("hello\n")
    plain.chmod(0o644)
    assert nar_sha256(plain) == "1c37d01af40be2e80691de3cc3df44377a699afbb17c68f080964b2fd071fc13"
    assert nar_sha256(tree / "run") == "65436039d3f93ca19a8dbf1c60b15739ed58f53f14b8d372acc1b351533010fa"
    assert nar_sha256(tree / "link") == "ef353ec4f560a27dd1e3318de8a036e5f52906d43ae63744a6f891435edf9f6b"
    assert nar_sha256(tree) == "9c6a34280ff206304ff6eb302234bc49610d82641313081c1e7ac31acc4458b8"


def test_a_nar_has_no_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither"):
        nar_sha256(tmp_path / "pipe")


def _program(folder: Path, body: str) -> str:
    """An executable that stands in for nix-store."""
    script = folder / "nix-store"
    script.write_text(f"#!{sys.executable}\nimport os, sys\nargs = sys.argv[1:]\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def test_one_query_says_which_paths_are_invalid(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    program = _program(
        tmp_path,
        f"open({str(log)!r}, 'a').write(' '.join(args[:3]) + chr(10))\n"
        "print(*[a for a in args if 'missing' in a], sep=chr(10))",
    )
    paths = [f"/nix/store/{kind}-{i}" for i in range(40) for kind in ("missing", "here")]
    assert NixStore(program=program).invalid(paths) == {path for path in paths if "missing" in path}
    assert log.read_text().splitlines() == ["--check-validity --print-invalid /nix/store/missing-0"]


def test_long_argument_lists_are_split(tmp_path: Path) -> None:
    program = _program(tmp_path, "assert sum(map(len, args)) < 70_000\nprint(*args[2:], sep=chr(10))")
    files = [Path(f"/nowhere/{'x' * 200}-{i}") for i in range(1000)]
    assert NixStore(program=program).add_fixed(files) == [str(file) for file in files]


def test_flags_url_and_build_users(tmp_path: Path) -> None:
    program = _program(tmp_path, "print(' '.join(args).replace(' ', '_'))")
    store = NixStore("/some/root", program=program)
    added = store.add_fixed([Path("/a/file")], recursive=True)
    assert added == ["--store_/some/root_--add-fixed_--recursive_sha256_/a/file"]
    assert store.real_path("/nix/store/x") == Path("/some/root/nix/store/x")
    assert NixStore("local?root=/r&x=1").real_path("/nix/store/x") == Path("/r/nix/store/x")
    assert NixStore().real_path("/nix/store/x") == Path("/nix/store/x")


def test_the_store_directory_follows_the_environment() -> None:
    assert NixStore(environ={"NIX_STORE_DIR": "/tmp/s/"}).store_dir == "/tmp/s"
    assert NixStore(environ={}).store_dir == "/nix/store"


def test_a_disk_is_named_even_before_the_store_exists(tmp_path: Path) -> None:
    assert NixStore(str(tmp_path / "not" / "yet"), environ={}).disk() == tmp_path


@pytest.mark.parametrize("spelling", ["{0}", "{0}?x=1", "local?root={0}", "./new"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_a_folder_without_a_store_lacks_everything_and_stays_as_it_is(
    tmp_path: Path, spelling: str, by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = _program(tmp_path, "os.makedirs('new/nix/var/nix/db')")
    url, root = spelling.format(tmp_path / "new"), tmp_path / "new"
    environ = {"PATH": os.environ["PATH"]}
    if by_variable:
        store = NixStore(program=program, environ=environ | {"NIX_REMOTE": url})
    else:
        store = NixStore(url, program=program, environ=environ)

    assert store.invalid(["/nix/store/a", "/nix/store/b"]) == {"/nix/store/a", "/nix/store/b"}
    assert not root.exists(), "a question has made a store"

    (root / "nix/var/nix/db").mkdir(parents=True)
    _program(tmp_path, "print(args[-1])")
    assert store.invalid(["/nix/store/a", "/nix/store/b"]) == {"/nix/store/b"}, "Nix was not asked"
    assert store.real_path("/nix/store/a") == root / "nix/store/a"


@pytest.mark.parametrize(
    "url", [None, "auto", "daemon", "unix:///socket?root=/r", "ssh://box", "local?root=/r&state=/s"]
)
def test_nix_is_asked_about_every_other_store(tmp_path: Path, url: str | None) -> None:
    store = NixStore(url, program=_program(tmp_path, "print(args[-1])"), environ={"PATH": os.environ["PATH"]})
    assert store.invalid(["/nix/store/a", "/nix/store/b"]) == {"/nix/store/b"}


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        ("error: writing to file: No space left on device", UnsuitableError, "no disk space left"),
        ("error: executing SQLite statement 'x': disk I/O error", UnsuitableError, "no disk space left"),
        ("error: opening lock file '/nix/var/nix/db/big-lock': Permission denied", UnsuitableError, "daemon"),
        ("error: cannot connect to socket at '/nix/var/nix/daemon-socket/socket'", UnsuitableError, "daemon"),
        ("error: something else", HyperqwenError, "something else"),
    ],
)
def test_what_nix_says_becomes_one_error(tmp_path: Path, said: str, kind: type[HyperqwenError], words: str) -> None:
    program = _program(tmp_path, f"sys.stderr.write({said!r})\nsys.exit(1)")
    with pytest.raises(HyperqwenError) as caught:
        NixStore(program=program).add_fixed([Path("/a/file")])
    assert type(caught.value) is kind
    assert words in str(caught.value)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    store = NixStore(program=str(tmp_path / "nix-store"))
    assert not store.available
    with pytest.raises(UnsuitableError, match="install Nix"):
        store.invalid(["/nix/store/x"])


def test_a_wrong_number_of_paths_is_not_believed(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="1 paths for 2 files"):
        NixStore(program=_program(tmp_path, "print('/nix/store/only')")).add_fixed([Path("/a"), Path("/b")])
