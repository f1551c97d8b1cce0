"""Where bytes come from: pip's configuration, index pages in both forms, link folders, apt's sources and proxies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import UnsuitableError
from hyperqwen.pins import sources
from hyperqwen.pins.model import Pin
from hyperqwen.pins.sources import (
    Candidate,
    DebSources,
    Link,
    PipSettings,
    WheelSources,
    apt_access,
    apt_sites,
    html_links,
    json_links,
    parse_deb822_sources,
    parse_one_line_sources,
    pip_settings,
)
from hyperqwen.pins.transfer import Absent

HASH = "ab" * 32
OTHER = "cd" * 32
BASE = "http://index.test/simple/a/"


class Host:
    """Stands in for the programs that are asked: what each command line prints, or a failure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | None) -> None:
        self.answers = answers
        self.asked: list[str] = []
        monkeypatch.setattr(sources, "_run", self.run)

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        name = "pip" if "pip" in command else "probe" if "-c" in command else Path(command[0]).name.replace("-", "_")
        self.asked.append(name)
        answer = self.answers.get(name)
        return subprocess.CompletedProcess(
            command, 0 if answer is not None else 1, answer or "", "No module named pip\n"
        )


PROBE = json.dumps(["http://default.test/simple", "/pip/cacert.pem"])


def test_pip_without_configuration_uses_its_own_index(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, pip="", probe=PROBE)
    settings = pip_settings(environ={})
    assert settings.indexes == ["http://default.test/simple"]
    assert settings.find_links == [] and settings.proxy is None


def test_the_environment_wins_over_files_and_download_over_global(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(
        monkeypatch,
        pip="\n".join(
            [
                ":env:.index-url='http://env.test/simple'",
                "global.index-url='http://global.test/simple'",
                "download.extra-index-url='http://d1.test/s file:///d2'",
                "global.extra-index-url='http://g.test/s'",
                "install.cert='/install.pem'",
                "global.cert='/global.pem'",
                "global.proxy='http://proxy.test:3128'",
                "global.trusted-host='t1.test\\nt2.test:8080'",
                "global.find-links='/links http://page.test/'",
                ":env:.default-timeout='180'",
                "nonsense",
                "global.broken='unclosed",
            ]
        ),
    )
    settings = pip_settings(environ={})
    assert settings.indexes == ["http://env.test/simple", "http://d1.test/s", "file:///d2"]
    assert settings.find_links == ["/links", "http://page.test/"]
    assert settings.cert == "/global.pem"
    assert settings.trusted_hosts == ("t1.test", "t2.test:8080")
    assert settings.timeout == 60.0
    assert "probe" not in host.asked, "pip's default is not asked for when another index is set"
    access = settings.access()
    assert access.proxies == {"http": "http://proxy.test:3128", "https": "http://proxy.test:3128"}


def test_an_extra_index_does_not_replace_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, pip="global.extra-index-url='http://extra.test/s'", probe=PROBE)
    assert pip_settings(environ={}).indexes == ["http://default.test/simple", "http://extra.test/s"]


def test_no_index_leaves_the_link_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, pip="global.no-index='true'\nglobal.find-links='/links'", probe=PROBE)
    settings = pip_settings(environ={})
    assert (settings.indexes, settings.find_links) == ([], ["/links"])


def test_a_named_index_is_the_only_place(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, pip="global.index-url='http://x.test/s'\nglobal.find-links='/links'\nglobal.cert='/c.pem'")
    settings = pip_settings("http://mine.test/simple", environ={})
    assert (settings.indexes, settings.find_links, settings.cert) == (["http://mine.test/simple"], [], "/c.pem")


def test_without_pip_an_index_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch)
    with pytest.raises(UnsuitableError, match=r"python3-pip\), or pass --index") as caught:
        pip_settings(environ={})
    assert "No module named pip" in str(caught.value)
    settings = pip_settings("http://mine.test/simple", environ={"REQUESTS_CA_BUNDLE": "/ca.pem"})
    assert (settings.indexes, settings.cert) == (["http://mine.test/simple"], "/ca.pem")


def test_a_pip_that_does_not_say_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, pip="")
    with pytest.raises(UnsuitableError, match="pass --index"):
        pip_settings(environ={})


def test_pips_certificates_serve_a_host_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    Host(monkeypatch, pip="global.index-url='http://x.test/s'", probe=PROBE)
    monkeypatch.setattr(sources, "_has_system_certificates", lambda: False)
    assert pip_settings(environ={}).cert == "/pip/cacert.pem"


def test_html_pages() -> None:
    text = f"""<!DOCTYPE html><html><head><base href="../../"></head><body>
    <A HREF="files/a-1.0-py3-none-any.whl#sha256={HASH.upper()}" data-core-metadata="sha256={OTHER}">a</A>
    <a href="files/b%2B1.whl#md5=abc" data-dist-info-metadata="true">b</a>
    <a href="http://cdn.test/c.whl?x=1#egg=c&amp;sha256={OTHER}">c</a><a name="top">no link</a></body></html>"""
    root = "http://index.test/"
    assert html_links(text, BASE) == [
        Link("a-1.0-py3-none-any.whl", f"{root}files/a-1.0-py3-none-any.whl", HASH, OTHER),
        Link("b+1.whl", f"{root}files/b%2B1.whl", None, ""),
        Link("c.whl", "http://cdn.test/c.whl?x=1", OTHER, None),
    ]


def test_json_pages() -> None:
    files: list[dict[str, Any]] = [
        {
            "filename": "a.whl",
            "url": "../../f/a.whl",
            "hashes": {"sha256": HASH.upper()},
            "core-metadata": {"sha256": OTHER},
        },
        {"filename": "b.whl", "url": "http://cdn.test/b.whl", "hashes": {}, "dist-info-metadata": True},
        {"filename": "c.whl", "url": "c.whl", "hashes": {"md5": "x"}, "core-metadata": False},
    ]
    assert json_links(json.dumps({"files": files}), BASE) == [
        Link("a.whl", "http://index.test/f/a.whl", HASH, OTHER),
        Link("b.whl", "http://cdn.test/b.whl", None, ""),
        Link("c.whl", f"{BASE}c.whl", None, None),
    ]


@given(st.text(max_size=200))
def test_no_text_breaks_the_page_reader(text: str) -> None:
    for link in html_links(f"<a href='{text}'>", BASE):
        assert link.url


class Pages:
    """An HTTP client with canned pages."""

    def __init__(self, **pages: tuple[str, str]) -> None:
        self.pages = {name.replace("_", "-"): page for name, page in pages.items()}
        self.asked: list[str] = []

    def read(self, url: str, headers: Any = None, stop: Any = None) -> tuple[bytes, str, str]:
        self.asked.append(url)
        host = url.split("/")[2].split(".")[0]
        if host not in self.pages:
            raise Absent(f"{url}: HTTP 404")
        text, kind = self.pages[host]
        return text.encode(), kind, url


def pin(size: int = 3, sha256: str = HASH) -> Pin:
    return Pin("wheel", "a-b", "1.0", "a_b-1.0-py3-none-any.whl", size, sha256, ("tools",))


def found(settings: PipSettings, pages: Pages, wanted: Pin) -> list[Candidate]:
    return list(WheelSources(settings, pages).candidates(wanted))  # type: ignore[arg-type]


def test_only_the_exact_file_counts_and_other_builds_are_passed_over() -> None:
    file = "a_b-1.0-py3-none-any.whl"
    pages = Pages(
        one=(f"<a href='/f/{file}#sha256={OTHER}'>", "text/html"),
        two=(f"<a href='/f/other.whl#sha256={HASH}'><a href='/f/{file}#sha256={HASH}'>", "text/html"),
        three=(
            json.dumps({"files": [{"filename": file, "url": f"/g/{file}", "hashes": {}}]}),
            "application/vnd.pypi.simple.v1+json",
        ),
    )
    settings = PipSettings(indexes=["http://one.test/s", "http://two.test/s/", "http://three.test/s"])
    urls = [candidate.url for candidate in found(settings, pages, pin())]
    assert urls == [f"http://two.test/f/{file}", f"http://three.test/g/{file}"]
    assert pages.asked[0] == "http://one.test/s/a-b/"


def test_what_was_seen_is_said_when_nothing_fits(tmp_path: Path) -> None:
    file = "a_b-1.0-py3-none-any.whl"
    (tmp_path / file).write_bytes(b"12345")
    pages = Pages(one=(f"<a href='/f/{file}#sha256={OTHER}'>", "text/html"))
    settings = PipSettings(indexes=["http://one.test/s", "http://gone.test/s"], find_links=[str(tmp_path)])
    with pytest.raises(Absent) as caught:
        found(settings, pages, pin())
    assert caught.value.exit_code == 4
    for word in (file, HASH, f"has sha256 {OTHER}", f"{tmp_path / file} has 5 bytes", "HTTP 404", "--import"):
        assert word in str(caught.value)


def test_a_page_that_is_no_index() -> None:
    pages = Pages(one=('{"message": "sign in"}', "application/vnd.pypi.simple.v1+json"))
    with pytest.raises(UnsuitableError, match="does not answer as a Python package index"):
        found(PipSettings(indexes=["http://one.test/s"]), pages, pin())


@pytest.mark.parametrize("as_url", [False, True])
def test_link_folders_and_local_indexes_give_paths(tmp_path: Path, as_url: bool) -> None:
    file = "a_b-1.0-py3-none-any.whl"
    links, index = tmp_path / "my links", tmp_path / "simple"
    links.mkdir()
    (links / file).write_bytes(b"abc")
    (index / "a-b").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / file).write_bytes(b"abc")
    (index / "a-b" / "index.html").write_text(f"<a href='../../files/{file}#sha256={HASH}'>")
    settings = PipSettings(
        indexes=[index.as_uri() if as_url else str(index)], find_links=[links.as_uri() if as_url else str(links)]
    )
    paths = [candidate.path for candidate in found(settings, Pages(), pin())]
    assert [path and path.resolve() for path in paths] == [links / file, tmp_path / "files" / file]


def test_an_index_on_disk_without_pages_is_listed(tmp_path: Path) -> None:
    file = "a_b-1.0-py3-none-any.whl"
    (tmp_path / "a-b").mkdir()
    (tmp_path / "a-b" / file).write_bytes(b"abc")
    assert [c.path for c in found(PipSettings(indexes=[tmp_path.as_uri()]), Pages(), pin())] == [
        tmp_path / "a-b" / file
    ]


# apt


def test_one_line_sources() -> None:
    text = """
    # deb http://commented.test/debian bookworm main
    deb http://one.test/debian bookworm main contrib  # trailing
    deb [arch=amd64 signed-by=/k.gpg] https://two.test/debian bookworm-updates main
    deb-src http://src.test/debian bookworm main
    deb cdrom:[Debian]/ bookworm main
    """
    assert parse_one_line_sources(text) == [
        ("http://one.test/debian", "bookworm"),
        ("https://two.test/debian", "bookworm-updates"),
        ("cdrom:[Debian]/", "bookworm"),
    ]


def test_deb822_sources() -> None:
    text = """# a comment
Types: deb deb-src
URIs: http://one.test/debian
  http://two.test/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://off.test/debian
Suites: bookworm
Enabled: no

Types: deb-src
URIs: http://src.test/debian
Suites: bookworm
"""
    assert parse_deb822_sources(text) == [
        ("http://one.test/debian", "bookworm"),
        ("http://one.test/debian", "bookworm-updates"),
        ("http://two.test/debian", "bookworm"),
        ("http://two.test/debian", "bookworm-updates"),
    ]


def targets(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[str, str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    Host(monkeypatch, apt_get="".join(f"{site}\t{suite}\tPackages\n" for site, suite in pairs))


def test_debian_mirrors_main_archives_first(monkeypatch: pytest.MonkeyPatch) -> None:
    targets(
        monkeypatch,
        ("http://security.test/debian-security", "bookworm-security"),
        ("http://vendor.test/node", "nodistro"),
        ("http://mirror.test/debian", "trixie"),
        ("http://mirror.test/debian", "trixie-updates"),
        ("copy:/srv/debian", "bookworm"),
        ("cdrom://x", "bookworm"),
    )
    assert apt_sites() == ["http://mirror.test/debian", "file:/srv/debian", "http://security.test/debian-security"]


def test_a_host_without_a_debian_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    targets(monkeypatch, ("http://archive.test/ubuntu", "noble"))
    with pytest.raises(UnsuitableError, match="pass --mirror URL"):
        apt_sites()
    assert apt_sites("http://mine.test/debian") == ["http://mine.test/debian"]


def test_before_the_first_update_the_sources_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    targets(monkeypatch)
    monkeypatch.setattr(sources, "parse_one_line_sources", lambda text: [])
    monkeypatch.setattr(sources, "parse_deb822_sources", lambda text: [])
    with pytest.raises(UnsuitableError):
        apt_sites()
    monkeypatch.setattr(Path, "is_file", lambda self: str(self) == "/etc/apt/sources.list")
    monkeypatch.setattr(Path, "read_text", lambda self, **how: "text")
    monkeypatch.setattr(sources, "parse_one_line_sources", lambda text: [("http://early.test/debian", "bookworm")])
    assert apt_sites() == ["http://early.test/debian"]


def test_pool_files_on_each_mirror(tmp_path: Path) -> None:
    deb = Pin("deb", "x", "1~2", "x_1-2_amd64.deb", 1, HASH, ("libc",), "pool/main/x/x/x_1~2_amd64.deb")
    places = list(DebSources(["http://one.test/debian/", tmp_path.as_uri()]).candidates(deb))
    assert places == [
        Candidate(url="http://one.test/debian/pool/main/x/x/x_1~2_amd64.deb"),
        Candidate(path=tmp_path / "pool/main/x/x/x_1~2_amd64.deb"),
    ]


@pytest.mark.parametrize(
    ("config", "proxies"),
    [
        ("", None),
        ('Acquire::http::Proxy "http://p.test:1";', {"http": "http://p.test:1"}),
        ('Acquire::HTTP::Proxy "http://p.test:1";\nAcquire::http::Proxy::one.test "DIRECT";', {}),
        ('Acquire::http::Proxy "";', None),
        ('Acquire::http::Proxy-Auto-Detect "/usr/bin/detect";', {"http": "http://found.test:2"}),
        ('Acquire::http::Proxy-Auto-Detect "/usr/bin/silent";', None),
    ],
)
def test_apts_proxies(monkeypatch: pytest.MonkeyPatch, config: str, proxies: dict[str, str] | None) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    Host(monkeypatch, apt_config=config, detect="http://found.test:2\n", silent="")
    assert apt_access(["http://one.test/debian"]).proxies == proxies


def test_the_real_pip_answers_in_the_form_that_is_read() -> None:
    """pip's answer is read by its form: a pip that prints another would otherwise be taken for an unconfigured one."""
    text = "global.index-url='http://x.test/s'\n:env:.cert=\"/it's.pem\"\n"
    assert sources._parse_pip_config(text) == {"index-url": "http://x.test/s", "cert": "/it's.pem"}
    probe = subprocess.run([sys.executable, "-c", sources._PIP_PROBE], capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        default, _ = json.loads(probe.stdout)
        assert default.startswith("https://") and default.endswith("/simple")
    else:
        assert "pip" in probe.stderr, "only a missing pip may make the question fail"
