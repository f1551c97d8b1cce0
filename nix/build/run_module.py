"""Run a module of the environment that this interpreter belongs to; it writes to --out.

spec: module, arguments.
"""

import json
import os
import runpy
import sys

with open(os.environ["specPath"]) as file:
    spec = json.load(file)
sys.argv = [spec["module"], *spec["arguments"], "--out", os.environ["out"]]
runpy.run_module(spec["module"], run_name="__main__")
