"""bench/gpu/measure.py: what a log and metrics say is read right, and set beside the plan. Measuring needs a GPU."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hyperqwen.cli import main

_spec = importlib.util.spec_from_file_location(
    "gpu_measure", Path(__file__).resolve().parents[2] / "bench/gpu/measure.py"
)
assert _spec is not None and _spec.loader is not None
measure: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(measure)

LOG = """\
INFO [interface.py:990] Setting attention block size to 448 tokens to ensure that attention page
INFO [model_runner.py:408] Model loading took 14.75 GiB memory and 41.200000 seconds
INFO [gpu_worker.py:600] Initial free memory 138.4 GiB, reserved 5.2 GiB memory for KV Cache as
INFO [kv_cache_utils.py:2474] GPU KV cache size: 68,605 tokens, Maximum concurrency for 65,536 tokens per request: 1.05x
INFO [model_runner.py:1088] Graph capturing finished in 9 secs, took 0.50 GiB
INFO [model_runner.py:1088] Graph capturing finished in 9 secs, took 0.34 GiB
"""
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:cache_config_info{block_size="448",engine="0",num_gpu_blocks="380",sliding_window="None"} 1.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:prefix_cache_hits_total{engine="0"} 896.0
vllm:generation_tokens_total{engine="0"} 99.0
"""


def test_the_metrics() -> None:
    assert measure.read_metrics(METRICS) == {
        "blocks": 380,
        "spec_decode_num_drafts_total": 30,
        "spec_decode_num_accepted_tokens_per_pos_total": 6,
        "prefix_cache_hits_total": 896,
    }


def test_beside_the_plan(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    arguments = ["plan", "B", "--gpu", "h200", "--measured", str(log), "--json"]
    plan = json.loads(CliRunner().invoke(main, arguments).stdout)

    rows = measure.rows(plan, measure.read_metrics(METRICS), 22 * 2**30, 24 * 2**30)

    found = {(row["what"], row["unit"]): (row["predicted"], row["measured"]) for row in rows}
    assert found["Attention block", "tokens"] == (448, 448)
    assert found["Blocks of the pool", "blocks"] == (380, 380)
    assert found["KV cache pool", "tokens"] == (68605, 68605)
    planned, came = found["Weights", "bytes"]
    assert planned == pytest.approx(came, rel=0.01)
    assert found["In use at the peak", "bytes"][1] == 24 * 2**30
    assert "KV cache pool" in measure.table(rows)
    assert f"{'Blocks of the pool':56}{'380':>12}{'-':>12} blocks" in measure.table(measure.rows(plan, {}, 1, 1))


class _Server(BaseHTTPRequestHandler):
    """As much of the API as a completion needs."""

    tokens = 5
    asked: dict[str, Any]

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        type(self).asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        events = [{"choices": [{"text": "x"}]}, {"choices": [], "usage": {"completion_tokens": self.tokens}}]
        self._answer(b": keep-alive\n\n" + b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: a test's output is its failures."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_completion_is_timed_and_counted(url: str) -> None:
    answer = measure.complete(url, [1, 2, 3], 5, 0.5)
    assert (answer["prompt"], answer["tokens"]) == (3, 5)
    assert 0 < answer["first_seconds"] <= answer["seconds"]
    assert (_Server.asked["prompt"], _Server.asked["temperature"], _Server.asked["ignore_eos"]) == (
        [1, 2, 3],
        0.5,
        True,
    )
    with pytest.raises(RuntimeError, match="asked for 6 tokens"):
        measure.complete(url, [1], 6, 0.0)
