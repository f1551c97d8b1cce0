"""Greedy answers of one engine configuration, in a process of its own: vLLM is not made for a second engine in one.

    python checks/lossless/generate.py MODEL OUT ENGINE_ARGUMENTS(JSON) PROMPTS(JSON: lists of token ids) TOKENS

Writes {"tokens": [[...], ...], "drafted": int, "accepted": int} to OUT.
"""

import json
import sys
from typing import Any


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


main()
