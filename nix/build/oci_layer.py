"""One layer of the images: its tar, and what the tar holds.

spec: writer (folder that holds hyperqwen/delivery), name, roots (paths whose closures go in), below (those of the lower
layers, whose closures do not), arguments (of the layer's entries). The build folder has an exportReferencesGraph file
root-N and below-N for each.
"""

import json
import os
import pathlib
import sys

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path.insert(0, spec["writer"])

from hyperqwen.delivery import image, rootfs


def main() -> None:
    build, out = pathlib.Path(os.environ["NIX_BUILD_TOP"]), pathlib.Path(os.environ["out"])
    graph: dict[str, tuple[str, ...]] = {}
    for file in [*build.glob("root-*"), *build.glob("below-*")]:
        graph |= image.read_graph(file.read_text())
    lower = [("below", spec["below"])] if spec["below"] else []
    _, paths = image.partition(graph, [*lower, (spec["name"], spec["roots"])])[-1]
    layer = image.Layer(spec["name"], paths, rootfs.entries(spec["name"], spec["arguments"]))
    out.mkdir()
    with open(out / "layer.tar", "wb") as tar:
        blob = image.write_layer(layer, tar)
    (out / "layer.json").write_text(json.dumps({"layer": image.layer_json(layer), "blob": [blob.digest, blob.size]}))
    print(f"{layer.name}: {len(paths)} paths, {blob.size / 1e6:.1f} MB, sha256 {blob.digest}")


main()
