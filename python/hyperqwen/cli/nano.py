"""`hyperqwen nano`: build the model that ships with the repository, and ask what it must answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hyperqwen.errors import BadInputError

if TYPE_CHECKING:
    from hyperqwen.prepare.nano import Embedding

_model = click.argument("model", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
_json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(name="nano")
def command() -> None:
    """The small model with the real architecture, constructed from a seed.

    docs/nano.md says what it can show and what it cannot.
    """


@command.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Must not exist.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path("prepare/nano.toml"),
    show_default=True,
    help="Seed, geometry, noise and the files with the text.",
)
@click.option(
    "--embedding",
    type=click.Choice(["bf16", "int8"]),
    help="Form of the token embedding, instead of the configuration's.",
)
def build(out: Path, config: Path, embedding: Embedding | None) -> None:
    """Write the checkpoint; the same bytes on every machine."""
    from hyperqwen.prepare import nano

    nano.build(nano.load_config(config, embedding), config.parent, out)
    size = sum(file.stat().st_size for file in out.iterdir())
    click.echo(f"{out}: {size / 1e6:.1f} MB", err=True)


@command.command()
@_model
@_json_flag
def cycles(model: Path, as_json: bool) -> None:
    """Print the text that the model knows."""
    from hyperqwen.prepare.truth import Truth

    rings = Truth.load(model).cycles()
    if as_json:
        click.echo(json.dumps([{"name": r.name, "ids": r.ids, "text": r.text} for r in rings], ensure_ascii=False))
        return
    for ring in rings:
        click.echo(f"[{ring.name}, {len(ring.ids)} tokens]\n{ring.text.strip()}\n")


@command.command()
@_model
@click.argument("prompt")
@click.option("-n", "count", type=click.IntRange(min=1), default=64, show_default=True, help="Most tokens to print.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the token that ends an answer.")
@_json_flag
def expect(model: Path, prompt: str, count: int, ignore_eos: bool, as_json: bool) -> None:
    """Print the greedy answer that an engine must give to PROMPT as it stands, without chat template."""
    from tokenizers import Tokenizer

    from hyperqwen.prepare.truth import Truth

    truth = Truth.load(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    if not ids:
        raise BadInputError("the prompt is empty", "give at least one character")
    answer = truth.expected_greedy(ids, count, ignore_eos=ignore_eos)
    text = tokenizer.decode(answer, skip_special_tokens=False)
    if as_json:
        click.echo(json.dumps({"prompt_ids": ids, "answer_ids": answer, "answer": text}, ensure_ascii=False))
    else:
        click.echo(text)


@command.command()
@_model
@_json_flag
def audit(model: Path, as_json: bool) -> None:
    """Check the files' hashes, and the weights with a forward pass in NumPy."""
    from hyperqwen.prepare.audit import audit as run

    found = run(model)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    click.echo(f"files       {found.files}, as nano.json says")
    click.echo(f"successors  right in {found.positions} of {found.positions} contexts")
    click.echo(f"margin      {found.margin:.2f} logits at least")
    click.echo(f"sampling    {found.probability:.2%} at least for the successor at temperature 1")
    shares = ", ".join(f"{share:.0%}" for share in found.accepted)
    click.echo(f"MTP         {shares} of {found.drafts} drafts right up to token 1, 2, 3")
