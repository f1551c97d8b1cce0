"""The cards of this host as NVML, the driver's management library, tells of them; and whether a plan fits on one.

NVML is loaded from the very file that `driver.find` found, and asked without making a CUDA context: a look at the cards
takes no memory on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from hyperqwen.errors import BadInputError, UnsuitableError
from hyperqwen.runtime.host import Problem

MIB = 1 << 20
_T = TypeVar("_T")

_REASONS = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hardware thermal slowdown",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "application clocks",
    pynvml.nvmlClocksEventReasonDisplayClockSetting: "display clocks",
}


@dataclass(frozen=True)
class Process:
    """A program that has something on a card.

    name: its path as the driver or /proc knows it; None where neither does (another container's, another user's).
    used: bytes on the card; None where the driver does not say (WSL2).
    """

    pid: int
    name: str | None
    used: int | None

    def __str__(self) -> str:
        size = "an unknown amount" if self.used is None else f"{self.used // MIB:,} MiB"
        return f"{self.name or 'a program that cannot be named'} (process {self.pid}): {size}"


@dataclass(frozen=True)
class Gpu:
    """One card. Sizes in bytes, power in watts, clocks in MHz; None where this card or driver does not say.

    index: in the order of the PCI bus, as `nvidia-smi` counts.
    total, free, used: dedicated memory; `reserved` of it is the driver's own and never anyone's.
    capability: of its cores, (8, 6) for an RTX 3090.
    throttled: what holds its clocks down now; nothing for an idle card.
    mig: whether it is cut into instances. display: whether a screen is on it.
    busy: share of the last second in which a kernel ran, 0 to 100.
    processes: who holds memory; under WSL2 the driver lists none.
    """

    index: int
    uuid: str
    name: str
    total: int
    free: int
    used: int
    reserved: int | None
    capability: tuple[int, int]
    power: float | None
    power_limit: float | None
    clock: int | None
    memory_clock: int | None
    throttled: tuple[str, ...] | None
    mig: bool | None
    display: bool | None
    busy: int | None
    processes: tuple[Process, ...]

    def report(self) -> dict[str, object]:
        """Its fields as JSON can carry them."""
        return asdict(self)


class Nvml:
    """An open NVML: `with Nvml(driver.nvml) as nvml: nvml.gpus()`.

    Raises UnsuitableError, with what to do, where the library does not load or does not reach the driver.
    """

    def __init__(self, library: Path) -> None:
        self._path = library
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            raise UnsuitableError(
                f"the driver's management library does not load: {error}",
                "reinstall the NVIDIA driver; `hyperqwen doctor` says what was found",
            ) from None
        # pynvml would ask the loader for the bare name, which finds nothing or the host's own choice.
        if pynvml.nvmlLib is None:
            pynvml.nvmlLib = loaded
        elif pynvml.nvmlLib._handle != loaded._handle:
            raise UnsuitableError(
                f"this process asked another management library before {library}", "start the program again"
            )

    def __enter__(self) -> Nvml:
        self._ask(pynvml.nvmlInit)
        return self

    def __exit__(self, *_: object) -> None:
        self._ask(pynvml.nvmlShutdown)

    def driver_version(self) -> str:
        """The driver's version as its kernel half says it; on WSL2 that of the Windows driver."""
        return str(self._ask(pynvml.nvmlSystemGetDriverVersion))

    def cuda_version(self) -> tuple[int, int]:
        """The newest CUDA that the driver knows."""
        number = int(self._ask(pynvml.nvmlSystemGetCudaDriverVersion_v2))
        return number // 1000, number % 1000 // 10

    def gpus(self) -> tuple[Gpu, ...]:
        """All cards that this process may see, by index."""
        return tuple(self._gpu(index) for index in range(int(self._ask(pynvml.nvmlDeviceGetCount))))

    def again(self, gpu: Gpu) -> Gpu:
        """The same card as it is now; found by UUID, since indices shift when a card drops out."""
        handle = self._ask(lambda: pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
        return replace(self._seen(handle, gpu.index), index=gpu.index)

    def _gpu(self, index: int) -> Gpu:
        return self._seen(self._ask(lambda: pynvml.nvmlDeviceGetHandleByIndex(index)), index)

    def _seen(self, handle: Any, index: int) -> Gpu:
        memory = self._maybe(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2))
        reserved = None if memory is None else int(memory.reserved)
        if memory is None:
            memory = self._ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        major, minor = self._ask(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
        reasons = self._maybe(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        mig = self._maybe(lambda: pynvml.nvmlDeviceGetMigMode(handle))
        display = self._maybe(lambda: pynvml.nvmlDeviceGetDisplayActive(handle))
        rates = self._maybe(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
        return Gpu(
            index=index,
            uuid=str(self._ask(lambda: pynvml.nvmlDeviceGetUUID(handle))),
            name=str(self._ask(lambda: pynvml.nvmlDeviceGetName(handle))),
            total=int(memory.total),
            free=int(memory.free),
            # The first version counts as used what the driver keeps for itself; so does this for both.
            used=int(memory.total) - int(memory.free),
            reserved=reserved,
            capability=(int(major), int(minor)),
            power=_watts(self._maybe(lambda: pynvml.nvmlDeviceGetPowerUsage(handle))),
            power_limit=_watts(self._maybe(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
            clock=self._maybe(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))),
            memory_clock=self._maybe(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM))),
            throttled=None if reasons is None else tuple(text for bit, text in _REASONS.items() if reasons & bit),
            mig=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
            display=None if display is None else display == pynvml.NVML_FEATURE_ENABLED,
            busy=None if rates is None else int(rates.gpu),
            processes=self._processes(handle),
        )

    def _processes(self, handle: Any) -> tuple[Process, ...]:
        found: dict[int, int | None] = {}
        compute = self._maybe(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle))
        graphics = self._maybe(lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle))
        # A program that computes and draws is in both lists, each time with all that it holds.
        for entry in [*(compute or ()), *(graphics or ())]:
            found[int(entry.pid)] = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
        held = [Process(pid, self._name(pid), used) for pid, used in found.items()]
        return tuple(sorted(held, key=lambda entry: (-(entry.used or 0), entry.pid)))

    def _name(self, pid: int) -> str | None:
        said = self._maybe(lambda: pynvml.nvmlSystemGetProcessName(pid))
        if said:
            return str(said)
        try:
            return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip() or None
        except OSError:
            return None

    def _maybe(self, ask: Callable[[], _T]) -> _T | None:
        """The answer, or None to a question that this card or driver has none for."""
        try:
            return ask()
        except _UNANSWERED:
            return None
        except pynvml.NVMLError as error:
            raise self._failed(error) from None

    def _ask(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except pynvml.NVMLError as error:
            raise self._failed(error) from None

    def _failed(self, error: Any) -> UnsuitableError:
        fix = _FIXES.get(error.value, "`nvidia-smi` should say the same; `dmesg` may say why")
        return UnsuitableError(f"the NVIDIA driver does not answer ({self._path}): {error}", fix)


_UNANSWERED = tuple(
    pynvml.NVMLError(number).__class__
    for number in (
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_NOT_FOUND,
        pynvml.NVML_ERROR_NO_DATA,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    )
)
_FIXES = {
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "load the module: sudo nvidia-modprobe -u -c=0",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "reboot: the loaded module is of another driver than the libraries",
    pynvml.NVML_ERROR_NO_PERMISSION: "let this user read and write /dev/nvidiactl and /dev/nvidia0",
    pynvml.NVML_ERROR_GPU_IS_LOST: "reboot: a card fell off the bus (power, seating or heat; `dmesg` has its Xid)",
    pynvml.NVML_ERROR_RESET_REQUIRED: "reboot, or reset the card: sudo nvidia-smi --gpu-reset",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "update the NVIDIA driver: its management library is too old",
}


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else int(milliwatts) / 1000


def select(gpus: Sequence[Gpu], spec: str | None, *, count: int | None = None, field: str = "gpus") -> tuple[Gpu, ...]:
    """The cards that `spec` names: indices and UUIDs (or their beginnings) with commas between, or "all".

    Args:
        spec: None or "" for the first `count` cards (1 if None).
        count: how many there must be, such as the number that the model is split over.
        field: what the user calls `spec`, for messages.

    Raises BadInputError for a card that is not there, named twice, or for a number of cards other than `count`, and
    UnsuitableError where no card is there, or too few, or one that is cut into MIG instances.
    """
    there = "; ".join(f"{gpu.index} = {gpu.name} ({gpu.uuid})" for gpu in gpus) or "none"
    if not gpus:
        raise UnsuitableError(
            "the driver sees no card", "`nvidia-smi -L` should list one; `hyperqwen doctor` says more"
        )
    if not spec or not spec.strip():
        wanted = count or 1
        if wanted > len(gpus):
            raise UnsuitableError(
                f"{_cards(wanted)} wanted and {_cards(len(gpus))} there: {there}",
                f"set parallel.tensor to {len(gpus)} or less, or use a machine with more cards",
            )
        chosen = list(gpus[:wanted])
    elif spec.strip() == "all":
        chosen = list(gpus)
    else:
        chosen = [_one(gpus, part.strip(), spec, field, there) for part in spec.split(",")]
    for position, gpu in enumerate(chosen):
        if gpu in chosen[:position]:
            raise BadInputError(f"{field} is {spec!r}, which names card {gpu.index} twice", "name each card once")
    if count is not None and len(chosen) != count:
        raise BadInputError(
            f"{field} is {spec!r}, which is {_cards(len(chosen))}, and the model is split over {count}",
            f"name {count} of: {there}; or set parallel.tensor to {len(chosen)}",
        )
    for gpu in chosen:
        if gpu.mig:
            raise UnsuitableError(
                f"card {gpu.index} ({gpu.name}) is cut into MIG instances, which hyperqwen does not plan for",
                f"sudo nvidia-smi -i {gpu.index} -mig 0, or name another card",
            )
    return tuple(chosen)


def _one(gpus: Sequence[Gpu], part: str, spec: str, field: str, there: str) -> Gpu:
    if part.isdecimal() and part.isascii():
        matching = [gpu for gpu in gpus if gpu.index == int(part)]
    elif part.startswith("GPU-") and len(part) > len("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(part)]
    elif part.startswith("MIG-"):
        raise BadInputError(
            f"{field} is {spec!r}; {part} is a MIG instance, which hyperqwen does not plan for", "name a whole card"
        )
    else:
        raise BadInputError(
            f"{field} is {spec!r}; {part!r} is neither a card's index nor its UUID", f"the cards are: {there}"
        )
    if not matching:
        raise BadInputError(f"{field} is {spec!r}; there is no card {part}", f"the cards are: {there}")
    if len(matching) > 1:
        raise BadInputError(
            f"{field} is {spec!r}; {part} begins the UUIDs of {len(matching)} cards", f"the cards are: {there}"
        )
    return matching[0]


def shortage(
    gpu: Gpu, planned: int, *, wsl2: bool = False, smaller: str | None = "lower memory.utilization"
) -> Problem | None:
    """What keeps `planned` bytes from fitting into the dedicated memory that is free on `gpu` now, if anything.

    Args:
        smaller: the settings with which the plan fits into what is free; None where none do.

    On Linux the engine would stop with an out-of-memory error; on WSL2 Windows would move the rest to the host's memory
    without a word, and everything would run five to ten times slower.
    """
    if planned <= gpu.free:
        return None
    free = f"{_mib(gpu.free)} of {_mib(gpu.total)} are free"
    what = f"the plan needs {_mib(planned)} of card {gpu.index} ({gpu.name}), and {free}"
    if planned > gpu.total - (gpu.reserved or 0):
        less = smaller or "no pool of any size fits: use a larger card, or a smaller model"
        return Problem("plan-too-large", what, f"{less} (`hyperqwen plan PROFILE --vram` shows the rest)")
    lower = f"or {smaller}" if smaller else "since no pool of any size fits into what is free"
    if wsl2:
        return Problem(
            "gpu-in-use",
            f"{what}; Windows would put the rest into shared memory, 5 to 10 times slower, without an error",
            "close what draws or computes on the card in Windows (Task Manager, Details, column Dedicated GPU memory), "
            f"{lower}",
        )
    holders = "; ".join(str(entry) for entry in gpu.processes) or "the driver does not say by whom"
    return Problem("gpu-in-use", f"{what}; held: {holders}", f"stop those, choose another card, {lower}")


class SpillWatch:
    """Watches one card of WSL2, while the engine runs, for memory of it that Windows moved to the host's.

    Windows' own counter (Task Manager, "Shared GPU memory") is the only direct sign, and WSL2 cannot read it: NVML
    counts dedicated memory only, lists no processes, and an allocation that spills succeeds. Two things show inside:

    1. The engine holds `held` bytes, and the card's dedicated use grew by less since before it started. Windows may
       have moved another program's memory out meanwhile, which hides a spill of that size; and one that closed while
       the engine started looks like one. Hence a tolerance, and `fatal` is never set.
    2. The card is always busy at a fraction of its power: kernels that wait for the bus. A card that computes from its
       own memory is at its limit or near.

    Sees nothing of a spill that was over before the first look and of one smaller than the tolerance.
    """

    TOLERANCE = 512 * MIB
    # `nvidia-smi dmon` of a spilled RTX 4090: SM 100 % at 100 to 200 of 450 W; at work it takes 250 and more.
    BUSY, POWER_SHARE, LOOKS = 95, 0.45, 5

    def __init__(self, before: Gpu) -> None:
        """`before` is the card as it was before the engine started."""
        self._before = before
        self._slow = 0

    def look(self, now: Gpu, held: int) -> Problem | None:
        """What the card says `now` of an engine that holds `held` bytes; ask every few seconds once it serves.

        A `held` that leaves out CUDA's own context hides a spill of another half GiB.
        """
        waits = (
            now.busy is not None
            and now.power is not None
            and now.power_limit is not None
            and now.busy >= self.BUSY
            and now.power <= self.POWER_SHARE * now.power_limit
        )
        self._slow = self._slow + 1 if waits else 0
        fix = "stop the server, free the card in Windows (Task Manager shows who has it), and lower memory.utilization"
        grown = now.used - self._before.used
        if held - grown > self.TOLERANCE:
            return Problem(
                "spill",
                f"the engine holds {_mib(held)} of card {now.index}, and only {_mib(max(0, grown))} came into its own "
                "memory: the rest seems to be in shared memory of Windows",
                fix,
                fatal=False,
            )
        if self._slow >= self.LOOKS:
            return Problem(
                "spill",
                f"card {now.index} is {now.busy} % busy at {now.power:.0f} of {now.power_limit:.0f} W, {self._slow} "
                "looks in a row: it seems to work from shared memory of Windows",
                fix,
                fatal=False,
            )
        return None


def _cards(count: int) -> str:
    return f"{count} card{'s' * (count != 1)}"


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
