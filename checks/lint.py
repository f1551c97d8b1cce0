"""ruff (lint and format), mypy --strict over the package and its tests, and the form of the Nix files.

spec: root (the repository).
"""

import json
import os
import pathlib
import subprocess
import sys

sys.dont_write_bytecode = True


def nix_problems(path: pathlib.Path) -> list[str]:
    """Rules of nix/: two-space steps, no tabs, no trailing blanks, 120 columns, one newline at the end."""
    text = path.read_text()
    problems = (
        [] if text.endswith("\n") and not text.endswith("\n\n") else [f"{path}: needs exactly one newline at its end"]
    )
    for number, line in enumerate(text.split("\n"), 1):
        if "\t" in line:
            problems.append(f"{path}:{number}: tab")
        if line != line.rstrip():
            problems.append(f"{path}:{number}: trailing blanks")
        if len(line) > 120:
            problems.append(f"{path}:{number}: {len(line)} columns, 120 at most")
        if (len(line) - len(line.lstrip(" "))) % 2:
            problems.append(f"{path}:{number}: indented by an odd number of blanks")
    return problems


def main() -> None:
    with open(os.environ["specPath"]) as file:
        root = json.load(file)["root"]
    os.chdir(root)
    build = os.environ["NIX_BUILD_TOP"]
    bin_directory = os.path.dirname(sys.executable)
    environment = {"PATH": bin_directory, "HOME": build, "TMPDIR": build, "LC_ALL": "C.UTF-8", "RUFF_NO_CACHE": "true"}
    config = f"{root}/python/pyproject.toml"
    code = ["python", "checks", "nix/build", "bench"]
    if missing := [path for path in code if not os.path.isdir(path)]:
        sys.exit(f"nothing to lint in {missing}: the layout has changed")
    failed = []
    for command in (
        ["ruff", "check", "--config", config, *code],
        ["ruff", "format", "--check", "--diff", "--config", config, *code],
        ["mypy", "--config-file", config, "--cache-dir", f"{build}/mypy", "python/hyperqwen", "python/tests"],
    ):
        result = subprocess.run([f"{bin_directory}/{command[0]}", *command[1:]], env=environment)
        if result.returncode:
            failed.append(" ".join(command[:2]))
    problems = [p for path in sorted(pathlib.Path(".").rglob("*.nix")) for p in nix_problems(path)]
    if problems:
        print("\n".join(problems))
        failed.append("nix form")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    with open(os.environ["out"], "w") as file:
        file.write("clean\n")


main()
