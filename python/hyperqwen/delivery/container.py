"""A profile as a container: the image's configuration, and what a compose file and a quadlet have to agree on."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperqwen import __version__
from hyperqwen.delivery.image import CREATED, LABELS
from hyperqwen.delivery.rootfs import CACHE, MODELS, USER
from hyperqwen.errors import BadInputError
from hyperqwen.profiles.argv import model_paths
from hyperqwen.profiles.layers import Effective, shown
from hyperqwen.profiles.profile import Profile, knobs, load, shipped
from hyperqwen.runtime.ports import is_loopback

REPOSITORY = "localhost/hyperqwen"
KEY_FILE = "/run/secrets/hyperqwen-key"
# The engine gets drain_seconds for what is running, and this long to let go of the card.
CLEANUP_SECONDS = 30
LEAST_GRACE_SECONDS = 30

HEALTH_INTERVAL = 30
HEALTH_TIMEOUT = 20
HEALTH_RETRIES = 3

# A comma is "and", a blank is "or". CUDA 13.0 came with driver 580; the launcher knows the exact floor.
NVIDIA_REQUIRE = "cuda>=13.0,driver>=580"


def reference(profile: Profile) -> str:
    """The name that the image of `profile` is loaded under. localhost: nobody pulls it from a public registry."""
    return f"{REPOSITORY}:{profile.title}"


# Inside a container: 0 while its server generates tokens. Port and key are in the same variables as the server's.
HEALTH_COMMAND = ("/bin/hyperqwen", "health", "--timeout", str(HEALTH_TIMEOUT - 2))


def stop_seconds(profile: Profile) -> int:
    """Seconds between SIGTERM and SIGKILL."""
    return max(LEAST_GRACE_SECONDS, profile.server.drain_seconds + CLEANUP_SECONDS)


def image_config(profile: Profile, program: str) -> dict[str, Any]:
    """The `config` of the image of `profile`, whose launcher is the program `program`."""
    second = 1_000_000_000
    environment = {
        "PATH": "/bin:/usr/bin",
        "HOME": CACHE,
        "LANG": "C.UTF-8",
        "HYPERQWEN_CACHE_DIR": CACHE,
        "HYPERQWEN_MODELS": MODELS,
        # Loopback in a container is nobody's; this needs a key, which the launcher insists on.
        "HYPERQWEN_SERVER_HOST": "0.0.0.0",
        "HYPERQWEN_SERVER_PORT": str(profile.server.port),
    }
    if profile.device == "cuda":
        environment |= {
            "NVIDIA_VISIBLE_DEVICES": "all",
            "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
            "NVIDIA_REQUIRE_CUDA": NVIDIA_REQUIRE,
        }
    return {
        "User": f"{USER}:{USER}",
        "Env": [f"{name}={value}" for name, value in environment.items()],
        # What the engine says is what `docker logs` shows.
        "Entrypoint": [program, "--profile", profile.name, "--verbose"],
        "WorkingDir": CACHE,
        "ExposedPorts": {f"{profile.server.port}/tcp": {}},
        "Volumes": {CACHE: {}},
        "StopSignal": "SIGTERM",
        # Docker's own, not OCI's; podman reads it too.
        "Healthcheck": {
            "Test": ["CMD", *HEALTH_COMMAND],
            "Interval": HEALTH_INTERVAL * second,
            "Timeout": HEALTH_TIMEOUT * second,
            "StartPeriod": profile.server.start_seconds * second,
            "Retries": HEALTH_RETRIES,
        },
        "Labels": {
            f"{LABELS}title": f"hyperqwen {profile.title}",
            f"{LABELS}description": f"Profile {profile.name}: {profile.summary}",
            f"{LABELS}version": __version__,
            f"{LABELS}created": CREATED,
            f"{LABELS}licenses": "Apache-2.0",
            f"{LABELS}vendor": "hyperqwen",
            "hyperqwen.profile": profile.name,
            "hyperqwen.device": profile.device,
        },
    }


@dataclass(frozen=True)
class Mount:
    """A folder of the host, and where it is in the container, read-only."""

    source: str
    target: str


@dataclass(frozen=True)
class Container:
    """What both kinds of files say, each in its own words.

    profile: as it ships, since the image knows no other. devices: CDI names. publish: address on the host, port there,
    port in the container. environment: the knobs that the layers above the profile change, as variables. mounts:
    folders of models; where there are none, a volume holds them. key_file: on the host; "" where none is named.
    shm_mib: size of /dev/shm. start_seconds, drain_seconds, stop_seconds: until the first token, for running requests,
    until SIGKILL.
    """

    profile: Profile
    image: str
    name: str
    devices: tuple[str, ...]
    publish: tuple[str, int, int]
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    key_file: str
    shm_mib: int
    start_seconds: int
    drain_seconds: int
    stop_seconds: int

    @property
    def needs_models(self) -> bool:
        """Whether the image is without a model: only the demo's brings its own."""
        return self.profile.device == "cuda"


# What a container's surroundings take the place of.
_OUTSIDE = frozenset(
    {"server.host", "server.port", "server.api_key_file", "model.directory", "model.drafter", "parallel.gpus"}
)


def container(effective: Effective, models: Path | None = None) -> Container:
    """How the profile of `effective` runs in a container, with what its upper layers change as variables.

    server.host and server.port become the address that is published, server.api_key_file the secret, model.directory
    and model.drafter mounts, and parallel.gpus the devices. `models` is a folder of the host with all models, which is
    mounted where neither of those two is set; the demo's image brings its model and needs none. Raises BadInputError
    for a profile that no image is made of, and for an address or a path that a container runtime would take for
    something else.
    """
    profile = effective.profile
    file = shipped().get(profile.name)
    if file is None:
        raise BadInputError(
            f"there is no image of the profile {profile.name!r}, only of those that ship: {', '.join(shipped())}",
            "name one of them, and change it with flags, variables or a host file",
        )
    plain = load(file)
    return Container(
        profile=plain,
        image=reference(plain),
        name=f"hyperqwen-{plain.title}",
        devices=_devices(profile),
        publish=(_address(profile.server.host), profile.server.port, plain.server.port),
        environment={
            knob.variable: shown(knob, profile.get(knob.path))
            for knob in knobs()
            if knob.path not in _OUTSIDE and profile.get(knob.path) != plain.get(knob.path)
        },
        mounts=_mounts(profile, models),
        key_file=_path("server.api_key_file", profile.server.api_key_file),
        # NCCL talks through it where cards cannot reach each other; evicted pages come on top.
        shm_mib=1024 * ((8 if profile.parallel.tensor > 1 else 1) + profile.memory.offload_gib),
        start_seconds=profile.server.start_seconds,
        drain_seconds=profile.server.drain_seconds,
        stop_seconds=stop_seconds(profile),
    )


def publishes_openly(found: Container) -> bool:
    """Whether other machines reach the published port."""
    return not is_loopback(found.publish[0])


def _devices(profile: Profile) -> tuple[str, ...]:
    if profile.device == "cpu":
        return ()
    gpus = [name.strip() for name in profile.parallel.gpus.split(",") if name.strip()]
    return tuple(f"nvidia.com/gpu={name}" for name in gpus or ["all"])


def _address(host: str) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        # A zone ("%eth0") is text of its own, and no port is published on one.
        return str(ipaddress.ip_address(host.replace("%", " ")))
    except ValueError:
        raise BadInputError(
            f"server.host is {host!r}, and a container's port is published on an address, not on a name",
            "use 127.0.0.1 for this machine alone, 0.0.0.0 for all, or one address of this machine",
        ) from None


def _mounts(profile: Profile, models: Path | None) -> tuple[Mount, ...]:
    """The folder of all models, or the named folders, mounted where the launcher looks for this profile's models."""
    named = {field: _path(field, profile.get(field)) for field in ("model.directory", "model.drafter")}
    if not any(named.values()):
        if models is None or profile.device == "cpu":
            return ()
        return (Mount(_path("the models folder", str(models.absolute())), MODELS),)
    if profile.device == "cpu":
        raise BadInputError("model.directory or model.drafter is set, and the demo's image has a model", "leave it out")
    inside = model_paths(profile.with_values(dict.fromkeys(named, "")), Path(MODELS))
    places = {"model.directory": inside.model} | ({"model.drafter": inside.drafter} if inside.drafter else {})
    if missing := [field for field in places if not named[field]]:
        # One volume below another, read-only, one would have no folder to be mounted on.
        raise BadInputError(
            f"{missing[0]} is not set, and {next(field for field in places if named[field])} is",
            f"name the folders of both, or of none and put both into one folder ({MODELS} of the container)",
        )
    return tuple(Mount(named[field], str(target)) for field, target in places.items())


def _path(field: str, value: str) -> str:
    if value and not value.startswith("/"):
        raise BadInputError(
            f"{field} is {value!r}, which a container runtime would take for a volume's name",
            f"use {Path.cwd() / value}",
        )
    if ":" in value or not value.isprintable():
        raise BadInputError(f"{field} is {value!r}: a mount cannot have a colon or a control character", "rename it")
    return value
