"""Second paths for existing routes.

The tokenizer's routes sit outside /v1 in vLLM, while a client's base URL usually ends with /v1: `POST tokenize`
relative to it is a 404. They are served under both.

Source: vLLM 0.31.0, `vllm/entrypoints/serve/tokenize/api_router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI

TOKENIZER_PATHS = ("/tokenize", "/detokenize")


def attach_v1_tokenizer(app: FastAPI, router: APIRouter) -> None:
    """Serve `router`'s /tokenize and /detokenize under /v1 too: same handlers, same checks, same schemas.

    Other routes of the router stay where they are. Raises LookupError, at start, when a path is not on the router: a
    vLLM that moved it needs this module looked at.
    """
    chosen = [route for route in router.routes if getattr(route, "path", None) in TOKENIZER_PATHS]
    missing = set(TOKENIZER_PATHS) - {getattr(route, "path", None) for route in chosen}
    if missing:
        raise LookupError(f"vLLM's tokenizer router has no {', '.join(sorted(missing))} to serve under /v1")
    # The router's own class, so that this module imports no web framework.
    app.include_router(type(router)(routes=chosen), prefix="/v1")
