from __future__ import annotations

import base64
import gzip
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.delivery.unit import service_config
from hyperqwen.errors import BadInputError, UnsuitableError, VerificationError
from hyperqwen.profiles.layers import find
from hyperqwen.profiles.profile import load
from hyperqwen.runtime import bundle, keys
from hyperqwen.runtime.bundle import MARK, Scrubber

SECRET = "correct-horse-battery"
NONE = Scrubber(())
# What resolve_key takes for a key.
KEYS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40).filter(
    lambda text: any(letter.isalnum() for letter in text)
)
RECORD = "(APIServer pid=41) INFO 12-01 05:03:19 [{place}] "


@given(KEYS, st.text(max_size=20), st.text(max_size=20))
def test_no_spelling_of_a_key_is_left(key: str, before: str, after: str) -> None:
    scrubber = Scrubber((key,), "/home/ann", ("ann",), ("box",))
    spellings = (
        key,
        json.dumps(key),
        quote(key, safe=""),
        base64.b64encode(key.encode()).decode(),
    )
    for spelled in spellings if len(key) > 3 else spellings[:1]:
        text = f"{before} {spelled} {after}"
        for scrubbed in (scrubber.text(text).encode(), scrubber.log(text).encode()):
            assert not scrubber.left_in(scrubbed)
            if len(key) > 3:
                assert spelled.encode() not in scrubbed
    value = {key: [key, {"deep": f"{before}{key}{after}" if len(key) > 3 else key}], "n": 18020, "t": True, "x": None}
    data = bundle.as_json(value, scrubber)
    assert not scrubber.left_in(data)
    json.loads(data)


@pytest.mark.parametrize("key", ["18020", "true", "null", "secret", "user", "host", "7", "doctor.json", "hyperqwen"])
def test_a_key_that_is_a_word_or_a_number_of_ours(key: str) -> None:
    scrubber = Scrubber((key,), "/home/ann", ("ann",), ("box",))
    data = bundle.as_json(
        {"port": 18020, "ok": True, "x": None, "n": 7, "who": "ann on box", "a": "api_key=zzzz"}, scrubber
    )
    assert not scrubber.left_in(data)
    assert json.loads(data)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Authorization: Bearer abcd1234", f"Authorization: Bearer {MARK}"),
        ("{'authorization': 'Bearer abcd1234'}", f"{{'authorization': 'Bearer {MARK}'}}"),
        ("(b'authorization', b'Basic YW5uOnB3')", f"(b'authorization', b'Basic {MARK}')"),
        ("authorization: abcd1234", f"authorization: {MARK}"),
        ("X-Api-Key: abcd1234, Accept: */*", f"X-Api-Key: {MARK}, Accept: */*"),
        ("token hf_AbCdEfGhIjKl in use", f"token {MARK} in use"),
        ("sk-proj-abcdefghijklmnop", MARK),
        ("ghp_abcdefghijklmnopqrstu", MARK),
        ("'api_key': ['abcd']", f"'api_key': ['{MARK}']"),
        ('{"api_key": "abcd"}', f'{{"api_key": "{MARK}"}}'),
        ("--api-key abcd --port 1", f"--api-key {MARK} --port 1"),
        ("--api-key=abcd", f"--api-key={MARK}"),
        ("VLLM_API_KEY=abcd serve", f"VLLM_API_KEY={MARK} serve"),
        ("GET /v1/models?api_key=abcd HTTP/1.1", f"GET /v1/models?api_key={MARK} HTTP/1.1"),
        ("http://ann:pw@proxy:3128/x", f"http://{MARK}@proxy:3128/x"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", MARK),
        ("Namespace(api_key=['a', 'b'], port=1)", f"Namespace(api_key=[{MARK}], port=1)"),
        ("Cookie: session=abcd; other=efgh", f"Cookie: {MARK}"),
        ("glpat-abcdefghij0123456789", MARK),
        (
            f"-----BEGIN PRIVATE KEY-----\n{'A' * 64}\nBBBB==\n-----END PRIVATE KEY-----\nmore",
            f"-----BEGIN PRIVATE KEY-----{MARK}-----END PRIVATE KEY-----\nmore",
        ),
        (f"so\n{'A' * 64}\n{'B' * 20}\n-----END RSA PRIVATE KEY-----", f"so\n{MARK}-----END RSA PRIVATE KEY-----"),
        ("GPU-11111111-aaaa-0000-0000-000000000001", "GPU-11111111…"),
    ],
)
def test_what_looks_like_a_secret(text: str, left: str) -> None:
    assert NONE.text(text) == left
    assert NONE.text(left) == left, "scrubbed twice"


@pytest.mark.parametrize(
    "text",
    [
        'api_key_file = "/etc/hyperqwen/api-key"',
        "--api-key-file /etc/hyperqwen/api-key",
        '"HYPERQWEN_API_KEY": "set (6 characters)"',
        "key  set (21 characters) from /etc/hyperqwen/api-key",
        "api_key=None, token=null",
        "GPU KV cache size: 83,456 tokens, Maximum concurrency for 65,536 tokens per request: 1.27x",
        "'limits.context_tokens': 65536, max_tokens=64",
        "http://127.0.0.1:18020/v1",
        "This server requires an API key",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert NONE.text(text) == text


def test_home_user_and_host() -> None:
    scrubber = Scrubber((), "/home/ann", ("ann", "root"), ("box.lan", "box", "localhost"))
    assert scrubber.text("/home/ann/models by ann on box.lan") == "~/models by [user] on [host]"
    assert scrubber.text("/home/anna /mailbox box_x root localhost") == "/home/anna /mailbox box_x root localhost"
    assert scrubber.data({"box": ["/home/ann"]}) == {"box": ["~"]}, "names of fields are ours"


def test_records_with_a_requests_content_are_dropped_whole() -> None:
    place = RECORD.format(place="request_logger.py:54")
    log = "\n".join(
        [
            RECORD.format(place="core.py:1") + "one",
            place + "Request cmpl-1 details: prompt: 'my diary",
            place + "says that'",
            "and more of it",
            RECORD.format(place="core.py:2") + "two",
            place + "Generated response cmpl-1: output: 'dear diary', finish_reason: stop",
            place + "Received request cmpl-2: params: SamplingParams(stop=['diary'])",
            RECORD.format(place="log_response.py:141") + "response_body={diary}",
            'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK',
            RECORD.format(place="core.py:3") + "three",
        ]
    ).replace("\n", "\r\n")
    said = NONE.log(log)
    assert "diary" not in said and "more of it" not in said
    assert [line.rpartition(" ")[2] for line in said.splitlines() if "core.py" in line] == ["one", "two", "three"]
    assert said.count(bundle.DROPPED) == 4


def test_a_log_without_requests_is_kept_but_for_colours() -> None:
    assert NONE.log("a\r\n\x1b[32mb\x1b[0m\nTraceback\n  x\n") == "a\nb\nTraceback\n  x\n"


def test_variables_that_matter_with_secrets_by_their_length() -> None:
    said = bundle.variables(
        {
            "HYPERQWEN_API_KEY": SECRET,
            "HYPERQWEN_SERVER_API_KEY_FILE": "/k",
            "HYPERQWEN_LIMITS_CONTEXT_TOKENS": "4096",
            "HYPERQWEN_LIMITS_BATCHED_TOKENS": "2048",
            "HF_TOKEN": SECRET,
            "HF_TOKEN_PATH": "/t",
            "VLLM_API_KEY": "",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "EDITOR": "vi",
            "CREDENTIALS_DIRECTORY": "/run/c",
        }
    )
    assert said == {
        "CREDENTIALS_DIRECTORY": "/run/c",
        "HF_TOKEN": "set (21 characters)",
        "HF_TOKEN_PATH": "/t",
        "HYPERQWEN_API_KEY": "set (21 characters)",
        "HYPERQWEN_LIMITS_BATCHED_TOKENS": "2048",
        "HYPERQWEN_LIMITS_CONTEXT_TOKENS": "4096",
        "HYPERQWEN_SERVER_API_KEY_FILE": "/k",
        "VLLM_API_KEY": "not set",
    }


def test_secrets_are_known_from_variables_and_files(tmp_path: Path) -> None:
    (tmp_path / ".config/hyperqwen").mkdir(parents=True)
    (tmp_path / ".config/hyperqwen/api-key").write_text("of-keygen\n")
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text("of-the-hub")
    for name in ("twin", "demo", "named", "creds"):
        (tmp_path / name).mkdir() if name == "creds" else (tmp_path / name).write_text(f"of-{name}\r\n")
    # A key that others may read is refused by a server, and a key still.
    (tmp_path / "named").chmod(0o644)
    (tmp_path / "creds/api-key").write_text("of-systemd\n")
    (tmp_path / "demo").write_text("of-demo\nof-line-two\n")
    environ = {
        "HOME": str(tmp_path),
        "HYPERQWEN_API_KEY": "of-variable",
        "AWS_SECRET_ACCESS_KEY": " of-aws ",
        "HYPERQWEN_SERVER_API_KEY_FILE": str(tmp_path / "twin"),
        "HYPERQWEN_DEMO_API_KEY_FILE": str(tmp_path / "demo"),
        "CREDENTIALS_DIRECTORY": str(tmp_path / "creds"),
        "HYPERQWEN_LIMITS_CONTEXT_TOKENS": "4096",
        "SSH_AUTH_SOCK_KEY": "--",
    }
    found = bundle.scrubber(environ, [tmp_path / "named", tmp_path / "none", tmp_path], tmp_path / "no host")
    names = ("variable", "aws", "keygen", "the-hub", "twin", "demo", "line-two", "named", "systemd")
    assert {secret.strip() for secret in found.secrets if "\n" not in secret} == {f"of-{name}" for name in names}
    assert found.home == str(tmp_path)


def test_root_knows_the_keys_of_the_hosts_services(tmp_path: Path) -> None:
    given = tmp_path / "run/credentials/hyperqwen-chat.service"
    for folder in (given, tmp_path / "etc/hyperqwen", tmp_path / "run/credentials/other.service"):
        folder.mkdir(parents=True)
        (folder / "api-key").write_text(f"of-{folder.name}\n")
    found = bundle.scrubber({"HOME": "/nowhere"}, root=tmp_path)
    assert set(found.secrets) == {"of-hyperqwen-chat.service", "of-hyperqwen"}
    # The same place that the unit takes the key from.
    assert Path(keys.SERVICE_KEY) in bundle.secret_files({})
    (credential,) = [d.value for d in service_config(load(find("B")), program="/p").sections["Service"]
                     if d.key == "LoadCredential"]  # fmt: skip
    assert credential == f"{keys.CREDENTIAL}:{keys.SERVICE_KEY}"


def test_key_files_of_settings_that_are_not_right(tmp_path: Path) -> None:
    file = tmp_path / "host.toml"
    file.write_text('[server\napi_key_file = "/a b/key"\n  "api_key_file"=\'/c\'\n# api_key_file = "/d"\n')
    assert bundle.named_key_files(file) == [Path("/a b/key"), Path("/c"), Path("/d")]
    assert bundle.named_key_files(tmp_path / "none") == []


@given(
    st.lists(st.text(st.characters(exclude_characters="\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", codec="utf-8"))),
    st.integers(0, 9),
)
def test_the_last_lines(lines: list[str], many: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.flush()
        said = bundle.tail(Path(file.name), many)
    assert said == "".join(f"{line}\n" for line in lines[len(lines) - min(many, len(lines)) :])


def test_of_a_long_line_that_was_cut_nothing_is_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 100 + "\nlast\n")
    assert bundle.tail(tmp_path / "log", 10, most=20) == "last\n"


def test_of_a_long_journal_the_last_whole_lines(tmp_path: Path) -> None:
    assert bundle.journal(5, {"PATH": str(tmp_path)}) == ""
    program = tmp_path / "journalctl"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n\nprint(' '.join(sys.argv[1:]), 'one', 'two', 'three', sep='\\n')\n"
    )
    program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    arguments, *rest = bundle.journal(5, environ).splitlines()
    assert {"--lines=5", "--unit=hyperqwen*", "--quiet"} <= set(arguments.split()) and rest == ["one", "two", "three"]
    assert bundle.journal(5, environ, most=len("wo\nthree\n")) == "three\n"
    program.chmod(0o644)
    assert bundle.journal(5, environ) == ""


def test_an_archive_is_the_same_for_the_same_contents() -> None:
    data = bundle.archive({"b.txt": b"2", "a/c.txt": b"1"}, "r")
    assert data == bundle.archive({"a/c.txt": b"1", "b.txt": b"2"}, "r")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == ["r/a/c.txt", "r/b.txt"]
    assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in members} == {
        (0, 0, 0, "", 0o600)
    }


def test_a_bundle_is_its_owners_alone_and_never_in_place_of_another(tmp_path: Path) -> None:
    file = tmp_path / "r.tar.gz"
    bundle.write(file, {"a.txt": b"one"}, NONE)
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_nlink == 1
    before = file.read_bytes()
    with pytest.raises(BadInputError, match="is there already"):
        bundle.write(file, {"a.txt": b"two"}, NONE)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
    with pytest.raises(UnsuitableError, match="No such file"):
        bundle.write(tmp_path / "none/r.tar.gz", {"a.txt": b"two"}, NONE)


def test_nothing_is_written_with_a_secret_in_it(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"left in b\.txt; nothing") as raised:
        bundle.write(tmp_path / "r.tar.gz", {"a.txt": b"x", "b.txt": b"so " + SECRET.encode()}, Scrubber((SECRET,)))
    assert SECRET not in str(raised.value) and list(tmp_path.iterdir()) == []


def test_the_archive_is_gzip_that_names_nothing(tmp_path: Path) -> None:
    bundle.write(tmp_path / "r.tar.gz", {"a.txt": b"one"}, NONE)
    data = (tmp_path / "r.tar.gz").read_bytes()
    assert b"r.tar" not in data[:20] and b"one" in gzip.decompress(data)
