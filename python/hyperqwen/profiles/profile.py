"""One profile: `profiles/NAME.toml` read into typed values, every problem of it reported at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.runtime.problems import describe

MIB = 1 << 20
Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Server(_Table):
    """Where the server listens and what it calls its model."""

    model_name: Name
    host: Annotated[str, Field(min_length=1)]
    port: Port


class Limits(_Table):
    """What the engine reserves.

    context_tokens: longest prompt and answer together, in tokens.
    concurrent_requests: requests that decode at a time; more wait.
    kv_cache_mib: memory for keys, values and recurrent states, in MiB.
    threads: OpenMP threads of the engine.
    """

    context_tokens: Annotated[int, Field(ge=16, le=32768)]
    concurrent_requests: Annotated[int, Field(ge=1, le=1024)]
    kv_cache_mib: Annotated[int, Field(ge=16)]
    threads: Annotated[int, Field(ge=1, le=1024)]


class Answer(_Table):
    """Sampling of the command line's own requests; a client of the API sends its own."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0.0, le=2.0)]


class Profile(_Table):
    """A profile as a whole."""

    name: Name
    summary: Annotated[str, Field(min_length=1)]
    engine: Literal["cpu"]
    server: Server
    limits: Limits
    answer: Answer

    @field_validator("answer")
    @classmethod
    def _answer_fits(cls, answer: Answer, info: Any) -> Answer:
        limits = info.data.get("limits")
        if limits is not None and answer.max_tokens >= limits.context_tokens:
            raise ValueError(
                f"max_tokens must leave room for a prompt in limits.context_tokens ({limits.context_tokens})"
            )
        return answer


def parse(text: str, where: str) -> Profile:
    """The profile that `text` (TOML) describes; `where` names it in messages.

    Raises BadInputError with all problems.
    """
    try:
        data: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{where} is not TOML: {error}", "correct that line") from None
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise BadInputError(describe(error, Profile, where)) from None


def load(path: Path) -> Profile:
    """Read the profile at `path`; raises MissingError or BadInputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise MissingError(f"the profile {path} does not exist", "name a file such as profiles/demo.toml") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    return parse(text, str(path))


def engine_flags(profile: Profile, model: Path, *, host: str, port: int) -> list[str]:
    """The flags of `vllm serve` that make it the server that `profile` describes, for the model folder `model`."""
    return [
        "--model", str(model),
        "--served-model-name", profile.server.model_name,
        "--host", host,
        "--port", str(port),
        "--max-model-len", str(profile.limits.context_tokens),
        "--max-num-seqs", str(profile.limits.concurrent_requests),
        "--kv-cache-memory-bytes", str(profile.limits.kv_cache_mib * MIB),
        # The CPU's Gated-DeltaNet kernels know bfloat16 only.
        "--dtype", "bfloat16",
        # Compiling this model takes longer than it could ever save.
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--no-enable-log-requests",
    ]  # fmt: skip
