"""A program of ours with its configuration baked in.

spec: name (hyperqwen's command), python (interpreter of the hyperqwen environment), config (JSON for the command).
"""

import json
import os

with open(os.environ["specPath"]) as file:
    spec = json.load(file)
out, name = os.environ["out"], spec["name"]
os.makedirs(f"{out}/bin")
with open(f"{out}/config.json", "w") as file:
    json.dump(spec["config"], file, indent=2, sort_keys=True)
    file.write("\n")
with open(f"{out}/bin/{name}", "w") as file:
    file.write(
        f"#!{spec['python']} -I\n"
        "import os\n\n"
        "from hyperqwen.cli import main\n\n"
        f'os.environ["HYPERQWEN_{name.upper()}_CONFIG"] = "{out}/config.json"\n'
        f'main(["{name}", *__import__("sys").argv[1:]], prog_name="hyperqwen")\n'
    )
os.chmod(f"{out}/bin/{name}", 0o755)
