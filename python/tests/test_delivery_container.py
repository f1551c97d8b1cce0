from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hyperqwen.delivery import rootfs
from hyperqwen.delivery.container import Mount, container, image_config, publishes_openly, stop_seconds
from hyperqwen.errors import BadInputError
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.profile import load, shipped
from hyperqwen.runtime.host import detect
from hyperqwen.runtime.preflight import host_resources

ALL = sorted(shipped())


def flags(**values: str) -> dict[str, str]:
    return {name.replace("__", "."): value for name, value in values.items()}


@pytest.mark.parametrize("name", ALL)
def test_image_runs_as_nobody_in_particular_and_listens_beyond_itself(name: str) -> None:
    config = image_config(load(shipped()[name]), "/nix/store/x/bin/hyperqwen-serve")
    variables = dict(entry.split("=", 1) for entry in config["Env"])
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["/nix/store/x/bin/hyperqwen-serve", "--profile", name, "--verbose"]
    assert variables["HYPERQWEN_SERVER_HOST"] == "0.0.0.0"
    assert list(config["ExposedPorts"]) == [f"{variables['HYPERQWEN_SERVER_PORT']}/tcp"]
    assert list(config["Volumes"]) == [variables["HYPERQWEN_CACHE_DIR"]] == [variables["HOME"]]
    # The launcher refuses a variable of ours that it does not know.
    assert resolve(name, environ=variables).profile.server.host == "0.0.0.0"


@pytest.mark.parametrize("name", ALL)
def test_only_images_for_cards_ask_for_a_driver(name: str) -> None:
    profile = load(shipped()[name])
    nvidia = {entry for entry in image_config(profile, "/x")["Env"] if entry.startswith("NVIDIA_")}
    wanted = {
        "NVIDIA_VISIBLE_DEVICES=all",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        "NVIDIA_REQUIRE_CUDA=cuda>=13.0,driver>=580",
    }
    assert nvidia == (wanted if profile.device == "cuda" else set())


def test_health_waits_as_long_as_the_profile_may_start() -> None:
    profile = load(shipped()["B"])
    health = image_config(profile, "/x")["Healthcheck"]
    assert health["StartPeriod"] == profile.server.start_seconds * 10**9
    assert health["Test"][:3] == ["CMD", "/bin/hyperqwen", "health"]
    # The command gives up, and says why, before it is killed.
    assert int(health["Test"][health["Test"].index("--timeout") + 1]) * 10**9 < health["Timeout"]


@pytest.mark.parametrize(("drain", "seconds"), [(0, 30), (60, 90)])
def test_stopping_has_time_to_drain(drain: int, seconds: int) -> None:
    profile = load(shipped()["B"]).with_values({"server.drain_seconds": drain})
    assert stop_seconds(profile) == seconds


def test_container_of_a_profile_as_it_ships() -> None:
    found = container(resolve("B"))
    assert (found.image, found.name) == ("localhost/hyperqwen:single", "hyperqwen-single")
    assert found.devices == ("nvidia.com/gpu=all",)
    assert found.publish == ("127.0.0.1", 18020, 18020)
    assert (found.environment, found.mounts, found.key_file) == ({}, (), "")
    assert not publishes_openly(found)


@pytest.mark.parametrize(("offload", "tensor", "mib"), [(0, 1, 1024), (0, 2, 8192), (16, 1, 17408), (16, 2, 24576)])
def test_evicted_pages_have_room_in_dev_shm(offload: int, tensor: int, mib: int, tmp_path: Path) -> None:
    effective = resolve("B", flags=flags(memory__offload_gib=str(offload), parallel__tensor=str(tensor)))
    found = container(effective)
    assert found.shm_mib == mib
    # What the launcher says in there, of the whole tmpfs and of one without what is kept for NCCL.
    free = found.shm_mib * 2**20
    host = replace(detect(), shm=free, shm_free=free)
    items = {item.name: item.state for item in host_resources(effective.profile, host, tmp_path)}
    assert items.get("/dev/shm") == ("ok" if offload else None)
    small = replace(host, shm_free=free - offload * 2**30)
    items = {item.name: item.state for item in host_resources(effective.profile, small, tmp_path)}
    assert items.get("/dev/shm") == ("fail" if offload else None)


def test_changed_knobs_become_variables_that_say_the_same_inside() -> None:
    changed = flags(
        limits__context_tokens="32768",
        speculation__lookup="false",
        memory__utilization="0.8",
        engine__arguments="'a b' c",
    )
    effective = resolve("B", flags=changed)
    found = container(effective)
    assert set(found.environment) == {
        "HYPERQWEN_LIMITS_CONTEXT_TOKENS",
        "HYPERQWEN_SPECULATION_LOOKUP",
        "HYPERQWEN_MEMORY_UTILIZATION",
        "HYPERQWEN_ENGINE_ARGUMENTS",
    }
    assert resolve("B", environ=found.environment).profile == effective.profile


def test_address_port_cards_and_key_are_the_containers_own() -> None:
    found = container(
        resolve(
            "B",
            flags=flags(server__host="0.0.0.0", server__port="9000", parallel__gpus="1, 2", server__api_key_file="/k"),
        )
    )
    assert found.publish == ("0.0.0.0", 9000, 18020)
    assert found.devices == ("nvidia.com/gpu=1", "nvidia.com/gpu=2")
    assert found.key_file == "/k"
    assert found.environment == {}
    assert publishes_openly(found)


def test_models_are_mounted_where_the_launcher_looks() -> None:
    found = container(resolve("B", flags=flags(model__directory="/m/one", model__drafter="/m/two")))
    assert found.mounts == (
        Mount("/m/one", "/models/qwen3.8-27b-fast"),
        Mount("/m/two", "/models/qwen3.8-27b-dflash2"),
    )


def test_localhost_is_an_address_and_a_name_is_none() -> None:
    assert container(resolve("B", flags=flags(server__host="localhost"))).publish[0] == "127.0.0.1"
    with pytest.raises(BadInputError, match=r"server\.host is 'box\.lan'"):
        container(resolve("B", flags=flags(server__host="box.lan")))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model__directory": "models"}, r"model\.directory is 'models', which"),
        ({"server__api_key_file": "/a:b"}, r"server\.api_key_file is '/a:b'"),
        ({"model__directory": "/m"}, r"model\.drafter is not set, and model\.directory is"),
        ({"model__drafter": "/m"}, r"model\.directory is not set, and model\.drafter is"),
    ],
)
def test_paths_that_a_container_runtime_would_misread_are_refused(values: dict[str, str], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        container(resolve("B", flags=flags(**values)))


def test_demo_brings_its_model() -> None:
    found = container(resolve("demo"))
    assert not found.needs_models
    assert found.devices == ()
    with pytest.raises(BadInputError, match="the demo's image has a model"):
        container(resolve("demo", flags=flags(model__directory="/m")))


def test_profile_of_the_users_own_has_no_image(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ntitle = "mine"\nsummary = "mine"\ndevice = "cuda"\n')
    with pytest.raises(BadInputError, match="no image of the profile 'mine'"):
        container(resolve(file))


def test_rootfs_has_what_a_program_expects_of_a_system() -> None:
    entries = {entry.path: entry for entry in rootfs.base("/nix/store/bb", "/nix/store/rt")}
    assert entries["/tmp"].mode == 0o1777
    assert (entries["/cache"].uid, entries["/cache"].gid, entries["/cache"].mode) == (65532, 65532, 0o700)
    assert entries["/bin/sh"].target == entries["/usr/bin/env"].target == "/nix/store/bb/bin/busybox"
    assert "hyperqwen:x:65532:65532::/cache:/bin/sh\n" in (entries["/etc/passwd"].text or "")
    assert entries["/etc/ssl/certs/ca-certificates.crt"].target == "/nix/store/rt/etc/ssl/ca-bundle.crt"
    assert entries["/etc/debian_version"].text
    assert rootfs.entries("wheels", {}) == ()
    assert rootfs.entries("base", {"busybox": "/b", "runtime": "/r"}) == rootfs.base("/b", "/r")
