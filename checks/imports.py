"""Import every module that the environment's distributions declare at top level.

spec: allowed ({module: part of the error it must give here}), extra (submodules to import as well).

What a distribution declares is read from its RECORD. A module that cannot be imported without a GPU's driver is listed
in `allowed` with the error it gives; one that is listed and imports is an error too, so that the list stays true.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import sys


def declared() -> dict[str, str]:
    """{top-level module: distribution} of the environment, namespace packages by their first level below."""
    modules: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        for path in distribution.files or []:
            parts = path.parts
            if len(parts) == 2 and parts[1] == "__init__.py" and parts[0].isidentifier():
                modules.setdefault(parts[0], distribution.metadata["Name"])
            elif len(parts) == 1 and path.suffix == ".py" and path.stem.isidentifier():
                modules.setdefault(path.stem, distribution.metadata["Name"])
            elif len(parts) == 1 and parts[0].endswith(".so"):
                modules.setdefault(parts[0].split(".")[0], distribution.metadata["Name"])
    return modules


def failure_of(name: str) -> str | None:
    """Import one module: None, or what it said."""
    # Named before it runs, so that a crash of the interpreter says whose it was.
    print(name, flush=True)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            importlib.import_module(name)
    except BaseException as error:
        return f"{output.getvalue()}{type(error).__name__}: {error}"
    return None


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    allowed: dict[str, str] = spec["allowed"]
    home = os.environ["NIX_BUILD_TOP"]
    os.environ.update(HOME=home, TMPDIR=home, VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    modules = declared() | {name: "extra" for name in spec["extra"]}
    if len(modules) < 20:
        sys.exit(f"only {len(modules)} modules are declared: the environment is not what it should be")
    problems = [
        f"{name}: listed as failing, but nothing declares it" for name in sorted(allowed.keys() - modules.keys())
    ]
    # torch first where it is: the extensions of other wheels link against what it has loaded.
    for name in sorted(modules, key=lambda name: (name != "torch", name)):
        error = failure_of(name)
        if error is None and name in allowed:
            problems.append(f"{name} ({modules[name]}): listed as failing, but it imports")
        elif error is not None and allowed.get(name, "\0") not in error:
            problems.append(f"{name} ({modules[name]}): {error.strip()[-300:]}")
    if problems:
        sys.exit("\n".join(problems))
    report = f"{len(modules)} modules, {len(allowed)} of them need a GPU's driver\n"
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report + "".join(f"{name}\n" for name in sorted(modules)))


main()
