"""A patch's own test, in an engine that has every patch but this one: the test has to fail there.

spec: root (the repository), patch (file name), variables (environment).

pytest's exit code 1 is "tests failed"; anything else (no test found, a usage error, a broken import at collection) is
not the failure that is asked for.
"""

import json
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path[:0] = [spec["root"] + "/checks", spec["root"] + "/python"]

from pytest_run import run  # noqa: E402

from hyperqwen.patches.series import read_series  # noqa: E402

TESTS_FAILED = 1


def main() -> None:
    series = read_series(Path(spec["root"]) / "patches")
    (entry,) = [entry for entry in series.entries if entry.name == spec["patch"]]
    # A patch may also name unit tests and scripts; those under checks/engine are the ones that run the patched vLLM.
    tests = [str(test) for test in entry.header.tests if test.path.startswith("checks/engine/")]
    if not tests:
        sys.exit(f"{spec['patch']} names no test below checks/engine")
    # The tests run the engine's own package: the sources here are those of this script.
    result = run(spec["root"], tests, {**spec["variables"], "PYTHONPATH": ""})
    print(result.stdout)
    failed = re.search(r"(\d+) failed", result.stdout)
    if result.returncode != TESTS_FAILED or not failed:
        sys.exit(f"{tests} exits {result.returncode} without {spec['patch']}: it has to fail")
    print(f"{failed[0]} without {spec['patch']}, as it has to be")
    with open(os.environ["out"], "w") as file:
        file.write(result.stdout)


main()
