"""Our own Python package as an unpacked distribution: modules, byte code, metadata.

spec: source (folder that holds hyperqwen/), name (distribution), version, scripts ({name: "module:function"}), share
({name: folder}: data that goes to hyperqwen/share/NAME).
"""

import compileall
import json
import os
import py_compile
import shutil

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)


def main() -> None:
    out = os.environ["out"]
    shutil.copytree(spec["source"], f"{out}/site", ignore=shutil.ignore_patterns("__pycache__"))
    # A store's folders are read-only, and so are their copies.
    for directory, _, _ in os.walk(out):
        os.chmod(directory, 0o755)
    for name, folder in spec["share"].items():
        shutil.copytree(folder, f"{out}/site/hyperqwen/share/{name}")
    info = f"{out}/site/{spec['name'].replace('-', '_')}-{spec['version']}.dist-info"
    os.mkdir(info)
    with open(f"{info}/METADATA", "w") as file:
        file.write(f"Metadata-Version: 2.1\nName: {spec['name']}\nVersion: {spec['version']}\n")
    if spec["scripts"]:
        with open(f"{info}/entry_points.txt", "w") as file:
            file.write("[console_scripts]\n" + "".join(f"{k} = {v}\n" for k, v in sorted(spec["scripts"].items())))
    compiled = compileall.compile_dir(
        f"{out}/site",
        quiet=1,
        workers=1,
        stripdir=out,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    if not compiled:
        raise SystemExit("a module does not compile")


main()
