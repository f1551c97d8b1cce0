"""`hyperqwen fetch`: bring the pinned bytes that the Nix store lacks.

    python3 -m hyperqwen.pins.fetch [GROUP…] [options]

Runs with the host's bare Python (3.9 or newer, standard library, pip beside it) before anything of the product is
built. Every file is verified by size and sha256 before the store hears of it; what has arrived stays in the cache, so
that an interrupted run goes on where it stopped. Nothing here needs root: a daemon takes seeds from anyone.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TextIO

from hyperqwen.errors import (
    INTERRUPTED,
    NOT_FOUND,
    OK,
    UNVERIFIED,
    BadInputError,
    HyperqwenError,
    MissingError,
    UnsuitableError,
    VerificationError,
)
from hyperqwen.pins.model import GROUPS, Extract, Pin, PinSet, load, pins_dir
from hyperqwen.store import NixStore, Store, nar_sha256

if TYPE_CHECKING:
    from hyperqwen.pins.sources import Candidate
    from hyperqwen.pins.transfer import Access, Wanted

BATCH_BYTES = 512 * 1024 * 1024
BATCH_FILES = 64
AHEAD_BYTES = 1024 * 1024 * 1024
_SPARE_BYTES = 64 * 1024 * 1024


class Sources(Protocol):
    """Something that knows places for pins."""

    def prepare(self, pins: Sequence[Pin]) -> None:
        """Find out, before any byte moves, what `pins` need; raises UnsuitableError when the host lacks it."""
        ...

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        """Places to take `pin` from, best first; raises Absent, when iterated to the end, if there are none."""
        ...

    def access(self, pin: Pin) -> Access:
        """The HTTP client for the pin's places."""
        ...


@dataclass(frozen=True)
class Ready:
    """A verified file: `path` has the pin's store name; `owned` says that it is ours to delete."""

    pin: Pin
    path: Path
    owned: bool


@dataclass
class Outcome:
    """What a run did, by file name; `failed` maps a file to its error."""

    valid: int = 0
    added: list[str] = field(default_factory=list)
    failed: dict[str, HyperqwenError] = field(default_factory=dict)


class DirSource:
    """A folder made by --export; takes the file as it lies there, or the extracted seed under its store name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, pins: Sequence[Pin]) -> None:
        """A folder needs nothing of the host."""

    def access(self, pin: Pin) -> Access:
        from hyperqwen.pins.transfer import Access

        return Access()

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        from hyperqwen.pins.sources import Candidate
        from hyperqwen.pins.transfer import Absent

        mirror_name = (pin.pool or "").rpartition("/")[2]
        for name in dict.fromkeys([pin.file, mirror_name]):
            if name and (self.folder / name).is_file():
                yield Candidate(path=self.folder / name)
                return
        raise Absent(
            f"{pin.file} is not in {self.folder}",
            f"export it on a machine with a network: ./hq fetch --export DIR --files {pin.file}",
        )


class HostSources:
    """pip's indexes and apt's mirrors, asked for only when a pin of that kind is missing."""

    def __init__(self, *, index: str | None, mirror: str | None, stop: threading.Event) -> None:
        self.index = index
        self.mirror = mirror
        self.stop = stop
        self._access: dict[str, Access] = {}
        self._candidates: dict[str, Callable[[Pin], Iterator[Candidate]]] = {}

    def prepare(self, pins: Sequence[Pin]) -> None:
        from hyperqwen.pins import sources

        kinds = {pin.kind for pin in pins}
        if "deb" in kinds:
            sites = sources.apt_sites(self.mirror)
            self._access["deb"] = sources.apt_access(sites)
            self._candidates["deb"] = sources.DebSources(sites).candidates
        if "wheel" in kinds:
            settings = sources.pip_settings(self.index)
            self._access["wheel"] = settings.access()
            self._candidates["wheel"] = sources.WheelSources(settings, self._access["wheel"], self.stop).candidates

    def candidates(self, pin: Pin) -> Iterator[Candidate]:
        return self._candidates[pin.kind](pin)

    def access(self, pin: Pin) -> Access:
        return self._access[pin.kind]


class Workspace:
    """Where files arrive: as `SHA256.part` while they do, then under their own name.

    That name is in a folder of its own (the cache) or, with `flat`, in this one (an export).
    One process at a time works in a workspace; `lock` waits for its turn.
    """

    def __init__(self, root: Path, *, flat: bool = False) -> None:
        self.root = root
        self.flat = flat

    def part(self, pin: Pin) -> Path:
        return self.root / (f".{pin.sha256}.part" if self.flat else f"{pin.sha256}.part")

    def home(self, pin: Pin) -> Path:
        return self.root if self.flat else self.root / pin.sha256

    def arrived(self, pin: Pin) -> int:
        """The bytes of `pin` that are here, whole or in part."""
        for path in (self.home(pin) / pin.file, self.part(pin)):
            if path.is_file():
                return min(path.stat().st_size, pin.size)
        return 0

    def remove(self, ready: Ready) -> None:
        """Drop a file that has been handed on."""
        if ready.owned and not self.flat:
            shutil.rmtree(self.home(ready.pin), ignore_errors=True)

    @contextmanager
    def lock(self, say: Callable[[str], None]) -> Iterator[bool]:
        """Hold this workspace; yields whether another process had to be waited for."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UnsuitableError(
                f"{self.root} cannot be written: {error.strerror}", "set XDG_CACHE_HOME to a folder of yours"
            ) from None
        waited = False
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                say(f"another fetch{f' (process {holder})' if holder else ''} works in {self.root}; waiting for it")
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise UnsuitableError(
                    f"{self.root} cannot be locked: {error.strerror}", "set XDG_CACHE_HOME to a local disk"
                ) from None
            # The number is only for the message of whoever waits: a full disk must not stop what needs no space.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield waited
        finally:
            os.close(descriptor)


class ProgressSink(Protocol):
    """What the engine reports to; `hyperqwen.pins.progress.Progress` is the one for people."""

    note: str

    def moved(self, count: int, by_wire: bool = True) -> None: ...

    def file_done(self) -> None: ...

    def show(self, *, now: bool = False) -> None: ...

    def say(self, text: str) -> None: ...


class Engine:
    """Brings pins into a workspace in parallel and hands verified files on in batches.

    `deliver` gets lists of Ready files, in one thread, in any order; `delivering` is what the progress line says then,
    with {} for their number. Errors about one file are collected in the outcome and the others go on; an
    UnsuitableError (no disk, no network) ends the run.
    """

    def __init__(
        self,
        workspace: Workspace,
        sources: Sources,
        deliver: Callable[[list[Ready]], None],
        progress: ProgressSink,
        stop: threading.Event,
        jobs: int = 4,
        delivering: str = "",
    ) -> None:
        self.delivering = delivering
        self.workspace = workspace
        self.sources = sources
        self.deliver = deliver
        self.progress = progress
        self.stop = stop
        self.jobs = jobs
        self.outcome = Outcome()
        self.fatal: HyperqwenError | None = None
        self.bug: BaseException | None = None
        self._queue: deque[Pin] = deque()
        self._ready: deque[Ready] = deque()
        self._working = 0
        self._ahead = 0
        self._changed = threading.Condition()

    def run(self, pins: Sequence[Pin]) -> Outcome:
        """Bring all of `pins`; raises the fatal error if there was one, KeyboardInterrupt on ctrl-C."""
        # The largest first, so that no thread is left with torch when the others are done.
        self._queue = deque(sorted(pins, key=lambda pin: -pin.size))
        self._working = min(self.jobs, len(self._queue))
        # Daemon threads: a socket that is silent for its whole timeout must not hold up ctrl-C.
        threads = [threading.Thread(target=self._work, name=f"fetch-{i}", daemon=True) for i in range(self._working)]
        threads.append(threading.Thread(target=self._hand_on, name="deliver", daemon=True))
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    if thread.is_alive():
                        thread.join(0.1)
                        break
                self.progress.show()
        except BaseException:
            self.stop.set()
            with self._changed:
                self._changed.notify_all()
            for thread in threads:
                thread.join(2.0)
            raise
        if self.bug is not None:
            raise self.bug
        if self.fatal is not None:
            raise self.fatal
        return self.outcome

    def _work(self) -> None:
        from hyperqwen.pins.transfer import Stopped

        try:
            while not self.stop.is_set():
                with self._changed:
                    while self._ahead > AHEAD_BYTES and not self.stop.is_set():
                        self._changed.wait(1.0)
                    if not self._queue or self.stop.is_set():
                        return
                    pin = self._queue.popleft()
                try:
                    ready = self._bring(pin)
                except UnsuitableError:
                    raise
                except HyperqwenError as error:
                    self.outcome.failed[pin.file] = error
                    continue
                with self._changed:
                    self._ready.append(ready)
                    self._ahead += pin.size if ready.owned else 0
                    self._changed.notify_all()
        except Stopped:
            return
        except BaseException as error:
            self._end(error)
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _end(self, error: BaseException) -> None:
        with self._changed:
            if isinstance(error, HyperqwenError):
                self.fatal = self.fatal or error
            else:
                self.bug = self.bug or error
            self.stop.set()
            self._changed.notify_all()

    def _hand_on(self) -> None:
        try:
            while True:
                with self._changed:
                    while True:
                        size = sum(ready.pin.size for ready in self._ready)
                        idle = self._working == 0 or self.stop.is_set()
                        if idle or size >= BATCH_BYTES or len(self._ready) >= BATCH_FILES:
                            break
                        self._changed.wait(1.0)
                    batch = list(self._ready)
                    self._ready.clear()
                    self._changed.notify_all()
                if self.stop.is_set() or not batch:
                    return
                self.progress.note = self.delivering.format(len(batch)) if self.delivering else ""
                self.deliver(batch)
                self.progress.note = ""
                for ready in batch:
                    self.workspace.remove(ready)
                    self.outcome.added.append(ready.pin.store_name)
                    self.progress.file_done()
                with self._changed:
                    self._ahead -= sum(ready.pin.size for ready in batch if ready.owned)
                    self._changed.notify_all()
        except BaseException as error:
            self._end(error)

    def _bring(self, pin: Pin) -> Ready:
        """`pin` verified and under its store name."""
        from hyperqwen.pins.transfer import Absent, MismatchError, NoAnswer, Wanted, check_local

        wanted = Wanted(pin.file, pin.size, pin.sha256)
        kept = self.workspace.home(pin) / pin.file
        if kept.is_file():
            try:
                check_local(wanted, kept, self.stop)
                self.progress.moved(pin.size, False)
                return self._finish(pin, kept, owned=True)
            except MismatchError:
                kept.unlink()
        refused: list[HyperqwenError] = []
        for candidate in self.sources.candidates(pin):
            try:
                if candidate.path is not None:
                    check_local(wanted, candidate.path, self.stop)
                    self.progress.moved(pin.size, False)
                    return self._finish(pin, candidate.path, owned=False)
                return self._finish(pin, self._download(pin, wanted, candidate.url), owned=True)
            except (Absent, MismatchError, NoAnswer) as error:
                refused.append(error)
                if isinstance(error, MismatchError):
                    self.progress.say(f"refused, trying elsewhere: {error.message}")
        wrong = [error for error in refused if isinstance(error, MismatchError)]
        if wrong:
            raise VerificationError(
                wrong[0].message,
                "the mirror or a proxy alters or cuts files: name another with --index or --mirror; nothing was added",
            )
        silent = [error for error in refused if isinstance(error, NoAnswer)]
        if silent:
            # It may well be there: that a place does not answer is what the user has to mend.
            raise silent[0]
        raise MissingError(
            f"{pin.file} (sha256 {pin.sha256}) is not to be had: " + "; ".join(error.message for error in refused),
            "name a place that has it with --index or --mirror, or --import DIR",
        )

    def _download(self, pin: Pin, wanted: Wanted, url: str) -> Path:
        from hyperqwen.pins.transfer import Download

        part = self.workspace.part(pin)
        Download(wanted, self.sources.access(pin), part, self.stop, self.progress.moved).run(url)
        home = self.workspace.home(pin)
        home.mkdir(exist_ok=True)
        if self.workspace.flat:
            with open(part, "rb") as file:
                os.fsync(file.fileno())
        os.replace(part, home / pin.file)
        return home / pin.file

    def _finish(self, pin: Pin, path: Path, *, owned: bool) -> Ready:
        """Give the file the name that its store path needs; a seed is taken out of its .deb."""
        home = self.workspace.home(pin)
        if self.workspace.flat:
            return Ready(pin, path, owned)
        if pin.extract is not None:
            home.mkdir(exist_ok=True)
            return Ready(pin, extract_seed(pin, pin.extract, path, home), owned=True)
        if path.name == pin.file:
            return Ready(pin, path, owned)
        home.mkdir(exist_ok=True)
        target = home / pin.file
        target.unlink(missing_ok=True)
        try:
            os.link(path, target)
        except OSError:
            from hyperqwen.pins.transfer import Wanted, copy_checked

            copy_checked(Wanted(pin.file, pin.size, pin.sha256), path, target, self.stop)
        return Ready(pin, target, owned=True)


def lay_out_seed(extract: Extract, deb: Path, folder: Path) -> Path:
    """Take the program out of `deb` and write it into `folder` as the tree that enters the store; the tree's path."""
    from hyperqwen.pins.deb import member

    target = folder / extract.store_name
    shutil.rmtree(target, ignore_errors=True)
    program = target / extract.path
    program.parent.mkdir(parents=True)
    program.write_bytes(member(deb, extract.member))
    program.chmod(0o755)
    return target


def extract_seed(pin: Pin, extract: Extract, deb: Path, folder: Path) -> Path:
    """`lay_out_seed`, verified; raises VerificationError, and leaves nothing, unless its NAR is the pinned one."""
    target = lay_out_seed(extract, deb, folder)
    actual = nar_sha256(target)
    if actual != extract.nar_sha256:
        shutil.rmtree(target)
        raise VerificationError(
            f"{extract.store_name} of {pin.file}: wrong NAR sha256\n"
            f"    expected {extract.nar_sha256}\n    actual   {actual}",
            "correct extract.nar_sha256 in nix/pins/debs.json (`hyperqwen pins update --group seed` writes it)",
        )
    return target


def add_to_store(store: Store, batch: Sequence[Ready]) -> None:
    """Add verified files and make sure that each got its pin's path; a stray path is deleted again."""
    for recursive in (False, True):
        chosen = [ready for ready in batch if (ready.pin.extract is not None) == recursive]
        if not chosen:
            continue
        added = store.add_fixed([ready.path for ready in chosen], recursive=recursive)
        wanted = [ready.pin.store_path(store.store_dir) for ready in chosen]
        strays = [position for position, path in enumerate(added) if path != wanted[position]]
        for position in strays:
            store.delete(added[position])
        if strays:
            first = strays[0]
            raise VerificationError(
                f"{chosen[first].path} changed while it was added: its store path is {added[first]}\n"
                f"    expected {wanted[first]}",
                "run it again",
            )


def missing_pins(store: Store, pins: Sequence[Pin]) -> list[Pin]:
    """Those of `pins` that the store does not hold, in the given order; one query for all."""
    paths = {pin.file: pin.store_path(store.store_dir) for pin in pins}
    invalid = store.invalid(list(paths.values()))
    return [pin for pin in pins if paths[pin.file] in invalid]


def check_space(missing: Sequence[Pin], workspace: Workspace, store_disk: Path | None, jobs: int) -> None:
    """Raise UnsuitableError unless the files fit: the store gets all, the cache what is on its way."""
    largest = sum(sorted((pin.size for pin in missing), reverse=True)[:jobs])
    total = sum(pin.size for pin in missing)
    arriving = total if workspace.flat else min(total, AHEAD_BYTES + largest)
    arriving = max(arriving - sum(workspace.arrived(pin) for pin in missing), 0)
    needs: dict[int, list[tuple[Path, int]]] = {}
    for place, need in ((workspace.root, arriving), (store_disk, total)):
        if place is not None:
            needs.setdefault(place.stat().st_dev, []).append((place, need))
    for places in needs.values():
        need = sum(size for _, size in places) + _SPARE_BYTES
        free = shutil.disk_usage(places[0][0]).free
        if free < need:
            from hyperqwen.pins.progress import human

            names = " and ".join(str(place) for place, _ in places)
            raise UnsuitableError(
                f"not enough disk space for {names}: {human(need)} needed, {human(free)} free",
                "free space (nix-collect-garbage), set XDG_CACHE_HOME to another disk, or fetch fewer groups",
            )


def summary_error(failed: dict[str, HyperqwenError]) -> HyperqwenError:
    """One error for all files that failed; wrong bytes outrank missing ones."""
    errors = [failed[name] for name in sorted(failed)]
    worst = next((error for error in errors if error.exit_code == UNVERIFIED), errors[0])
    if len(errors) == 1:
        return worst
    lines = [f"{len(errors)} files failed; the others are in place:", *(f"  {error.message}" for error in errors)]
    combined = HyperqwenError("\n".join(lines), worst.fix)
    combined.exit_code = worst.exit_code
    return combined


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/hyperqwen/fetch, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hyperqwen" / "fetch"


def seed(
    pins: Sequence[Pin],
    store: Store,
    workspace: Workspace,
    sources_for: Callable[[threading.Event], Sources],
    *,
    jobs: int,
    err: TextIO,
    quiet: bool = False,
) -> Outcome:
    """Bring what `store` lacks of `pins` and add it; a second run waits, then brings what the first left out."""
    from hyperqwen.pins.progress import Progress

    missing = missing_pins(store, pins)
    if not missing:
        return Outcome(valid=len(pins))
    with workspace.lock(lambda text: print(text, file=err, flush=True)) as waited:
        if waited:
            missing = missing_pins(store, pins)
            if not missing:
                return Outcome(valid=len(pins))
        stop = threading.Event()
        sources = sources_for(stop)
        sources.prepare(missing)
        check_space(missing, workspace, store.disk(), jobs)
        progress = Progress(err, files=len(missing), total=sum(pin.size for pin in missing), quiet=quiet)
        engine = Engine(
            workspace,
            sources,
            lambda batch: add_to_store(store, batch),
            progress,
            stop,
            jobs,
            "adding {} files to the store",
        )
        outcome = _watched(engine, missing, progress)
        outcome.valid = len(pins) - len(missing)
        return outcome


def export(
    pins: Sequence[Pin],
    store: Store | None,
    folder: Path,
    sources_for: Callable[[threading.Event], Sources],
    *,
    jobs: int,
    err: TextIO,
    quiet: bool = False,
) -> Outcome:
    """Write `pins` into `folder`, from the store where it has them, and a SHA256SUMS of all files there.

    Adds nothing to the store. A seed is exported as its .deb, which the store does not hold.
    """
    from hyperqwen.pins.progress import Progress
    from hyperqwen.pins.transfer import MismatchError, Wanted, check_local, copy_checked

    workspace = Workspace(folder, flat=True)
    with workspace.lock(lambda text: print(text, file=err, flush=True)):
        absent = {pin.file for pin in missing_pins(store, pins)} if store is not None else {pin.file for pin in pins}
        progress = Progress(err, files=len(pins), total=sum(pin.size for pin in pins), quiet=quiet)
        valid, wanting = 0, []
        todo = []
        for pin in pins:
            target = folder / pin.file
            if target.is_file():
                try:
                    check_local(Wanted(pin.file, pin.size, pin.sha256), target)
                    valid += 1
                    progress.moved(pin.size, False)
                    progress.file_done()
                    continue
                except MismatchError as error:
                    progress.say(f"replaced: {error.message}")
                    target.unlink()
            todo.append(pin)
        check_space(todo, workspace, None, jobs)
        outcome = Outcome(valid=valid)
        stop = threading.Event()
        for pin in todo:
            if store is None or pin.file in absent or pin.extract is not None:
                wanting.append(pin)
                continue
            copy_checked(
                Wanted(pin.file, pin.size, pin.sha256),
                store.real_path(pin.store_path(store.store_dir)),
                folder / pin.file,
            )
            outcome.added.append(pin.file)
            progress.moved(pin.size)
            progress.file_done()
            progress.show()
        if wanting:
            sources = sources_for(stop)
            sources.prepare(wanting)
            engine = Engine(workspace, sources, lambda batch: None, progress, stop, jobs)
            brought = _watched(engine, wanting, progress)
            outcome.added += brought.added
            outcome.failed = brought.failed
        _write_sums(folder, [pin for pin in pins if pin.file not in outcome.failed])
        return outcome


def _write_sums(folder: Path, pins: Sequence[Pin]) -> None:
    target = folder / "SHA256SUMS"
    lines: dict[str, str] = {}
    if target.is_file():
        for line in target.read_text(encoding="utf-8").splitlines():
            digest, _, name = line.partition("  ")
            if (folder / name).is_file():
                lines[name] = digest
    lines.update({pin.file: pin.sha256 for pin in pins})
    write_atomically(target, "".join(f"{lines[name]}  {name}\n" for name in sorted(lines)))


def write_atomically(target: Path, text: str) -> None:
    """Replace `target` so that a crash leaves the old text or the new, never a mixture."""
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temp, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, target)
    except OSError as error:
        raise UnsuitableError(f"{target} cannot be written: {error.strerror}", "make its folder writable") from None
    finally:
        temp.unlink(missing_ok=True)


def _watched(engine: Engine, pins: Sequence[Pin], progress: ProgressSink) -> Outcome:
    try:
        outcome = engine.run(pins)
        progress.show(now=True)
        return outcome
    finally:
        close = getattr(progress, "close", None)
        if close is not None:
            close()


def build_parser(prog: str = "hyperqwen fetch") -> argparse.ArgumentParser:
    """The command line; `hyperqwen fetch` of the full environment takes the same."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Bring the pinned files that the Nix store lacks; verified by size and sha256, resumable.",
        epilog="groups:\n" + "\n".join(f"  {name:<22}{what}" for name, what in GROUPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="groups to bring (default: all)")
    parser.add_argument("--pin", nargs="+", action="extend", default=[], metavar="NAME", help="only these packages")
    parser.add_argument(
        "--file",
        "--files",
        nargs="+",
        action="extend",
        default=[],
        dest="files",
        metavar="FILE",
        help="only these files or store paths; - reads names from stdin",
    )
    parser.add_argument("--check", action="store_true", help="only list what is missing; exit 4 if anything is")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the files into DIR for a machine without a network; adds nothing to the store",
    )
    parser.add_argument(
        "--import", type=Path, dest="import_dir", metavar="DIR", help="take the files from DIR, no network"
    )
    parser.add_argument("--mirror", metavar="URL", help="Debian mirror (the folder with pool/) in place of apt's")
    parser.add_argument("--index", metavar="URL", help="Python package index in place of pip's")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="parallel downloads, 1 to 32 (default 4)")
    parser.add_argument("--store", metavar="URL", help="the Nix store to seed, as nix-store --store takes it")
    parser.add_argument("--pins", type=Path, metavar="DIR", help="the folder with wheels.json and debs.json")
    parser.add_argument("--json", action="store_true", dest="as_json", help="the outcome as JSON on stdout")
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress on stderr")
    return parser


def _chosen(options: argparse.Namespace, pins: PinSet, stdin: TextIO) -> list[Pin]:
    names: list[str] = []
    for name in options.files:
        names += stdin.read().split() if name == "-" else [name]
    named = {pin.file: pin for pin in [*pins.named(options.pin), *pins.files(names)]}
    if options.files or options.pin:
        if options.groups:
            raise BadInputError("groups and --pin or --files together", "name either groups or single files")
        return list(named.values())
    return pins.in_groups(options.groups)


def _validate(options: argparse.Namespace) -> None:
    modes = [
        name
        for name, value in (("--check", options.check), ("--export", options.export), ("--import", options.import_dir))
        if value
    ]
    if len(modes) > 1:
        raise BadInputError(f"{' and '.join(modes)} together", "use one of them")
    if not 1 <= options.jobs <= 32:
        raise BadInputError(f"--jobs is {options.jobs}", "use 1 to 32")
    if options.import_dir is not None and not options.import_dir.is_dir():
        raise BadInputError(f"--import: {options.import_dir} is not a folder", "name the folder that --export wrote")
    if options.export is not None and options.export.exists() and not options.export.is_dir():
        raise BadInputError(f"--export: {options.export} is not a folder", "name a new or existing folder")


def _report_check(missing: Sequence[Pin], total: int, as_json: bool, out: TextIO, err: TextIO) -> int:
    from hyperqwen.pins.progress import human

    size = sum(pin.size for pin in missing)
    if as_json:
        rows = [
            {"file": pin.store_name, "pin": pin.name, "size": pin.size, "groups": list(pin.groups)} for pin in missing
        ]
        json.dump({"pins": total, "missing": rows, "missing_bytes": size}, out, indent=1)
        out.write("\n")
    else:
        for pin in missing:
            print(f"{pin.store_name}\t{pin.size}\t{','.join(pin.groups)}", file=out)
    if missing:
        print(f"{len(missing)} of {total} pins are missing ({human(size)})", file=err)
        return NOT_FOUND
    print(f"all {total} pins are in the store", file=err)
    return OK


def _report(
    outcome: Outcome, pins: Sequence[Pin], where: str, options: argparse.Namespace, out: TextIO, err: TextIO
) -> None:
    from hyperqwen.pins.progress import human

    sizes = {pin.store_name: pin.size for pin in pins}
    sizes.update({pin.file: pin.size for pin in pins})
    size = sum(sizes[name] for name in outcome.added)
    if options.as_json:
        failed = {name: error.message for name, error in sorted(outcome.failed.items())}
        json.dump(
            {"already": outcome.valid, "added": sorted(outcome.added), "added_bytes": size, "failed": failed},
            out,
            indent=1,
        )
        out.write("\n")
    if not options.quiet:
        if outcome.added:
            print(f"{len(outcome.added)} files ({human(size)}) added to {where}, {outcome.valid} were there", file=err)
        elif not outcome.failed:
            print(f"all {outcome.valid} files are in {where}", file=err)


def run(
    argv: Sequence[str],
    *,
    store: Store | None = None,
    stdin: TextIO | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """The command; returns its exit code or raises HyperqwenError. `store` replaces the Nix store (tests)."""
    stdin, out, err = stdin or sys.stdin, out or sys.stdout, err or sys.stderr
    options = build_parser().parse_args(argv)
    _validate(options)
    pins = load(pins_dir(options.pins))
    chosen = _chosen(options, pins, stdin)
    target: Store | None = store or NixStore(options.store)

    def host(stop: threading.Event) -> Sources:
        return HostSources(index=options.index, mirror=options.mirror, stop=stop)

    if options.export is not None:
        # A machine with a network but without Nix can export as well.
        usable = None if isinstance(target, NixStore) and not target.available else target
        outcome = export(chosen, usable, options.export, host, jobs=options.jobs, err=err, quiet=options.quiet)
        _report(outcome, chosen, str(options.export), options, out, err)
    else:
        assert target is not None
        if options.check:
            return _report_check(missing_pins(target, chosen), len(chosen), options.as_json, out, err)
        folder = options.import_dir

        def sources_for(stop: threading.Event) -> Sources:
            return host(stop) if folder is None else DirSource(folder)

        outcome = seed(
            chosen, target, Workspace(cache_dir()), sources_for, jobs=options.jobs, err=err, quiet=options.quiet
        )
        _report(outcome, chosen, "the store", options, out, err)
    if outcome.failed:
        raise summary_error(outcome.failed)
    return OK


class _Terminated(KeyboardInterrupt):
    """SIGTERM, ended the same way as ctrl-C."""


def _on_terminate(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: errors as one message on stderr, 130 after ctrl-C, 143 after SIGTERM."""
    previous = signal.signal(signal.SIGTERM, _on_terminate)
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except HyperqwenError as error:
        print(f"hyperqwen fetch: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        print("hyperqwen fetch: stopped; what has arrived is kept, run it again to go on", file=sys.stderr, flush=True)
        return 143 if isinstance(stopped, _Terminated) else INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
