"""What nano must answer: the successor table that its builder wrote beside the weights, as nano.json.

Standard library only, so that a check can import it next to any engine.

    truth = Truth.load(directory)
    truth.next_token(17)
    truth.expected_greedy(prompt_ids, 24)
    [cycle.text for cycle in truth.cycles()]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperqwen.errors import BadInputError, MissingError, VerificationError

FILE = "nano.json"
SCHEMA = 1


@dataclass(frozen=True)
class Cycle:
    """A ring of tokens: after the last one comes the first. `text` is the decoded ring, special tokens
    included."""

    name: str
    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Truth:
    """The successor of every token, and prompts with the greedy answers that follow from it."""

    successors: tuple[int, ...]
    rings: tuple[Cycle, ...]
    stop_ids: frozenset[int]
    prompts: tuple[Mapping[str, Any], ...]
    files: Mapping[str, str]

    @classmethod
    def load(cls, directory: Path) -> Truth:
        """Read nano.json of a model directory.

        Raises MissingError where there is none, VerificationError where it is not a successor table.
        """
        path = directory / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise MissingError(f"{path} does not exist", "name a directory that `hyperqwen nano build` made") from error
        except (OSError, ValueError) as error:
            raise VerificationError(f"{path}: {error}") from error
        try:
            if data["schema"] != SCHEMA:
                raise VerificationError(f"{path}: schema is {data['schema']!r}, this reads {SCHEMA}")
            truth = cls(
                successors=tuple(data["next"]),
                rings=tuple(Cycle(c["name"], tuple(c["ids"]), c["text"]) for c in data["cycles"]),
                stop_ids=frozenset(data["stop_ids"]),
                prompts=tuple(data["prompts"]),
                files=dict(data["files"]),
            )
        except (KeyError, TypeError) as error:
            raise VerificationError(f"{path}: field missing or of another kind: {error}") from error
        return truth

    def next_token(self, token: int) -> int:
        """The greedy successor of a token id. Raises BadInputError for an id that no text has."""
        if not 0 <= token < len(self.successors):
            raise BadInputError(f"token id {token} is not in 0..{len(self.successors) - 1}")
        return self.successors[token]

    def expected_greedy(self, prompt_ids: Sequence[int], count: int, *, ignore_eos: bool = False) -> list[int]:
        """At most `count` token ids of the greedy answer.

        A stop token ends the answer and is its last id, as in an engine's own token list; `ignore_eos` runs
        past it. Raises BadInputError for an empty prompt.
        """
        if not prompt_ids:
            raise BadInputError("the prompt holds no token")
        answer: list[int] = []
        token = prompt_ids[-1]
        while len(answer) < count and (ignore_eos or not answer or token not in self.stop_ids):
            token = self.next_token(token)
            answer.append(token)
        return answer

    def cycles(self) -> tuple[Cycle, ...]:
        """The rings, in the order of prepare/nano/cycles.toml."""
        return self.rings
