"""What an engine can do beyond vLLM as it is published, as profiles ask for it.

A patch says in its header what it provides (`Provides: kv-group-size`); an engine with the series can do what its
headers say together. A knob that needs a capability the engine lacks is corrected or refused before it starts.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from hyperqwen.errors import BadInputError
from hyperqwen.patches.apply import PatchProblems
from hyperqwen.patches.series import load

CAPABILITIES = {
    "quantized-embedding": "load a token embedding of int8 or int4 codes, the model's and its MTP head's",
    "embedding-in-host": "keep the token embedding in pinned host memory",
    "vision-in-host": "keep the vision tower's weights in pinned host memory",
    "int8-activations": "multiply chosen layers in int8, whatever the sign of their scales",
    "kv-group-size": "size the groups of the KV pool by the model's layers where a drafter has few",
    "drafter-block-size": "give a drafter's window blocks that divide the model's page where the cache is quantized",
    "state-prefix-cache": "keep a request's reusable states until it ends, and free them last",
    "kvarn": "keys in 4 bits and values in 2 or 4, normalised by tiles of 128 tokens",
    "split-kv-verify": "verify drafts with a kernel that splits the sequence",
    "int8-prefill": "prefill with int8 scores",
    "torch-topk-selector": "choose DFlash2's candidates with torch where FlashInfer's sampler is off",
    "lookup-drafting": "extend and replace drafts by matches in the request's own history",
    "adaptive-block": "draft the long block only while it is being accepted",
    "chains": "draft from history alone while a single request copies",
    "draft-vocabulary": "let MTP draft from a list of frequent tokens",
    "small-topk-sampler": "sample small top-k without sorting the vocabulary, drafts from the same support",
    "request-warmup": "compile every kernel of the first request before the server is ready",
}
"""Name to what the engine can do then; a header may name no other."""


def unknown(name: str) -> str | None:
    """Why `name` is no capability, with the nearest that is; None where it is one."""
    if name in CAPABILITIES:
        return None
    near = difflib.get_close_matches(name, CAPABILITIES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CAPABILITIES)}"
    return f"there is no capability {name!r}; {hint}"


def providers(folder: Path) -> dict[str, tuple[str, ...]]:
    """The capabilities that the patches of `folder` provide, each with the names of those patches.

    Raises:
        BadInputError: the series is not sound, or a header names an unknown capability.
    """
    try:
        entries = load(folder)
    except PatchProblems as error:
        raise BadInputError(
            f"the patches of {folder} are not sound:\n{error}", "run 'hyperqwen patches list'"
        ) from None
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        for name in entry.header.provides if entry.header is not None else ():
            reason = unknown(name)
            if reason is not None:
                raise BadInputError(f"{folder / entry.name}: Provides: {reason}", "correct the header")
            found[name] = (*found.get(name, ()), entry.name)
    return found


def provided(folder: Path) -> frozenset[str]:
    """What an engine with the patches of `folder` can do; raises as `providers`."""
    return frozenset(providers(folder))
