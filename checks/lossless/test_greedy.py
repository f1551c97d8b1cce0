"""Greedy text is the same with and without speculation, with and without the prefix cache, and it is nano's own table.

HYPERQWEN_NANO names the model. nano's margins are clear, so tokens are compared exactly; what a wrong recurrent state
would change in a model that depends on its context, this model does not show (docs/nano.md).
"""

from __future__ import annotations

import json
import os
import random
import secrets
from pathlib import Path
from typing import Any

import pytest
from generate import expected, generate

TOKENS = 48
NANO = Path(os.environ["HYPERQWEN_NANO"])
TABLE: dict[str, Any] = json.loads((NANO / "nano.json").read_text())
MTP = {"method": "mtp"}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix cache": {"enable_prefix_caching": True},
    "mtp 1": {"speculative_config": {**MTP, "num_speculative_tokens": 1}},
    "mtp 3": {"speculative_config": {**MTP, "num_speculative_tokens": 3}},
    "ngram 3": {"speculative_config": {**NGRAM, "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module")
def seed() -> int:
    """Fresh each run, and printed with every failure: HYPERQWEN_SEED runs that one again."""
    return int(os.environ.get("HYPERQWEN_SEED") or secrets.randbits(32))


@pytest.fixture(scope="module")
def prompts(seed: int) -> list[list[int]]:
    """Whole cycles (to be quoted), random tokens, one prompt twice, and a long one of several cycles."""
    randomness = random.Random(seed)
    cycles = [cycle["ids"] for cycle in TABLE["cycles"] if len(cycle["ids"]) > 8]
    ordinary = [token for cycle in cycles for token in cycle]
    found = [list(cycle) for cycle in randomness.sample(cycles, 3)]
    found += [[randomness.choice(ordinary) for _ in range(length)] for length in (2, 7, 40)]
    found += [found[0], [token for cycle in randomness.sample(cycles, 4) for token in cycle]]
    return found


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def answers(request: pytest.FixtureRequest, prompts: list[list[int]], tmp_path_factory: Any) -> tuple[str, Any]:
    out = tmp_path_factory.mktemp("answers") / "answers.json"
    return request.param, generate(NANO, out, CONFIGURATIONS[request.param], prompts, TOKENS)


def test_greedy_text_is_the_table(answers: tuple[str, Any], prompts: list[list[int]], seed: int) -> None:
    name, found = answers
    assert found["tokens"] == [expected(TABLE["next"], prompt, TOKENS) for prompt in prompts], f"{name}, seed {seed}"


def test_speculation_really_ran(answers: tuple[str, Any], seed: int) -> None:
    name, found = answers
    if not name.startswith(("mtp", "ngram")):
        assert found["drafted"] == 0
        return
    assert 0 < found["accepted"] <= found["drafted"], f"{name}, seed {seed}: {found['accepted']} of {found['drafted']}"
    if name.startswith("mtp"):
        # A drafter that is never wrong would leave the rejection path untested.
        assert found["accepted"] < found["drafted"], f"{name}, seed {seed}: every draft was accepted"
