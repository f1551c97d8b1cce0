"""A bundle for a bug report: files that say what this machine is and what went wrong, without anything secret.

Secrets are found twice: those that are known (key files, variables, tokens that tools keep) are taken out wherever they
stand and in whatever spelling, and what looks like one is taken out too. Before anything is written, every file of the
bundle is searched for the known ones again.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import pwd
import re
import shlex
import shutil
import socket
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hyperqwen.engine import messages
from hyperqwen.errors import BadInputError, UnsuitableError, VerificationError
from hyperqwen.files import TOML_LIMIT, read_regular
from hyperqwen.profiles.arguments import secrets as argument_secrets
from hyperqwen.profiles.layers import redacted

# Variables that say how our programs and their engine run, by how their names begin.
_OURS = (
    "CUDA_",
    "FLASHINFER_",
    "HF_",
    "HUGGINGFACE_",
    "HUGGING_FACE_",
    "HYPERQWEN_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
    "VLLM_",
    "WSL",
    "XDG_",
)
_ALSO_OURS = frozenset(
    {"CREDENTIALS_DIRECTORY", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "TMPDIR"}
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
# They name a place, and what is there is not shown; limits and the like that count tokens are no secret either.
_NO_SECRET = re.compile(
    r"(?:_FILE|_PATH|_DIR|_DIRECTORY|_TOKENS)$|^HYPERQWEN_(?:LIMITS|SPECULATION|GRAPHS|CHAT|CACHE|MEMORY|ATTENTION)_",
    re.IGNORECASE,
)
MARK = "•••"
"""Stands for a secret: no key can be made of it."""

# What a value ends at, in a log line, in JSON and in a shell's words.
_VALUE = r"[^\s\"',;\\\]\)}•]+"
_QUOTE = r"\\?[\"']?"
_SECRETS = r"(?:api[_-]?key|access[_-]?key|access[_-]?token|auth[_-]?token|hf[_-]?token|token|password|passwd|secret)"
_PEM = "-----{} [A-Z0-9 ]*PRIVATE KEY-----"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i)\b(bearer|basic)((?:\s|%20)+)[A-Za-z0-9._~+/=\-]{4,}"), rf"\1\2{MARK}"),
    (
        re.compile(rf"(?i)\b((?:proxy-)?authorization|x-api-key)({_QUOTE}\s*[:=]\s*{_QUOTE})(?!bearer|basic){_VALUE}"),
        rf"\1\2{MARK}",
    ),
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), MARK),
    (re.compile(r"\b(?:sk|pk)-[A-Za-z0-9_\-]{12,}"), MARK),
    (re.compile(r"\bglpat-[A-Za-z0-9_\-]{8,}"), MARK),
    (re.compile(r"\bgh[opsur]_[A-Za-z0-9]{12,}|\bgithub_pat_\w{12,}"), MARK),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{4,}(?:\.[A-Za-z0-9_\-]*)?"), MARK),
    (re.compile(r"\bAKIA[A-Z0-9]{16}\b"), MARK),
    (re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^\s/@\"']+@"), rf"\1{MARK}@"),
    (re.compile(rf"(?i)\b((?:set-)?cookie)({_QUOTE}\s*[:=]\s*{_QUOTE})[^\s\"'•][^\"'\n•]*"), rf"\1\2{MARK}"),
    (re.compile(rf"({_PEM.format('BEGIN')}).*?(?={_PEM.format('END')}|\Z)", re.DOTALL), rf"\1{MARK}"),
    # The beginning may be on a line that was cut off.
    (re.compile(rf"(?>(?:[A-Za-z0-9+/=]{{16,}}(?:\\n|\s)+)+)(?={_PEM.format('END')})"), MARK),
    # Namespace(api_key=['a', 'b']): a server may have several.
    (re.compile(rf"(?i)({_SECRETS}{_QUOTE}\s*[:=]\s*)\[[^\],]*,[^\]]*\]"), rf"\1[{MARK}]"),
    # api_key='x', "token": "x", 'api_key': ['x'], HF_TOKEN=x; a file that holds one is called api_key_file.
    (
        re.compile(
            rf"(?i)({_SECRETS}{_QUOTE}(?>\s*[:=]\s*\[?\s*{_QUOTE}))"
            rf"(?!none\b|null\b|true\b|false\b|(?:not )?set\b){_VALUE}"
        ),
        rf"\1{MARK}",
    ),
    (re.compile(rf"(?i)(--[a-z-]*{_SECRETS}[ =]{_QUOTE}){_VALUE}"), rf"\1{MARK}"),
    (re.compile(r"(\bGPU-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), r"\1…"),
)
# Names that many machines have: they tell nothing, and stand in words of ours.
_COMMON = frozenset(
    {"", "localhost", "root", "nobody", "user", "nixos", "debian", "ubuntu", "fedora", "host", "gpu", "hyperqwen"}
)
# A record of vLLM's log begins so: INFO 12-01 04:55:33 [core.py:129], maybe after the process's name.
_RECORD = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d (\[[^\]\s]+:\d+\])")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
DROPPED = "[a record with a request's content was here]"


@dataclass(frozen=True)
class Scrubber:
    """Takes out of texts what is secret or names a person.

    secrets: known ones, whole. home, users, hosts: of this machine.
    """

    secrets: tuple[str, ...]
    home: str = ""
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    _spellings: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        found = {spelling for secret in self.secrets for spelling in _spelled(secret)}
        # The longest first: one secret may begin as another.
        object.__setattr__(self, "_spellings", tuple(sorted(found, key=lambda spelling: (-len(spelling), spelling))))

    def text(self, text: str) -> str:
        """`text` without secrets, home folder, and names of this machine and its user."""
        text = self._without(text)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        home = self.home.rstrip("/")
        if home:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        for names, instead in ((self.users, "[user]"), (self.hosts, "[host]")):
            for name in sorted(set(names), key=len, reverse=True):
                if len(name) > 2 and name.casefold() not in _COMMON:
                    text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", instead, text)
        # What was just put in is made of words, and a word may be a key.
        return self._without(text)

    def data(self, value: Any) -> Any:
        """`value`, of what JSON can carry, scrubbed: texts, names of fields, and numbers that are a key."""
        if isinstance(value, Mapping):
            return {self._without(str(name)): self.data(inner) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(inner) for inner in value]
        if value is None or isinstance(value, (bool, int, float)):
            said = json.dumps(value)
            return value if self._without(said) == said else MARK
        return self.text(str(value))

    def log(self, text: str) -> str:
        """A log without secrets, and without the records that repeat a request or an answer.

        vLLM repeats a record's beginning on each of its lines, so a record ends where another begins.
        """
        kept: list[str] = []
        dropping: str | None = None
        for line in _COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n").split("\n"):
            record = _RECORD.search(line)
            place = record[1] if record else None
            if any(messages.pattern(message).search(line) for message in messages.CONTENT):
                dropping = place or ""
                kept.append(DROPPED)
            elif dropping is not None and place in (None, dropping):
                continue
            else:
                dropping = None
                kept.append(line)
        return self.text("\n".join(kept))

    def left_in(self, data: bytes) -> bool:
        """Whether a known secret stands in `data`."""
        text = data.decode("utf-8", errors="replace")
        return self._without(text) != text

    def _without(self, text: str) -> str:
        for spelling in self._spellings:
            if len(spelling) > 3:
                text = text.replace(spelling, MARK)
            elif spelling in text:
                # So short a key is part of many words; where it stands by itself, it is the key.
                text = re.sub(rf"(?<![\w.-]){re.escape(spelling)}(?![\w.-])", MARK, text)
        return text


def _spelled(secret: str) -> set[str]:
    """How `secret` may stand in a file: as it is, in JSON, in an address, and in base64."""
    # A list of arguments is shown as for a shell.
    words = {secret, shlex.quote(secret)[1:-1] if "'" in secret else secret}
    spellings = {quote(secret, safe=""), quote(secret), repr(secret)[1:-1]} | words
    spellings |= {json.dumps(word, ensure_ascii=ascii_only)[1:-1] for word in words for ascii_only in (True, False)}
    if len(secret) > 3:
        raw = secret.encode()
        spellings |= {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode().rstrip("=")}
    return {spelling for spelling in spellings if spelling}


def scrubber(
    environ: Mapping[str, str], files: Iterable[Path] = (), root: Path = Path("/"), arguments: Iterable[list[str]] = ()
) -> Scrubber:
    """What takes out this user's secrets, also those in the `files`, and the names of user and machine.

    arguments: lists of the engine's flags, which may hold keys.
    root: of the host's own files, for `secret_files`.
    """
    hosts = {socket.gethostname(), os.uname().nodename}
    hosts |= {name.partition(".")[0] for name in hosts}
    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    home = environ.get("HOME", "")
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.getuid())
        users.add(entry.pw_name)
        home = home or entry.pw_dir
    secrets = known_secrets(environ, secret_files(environ, files, root), arguments)
    return Scrubber(secrets, home, tuple(sorted(users)), tuple(sorted(hosts)))


def known_secrets(
    environ: Mapping[str, str], files: Iterable[Path], arguments: Iterable[list[str]] = ()
) -> tuple[str, ...]:
    """Every secret that this user's programs could have told: of variables, of `files`, each line of which is one, and
    of lists of the engine's `arguments`.

    Nothing is asked of a file but that it can be read: a key that others may read is a key still.
    """
    found: set[str] = set()
    for name, value in environ.items():
        if value.strip() and is_secret(name):
            found |= {value, value.strip()}
    for file in files:
        with contextlib.suppress(OSError, BadInputError):
            text = read_regular(file, TOML_LIMIT).decode("utf-8", errors="replace")
            found |= {line.strip() for line in text.splitlines() if line.strip()}
            found.add(text.strip())
    for words in arguments:
        found |= {spelled for secret in argument_secrets(words) for spelled in (secret, secret.strip())}
    # Brackets and commas alone are in every file.
    return tuple(sorted(secret for secret in found if any(letter.isalnum() for letter in secret)))


def secret_files(environ: Mapping[str, str], named: Iterable[Path] = (), root: Path = Path("/")) -> list[Path]:
    """Files with keys: those `named`, what variables name, and the usual places: keygen's, services', of other tokens.

    root: of the host's files. There, root also finds the key that each running service was given.
    """
    from hyperqwen.runtime.keys import CREDENTIAL, SERVICE_KEY, credential_file

    files = [Path(file) for file in named]
    files += [
        Path(value) for name, value in environ.items() if value and name.upper().endswith(("KEY_FILE", "TOKEN_PATH"))
    ]
    credential = credential_file(environ)
    files += [credential] if credential else []
    home = environ.get("HOME", "")
    config = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")
    cache = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    hub = environ.get("HF_HOME") or (f"{cache}/huggingface" if cache else "")
    files += [Path(config) / "hyperqwen" / "api-key"] if config else []
    files += [Path(hub) / "token"] if hub else []
    files.append(root / SERVICE_KEY.lstrip("/"))
    # A NixOS host keeps the key wherever it likes; what a service got of it is always here.
    files += sorted(root.glob(f"run/credentials/hyperqwen*.service/{CREDENTIAL}"))
    return list(dict.fromkeys(files))


def quoted_words(settings: Path) -> list[str]:
    """Every text between quotes in a file of settings, in order, whether or not it can be parsed."""
    with contextlib.suppress(OSError, BadInputError):
        text = read_regular(settings, TOML_LIMIT).decode("utf-8", errors="replace")
        return [double or single for double, single in re.findall(r'"([^"\n]*)"|\'([^\'\n]*)\'', text)]
    return []


def named_key_files(settings: Path) -> list[Path]:
    """What a file of settings names as api_key_file, whether or not it can be parsed."""
    with contextlib.suppress(OSError, BadInputError):
        text = read_regular(settings, TOML_LIMIT).decode("utf-8", errors="replace")
        return [Path(found) for found in re.findall(r"""api_key_file["']?\s*=\s*["']([^"'\n]+)["']""", text)]
    return []


def is_secret(name: str) -> bool:
    """Whether a variable of that name holds a secret, not where one is or how many tokens there are."""
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET.search(name)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter to our programs, by name; of a secret, its length."""
    return {
        name: redacted(value) if is_secret(name) else value
        for name, value in sorted(environ.items())
        if name in _ALSO_OURS or name.startswith(_OURS)
    }


def tail(file: Path, lines: int, most: int = 4 << 20) -> str:
    """The last `lines` lines of `file`, of its last `most` bytes; a line that was cut is left out."""
    # A pipe in a log's place would be waited for.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return ""
        end = source.seek(0, os.SEEK_END)
        source.seek(max(0, end - most))
        data = source.read()
    if end > most:
        data = data.partition(b"\n")[2]
    kept = data.decode("utf-8", errors="replace").splitlines(keepends=True)
    return "".join(kept[-lines:] if lines else [])


def journal(lines: int, environ: Mapping[str, str], most: int = 4 << 20) -> str:
    """The last `lines` lines of hyperqwen's services in systemd's journal, of its last `most` bytes.

    Nothing where there is no journal, or none that this user may read.
    """
    program = shutil.which("journalctl", path=environ.get("PATH", os.defpath))
    if program is None:
        return ""
    command = [program, "--quiet", "--no-pager", "--output=short-iso", f"--lines={lines}", "--unit=hyperqwen*"]
    try:
        found = subprocess.run(
            command,
            env={"PATH": environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    data = found.stdout
    if len(data) > most:
        data = data[-most:].partition(b"\n")[2]
    return data.decode("utf-8", errors="replace")


def as_json(value: Any, scrubber: Scrubber) -> bytes:
    """`value` scrubbed, as a JSON file."""
    return (json.dumps(scrubber.data(value), indent=2, ensure_ascii=False) + "\n").encode()


def archive(members: Mapping[str, bytes], folder: str) -> bytes:
    """A .tar.gz of `members` (name to contents) below `folder`: the same bytes for the same contents."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name in sorted(members):
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(members[name]), 0o600
            tar.addfile(entry, io.BytesIO(members[name]))
    return packed.getvalue()


def write(file: Path, members: Mapping[str, bytes], scrubber: Scrubber) -> None:
    """The bundle of `members` in a new `file`, which only its owner reads; it is there whole or not at all.

    Raises VerificationError where a secret is left in one (then nothing is written), BadInputError for a file that is
    there, UnsuitableError for a folder that cannot be written.
    """
    leaking = [name for name, data in members.items() if scrubber.left_in(data)]
    if leaking:
        raise VerificationError(
            f"a secret is left in {', '.join(sorted(leaking))}; nothing was written",
            "this is a bug of hyperqwen: report it with the name of the file alone",
        )
    data = archive(members, file.name.removesuffix(".tar.gz"))
    try:
        handle, draft = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with open(handle, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            # A link, not a rename: it fails where a file of that name is there, and none is lost.
            os.link(draft, file)
        finally:
            Path(draft).unlink(missing_ok=True)
    except FileExistsError:
        raise BadInputError(f"{file} is there already", "name another file: --out FILE.tar.gz") from None
    except OSError as error:
        raise UnsuitableError(
            f"{error.filename or file}: {error.strerror}",
            "name a file in a folder that you may write: --out FILE.tar.gz",
        ) from None
