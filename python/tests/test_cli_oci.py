from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner, Result

from hyperqwen.cli import main
from hyperqwen.cli.oci import command
from hyperqwen.delivery import image
from hyperqwen.errors import BadInputError, HyperqwenError, MissingError

PYTHON_DIR = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-c", "from hyperqwen.cli.oci import command; command()"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a program that has the image of B, out of a store of two files."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    layers = tuple(image.Layer(name, (str(tmp_path / name),)) for name in ("one", "two"))
    (tmp_path / "B.json").write_text(image.to_json(image.Image("localhost/hyperqwen:single", layers, {"User": "1"})))
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"images": {"B": str(tmp_path / "B.json")}}))
    return file


def run(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, env={"HYPERQWEN_OCI_CONFIG": str(config)})


def program(config: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    environ = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(PYTHON_DIR), "HYPERQWEN_OCI_CONFIG": str(config)}
    return subprocess.run([*COMMAND, *arguments], env=environ, capture_output=True, timeout=60)


def test_folder_archive_and_pipe_are_one_image(config: Path, tmp_path: Path) -> None:
    folder = run(config, "write", "--profile", "B", str(tmp_path / "folder"))
    file = run(config, "write", "--profile", "single", str(tmp_path / "image.tar"))
    assert (folder.exit_code, file.exit_code) == (0, 0), folder.output + file.output
    digest = folder.stdout.strip()
    assert digest == file.stdout.strip()
    index = json.loads((tmp_path / "folder/index.json").read_text())
    assert index["manifests"][0]["digest"] == digest
    piped = program(config, "write", "--profile", "B", "-")
    assert piped.stdout == (tmp_path / "image.tar").read_bytes()
    assert digest in piped.stderr.decode().splitlines()
    assert tarfile.is_tarfile(tmp_path / "image.tar")


def test_progress_is_one_line_a_layer_where_nobody_watches(config: Path, tmp_path: Path) -> None:
    for target in ("folder", "image.tar"):
        said = program(config, "write", "--profile", "B", str(tmp_path / target)).stderr.decode().splitlines()
        assert said == ["hyperqwen: writing layer one", "hyperqwen: writing layer two"], target


def test_json_says_what_was_written(config: Path, tmp_path: Path) -> None:
    found = json.loads(run(config, "write", "--profile", "B", "--json", str(tmp_path / "folder")).stdout)
    assert found["digest"].startswith("sha256:")
    assert (found["profile"], found["format"], found["reference"]) == ("B", "layout", "localhost/hyperqwen:single")


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--profile", "A", "out"], BadInputError, "no image of profile A, only of B"),
        (["--profile", "Q", "out"], MissingError, "no profile 'Q'"),
        (["--profile", "B", "out.tar.gz"], BadInputError, r"compressed archive"),
        (["--profile", "B", "no/such/out"], BadInputError, "there is no folder"),
        (["--profile", "B", "."], BadInputError, "not an empty folder"),
    ],
)
def test_what_cannot_be_written_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: type[HyperqwenError], message: str
) -> None:
    monkeypatch.chdir(config.parent)
    before = sorted(config.parent.iterdir())
    result = run(config, "write", *arguments)
    assert isinstance(result.exception, kind)
    assert message in str(result.exception)
    assert sorted(config.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ('{"images": {}}', "at least 1"), ('{"pictures": {}}', "pictures is not a field")],
)
def test_broken_configuration_is_named(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    result = run(config, "write", "--profile", "B", str(config.parent / "out"))
    assert isinstance(result.exception, BadInputError)
    assert message in str(result.exception)
    assert str(config) in str(result.exception)


def test_missing_configuration_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "gone.json", "write", "--profile", "B", str(tmp_path / "out"))
    assert isinstance(result.exception, MissingError)


def test_program_without_images_says_which_has_them() -> None:
    result = CliRunner().invoke(command, ["write", "--profile", "single", "out.tar"])
    assert isinstance(result.exception, MissingError)
    assert result.exception.fix == "write with `./hq run .#oci -- --profile B out.tar`"


def test_compose_and_quadlet_follow_flags_and_variables(config: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(command, ["compose", "B", "--port", "9000"], env={"HYPERQWEN_LIMITS_CONTEXT_TOKENS": "4096"})
    server = yaml.safe_load(result.stdout)["services"]["server"]
    assert server["ports"] == ["127.0.0.1:9000:18020"]
    assert server["environment"]["HYPERQWEN_LIMITS_CONTEXT_TOKENS"] == "4096"
    # The program's own configuration is no knob that is spelled wrong.
    text = run(config, "quadlet", "single").stdout
    assert "Image=localhost/hyperqwen:single\n" in text
    assert text.endswith("WantedBy=default.target\n")


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_the_models_folder_is_mounted(tmp_path: Path, how: str) -> None:
    arguments = ["--models", str(tmp_path)] if how == "flag" else []
    environ = {"HYPERQWEN_MODELS": str(tmp_path)} if how == "variable" else {"HYPERQWEN_MODELS": None}
    quadlet = CliRunner().invoke(command, ["quadlet", "B", *arguments], env=environ).stdout
    assert f"Volume={tmp_path}:/models:ro\n" in quadlet and "hyperqwen-models" not in quadlet
    found = yaml.safe_load(CliRunner().invoke(command, ["compose", "B", *arguments], env=environ).stdout)
    bound = {"type": "bind", "source": str(tmp_path), "target": "/models", "read_only": True}
    assert bound in found["services"]["server"]["volumes"] and "hyperqwen-models" not in found["volumes"]


def test_without_a_models_folder_the_files_say_how() -> None:
    for kind in ("compose", "quadlet"):
        text = CliRunner().invoke(command, [kind, "B"], env={"HYPERQWEN_MODELS": None}).stdout
        assert "hyperqwen-models" in text and "--models /folder/of/models" in text


def test_a_folder_that_a_mount_cannot_name_is_refused() -> None:
    result = CliRunner().invoke(command, ["quadlet", "B", "--models", "/a:b"])
    assert isinstance(result.exception, BadInputError) and "the models folder is '/a:b'" in str(result.exception)


@pytest.mark.parametrize(("profile", "refused"), [("E", True), ("B", False)])
def test_a_profile_that_this_engine_refuses_is_named_beside_the_file(profile: str, refused: bool) -> None:
    result = CliRunner().invoke(command, ["quadlet", profile])
    assert result.exit_code == 0 and "[Container]" in result.stdout
    assert ("this engine refuses profile E: " in result.stderr) is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--parallel-tensor", "3"), "parallel.tensor is 3"),
        (("--engine-arguments", "--api-key sesame"), "--api-key"),
        (("--server-host", "::1%lo"), "server.host"),
        (("--parallel-gpus", "0\nPublishPort=1:1"), "parallel.gpus"),
    ],
)
@pytest.mark.parametrize("kind", ["compose", "quadlet"])
def test_what_no_container_could_run_is_not_written(kind: str, arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["oci", kind, "B", *arguments], prog_name="hyperqwen")

    assert result.exit_code == 2
    assert said in result.output
    assert "sesame" not in result.output
    assert "[Container]" not in result.stdout
