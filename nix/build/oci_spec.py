"""What the image of a profile is made of, as the JSON file that hyperqwen.delivery.image reads.

spec: profile, program (the launcher in the image), layers ([{name, roots}], the lowest first), entryArguments ({layer:
arguments of its entries}). The build folder has an exportReferencesGraph file root-N for each root.
"""

import json
import os
import pathlib

from hyperqwen.delivery import container, image, rootfs
from hyperqwen.profiles.profile import load, shipped


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    graph: dict[str, tuple[str, ...]] = {}
    for exported in pathlib.Path(os.environ["NIX_BUILD_TOP"]).glob("root-*"):
        graph |= image.read_graph(exported.read_text())
    profile = load(shipped()[spec["profile"]])
    parts = image.partition(graph, [(layer["name"], layer["roots"]) for layer in spec["layers"]])
    layers = [
        image.Layer(name, paths, rootfs.entries(name, spec["entryArguments"].get(name, {}))) for name, paths in parts
    ]
    made = image.Image(container.reference(profile), tuple(layers), container.image_config(profile, spec["program"]))
    pathlib.Path(os.environ["out"]).write_text(image.to_json(made))


main()
