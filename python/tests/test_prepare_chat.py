from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError
from hyperqwen.prepare import chat

TEMPLATE = (Path(__file__).parents[2] / "prepare" / "nano" / "chat_template.jinja").read_text()
USER = {"role": "user", "content": "Hi"}


def render(*messages: dict[str, Any], **switches: Any) -> str:
    return chat.render(TEMPLATE, messages, **switches)


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("switches", "start"),
    [
        ({}, "<think>\n"),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ],
)
def test_the_thinking_switch(switches: dict[str, bool], start: str) -> None:
    assert render(USER, **switches) == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{start}"


def test_without_generation_prompt_nothing_follows() -> None:
    assert render(USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_system_message_comes_first() -> None:
    text = render({"role": "system", "content": " Be kind. "}, USER, add_generation_prompt=False)

    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ({"content": "4", "reasoning_content": "2 + 2"}, True),
        ({"content": "4", "reasoning": "2 + 2"}, True),
        ({"content": "<think>\n2 + 2\n</think>\n\n4"}, True),
        ({"content": "4", "reasoning_content": "\n"}, False),
        ({"content": "4"}, False),
    ],
)
def test_past_thoughts_stay_unless_told_otherwise(answer: dict[str, str], kept: bool) -> None:
    messages = [USER, {"role": "assistant", **answer}, USER]
    thought = "<think>\n2 + 2\n</think>\n\n" if kept else ""

    assert f"<|im_start|>assistant\n{thought}4<|im_end|>\n" in render(*messages)
    assert "<|im_start|>assistant\n4<|im_end|>\n" in render(*messages, preserve_thinking=False)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    assert "user\none two<|im_end|>" in render({"role": "user", "content": parts})


def test_tools_are_described_one_a_line_with_characters_as_they_are() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "<é>"}} for name in ("a", "b")]
    text = render({"role": "system", "content": "Short."}, USER, tools=tools)

    described = text.split("<tools>\n")[1].split("</tools>")[0].splitlines()
    assert [line[:52] for line in described] == [
        f'{{"type": "function", "function": {{"name": "{name}", "desc' for name in ("a", "b")
    ]
    assert "<é>" in described[0]
    assert "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>" in text
    assert "\n\nShort.<|im_end|>\n<|im_start|>user\nHi" in text


def test_a_tool_call_is_xml_with_json_for_what_is_not_text() -> None:
    text = render(USER, call({"city": "Århus", "days": 3, "units": ["c", None]}), USER)

    assert (
        "<|im_start|>assistant\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nÅrhus\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=units>\n["c", null]\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
    ) in text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["x"], '<parameter=arguments>\n["x"]\n</parameter>\n'),
        ("bare", "<parameter=arguments>\nbare\n</parameter>\n"),
        ({}, ""),
        (None, ""),
    ],
)
def test_arguments_that_are_no_mapping_do_not_break_the_template(arguments: Any, shown: str) -> None:
    assert f"<function=weather>\n{shown}</function>" in render(USER, call(arguments), USER)


def test_text_and_several_calls_of_one_turn() -> None:
    message = call({})
    message["content"] = "Looking."
    message["tool_calls"] *= 2
    one = "<tool_call>\n<function=weather>\n</function>\n</tool_call>"

    assert f"assistant\nLooking.\n\n{one}\n{one}<|im_end|>" in render(USER, message, USER)


def test_results_of_one_turn_share_a_user_turn() -> None:
    results = [{"role": "tool", "content": content} for content in ("sun", "rain")]
    text = render(USER, call({}), *results, add_generation_prompt=False)

    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>"
        "\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ([{"role": "system", "content": "x"}], "a message of the user"),
        ([USER, {"role": "system", "content": "x"}], "system message must be the first"),
        ([USER, {"role": "robot", "content": "x"}], "unknown role: robot"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "text only"),
        ([{"role": "user", "content": 3}], "must be a string"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_says_why(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(BadInputError, match=reason):
        render(*messages)


def test_a_template_that_is_not_one_says_so() -> None:
    with pytest.raises(BadInputError, match="chat template: "):
        chat.render("{% if %}", [USER])


def test_the_sandbox_keeps_templates_off_python() -> None:
    with pytest.raises(BadInputError, match="unsafe"):
        chat.render("{{ messages.__class__.__mro__ }}", [USER])
