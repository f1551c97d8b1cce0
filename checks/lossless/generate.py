"""Greedy answers of one engine configuration, in a process of its own: vLLM is not made for a second engine in one.

    python checks/lossless/generate.py MODEL OUT ENGINE_ARGUMENTS(JSON) PROMPTS(JSON: lists of token ids) TOKENS

Writes {"tokens": [[...], ...], "drafted": int, "accepted": int} to OUT.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def generate(
    model: Path, out: Path, arguments: Mapping[str, Any], prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """Run this script in a process of its own and return what it wrote; a failure shows the end of its log."""
    result = subprocess.run(
        [sys.executable, __file__, str(model), str(out), json.dumps(arguments), json.dumps(prompts), str(tokens)],
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    answers: dict[str, Any] = json.loads(out.read_text())
    return answers


def expected(successors: Sequence[int], prompt: Sequence[int], tokens: int) -> list[int]:
    """What nano's own table (`next` in nano.json) says after `prompt`."""
    answer, token = [], prompt[-1]
    for _ in range(tokens):
        token = successors[token]
        answer.append(token)
    return answer


def main() -> None:
    model, out, arguments, prompts, tokens = sys.argv[1:]
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        **json.loads(arguments),
    }
    engine = LLM(model=model, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=int(tokens), ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in json.loads(prompts)], sampling, use_tqdm=False)
    counters = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    with open(out, "w") as file:
        json.dump(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "drafted": counters.get("vllm:spec_decode_num_draft_tokens", 0),
                "accepted": counters.get("vllm:spec_decode_num_accepted_tokens", 0),
                "hits": counters.get("vllm:prefix_cache_hits", 0),
            },
            file,
        )


if __name__ == "__main__":
    main()
