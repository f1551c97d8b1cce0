"""`./hq`: Nix for a box that may have nothing yet. Seeds the pins that the asked output lacks, then is `nix`.

The shell script beside flake.nix has made sure of nix, git and Python. Everything that has to be thought about is here.
Runs on a bare Python 3.9, standard library only, from a read-only checkout.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# Run as a script: this file's folder is not a package on the path yet.
PYTHON_DIR = Path(__file__).resolve().parent.parent
if str(PYTHON_DIR) not in sys.path:
    sys.path.insert(0, str(PYTHON_DIR))

from hyperqwen.errors import INTERRUPTED, OK, BadInputError, HyperqwenError, UnsuitableError  # noqa: E402
from hyperqwen.store import group_exists  # noqa: E402

if TYPE_CHECKING:
    from hyperqwen.pins.model import PinSet

HELP = """\
hq: Nix for a box that may have nothing yet.

  ./hq run .#demo                       build the demo and serve it on 127.0.0.1:18020
  ./hq run .#demo -- --once "Who?"      start, answer, print, stop
  ./hq flake check                      build and check everything
  ./hq build .#NAME                     any other `nix` command works as well
  ./hq fetch [GROUP...] [--help]        bring pinned files without building anything

What it does, in this order:
  1. On Debian 12 and 13, as root or through sudo: installs what is missing of nix-bin, git, python3 and python3-pip.
     Elsewhere it uses what it finds, and says what is missing.
  2. For its own calls only (NIX_CONFIG), it turns on nix-command, flakes and ca-derivations, and for root a sandbox
     that needs no build users. No file of Nix's is edited, and what your own NIX_CONFIG sets wins.
  3. It asks Nix what the named outputs lack, and fetches the pinned files among that: wheels from pip's index, Debian
     packages from apt's mirror, each checked by size and hash.
  4. It becomes `nix` with your arguments.

Exit codes: nix's own; 2 bad input, 3 environment unsuitable, 4 pinned file not found, 5 wrong bytes, 130 interrupted.
"""

OLDEST_NIX = (2, 8)
NO_SANDBOX = "sandbox = false"
FEATURES = "nix-command flakes ca-derivations"
DAEMON_SOCKET = Path("/nix/var/nix/daemon-socket/socket")
SYSTEM = f"{platform.machine()}-linux"

# Values that follow an option, so that none of them is taken for an installable. Of Nix's many settings, each of which
# is an option too, these are the ones that people give by hand.
_ONE_VALUE = """
    --store --eval-store -I --include -j --max-jobs --cores --log-format --builders -o --out-link --profile --expr -f
    --file --inputs-from --update-input --reference-lock-file --output-lock-file --from --to --phase -k --keep
    --keep-env-var -u --unset --unset-env-var --system --substituters --extra-substituters --trusted-public-keys
    --extra-trusted-public-keys --experimental-features --extra-experimental-features --timeout --max-silent-time
    --sandbox-paths --extra-sandbox-paths --post-build-hook
"""
_TWO_VALUES = "--option --arg --argstr --override-input --override-flake --redirect -s --set-env-var"
_VALUES = {option: 1 for option in _ONE_VALUE.split()} | {option: 2 for option in _TWO_VALUES.split()}
# The demo's options whose names are none of Nix's. A test holds them against the demo's own.
_DEMO_OPTIONS = frozenset({"--api-key-file", "--cache-dir", "--complete", "--host", "--max-tokens", "--once", "--port"})
# Options that change which derivations are meant or which store is asked: the question before the build needs them too.
_SHARED = """
    --store --eval-store -I --include --expr -f --file --inputs-from --update-input --reference-lock-file --system
    --substituters --extra-substituters --experimental-features --extra-experimental-features --option --arg --argstr
    --override-input --override-flake --impure --no-write-lock-file --no-update-lock-file --accept-flake-config
    --offline --refresh --no-substitute --recreate-lock-file
"""
_WAYS_TO_A_STORE = """one of these:
    sudo ./hq ...    lets root build and run
    NIX_REMOTE=$HOME/.local/share/nix/root ./hq ...    uses a store of your own, where user namespaces are allowed
    a Nix daemon that serves you: on Debian, apt-get install nix-setup-systemd, add yourself to the group nix-users,
    add `extra-experimental-features = ca-derivations` to /etc/nix/nix.conf, and log in again"""
# Commands that build what they are given, and how many of their words are installables (None: all).
_BUILDING = {
    "build": None,
    "bundle": 1,
    "copy": None,
    "develop": 1,
    "fmt": 0,
    "print-dev-env": 1,
    "profile add": None,
    "profile install": None,
    "run": 1,
    "shell": None,
}
_FAMILIES = frozenset(
    {"flake", "profile", "store", "derivation", "registry", "hash", "key", "nar", "realisation", "config"}
)

# A line of `nix build --dry-run`, 2.8 to 2.34: two blanks and the path of a derivation.
_DERIVATION = re.compile(r"^\s+(/\S*/[0-9a-z]{32}-(\S+)\.drv)\s*$", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Request:
    """What a `nix` command line is going to build.

    candidates: lists of installables; the first list that Nix can evaluate is what is meant.
    shared: options that the question "what is missing?" must repeat.
    store: the store that was named, if any.
    """

    candidates: list[list[str]]
    shared: list[str] = field(default_factory=list)
    store: str | None = None


def request_of(argv: Sequence[str], system: str = SYSTEM) -> Request | None:
    """The request in a `nix` command line, None where it builds nothing that could need a pin."""
    words: list[str] = []
    options: list[str] = []
    shared: list[str] = []
    store = None
    command = ""
    rest = list(argv)
    shared_options = frozenset(_SHARED.split())
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            if not command:
                command = word
            elif command in _FAMILIES:
                command = f"{command} {word}"
            else:
                words.append(word)
                if command == "run":
                    break
            continue
        if word in ("-c", "--command") and command in ("shell", "develop"):
            break
        count = _VALUES.get(word, 0)
        values, rest = rest[:count], rest[count:]
        options.append(word)
        if word in shared_options:
            shared += [word, *values]
        if word == "--store" and values:
            store = values[0]
    if {"--dry-run", "--no-build", "--help", "--version"} & set(options):
        return None
    candidates = _candidates(command, words, options, system)
    return Request(candidates, shared, store) if candidates else None


def check_separator(argv: Sequence[str]) -> None:
    """Raise BadInputError for a demo's option that stands among Nix's, as in `run .#demo --port 1`."""
    words: list[str] = []
    index = 0
    while index < len(argv) and argv[index] != "--":
        word = argv[index]
        if not word.startswith("-"):
            words.append(word)
        elif words[:1] == ["run"] and len(words) > 1 and word.partition("=")[0] in _DEMO_OPTIONS:
            after = list(argv[index:])
            if "--" in after:
                after.remove("--")
            right = " ".join(map(_quoted, [*argv[:index], "--", *after]))
            raise BadInputError(
                f"{word} is no option of Nix, and Nix reads what comes before --",
                f"arguments of the program go after --: ./hq {right}",
            )
        index += 1 + _VALUES.get(word, 0)


def _quoted(word: str) -> str:
    """`word` for a shell, to which # is special at its start only: .#demo looks as it does everywhere else."""
    return word if re.fullmatch(r"[\w./-][\w./#:=-]*", word, re.ASCII) else shlex.quote(word)


def _candidates(command: str, words: list[str], options: list[str], system: str) -> list[list[str]]:
    if command == "flake check":
        flake = words[0] if words else "."
        return [[f"{flake}#packages.{system}.checks-all"]]
    if command not in _BUILDING:
        return []
    wanted = _BUILDING[command]
    installables = words if wanted is None else words[:wanted]
    if {"-f", "--file", "--expr"} & set(options):
        return [installables]
    if command == "fmt":
        return [[f".#formatter.{system}"]]
    if not installables:
        installables = ["."]
    if command == "run":
        # An app and the package of its program have one name here.
        return [[re.sub(r"#apps\.([^.]+)\.([^.]+)(\.program)?$", r"#packages.\1.\2", installables[0])]]
    if command in ("develop", "print-dev-env"):
        flake, _, name = installables[0].partition("#")
        return [[f"{flake}#devShells.{system}.{name or 'default'}"], installables]
    return [installables]


def derivations(report: str) -> dict[str, str]:
    """Name -> path of every derivation in the output of `nix build --dry-run`."""
    return {name: path for path, name in _DERIVATION.findall(_ANSI.sub("", report))}


def nix_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of Nix in the output of `nix --version`: the last version in it, after the name of the Nix."""
    found = re.findall(r"(\d+)\.(\d+)(?:\.\d+)*", text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def check_version(text: str) -> None:
    """Raise UnsuitableError for the `nix --version` of a Nix that is too old."""
    version = nix_version(text)
    if version is None or version < OLDEST_NIX:
        raise UnsuitableError(
            f"Nix here is {text.strip() or 'of no known version'!r}, and 2.8 is the oldest that works",
            "upgrade it (Debian 12 and newer have it: apt-get install nix-bin)",
        )


def nix_config(
    environ: Mapping[str, str], *, root: bool, build_users: bool, substituters_set: bool, sandbox: bool = True
) -> str:
    """NIX_CONFIG of hq's own calls: defaults, then the user's lines, which win, then the features, which only add.

    Args:
        root: Nix builds in this very process, and not through a daemon.
        build_users: the group nixbld exists.
        substituters_set: the user has chosen binary caches in a nix.conf.
        sandbox: the kernel lets this process make the namespaces that a sandbox is made of.
    """
    defaults = []
    if root:
        defaults.append("sandbox = true" if sandbox else NO_SANDBOX)
        if not build_users:
            defaults.append("build-users-group =")
    if not substituters_set:
        # No public cache has these outputs: asking it is a wait for nothing, and a failure on a box without a network.
        defaults.append("substituters =")
    return "\n".join([*defaults, environ.get("NIX_CONFIG", ""), f"extra-experimental-features = {FEATURES}", ""])


def names_substituters(texts: Iterable[str]) -> bool:
    """Whether any of these nix.conf texts chooses binary caches."""
    return any(re.search(r"^\s*(?:extra-)?(?:substituters|binary-caches)\s*=", text, re.MULTILINE) for text in texts)


def trusting_git(environ: Mapping[str, str], checkout: Path, user: int) -> dict[str, str]:
    """Variables by which git reads a checkout of another user for this call; none where it would anyway.

    Git 2.38 and newer honour safe.directory from here. The library in newer Nix looks for it in files only; but it lets
    root, as git does, read what belongs to the user that sudo came from. No file of the user's is changed.
    """
    git = checkout / ".git"
    if not git.exists() or (checkout.stat().st_uid == user and git.stat().st_uid == user):
        return {}
    given = environ.get("GIT_CONFIG_COUNT") or "0"
    if not given.isascii() or not given.isdigit():
        raise BadInputError(f"GIT_CONFIG_COUNT is {given!r}, not a number", "unset it")
    count = int(given)
    trusting = {
        "GIT_CONFIG_COUNT": str(count + 1),
        f"GIT_CONFIG_KEY_{count}": "safe.directory",
        f"GIT_CONFIG_VALUE_{count}": str(checkout),
    }
    return {**trusting, "SUDO_UID": str(checkout.stat().st_uid)} if user == 0 else trusting


def store_trouble(nix_dir: Path = Path("/nix"), daemon: Path = DAEMON_SOCKET) -> str | None:
    """Why a user who is not root can use neither the store nor a daemon; None when one of them works."""
    database = nix_dir / "var/nix/db"
    if database.is_dir() and os.access(database, os.W_OK):
        return None
    if not nix_dir.exists():
        return f"{nix_dir} does not exist and only root can make it"
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.connect(str(daemon))
    except PermissionError:
        return f"the Nix daemon takes no calls from you: permission denied on {daemon}"
    except OSError:
        return f"{nix_dir} belongs to another user and no Nix daemon answers at {daemon}"
    finally:
        probe.close()
    return None


def feature_trouble(report: str) -> str | None:
    """The experimental feature that Nix says is off; with hq's settings, that can only be a daemon's doing."""
    found = re.search(r"experimental (?:Nix )?feature '([a-z-]+)' is disabled", report)
    return found.group(1) if found else None


def _say(text: str) -> None:
    print(f"hq: {text}", file=sys.stderr, flush=True)


def _conf_texts(environ: Mapping[str, str]) -> list[str]:
    home = environ.get("HOME", "/root")
    files = environ.get("NIX_USER_CONF_FILES", "").split(":") if environ.get("NIX_USER_CONF_FILES") else []
    places = [
        Path(environ.get("NIX_CONF_DIR", "/etc/nix")) / "nix.conf",
        *(map(Path, files) if files else [Path(environ.get("XDG_CONFIG_HOME", f"{home}/.config")) / "nix/nix.conf"]),
    ]
    texts = [environ.get("NIX_CONFIG", "")]
    for place in places:
        try:
            texts.append(place.read_text(errors="replace"))
        except OSError:
            continue
    return texts


def sandbox_works() -> bool:
    """Whether root may make a sandbox here: a chroot and many containers allow none, where Nix 2.8 refuses to build."""
    spaces = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--mount-proc"]
    try:
        return subprocess.run(["unshare", *spaces, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        # Without the program there is no telling; Nix will.
        return True


def environment(environ: Mapping[str, str], checkout: Path) -> dict[str, str]:
    """The environment of hq's own calls of Nix and of the fetcher."""
    root = os.geteuid() == 0
    config = nix_config(
        environ,
        root=root,
        build_users=group_exists("nixbld"),
        substituters_set=names_substituters(_conf_texts(environ)),
        sandbox=not root or sandbox_works(),
    )
    return {**environ, "NIX_CONFIG": config, **trusting_git(environ, checkout, os.geteuid())}


def missing_pins(request: Request, environ: Mapping[str, str]) -> list[str]:
    """File names of the pins that the request lacks; empty too when Nix cannot evaluate it, which it then says itself.

    Raises UnsuitableError when a daemon lacks a feature, BadInputError for broken pin files.
    """
    from hyperqwen.pins.model import load, pins_dir

    # First, and even if nothing is missing: Nix's own words for a broken pin file say neither where nor what to do.
    pins = load(pins_dir(PYTHON_DIR.parent / "nix" / "pins"))
    for installables in request.candidates:
        asked = subprocess.run(
            ["nix", "build", "--dry-run", *request.shared, *installables],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        feature = feature_trouble(asked.stderr)
        if feature:
            raise UnsuitableError(
                f"Nix refuses the experimental feature {feature}, which a daemon must have in its own settings",
                f"as root: add `extra-experimental-features = {FEATURES}` to /etc/nix/nix.conf, then "
                "`systemctl restart nix-daemon`; or run hq as root",
            )
        if "is not owned by current user" in asked.stderr:
            raise UnsuitableError(
                f"{PYTHON_DIR.parent} belongs to another user, and this Nix reads it only if git is told",
                f"git config --global --add safe.directory {PYTHON_DIR.parent}",
            )
        if asked.returncode == 0:
            return _pins_among(derivations(asked.stderr), pins)
    return []


def _pins_among(wanted: Mapping[str, str], pins: PinSet) -> list[str]:
    return [pin.file for pin in pins.all if pin.store_name in wanted]


def fetch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the fetcher with `arguments`; its exit code, negative if a signal ended it."""
    child = {**environ, "PYTHONPATH": str(PYTHON_DIR), "PYTHONDONTWRITEBYTECODE": "1"}
    fetcher = subprocess.Popen([sys.executable, "-m", "hyperqwen.pins.fetch", *arguments], env=child)
    # It has things to put in order when it is stopped. A ctrl-C of the terminal reaches it without our help.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _frame: fetcher.send_signal(number))
    try:
        return fetcher.wait()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def with_no_link(argv: Sequence[str], writable: bool) -> list[str]:
    """`nix build` writes a link `result`; where it cannot, it is told not to."""
    given = {"-o", "--out-link", "--no-link", "--dry-run", "--help"} & set(argv)
    if writable or given or "build" not in argv[:1]:
        return list(argv)
    return [*argv[:1], "--no-link", *argv[1:]]


def seed(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Seed what `nix ARGV` lacks. Returns OK when Nix may follow, else the code to exit with."""
    request = request_of(argv)
    if request is None:
        return OK
    if os.geteuid() != 0 and request.store is None and not environ.get("NIX_REMOTE"):
        trouble = store_trouble()
        if trouble:
            raise UnsuitableError(trouble, _WAYS_TO_A_STORE)
    files = missing_pins(request, environ)
    if not files:
        return OK
    if NO_SANDBOX in environ.get("NIX_CONFIG", "").splitlines()[:1]:
        _say("this machine allows no namespaces: Nix builds without a sandbox")
    _say(f"{len(files)} pinned file{'s are' if len(files) > 1 else ' is'} not in the store yet")
    return fetch([*(["--store", request.store] if request.store else []), "--files", *files], environ)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Be `nix`, after making sure of what it needs."""
    argv = sys.argv[1:] if argv is None else list(argv)
    checkout = PYTHON_DIR.parent
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        sys.exit(OK)
    try:
        if platform.machine() != "x86_64":
            # Else a flake that has no output for this machine would pass its check with nothing checked.
            raise UnsuitableError(f"this machine is {platform.machine()}", "use x86-64: every pin is built for that")
        check_separator(argv)
        environ = environment(os.environ, checkout)
        if argv[0] == "fetch":
            sys.exit(_shell_code(fetch(argv[1:], environ)))
        shown = subprocess.run(["nix", "--version"], env=environ, capture_output=True, encoding="utf-8", check=False)
        if shown.returncode != 0:
            raise UnsuitableError(f"nix does not run: {shown.stderr.strip()}", "mend NIX_CONFIG, or what else it names")
        check_version(shown.stdout)
        code = seed(argv, environ)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except HyperqwenError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    if code != OK:
        sys.exit(_shell_code(code))
    final = with_no_link(argv, os.access(".", os.W_OK))
    if final != list(argv):
        _say("this folder is read-only: no link `result` is made")
    os.execvpe("nix", ["nix", *final], environ)


if __name__ == "__main__":
    main()
