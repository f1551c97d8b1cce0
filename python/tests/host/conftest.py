"""Tests of the host's own Nix. A build sandbox has none, so they are collected only when this folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder alone unless the command line names it."""
    here = Path(__file__).parent
    base = config.invocation_params.dir
    named = [
        base / argument.partition("::")[0] for argument in config.invocation_params.args if not argument.startswith("-")
    ]
    return None if any(here in (path, *path.parents) for path in named) else True
