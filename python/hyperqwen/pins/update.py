"""`hyperqwen pins update`: resolve groups.toml anew with uv (wheels) and the suite's index (.debs), write what changed.

Pinned versions are kept where the inputs allow, unless `upgrade` is set. Nothing is written unless the new set passes
the check.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename

from hyperqwen.errors import BadInputError, HyperqwenError, MissingError, UnsuitableError, VerificationError
from hyperqwen.pins.check import problems
from hyperqwen.pins.fetch import lay_out_seed
from hyperqwen.pins.groups import GroupsFile, load_groups
from hyperqwen.pins.model import (
    DEB_GROUPS,
    WHEEL_GROUPS,
    Pin,
    PinSet,
    deb_file_name,
    load,
    render,
)
from hyperqwen.pins.progress import human
from hyperqwen.pins.requires import Metadata, Needs, condense, load_requires, parse_metadata, render_requires
from hyperqwen.pins.sources import PipSettings, WheelSources, apt_access, apt_sites, local_path, pip_settings
from hyperqwen.pins.transfer import Absent, Access, Download, Wanted
from hyperqwen.store import NixStore, Store, nar_sha256

_ARCHIVE_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_METADATA_JOBS = 8


@dataclass
class Change:
    """One difference between the old and the new pins, for people and for --json."""

    kind: str
    name: str
    old: str | None
    new: str | None
    old_size: int = 0
    new_size: int = 0
    groups: tuple[str, ...] = ()

    def line(self) -> str:
        grew = self.new_size - self.old_size
        size = f"{'+' if grew >= 0 else '-'}{human(abs(grew))}"
        if self.old is None:
            return f"+ {self.name} {self.new}  ({size}; {', '.join(self.groups)})"
        if self.new is None:
            return f"- {self.name} {self.old}  ({size})"
        what = f"{self.old} → {self.new}" if self.old != self.new else f"{self.new}: other file or groups"
        return f"~ {self.name} {what}  ({size}; {', '.join(self.groups)})"


@dataclass
class Update:
    """The new pin files and how they differ; `write` puts them in place."""

    folder: Path
    pins: PinSet
    needs: Mapping[str, Needs]
    changes: list[Change] = field(default_factory=list)

    def write(self) -> list[Path]:
        """Write those files whose text changed, each by temp file and rename, all temp files first; the paths."""
        texts = {
            self.folder / "wheels.json": render(self.pins, "wheel"),
            self.folder / "debs.json": render(self.pins, "deb"),
            self.folder / "requires.json": render_requires(self.needs),
        }
        changed = {
            path: text for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text
        }
        temps: list[tuple[Path, Path]] = []
        try:
            for path, text in changed.items():
                temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                temps.append((temp, path))
                with open(temp, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
            for temp, path in temps:
                os.replace(temp, path)
        except OSError as error:
            raise UnsuitableError(
                f"{self.folder} cannot be written: {error.strerror}", "work in a writable checkout"
            ) from None
        finally:
            for temp, _ in temps:
                temp.unlink(missing_ok=True)
        return sorted(changed)


def update(
    folder: Path,
    *,
    groups: Sequence[str] = (),
    upgrade: bool = False,
    index: str | None = None,
    mirror: str | None = None,
    say: Callable[[str], None],
    store: Store | None = None,
) -> Update:
    """Resolve `groups` (default all) anew; raises BadInputError for what cannot be resolved, VerificationError when the
    result fails the check."""
    declared = load_groups(folder / "groups.toml")
    unknown = [group for group in groups if group not in declared.groups]
    if unknown:
        raise BadInputError(f"group {unknown[0]!r} does not exist", f"use one of: {', '.join(sorted(declared.groups))}")
    old = load(folder) if (folder / "wheels.json").exists() else PinSet((), (), declared.suite, declared.component)
    wheel_groups = [group for group in WHEEL_GROUPS if not groups or group in groups]
    deb_groups = [group for group in DEB_GROUPS if not groups or group in groups]
    wheels, debs = old.wheels, old.debs
    needs: Mapping[str, Needs] = load_requires(folder / "requires.json") if (folder / "requires.json").exists() else {}
    if wheel_groups:
        settings = pip_settings(index)
        say(f"resolving {', '.join(wheel_groups)} with uv")
        wheels = tuple(resolve_wheels(declared, old.wheels, wheel_groups, settings, upgrade=upgrade))
        needs = collect_requires(wheels, needs, declared, settings, store or NixStore(), say)
    if deb_groups:
        say(f"reading the index of {declared.suite} {declared.component}")
        debs = tuple(resolve_debs(declared, old.debs, apt_sites(mirror), apt_access))
    pins = PinSet(wheels, debs, declared.suite, declared.component)
    wrong = problems(pins, declared, needs)
    if wrong:
        raise VerificationError(
            "the new pins do not pass the check, nothing is written:\n"
            + "\n".join(f"  {problem}" for problem in wrong),
            "change inputs, constraints or overrides in groups.toml",
        )
    return Update(folder, pins, needs, compare(old, pins))


def compare(old: PinSet, new: PinSet) -> list[Change]:
    """The differences, by name."""
    changes = []
    before = {(pin.kind, pin.name): pin for pin in old.all}
    after = {(pin.kind, pin.name): pin for pin in new.all}
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        if was == now:
            continue
        changes.append(
            Change(
                kind=key[0],
                name=key[1],
                old=was.version if was else None,
                new=now.version if now else None,
                old_size=was.size if was else 0,
                new_size=now.size if now else 0,
                groups=now.groups if now else (),
            )
        )
    return changes


def resolve_wheels(
    declared: GroupsFile, old: Sequence[Pin], groups: Sequence[str], settings: PipSettings, *, upgrade: bool
) -> list[Pin]:
    """All wheel groups as one set: the union first, then each group's closure within it."""
    inputs = {name: declared.groups[name].inputs for name in WHEEL_GROUPS}
    constraints = [rule.requirement for rule in declared.constraint]
    frozen = [f"{pin.name}=={pin.version}" for pin in old if set(pin.groups) - set(groups)]
    keep = {} if upgrade else {pin.name: pin.version for pin in old}
    union = _compile(
        [text for texts in inputs.values() for text in texts], [*constraints, *frozen], keep, declared, settings
    )
    locked = [f"{name}=={package['version']}" for name, package in union.items()]
    members: dict[str, list[str]] = {name: [] for name in union}
    for group in WHEEL_GROUPS:
        for name in _compile(inputs[group], [*constraints, *locked], {}, declared, settings):
            members[name].append(group)
    rank = {tag: position for position, tag in reversed(list(enumerate(declared.tags())))}
    return [
        _wheel_pin(name, package, tuple(sorted(members[name])), rank)
        for name, package in sorted(union.items())
        if members[name]
    ]


def _wheel_pin(name: str, package: Mapping[str, Any], groups: tuple[str, ...], rank: Mapping[Any, int]) -> Pin:
    best: tuple[int, Any, str, Mapping[str, Any]] | None = None
    for wheel in package.get("wheels", []):
        file = wheel.get("name") or urllib.parse.unquote(
            urllib.parse.urlsplit(wheel.get("url") or wheel["path"]).path.rpartition("/")[2]
        )
        _, _, build, tags = parse_wheel_filename(file)
        score = min((rank[tag] for tag in tags if tag in rank), default=None)
        if score is not None and (best is None or (-score, build) > (-best[0], best[1])):
            best = (score, build, file, wheel)
    if best is None:
        raise BadInputError(
            f"{name} {package['version']} has no wheel for the runtime", "constrain it to a version that has one"
        )
    _, _, file, wheel = best
    return Pin("wheel", name, package["version"], file, wheel["size"], wheel["hashes"]["sha256"], groups)


def find_uv() -> list[str]:
    """The command that runs uv: that of this environment, or one on PATH; raises UnsuitableError."""
    found = shutil.which("uv")
    if found:
        return [found]
    if subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "uv"]
    raise UnsuitableError(
        "uv is not on PATH", "run this command from the tools environment (./hq run .#hyperqwen -- pins update)"
    )


def _compile(
    inputs: Iterable[str],
    constraints: Iterable[str],
    keep: Mapping[str, str],
    declared: GroupsFile,
    settings: PipSettings,
) -> dict[str, Mapping[str, Any]]:
    """uv's resolution, name → pylock entry; from the primary index only, so that the lock is no machine's own."""
    with tempfile.TemporaryDirectory(prefix="hyperqwen-pins-") as temp:
        folder = Path(temp)
        lock = folder / "pylock.pins.toml"
        for name, lines in (
            ("inputs.in", inputs),
            ("constraints.txt", constraints),
            ("overrides.txt", [rule.requirement for rule in declared.override]),
            ("excludes.txt", sorted(declared.excluded)),
        ):
            (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if keep:
            # uv prefers what its output file names already.
            rows = "".join(
                f'\n[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in sorted(keep.items())
            )
            head = 'lock-version = "1.0"\ncreated-by = "hyperqwen"\nrequires-python = ">=3.11"\n'
            lock.write_text(head + rows, encoding="utf-8")
        command = [*find_uv(), "pip", "compile", "--quiet", "--no-config", "--format", "pylock.toml"]
        command += [
            "--python",
            sys.executable,
            "--python-version",
            declared.python,
            "--python-platform",
            declared.platform,
        ]
        command += ["--only-binary", ":all:", "--constraints", "constraints.txt", "--overrides", "overrides.txt"]
        command += ["--excludes", "excludes.txt", "--output-file", lock.name, "inputs.in"]
        done = subprocess.run(
            command, cwd=folder, env=_uv_environment(settings), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BadInputError(
                f"uv cannot resolve groups.toml:\n{done.stderr.strip()}",
                "change inputs, constraints or overrides there",
            )
        packages = tomllib.loads(lock.read_text(encoding="utf-8")).get("packages", [])
    return {canonicalize_name(package["name"]): package for package in packages}


def _uv_environment(settings: PipSettings) -> dict[str, str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("UV_") or key == "UV_CACHE_DIR"
    }
    environment["UV_PYTHON_DOWNLOADS"] = "never"
    if settings.indexes:
        environment["UV_DEFAULT_INDEX"] = settings.indexes[0]
    if settings.cert:
        environment["SSL_CERT_FILE"] = settings.cert
    if settings.proxy:
        environment["ALL_PROXY"] = settings.proxy
    if settings.trusted_hosts:
        environment["UV_INSECURE_HOST"] = " ".join(settings.trusted_hosts)
    return environment


def collect_requires(
    wheels: Sequence[Pin],
    known: Mapping[str, Needs],
    declared: GroupsFile,
    settings: PipSettings,
    store: Store,
    say: Callable[[str], None],
) -> dict[str, Needs]:
    """What each wheel requires, reading METADATA of those wheels that `known` does not cover."""
    access = settings.access()
    sources = WheelSources(settings, access)
    hashes = {pin.name: pin.sha256 for pin in wheels}
    recorded = {
        pin.name: known[pin.name] for pin in wheels if pin.name in known and known[pin.name].sha256 == pin.sha256
    }
    metadata = {name: _as_metadata(needs) for name, needs in recorded.items()}
    todo = [pin for pin in wheels if pin.name not in recorded]
    while True:
        if todo:
            say(f"reading the requirements of {len(todo)} wheels")
            with ThreadPoolExecutor(_METADATA_JOBS) as pool:
                texts = pool.map(lambda pin: read_metadata(pin, sources, access, store), todo)
                metadata.update(
                    {pin.name: parse_metadata(text, pin.file) for pin, text in zip(todo, texts, strict=True)}
                )
            for pin in todo:
                recorded.pop(pin.name, None)
        found = condense(metadata, hashes, declared)
        # A record holds only the extras that were asked for when it was made: another one needs the METADATA again.
        todo = [
            pin
            for pin in wheels
            if pin.name in recorded and not found[pin.name].extras.keys() <= recorded[pin.name].extras.keys()
        ]
        if not todo:
            return found


def _as_metadata(needs: Needs) -> Metadata:
    requires = [*needs.requires, *(text for texts in needs.extras.values() for text in texts)]
    return Metadata(needs.python, tuple(dict.fromkeys(requires)))


def read_metadata(pin: Pin, sources: WheelSources, access: Access, store: Store) -> str:
    """The wheel's METADATA: from the store, from the index (PEP 658), or out of the whole wheel."""
    path = store.real_path(pin.store_path(store.store_dir))
    if path.is_file():
        return _metadata_of(path)
    links = sources.links(pin)
    for link in links:
        local = local_path(link.url)
        if local is not None and local.is_file() and hashlib.sha256(local.read_bytes()).hexdigest() == pin.sha256:
            return _metadata_of(local)
        if local is None and link.metadata is not None:
            try:
                body, _, _ = access.read(f"{link.url}.metadata")
            except Absent:
                continue
            actual = hashlib.sha256(body).hexdigest()
            if link.metadata and actual != link.metadata:
                raise VerificationError(
                    f"METADATA of {pin.file}: wrong sha256\n    expected {link.metadata}\n    actual   {actual}",
                    "use another --index",
                )
            return body.decode("utf-8")
    for link in links:
        if local_path(link.url) is None:
            with tempfile.TemporaryDirectory(prefix="hyperqwen-pins-") as temp:
                part = Path(temp) / pin.file
                wanted = Wanted(pin.file, pin.size, pin.sha256)
                Download(wanted, access, part, threading.Event(), lambda _count, _wire: None).run(link.url)
                return _metadata_of(part)
    raise MissingError(
        f"no index offers {pin.file} with sha256 {pin.sha256}", "use the index that it was resolved from"
    )


def _metadata_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                return archive.read(name).decode("utf-8")
    raise BadInputError(f"{wheel.name} has no METADATA")


def resolve_debs(
    declared: GroupsFile, old: Sequence[Pin], sites: Sequence[str], access_for: Callable[[Sequence[str]], Access]
) -> list[Pin]:
    """The declared .debs as the suite's signed index has them."""
    access = access_for(sites)
    failure: HyperqwenError | None = None
    for site in sites:
        try:
            text = _packages_index(site, declared.suite, declared.component, access)
        except Absent as error:
            failure = error
            continue
        return _pins_from_index(parse_packages(text), declared, old, site, access)
    raise MissingError(
        f"no mirror has {declared.suite} {declared.component}: {failure.message if failure else 'none configured'}",
        "pass --mirror URL",
    )


def parse_packages(text: str) -> dict[str, list[dict[str, str]]]:
    """A Packages index as package → the fields of each of its stanzas."""
    found: dict[str, list[dict[str, str]]] = {}
    for stanza in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in stanza.splitlines() if ": " in line and line[:1] not in (" ", "\t")
        )
        name = fields.get("Package")
        if name:
            found.setdefault(name, []).append(fields)
    return found


def _read(site: str, path: str, access: Access) -> bytes:
    local = local_path(site)
    if local is not None:
        try:
            return (local / path).read_bytes()
        except FileNotFoundError:
            raise Absent(f"{local / path}: no such file") from None
    return access.read(f"{site.rstrip('/')}/{path}")[0]


def _packages_index(site: str, suite: str, component: str, access: Access) -> str:
    release = _verified_release(_read(site, f"dists/{suite}/InRelease", access))
    name = f"{component}/binary-amd64/Packages.xz"
    declared = re.search(
        rf"^ ([0-9a-f]{{64}})\s+(\d+)\s+{re.escape(name)}$", release.partition("\nSHA256:")[2], re.MULTILINE
    )
    if not declared:
        raise MissingError(
            f"the release file of {suite} does not list {name}", "pass --mirror URL of a complete mirror"
        )
    body = _read(site, f"dists/{suite}/{name}", access)
    actual = hashlib.sha256(body).hexdigest()
    if actual != declared.group(1):
        raise VerificationError(
            f"{name} of {suite}: wrong sha256\n    expected {declared.group(1)}\n    actual   {actual}",
            "try again later",
        )
    return lzma.decompress(body).decode("utf-8")


def _verified_release(signed: bytes) -> str:
    """The text of an InRelease file, once Debian's archive key has signed it."""
    if not _ARCHIVE_KEYRING.is_file():
        raise UnsuitableError(
            f"{_ARCHIVE_KEYRING} is missing, so the index cannot be verified", "apt-get install debian-archive-keyring"
        )
    with tempfile.TemporaryDirectory(prefix="hyperqwen-pins-") as temp:
        source, target = Path(temp) / "InRelease", Path(temp) / "Release"
        source.write_bytes(signed)
        if shutil.which("gpgv"):
            command = ["gpgv", "--keyring", str(_ARCHIVE_KEYRING), "--output", str(target), str(source)]
        elif shutil.which("sqv"):
            command = ["sqv", "--keyring", str(_ARCHIVE_KEYRING), "--cleartext", "--output", str(target), str(source)]
        else:
            raise UnsuitableError(
                "neither gpgv nor sqv is installed, so the index cannot be verified", "apt-get install gpgv"
            )
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not target.is_file():
            raise VerificationError(
                f"the release file is not signed by Debian's archive key: {done.stderr.strip()}", "use another --mirror"
            )
        return target.read_text(encoding="utf-8")


def _pins_from_index(
    index: Mapping[str, Sequence[Mapping[str, str]]],
    declared: GroupsFile,
    old: Sequence[Pin],
    site: str,
    access: Access,
) -> list[Pin]:
    members: dict[str, list[str]] = {}
    for group in DEB_GROUPS:
        for name in declared.groups[group].debs:
            members.setdefault(name, []).append(group)
    known = {pin.name: pin for pin in old}
    pins = []
    for name, groups in sorted(members.items()):
        stanzas = index.get(name, [])
        if len(stanzas) != 1:
            have = f"{len(stanzas)} packages" if stanzas else "no package"
            raise MissingError(
                f"{declared.suite} {declared.component} has {have} {name!r}", "correct its name in groups.toml"
            )
        fields = stanzas[0]
        pin = Pin(
            kind="deb",
            name=name,
            version=fields["Version"],
            file=deb_file_name(name, fields["Version"], fields["Architecture"]),
            size=int(fields["Size"]),
            sha256=fields["SHA256"],
            groups=tuple(sorted(groups)),
            pool=fields["Filename"],
        )
        if name in declared.extract:
            pin = _with_extract(pin, known.get(name), declared, site, access)
        pins.append(pin)
    return pins


def _with_extract(pin: Pin, known: Pin | None, declared: GroupsFile, site: str, access: Access) -> Pin:
    """`pin` with the NAR hash of the program that is taken out of it."""
    if known is not None and known.sha256 == pin.sha256 and known.extract is not None:
        kept = declared.extract_rule(pin.name, known.extract.nar_sha256)
        if kept == known.extract:
            return replace(pin, extract=kept)
    with tempfile.TemporaryDirectory(prefix="hyperqwen-pins-") as temp:
        deb = Path(temp) / pin.file
        deb.write_bytes(_read(site, pin.pool or "", access))
        actual = hashlib.sha256(deb.read_bytes()).hexdigest()
        if actual != pin.sha256:
            raise VerificationError(
                f"{pin.file}: wrong sha256\n    expected {pin.sha256}\n    actual   {actual}", "use another --mirror"
            )
        rule = declared.extract_rule(pin.name, "")
        assert rule is not None
        tree = lay_out_seed(rule, deb, Path(temp))
        return replace(pin, extract=declared.extract_rule(pin.name, nar_sha256(tree)))
