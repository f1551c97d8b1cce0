"""Questions to Nix, asked the same way of every version from 2.8 on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hyperqwen.errors import HyperqwenError
from hyperqwen.hq import environment
from measure.host import captured

SYSTEM = "x86_64-linux"
NO_CACHE = ["--option", "eval-cache", "false"]
# The .drv path of every output that a user can name: an app is the program of one.
_DRVS = {
    "packages": "builtins.mapAttrs (name: value: value.drvPath)",
    "checks": "builtins.mapAttrs (name: value: value.drvPath)",
    "apps": "builtins.mapAttrs (name: value: builtins.attrNames (builtins.getContext value.program))",
}


class Nix:
    """Nix on a clone of the repository, with the settings that ./hq gives it."""

    def __init__(self, clone: Path) -> None:
        self.clone = clone
        self.environ = environment(os.environ, clone)
        self.version = version(captured(["nix", "--version"]))

    def ask(self, *arguments: str) -> str:
        """stdout of `nix ARGUMENTS` in the clone."""
        return captured(["nix", *arguments], environ=self.environ, cwd=self.clone)

    def store(self, *arguments: str) -> list[str]:
        """The lines that `nix-store ARGUMENTS` prints."""
        return captured(["nix-store", *arguments], environ=self.environ).splitlines()

    def names(self, kind: str) -> list[str]:
        """Names of the flake's packages or checks."""
        listed = json.loads(self.ask("eval", "--json", f".#{kind}.{SYSTEM}", "--apply", "builtins.attrNames"))
        return [str(name) for name in listed]

    def derivation(self, installable: str) -> str:
        """.drv path of an installable."""
        return str(json.loads(self.ask("eval", "--json", f"{installable}.drvPath")))

    def builds_of(self, drvs: Sequence[str]) -> list[str]:
        """Every derivation that `drvs` need and that builds something, in the order of building: pins are left out."""
        needed = [line for line in self.store("--query", "--requisites", *drvs) if line.endswith(".drv")]
        return [drv for drv in needed if not is_pin(Path(drv).read_text(encoding="utf-8"))]

    def pins_of(self, drvs: Sequence[str]) -> list[str]:
        """Store paths of the pinned files that `drvs` are built from."""
        needed = [line for line in self.store("--query", "--requisites", *drvs) if line.endswith(".drv")]
        pins = [drv for drv in needed if is_pin(Path(drv).read_text(encoding="utf-8"))]
        return self.store("--query", "--outputs", *pins) if pins else []


def drv_commands() -> dict[str, list[str]]:
    """Per kind of output, the command that prints the .drv paths of all of them as JSON."""
    return {
        kind: ["nix", "eval", *NO_CACHE, "--json", f".#{kind}.{SYSTEM}", "--apply", function]
        for kind, function in _DRVS.items()
    }


def version(text: str) -> str:
    """The version in the output of `nix --version`, such as 2.8.0."""
    found = re.findall(r"\d+\.\d+(?:\.\d+)*", text)
    if not found:
        raise HyperqwenError(f"`nix --version` says no version: {text.strip()!r}")
    return str(found[-1])


def is_pin(derivation: str) -> bool:
    """Whether this .drv text is one of given bytes, which are brought and not built."""
    return '("outputHash","' in derivation


def is_content_addressed(derivation: str) -> bool:
    """Whether this .drv text is one whose output path is made from the bytes that it builds."""
    return '("__contentAddressed","1")' in derivation


def differing(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """Names whose values are not the same in both, or that one side lacks."""
    return sorted(name for name in {*ours, *theirs} if name not in ours or ours.get(name) != theirs.get(name))


def wheel_builds(derivations: Iterable[str], wheels: Iterable[str]) -> list[str]:
    """Those of these derivation names that unpack a wheel, whole or a part other than a patched tree.

    wheels: "name-version" of each pinned wheel; its derivations are that, or that and -text or -binaries.
    """
    unpacked = {f"{wheel}{part}" for wheel in wheels for part in ("", "-text", "-binaries")}
    return sorted(set(derivations) & unpacked)
