"""What an image holds besides store paths: the few files that a program expects of a system, and who it runs as.

Standard library only: builds run this on a bare Python.
"""

from __future__ import annotations

from hyperqwen.delivery.image import Entry

USER = 65532  # what distroless images call nonroot; numeric, so that Kubernetes can see that it is not root
NAME = "hyperqwen"
CACHE = "/cache"
MODELS = "/models"
# Where NVIDIA's container runtime mounts the driver's libraries, and where our loader looks by default.
DRIVER_LIBRARIES = "/usr/lib/x86_64-linux-gnu"


def base(busybox: str, runtime: str) -> tuple[Entry, ...]:
    """The lowest layer's: a shell, users, certificates, and folders to mount on."""
    shell = f"{busybox}/bin/busybox"
    folders = ("/dev", "/proc", "/run", "/sys", MODELS, DRIVER_LIBRARIES)
    return (
        *(Entry(path) for path in folders),
        Entry("/tmp", 0o1777),
        Entry("/var/tmp", 0o1777),
        # A new volume takes the owner of the folder that it is mounted on.
        Entry(CACHE, 0o700, USER, USER),
        *(Entry(path, target=shell) for path in ("/bin/busybox", "/bin/sh", "/usr/bin/env")),
        Entry("/etc/passwd", 0o644, text=_passwd()),
        Entry("/etc/group", 0o644, text=f"root:x:0:\n{NAME}:x:{USER}:\n"),
        Entry("/etc/nsswitch.conf", 0o644, text="passwd: files\ngroup: files\nhosts: files dns\n"),
        # Where other programs and our own OpenSSL look.
        *(
            Entry(path, target=f"{runtime}/etc/ssl/ca-bundle.crt")
            for path in ("/etc/ssl/certs/ca-certificates.crt", "/usr/lib/ssl/cert.pem")
        ),
        # libnvidia-container puts the driver into the multiarch folder when it sees this file, else into /usr/lib64,
        # which a loader built by Debian does not search. The number says which Debian our C library is of.
        Entry("/etc/debian_version", 0o644, text="12\n"),
        # With CDI the libraries stay where the host has them, and a hook of the NVIDIA toolkit writes the loader's
        # cache; where there is none to replace, it leaves it.
        Entry("/etc/ld.so.conf", 0o644, text="include /etc/ld.so.conf.d/*.conf\n"),
        Entry("/etc/ld.so.conf.d"),
        Entry("/etc/ld.so.cache", 0o644, text=""),
    )


def _passwd() -> str:
    users = (("root", 0, "/"), (NAME, USER, CACHE))
    return "".join(f"{name}:x:{number}:{number}::{home}:/bin/sh\n" for name, number, home in users)


def code(hyperqwen: str) -> tuple[Entry, ...]:
    """The topmost layer's: our command under a name that a compose file can know."""
    return (Entry("/bin/hyperqwen", target=f"{hyperqwen}/bin/hyperqwen"),)


def entries(layer: str, arguments: dict[str, str]) -> tuple[Entry, ...]:
    """The entries of the layer called `layer`, which only the lowest and the topmost have."""
    if layer == "base":
        return base(**arguments)
    return code(**arguments) if layer == "code" else ()
