"""A pydantic ValidationError as a message for the user: each problem with its field, its value and what is right."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_TYPES = {dict: "a table", list: "a list", str: "text", bool: "a truth value", int: "a whole number", float: "a number"}


def describe(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """All problems of `error`, one a line under a heading that names `where`."""
    lines = [f"  {_problem(item, model)}" for item in error.errors()]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return "\n".join([f"{count} in {where}:", *lines])


def _problem(item: Any, model: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in item["loc"])
    kind, value = item["type"], item["input"]
    if kind == "missing":
        return f"{field} is missing; add it"
    if kind == "extra_forbidden":
        return f"{field} is not a field; {_nearest(item['loc'], model)}"
    if kind == "value_error":
        return f"{field}: {item['ctx']['error']}"
    wanted = str(item["msg"]).removeprefix("Input ").replace("should be", "must be").replace("should", "must")
    return f"{field} is {value!r} ({_TYPES.get(type(value), type(value).__name__)}); it {wanted}"


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
