"""vLLM's own parser takes the flags of every profile, and refuses what this engine does not have.

spec: plans (folder with NAME.json, as `hyperqwen plan NAME --json` prints them).
"""

import contextlib
import io
import json
import os
import pathlib
import sys
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)


def parse(argv: list[str]) -> tuple[AsyncEngineArgs | None, str]:
    """The engine's arguments, or None and what the parser said."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = make_arg_parser(FlexibleArgumentParser(prog="serve")).parse_args(argv)
            validate_parsed_serve_args(args)
            return AsyncEngineArgs.from_cli_args(args), ""
    except (SystemExit, ValueError, TypeError) as error:
        return None, (said.getvalue().strip().splitlines() or [str(error)])[-1]


def differences(plan: dict[str, Any], args: AsyncEngineArgs) -> list[str]:
    """What vLLM read differently from what the plan says."""
    profile = plan["profile"]
    wanted = {
        "max_model_len": profile["limits"]["context_tokens"],
        "max_num_seqs": profile["limits"]["concurrent_requests"],
        "kv_cache_memory_bytes": profile["memory"]["kv_cache_bytes"] or None,
        "enable_prefix_caching": profile["cache"]["prefix"],
        "load_format": profile["model"]["load_format"],
    }
    if plan["device"] == "cuda":
        speculation = args.speculative_config or {}
        wanted |= {
            "gpu_memory_utilization": profile["memory"]["utilization"],
            "max_num_batched_tokens": profile["limits"]["batched_tokens"],
            "async_scheduling": profile["scheduler"]["asynchronous"],
            "mamba_ssm_cache_dtype": profile["cache"]["state_dtype"],
            "prefix_cache_retention_interval": {"dense": None, "end": 0}.get(
                profile["cache"]["retention"], profile["cache"]["retention"]
            ),
        }
        if speculation.get("num_speculative_tokens", 0) != profile["speculation"]["tokens"]:
            return [f"speculation: {speculation}"]
    found = {name: getattr(args, name) for name in wanted}
    return [
        f"{name}: vLLM has {found[name]!r}, the plan {wanted[name]!r}" for name in wanted if found[name] != wanted[name]
    ]


def main() -> None:
    report, failures = [], []
    plans = {path.stem: json.loads(path.read_text()) for path in sorted(pathlib.Path(spec["plans"]).glob("*.json"))}
    for name, plan in plans.items():
        args, said = parse(plan["argv"])
        lacking = plan["capabilities"]["lacking"]
        if lacking:
            # The engine lacks what the profile cannot do without: its parser has to say so too, or the list is stale.
            if args is not None:
                failures.append(f"{name}: needs {', '.join(lacking)}, and yet this engine takes its flags")
            report.append(f"{name}: refused for want of {', '.join(lacking)}: {said[:160]}")
        elif args is None:
            failures.append(f"{name}: {said}")
        else:
            failures += [f"{name}: {text}" for text in differences(plan, args)]
            report.append(f"{name}: {len(plan['argv'])} words taken")
    taken = [name for name, plan in plans.items() if not plan["capabilities"]["lacking"]]
    if len(plans) < 6 or not taken:
        failures.append(f"only {sorted(plans)} have plans, and {taken} can start")
    # The parser is one that refuses: a misspelled flag, and a value of another kind.
    for wrong in (["--max-model-length", "4096"], ["--max-num-seqs", "eight"]):
        if parse([*plans[taken[0]]["argv"], *wrong])[0] is not None:
            failures.append(f"the parser took {' '.join(wrong)}")
    print("\n".join(report))
    if failures:
        sys.exit("\n".join(failures))
    pathlib.Path(os.environ["out"]).write_text("\n".join(report) + "\n")


main()
