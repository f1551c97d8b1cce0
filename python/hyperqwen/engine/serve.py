"""vLLM's OpenAI server as the launcher starts it: `python -m hyperqwen.engine.serve FLAGS…`.

Takes the flags of `vllm serve` (`--model` included) and runs the same application on the same engine, with three
differences: it takes a socket that is already bound and tells its stages, SIGTERM drains (`drain`), and /metrics has
the counters of `progress`.

On a CPU the engine process is forked instead of spawned. `vllm serve` imports vLLM and torch anew in the engine
process, and a third time where it inspects the model's class. There, nothing keeps the engine from being a fork of a
server that has imported everything: no CUDA context exists and no thread runs yet. That is a start in about 12 s of
processor time instead of about 30 s, and the pages that both processes share are not paid for twice.

Three environment variables, all optional and all set by `hyperqwen.runtime.engine`:

HYPERQWEN_LISTEN_FD
    Number of an inherited listening socket, so that a port in use is found out before anything is started.
HYPERQWEN_STATUS_FD
    Number of an inherited pipe that gets one line for each stage that begins: `import`, `configure`, `load`, `serve`.
HYPERQWEN_LAUNCHER_PID
    Number of the process that started this one, and whose end is this one's, too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

STAGES = ("import", "configure", "load", "serve")
# A process of an engine that hangs says where it does. Here and not in `main`: what vLLM spawns imports this file, too.
faulthandler.register(signal.SIGUSR1, all_threads=True)
_PR_SET_PDEATHSIG = 1


class Status:
    """Tells the launcher which stage begins; silent where nobody listens."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def begin(self, stage: str) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, f"{stage}\n".encode())
        except BrokenPipeError:
            self._fd = None

    def close(self) -> None:
        """Close the pipe; used by the engine process, which must not hold the launcher's end open."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def inherited_fd(environ: Mapping[str, str], name: str) -> int | None:
    """The descriptor number in variable `name`, or None when it is unset.

    Raises ValueError that names the variable when its value is not the number of an open descriptor.
    """
    text = environ.get(name)
    if text is None:
        return None
    try:
        fd = int(text)
        os.fstat(fd)
    except (ValueError, OSError):
        raise ValueError(f"{name} is {text!r}, must be the number of an open file descriptor") from None
    return fd


def architectures(model: Path) -> list[str]:
    """The model classes that `model`/config.json names; none for a model that is not a local folder."""
    try:
        named = json.loads((model / "config.json").read_text()).get("architectures")
    except FileNotFoundError:
        return []
    return [name for name in named or [] if isinstance(name, str)]


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Ask the kernel for `signum` when the parent ends, however it ends, so that no engine is left behind.

    The kernel tells nothing of one that has ended before: where `parent` is given and somebody else has taken its
    place, the signal comes at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


def launcher(environ: Mapping[str, str]) -> int | None:
    """The process that HYPERQWEN_LAUNCHER_PID names; raises ValueError for what is no number of one."""
    text = environ.get("HYPERQWEN_LAUNCHER_PID")
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"HYPERQWEN_LAUNCHER_PID is {text!r}, must be the number of a process")
    return int(text)


def _register_in_process(model: Path) -> None:
    """Let vLLM inspect the model's class here; it would start a second interpreter to keep CUDA out of this one."""
    from vllm.model_executor.models import ModelRegistry

    for name in architectures(model):
        entry = ModelRegistry.models.get(name)
        if entry is not None:
            ModelRegistry.register_model(name, entry.load_model_cls())


def _prepare_fork() -> None:
    """Import what the engine process needs, then let it be forked from here."""
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # Pages that the collector never visits again stay shared between the two processes.
    gc.freeze()
    # The CPU platform writes "spawn" here while the configuration is made; vLLM reads it when it starts the engine.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


async def _serve(args: Any, listener: socket.socket | None, status: Status) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve
    from vllm.entrypoints.launchers.launcher import setup_server, validate_api_server_args
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.system_utils import decorate_logs, set_ulimit
    from vllm.v1.engine.async_llm import AsyncLLM

    from hyperqwen.engine import drain, progress

    decorate_logs("APIServer", skip_if_decorated=True)
    # Until uvicorn runs, SIGTERM must still unwind what has been set up.
    signal.signal(signal.SIGTERM, _interrupt)

    status.begin("configure")
    if listener is None:
        address, listener = setup_server(args, reuse_port=False)
    else:
        validate_api_server_args(args)
        set_ulimit()
        address = f"http://{args.host}:{args.port}"
    cpu = current_platform.is_cpu()
    if cpu:
        _register_in_process(Path(args.model))
    else:
        # As `vllm serve` does: a fork of a process that has touched CUDA cannot use it.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if cpu:
        _prepare_fork()

    parent = os.getpid()

    def note_parent() -> None:
        nonlocal parent
        parent = os.getpid()

    def in_engine() -> None:
        die_with_parent(signal.SIGKILL, parent)
        # The port must be free as soon as the server is gone.
        listener.close()
        status.close()

    os.register_at_fork(before=note_parent, after_in_child=in_engine)
    status.begin("load")
    client = AsyncLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        aggregate_engine_logging=engine_args.aggregate_engine_logging,
        disable_log_stats=engine_args.disable_log_stats,
        stat_loggers=[progress.step_logger()],
    )
    progress.count_unanswered(client.get_num_unfinished_requests)
    args.middleware = [*args.middleware, drain.PATH]
    try:
        await client.reset_mm_cache()
        status.begin("serve")
        stopping = await build_and_serve(client, address, listener, args)
    finally:
        client.shutdown(timeout=config.shutdown_timeout)
    try:
        await stopping
    finally:
        listener.close()


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    status = Status(inherited_fd(os.environ, "HYPERQWEN_STATUS_FD"))
    listen_fd = inherited_fd(os.environ, "HYPERQWEN_LISTEN_FD")
    listener = None if listen_fd is None else socket.socket(fileno=listen_fd)
    if listener is not None:
        die_with_parent(signal.SIGTERM, launcher(os.environ))

    status.begin("import")
    # The imports make a million objects that live on: the collector would walk them many times over and free none.
    gc.disable()
    from vllm.entrypoints.launchers.api_server import entry  # noqa: F401
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    gc.enable()
    parser = make_arg_parser(FlexibleArgumentParser(prog="hyperqwen.engine.serve"))
    args = parser.parse_args()
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)

    import uvloop

    uvloop.run(_serve(args, listener, status))


if __name__ == "__main__":
    main()
