"""Patch 0006: n-gram speculation with a single request runs, and gives the table's tokens.

Runs in the engine's environment; HYPERQWEN_NANO names the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

GENERATE = Path(__file__).parents[1] / "lossless" / "generate.py"
NANO = Path(os.environ["HYPERQWEN_NANO"])
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 3}
TOKENS = 24


def test_a_single_request_decodes(tmp_path: Path) -> None:
    table = json.loads((NANO / "nano.json").read_text())
    # Two tokens that stand once: the first steps have nothing to look up, and decode one token of one request.
    cycle = next(cycle["ids"] for cycle in table["cycles"] if len(cycle["ids"]) > 8)
    out = tmp_path / "answers.json"
    result = subprocess.run(
        [sys.executable, str(GENERATE), str(NANO), str(out), json.dumps({"speculative_config": NGRAM}),
         json.dumps([cycle[:2]]), str(TOKENS)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:]
    answer, token = [], cycle[1]
    for _ in range(TOKENS):
        token = table["next"][token]
        answer.append(token)
    assert json.loads(out.read_text())["tokens"] == [answer]
