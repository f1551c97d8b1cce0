"""The texts of this package that come from a template: the same facts of a container in each format's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hyperqwen.delivery import container, rootfs
from hyperqwen.delivery.unit import TERMINATED


def render(template: str, found: container.Container, **more: Any) -> str:
    """The template of this folder, filled in from `found` and `more`; a name that neither has is an error."""
    profile = found.profile
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=False,  # neither format is HTML: each value is quoted where it stands
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # What compose takes for a variable, systemd for a specifier, and systemd's quotes.
    environment.filters["dollars"] = lambda text: text.replace("$", "$$")
    environment.filters["percent"] = lambda text: text.replace("%", "%%")
    environment.filters["quoted"] = lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    # jinja2's own escapes what could end a <script>.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.get_template(template).render(
        title=f"hyperqwen {profile.title}: {profile.summary}",
        profile=profile.name,
        name=found.name,
        image=found.image,
        devices=found.devices,
        environment=found.environment,
        mounts=found.mounts,
        volume=found.needs_models and not found.mounts,
        shm_mib=found.shm_mib,
        open=container.publishes_openly(found),
        health=list(container.HEALTH_COMMAND),
        health_interval=container.HEALTH_INTERVAL,
        health_timeout=container.HEALTH_TIMEOUT,
        health_retries=container.HEALTH_RETRIES,
        start_seconds=found.start_seconds,
        stop_seconds=found.stop_seconds,
        drain_seconds=found.drain_seconds,
        terminated=TERMINATED,
        key_target=container.KEY_FILE,
        user=rootfs.USER,
        models=rootfs.MODELS,
        cache=rootfs.CACHE,
        **more,
    )
