"""Where pinned bytes can come from on this host: pip's indexes and link folders for wheels, apt's mirrors for .debs.

No address stands here: pip and apt know theirs, and `--index` and `--mirror` name others. Runs on a bare Python 3.9.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from hyperqwen.errors import UnsuitableError
from hyperqwen.pins.model import Pin, normalised
from hyperqwen.pins.transfer import Absent, Access, split_login

_SIMPLE = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"

# pip's own default, asked of pip so that it need not stand here; and its certificates for a host that has none.
_PIP_PROBE = """
import json
from pip._internal.models.index import PyPI
try:
    from pip._vendor.certifi import where
except ImportError:
    where = lambda: None
print(json.dumps([PyPI.simple_url, where()]))
"""

# An apt source is Debian's when its suite, less -updates and the like, is one of these.
_DEBIAN_SUITES = frozenset(
    [
        "buster",
        "bullseye",
        "bookworm",
        "trixie",
        "forky",
        "duke",
        "sid",
        "stable",
        "oldstable",
        "oldoldstable",
        "testing",
        "unstable",
        "experimental",
    ]
)


@dataclass(frozen=True)
class Link:
    """A file that an index offers: where, and the hash it declares, if any.

    `metadata` is None when the index has no separate METADATA file, else its declared sha256 or "".
    """

    file: str
    url: str
    sha256: str | None = None
    metadata: str | None = None


@dataclass(frozen=True)
class Candidate:
    """One place to take a pin from: a local path, used where it lies, or else a URL."""

    url: str = ""
    path: Path | None = None


@dataclass
class PipSettings:
    """What pip on this host is configured with, as far as it says where to get files."""

    indexes: list[str] = field(default_factory=list)
    find_links: list[str] = field(default_factory=list)
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 30.0

    def access(self) -> Access:
        """A client with pip's TLS and proxy settings."""
        return Access(
            cafile=self.cert,
            client_cert=self.client_cert,
            trusted_hosts=self.trusted_hosts,
            proxies={"http": self.proxy, "https": self.proxy} if self.proxy else None,
            timeout=self.timeout,
        )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def pip_settings(
    index: str | None = None, *, python: str = sys.executable, environ: Mapping[str, str] | None = None
) -> PipSettings:
    """Read pip's configuration through pip; with `index` only its TLS and proxy settings matter.

    Raises UnsuitableError when there is no pip and no `index`.
    """
    environ = os.environ if environ is None else environ
    listed = _run([python, "-m", "pip", "--disable-pip-version-check", "config", "list"])
    if listed.returncode != 0:
        if index is None:
            said = (listed.stderr.strip().splitlines() or ["no message"])[-1]
            raise UnsuitableError(
                f"{python} has no pip, whose index the wheels come from: {said}",
                "install it (Debian: apt-get install python3-pip), or pass --index URL",
            )
        return PipSettings(indexes=[index], cert=_ca_from(environ))
    values = _parse_pip_config(listed.stdout)

    def words(key: str) -> list[str]:
        return values.get(key, "").split()

    settings = PipSettings(
        find_links=words("find-links"),
        cert=values.get("cert") or _ca_from(environ),
        client_cert=values.get("client-cert"),
        proxy=values.get("proxy"),
        trusted_hosts=tuple(words("trusted-host")),
        timeout=_timeout(values),
    )
    no_index = values.get("no-index", "").lower() in ("1", "true", "yes", "on")
    if index is not None:
        settings.indexes, settings.find_links = [index], []
    elif not no_index:
        settings.indexes = [*words("index-url"), *words("extra-index-url")]
    ask_index = index is None and not no_index and "index-url" not in values
    if ask_index or not (settings.cert or _has_system_certificates()):
        default, bundle = _pip_defaults(python, needed=ask_index)
        if ask_index:
            settings.indexes.insert(0, default)
        if not settings.cert and not _has_system_certificates():
            settings.cert = bundle
    return settings


def _timeout(values: Mapping[str, str]) -> float:
    """pip's timeout, kept short enough that a silent server is dropped and resumed within a minute or so."""
    raw = values.get("timeout") or values.get("default-timeout") or "30"
    try:
        return min(max(float(raw), 5.0), 60.0)
    except ValueError:
        return 30.0


def _parse_pip_config(text: str) -> dict[str, str]:
    """`pip config list` as one value per option: the environment wins over [download], which wins over [global]."""
    sections: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        key, equals, quoted = line.partition("=")
        section, _, option = key.rpartition(".")
        if not equals or not section:
            continue
        try:
            value = ast.literal_eval(quoted)
        except (ValueError, SyntaxError):
            continue
        sections.setdefault(section, {})[option] = str(value)
    merged: dict[str, str] = {}
    for section in ("global", "download", ":env:"):
        merged.update(sections.get(section, {}))
    return merged


def _pip_defaults(python: str, *, needed: bool) -> tuple[str, str | None]:
    asked = _run([python, "-c", _PIP_PROBE])
    if asked.returncode != 0:
        if not needed:
            return "", None
        raise UnsuitableError(
            f"pip of {python} does not say which index it uses by default",
            "set pip's index-url (pip config set global.index-url URL), or pass --index URL",
        )
    default, bundle = json.loads(asked.stdout)
    return str(default), str(bundle) if bundle else None


def _ca_from(environ: Mapping[str, str]) -> str | None:
    return environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE") or None


def _has_system_certificates() -> bool:
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return True
    return paths.capath is not None and any(Path(paths.capath).iterdir())


class _Anchors(HTMLParser):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.base = base
        self.links: list[Link] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        if tag == "base" and values.get("href"):
            self.base = urllib.parse.urljoin(self.base, values["href"])
        if tag != "a" or not values.get("href"):
            return
        url, _, fragment = urllib.parse.urljoin(self.base, values["href"]).partition("#")
        declared = re.search(r"(?:\A|&)sha256=([0-9a-fA-F]{64})(?:&|\Z)", fragment)
        meta = values.get("data-core-metadata", values.get("data-dist-info-metadata"))
        if meta is not None:
            meta = meta.partition("sha256=")[2].lower()
        self.links.append(Link(_file_of(url), url, declared.group(1).lower() if declared else None, meta))


def _file_of(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])


def html_links(text: str, base: str) -> list[Link]:
    """The links of an index page (PEP 503) or any page of links."""
    parser = _Anchors(base)
    parser.feed(text)
    parser.close()
    return parser.links


def json_links(text: str, base: str) -> list[Link]:
    """The files of a PEP 691 project page; raises ValueError for anything else."""
    page = json.loads(text)
    links = []
    for file in page["files"]:
        hashes = file.get("hashes") or {}
        meta = file.get("core-metadata", file.get("dist-info-metadata"))
        digest = None
        if isinstance(meta, dict):
            digest = str(meta.get("sha256", "")).lower()
        elif meta:
            digest = ""
        declared = hashes.get("sha256")
        url = urllib.parse.urljoin(base, file["url"])
        links.append(Link(str(file["filename"]), url, declared.lower() if declared else None, digest))
    return links


def local_path(url: str) -> Path | None:
    """The path of a file: URL or of a plain path, None for a web address."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.request.url2pathname(parts.path))
    return Path(url).expanduser() if parts.scheme == "" else None


class WheelSources:
    """The link folders and indexes that wheels are looked up in, in this order: local files cost nothing."""

    def __init__(self, settings: PipSettings, access: Access, stop: threading.Event | None = None) -> None:
        self.settings = settings
        self.access = access
        self.stop = stop

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        """The places that offer the pin's very file; raises Absent, when iterated to the end, if there are none.

        A file of the same name with another declared hash is passed over: it is another build.
        """
        seen: list[str] = []
        found = False
        for link in self._links(pin.name, seen):
            if link.file != pin.file:
                continue
            if link.sha256 not in (None, pin.sha256):
                seen.append(f"{split_login(link.url)[0]} has sha256 {link.sha256}")
                continue
            path = local_path(link.url)
            # A link folder declares no hash: a file there of another size is another build, not a damaged download.
            if path is not None and link.sha256 is None and path.is_file() and path.stat().st_size != pin.size:
                seen.append(f"{path} has {path.stat().st_size} bytes")
                continue
            found = True
            yield Candidate(path=path) if path is not None else Candidate(url=link.url)
        if not found:
            looked = "; ".join(seen) or "no index is configured"
            raise Absent(
                f"{pin.file} (sha256 {pin.sha256}) is not to be had: {looked}",
                "pass --index URL of an index that has it, or --import DIR with the file",
            )

    def links(self, pin: Pin) -> list[Link]:
        """All links to the pin's file whose declared hash does not contradict the pin."""
        return [
            link for link in self._links(pin.name, []) if link.file == pin.file and link.sha256 in (None, pin.sha256)
        ]

    def _links(self, name: str, seen: list[str]) -> Iterator[Link]:
        for place in self.settings.find_links:
            yield from self._listed(place, seen)
        for index in self.settings.indexes:
            root = index.rstrip("/") + "/"
            path = local_path(root)
            if path is not None:
                yield from self._listed(str(path / normalised(name)), seen)
            else:
                yield from self._page(f"{root}{normalised(name)}/", seen)

    def _listed(self, place: str, seen: list[str]) -> Iterator[Link]:
        path = local_path(place)
        if path is None:
            yield from self._page(place, seen)
            return
        if path.is_dir() and (path / "index.html").is_file():
            path = path / "index.html"
        if path.is_file() and path.suffix in (".html", ".htm"):
            yield from html_links(path.read_text(encoding="utf-8", errors="replace"), path.as_uri())
        elif path.is_dir():
            for file in sorted(path.iterdir()):
                yield Link(file.name, file.resolve().as_uri())
        else:
            seen.append(f"{path} does not have the project")
            return
        seen.append(f"looked in {path}")

    def _page(self, url: str, seen: list[str]) -> Iterator[Link]:
        try:
            body, kind, final = self.access.read(url, {"Accept": _SIMPLE}, self.stop)
        except Absent as absent:
            seen.append(absent.message)
            return
        text = body.decode("utf-8", errors="replace")
        try:
            links = json_links(text, final) if kind.endswith("+json") else html_links(text, final)
        except (ValueError, KeyError, TypeError):
            raise UnsuitableError(
                f"{split_login(url)[0]} does not answer as a Python package index does",
                "check pip's index-url or --index",
            ) from None
        seen.append(f"looked in {split_login(url)[0]}")
        yield from links


class DebSources:
    """The Debian mirrors that pool files are taken from."""

    def __init__(self, sites: Sequence[str]) -> None:
        self.sites = list(sites)

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        """The pin's pool file on each mirror in turn."""
        for site in self.sites:
            path = local_path(site)
            if path is not None:
                yield Candidate(path=path / (pin.pool or ""))
            else:
                yield Candidate(url=f"{site.rstrip('/')}/{urllib.parse.quote(pin.pool or '')}")


def apt_sites(mirror: str | None = None) -> list[str]:
    """Debian mirrors (the folders that hold pool/ and dists/) that apt is configured with, main archives first.

    Works before the first `apt-get update`. Raises UnsuitableError if apt has none and no `mirror` is given.
    """
    if mirror is not None:
        return [mirror]
    found: dict[str, bool] = {}
    for site, suite in _apt_targets():
        base = re.split(r"[-/]", suite, maxsplit=1)[0]
        if base not in _DEBIAN_SUITES:
            continue
        # `copy:` and `file:` are local; others than http(s) (cdrom, mirror+, tor+) have no client here.
        site = re.sub(r"\Acopy:", "file:", site)
        if not re.match(r"(?:https?|file):", site):
            continue
        found[site] = found.get(site, False) or "security" not in suite
    sites = sorted(found, key=lambda site: not found[site])
    if not sites:
        raise UnsuitableError(
            "no Debian mirror is configured on this host, and the .deb pins come from Debian's archive",
            "pass --mirror URL (the folder of an archive mirror that holds pool/), or --import DIR with the files",
        )
    return sites


def _apt_targets() -> list[tuple[str, str]]:
    if shutil.which("apt-get"):
        listed = _run(
            ["apt-get", "indextargets", "--format", "$(SITE)\t$(RELEASE)\t$(IDENTIFIER)", "Identifier: Packages"]
        )
        pairs = [
            (cells[0], cells[1])
            for cells in (line.split("\t") for line in listed.stdout.splitlines())
            if len(cells) == 3
        ]
        if pairs:
            return pairs
    # apt lists no targets before its first update, so read what the update would read.
    etc = Path("/etc/apt")
    pairs = []
    for file in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            if file.suffix == ".list":
                pairs += parse_one_line_sources(text)
            elif file.suffix == ".sources":
                pairs += parse_deb822_sources(text)
    return pairs


def parse_one_line_sources(text: str) -> list[tuple[str, str]]:
    """(mirror, suite) of each `deb [options] URI SUITE …` line."""
    pairs = []
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s*)?(\S+)\s+(\S+)", line.partition("#")[0])
        if found:
            pairs.append((found.group(1), found.group(2)))
    return pairs


def parse_deb822_sources(text: str) -> list[tuple[str, str]]:
    """(mirror, suite) of each enabled stanza of a .sources file."""
    pairs = []
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[key] = f"{fields.get(key, '')} {line.strip()}"
                continue
            key, colon, value = line.partition(":")
            key = key.strip().lower()
            if colon:
                fields[key] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        pairs += [(uri, suite) for uri in fields.get("uris", "").split() for suite in fields.get("suites", "").split()]
    return pairs


def apt_access(sites: Iterable[str], *, timeout: float = 30.0) -> Access:
    """A client with apt's proxy and certificate settings for `sites`."""
    options = _apt_options()
    proxies: dict[str, str] = {}
    for site in sites:
        parts = urllib.parse.urlsplit(site)
        if parts.scheme not in ("http", "https"):
            continue
        proxy = _apt_proxy(options, parts.scheme, parts.hostname or "", site)
        if proxy and proxy != "DIRECT":
            proxies[parts.scheme] = proxy
    configured = any(key.endswith("::proxy") for key in options)
    return Access(
        cafile=options.get("acquire::https::cainfo"),
        proxies=proxies if proxies or configured else None,
        timeout=timeout,
    )


def _apt_options() -> dict[str, str]:
    if not shutil.which("apt-config"):
        return {}
    options: dict[str, str] = {}
    for line in _run(["apt-config", "dump"]).stdout.splitlines():
        found = re.match(r'(\S+) "(.*)";\Z', line)
        if found and found.group(1).lower().startswith("acquire::http"):
            options[found.group(1).lower()] = found.group(2)
    return {key: value for key, value in options.items() if value}


def _apt_proxy(options: Mapping[str, str], scheme: str, host: str, url: str) -> str | None:
    for key in (f"acquire::{scheme}::proxy::{host}", f"acquire::{scheme}::proxy", "acquire::http::proxy"):
        if key in options:
            return options[key]
    detect = options.get(f"acquire::{scheme}::proxy-auto-detect") or options.get(f"acquire::{scheme}::proxyautodetect")
    if detect and shutil.which(detect):
        said = _run([detect, url]).stdout.strip()
        return said or None
    return None
