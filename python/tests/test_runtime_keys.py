from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.runtime.keys import credential_file, resolve_key, shell_key


def test_no_key() -> None:
    assert resolve_key(None, {"VLLM_API_KEY": "not ours"}) is None


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_key_from_either_place_and_no_line_end_in_it(tmp_path: Path, end: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(f"from-file{end}".encode())
    file.chmod(0o600)
    assert resolve_key(file, {}) == "from-file"
    assert resolve_key(None, {"HYPERQWEN_API_KEY": "from-environment"}) == "from-environment"


@pytest.mark.parametrize("variable", ["other", "same", ""])
def test_two_keys_are_refused_by_name(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "key"
    file.write_text("same")
    with pytest.raises(BadInputError) as raised:
        resolve_key(file, {"HYPERQWEN_API_KEY": variable})
    assert f"HYPERQWEN_API_KEY and the key file {file}" in str(raised.value)


@pytest.mark.parametrize("name", ["key", "my key's $HOME file"])
def test_a_shell_reads_the_key_where_the_server_did(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("from-file\n")
    # No shell where this runs (a sandbox has none); shlex splits words as one does.
    inside = shell_key(Path(name)).removeprefix("$(").removesuffix(")")
    program, file = shlex.split(inside)
    assert program == "cat" and Path(file).is_absolute() and Path(file).read_text() == "from-file\n"
    assert shell_key(None) == "$HYPERQWEN_API_KEY"


@pytest.mark.parametrize("text", ["", "\n", "   "])
def test_an_empty_key_is_refused_and_not_taken_for_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(BadInputError, match="is empty"):
        resolve_key(file, {})
    with pytest.raises(BadInputError, match="HYPERQWEN_API_KEY is empty"):
        resolve_key(None, {"HYPERQWEN_API_KEY": text})


@given(st.text(min_size=1))
def test_what_passes_can_stand_in_a_header_and_what_does_not_is_not_repeated(key: str) -> None:
    try:
        passed = resolve_key(None, {"HYPERQWEN_API_KEY": key})
    except BadInputError as error:
        assert len(key) < 8 or key not in str(error)
    else:
        assert passed is not None and passed.isascii() and not set(passed) & set(" \t\r\n\0\x7f")


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="does not exist"):
        resolve_key(tmp_path / "none", {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(BadInputError, match="is not text"):
        resolve_key(tmp_path / "binary", {})


@pytest.mark.parametrize(
    ("mode", "verb"), [(0o602, "write"), (0o620, "write"), (0o666, "write"), (0o640, "read"), (0o604, "read")]
)
def test_a_file_that_others_may_use_is_no_key(tmp_path: Path, mode: int, verb: str) -> None:
    file = tmp_path / "my key"
    file.write_text("abc")
    file.chmod(mode)
    with pytest.raises(BadInputError) as raised:
        resolve_key(file, {})
    assert f"others may {verb} the key file {file} (mode {mode:04o})" in str(raised.value)
    assert f"chmod 600 '{file}'" in str(raised.value)


def test_a_service_gets_its_key_as_a_credential(tmp_path: Path) -> None:
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert resolve_key(None, environ) is None

    # systemd hands them over with the mode 0440 in a folder that only the service's user may enter.
    (tmp_path / "api-key").write_text("from-systemd\n")
    (tmp_path / "api-key").chmod(0o440)
    assert resolve_key(None, environ) == "from-systemd"
    assert credential_file(environ) == tmp_path / "api-key"

    assert resolve_key(None, environ | {"HYPERQWEN_API_KEY": "said"}) == "said", "what was said comes first"
    (tmp_path / "api-key").unlink()
    (tmp_path / "api-key").write_text("\n")
    with pytest.raises(BadInputError, match=r"the credential .*api-key is empty"):
        resolve_key(None, environ)


def test_a_credential_comes_before_a_key_file_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    credential, named = tmp_path / "api-key", tmp_path / "hidden-by-the-sandbox"
    credential.write_text("from-systemd\n")
    assert [resolve_key(named, environ) for _ in range(2)] == ["from-systemd"] * 2
    said = capfd.readouterr().err.splitlines()
    assert said == [f"hyperqwen: the key is the service's credential {credential}; the key file {named} is not read"]

    credential.unlink()
    with pytest.raises(MissingError, match="hidden-by-the-sandbox does not exist"):
        resolve_key(named, environ)


def test_what_is_no_file_is_no_key(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for place in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(BadInputError, match="is no file"):
            resolve_key(place, {})


def test_a_key_has_a_length_that_a_header_carries() -> None:
    assert resolve_key(None, {"HYPERQWEN_API_KEY": "k" * 1024}) == "k" * 1024
    with pytest.raises(BadInputError, match=r"has 1,025 characters") as raised:
        resolve_key(None, {"HYPERQWEN_API_KEY": "k" * 1025})
    assert "kkk" not in str(raised.value)


def test_a_service_says_where_its_administrator_finds_the_key() -> None:
    assert shell_key(None, Path("/run/credentials/x/api-key")) == "$(sudo cat /etc/hyperqwen/api-key)"
