"""The measurements themselves: each takes a Job and yields the figures it made."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hyperqwen.errors import HyperqwenError, VerificationError
from hyperqwen.hq import derivations
from hyperqwen.pins.model import load, pins_dir
from measure.box import Box
from measure.host import GIB, Done, captured, require, require_space, say, timed
from measure.nix import NO_CACHE, SYSTEM, Nix, differing, drv_commands, is_content_addressed, version, wheel_builds
from measure.record import Figure

DEMO = ["./hq", "run", ".#demo", "--", "--once", "hello"]
CHECK = ["./hq", "flake", "check"]
# Disk that a fresh box takes at its fullest: the system, fetched files on their way, the store.
DEMO_SPACE, CHECK_SPACE = 16 * GIB, 21 * GIB
FRESH_TARGETS = {"demo": 12 * 60, "check": 25 * 60}
AGAIN_TARGET = 20
PATCH_TARGET = 6
EVAL_TARGET = 2
MEMORY_TARGET = 3
# Debian's name for where the newest Nix is.
CURRENT = "sid"
BUILD = ["nix", "build", "--no-link", "--option", "max-jobs", "1"]
# The same builder with the same inputs, but with an output path that does not depend on the bytes.
TWIN = """
let package = (builtins.getFlake (toString ./.)).packages.x86_64-linux.%s;
in derivation (removeAttrs package.drvAttrs [ "__contentAddressed" "outputHashMode" "outputHashAlgo" ])
"""
# Small enough to build a second time under another Nix, and through every kind of builder.
REBUILT_ELSEWHERE = ["libc", "stage", "runtime", "cc", "tools", "hyperqwen", "nano", "nano-int8", "vllm-patched"]


@dataclass
class Job:
    """What a run works on: the repository, the commit of it, a scratch folder, and the choices of the command line."""

    repository: Path
    commit: str
    work: Path
    suite: str
    keep: bool
    deep: bool
    repeats: int

    def clone(self, name: str = "clone") -> Path:
        """A clone of the commit in the scratch folder, made anew."""
        target = self.work / name
        shutil.rmtree(target, ignore_errors=True)
        captured(["git", "clone", "--quiet", "--no-local", str(self.repository), str(target)])
        captured(["git", "-C", str(target), "checkout", "--quiet", self.commit])
        return target

    def figure(
        self, name: str, value: float, unit: str, target: float, done: Done, nix: str, **detail: object
    ) -> Figure:
        """A Figure of this job, stamped now."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Figure(name, value, unit, target, done.command, done.seconds, self.commit, nix, at, detail)


def _said(done: Done, command: list[str]) -> Done:
    """`done` under the command that a user would type."""
    return Done(" ".join(command), done.code, done.stdout, done.stderr, done.seconds, done.largest, done.together)


def _used(folder: Path) -> int:
    """Bytes on disk below `folder`, of its own file system."""
    return int(captured(["du", "--summarize", "--block-size=1", "--one-file-system", str(folder)]).split()[0])


def _fresh(job: Job, name: str, command: list[str], space: float) -> Iterator[Figure]:
    require("apt-get", "dpkg-deb", "git", "unshare")
    require_space(job.work, space, f"a fresh box for `{' '.join(command)}`")
    with Box(job.work / f"box-{name}", job.suite, keep=job.keep) as box:
        box.add_clone(job.repository, job.commit)
        for again in (False, True):
            say(f"{' '.join(command)} in the fresh {job.suite}{', again' if again else ''}")
            done = _said(box.run(command, folder="/root/hyperqwen").checked(), command)
            if name == "demo" and not done.stdout.strip():
                raise VerificationError("the demo printed no answer")
            nix = version(box.run(["nix", "--version"]).checked().stdout)
            yield job.figure(
                f"fresh {name}{', again' if again else ''}",
                done.seconds,
                "s",
                AGAIN_TARGET if again else FRESH_TARGETS[name],
                done,
                nix,
                suite=job.suite,
                stdout=done.stdout.strip(),
                disk_gib=round(_used(box.path) / GIB, 1),
            )


def fresh_demo(job: Job) -> Iterator[Figure]:
    """A bare Debian to the demo's first answer, and once more."""
    yield from _fresh(job, "demo", DEMO, DEMO_SPACE)


def fresh_check(job: Job) -> Iterator[Figure]:
    """A bare Debian to a passed flake check, and once more."""
    yield from _fresh(job, "check", CHECK, CHECK_SPACE)


def warm(job: Job) -> Iterator[Figure]:
    """Both commands on this host when nothing has changed since the last time."""
    require("nix", "nix-store", "git")
    clone = job.clone()
    nix = Nix(clone)
    for name, command in (("demo", DEMO), ("check", CHECK)):
        say(f"{' '.join(command)}, first for what is missing, then timed")
        timed(command, cwd=clone).checked()
        done = _said(timed(command, cwd=clone).checked(), command)
        yield job.figure(f"warm {name}", done.seconds, "s", AGAIN_TARGET, done, nix.version, stdout=done.stdout.strip())


def evaluation(job: Job) -> Iterator[Figure]:
    """The whole flake evaluated, without the cache; the median of several, of which the first is often slower."""
    require("nix", "git", root=False)
    clone = job.clone()
    nix = Nix(clone)
    command = ["nix", "flake", "check", "--no-build", *NO_CACHE]
    runs = [timed(command, environ=nix.environ, cwd=clone, quiet=True).checked() for _ in range(job.repeats)]
    seconds = [round(run.seconds, 3) for run in runs]
    yield job.figure("evaluation", median(seconds), "s", EVAL_TARGET, runs[0], nix.version, seconds=seconds)


def change_line(patches: Path, marker: str) -> tuple[Path, str]:
    """Change one added comment line of one patch below `patches`, so that it ends with `marker`.

    Returns the file of vLLM that the line is in, relative to the root of the tree, and the line as it now is there.
    Raises HyperqwenError if no patch adds a comment.
    """
    for patch in sorted(patches.glob("*.patch")):
        lines = patch.read_text(encoding="utf-8").split("\n")
        target = None
        for number, line in enumerate(lines):
            if line.startswith("+++ b/"):
                target = Path(line[len("+++ b/") :].split("\t")[0])
            elif target and re.match(r"\+\s*# \S", line):
                lines[number] = f"{line} {marker}"
                patch.write_text("\n".join(lines), encoding="utf-8")
                return target, lines[number][1:]
    raise HyperqwenError(f"no patch in {patches} adds a comment line, which this measurement would change")


def patch(job: Job) -> Iterator[Figure]:
    """One line of a patch changed, to an engine that has the line and imports; nothing of a wheel is unpacked again."""
    require("nix", "nix-store", "git")
    clone = job.clone("clone-patch")
    nix = Nix(clone)
    say("building engine-cpu as it is, if it is not there yet")
    timed(["./hq", "build", ".#engine-cpu", "--no-link"], cwd=clone).checked()
    wheels = [f"{wheel.name}-{wheel.version}" for wheel in load(pins_dir(clone / "nix/pins")).wheels]
    command = ["nix", "build", ".#engine-cpu", "--no-link", "--json"]
    runs, built, imported = [], [], []
    for _ in range(job.repeats):
        captured(["git", "-C", str(clone), "checkout", "--quiet", "."])
        file, line = change_line(clone / "patches", f"(measured {time.time_ns()})")
        dry = timed([*command[:3], "--dry-run"], environ=nix.environ, cwd=clone, quiet=True).checked()
        built = sorted(derivations(dry.stderr))
        if not built:
            raise VerificationError("Nix would build nothing after a changed line, so this would measure nothing")
        runs.append(timed(command, environ=nix.environ, cwd=clone, quiet=True).checked())
        engine = Path(json.loads(runs[-1].stdout)[0]["outputs"]["out"])
        where = f"import vllm, pathlib; print(pathlib.Path(vllm.__file__).parent.parent / {str(file)!r})"
        imported.append(timed([str(engine / "bin/python3"), "-c", where], quiet=True).checked())
        if line not in Path(imported[-1].stdout.strip().splitlines()[-1]).read_text(encoding="utf-8").split("\n"):
            raise VerificationError(f"the engine that was built does not have the changed line of {file}: {line}")
    unpacked = wheel_builds(built, wheels)
    yield job.figure(
        "patch to engine",
        median(run.seconds for run in runs),
        "s",
        PATCH_TARGET,
        runs[0],
        nix.version,
        seconds=[round(run.seconds, 2) for run in runs],
        import_seconds=[round(run.seconds, 2) for run in imported],
        changed=str(file),
    )
    yield job.figure(
        "wheels unpacked for it", len(unpacked), "wheels", 0, dry, nix.version, built=built, unpacked=unpacked
    )


def _again(nix: Nix, commands: Mapping[str, list[str]]) -> tuple[Done, list[str], dict[str, dict[str, float]]]:
    """Run each command, which builds something (again). Returns all as one, the names that differ, the costs."""
    differ, rows = [], {}
    began = time.monotonic()
    for number, (name, command) in enumerate(sorted(commands.items()), 1):
        done = timed(command, environ=nix.environ, cwd=nix.clone, quiet=True, memory=True)
        if done.code != 0:
            if "may not be deterministic" not in done.stderr:
                done.checked()
            differ.append(name)
        rows[name] = {
            "seconds": round(done.seconds, 1),
            "mib": max(done.together, done.largest) >> 20,
            "largest_process_mib": done.largest >> 20,
        }
        said = f"{rows[name]['mib']} MiB, {rows[name]['seconds']} s{', DIFFERS' if name in differ else ''}"
        say(f"{number}/{len(commands)} {name}: {said}")
    return Done("nix build --rebuild, one by one", 0, "", "", time.monotonic() - began), differ, rows


def _peak(job: Job, nix: Nix, what: str, whole: Done, rows: Mapping[str, dict[str, float]]) -> Figure:
    top = max(rows, key=lambda name: rows[name]["mib"])
    return job.figure(
        f"peak memory of {what}",
        rows[top]["mib"] / 1024,
        "GiB",
        MEMORY_TARGET,
        whole,
        nix.version,
        of=top,
        how="mib is the greater of largest_process_mib (kernel, exact; Nix itself is among the processes) and the "
        "memory that no file backs, summed over all processes of the build (sampled 20 times a second)",
        builds=rows,
    )


def rebuild(job: Job) -> Iterator[Figure]:
    """Every package built a second time and compared, and the peak memory of what built it."""
    require("nix", "nix-store", "git")
    clone = job.clone("clone-rebuild")
    nix = Nix(clone)
    packages = [name for name in nix.names("packages") if name not in ("default", "checks-all")]
    installables = [f".#{name}" for name in packages]
    say(f"building {len(packages)} packages, where they are not there yet")
    timed(["./hq", "build", "--no-link", *installables], cwd=clone).checked()
    drvs = {name: nix.derivation(f".#{name}") for name in packages}
    commands = {}
    for name, path in drvs.items():
        what = [f".#{name}"]
        if is_content_addressed(Path(path).read_text(encoding="utf-8")):
            # Other bytes have another path there, which --rebuild does not compare: so a twin without that is built.
            what = ["--impure", "--expr", TWIN % name]
            captured([*BUILD, *what], environ=nix.environ, cwd=clone)
        commands[name] = [*BUILD, "--rebuild", *what]
    if job.deep:
        behind = [path for path in nix.builds_of(list(drvs.values())) if path not in drvs.values()]
        for path in behind:
            commands[f"{Path(path).name[33:-4]} {Path(path).name[:8]}"] = ["nix-store", "--realise", "--check", path]
    of = "derivations" if job.deep else "packages"
    whole, differ, rows = _again(nix, commands)
    yield job.figure(
        f"{of} that differ when rebuilt", len(differ), of, 0, whole, nix.version, of=len(rows), differ=differ
    )
    yield _peak(job, nix, f"a builder ({of})", whole, rows)


def memory(job: Job) -> Iterator[Figure]:
    """The peak memory of each check: they serve the model, and run what the packages are for."""
    require("nix", "nix-store", "git")
    clone = job.clone("clone-memory")
    nix = Nix(clone)
    commands = {}
    for name in nix.names("checks"):
        check = f".#checks.{SYSTEM}.{name}"
        dry = timed(["nix", "build", "--dry-run", check], environ=nix.environ, cwd=clone, quiet=True).checked()
        # One that has not run yet is measured in its first run, together with what it needs.
        first = ["./hq", "build", "--no-link", "--option", "max-jobs", "1", check]
        commands[name] = first if derivations(dry.stderr) else [*BUILD, "--rebuild", check]
    # That a report names the seconds that a check took is no defect: what differs is not counted here.
    whole, _, rows = _again(nix, commands)
    yield _peak(job, nix, "a check", whole, rows)


def drv(job: Job) -> Iterator[Figure]:
    """The same .drv paths, and from them the same bytes, under this host's Nix and the newest of Debian's."""
    require("apt-get", "dpkg-deb", "git", "unshare", "nix", "nix-store")
    require_space(job.work, 6 * GIB, "a second Nix with a store of its own")
    clone = job.clone()
    nix = Nix(clone)
    ours = _drvs(lambda command: timed(command, environ=nix.environ, cwd=clone, quiet=True))
    config = {"NIX_CONFIG": nix.environ["NIX_CONFIG"]}
    with Box(job.work / "box-drv", CURRENT, keep=job.keep, include=["nix-bin", "git"]) as box:
        box.add_clone(job.repository, job.commit)

        def there(command: list[str]) -> Done:
            return box.run(command, variables=config, folder="/root/hyperqwen", quiet=True)

        other = version(there(["nix", "--version"]).checked().stdout)
        if other == nix.version:
            raise VerificationError(f"both are Nix {other}: nothing is compared")
        both = f"{nix.version}, {other}"
        theirs = _drvs(there)
        differ = differing(ours, theirs)
        shown = _said(there(["nix", "flake", "check", "--no-build"]).checked(), ["nix", "eval", "--json", "…drvPath"])
        yield job.figure(
            "outputs with another .drv path",
            len(differ),
            "outputs",
            0,
            shown,
            both,
            of=len(ours),
            differ=differ,
            drvs=ours,
        )
        yield from _same_bytes(job, nix, box, there, both)


def _drvs(run: Callable[[list[str]], Done]) -> dict[str, object]:
    found: dict[str, object] = {}
    for kind, command in drv_commands().items():
        for name, path in json.loads(run(command).checked().stdout).items():
            found[f"{kind}.{name}"] = path
    if not found:
        raise VerificationError("the flake has no outputs: nothing is compared")
    return found


def _same_bytes(job: Job, nix: Nix, box: Box, there: Callable[[list[str]], Done], both: str) -> Iterator[Figure]:
    """The small packages built from their pins in the box, and their NAR hashes compared."""
    installables = [f".#{name}" for name in REBUILT_ELSEWHERE]
    timed(["./hq", "build", "--no-link", *installables], cwd=nix.clone).checked()
    pins = nix.pins_of([nix.derivation(name) for name in installables])
    export = box.path / "root/pins.export"
    captured(
        ["sh", "-c", 'target=$1; shift; exec nix-store --export "$@" > "$target"', "sh", str(export), *pins],
        environ=nix.environ,
    )
    there(["sh", "-c", "exec nix-store --import < /root/pins.export"]).checked()
    export.unlink()
    say(f"building {len(installables)} packages under the other Nix")
    done = there(["nix", "build", "--no-link", *installables]).checked()

    def hashes(run: Callable[[list[str]], str]) -> dict[str, object]:
        paths = sorted(run(["nix", "path-info", *installables]).split())
        return {path: run(["nix-store", "--query", "--hash", path]).strip() for path in paths}

    ours = hashes(lambda command: captured(command, environ=nix.environ, cwd=nix.clone))
    theirs = hashes(lambda command: there(command).checked().stdout)
    differ = differing(ours, theirs)
    yield job.figure(
        "packages with other bytes",
        len(differ),
        "packages",
        0,
        _said(done, ["nix", "build", *installables]),
        both,
        of=len(ours),
        differ=differ,
    )


PARTS: dict[str, Callable[[Job], Iterator[Figure]]] = {
    "eval": evaluation,
    "patch": patch,
    "warm": warm,
    "drv": drv,
    "rebuild": rebuild,
    "memory": memory,
    "fresh-demo": fresh_demo,
    "fresh-check": fresh_check,
}
