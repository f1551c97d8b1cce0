"""A pydantic ValidationError as a message for the user: each problem with its field, its value and what is right."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_TYPES = {dict: "a table", list: "a list", str: "text", bool: "a truth value", int: "a whole number", float: "a number"}


def describe(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """All problems of `error`, one a line under a heading that names `where`."""
    # A union has a problem for each of its parts, and all of them are one mistake.
    found: dict[str, list[Any]] = {}
    for item in error.errors():
        found.setdefault(_field(item["loc"], model), []).append(item)
    lines = [f"  {_problem(field, items, model)}" for field, items in found.items()]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in {where}:", *lines])


def shortened(value: Any) -> str:
    """`value` as a message repeats it: Python prints no number of thousands of digits, and nobody reads one."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 500 else text[:499] + "…"


def _field(loc: Sequence[str | int], model: type[BaseModel]) -> str:
    """The field's path, without the part of a union that pydantic names after it."""
    parts: list[str] = []
    inside: type[BaseModel] | None = model
    for part in loc:
        if inside is None and isinstance(part, str):
            break
        parts.append(str(part))
        field = inside.model_fields.get(str(part)) if inside is not None else None
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        inside = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return ".".join(parts)


def _problem(field: str, items: Sequence[Any], model: type[BaseModel]) -> str:
    item = items[0]
    kind, value = item["type"], item["input"]
    if kind == "missing":
        return f"{field} is missing; add it"
    if kind == "extra_forbidden":
        return f"{field} is not a field; {_nearest(item['loc'], model)}"
    if kind == "value_error":
        return f"{field}: {item['ctx']['error']}"
    wanted = ", or ".join(dict.fromkeys(_wanted(str(one["msg"])) for one in items))
    return f"{field} is {shortened(value)} ({_TYPES.get(type(value), type(value).__name__)}); it {wanted}"


def _wanted(message: str) -> str:
    for subject in ("Input ", "String ", "List "):
        message = message.removeprefix(subject)
    return message.replace("should", "must")


def _nearest(loc: Sequence[str | int], model: type[BaseModel]) -> str:
    known = list(_fields_at(loc[:-1], model))
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"remove it, or use one of: {', '.join(known)}"


def _fields_at(path: Sequence[str | int], model: type[BaseModel]) -> Sequence[str]:
    for part in path:
        annotation: Any = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(model.model_fields)
