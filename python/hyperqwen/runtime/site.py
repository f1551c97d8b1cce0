"""Where the parts of a program are that Nix built: the JSON file that its wrapper names in a variable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperqwen.errors import BadInputError, MissingError, UnsuitableError
from hyperqwen.profiles.layers import Effective
from hyperqwen.runtime.problems import describe


class Site(BaseModel):
    """What Nix bakes into a wrapper.

    engine: what the engine is built for.
    engine_python: interpreter of the engine's environment.
    engine_id: names the engine's cache folder; another engine, another name.
    cc: bin folder of a C compiler (cc and c++); Triton needs one.
    ptxas: the program, where Triton's own is not to be used.
    cuda_home: folder with bin/nvcc and include, for what FlashInfer compiles.
    model: nano's folder.
    python_path: folders for PYTHONPATH, where the engine's environment does not hold hyperqwen itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["cuda", "cpu"]
    engine_python: Path
    engine_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    cc: Path | None = None
    ptxas: Path | None = None
    cuda_home: Path | None = None
    model: Path | None = None
    python_path: list[Path] = []

    @property
    def programs(self) -> list[Path]:
        """Folders for the engine's PATH."""
        return [self.engine_python.parent, *([self.cc] if self.cc else [])]

    def with_own_model(self, effective: Effective) -> Effective:
        """`effective` with the model that the engine for the CPU brings along, unless it names a folder itself."""
        profile = effective.profile
        if self.model is None or profile.device != "cpu" or profile.model.directory:
            return effective
        return replace(effective, profile=profile.with_values({"model.directory": str(self.model)}))


def read(file: Path, app: str) -> Site:
    """The configuration of the app `app`.

    Raises MissingError, BadInputError, or UnsuitableError for a path that is gone.
    """
    again = f"start it through `./hq run .#{app}`, which makes it"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingError(f"the configuration {file} does not exist", again) from None
    except ValueError as error:
        raise BadInputError(f"{file} is not JSON: {error}") from None
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        raise BadInputError(describe(error, Site, str(file))) from None
    for field in ("engine_python", "model", "ptxas", "cuda_home"):
        place = getattr(site, field)
        if place is not None and not place.exists():
            raise UnsuitableError(
                f"{field} of {file} is gone: {place}",
                f"it was probably garbage-collected; run `./hq run .#{app}` again",
            )
    return site
