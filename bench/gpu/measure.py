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
import contextlib
import importlib.metadata
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
_TIMEOUT = 300.0


def read_metrics(text: str) -> dict[str, float]:
    """Blocks of the pool, and counters of drafting and of the prefix cache, summed over their labels."""
    blocks = re.search(r'^vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"', text, re.MULTILINE)
    found = {"blocks": float(blocks[1])} if blocks else {}
    for name, value in re.findall(r"^vllm:(\w+_total)(?:\{[^\n]*\})? (\S+)$", text, re.MULTILINE):
        if name.startswith(("spec_decode", "prefix_cache")):
            found[name] = found.get(name, 0.0) + float(value)
    return found


def rows(plan: Mapping[str, Any], metrics: Mapping[str, float], used: int, peak: int) -> list[dict[str, Any]]:
    """What the plan has beside the log, and below it blocks and the card's memory before and under load."""
    pool, figures = plan["budget"]["pool"], plan["budget"]["figures"]
    kept = sum(figure["bytes"] for figure in figures if figure["key"] != "unprofiled")
    return [
        *plan["measured"],
        # vLLM counts the null block, which holds nothing, among them.
        _row("Blocks of the pool", "blocks", pool["blocks"], metrics.get("blocks")),
        _row("In use once it serves", "bytes", kept, used),
        _row("In use at the peak", "bytes", sum(figure["bytes"] for figure in figures), peak),
    ]


def _row(what: str, unit: str, predicted: float, measured: float | None) -> dict[str, Any]:
    ratio = None if measured is None or not predicted else round(measured / predicted, 4)
    return {"what": what, "unit": unit, "predicted": predicted, "measured": measured, "ratio": ratio}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, with the difference in per cent of what was planned."""
    lines = [f"{'':56}{'planned':>12}{'measured':>12}"]
    for row in found:
        scale, unit = (MIB, "MiB") if row["unit"] == "bytes" else (1, row["unit"])
        planned, came = (
            "-" if value is None else f"{value / scale:,.2f}" if unit == "requests" else f"{value / scale:,.0f}"
            for value in (row["predicted"], row["measured"])
        )
        apart = "" if row["ratio"] is None else f"{(row['ratio'] - 1) * 100:+.1f} %"
        lines.append(f"{row['what']:56}{planned:>12}{came:>12} {unit:9}{apart:>9}".rstrip())
    return "\n".join(lines)


def machine() -> dict[str, str]:
    """The card, its driver and its limits, and what was run on it."""
    fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory")
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    values = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    found = dict(zip(fields, values, strict=True))
    for package in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


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
    parser.add_argument("--commit", default="unknown", help="what is run, for the record: git rev-parse HEAD")
    parser.add_argument("--url", default="http://127.0.0.1:18020", help="where the server listens")
    options = parser.parse_args(arguments)
    card = Card()
    try:
        rounds = load(options.url)
        metrics = read_metrics(_get(f"{options.url}/metrics"))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"measure: {options.url}: {error}", file=sys.stderr)
        return 1
    finally:
        card.close()
    command = [sys.executable, str(HERE / "box.py"), "run", "plan", options.profile, "--gpu", options.gpu, "--json"]
    command += ["--measured", str(options.log)]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    found = rows(plan, metrics, card.first, card.peak)
    record = {
        "what": f"profile {options.profile} with random weights beside its plan (bench/gpu)",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": options.commit,
        "machine": machine(),
        "profile": options.profile,
        "argv": plan["argv"],
        "rows": found,
        "rounds": rounds,
        "metrics": metrics,
        "plan": plan["budget"],
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
