"""No tracked file names the host of a package registry: pins say what, the host's own clients know where.

spec: root (the repository).
"""

import json
import os
import re
import sys

# Spelled with classes so that this file does not match itself.
HOSTS = re.compile(
    rb"(?i)\b(?:[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.(?:org|com)"
    rb"|(?:deb|security|snapshot|ftp|archive)(?:\.[a-z]+)*\.[d]ebian\.org|[c]ache\.nixos\.org|[d]ownload\.pytorch\.org)"
)


def main() -> None:
    with open(os.environ["specPath"]) as file:
        root = json.load(file)["root"]
    if not HOSTS.search(b"https://" + b"py" + b"pi.org/simple") or not HOSTS.search(b"deb." + b"debian.org"):
        sys.exit("the pattern misses a known host")
    problems, count = [], 0
    for directory, _, files in os.walk(root):
        for name in files:
            path = os.path.join(directory, name)
            if os.path.islink(path):
                continue
            count += 1
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if match := HOSTS.search(line):
                        problems.append(f"{os.path.relpath(path, root)}:{number}: names {match[0].decode()}")
    if problems:
        sys.exit("\n".join(problems))
    with open(os.environ["out"], "w") as file:
        file.write(f"{count} files name no registry\n")


main()
