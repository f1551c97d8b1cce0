"""Patch 0006: n-gram speculation with a single request runs, and gives the table's tokens.

Runs in the engine's environment; HYPERQWEN_NANO names the model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from lossless.generate import expected, generate

NANO = Path(os.environ["HYPERQWEN_NANO"])
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 3}
TOKENS = 24


def test_a_single_request_decodes(tmp_path: Path) -> None:
    table = json.loads((NANO / "nano.json").read_text())
    # Two tokens that stand once: the first steps have nothing to look up, and decode one token of one request.
    prompt = next(cycle["ids"] for cycle in table["cycles"] if len(cycle["ids"]) > 8)[:2]
    answers = generate(NANO, tmp_path / "answers.json", {"speculative_config": NGRAM}, [prompt], TOKENS)
    assert answers["tokens"] == [expected(table["next"], prompt, TOKENS)]
