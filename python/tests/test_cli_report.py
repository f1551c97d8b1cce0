"""`hyperqwen report`: secrets are put wherever one could stand, and then looked for in every byte of the bundle."""

from __future__ import annotations

import base64
import gzip
import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from hyperqwen.runtime import bundle, ports
from tests.running import launcher

PACKAGE = Path(bundle.__file__).parents[2]
COMMAND = [sys.executable, "-c", "from hyperqwen.cli import main; main(prog_name='hyperqwen')", "report"]
# One for each place; what resolve_key takes, with characters that JSON and addresses spell otherwise.
KEYS = {
    "file": 'of-the-file"\\+/=&%',
    "variable": "of-the-variable-0123456789",
    "hub": "hf_OfTheHubAbCdEfGhIjKlMn",
    "keygen": "of-keygen-abcdefg",
    "demo": "of-the-demo-abcdefg",
    "cloud": "of-the-cloud-abcdefg",
    "bearer": "of-a-client-abcdefg",
    "flag": "of-a-flag-abcdefg",
}
# The other two are of clients: what stands before them tells.
KNOWN = [key for name, key in KEYS.items() if name not in ("bearer", "flag")]
DIARY = "my secret diary"


def secret(file: Path, key: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{key}\n")
    file.chmod(0o600)
    return file


class User:
    """Somebody whose every file has a key in it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "ann-home"
        self.home.mkdir()
        self.out = folder / "out"
        self.out.mkdir()
        self.logs = self.home / ".local/state/hyperqwen"
        self.logs.mkdir(parents=True)
        self.key = secret(self.home / "keys/server", KEYS["file"])
        secret(self.home / ".config/hyperqwen/api-key", KEYS["keygen"])
        secret(self.home / ".cache/huggingface/token", KEYS["hub"])
        self.host_file = self.home / "host.toml"
        self.host_file.write_text(
            f'# was {KEYS["keygen"]} once, on {socket.gethostname()}\n[server]\napi_key_file = "{self.key}"\n'
            f'[model]\ndirectory = "/models/{KEYS["keygen"]}"\n'
        )
        with ports.claim("127.0.0.1", 0) as free:
            self.port = int(free.getsockname()[1])
        # The journal of this machine is nobody's business; this one says what is in a file, once there is one.
        self.journal = folder / "journal"
        program = folder / "bin/journalctl"
        program.parent.mkdir()
        program.write_text(
            f"#!{sys.executable}\nimport pathlib\nimport sys\n\n"
            'if sys.argv[-1] != "--unit=hyperqwen*":\n    sys.exit(1)\n'
            f"journal = pathlib.Path({str(self.journal)!r})\n"
            'sys.stdout.write(journal.read_text() if journal.exists() else "")\n'
        )
        program.chmod(0o755)
        self.environ = {
            "PATH": f"{program.parent}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(PACKAGE),
            "HOME": str(self.home),
            "USER": "annabel",
            "HYPERQWEN_HOST_FILE": str(self.host_file),
            "HYPERQWEN_DEMO_API_KEY_FILE": str(secret(self.home / "keys/demo", KEYS["demo"])),
            "HYPERQWEN_SERVER_PORT": str(self.port),
            "HF_TOKEN": KEYS["hub"],
            "AWS_SECRET_ACCESS_KEY": KEYS["cloud"],
            "TORCH_NOTE": f"{KEYS['cloud']} at {self.home}/x",
        }
        self.log = self.logs / "serve-18020.log"
        self.log.write_text(self.words())

    def words(self) -> str:
        place = "(APIServer pid=41) INFO 12-01 05:03:19 "
        said = [f"{place}[core.py:129] Initializing a V1 LLM engine (v0.31.0) with config: x"]
        for key in KNOWN:
            said += [
                f"{place}[x.py:1] plain {key}, json {json.dumps(key)}, in an address {quote(key, safe='')}",
                f"{place}[x.py:1] base64 {base64.b64encode(key.encode()).decode()}",
            ]
        said += [
            f"{place}[x.py:1] Authorization: Bearer {KEYS['bearer']}",
            f"{place}[x.py:1] non-default args: {{'api_key': ['{KEYS['flag']}'], 'port': 18020}}",
            f"{place}[request_logger.py:54] Request cmpl-1 details: prompt: '{DIARY}",
            f"{place}[request_logger.py:54] and {DIARY}'",
            f"{place}[gpu_worker.py:693] Available KV cache memory: 6.41 GiB",
            f"ERROR 12-01 05:03:20 [core.py:1] ValueError: {self.home}/models of annabel on {socket.gethostname()}: "
            f"{KEYS['variable']}",
        ]
        return "\n".join(said) + "\n"

    def report(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=self.environ | environ,
            cwd=self.out,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def files(self, name: str = "r") -> dict[str, str]:
        with tarfile.open(self.out / f"{name}.tar.gz") as tar:
            members = {member.name.removeprefix(f"{name}/"): tar.extractfile(member) for member in tar.getmembers()}
            return {member: file.read().decode() for member, file in members.items() if file is not None}


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def leaks(data: bytes, *others: str) -> list[str]:
    """What of the secrets is in `data`, in whichever spelling."""
    found = []
    for key in (*KEYS.values(), *others):
        spellings = {
            key,
            json.dumps(key)[1:-1],
            json.dumps(json.dumps(key)[1:-1])[1:-1],
            quote(key),
            quote(key, safe=""),
        }
        spellings.add(base64.b64encode(key.encode()).decode().rstrip("="))
        found += [spelled for spelled in spellings if spelled.encode() in data]
    return found


def test_no_byte_of_a_secret(user: User) -> None:
    # The key of the variable is refused beside that of a file: doctor says so, and the report is made all the same.
    with launcher(user.logs, log=user.log, ready=False):
        done = user.report("--out", "r.tar.gz", HYPERQWEN_API_KEY=KEYS["variable"])
    assert done.returncode == 0, done.stderr
    data = gzip.decompress((user.out / "r.tar.gz").read_bytes())

    assert leaks(data, DIARY, str(user.home), "annabel") == []
    assert leaks((done.stdout + done.stderr).encode(), DIARY) == []
    if socket.gethostname().casefold() not in bundle._COMMON and len(socket.gethostname()) > 2:
        assert f"on {socket.gethostname()}:".encode() not in data


def test_services_leave_their_log_to_the_journal(user: User) -> None:
    prefix = f"2026-12-01T05:03:19+0000 {socket.gethostname()} hyperqwen-serve[41]: "
    user.journal.write_text("".join(f"{prefix}{line}\n" for line in user.words().splitlines()))
    done = user.report("--out", "r.tar.gz", HYPERQWEN_API_KEY=KEYS["variable"])
    said = user.files()["logs/journal.log"]
    assert "hyperqwen-serve[41]: (APIServer pid=41) INFO" in said and "Available KV cache memory: 6.41 GiB" in said
    assert bundle.DROPPED in said
    assert leaks(gzip.decompress((user.out / "r.tar.gz").read_bytes()), DIARY) == []
    assert "logs/journal.log: the end of a log" in done.stderr


def test_what_is_inside(user: User) -> None:
    done = user.report("--out", "r.tar.gz", HYPERQWEN_LIMITS_CONTEXT_TOKENS="4096")
    files = user.files()

    assert done.stdout == f"{user.out}/r.tar.gz\n"
    assert sorted(files) == [
        "README.txt",
        "doctor.json",
        "driver.json",
        "environment.json",
        "host.toml",
        "logs/serve-18020.log",
        "measured.json",
        "plan.json",
        "profile.json",
        "versions.json",
    ]
    assert all(f"  {name}: " in done.stderr for name in files) and all(name in files["README.txt"] for name in files)
    said: dict[str, Any] = {name: json.loads(text) for name, text in files.items() if name.endswith(".json")}
    assert said["doctor.json"]["exit"] in (1, 2) and said["doctor.json"]["profile"] == "B"
    assert said["driver.json"]["driver"]["searched"]
    assert said["environment.json"]["HYPERQWEN_LIMITS_CONTEXT_TOKENS"] == "4096"
    assert said["environment.json"]["HF_TOKEN"] == f"set ({len(KEYS['hub'])} characters)"
    assert said["environment.json"]["HYPERQWEN_DEMO_API_KEY_FILE"] == "~/keys/demo"
    assert said["plan.json"]["profile"]["limits"]["context_tokens"] == 4096 and said["plan.json"]["argv"]
    assert said["profile.json"]["knobs"]["limits.context_tokens"] == {
        "value": "4096",
        "source": "environment HYPERQWEN_LIMITS_CONTEXT_TOKENS",
    }
    assert said["measured.json"]["serve-18020.log"]["measured"]["pool_bytes"] == round(6.41 * (1 << 30))
    assert said["versions.json"]["packages"]["click"] and "series" in said["versions.json"]["patches"]
    assert 'api_key_file = "~/keys/server"' in files["host.toml"]
    assert (
        "Available KV cache memory" in files["logs/serve-18020.log"] and bundle.DROPPED in files["logs/serve-18020.log"]
    )


def test_it_is_its_owners_alone_and_says_the_same_twice(user: User) -> None:
    user.report("--out", "r.tar.gz")
    assert (user.out / "r.tar.gz").stat().st_mode & 0o777 == 0o600
    with tarfile.open(user.out / "r.tar.gz") as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}
    (user.out / "r.tar.gz").rename(user.out / "before.tar.gz")

    user.report("--out", "r.tar.gz")
    changing = {"doctor.json", "driver.json"}  # free memory
    before, after = user.files(), user.files()
    assert {name: text for name, text in before.items() if name not in changing} == {
        name: text for name, text in after.items() if name not in changing
    }


def test_the_newest_logs_and_those_put_aside(user: User) -> None:
    (user.logs / "serve-18020.log.1").write_text("before\n")
    (user.logs / "demo-18021.log").write_text("".join(f"line {number}\n" for number in range(50)))
    (user.logs / "private.log").write_text("of another program\n")
    user.report("--out", "r.tar.gz", "--lines", "3")
    logs = {name: text for name, text in user.files().items() if name.startswith("logs/")}
    assert sorted(logs) == ["logs/demo-18021.log", "logs/serve-18020.log", "logs/serve-18020.log.1"]
    assert logs["logs/demo-18021.log"] == "line 47\nline 48\nline 49\n"


def test_what_is_wrong_with_the_settings_is_no_reason_not_to_report(user: User) -> None:
    user.host_file.write_text(user.host_file.read_text() + "[server\n")
    environ = {"HYPERQWEN_LIMITS_CONTEXT_TOKENS": "yes", "HYPERQWEN_API_KEY": KEYS["variable"]}
    done = user.report("--out", "r.tar.gz", **environ)
    assert done.returncode == 0, done.stderr
    data = gzip.decompress((user.out / "r.tar.gz").read_bytes())
    assert leaks(data) == [] and "[server\n" in user.files()["host.toml"]
    assert "plan.json" not in user.files()
    wrong = [check for check in json.loads(user.files()["doctor.json"])["checks"] if check["state"] == "fail"]
    assert "configuration" in {check["name"] for check in wrong}


def test_as_json_with_a_name_of_its_own(user: User) -> None:
    said = json.loads(user.report("--json").stdout)
    (file,) = user.out.iterdir()
    assert said["path"] == str(file) and file.name.startswith("hyperqwen-report-") and "doctor.json" in said["files"]


@pytest.mark.parametrize(
    ("out", "code", "said"),
    [
        ("r.zip", 2, "end it with .tar.gz"),
        (".tar.gz", 2, "end it with .tar.gz"),
        ("none/r.tar.gz", 3, "is no folder"),
        ("there.tar.gz", 2, "is there already"),
    ],
)
def test_a_file_that_cannot_be(user: User, out: str, code: int, said: str) -> None:
    (user.out / "there.tar.gz").write_text("mine")
    done = user.report("--out", out)
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr
    assert [path.name for path in user.out.iterdir()] == ["there.tar.gz"]
    assert (user.out / "there.tar.gz").read_text() == "mine"


def test_keys_among_the_engines_arguments_of_every_layer(user: User) -> None:
    keys = ["of-the-array ab'c", "of-an-abbreviation", "of-the-shadowed-variable", "of-the-flag-01"]
    profile = user.home / "own.toml"
    profile.write_text(
        f'name = "own"\ntitle = "own"\nsummary = "x"\ndevice = "cuda"\n[engine]\narguments = ["--api", "{keys[1]}"]\n'
    )
    text = user.host_file.read_text()
    user.host_file.write_text(f'{text}[engine]\narguments = ["--seed", "1", "--api-key", "{keys[0]}"]\n')
    variable = {"HYPERQWEN_ENGINE_ARGUMENTS": f"--hf_tok {keys[2]}"}
    flag = ("--engine-arguments", f"--api_key {keys[3]}", "--profile", str(profile))

    for index, (arguments, environ) in enumerate([((), {}), ((), variable), (flag, variable), (flag[2:], {})]):
        environ = environ | {"HYPERQWEN_API_KEY": KEYS["variable"]}
        done = user.report("--out", f"r{index}.tar.gz", *arguments, **environ)
        assert done.returncode == 0, done.stderr
        data = gzip.decompress((user.out / f"r{index}.tar.gz").read_bytes())
        assert leaks(data, *keys) == [] and b"ab'c" not in data
        assert '"--seed", "1", "--api-key", ' in user.files(f"r{index}")["host.toml"]


def test_a_pipe_in_place_of_the_host_file_is_not_waited_for(user: User) -> None:
    user.host_file.unlink()
    os.mkfifo(user.host_file)
    done = user.report("--out", "r.tar.gz")
    assert done.returncode == 0, done.stderr
    assert "is no file" in user.files()["host.toml"]
