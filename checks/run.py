"""Run this interpreter with some arguments on a copy of the repository; what it prints is the report.

spec: root (the repository, or the part that matters), arguments (of Python).
"""

import json
import os
import sys

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path.insert(0, f"{spec['root']}/checks")

from pytest_run import environment, finished, report, repository


def main() -> None:
    copy = repository(spec["root"])
    variables = environment({"NO_COLOR": "1", "COLUMNS": "100"}, copy)
    report(finished([sys.executable, "-B", *spec["arguments"]], copy, variables))


main()
