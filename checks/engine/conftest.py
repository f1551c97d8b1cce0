"""Tests against the patched vLLM itself; run with the engine's Python: `python -m pytest checks/engine`.

No engine starts and no model is loaded: what is real is vLLM's application, its arguments and its serving classes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Handlers that have no engine fail, which is expected here, and vLLM would log each failure.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
# checks/*.py are scripts, not a package; the tests use the route walk as a module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
