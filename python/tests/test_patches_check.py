"""What `check` finds in patches that apply: code that does not compile, headers that do not tell the truth."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hyperqwen.patches import check as module
from hyperqwen.patches.apply import Patch, Reader, apply_series
from hyperqwen.patches.check import check_series, references, seam_error
from hyperqwen.patches.make import diff, header_text
from hyperqwen.patches.series import Seam, read_series

BASE = b"import os\n\n\ndef cpus():\n    return os.popen('lscpu').read()\n"
PATCHED = b"from hyperqwen.engine.cpu import logical_cpus\n\n\ndef cpus():\n    return logical_cpus()\n"
TREE: dict[str, bytes | None] = {"vllm/a.py": BASE, "vllm/b.py": b"x = 1\n"}

FIELDS = {
    "Subject": "no shell",
    "Kind": "seam",
    "Reason": "a sandbox has none",
    "Upstream": "none known",
    "Retires": "when upstream reads /sys",
    "Seam": "hyperqwen.engine.cpu:logical_cpus",
    "Test": "checks/test_cpu.py",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    engine = tmp_path / "python/hyperqwen/engine"
    engine.mkdir(parents=True)
    (engine / "cpu.py").write_text("def logical_cpus():\n    return []\n\nraise SystemExit('imported')\n")
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/test_cpu.py").write_text("def test_list():\n    assert len([1]) == 1\n")
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches/series").write_text("")
    return tmp_path


def add(repository: Path, changes: dict[str, tuple[bytes | None, bytes | None]], **fields: str) -> str:
    """Add a patch with these header fields to the series; returns its name."""
    folder = repository / "patches"
    number = len(list(folder.glob("*.patch"))) + 1
    name = f"{number:04}-p.patch"
    (folder / name).write_bytes(header_text({**FIELDS, **fields}).encode() + diff(changes))
    with (folder / "series").open("a") as series:
        series.write(f"{name}\n")
    return name


def found(repository: Path, tree: dict[str, bytes | None] = TREE) -> list[str]:
    return [str(problem) for problem in check_series(read_series(repository / "patches"), tree.get, repository)]


def test_a_good_series(repository: Path) -> None:
    add(repository, {"vllm/a.py": (BASE, PATCHED)})
    add(
        repository,
        {"vllm/b.py": (b"x = 1\n", b"x = 2\n"), "vllm/c.py": (None, b"y = 1\n")},
        Kind="fix",
        Seam="none",
        Test="checks/test_cpu.py::test_list",
        Provides="kvarn",
    )
    assert found(repository) == []


def test_an_unknown_capability_is_refused_with_the_nearest(repository: Path) -> None:
    add(repository, {"vllm/a.py": (BASE, PATCHED)}, Provides="kvarn, lookup-draftin")
    (problem,) = found(repository)
    assert problem.startswith("0001-p.patch:8: Provides: there is no capability 'lookup-draftin'; did you mean")
    assert "'lookup-drafting'" in problem


def test_two_patches_may_use_one_seam(repository: Path) -> None:
    again = PATCHED + b"\n\ncount = len(logical_cpus())\n"
    add(repository, {"vllm/a.py": (BASE, PATCHED)})
    add(repository, {"vllm/a.py": (PATCHED, again)}, Kind="fix", Seam="none")
    assert found(repository) == []
    again = (
        PATCHED + b"\n\ndef count():\n    from hyperqwen.engine.cpu import logical_cpus\n    return logical_cpus()\n"
    )
    (repository / "patches/0002-p.patch").write_bytes(
        header_text(FIELDS).encode() + diff({"vllm/a.py": (PATCHED, again)})
    )
    assert found(repository) == []


def test_patches_that_do_not_apply(repository: Path) -> None:
    add(repository, {"vllm/a.py": (BASE, PATCHED)}, Seam="hyperqwen.engine.gpu:f")
    assert found(repository, {"vllm/a.py": b"# licence\n" + BASE}) == [
        f"0001-p.patch:6: Seam hyperqwen.engine.gpu:f: no module hyperqwen.engine.gpu in {repository}/python",
        "0001-p.patch:13: vllm/a.py, hunk 1, file line 1: the removed line differs, and 3 more of the hunk's lines: "
        "expected 'import os', found '# licence' (context found at line 2: refresh the patch)",
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (b"def f(:\n", "invalid syntax"),
        (b"return 1\n", "'return' outside function"),
        (b"x = '\xff'\n", "unicode error"),
    ],
)
def test_code_that_does_not_compile(repository: Path, code: bytes, reason: str) -> None:
    add(repository, {"vllm/a.py": (BASE, code)}, Kind="fix", Seam="none")
    (problem,) = found(repository)
    assert problem.startswith("0001-p.patch: vllm/a.py")
    assert f"the patched file does not compile: {reason}" in problem or "utf-8" in problem


def test_every_step_of_the_series_compiles(repository: Path) -> None:
    add(repository, {"vllm/b.py": (b"x = 1\n", b"x = (\n")}, Kind="fix", Seam="none")
    add(repository, {"vllm/b.py": (b"x = (\n", b"x = 2\n")}, Kind="fix", Seam="none")
    (problem,) = found(repository)
    assert problem.startswith("0001-p.patch: vllm/b.py, file line 1: the patched file does not compile")


@pytest.mark.parametrize(
    ("seam", "reason"),
    [
        ("hyperqwen.engine.gpu:logical_cpus", "no module hyperqwen.engine.gpu in "),
        ("hyperqwen.engine.cpu:cpus", "hyperqwen.engine.cpu does not define 'cpus' (it defines logical_cpus)"),
        ("hyperqwen.engine.cpu:logical_cpus.x", "hyperqwen.engine.cpu.logical_cpus does not define 'x'"),
    ],
)
def test_a_seam_that_does_not_exist(repository: Path, seam: str, reason: str) -> None:
    module_name, name = seam.split(":")
    code = f"import {module_name} as ours\n\ncpus = ours.{name}\n".encode()
    add(repository, {"vllm/a.py": (BASE, code)}, Seam=seam)
    (problem,) = found(repository)
    assert problem.startswith(f"0001-p.patch:6: Seam {seam}: {reason}")


def test_a_seam_that_the_patch_does_not_use(repository: Path) -> None:
    add(repository, {"vllm/b.py": (b"x = 1\n", b"x = 2\n")})
    assert found(repository) == ["0001-p.patch:6: Seam: the patch adds no use of hyperqwen.engine.cpu:logical_cpus"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (b"from hyperqwen.engine.cpu import logical_cpus, extra\n", "hyperqwen.engine.cpu.extra"),
        (b"import hyperqwen.engine.cpu as c\nc.logical_cpus()\nc.extra\n", "hyperqwen.engine.cpu.extra"),
        (b"from hyperqwen.engine import cpu\ncpu.logical_cpus()\nfrom hyperqwen import pins\n", "hyperqwen.pins"),
        (b"from hyperqwen.engine.cpu import logical_cpus\nR = ('hyperqwen.kernels.x:F',)\n", "hyperqwen.kernels.x.F"),
    ],
)
def test_a_use_that_seam_does_not_name(repository: Path, code: bytes, name: str) -> None:
    add(repository, {"vllm/b.py": (b"x = 1\n", code)})
    assert found(repository) == [
        f"0001-p.patch:6: the patch adds a use of {name}, which Seam does not name: "
        "expected a hyperqwen.engine function, named in Seam"
    ]


def test_tests_that_do_not_exist(repository: Path) -> None:
    (repository / "checks/broken.py").write_text("def f(:\n")
    add(
        repository,
        {"vllm/a.py": (BASE, PATCHED)},
        Test="checks/test_none.py, checks/test_cpu.py::test_none, checks/broken.py::test_x",
    )
    first, second, third = found(repository)
    assert first == "0001-p.patch:7: Test checks/test_none.py: no such file in the repository"
    assert second == ("0001-p.patch:7: Test checks/test_cpu.py::test_none: checks/test_cpu.py defines no test_none")
    assert third.startswith("0001-p.patch:7: Test checks/broken.py::test_x: checks/broken.py is not Python")


def test_a_series_that_does_not_go_back(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The applier is sound, so one is put in its place that loses a line on the way back."""
    add(repository, {"vllm/a.py": (BASE, PATCHED)})
    sound = apply_series

    def lossy(read: Reader, patches: list[Patch], *, reverse: bool = False) -> dict[str, bytes | None]:
        changes = sound(read, patches, reverse=reverse)
        if reverse:
            changes["vllm/a.py"] = BASE + b"\n"
        return changes

    monkeypatch.setattr(module, "apply_series", lossy)
    assert found(repository) == ["series: vllm/a.py: taking the series back does not give the tree's bytes"]


def refer(code: str) -> dict[str, int]:
    return dict(references(ast.parse(code)))


def test_references() -> None:
    assert refer("import os, vllm\nfrom . import hyperqwen\nos.path.join('hyperqwen')") == {}
    assert refer("import hyperqwen.engine.cpu\nhyperqwen.engine.cpu.f()") == {"hyperqwen.engine.cpu.f": 1}
    assert refer("import hyperqwen.engine.cpu") == {"hyperqwen.engine.cpu": 1}
    assert refer("import hyperqwen.engine.cpu as c\nc.f(c.g)") == {
        "hyperqwen.engine.cpu.f": 1,
        "hyperqwen.engine.cpu.g": 1,
    }
    assert refer("from hyperqwen.engine import cpu as c\nc.T.make()") == {"hyperqwen.engine.cpu.T.make": 1}
    assert refer("from hyperqwen.engine.cpu import f") == {"hyperqwen.engine.cpu.f": 1}
    assert refer("def g():\n from hyperqwen.engine.cpu import f\ndef h():\n from hyperqwen.engine.cpu import f") == {
        "hyperqwen.engine.cpu.f": 2
    }
    assert refer("x = 'hyperqwen.engine.cpu:F'\ny = 'see hyperqwen.engine.cpu'") == {"hyperqwen.engine.cpu.F": 1}
    assert refer("from hyperqwenx.engine import f") == {}


def test_where_a_seam_may_be_defined(tmp_path: Path) -> None:
    package = tmp_path / "hyperqwen/engine/deep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os\n"
        "from os import path\n"
        "if os.name:\n    def inside(): ...\n"
        "else:\n    other = 1\n"
        "try:\n    A = 1\nexcept ImportError:\n    B: int = 2\n"
        "class C:\n    async def method(self): ...\n"
    )
    for name in ("inside", "other", "A", "B", "C", "C.method"):
        assert seam_error(Seam("hyperqwen.engine.deep", name), tmp_path) is None, name
    for name in ("os", "path", "C.none", "method"):
        assert seam_error(Seam("hyperqwen.engine.deep", name), tmp_path) is not None, name
    (package / "__init__.py").write_text("def (:\n")
    assert "does not compile" in (seam_error(Seam("hyperqwen.engine.deep", "A"), tmp_path) or "")
