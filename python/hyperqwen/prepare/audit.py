"""Check a nano directory against what it says of itself: its bytes, its successors, its margins, its MTP
head.

The forward pass is the NumPy reference and not an engine; what it finds holds for the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hyperqwen.errors import VerificationError
from hyperqwen.prepare.nano import below, draws
from hyperqwen.prepare.reference import Reference
from hyperqwen.prepare.truth import Truth

DRAFTS = 3
"""Tokens that the MTP head proposes at a time when its acceptance is measured."""


@dataclass(frozen=True)
class Audit:
    """What was found.

    `positions`: contexts whose next token was compared. `margin`: the smallest distance, in logits, of the
    successor from the runner-up. `probability`: the smallest probability that the successor has at
    temperature 1. `accepted[i]`: the share of drafts whose first i + 1 tokens were all right. `drafts`: how
    many were made.
    """

    files: int
    positions: int
    margin: float
    probability: float
    accepted: tuple[float, ...]
    drafts: int

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def audit(directory: Path, random_prompts: int = 24) -> Audit:
    """Check the files' hashes, then every position of nano's own prompts, its cycles and some random token
    sequences.

    Raises VerificationError where a file's bytes differ from what nano.json promises, or where the most
    likely token of some context is not the successor.
    """
    truth = Truth.load(directory)
    check_files(directory, truth)
    model = Reference.load(directory)
    positions, margin, probability = 0, float("inf"), 1.0
    for ids in _sequences(truth, random_prompts):
        logits = model.forward(ids)[1].astype(np.float64)
        rows, next_ids = np.arange(len(ids)), np.array([truth.next_token(token) for token in ids])
        right = logits[rows, next_ids]
        shifted = logits - right[:, None]
        shifted[rows, next_ids] = -np.inf
        lead = -shifted.max(axis=1)
        if lead.min() <= 0:
            at = int(lead.argmin())
            raise VerificationError(
                f"{directory}: after token {ids[at]} at position {at} the model prefers token "
                f"{int(logits[at].argmax())}, nano.json says {next_ids[at]}"
            )
        positions += len(ids)
        margin = min(margin, float(lead.min()))
        probability = min(probability, float((1 / (1 + np.exp(shifted).sum(axis=1))).min()))
    accepted, drafts = acceptance(model, truth)
    return Audit(len(truth.files), positions, margin, probability, accepted, drafts)


def check_files(directory: Path, truth: Truth) -> None:
    """Compare every file with its hash in nano.json; all that differ are named in one VerificationError."""
    problems: list[str] = []
    for name, expected in sorted(truth.files.items()):
        path = directory / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        if found != expected:
            problems.append(f"{name}: sha256 is {found}, nano.json says {expected}")
    if problems:
        raise VerificationError(f"{directory}:\n  " + "\n  ".join(problems), "build the model again")


def acceptance(model: Reference, truth: Truth, tokens: int = 32) -> tuple[tuple[float, ...], int]:
    """Share of drafts that are right up to each place, and the number of drafts, along the greedy answers to
    the prompts."""
    right, drafts = np.zeros(DRAFTS), 0
    for prompt in truth.prompts:
        ids = prompt["prompt_ids"]
        text = [*ids, *truth.expected_greedy(ids, tokens + DRAFTS, ignore_eos=True)]
        hidden = model.forward(text)[0]
        known = len(ids) + 1
        while known + DRAFTS <= len(text):
            proposed = model.draft(text[:known], hidden, DRAFTS)
            good = next((i for i, token in enumerate(proposed) if token != text[known + i]), DRAFTS)
            right[:good] += 1
            drafts += 1
            known += good + 1
    return tuple(float(share) for share in right / max(drafts, 1)), drafts


def _sequences(truth: Truth, random_prompts: int) -> Iterator[Sequence[int]]:
    for prompt in truth.prompts:
        yield [*prompt["prompt_ids"], *prompt["answer_ids"]]
    for index in range(random_prompts):
        length = (1, 2, 5, 64)[index % 4]
        yield below(draws(index, "audit", length), len(truth.successors)).tolist()
