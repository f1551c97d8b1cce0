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
# alter_sys: pydantic looks a module's own names up in sys.modules.
runpy.run_module(spec["module"], run_name="__main__", alter_sys=True)
