"""An image as an OCI layout whose big blobs are links to the layers.

spec: writer (folder that holds hyperqwen/delivery), spec (what the image is made of), layers (outputs of oci_layer.py,
the lowest first).
"""

import json
import os
import pathlib
import sys

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path.insert(0, spec["writer"])

from hyperqwen.delivery import image


def main() -> None:
    out = pathlib.Path(os.environ["out"])
    made = image.load(pathlib.Path(spec["spec"]))
    blobs = []
    for layer, folder in zip(made.layers, spec["layers"], strict=True):
        with open(f"{folder}/layer.json") as file:
            stored = json.load(file)
        if stored["layer"] != image.layer_json(layer):
            sys.exit(f"{folder} is not what layer {layer.name} of {spec['spec']} is made of")
        blobs.append(image.Blob(*stored["blob"]))
        image.place(out, blobs[-1]).symlink_to(f"{folder}/layer.tar")
    print(f"{made.reference}: {image.finish_layout(made, out, blobs)}")


main()
