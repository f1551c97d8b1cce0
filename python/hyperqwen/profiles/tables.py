"""The tables of docs/profiles.md, from the schema, the shipped profiles, the planner and the rules."""

from __future__ import annotations

from pathlib import Path

from hyperqwen import share
from hyperqwen.profiles import cards, rules
from hyperqwen.profiles.capabilities import provided
from hyperqwen.profiles.layers import resolve, shown
from hyperqwen.profiles.planner import Plan, make_plan
from hyperqwen.profiles.profile import Knob, knobs, sections, shipped

PUBLISHED_CARD = "rtx3090"
"""The card that the shipped profiles are made for."""


def planned(name: str, everything: bool = False) -> Plan:
    """The shipped profile `name` on its card; `everything`: on an engine with every capability."""
    from hyperqwen.profiles.capabilities import CAPABILITIES

    effective = resolve(name)
    return make_plan(
        effective,
        models=Path("/models"),
        card=cards.find(PUBLISHED_CARD) if effective.profile.device == "cuda" else None,
        capabilities=frozenset(CAPABILITIES) if everything else provided(share.folder("patches")),
    )


def profile_rows() -> list[list[str]]:
    """Profile, what for, context, slots, cache, drafts, pool, needs."""
    rows = []
    for name in shipped():
        plan = planned(name, everything=True)
        profile = plan.profile
        spec = profile.speculation
        needs = planned(name).lacking
        rows.append(
            [
                f"{name} ({profile.title})" if name != profile.title else name,
                profile.summary,
                f"{profile.limits.context_tokens:,}",
                str(profile.limits.concurrent_requests),
                profile.cache.dtype,
                "none" if spec.method == "off" else f"{spec.method}, {spec.tokens}",
                "" if plan.budget is None else f"{plan.budget.pool_tokens:,}",
                "" if plan.budget is None else str(plan.budget.pool.block_tokens),
                ", ".join(needs),
            ]
        )
    return rows


def rule_rows() -> list[list[str]]:
    """Rule, what it does, why."""
    return [row[:3] for row in rules.rule_rows()]


def knob_rows() -> list[list[str]]:
    """Knob, what it takes, default, meaning, in the order of the schema."""
    return [[f"`{knob.path}`", _accepts(knob), _default(knob), knob.description] for knob in knobs()]


def section_rows() -> list[list[str]]:
    """Section, what it is about."""
    return [[f"`[{name}]`", text.splitlines()[0]] for name, text in sections().items()]


def _accepts(knob: Knob) -> str:
    short = f" (`--{knob.alias}`)" if knob.alias else ""
    return knob.accepts + short


def _default(knob: Knob) -> str:
    text = shown(knob, knob.default)
    return f"`{text}`" if text else "empty"
