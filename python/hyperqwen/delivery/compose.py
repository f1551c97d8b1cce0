"""A compose file that runs a profile's image: the card by CDI, a key file, a port that only this machine reaches."""

from __future__ import annotations

from hyperqwen.delivery.container import Container
from hyperqwen.delivery.templates import render

KEY_FILE = "./hyperqwen.key"


def compose_file(found: Container) -> str:
    """The text of compose.yaml for `found`."""
    address, outside, inside = found.publish
    bracketed = f"[{address}]" if ":" in address else address
    return render(
        "compose.yaml.j2",
        found,
        publish=f"{bracketed}:{outside}:{inside}",
        key_file=found.key_file or KEY_FILE,
    )
