"""What an engine measured of its memory while it started, read from its log, and beside it what was planned."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hyperqwen.engine import messages
from hyperqwen.errors import MissingError, UnsuitableError

if TYPE_CHECKING:
    from hyperqwen.profiles.memory import Budget

GIB = 1 << 30
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What counts where several cards, or the engine's two models, each say it: the least of the pool, the most of the rest.
_LEAST = frozenset({"pool_bytes", "free_bytes", "total_bytes", "pool_tokens", "concurrency"})


@dataclass(frozen=True)
class Measured:
    """What the log says; None for what it does not. Bytes are as exact as the log, which rounds to 0.01 GiB.

    weights_bytes: what loading took, drafter included. consumed_bytes: weights and all that stays beside them.
    peak_bytes: transient memory of the largest step, and the estimate of graphs where that was planned with.
    graphs_bytes, graphs_estimate_bytes: of captured graphs, and what was expected of them.
    graphs_planned: whether that estimate was taken off the pool.
    pool_bytes, pool_tokens, context_tokens, concurrency: of the pool; requests of that many tokens that it holds.
    requested_bytes: utilization of the card. free_bytes, total_bytes: of the card, before anything was loaded, but with
        CUDA's own context there.
    block_tokens: of an attention block, before pages of a drafter are made equal. group_tokens: of a block of each
        group, afterwards.
    """

    total_bytes: int | None = None
    free_bytes: int | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    consumed_bytes: int | None = None
    peak_bytes: int | None = None
    graphs_bytes: int | None = None
    graphs_estimate_bytes: int | None = None
    graphs_planned: bool = True
    pool_bytes: int | None = None
    pool_tokens: int | None = None
    context_tokens: int | None = None
    concurrency: float | None = None
    block_tokens: int | None = None
    group_tokens: tuple[int, ...] | None = None

    @property
    def empty(self) -> bool:
        """Whether the log says nothing of memory."""
        return all(getattr(self, field.name) is None for field in fields(self) if field.name != "graphs_planned")

    def report(self) -> dict[str, object]:
        """Its fields as JSON can carry them."""
        return asdict(self)

    @property
    def activations_bytes(self) -> int | None:
        """Transient memory of the largest step alone."""
        if self.peak_bytes is None:
            return None
        return self.peak_bytes - (self.graphs_estimate_bytes or 0 if self.graphs_planned else 0)

    @property
    def held_bytes(self) -> int | None:
        """What the engine keeps of a card as it said: weights, pool and graphs, without CUDA's own context."""
        if self.weights_bytes is None or self.pool_bytes is None:
            return None
        return self.weights_bytes + self.pool_bytes + (self.graphs_bytes or 0)

    @property
    def attention_block_tokens(self) -> int | None:
        """Tokens of an attention block: as first set, or the multiple of it that pages were made equal with."""
        if self.block_tokens is None or self.group_tokens is None or self.block_tokens in self.group_tokens:
            return self.block_tokens
        multiples = [size for size in self.group_tokens if size % self.block_tokens == 0]
        return min(multiples, default=self.block_tokens)


def read(log: Path) -> Measured:
    """What `log` says; of a log with several starts, the last. Raises MissingError or UnsuitableError."""
    try:
        return measured(log.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        raise MissingError(f"the log {log} does not exist", "hyperqwen logs says where a server's log is") from None
    except OSError as error:
        raise UnsuitableError(
            f"the log {log} cannot be read: {error.strerror}", "name a file that you may read"
        ) from None


def measured(log: str, before: Measured | None = None) -> Measured:
    """What the text of a log says; of several starts in it, the last.

    `before` is what the log said until this text, which begins with a line of its own.
    """
    found = before or Measured()
    for line in re.split(r"[\r\n]+", _COLOUR.sub("", log)):
        if messages.START.begin in line:
            found = Measured()
        elif messages.GRAPHS_UNPLANNED.begin in line:
            found = replace(found, graphs_planned=False)
        elif messages.GROUP_TOKENS.begin in line:
            sizes = re.findall(r"\d+", line.partition(messages.GROUP_TOKENS.begin)[2])
            found = replace(found, group_tokens=tuple(map(int, sizes)) or None)
        else:
            found = _with(found, line)
    return found


def _with(found: Measured, line: str) -> Measured:
    for message in messages.MEMORY:
        said = messages.values(message, line)
        if said is None:
            continue
        changes: dict[str, Any] = {}
        for name, text in said:
            value, before = _value(name, text), getattr(found, name)
            if before is not None:
                value = min(before, value) if name in _LEAST else max(before, value)
            changes[name] = value
        return replace(found, **changes)
    return found


def _value(name: str, text: str) -> float:
    number = float(text.replace(",", ""))
    if name == "concurrency":
        return number
    return round(number * GIB) if name.endswith("_bytes") else round(number)


@dataclass(frozen=True)
class Row:
    """One thing as it was planned and as it came; None where one of the two has no such figure.

    ratio: measured over planned.
    """

    what: str
    unit: Literal["bytes", "tokens", "requests", "groups"]
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        if self.predicted is None or self.measured is None or self.predicted <= 0:
            return None
        return self.measured / self.predicted

    def report(self) -> dict[str, object]:
        """The row as JSON has it."""
        ratio = None if self.ratio is None else round(self.ratio, 4)
        return {
            "what": self.what,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": self.measured,
            "ratio": ratio,
        }


def side_by_side(budget: Budget, seen: Measured) -> tuple[Row, ...]:
    """What was planned for a card beside what the engine measured; without what neither of them has."""

    def planned(*keys: str) -> int:
        return sum(figure.bytes for figure in budget.figures if figure.key.split(".")[0] in keys)

    beside = _less(seen.consumed_bytes, seen.weights_bytes)
    activations = seen.activations_bytes
    kept = None if beside is None or activations is None else beside + activations
    taken = _less(seen.total_bytes, seen.free_bytes)
    rows: Iterable[Row] = (
        Row("Memory in all", "bytes", budget.load.card_bytes, seen.total_bytes),
        Row("Taken before the start: CUDA's context, other programs", "bytes", None, taken),
        Row("Planned by utilization", "bytes", budget.requested_bytes, seen.requested_bytes),
        Row("Weights", "bytes", planned("weights"), seen.weights_bytes),
        Row("Tables and buffers beside them", "bytes", planned("overhead"), beside),
        Row("Activations at their peak", "bytes", planned("activations", "verify", "kvarn"), activations),
        Row("Both together", "bytes", planned("overhead", "activations", "verify", "kvarn"), kept),
        Row("CUDA graphs", "bytes", planned("graphs"), seen.graphs_bytes),
        Row("KV cache pool", "bytes", budget.kv_cache_bytes, seen.pool_bytes),
        Row("KV cache pool", "tokens", budget.pool_tokens, seen.pool_tokens),
        Row("Attention block", "tokens", budget.pool.block_tokens, seen.attention_block_tokens),
        Row("Groups of layers", "groups", len(budget.pool.groups), _count(seen.group_tokens)),
        Row("Requests of the full context", "requests", round(budget.concurrency, 2), seen.concurrency),
    )
    return tuple(row for row in rows if row.measured is not None)


def lines(rows: Iterable[Row]) -> list[str]:
    """`rows` as a table in plain text: what, planned, measured, and how far apart."""
    cells = [("", "planned", "measured", "", "")]
    for row in rows:
        unit = "MiB" if row.unit == "bytes" else row.unit
        apart = "" if row.ratio is None else f"{(row.ratio - 1) * 100:+.1f} %"
        cells.append((row.what, _shown(row.unit, row.predicted), _shown(row.unit, row.measured), unit, apart))
    wide = [max(len(row[column]) for row in cells) for column in range(5)]
    return [
        f"{what:{wide[0]}}  {planned:>{wide[1]}}  {came:>{wide[2]}} {unit:{wide[3]}}  {apart:>{wide[4]}}".rstrip()
        for what, planned, came, unit, apart in cells
    ]


def _shown(unit: str, value: float | None) -> str:
    if value is None:
        return "-"
    if unit == "requests":
        return f"{value:.2f}"
    return f"{value / (1 << 20):,.0f}" if unit == "bytes" else f"{value:,.0f}"


def _less(whole: int | None, part: int | None) -> int | None:
    return None if whole is None or part is None else whole - part


def _count(sizes: tuple[int, ...] | None) -> int | None:
    return None if sizes is None else len(sizes)
