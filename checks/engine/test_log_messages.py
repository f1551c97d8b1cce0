"""The log messages that our programs read are still in vLLM's source, word for word."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import vllm

from hyperqwen.engine import messages
from hyperqwen.engine.messages import Message

READ = (
    messages.START,
    messages.GROUP_TOKENS,
    messages.GRAPHS_UNPLANNED,
    *messages.MEMORY,
    *messages.STARTUP,
    *messages.CONTENT,
)


@functools.cache
def texts(file: str) -> tuple[str, ...]:
    """Every text in a file of vLLM's, adjacent ones joined, a value in an f-string as {}."""
    source = (Path(vllm.__file__).parent / file).read_text(encoding="utf-8")
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return tuple(found)


@pytest.mark.parametrize("message", READ, ids=lambda message: f"{message.file}: {message.begin}")
def test_vllm_still_says_so(message: Message) -> None:
    assert any(text.startswith(message.text) for text in texts(message.file)), (
        f"vllm/{message.file} has no text that begins with {message.text!r}; "
        "word it in python/hyperqwen/engine/messages.py as that file does now"
    )
