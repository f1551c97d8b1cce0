"""Which model a request means: the served names, and the root path of a served model or its last part.

Clients that were set up with the path or the repository name from /v1/models (`root`) keep working when the server
gives the model a short name. Anything else is answered 404 with the names that would have worked.

Source: vLLM 0.31.0, `BaseServing._check_model`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse


class BaseModelPath(Protocol):
    """A served base model: the name that clients use and the path or repository it was loaded from."""

    @property
    def name(self) -> str: ...

    @property
    def model_path(self) -> str: ...


class ServedModels(Protocol):
    """What vLLM's `OpenAIServingModels` and `OpenAIModelRegistry` share: base models, and adapters by name."""

    @property
    def base_model_paths(self) -> Sequence[BaseModelPath]: ...

    @property
    def lora_requests(self) -> Collection[str]: ...


def is_base_model(name: str, models: ServedModels) -> bool:
    """Whether `name` is the served name, the root path or the root path's last part of a base model.

    Adapters are not looked at: vLLM takes a loaded adapter of that name before it asks for the base model. Paths are
    compared as text, apart from slashes at the end; a request never makes the server touch the file system.
    """
    return any(name == model.name or name.rstrip("/") in _aliases(model) for model in models.base_model_paths)


def _aliases(model: BaseModelPath) -> tuple[str, ...]:
    root = model.model_path.rstrip("/")
    last = root.rpartition("/")[2]
    # "." and ".." say where the server was started, not what it serves.
    return tuple(alias for alias in (root, last) if alias not in ("", ".", ".."))


def served_names(models: ServedModels) -> list[str]:
    """The names to use in a request: base models first, then loaded adapters, without repeats."""
    return list(dict.fromkeys([*(model.name for model in models.base_model_paths), *models.lora_requests]))


def unknown_model_message(name: str | None, models: ServedModels) -> str:
    """vLLM's sentence, which clients may look for, and the names that this server does serve."""
    names = ", ".join(f"`{served}`" for served in served_names(models))
    return f"The model `{name}` does not exist. This server serves {names}."


def unknown_model(name: str | None, models: ServedModels) -> ErrorResponse:
    """The 404 answer, in OpenAI's error form, to a request for a model that is not served.

    Built here and not by vLLM's `create_error_response`, which replaces whatever looks like a file path by `<path>`:
    a model that is served under its path would be listed as that.
    """
    from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

    message = unknown_model_message(name, models)
    return ErrorResponse(error=ErrorInfo(message=message, type="NotFoundError", param="model", code=404))
