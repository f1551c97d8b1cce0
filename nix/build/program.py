"""A program of ours with its configuration baked in.

spec: name (of the program), python (interpreter of the hyperqwen environment), arguments (that it begins with),
variable (names the configuration's file to it), config (JSON).
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
        "import os\nimport sys\n\n"
        "from hyperqwen.cli import main\n\n"
        f'os.environ[{spec["variable"]!r}] = "{out}/config.json"\n'
        f'main([*{spec["arguments"]!r}, *sys.argv[1:]], prog_name="hyperqwen")\n'
    )
os.chmod(f"{out}/bin/{name}", 0o755)
