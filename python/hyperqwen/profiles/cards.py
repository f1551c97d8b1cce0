"""GPUs by name: memory as CUDA reports it, architecture, shared memory. Standard library only."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from hyperqwen.errors import BadInputError

MIB = 1 << 20
GIB = 1 << 30

EVIDENCE = {
    "reference": "HyperQwen published the profiles' figures for it",
    "field": "users of HyperQwen ran it there",
    "run here": "vLLM 0.31.0 ran this geometry on it with random weights",
    "none": "no report of this model on it is known",
}

_SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one block of threads can use, in KiB: CUDA C++ Programming Guide, compute capabilities."""


@dataclass(frozen=True)
class Card:
    """A GPU.

    total_bytes: what CUDA reports as its memory (torch.cuda.mem_get_info), less than its name says because firmware
    and page tables take a part. exact: whether that number was read off such a card; otherwise it is from error
    messages of torch that print it to 0.01 GiB, good to 0.1 %. sm: compute capability, 86 for 8.6.
    """

    name: str
    title: str
    sm: int
    total_bytes: int
    exact: bool = False
    evidence: str = "none"

    @property
    def shared_memory_bytes(self) -> int:
        """Most shared memory of a block; a kernel whose tiles need more does not start."""
        return _SHARED_KIB[self.sm] * 1024

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB

    @classmethod
    def of_vram(cls, gib: float, sm: int = 86) -> Card:
        """A card that is known by its nominal memory only ("24 GB").

        The first card of the table with that size lends its number, so that 24 is an RTX 3090. For other sizes 3.5 %
        are taken off, which is more than any of the table's GeForce cards reports less than its nominal size.

        Raises BadInputError for a size that is not positive.
        """
        if not math.isfinite(gib) or gib <= 0:
            raise BadInputError(f"--vram is {gib}; it must be above 0 GiB", "give the card's memory in GiB, such as 24")
        named = next((card for card in CARDS.values() if _NOMINAL[card.name] == gib), None)
        total = named.total_bytes if named else int(gib * GIB * 0.965)
        return cls(f"{gib:g}gib", f"a card of {gib:g} GiB", sm, total)


def of_log(total_bytes: int, sm: int = 86) -> Card:
    """The card that an engine's log is of: its memory, which is all that the log says, to 0.01 GiB."""
    return Card("log", "the card of the log", sm, total_bytes)


def _estimated(name: str, title: str, sm: int, gib: float, evidence: str = "none") -> Card:
    return Card(name, title, sm, int(gib * 1024) * MIB, evidence=evidence)


# Memory to 0.01 GiB as torch's messages print it, and the size in the name.
_TABLE: tuple[tuple[str, str, int, float, float, str], ...] = (
    ("rtx2080ti", "GeForce RTX 2080 Ti 11 GB", 75, 10.75, 11, "none"),
    ("rtx3060", "GeForce RTX 3060 12 GB", 86, 11.76, 12, "field"),
    ("rtx3080ti", "GeForce RTX 3080 Ti 12 GB", 86, 11.76, 12, "none"),
    ("rtx3090", "GeForce RTX 3090 24 GB", 86, 23.69, 24, "reference"),
    ("rtx3090ti", "GeForce RTX 3090 Ti 24 GB", 86, 23.69, 24, "none"),
    ("rtx4060ti16", "GeForce RTX 4060 Ti 16 GB", 89, 15.60, 16, "none"),
    ("rtx4080", "GeForce RTX 4080 16 GB", 89, 15.60, 16, "none"),
    ("rtx4080s32", "GeForce RTX 4080 Super, modified to 32 GB", 89, 31.48, 32, "field"),
    ("rtx4090", "GeForce RTX 4090 24 GB", 89, 23.64, 24, "field"),
    ("rtx4090d48", "GeForce RTX 4090 D, modified to 48 GB", 89, 47.38, 48, "none"),
    ("rtx5060ti16", "GeForce RTX 5060 Ti 16 GB", 120, 15.47, 16, "field"),
    ("rtx5070ti", "GeForce RTX 5070 Ti 16 GB", 120, 15.47, 16, "none"),
    ("rtx5080", "GeForce RTX 5080 16 GB", 120, 15.47, 16, "none"),
    ("rtx5090", "GeForce RTX 5090 32 GB", 120, 31.36, 32, "field"),
    ("rtxa5000", "RTX A5000 24 GB", 86, 23.56, 24, "none"),
    ("rtxa6000", "RTX A6000 48 GB", 86, 47.41, 48, "none"),
    ("rtx6000ada", "RTX 6000 Ada 48 GB", 89, 47.38, 48, "none"),
    ("rtxpro6000", "RTX PRO 6000 Blackwell 96 GB", 120, 94.97, 96, "none"),
    ("a10", "A10 24 GB", 86, 22.06, 24, "none"),
    ("l4", "L4 24 GB", 89, 22.03, 24, "none"),
    ("l40s", "L40S 48 GB", 89, 44.40, 48, "none"),
    ("a100-40", "A100 40 GB", 80, 39.39, 40, "none"),
    ("a100-80", "A100 80 GB", 80, 79.15, 80, "none"),
    ("h100", "H100 80 GB", 90, 79.10, 80, "none"),
    ("h200", "H200 141 GB", 90, 139.72, 141, "run here"),
    ("b200", "B200 180 GB", 100, 178.35, 180, "none"),
)

CARDS: dict[str, Card] = {
    name: _estimated(name, title, sm, gib, evidence) for name, title, sm, gib, _, evidence in _TABLE
}
_NOMINAL = {name: nominal for name, _, _, _, nominal, _ in _TABLE}

_ALIASES = {
    "a100": "a100-80",
    "a6000": "rtxa6000",
    "a5000": "rtxa5000",
    "4080s": "rtx4080s32",
    "rtx4080s": "rtx4080s32",
    "5060ti": "rtx5060ti16",
    "rtx5060ti": "rtx5060ti16",
    "rtx4060ti": "rtx4060ti16",
    "pro6000": "rtxpro6000",
    "rtx4090d": "rtx4090d48",
    "a100-sxm4-40gb": "a100-40",
    "a100-pcie-40gb": "a100-40",
    "a100-sxm4-80gb": "a100-80",
    "a100-pcie-80gb": "a100-80",
    "a100 80gb pcie": "a100-80",
    "h100 80gb hbm3": "h100",
    "h100 pcie": "h100",
    "h200 nvl": "h200",
    "rtx 6000 ada generation": "rtx6000ada",
    "rtx pro 6000 blackwell workstation edition": "rtxpro6000",
    "rtx pro 6000 blackwell server edition": "rtxpro6000",
    "rtx pro 6000 blackwell max-q workstation edition": "rtxpro6000",
}


def find(text: str) -> Card:
    """The card of that name, however it is written: "rtx3090", "RTX 3090", "3090", "NVIDIA A100-SXM4-80GB".

    A laptop's card is another than that of its name, with less memory, and none of the table.

    Raises BadInputError with the nearest name.
    """
    wanted = _plain(text)
    if wanted in _BY_TEXT:
        return CARDS[_BY_TEXT[wanted]]
    # "Did you mean rtx4090?" would be answered with yes, and plan for memory that is not there.
    close = [] if "laptop" in wanted else difflib.get_close_matches(wanted, list(_BY_TEXT), n=1, cutoff=0.5)
    known = ", ".join(CARDS)
    raise BadInputError(
        f"--gpu {text!r} is no card that is known here",
        f"did you mean {_BY_TEXT[close[0]]}?" if close else f"use --vram GIB, or one of: {known}",
    )


def _plain(text: str) -> str:
    kept = re.sub(r"[^a-z0-9]", "", text.lower())
    for word in ("nvidia", "geforce", "tesla"):
        kept = kept.removeprefix(word)
    return kept


def _texts(card: Card) -> list[str]:
    # "NVIDIA GeForce RTX 3090", as the driver says it: without the size.
    driver = re.sub(r"(, modified to)? \d+ GB$", "", card.title)
    texts = [_plain(text) for text in (card.name, card.title, driver)]
    return [*texts, *(text.removeprefix("rtx") for text in texts)]


_BY_TEXT: dict[str, str] = {text: card.name for card in reversed(CARDS.values()) for text in _texts(card)}
_BY_TEXT.update({_plain(alias): name for alias, name in _ALIASES.items()})
