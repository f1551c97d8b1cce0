"""Import every module that the environment's distributions declare at top level.

spec: allowed ({module: part of the error it must give here}), extra (submodules to import as well).

What a distribution declares is read from its RECORD. A module that cannot be imported without a GPU's driver is listed in
`allowed` with the error it gives; one that is listed and imports is an error too, so that the list stays true.
"""

import importlib.metadata
import json
import os
import subprocess
import sys

# torch first where it is: the extensions of other wheels link against what it has loaded.
PROBE = """
import importlib, importlib.util, sys
if importlib.util.find_spec("torch"):
    import torch
importlib.import_module(sys.argv[1])
"""


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


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    allowed: dict[str, str] = spec["allowed"]
    home = os.environ["NIX_BUILD_TOP"]
    modules = {name: owner for name, owner in declared().items() if not name.startswith("__editable__")}
    modules.update({name: "extra" for name in spec["extra"]})
    if len(modules) < 20:
        sys.exit(f"only {len(modules)} modules are declared: the environment is not what it should be")
    problems = [f"{name}: listed as failing, but no distribution declares it" for name in sorted(allowed.keys() - modules)]
    for name, owner in sorted(modules.items()):
        result = subprocess.run(
            [sys.executable, "-c", PROBE, name],
            env={"HOME": home, "PATH": os.environ["PATH"], "TMPDIR": home, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            text=True,
            capture_output=True,
        )
        if result.returncode == 0 and name in allowed:
            problems.append(f"{name} ({owner}): listed as failing, but it imports")
        elif result.returncode and name not in allowed:
            problems.append(f"{name} ({owner}): {result.stderr.strip().splitlines()[-1] if result.stderr.strip() else result.returncode}")
        elif result.returncode and allowed[name] not in result.stderr:
            problems.append(f"{name} ({owner}): fails otherwise than '{allowed[name]}': {result.stderr.strip()[-300:]}")
    if problems:
        sys.exit("\n".join(problems))
    report = f"{len(modules)} modules, {len(allowed)} of them need a GPU's driver\n"
    print(report)
    with open(os.environ["out"], "w") as file:
        file.write(report + "".join(f"{name}\n" for name in sorted(modules)))


main()
