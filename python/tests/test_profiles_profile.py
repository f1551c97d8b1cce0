from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles.profile import Profile, engine_flags, load, parse

TEXT = """
name = "demo"
summary = "a profile"
engine = "cpu"
[server]
model_name = "nano"
host = "127.0.0.1"
port = 18020
[limits]
context_tokens = 2048
concurrent_requests = 4
kv_cache_mib = 128
threads = 1
[answer]
max_tokens = 64
temperature = 0.0
"""


def problems(text: str) -> str:
    with pytest.raises(BadInputError) as raised:
        parse(text, "p.toml")
    return str(raised.value)


def test_a_profile_is_read() -> None:
    profile = parse(TEXT, "p.toml")

    assert (profile.name, profile.server.port, profile.limits.kv_cache_mib) == ("demo", 18020, 128)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kv_cache_mib", "kv_cache_mb", "limits.kv_cache_mb is not a field; did you mean 'kv_cache_mib'?"),
        ("[answer]", "[anser]", "anser is not a field; did you mean 'answer'?"),
        ("port = 18020", 'port = "18020"', "server.port is '18020' (text)"),
        ("port = 18020", "port = 0", "server.port is 0 (a whole number); it must be greater than or equal to 1"),
        ("port = 18020", "port = 65536", "server.port is 65536"),
        ("threads = 1", "threads = true", "limits.threads is True (a truth value)"),
        ("threads = 1", "threads = 1.0", "limits.threads is 1.0 (a number)"),
        ('engine = "cpu"', 'engine = "tpu"', "engine is 'tpu' (text); it must be 'cpu'"),
        ('"nano"', '"-nano"', "server.model_name is '-nano'"),
        ("max_tokens = 64", "max_tokens = 2048", "must leave room for a prompt"),
        ("threads = 1", "", "limits.threads is missing; add it"),
        ("threads = 1", "threads = 1\ncolour = 2", "limits.colour is not a field; remove it, or use one of:"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(old: str, new: str, said: str) -> None:
    assert old in TEXT
    assert said in problems(TEXT.replace(old, new))


def test_all_problems_are_reported_together() -> None:
    text = TEXT.replace("port = 18020", "port = -1").replace("threads", "thread").replace('engine = "cpu"', "")

    said = problems(text)

    assert said.startswith("4 problems in p.toml:")
    for part in ("server.port is -1", "limits.thread is not a field", "limits.threads is missing", "engine is missing"):
        assert part in said


def test_what_is_not_toml() -> None:
    assert "p.toml is not TOML: " in problems(TEXT + "\n[server")


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    with pytest.raises(MissingError, match="does not exist"):
        load(file)
    file.write_bytes(b"\xff")
    with pytest.raises(BadInputError, match="not UTF-8"):
        load(file)
    file.write_text(TEXT)
    assert isinstance(load(file), Profile)


def test_flags_carry_the_profile() -> None:
    flags = engine_flags(parse(TEXT, "p.toml"), Path("/m"), host="::1", port=99)
    given = dict(pairwise(flags))

    assert given["--model"] == "/m" and given["--served-model-name"] == "nano"
    assert given["--host"] == "::1" and given["--port"] == "99"
    assert given["--kv-cache-memory-bytes"] == str(128 * 1024 * 1024)
    assert given["--max-model-len"] == "2048" and given["--max-num-seqs"] == "4"
    assert not [flag for flag in flags if "key" in flag and "api" in flag], "a key in argv is for every user to read"
