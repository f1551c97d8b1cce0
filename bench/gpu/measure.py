#!/usr/bin/env python3
"""Hold a running server against its plan: what `hyperqwen plan` says of memory beside what the card and the log say.

On a box where `box.py open` has run and a server is up:

    bench/gpu/box.py run serve --profile B --verbose 2> serve.log &
    bench/gpu/measure.py --profile B --gpu h200 --log serve.log --out record.json

It also asks for some answers, because memory peaks under load: one request and eight at a time, and a long prompt. With
random weights the speeds are those of drafts that are never accepted. Needs the standard library and nvidia-smi.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
GIB = 1 << 30
_TIMEOUT = 300.0

# Messages of vLLM 0.31.0: gpu_worker, gpu/model_runner, kv_cache_utils, platforms/interface.
_LOG: dict[str, tuple[str, float]] = {
    "weights": (r"Model loading took ([\d.]+) GiB memory", GIB),
    "load_seconds": (r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds", 1),
    "pool": (r"(?:Available KV cache memory: |reserved )([\d.]+) GiB", GIB),
    "pool_tokens": (r"KV cache size: ([\d,]+) tokens", 1),
    "concurrency": (r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", 1),
    "block_tokens": (r"Setting attention block size to ([\d,]+) tokens", 1),
    "graphs": (r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB", GIB),
    "compile_seconds": (r"torch\.compile took ([\d.]+) s in total", 1),
}


def read_log(text: str) -> dict[str, float]:
    """What the engine said of itself, bytes where it is memory; the last word of each counts."""
    found = {name: re.findall(pattern, text) for name, (pattern, _) in _LOG.items()}
    return {name: float(values[-1].replace(",", "")) * _LOG[name][1] for name, values in found.items() if values}


def read_metrics(text: str) -> dict[str, float]:
    """Blocks of the pool, and counters of drafting and of the prefix cache, summed over their labels."""
    blocks = re.search(r'^vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"', text, re.MULTILINE)
    found = {"blocks": float(blocks[1])} if blocks else {}
    for name, value in re.findall(r"^vllm:(\w+_total)(?:\{[^\n]*\})? (\S+)$", text, re.MULTILINE):
        if name.startswith(("spec_decode", "prefix_cache")):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def compare(plan: Mapping[str, Any], log: Mapping[str, float], metrics: Mapping[str, float], peak: int | None) -> Any:
    """Rows of (what, unit, planned, measured); measured is None where nothing said it."""
    budget = plan["budget"]
    figures = {figure["key"]: figure["bytes"] for figure in budget["figures"]}
    pool = budget["pool"]
    weights = sum(size for key, size in figures.items() if key.startswith("weights."))
    return [
        ("weights", "MiB", weights / MIB, _scaled(log.get("weights"))),
        ("CUDA graphs", "MiB", figures.get("graphs", 0) / MIB, _scaled(log.get("graphs"))),
        ("pool", "MiB", pool["bytes"] / MIB, _scaled(log.get("pool"))),
        ("block", "tokens", pool["block_tokens"], log.get("block_tokens")),
        # vLLM counts the null block, which holds nothing, among them.
        ("blocks", "", pool["blocks"], metrics.get("blocks")),
        ("pool", "tokens", pool["tokens"], log.get("pool_tokens")),
        ("requests of full length", "", pool["concurrency"], log.get("concurrency")),
        ("everything, at its peak", "MiB", sum(figures.values()) / MIB, _scaled(peak)),
    ]


def table(rows: Sequence[tuple[str, str, float, float | None]]) -> str:
    """The rows as text, with the difference in per cent of what was planned."""
    lines = [f"{'':32}{'planned':>14}{'measured':>14}{'difference':>12}"]
    for what, unit, planned, measured in rows:
        name = f"{what}, {unit}" if unit else what
        said = "not said" if measured is None else f"{measured:,.2f}"
        off = "" if measured is None or not planned else f"{(measured / planned - 1) * 100:+.1f} %"
        lines.append(f"{name:32}{planned:14,.2f}{said:>14}{off:>12}")
    return "\n".join(lines)


def _scaled(size: float | None) -> float | None:
    return None if size is None else size / MIB


class Card:
    """The memory that nvidia-smi says is in use, looked at ten times a second until it is closed."""

    def __init__(self) -> None:
        self.first = self.peak = self.used()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def used() -> int:
        """Bytes in use on the first card."""
        command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * MIB

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.peak = max(self.peak, self.used())

    def close(self) -> None:
        self._done.set()
        self._thread.join()


def complete(url: str, prompt: Sequence[int], tokens: int, temperature: float) -> dict[str, float]:
    """One streamed completion of exactly `tokens` tokens: seconds to the first token and to the end."""
    body = {
        "model": json.loads(_get(f"{url}/v1/models"))["data"][0]["id"],
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    start, first, usage = time.monotonic(), None, {}
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[len(b"data: ") :])
            if data.get("choices") and first is None:
                first = time.monotonic()
            usage = data.get("usage") or usage
    end = time.monotonic()
    if usage.get("completion_tokens") != tokens or first is None:
        raise RuntimeError(f"asked for {tokens} tokens, got {usage}")
    return {"prompt": len(prompt), "tokens": tokens, "first_seconds": first - start, "seconds": end - start}


def load(url: str) -> list[dict[str, Any]]:
    """The rounds: how many at a time, how long, and how fast they were answered together."""
    draw = random.Random(1)
    rounds = []
    for at_once, length, tokens, temperature in (
        (1, 128, 32, 0.0),  # the first answers compile what no start has compiled
        (1, 128, 256, 0.0),
        (1, 128, 256, 1.0),
        (8, 128, 256, 0.0),
        (1, 16_384, 64, 0.0),
    ):
        prompts = [[draw.randrange(1000, 240_000) for _ in range(length)] for _ in range(at_once)]
        start = time.monotonic()
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(
                pool.map(lambda prompt: complete(url, prompt, tokens, temperature), prompts)  # noqa: B023
            )
        seconds = time.monotonic() - start
        rounds.append(
            {
                "at_once": at_once,
                "prompt_tokens": length,
                "temperature": temperature,
                "tokens_per_second": sum(answer["tokens"] for answer in answers) / seconds,
                "first_seconds": max(answer["first_seconds"] for answer in answers),
            }
        )
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    return rounds


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
        return str(answer.read().decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 where the server does not answer."""
    parser = argparse.ArgumentParser(prog="bench/gpu/measure.py", description="A running server against its plan.")
    parser.add_argument("--profile", default="B", help="the profile that is served")
    parser.add_argument("--gpu", default="h200", help="the card, as `hyperqwen plan` knows it")
    parser.add_argument("--log", type=Path, required=True, help="the engine's log")
    parser.add_argument("--out", type=Path, required=True, help="JSON record to write")
    parser.add_argument("--url", default="http://127.0.0.1:18020", help="where the server listens")
    options = parser.parse_args(arguments)
    command = [sys.executable, str(HERE / "box.py"), "run", "plan", options.profile, "--gpu", options.gpu, "--json"]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    card = Card()
    try:
        rounds = load(options.url)
        metrics = read_metrics(_get(f"{options.url}/metrics"))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"measure: {options.url}: {error}", file=sys.stderr)
        return 1
    finally:
        card.close()
    log = read_log(options.log.read_text(encoding="utf-8", errors="replace"))
    rows = compare(plan, log, metrics, card.peak)
    record = {
        "profile": options.profile,
        "gpu": options.gpu,
        "used_before_load_bytes": card.first,
        "used_at_peak_bytes": card.peak,
        "log": log,
        "metrics": metrics,
        "rounds": rounds,
        "rows": [dict(zip(("what", "unit", "planned", "measured"), row, strict=True)) for row in rows],
        "plan": plan["budget"],
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(table(rows))
    print(f"in use before the requests: {card.first / MIB:,.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
