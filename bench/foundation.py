#!/usr/bin/env python3
"""Measure what the foundation promises: `python3 bench/foundation.py PART…`, as root on a Debian box.

Writes each figure, as soon as it is there, to a JSON record (bench/results/foundation-DATE.json, UTC), where it takes
the place of an older figure of its name, and prints the table. docs/measurements.md says what each part does, needs and
costs. Runs on a bare Python 3.9 (standard library only), with the committed state of the repository: what is not
committed is not measured.

Exit codes: 0 every target met, 1 one missed, 2 bad input, 3 machine unsuitable, 5 results differ that must not,
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "python")]
sys.dont_write_bytecode = True

from measure import record as records  # noqa: E402
from measure.host import captured, machine, require, say  # noqa: E402
from measure.parts import PARTS, Job  # noqa: E402

from hyperqwen.errors import FAILURE, INTERRUPTED, OK, UNVERIFIED, BadInputError, HyperqwenError  # noqa: E402

# A value that is not 0 here is a defect, not slowness.
COUNTED = ("wheels", "derivations", "packages", "outputs")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shown = argparse.ArgumentParser(
        prog="bench/foundation.py",
        description="Measure what the foundation promises, and write a record.",
        epilog="parts: " + "; ".join(f"{name}: {part.__doc__}" for name, part in PARTS.items()),
    )
    names = [*PARTS, "all", "show"]
    shown.add_argument("parts", nargs="+", metavar="PART", choices=names, help=", ".join(names))
    shown.add_argument("--out", type=Path, help="the record (default: bench/results/foundation-DATE.json)")
    shown.add_argument("--work", type=Path, help="scratch folder, with space (default: below /var/tmp)")
    shown.add_argument("--commit", default="HEAD", help="what to measure (default: HEAD)")
    shown.add_argument("--suite", default="bookworm", choices=["bookworm", "trixie"], help="Debian of the fresh box")
    shown.add_argument("--keep", action="store_true", help="leave the boxes in the scratch folder")
    shown.add_argument("--deep", action="store_true", help="rebuild: also every derivation behind a package")
    shown.add_argument("--repeats", type=int, default=3, help="eval, patch: runs, of which the median counts")
    return shown


def chosen(parts: Sequence[str]) -> list[str]:
    """The parts meant, each once, in the order of PARTS: the cheap ones first."""
    wanted = set(PARTS) if "all" in parts else set(parts)
    return [name for name in PARTS if name in wanted]


def run(options: argparse.Namespace) -> int:
    """Measure, record, show; the exit code."""
    if options.repeats < 1:
        raise BadInputError(f"--repeats is {options.repeats}", "give a number from 1 on")
    out = options.out or ROOT / f"bench/results/foundation-{time.strftime('%Y-%m-%d', time.gmtime())}.json"
    record = records.load(out)
    if "show" in options.parts:
        if record is None:
            raise BadInputError(f"{out} does not exist", "measure something first, or name a record with --out")
        print(records.table(record["figures"]))
        return OK
    require("git", root=False)
    try:
        trusted = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
        commit = captured([*trusted, "rev-parse", "--verify", f"{options.commit}^{{commit}}"]).strip()
    except HyperqwenError as error:
        raise BadInputError(f"--commit {options.commit} is no commit of {ROOT}", str(error).split("\n")[-1]) from None
    here = machine()
    # Before hours of work: whether their figures have a place.
    records.merged(record, here, [])
    work = options.work or Path("/var/tmp") / f"hyperqwen-bench-{os.getpid()}"
    made = not work.exists()
    work.mkdir(parents=True, exist_ok=True)
    job = Job(ROOT, commit, work.resolve(), options.suite, options.keep, options.deep, options.repeats)
    figures = []
    try:
        for name in chosen(options.parts):
            say(f"{name}: {PARTS[name].__doc__}")
            for figure in PARTS[name](job):
                figures.append(figure)
                # Read again: another run may have added to it meanwhile.
                records.save(out, records.merged(records.load(out), here, [figure]))
                say(f"{figure.name}: {figure.value:.2f} {figure.unit}, target {figure.target:g}")
    finally:
        if made and not options.keep:
            shutil.rmtree(work, ignore_errors=True)
    print(records.table([figure.as_json() for figure in figures]))
    say(f"written to {out}")
    missed = [figure for figure in figures if not figure.met]
    if any(figure.unit in COUNTED for figure in missed):
        return UNVERIFIED
    return FAILURE if missed else OK


def main() -> NoReturn:
    """Run with the arguments of the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = run(parser().parse_args())
    except KeyboardInterrupt:
        say("interrupted; the figures made so far are in the record")
        code = INTERRUPTED
    except HyperqwenError as error:
        print(f"bench: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
