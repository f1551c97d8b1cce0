"""Every unit is clean to `systemd-analyze verify`, and exposed no more than `systemd-analyze security` may say.

spec: units ({package: folder with lib/systemd/system}), tools (systemd-analyze and the units that every system has).

The units are the very files that a host installs, and so they name the real programs: verify looks whether those can be
run. Each rule is shown to bite as well, on the same units with one thing spoilt.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

# In tenths, as --threshold takes it. 2.5 is what was asked for; the units are at 1.1 and 1.3, and this is to stay so.
THRESHOLD = 15
OVERALL = re.compile(r"Overall exposure level for \S+: (\d+[.]\d)")
# What remains of a service that is not hardened.
PLAIN = ("Type=", "NotifyAccess=", "ExecStart=", "Restart=", "RestartSec=")


class Tools:
    """systemd-analyze on unit files, without a running systemd and without this host's units."""

    def __init__(self, tools: str, build: pathlib.Path) -> None:
        self._program = f"{tools}/bin/systemd-analyze"
        self._environment = {
            "PATH": "/nonexistent",
            "HOME": str(build),
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "1",
            "SYSTEMD_EMOJI": "0",
            "SYSTEMD_PAGER": "",
            "SYSTEMD_UNIT_PATH": f"{tools}/lib/systemd/system",
        }

    def _run(self, *arguments: str) -> "tuple[int, str]":
        result = subprocess.run(
            [self._program, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return result.returncode, result.stdout

    def complaints(self, unit: pathlib.Path) -> str:
        """What verify says of the unit and of what it needs; nothing for a clean one."""
        code, text = self._run("verify", "--man=no", "--generators=no", str(unit))
        return text.strip() or (f"exit status {code} without a word" if code else "")

    def exposure(self, unit: pathlib.Path) -> "tuple[float, bool, str]":
        """Exposure from 0 to 10, whether it is over the threshold, and the assessment line by line."""
        code, text = self._run("security", "--offline=true", f"--threshold={THRESHOLD}", "--no-pager", str(unit))
        found = OVERALL.search(text)
        if found is None:
            sys.exit(f"systemd-analyze security says no exposure of {unit.name}:\n{text}")
        return float(found[1]), code != 0, text


def spoilt(unit: pathlib.Path, folder: pathlib.Path, pattern: str, replacement: str) -> pathlib.Path:
    """The unit under its own name in `folder`, with what `pattern` matches replaced."""
    text, count = re.subn(pattern, replacement, unit.read_text(), flags=re.MULTILINE)
    if not count:
        sys.exit(f"{unit.name} has nothing like {pattern!r}: the control does not fit it any more")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / unit.name
    path.write_text(text)
    return path


def plain(unit: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The unit under its own name in `folder`, with [Service] cut down to what starts it."""
    before, service, after = re.split(r"^\[(?:Service|Install)\]\n", unit.read_text(), flags=re.MULTILINE)
    kept = "".join(line for line in service.splitlines(keepends=True) if line.startswith(PLAIN))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / unit.name
    path.write_text(f"{before}[Service]\n{kept}\n[Install]\n{after}")
    return path


# What to spoil, and what verify has to say of it.
SPOILT = (
    ("misspelt key", r"^ProtectSystem=", "ProtectSytem=", "Unknown key 'ProtectSytem' in section [Service]"),
    ("misspelt value", r"^DevicePolicy=closed", "DevicePolicy=close", "Failed to parse device policy"),
    (
        "key of the wrong section",
        r"^StartLimitBurst=5",
        "StateDirectory=x",
        "Unknown key 'StateDirectory' in section [Unit]",
    ),
    ("program that is not there", r"^ExecStart=\S+", "ExecStart=/nonexistent/hyperqwen-serve", "/nonexistent/"),
    ("unknown set of system calls", r"@system-service", "@system-servise", "@system-servise"),
    ("key file as no path", r"^(AssertPathExists)=/", r"\1=", "AssertPathExists"),
)


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    build = pathlib.Path(os.environ["NIX_BUILD_TOP"])
    tools = Tools(spec["tools"], build)
    problems, report = [], []
    for package, folder in sorted(spec["units"].items()):
        units = sorted(pathlib.Path(folder, "lib/systemd/system").iterdir())
        if [unit.name for unit in units] != [f"hyperqwen-{package.removeprefix('unit-')}.service"]:
            problems.append(f"{package} has {[unit.name for unit in units]}")
            continue
        (unit,) = units
        if text := tools.complaints(unit):
            problems.append(f"{unit.name}: systemd-analyze verify:\n{text}")
        exposure, over, assessment = tools.exposure(unit)
        if over:
            problems.append(f"{unit.name}: exposure {exposure} is over {THRESHOLD / 10}\n{assessment}")
        for what, pattern, replacement, expected in SPOILT:
            text = tools.complaints(spoilt(unit, build / package / what.replace(" ", "-"), pattern, replacement))
            if expected not in text:
                problems.append(
                    f"{unit.name} with a {what}: verify does not say {expected!r}, but:\n{text or 'nothing'}"
                )
        open_exposure, open_over, _ = tools.exposure(plain(unit, build / package / "plain"))
        if not open_over:
            problems.append(f"{unit.name} without its sandbox is exposed {open_exposure}, which passes as well")
        report.append(f"{unit.name}: verify clean, exposure {exposure}; without its sandbox {open_exposure}\n")
    if not report:
        problems.append("there are no units")
    if problems:
        sys.exit("\n".join(problems))
    report.append(f"seen by verify in each: {', '.join(what for what, *_ in SPOILT)}\n")
    print("".join(report))
    with open(os.environ["out"], "w") as file:
        file.writelines(report)


if __name__ == "__main__":
    main()
