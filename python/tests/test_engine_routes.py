from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hyperqwen.engine.routes import TOKENIZER_PATHS, attach_v1_tokenizer


@dataclass(frozen=True)
class Route:
    path: str


@dataclass
class Router:
    """The part of FastAPI's APIRouter that the function uses."""

    routes: list[Any] = field(default_factory=list)


class App:
    def __init__(self) -> None:
        self.included: list[tuple[str, list[Any]]] = []

    def include_router(self, router: Router, *, prefix: str = "") -> None:
        self.included.append((prefix, router.routes))


def test_both_routes_and_no_other_are_served_under_v1() -> None:
    app, tokenize, detokenize = App(), Route("/tokenize"), Route("/detokenize")
    router = Router([Route("/tokenizer_info"), tokenize, object(), detokenize])
    attach_v1_tokenizer(app, router)
    assert app.included == [("/v1", [tokenize, detokenize])], (
        "the very routes, so that handlers and checks are the same"
    )
    assert len(router.routes) == 4, "the router's own routes stay"


@pytest.mark.parametrize("gone", TOKENIZER_PATHS)
def test_a_route_that_moved_stops_the_server_and_is_named(gone: str) -> None:
    app = App()
    router = Router([Route(path) for path in TOKENIZER_PATHS if path != gone])
    with pytest.raises(LookupError, match=gone + " "):
        attach_v1_tokenizer(app, router)
    assert app.included == []
