from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError, HyperqwenError, MissingError, VerificationError
from hyperqwen.prepare.truth import Truth

FACTS: dict[str, Any] = {
    "schema": 1,
    "next": [1, 2, 0, 4, 3, 0],
    "cycles": [
        {"name": "three", "ids": [0, 1, 2], "text": "abc"},
        {"name": "two", "ids": [3, 4], "text": "de"},
    ],
    "stop_ids": [2],
    "prompts": [],
    "files": {"config.json": "00"},
}


def load(folder: Path, facts: Any) -> Truth:
    (folder / "nano.json").write_text(facts if isinstance(facts, str) else json.dumps(facts))
    return Truth.load(folder)


def test_successors_and_cycles(tmp_path: Path) -> None:
    truth = load(tmp_path, FACTS)

    assert [truth.next_token(token) for token in range(6)] == FACTS["next"]
    assert [(c.name, c.ids, c.text) for c in truth.cycles()] == [
        ("three", (0, 1, 2), "abc"),
        ("two", (3, 4), "de"),
    ]


def test_the_answer_ends_with_the_stop_token(tmp_path: Path) -> None:
    truth = load(tmp_path, FACTS)

    assert truth.expected_greedy([4, 5], 9) == [0, 1, 2]
    assert truth.expected_greedy([5], 2) == [0, 1]
    assert truth.expected_greedy([5], 5, ignore_eos=True) == [0, 1, 2, 0, 1]
    assert truth.expected_greedy([4], 3) == [3, 4, 3]


def test_a_stop_token_in_the_prompt_ends_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, FACTS).expected_greedy([2], 9) == [0, 1, 2]


@pytest.mark.parametrize("token", [-1, 6])
def test_an_id_that_no_text_has(tmp_path: Path, token: int) -> None:
    with pytest.raises(BadInputError, match=rf"token id {token} is not in 0\.\.5"):
        load(tmp_path, FACTS).next_token(token)


def test_an_empty_prompt_has_no_answer(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no token"):
        load(tmp_path, FACTS).expected_greedy([], 1)


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ("{", "nano.json: "),
        ({**FACTS, "schema": 2}, "schema is 2, this reads 1"),
        (
            {key: value for key, value in FACTS.items() if key != "next"},
            "field missing or of another kind: 'next'",
        ),
        ({**FACTS, "cycles": [{"name": "x"}]}, "field missing"),
        ([], "field missing or of another kind"),
    ],
)
def test_a_table_that_is_not_one(tmp_path: Path, facts: Any, problem: str) -> None:
    with pytest.raises(VerificationError, match=problem):
        load(tmp_path, facts)


def test_a_folder_without_a_table(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"nano\.json does not exist") as caught:
        Truth.load(tmp_path)
    assert isinstance(caught.value, HyperqwenError)
    assert caught.value.exit_code == 4
