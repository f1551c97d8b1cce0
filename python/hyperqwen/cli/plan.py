"""`hyperqwen plan`: what a profile takes of a card, to the MiB, and what keeps it from starting there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperqwen.cli.knobs import given_flags, knob_options
from hyperqwen.cli.profile import host_file_option, json_option
from hyperqwen.errors import OK, USAGE, BadInputError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.profiles import cards
from hyperqwen.profiles.cards import Card
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.memory import GIB, MIB, Budget, largest_context, largest_slots
from hyperqwen.profiles.planner import Plan, make_plan, models_folder
from hyperqwen.runtime.measured import Row, lines, read, side_by_side

if TYPE_CHECKING:
    from rich.console import Console


def card_of(gpu: str | None, vram: float | None) -> Card | None:
    """The card that --gpu or --vram (GiB) says; None for neither. Raises BadInputError for both."""
    if gpu is not None and vram is not None:
        raise BadInputError(f"--gpu {gpu} and --vram {vram:g} both name a card", "keep one of them")
    if gpu is not None:
        return cards.find(gpu)
    return None if vram is None else Card.of_vram(vram)


def default_card(device: str) -> Card:
    """What a profile is planned for where nothing else is said: the card it is made for, or this machine's memory."""
    if device == "cuda":
        return cards.find("rtx3090")
    import psutil

    return Card("memory", "this machine's memory", 0, psutil.virtual_memory().total, exact=True)


@click.command()
@click.argument("name")
@click.option("--gpu", metavar="NAME", help="Card to plan for: rtx3090, rtx4090, rtx5090, h200, …")
@click.option("--vram", type=click.FloatRange(1, 2048), metavar="GIB", help="A card by its memory alone.")
@click.option(
    "--model",
    metavar="NAME|FILE",
    help="Geometry: a name of prepare/models, a .toml, or the config.json of any model of the family.",
)
@click.option("--wsl", is_flag=True, help="Plan for WSL2.")
@click.option(
    "--models", type=click.Path(path_type=Path), help="Folder with the prepared models; else HYPERQWEN_MODELS."
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="LOG",
    help="Log of a server of this profile: what its engine measured, beside what is planned.",
)
@host_file_option
@json_option
@knob_options
@click.pass_context
def command(
    context: click.Context,
    name: str,
    gpu: str | None,
    vram: float | None,
    model: str | None,
    wsl: bool,
    models: Path | None,
    measured: Path | None,
    host_file: Path | None,
    as_json: bool,
) -> None:
    """What the profile NAME takes of a card: weights, cache, states, graphs, margin; and what fits.

    Needs no GPU: without --gpu or --vram it plans for the card whose memory the --measured log tells, and else for the
    24 GB card that the profiles are made for (rtx3090). `law`
    follows from the model's shape and vLLM's source; `estimate` was measured, and --json says where. Exit 0 when the
    profile can start, 2 when it is refused.
    """
    effective = resolve(name, host_file=host_file, environ=os.environ, flags=given_flags(context))
    seen = None if measured is None else read(measured)
    card = card_of(gpu, vram)
    if card is None and seen is not None and seen.total_bytes is not None and effective.profile.device == "cuda":
        card = cards.of_log(seen.total_bytes)
    card = card or default_card(effective.profile.device)
    plan = make_plan(
        effective,
        models=models_folder(os.environ, models),
        card=card,
        geometry=None if model is None else geometries.load(model),
        wsl=wsl,
    )
    rows: tuple[Row, ...] = ()
    if seen is not None:
        planned = plan.profile.limits.context_tokens
        if seen.context_tokens not in (None, planned):
            raise BadInputError(
                f"the log {measured} is of a server with limits.context_tokens {seen.context_tokens}, and {planned} "
                "are planned",
                f"plan for the same: --context {seen.context_tokens}",
            )
        rows = () if plan.budget is None else side_by_side(plan.budget, seen)
        if plan.budget is not None and not rows:
            raise BadInputError(f"the log {measured} says nothing of memory", "name the log of an engine that started")
    if as_json:
        beside = {"measured": [row.report() for row in rows]} if measured is not None else {}
        click.echo(json.dumps(plan.report() | beside, indent=2, default=str))
    else:
        from rich.console import Console

        show(plan, Console(soft_wrap=False, highlight=False))
        if rows:
            click.echo("\n" + "\n".join(lines(rows)))
    context.exit(USAGE if plan.refusals else OK)


def show(plan: Plan, console: Console) -> None:
    """Print `plan` as tables."""
    profile = plan.profile
    console.print(f"[bold]{profile.name} ({profile.title})[/bold]: {profile.summary}")
    if plan.budget is not None and plan.card is not None:
        show_memory(plan, console)
    for notice in plan.notices:
        colour, word = {"refuse": ("red", "refused:"), "correct": ("yellow", "changed:"), "warn": ("yellow", "note:")}[
            notice.level
        ]
        console.print(f"[{colour}]{word}[/{colour}] ", end="")
        console.print(str(notice).removeprefix(f"{notice.level}: "), markup=False, soft_wrap=True)


def show_memory(plan: Plan, console: Console) -> None:
    """Print the memory of `plan`, which has a card."""
    from rich.table import Table

    budget, card = plan.budget, plan.card
    if budget is None or card is None:
        raise ValueError("a plan without a card has no memory to show")
    each = " each" if budget.load.cards > 1 else ""
    console.print(
        f"{plan.geometry.name} on {card.title}, {mib(budget.load.card_bytes)} MiB{each}: {verdict(plan)}\n",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column, right in (("", False), ("MiB", True), ("", False)):
        table.add_column(column, justify="right" if right else "left")
    for figure in budget.figures:
        kind = "estimate" if figure.measured else "law"
        if figure.key == "kv_cache" and budget.load.kv_cache_bytes is not None:
            kind = f"set ({plan.sources['memory.kv_cache_bytes']})"
        table.add_row(figure.title, mib(max(0, figure.bytes)), kind)
    table.add_row("Margin", mib(budget.margin_bytes), "what is left of the card")
    if budget.host_bytes:
        table.add_row("Host memory", mib(budget.host_bytes), "pinned")
    console.print(table)
    console.print()
    for what, value in memory_facts(budget):
        console.print(f"{what:18} {value}", soft_wrap=True)
    console.print()


def verdict(plan: Plan) -> str:
    """In a few words, whether `plan` can start and how long a request may be."""
    if plan.refusals or plan.budget is None:
        return "refused, see below"
    return f"fits, with requests of up to {largest_context(plan.budget.load):,} tokens"


def memory_facts(budget: Budget) -> list[tuple[str, str]]:
    """What a user wants to know of a budget's pool, as (what, value)."""
    pool, load = budget.pool, budget.load
    groups = " + ".join(
        f"{sum(group.kind == kind for group in pool.groups)} {kind}"
        for kind in ("attention", "recurrent", "window")
        if any(group.kind == kind for group in pool.groups)
    )
    short = min(4096, load.context_tokens)
    context = largest_context(load)
    together = largest_context(replace(load, resident_requests=load.concurrent_requests))
    slots = largest_slots(load)
    return [
        (
            "Block",
            f"{pool.block_tokens} tokens, {mib(pool.block_bytes)} MiB: {groups} groups of {pool.group_layers} layers",
        ),
        ("A token", f"{pool.token_bytes:,} bytes of keys and values"),
        (
            "A request",
            f"{mib(budget.state_bytes_per_request)} MiB of states; at {load.context_tokens:,} tokens "
            f"{pool.blocks_per_request} blocks, {mib(budget.request_bytes)} MiB",
        ),
        ("The pool", f"{budget.blocks} blocks, {budget.pool_tokens:,} tokens"),
        (
            "Side by side",
            f"requests of {load.context_tokens:,} tokens: {budget.residents(load.context_tokens)}; "
            f"of {short:,}: {budget.residents(short)}",
        ),
        ("Longest context", f"{context:,} tokens" if context else "none fits"),
        (
            "All slots at once",
            f"{together:,} tokens each for {load.concurrent_requests}" if together else "not at any context",
        ),
        (
            "Most slots",
            f"{slots} that can all be at {load.context_tokens:,} tokens" if slots else "not even one at this context",
        ),
    ]


def mib(size: int) -> str:
    """`size` bytes in MiB."""
    return f"{size / MIB:,.0f}"


def gib(size: int) -> str:
    """`size` bytes in GiB."""
    return f"{size / GIB:.2f}"
