"""patches/0003: an unknown model is a 404 with the served names; root path and basename of a served model are known."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.exceptions import VLLMNotFoundError

ROOT = "/var/lib/models/nano-1.2"


class Engine:
    """What OpenAIServingModels asks of an engine: it takes every adapter."""

    model_config = SimpleNamespace(max_model_len=128)
    renderer = None
    input_processor = None

    async def add_lora(self, request: Any) -> bool:
        return True


def models(*names: str, root: str = ROOT) -> OpenAIServingModels:
    paths = [BaseModelPath(name=name, model_path=root) for name in names or ("nano", "default")]
    return OpenAIServingModels(Engine(), paths)  # type: ignore[arg-type]


def load(served: OpenAIServingModels, adapter: str) -> object:
    request = LoadLoRAAdapterRequest(lora_name=adapter, lora_path=f"/adapters/{adapter}")
    return asyncio.run(served.load_lora_adapter(request))


def serving(served: OpenAIServingModels) -> BaseServing:
    return BaseServing(served, served.model_config)


def check(served: OpenAIServingModels, model: str | None) -> ErrorResponse | None:
    return asyncio.run(serving(served)._check_model(SimpleNamespace(model=model)))  # type: ignore[arg-type]


def adapter_of(served: OpenAIServingModels, model: str) -> Any:
    return serving(served)._maybe_get_adapters(SimpleNamespace(model=model))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["nano", "default", ROOT, ROOT + "/", "nano-1.2", None, ""])
def test_a_served_model_is_known_by_name_root_path_and_basename(model: str | None) -> None:
    served = models()
    assert check(served, model) is None
    assert adapter_of(served, model) is None, "means the base model"  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["gpt-4", "NANO", "/var/lib/models", "1.2", ROOT + "/x", "."])
def test_an_unknown_model_is_404_with_the_served_names(model: str) -> None:
    served = models()
    load(served, "sql")
    answer = check(served, model)
    assert answer is not None
    assert answer.model_dump() == {
        "error": {
            "message": f"The model `{model}` does not exist. This server serves `nano`, `default`, `sql`.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }
    with pytest.raises(VLLMNotFoundError, match="serves `nano`, `default`, `sql`"):
        adapter_of(served, model)


def test_a_model_served_under_its_path_is_listed_by_that_path() -> None:
    answer = check(models(ROOT), "gpt-4")
    assert answer is not None and f"serves `{ROOT}`" in answer.error.message, "vLLM writes <path> for it"


def test_adapters_keep_working_and_go_before_an_alias_of_the_same_name() -> None:
    served = models()
    assert "Success" in str(load(served, "sql")) and "Success" in str(load(served, "nano-1.2"))
    assert check(served, "sql") is None and adapter_of(served, "sql").lora_name == "sql"
    assert check(served, "nano-1.2") is None and adapter_of(served, "nano-1.2").lora_name == "nano-1.2"
    assert adapter_of(served, ROOT) is None
    clash = load(served, "nano")
    assert isinstance(clash, ErrorResponse) and "conflicts with a served base model" in clash.error.message


def test_an_adapter_that_cannot_be_loaded_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    served = models()
    answers = {
        "broken": create_error_response("adapter is broken", status_code=HTTPStatus.BAD_REQUEST),
        "absent": create_error_response("no such adapter", status_code=HTTPStatus.NOT_FOUND),
    }

    async def resolve(name: str) -> ErrorResponse:
        return answers[name]

    monkeypatch.setattr(served, "resolve_lora", resolve)
    broken, absent = check(served, "broken"), check(served, "absent")
    assert broken is not None and (broken.error.code, broken.error.message) == (400, "adapter is broken")
    assert absent is not None and absent.error.code == 404 and "serves `nano`, `default`" in absent.error.message


def test_a_realtime_session_is_told_the_served_names_too() -> None:
    from vllm.entrypoints.speech_to_text.realtime.connection import RealtimeConnection

    connection = RealtimeConnection(None, serving(models()))  # type: ignore[arg-type]
    assert connection._check_model("nano-1.2") is None
    answer = connection._check_model("gpt-4")
    assert answer is not None and answer.error.code == 404 and "serves `nano`, `default`" in answer.error.message
