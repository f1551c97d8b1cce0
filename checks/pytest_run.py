"""Run pytest on a writable copy of the repository, in the environment that this interpreter belongs to.

spec: root (the repository), tests (paths in it), variables (environment).
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

# Nix itself sets no limit; the longest takes three minutes on two busy cores.
LIMIT_SECONDS = 1800


def repository(root: str) -> pathlib.Path:
    """The repository copied below the build folder: tests write caches, and the store is read-only."""
    copy = pathlib.Path(os.environ["NIX_BUILD_TOP"]) / "repository"
    shutil.copytree(root, copy, symlinks=True)
    for path in [copy, *copy.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)
    return copy


def environment(variables: dict[str, str], copy: pathlib.Path) -> dict[str, str]:
    """What a test run sees: a home of its own, our sources first, told to stay offline, one thread."""
    home = copy.parent / "home"
    home.mkdir(exist_ok=True)
    return {
        "PATH": f"{pathlib.Path(sys.executable).parent}",
        "HOME": str(home),
        "TMPDIR": str(copy.parent),
        "LC_ALL": "C.UTF-8",
        # Where the root has our package, it is the one to test; an engine has its own.
        **({"PYTHONPATH": str(copy / "python")} if (copy / "python").is_dir() else {}),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **variables,
    }


def run(root: str, tests: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """pytest over `tests`; its report is returned, not printed."""
    copy = repository(root)
    missing = [test for test in tests if not (copy / test.split("::")[0]).exists()]
    if missing:
        sys.exit(f"no such tests: {', '.join(missing)}")
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-q", "--strict-markers", "-rfE",
               "--durations=5", *tests]  # fmt: skip
    return finished(command, copy, environment(variables, copy))


def finished(command: list[str], folder: pathlib.Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run to the end with both streams in one; one that hangs is ended, and fails with what it had printed."""
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as hung:
        printed = hung.stdout.decode(errors="replace") if isinstance(hung.stdout, bytes) else hung.stdout or ""
        sys.exit(f"{printed}\n{command[0]} did not end in {LIMIT_SECONDS} s")


def report(result: "subprocess.CompletedProcess[str]") -> None:
    """End the check as `result` did; what it printed is the output."""
    print(result.stdout)
    if result.returncode:
        sys.exit(result.returncode)
    with open(os.environ["out"], "w") as file:
        file.write(result.stdout)


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    report(run(spec["root"], spec["tests"], spec["variables"]))


if __name__ == "__main__":
    main()
