"""A quadlet that runs a profile's image: podman's generator makes a systemd service of it."""

from __future__ import annotations

from hyperqwen.delivery.container import Container
from hyperqwen.delivery.templates import render


def quadlet_file(found: Container) -> str:
    """The text of NAME.container for `found` (podman 5 or newer). The key is podman's secret, whatever its file."""
    address, outside, inside = found.publish
    bracketed = f"[{address}]" if ":" in address else address
    return render("quadlet.container.j2", found, publish=f"{bracketed}:{outside}:{inside}")
