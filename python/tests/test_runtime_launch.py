from __future__ import annotations

import io
import json
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hyperqwen.errors import MissingError, UnsuitableError
from hyperqwen.runtime import ports, records
from hyperqwen.runtime.engine import Engine, EngineError
from hyperqwen.runtime.folders import Folders
from hyperqwen.runtime.launch import Launch, Limit, Progress, Stopped, example, stop_signals, url
from hyperqwen.runtime.measured import Measured
from hyperqwen.runtime.notify import Notifier
from hyperqwen.runtime.startup import Event
from tests import fake_engine


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_where_this_machine_asks(host: str, expected: str) -> None:
    assert url(host, 80) == expected


def test_the_example_is_one_command_of_a_shell() -> None:
    words = shlex.split(example("http://h:1", "it's", "$KEY"))
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert "Authorization: Bearer $KEY" in words
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization" not in example("http://h:1", "m", None)


@contextmanager
def launched(folder: Path, log: bool = True, **behaviour: Any) -> Iterator[Launch]:
    (folder / "log").mkdir(exist_ok=True)
    with ports.claim("127.0.0.1", 0) as listener:
        yield Launch(
            command="serve",
            profile="B",
            model="nano",
            python=fake_engine.write(folder, **behaviour),
            flags=["--model", "m"],
            environment={"ONLY": "this"},
            host="127.0.0.1",
            port=listener.getsockname()[1],
            listener=listener,
            places=Folders(folder, folder / "log"),
            log=folder / "log/serve.log" if log else None,
            limit=Limit(time.monotonic(), 20, "--server-start-seconds"),
            notifier=Notifier({}),
        )


def test_a_run_is_on_record_and_ready_only_after_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def look(_engine: Any, _client: Any, _console: Any) -> None:
        seen.extend(records.found(tmp_path / "log"))
        raise Stopped(15)

    with launched(
        tmp_path, says=["GPU KV cache size: 69,758 tokens, Maximum concurrency for 65,536 tokens per request: 1.06x"]
    ) as launch:
        launch.every.append(look)
        with pytest.raises(Stopped):
            launch.serve()

    (record,) = seen
    assert (record.ready, record.port, record.url) == (True, launch.port, f"http://127.0.0.1:{launch.port}/v1")
    assert record.engine_pid == fake_engine.seen(tmp_path)["pid"] and record.log == tmp_path / "log/serve.log"
    assert len(fake_engine.requests(tmp_path)) == 1
    assert record.engine_pid is not None and not fake_engine.alive(record.engine_pid), "the engine outlived the launch"
    assert records.found(tmp_path / "log") == []
    said = capsys.readouterr()
    assert said.out.startswith("nano answers at http://127.0.0.1:")
    assert "pool: 69,758 tokens, 1.06 requests of 65,536" in said.err


def test_the_log_of_the_run_before_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        with launched(tmp_path, die_in="load") as launch, pytest.raises(EngineError, match="no such tensor"):
            launch.serve()
    assert "no such tensor" in (tmp_path / "log/serve.log").read_text()
    assert "no such tensor" in (tmp_path / "log/serve.log.1").read_text()


def test_requests_get_their_time_at_the_end_and_not_more(tmp_path: Path) -> None:
    def stopped(**behaviour: Any) -> float:
        with launched(tmp_path, **behaviour) as launch:
            launch.drain = 5
            launch.every.append(_stop)
            with pytest.raises(Stopped):
                launch.serve()
            return time.monotonic() - ended[-1]

    ended: list[float] = []

    def _stop(_engine: Any, _client: Any, _console: Any) -> None:
        ended.append(time.monotonic())
        raise Stopped(15)

    assert 1 <= stopped(lingers=1) < 4
    assert "engine: finishing" in (tmp_path / "log/serve.log").read_text()


def test_a_record_says_that_the_server_is_stopping(tmp_path: Path) -> None:
    seen = []

    def stop(_engine: Any, _client: Any, _console: Any) -> None:
        raise Stopped(15)

    with launched(tmp_path, lingers=1) as launch:
        launch.drain = 5
        launch.every.append(stop)
        launch.notifier = _Watched(lambda: seen.extend(records.found(tmp_path / "log")))
        with pytest.raises(Stopped):
            launch.serve()
    assert [(record.ready, record.stopping) for record in seen] == [(True, False), (True, True)]
    assert records.found(tmp_path / "log") == []


class _Watched(Notifier):
    """Calls `look` when the service manager would hear that the server is ready, and that it stops."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__({})
        self._look = look

    def ready(self, status: str) -> None:
        self._look()

    def stopping(self, status: str) -> None:
        self._look()


def test_what_is_told_of_a_ready_server_does_not_end_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    looks = []

    def fail(_console: Console, seen: Measured) -> None:
        assert seen.weights_bytes == round(1.5 * (1 << 30))
        raise MissingError("the log is gone", "look for it")

    def stop(_engine: Any, _client: Any, _console: Any) -> None:
        looks.append(True)
        raise Stopped(15)

    with launched(tmp_path, says=["Model loading took 1.5 GiB memory and 2.000000 seconds"]) as launch:
        launch.once_ready = fail
        launch.every.append(stop)
        with pytest.raises(Stopped):
            launch.serve()
    said = capfd.readouterr()
    assert looks and said.err.count("hyperqwen: the log is gone; the server runs on") == 1


def test_a_server_that_must_not_serve_is_never_announced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse(seen: Measured) -> None:
        raise UnsuitableError(f"{seen.pool_bytes} bytes are too many", "take fewer")

    with launched(tmp_path, says=["Available KV cache memory: 2.0 GiB"]) as launch:
        launch.before_ready = refuse
        with pytest.raises(UnsuitableError, match=f"{2 << 30} bytes are too many"):
            launch.serve()
    assert not launch.ready and capfd.readouterr().out == ""
    assert not fake_engine.alive(fake_engine.seen(tmp_path)["pid"])


def test_a_signal_while_the_engine_is_started_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []
    begin = Engine.start

    def interrupted(*arguments: Any, **options: Any) -> Engine:
        engines.append(begin(*arguments, **options))
        signal.raise_signal(signal.SIGTERM)
        return engines[0]

    monkeypatch.setattr(Engine, "start", interrupted)
    with launched(tmp_path) as launch, pytest.raises(Stopped), stop_signals():
        launch.serve()
    assert not fake_engine.alive(engines[0].pid)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_signals():
            signal.raise_signal(number)
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_engine_that_is_too_slow_says_which_knob(tmp_path: Path) -> None:
    with launched(tmp_path, hang_in="load") as launch:
        launch.limit = Limit(time.monotonic(), 1, "--server-start-seconds")
        with pytest.raises(EngineError, match=r"was not ready in 1 s \(--server-start-seconds\)") as raised:
            launch.serve()
    assert "--server-start-seconds 2" in str(raised.value)


def test_without_a_terminal_a_phase_has_a_line_for_its_begin_and_its_end() -> None:
    said = io.StringIO()
    progress = Progress(Console(file=said), time.monotonic(), Notifier({}))
    with progress.shown():
        progress.begin("load")
        for number in range(1, 9):
            progress.event(Event("weights", f"loading weights: {number} of 8"))
        progress.event(Event("weights", "weights: 14.26 GiB in 20 s", final=True))
    lines = [line.split("s  ", 1)[1] for line in said.getvalue().splitlines()]
    assert lines == ["loading the model", "loading weights: 1 of 8", "weights: 14.26 GiB in 20 s"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bracket_in_the_engines_words_is_no_markup(terminal: bool) -> None:
    said = io.StringIO()
    progress = Progress(Console(file=said, force_terminal=terminal, width=80), time.monotonic(), Notifier({}))
    with progress.shown():
        progress.event(Event("compile", "compiling [/red] a part"))
        time.sleep(0.2)
        progress.event(Event("compile", "compiled [bold] in 3 s", final=True))
    assert "compiling [/red] a part" in said.getvalue() and "compiled [bold] in 3 s" in said.getvalue()


def test_on_a_terminal_a_phase_leaves_its_result_alone() -> None:
    said = io.StringIO()
    progress = Progress(Console(file=said, force_terminal=True, width=80), time.monotonic(), Notifier({}))
    with progress.shown():
        progress.event(Event("graphs", "capturing CUDA graphs: 3 of 5"))
        progress.event(Event("graphs", "CUDA graphs: 1.32 GiB in 7 s", final=True))
    assert said.getvalue().count("CUDA graphs: 1.32 GiB in 7 s\x1b[0m\n") + said.getvalue().count("in 7 s\n") >= 1
    assert "\n  0.0 s  capturing" not in said.getvalue()
