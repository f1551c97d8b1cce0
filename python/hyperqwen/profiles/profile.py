"""The schema of a profile: every knob, with its type, range, default and meaning, in this one place.

The documentation's table, the command line's options and the NixOS module's are generated from here (`knobs`).
A profile file holds what differs from the defaults; `hyperqwen.profiles.layers` puts the layers over each other.
"""

from __future__ import annotations

import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hyperqwen import share
from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.files import TOML_LIMIT, read_regular_text
from hyperqwen.runtime.problems import describe

MIB = 1 << 20
GIB = 1 << 30
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Bytes = Annotated[int, Field(ge=0, le=1 << 50)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)

    @field_validator("*")
    @classmethod
    def _printable(cls, value: Any) -> Any:
        """No argument or variable can hold a zero byte, and a line's end would end what is shown of it."""
        for text in value if isinstance(value, list) else [value]:
            letters = text if isinstance(text, str) else ""
            wrong = next((letter for letter in letters if unicodedata.category(letter) == "Cc"), None)
            if wrong is not None:
                raise ValueError(f"{text!r} has the control character {wrong!r}; take it out")
        return value


class Model(_Table):
    """Which model is served, and where its files are."""

    name: Name = Field(default="qwen3.8-27b", description="Geometry: a file of prepare/models, without .toml.")
    variant: Literal["base", "fast"] = Field(
        default="fast",
        description="base: int8 lm_head and MTP head, for batches. fast: both in int4, for few requests at a time.",
    )
    served_name: Name = Field(default="qwen3.8-27b", description="What clients call the model.")
    directory: str = Field(
        default="",
        description="Folder of the prepared model; empty: NAME or NAME-fast in the models folder.",
        json_schema_extra={"host": True},
    )
    drafter: str = Field(
        default="",
        description="Folder of the DFlash2 drafter; empty: NAME-dflash2 in the models folder.",
        json_schema_extra={"host": True},
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors",
        description="dummy: random weights of the right shapes, to measure memory and speed without the files.",
    )
    dtype: Literal["bfloat16", "float16"] = Field(default="bfloat16", description="Type of activations.")
    vision: Literal["off", "host", "card"] = Field(
        default="off",
        description="Pictures: off; on with the tower's weights in host memory; on with them on the card (0.86 GiB).",
    )


class Server(_Table):
    """Where the server listens and what its API does."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address to listen on. Any but loopback needs a key.",
        json_schema_extra={"alias": "host"},
    )
    port: int = Field(default=18020, ge=1, le=65535, description="TCP port.", json_schema_extra={"alias": "port"})
    api_key_file: str = Field(
        default="",
        description="File with the key that clients must send; only its owner may read it. Empty: no key.",
        json_schema_extra={"host": True, "alias": "api-key-file"},
    )
    tools: bool = Field(default=True, description="Let the model call tools (tool_choice auto).")
    tool_parser: Literal["qwen3_coder", "qwen3_xml", "mimo"] = Field(
        default="qwen3_coder", description="Reader of tool calls. Others (hermes) read this model's calls as text."
    )
    tool_strictness: Literal["auto", "function", "parameter"] = Field(
        default="parameter",
        description="How much of a tool's schema binds the answer; auto lets calls invent arguments.",
    )
    reasoning_parser: Literal["qwen3", "none"] = Field(
        default="qwen3", description="Reader of the thinking part; none leaves it in the text."
    )
    keep_alive_seconds: int = Field(
        default=30,
        ge=0,
        le=3600,
        description="Idle seconds until a stream gets a comment, so that no proxy drops a long prefill; 0 sends none.",
    )
    request_metrics: Literal["none", "summary", "detailed"] = Field(
        default="none", description="Timings and draft acceptance in every answer."
    )
    start_seconds: int = Field(
        default=1800,
        ge=10,
        le=86400,
        description="Seconds until the first token; the first start compiles for minutes.",
    )
    drain_seconds: int = Field(
        default=60, ge=0, le=3600, description="Seconds that running requests get to finish after SIGTERM."
    )


class Limits(_Table):
    """What the engine reserves room for."""

    context_tokens: int = Field(
        default=65536,
        ge=16,
        le=1_010_000,
        description="Longest prompt and answer together, in tokens.",
        json_schema_extra={"alias": "context"},
    )
    concurrent_requests: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Requests that may run at a time (slots); more wait.",
        json_schema_extra={"alias": "slots"},
    )
    batched_tokens: int = Field(
        default=2048, ge=64, le=65536, description="Tokens in a step. More prefills faster and leaves a smaller pool."
    )
    threads: int = Field(default=1, ge=1, le=1024, description="OpenMP threads of an engine on the CPU.")


class Memory(_Table):
    """How the card's memory is divided."""

    utilization: float = Field(
        default=0.93, gt=0.0, le=0.99, description="Share of the card's memory that the engine plans with."
    )
    kv_cache_bytes: Bytes = Field(
        default=0,
        description="Bytes of the pool of keys, values and states, per card; 0 takes what utilization leaves.",
    )
    embedding_in_host: bool = Field(
        default=False,
        description="Keep the input embedding in pinned host memory: 1.25 GiB more on the card, 2.1 GiB of RAM.",
    )
    offload_gib: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Host memory for evicted pages of the pool, in GiB; 0: none. Keep it above all live conversations.",
    )


class Cache(_Table):
    """Keys, values and recurrent states."""

    dtype: Literal[
        "bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head", "kvarn_k4v2_g128", "kvarn_k4v4_g128"
    ] = Field(default="bfloat16", description="Type of keys and values.")
    state_dtype: Literal["float16", "float32"] = Field(default="float16", description="Type of the recurrent state.")
    prefix: bool = Field(
        default=True, description="Reuse what an earlier prompt with the same beginning left, recurrent state included."
    )
    retention: Literal["dense", "end"] | Annotated[int, Field(ge=1, le=1 << 24)] = Field(
        default="dense",
        description="Where reusable states are kept: at every block, at a prompt's end, or every so many tokens.",
    )
    match_unit: int = Field(
        default=0, ge=0, le=1 << 20, description="Granularity of a prefix match in tokens; 0 leaves it to the engine."
    )


class Attention(_Table):
    """Kernels of the full-attention layers."""

    backend: Literal["auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "KVARN"] = Field(
        default="auto", description="Attention backend."
    )
    verify: Literal["engine", "split-kv"] = Field(
        default="engine",
        description="Verification of drafts: the backend's own kernel, or one that splits the sequence.",
    )
    prefill: Literal["engine", "int8"] = Field(
        default="engine", description="Prefill: the backend's own kernel, or one with int8 scores."
    )
    gdn_prefill: Literal["auto", "triton", "flashinfer"] = Field(
        default="triton",
        description="Prefill of the recurrent layers; flashinfer compiles for minutes at the first request.",
    )


class Speculation(_Table):
    """Drafting, verified in one step. Never changes what is answered, only how fast."""

    method: Literal["off", "mtp", "dflash2", "ngram"] = Field(
        default="off",
        description="Drafter: none, the model's MTP head, the DFlash2 block drafter, or n-grams of the prompt.",
    )
    tokens: int = Field(default=0, ge=0, le=31, description="Tokens of a draft (k).")
    sampling: Literal["greedy", "probabilistic"] = Field(
        default="probabilistic", description="How drafts are drawn for a sampled request."
    )
    lookup: bool = Field(
        default=False, description="Extend and replace drafts by the longest match in the request's own history."
    )
    adaptive: bool = Field(
        default=False, description="Draft the long block only while it is being accepted (needs lookup and k > 7)."
    )
    chains: bool = Field(default=False, description="Draft from history alone while a single request copies.")
    draft_vocabulary: bool = Field(
        default=True, description="Let MTP draft from the 40,960 tokens that the model uses most."
    )


class Graphs(_Table):
    """CUDA graphs."""

    mode: Literal["engine", "full", "piecewise", "both", "off"] = Field(
        default="engine",
        description="What is captured; both: full graphs for decode, piecewise for the rest. off runs eagerly.",
    )
    capture_tokens: int = Field(
        default=0, ge=0, le=512, description="Largest batch captured, in tokens; 0: slots times (k+1), at most 64."
    )


class Scheduler(_Table):
    """How steps are planned."""

    asynchronous: bool = Field(default=True, description="Plan the next step while the card works on this one.")


class Activations(_Table):
    """Arithmetic of the quantized layers."""

    int8: Literal["off", "mlp", "all"] = Field(
        default="off",
        description="Layers that multiply in int8: +30 % in batches, +2.2 % (mlp) or +3.7 % (all) perplexity.",
    )


class Parallel(_Table):
    """Cards."""

    tensor: int = Field(default=1, ge=1, le=8, description="Cards that share every layer (tensor parallelism).")
    gpus: str = Field(
        default="",
        description="Cards to use, as indices or UUIDs with commas between; empty: the first ones.",
        json_schema_extra={"host": True},
    )
    custom_all_reduce: bool = Field(default=True, description="vLLM's own all-reduce between cards.")


class Chat(_Table):
    """What requests get that do not say otherwise."""

    thinking: bool = Field(default=True, description="Let the model think before it answers.")
    max_tokens: int = Field(
        default=64, ge=1, le=1 << 20, description="Longest answer of `hyperqwen demo --once`, in tokens."
    )
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="Temperature of `hyperqwen demo --once`.")


class Engine(_Table):
    """What none of the other knobs says."""

    arguments: list[str] = Field(
        default=[], description="More flags of `vllm serve`, put last. What they shadow is said at start."
    )


class Profile(_Table):
    """A profile as a whole: one file of profiles/."""

    name: Name
    title: str = Field(min_length=1)
    summary: str = Field(min_length=1)
    device: Literal["cuda", "cpu"]
    model: Model = Model()
    server: Server = Server()
    limits: Limits = Limits()
    memory: Memory = Memory()
    cache: Cache = Cache()
    attention: Attention = Attention()
    speculation: Speculation = Speculation()
    graphs: Graphs = Graphs()
    scheduler: Scheduler = Scheduler()
    activations: Activations = Activations()
    parallel: Parallel = Parallel()
    chat: Chat = Chat()
    engine: Engine = Engine()

    def get(self, path: str) -> Any:
        """The value of the knob `path` ("limits.context_tokens")."""
        section, _, key = path.partition(".")
        return getattr(getattr(self, section), key)

    def with_values(self, values: Mapping[str, Any]) -> Profile:
        """This profile with other values for the knobs in `values` (path to value), validated."""
        data = self.model_dump()
        for path, value in values.items():
            section, _, key = path.partition(".")
            data[section][key] = value
        return Profile.model_validate(data)


# Knobs ------------------------------------------------------------------------------------------------------------

Kind = Literal["bool", "int", "float", "text", "choice", "choice or int", "list"]


@dataclass(frozen=True)
class Knob:
    """One setting of a profile, as documentation and options need it.

    path: "limits.context_tokens". minimum, maximum: inclusive unless `open_minimum`. alias: a short flag besides the
    long one, without dashes. host: whether it belongs to a host rather than to a profile.
    """

    path: str
    kind: Kind
    description: str
    default: Any
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    open_minimum: bool = False
    maximum: float | None = None
    alias: str | None = None
    host: bool = False

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def key(self) -> str:
        return self.path.partition(".")[2]

    @property
    def flag(self) -> str:
        return "--" + self.path.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        """Its twin in the environment."""
        return "HYPERQWEN_" + self.path.replace(".", "_").upper()

    @property
    def accepts(self) -> str:
        """What it takes, in words."""
        span = _span(self)
        return {
            "bool": "true or false",
            "int": f"a whole number{span}",
            "float": f"a number{span}",
            "text": "text",
            "choice": ", ".join(self.choices),
            "choice or int": f"{', '.join(self.choices)}, or a whole number{span}",
            "list": "words, quoted as for a shell",
        }[self.kind]


def _span(knob: Knob) -> str:
    low = "" if knob.minimum is None else f"{'above' if knob.open_minimum else 'from'} {knob.minimum:g}"
    if knob.minimum is not None and isinstance(knob.minimum, int):
        low = f"from {knob.minimum}"
    high = "" if knob.maximum is None else f"{'to' if low else 'up to'} {knob.maximum}"
    return f" {low} {high}".rstrip() if low or high else ""


@cache
def knobs() -> tuple[Knob, ...]:
    """All knobs, in the order of the schema."""
    return tuple(_knobs())


def sections() -> dict[str, str]:
    """Name of each section to what it is about."""
    return {section: (model.__doc__ or "").strip() for section, model in _sections()}


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for section, field in Profile.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield section, field.annotation


def _knobs() -> Iterator[Knob]:
    for section, model in _sections():
        for key, field in model.model_fields.items():
            kind, choices, metadata = _kind(field.annotation)
            limits = [*field.metadata, *metadata]
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            bounds: dict[str, Any] = {}
            for limit in limits:
                if isinstance(limit, Ge):
                    bounds["minimum"] = limit.ge
                elif isinstance(limit, Gt):
                    bounds |= {"minimum": limit.gt, "open_minimum": True}
                elif isinstance(limit, Le):
                    bounds["maximum"] = limit.le
                elif isinstance(limit, Lt):
                    raise TypeError(f"{section}.{key}: describe an open maximum before using one")
            alias = extra.get("alias")
            yield Knob(
                f"{section}.{key}",
                kind,
                field.description or "",
                field.default,
                choices,
                alias=str(alias) if alias else None,
                host=bool(extra.get("host")),
                **bounds,
            )


def _kind(annotation: Any) -> tuple[Kind, tuple[str, ...], list[Any]]:
    plain: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "text", list[str]: "list"}
    if annotation in plain:
        return plain[annotation], (), []
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "choice", arguments, []
    if origin is Annotated:
        kind, choices, metadata = _kind(arguments[0])
        details = [item for field in arguments[1:] for item in getattr(field, "metadata", [field])]
        return kind, choices, metadata + details
    # The one union there is: words, or a number.
    words = next(part for part in arguments if get_origin(part) is Literal)
    number = next(part for part in arguments if part is not words)
    return "choice or int", get_args(words), _kind(number)[2]


# Files ------------------------------------------------------------------------------------------------------------


def read_table(path: Path, what: str, example: str) -> dict[str, Any]:
    """The TOML of `path`, unchecked; raises MissingError or BadInputError."""
    try:
        if path.is_dir():
            raise FileNotFoundError
        text = read_regular_text(path, TOML_LIMIT)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(f"the {what} {path} does not exist", f"name a file such as {example}") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise BadInputError(f"{path} is not TOML: it is nested too deeply", "take arrays or tables out") from None
    except ValueError as error:
        # Besides TOMLDecodeError there is that of a number of thousands of digits.
        raise BadInputError(f"{path} is not TOML: {error}", "correct that line") from None


def parse(data: Mapping[str, Any], where: str) -> Profile:
    """The profile that `data` describes; `where` names it in messages. Raises BadInputError with all problems."""
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise BadInputError(describe(error, Profile, where)) from None


def load(path: Path) -> Profile:
    """Read the profile at `path`; raises MissingError or BadInputError."""
    return parse(read_table(path, "profile", "profiles/B.toml"), str(path))


def shipped() -> dict[str, Path]:
    """Name of each profile that comes with the package to its file."""
    return {path.stem: path for path in sorted(share.folder("profiles").glob("*.toml"))}
