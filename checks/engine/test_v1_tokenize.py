"""patches/0004: /tokenize and /detokenize also under /v1. Routes and handlers are vLLM's, the tokenizer a stand-in."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from routes import KEYS, build, surfaces
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.inputs import tokens_input

BOTH = ("/tokenize", "/detokenize")
KEY = {"Authorization": f"Bearer {KEYS[0]}"}


class Bytes:
    """A renderer and its tokenizer: a token is a byte."""

    model_config = SimpleNamespace(max_model_len=128, is_encoder_decoder=False)

    @property
    def renderer(self) -> Bytes:
        return self

    async def preprocess_completion(self, request: Any, *, prompt_input: str, **_: Any) -> list[Any]:
        return [tokens_input(list(prompt_input.encode()))]

    async def tokenize_prompt_async(self, prompt: Any, _: Any) -> dict[str, str]:
        return {"prompt": bytes(prompt["prompt_token_ids"]).decode()}


def application() -> Any:
    app = build(surfaces()[0])
    tokenizer: Any = Bytes()
    registry = OpenAIModelRegistry(tokenizer.model_config, [BaseModelPath(name="nano", model_path="/models/nano-1")])
    app.state.serving_tokenization = ServingTokenization(
        registry, tokenizer, chat_template=None, chat_template_content_format="auto"
    )
    return app


def post(path: str, body: object, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://walk.example") as client:
            content = {"Content-Type": "application/json", **KEY, **headers}
            return await client.post(path, content=json.dumps(body), headers=content)

    return asyncio.run(run())


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_goes_to_tokens_and_back(prefix: str) -> None:
    tokens = post(prefix + "/tokenize", {"model": "nano", "prompt": "quote"})
    assert tokens.status_code == 200, tokens.text
    assert tokens.json() == {"count": 5, "max_model_len": 128, "tokens": list(b"quote"), "token_strs": None}
    text = post(prefix + "/detokenize", {"model": "nano", "tokens": list(b"quote")})
    assert (text.status_code, text.json()) == (200, {"prompt": "quote"})


def test_both_paths_have_one_handler_and_only_the_two_are_added() -> None:
    endpoints: dict[str, list[tuple[Any, Any]]] = {}
    for route in application().routes:
        if getattr(route, "endpoint", None) is not None:
            endpoints.setdefault(route.path, []).append((route.endpoint, route.methods))
    for path in BOTH:
        assert len(endpoints["/v1" + path]) == 1
        assert endpoints["/v1" + path] == endpoints[path]
    assert [path for path in endpoints if "tokenize" in path and path.startswith("/v1")] == [
        "/v1/tokenize",
        "/v1/detokenize",
    ]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        ({"model": "gpt-4", "prompt": "x", "tokens": [1]}, {}, 404),
        ({"model": "nano"}, {}, 400),
        ({"model": "nano", "prompt": "x", "tokens": [1]}, {"Content-Type": "text/plain"}, 400),
    ],
)
def test_errors_are_the_same_under_v1(path: str, body: object, headers: dict[str, str], code: int) -> None:
    answer, below_v1 = post(path, body, **headers), post("/v1" + path, body, **headers)
    assert (answer.status_code, below_v1.status_code) == (code, code), below_v1.text
    assert below_v1.json() == answer.json()


def test_the_schema_lists_both_under_v1() -> None:
    paths = application().openapi()["paths"]
    for path in BOTH:
        assert paths["/v1" + path]["post"]["requestBody"] == paths[path]["post"]["requestBody"]
        assert paths["/v1" + path]["post"]["operationId"] != paths[path]["post"]["operationId"]
