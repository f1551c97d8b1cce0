"""Render a chat template as the server does: the same Jinja dialect, sandbox and helpers as transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hyperqwen.errors import BadInputError


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **switches: Any,
) -> str:
    """The prompt text of a conversation; `switches` are what clients send as chat_template_kwargs.

    Raises BadInputError with the template's own words where it refuses the conversation, or where it is not a
    template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(template).render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **switches
        )
    except jinja2.TemplateError as error:
        raise BadInputError(f"chat template: {error.message}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike Jinja's own filter this leaves <, > and & alone: the text is for a model and not for a
    browser."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
