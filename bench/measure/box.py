"""A fresh Debian box: a minimal root by debootstrap, with this host's mirror, index, certificates and name servers.

Nothing of this host's Nix, Python or downloads is in it: link folders and file: indexes of pip's stay outside, so that
what a box fetches it fetches from the network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hyperqwen.errors import UnsuitableError
from hyperqwen.pins.sources import PipSettings, apt_sites, pip_settings
from measure.host import Done, captured, say, timed

ENTER = Path(__file__).resolve().parent / "enter.py"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Where the host's certificates lie in a box: ca-certificates, if it gets installed, writes its own bundle elsewhere.
BUNDLE = "/etc/ssl/host-bundle.crt"
# Settings of apt's that say how to reach a mirror; the rest of a host's (hooks, caches) is not about the box.
_APT_SETTINGS = re.compile(r"Acquire::(?:https?|ftp|Check|Retries|ForceIPv)", re.IGNORECASE)
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def sources_list(targets: Iterable[tuple[str, str, str]], suite: str) -> str:
    """Lines of an apt sources.list for `suite`, from the (mirror, suite, component) that this host's apt has.

    The host's bookworm-updates becomes trixie-updates and so on; sid has only itself.
    """
    lines = []
    for site, theirs, component in targets:
        base, dash, rest = theirs.partition("-")
        if suite == "sid" and dash:
            continue
        if component == "main" and base.isalpha():
            lines.append(f"deb [signed-by={KEYRING}] {site} {suite}{dash}{rest} main\n")
    return "".join(dict.fromkeys(lines))


def pip_conf(settings: PipSettings, cert: str | None) -> str:
    """A pip.conf with the settings that are about the network, without the places on this host's disk."""

    def remote(places: Iterable[str]) -> list[str]:
        return [place for place in places if re.match(r"https?://", place)]

    indexes = remote(settings.indexes)
    if not indexes:
        raise UnsuitableError(
            "pip's indexes are all on this host's disk, and a fresh box has to fetch from the network",
            "set PIP_INDEX_URL to an index that a box can reach",
        )
    lines = ["[global]", f"index-url = {indexes[0]}", f"timeout = {settings.timeout:g}"]
    values = {
        "extra-index-url": " ".join(indexes[1:]),
        "find-links": " ".join(remote(settings.find_links)),
        "trusted-host": " ".join(settings.trusted_hosts),
        "proxy": settings.proxy,
        "cert": cert,
    }
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in values.items() if value)]) + "\n"


def apt_conf(dump: str) -> str:
    """apt.conf of a box from `apt-config dump`: how to reach a mirror, with the certificates at their new place."""
    lines = [line for line in dump.splitlines() if _APT_SETTINGS.match(line)]
    kept = [line for line in lines if not line.lower().startswith("acquire::https::cainfo") and '""' not in line]
    return "\n".join([*kept, f'Acquire::https::CAInfo "{BUNDLE}";', ""])


def _apt_targets() -> list[tuple[str, str, str]]:
    form = "$(SITE)\t$(RELEASE)\t$(COMPONENT)"
    listed = captured(["apt-get", "indextargets", "--format", form, "Identifier: Packages"])
    mirrors = set(apt_sites())
    cells = [tuple(line.split("\t")) for line in listed.splitlines()]
    found = [(c[0], c[1], c[2]) for c in cells if len(c) == 3 and c[0] in mirrors]
    if not found:
        raise UnsuitableError("apt on this host has no package lists", "run: apt-get update")
    return found


def _certificates(settings: PipSettings) -> Path | None:
    places = [settings.cert, os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


def _debootstrap(tools: Path) -> tuple[list[str], dict[str, str]]:
    """The debootstrap command of this host, or one unpacked below `tools` from apt's mirror; and its variables."""
    if shutil.which("debootstrap"):
        return ["debootstrap"], {}
    program = tools / "usr/sbin/debootstrap"
    if not program.exists():
        tools.mkdir(parents=True, exist_ok=True)
        say("getting debootstrap (unpacked beside, not installed)")
        captured(["apt-get", "download", "-q", "debootstrap"], cwd=tools)
        for package in tools.glob("debootstrap_*.deb"):
            captured(["dpkg-deb", "-x", str(package), str(tools)])
    return ["sh", str(program)], {"DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap")}


class Box:
    """A root directory that commands can be run in. Use as a context: what is below `path` goes unless `keep`."""

    def __init__(self, path: Path, suite: str, *, keep: bool = False, include: Sequence[str] = ()) -> None:
        self.path, self.suite, self.keep, self.include = path, suite, keep, tuple(include)

    def __enter__(self) -> Box:
        if self.path.exists():
            raise UnsuitableError(f"{self.path} exists already", "remove it, or name another folder with --work")
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.keep:
            say(f"kept: {self.path}")
        else:
            self._remove()

    def _make(self) -> None:
        if not KEYRING.is_file():
            raise UnsuitableError(f"{KEYRING} is missing", "run: apt-get install debian-archive-keyring")
        targets = _apt_targets()
        main = next((site for site, suite, _ in targets if "-" not in suite), targets[0][0])
        self.path.mkdir(parents=True)
        command, variables = _debootstrap(self.path.parent / "debootstrap")
        say(f"making a minimal {self.suite} in {self.path}")
        options = ["--variant=minbase", f"--keyring={KEYRING}"]
        # debootstrap mounts /proc in its target: in a mount namespace of its own, nothing can stay behind.
        spaced = ["unshare", "--mount", "--", *command, *options, self.suite, str(self.path), main]
        captured(spaced, environ={**os.environ, **variables})
        settings = pip_settings()
        bundle = _certificates(settings)
        self._write("etc/apt/sources.list", sources_list(targets, self.suite))
        self._write("etc/apt/apt.conf.d/99host", apt_conf(captured(["apt-config", "dump"])))
        self._write("etc/pip.conf", pip_conf(settings, BUNDLE if bundle else None))
        self._write("usr/share/keyrings/debian-archive-keyring.gpg", KEYRING.read_bytes())
        self._write("etc/resolv.conf", Path("/etc/resolv.conf").read_bytes())
        self._write("etc/hosts", Path("/etc/hosts").read_bytes())
        if bundle:
            self._write(BUNDLE.lstrip("/"), bundle.read_bytes())
        for extra in sorted(Path("/usr/local/share/ca-certificates").glob("*.crt")):
            self._write(f"usr/local/share/ca-certificates/{extra.name}", extra.read_bytes())
        if self.include:
            # By apt and not by debootstrap, which knows no alternatives and no virtual packages.
            say(f"installing {', '.join(self.include)} in it")
            install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *self.include]
            for step in (["apt-get", "update", "-q"], install):
                self.run(step, variables={"DEBIAN_FRONTEND": "noninteractive"}, quiet=True).checked()

    def _write(self, name: str, content: str | bytes) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    def _remove(self) -> None:
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        below = [place for place in mounted if place.startswith(f"{self.path}/")]
        if below:
            raise UnsuitableError(f"{self.path} is not removed: {below[0]} is mounted there", "umount it, then remove")
        if self.path.exists():
            say(f"removing {self.path}")
            shutil.rmtree(self.path)

    def run(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        folder: str = "/root",
        quiet: bool = False,
    ) -> Done:
        """Run `command` in the box, as root, with a fresh login's environment; `quiet` keeps its stderr."""
        kept = {name: os.environ[name] for name in _PROXIES if name in os.environ}
        environ = {"PATH": PROGRAMS, "HOME": "/root", "LANG": "C.UTF-8", **kept, **(variables or {})}
        start = ["env", "-C", folder, *command]
        return timed([sys.executable, "-I", str(ENTER), str(self.path), *start], environ=environ, quiet=quiet)

    def add_clone(self, repository: Path, commit: str, folder: str = "/root/hyperqwen") -> None:
        """Put a clone of `repository` at `commit` into the box, as a user's own `git clone` would."""
        target = self.path / folder.lstrip("/")
        captured(["git", "clone", "--quiet", "--no-local", str(repository), str(target)])
        captured(["git", "-C", str(target), "checkout", "--quiet", commit])
        subprocess.run(["chown", "-R", "0:0", str(target)], check=True)
