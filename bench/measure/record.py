"""The record: figures in one JSON file, merged from runs of single parts, and shown as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperqwen.errors import BadInputError, UnsuitableError

SCHEMA = 1


@dataclass(frozen=True)
class Figure:
    """One measured value against its target: met when `value` is at most `target`.

    name: unique in a record. command: what was run. seconds: how long that took. commit: of the source. nix: version.
    detail: what else is worth keeping, such as what differs.
    """

    name: str
    value: float
    unit: str
    target: float
    command: str
    seconds: float
    commit: str
    nix: str
    at: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the target was reached."""
        return self.value <= self.target

    def as_json(self) -> dict[str, Any]:
        """The figure as the record has it."""
        return {**asdict(self), "value": round(self.value, 3), "seconds": round(self.seconds, 1), "met": self.met}


def load(path: Path) -> dict[str, Any] | None:
    """The record at `path`, None if there is none; raises BadInputError if it is not a record."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: {error}", "name another file with --out") from None
    try:
        record = json.loads(text)
        figures = record["figures"]
        if record["schema"] != SCHEMA or not isinstance(record["machine"], dict):
            raise KeyError("schema")
        names = [figure["name"] for figure in figures]
    except (ValueError, KeyError, TypeError):
        raise BadInputError(f"{path} is not a record of this command", "name another file with --out") from None
    if len(set(names)) != len(names):
        raise BadInputError(f"{path} has a figure twice", "name another file with --out")
    return dict(record)


def merged(record: Mapping[str, Any] | None, machine: Mapping[str, Any], figures: Iterable[Figure]) -> dict[str, Any]:
    """`record` with `figures` put in, each in the place of the one of its name; the others stay.

    Raises UnsuitableError if the record is of another machine: figures of two machines do not belong in one table.
    """
    if record is not None and record["machine"] != machine:
        differing = [key for key in machine if record["machine"].get(key) != machine[key]]
        raise UnsuitableError(
            f"the record is of another machine (it differs in {', '.join(differing) or 'its fields'})",
            "name another file with --out",
        )
    kept = {figure["name"]: figure for figure in (record or {}).get("figures", [])}
    kept.update((figure.name, figure.as_json()) for figure in figures)
    return {"schema": SCHEMA, "machine": dict(machine), "figures": list(kept.values())}


def save(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record in one step: a reader, or a crash, finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """The figures as lines: name, value, target, met or MISSED, command."""

    def amount(value: float, unit: str) -> str:
        return f"{value:.0f} {unit}" if float(value).is_integer() else f"{value:.{2 if value < 10 else 1}f} {unit}"

    rows = [("figure", "measured", "target", "", "nix", "commit")]
    for figure in figures:
        rows.append(
            (
                figure["name"],
                amount(figure["value"], figure["unit"]),
                f"<= {amount(figure['target'], figure['unit'])}",
                "met" if figure["met"] else "MISSED",
                figure["nix"],
                figure["commit"][:12],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(widths[at]) for at, cell in enumerate(row)).rstrip() for row in rows)
