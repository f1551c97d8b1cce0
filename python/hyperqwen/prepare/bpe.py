"""Train a byte-level BPE vocabulary whose every step is decided by the text alone, and write it as
tokenizer.json.

The trainer of the tokenizers library breaks ties by the order of a hash map that threads fill, so its merges
are not promised to be the same twice. Here the words are few (some hundreds), so plain Python counts all
pairs again for every merge: the pair that occurs most often wins, and among equals the one that is smallest
as a pair of strings.

Two alphabets are in play. *Text* is what a user writes. *Units* are text after byte-level mapping: one
printable character per UTF-8 byte (a space is "Ġ", a line feed "Ċ"), which is how tokenizer.json spells its
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from hyperqwen.errors import BadInputError, VerificationError

Pair = tuple[str, str]

SPLIT = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Where words end: a word takes the one space before it, a digit stands alone, punctuation takes the line
breaks after it.

The same boundaries as Qwen's, English contractions aside, so that the class that transformers picks for this
model type and the generic one cut nano's text alike.
"""


@dataclass(frozen=True, slots=True)
class Special:
    """A token outside the vocabulary that is cut from the text before anything else.

    `control` tokens are left out when text is decoded with special tokens skipped; the others (`<think>`,
    tool tags) are part of the text, because a server's parsers read them there.
    """

    content: str
    control: bool


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """256 byte units, then one unit per merge, in the order of training; special tokens follow."""

    units: tuple[str, ...]
    merges: tuple[Pair, ...]
    specials: tuple[Special, ...]

    def __len__(self) -> int:
        return len(self.units) + len(self.specials)

    def ids(self) -> dict[str, int]:
        """Token spelling -> id, for units and special tokens."""
        spellings = [*self.units, *(special.content for special in self.specials)]
        return {spelling: index for index, spelling in enumerate(spellings)}


def byte_alphabet() -> list[str]:
    """The 256 byte units by byte value: printable Latin-1 bytes are themselves, the others follow from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def to_units(text: str) -> str:
    """Text in byte-level spelling, one character per UTF-8 byte."""
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in text.encode())


def to_bytes(units: str) -> bytes:
    """The bytes that a byte-level spelling stands for."""
    values = {unit: byte for byte, unit in enumerate(byte_alphabet())}
    return bytes(values[unit] for unit in units)


def split_words(text: str) -> list[str]:
    """Text cut at `SPLIT`, each word in byte-level spelling."""
    return [word for word, _ in _pre_tokenizer().pre_tokenize_str(normalizers.NFC().normalize_str(text))]


def train(words: Iterable[str], specials: Sequence[Special], limit: int) -> Vocabulary:
    """Merges until every word is one token.

    `words` are in byte-level spelling; each counts once. `limit` bounds the vocabulary, special tokens
    included. Raises BadInputError where the limit is reached before all words are whole.
    """
    alphabet = byte_alphabet()
    parts = {word: list(word) for word in sorted(set(words))}
    merges: list[Pair] = []
    units = list(alphabet)
    known = set(units)
    while open_words := [pieces for pieces in parts.values() if len(pieces) > 1]:
        counts = Counter(pair for pieces in open_words for pair in pairwise(pieces))
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        for pieces in open_words:
            _merge(pieces, best)
        merges.append(best)
        joined = "".join(best)
        if joined not in known:
            known.add(joined)
            units.append(joined)
        if len(units) + len(specials) > limit:
            raise BadInputError(
                f"tokenizer.limit = {limit} is too small: {len(open_words)} of {len(parts)} words in pieces",
                "raise the limit, or shorten the cycles",
            )
    return Vocabulary(tuple(units), tuple(merges), tuple(specials))


def tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The vocabulary as a tokenizer of the tokenizers library."""
    ids = vocabulary.ids()
    result = Tokenizer(models.BPE(vocab={unit: ids[unit] for unit in vocabulary.units}, merges=list(vocabulary.merges)))
    result.normalizer = normalizers.NFC()
    result.pre_tokenizer = _pre_tokenizer()
    result.decoder = decoders.ByteLevel()
    result.add_tokens([AddedToken(s.content, special=s.control, normalized=False) for s in vocabulary.specials])
    for special in vocabulary.specials:
        if result.token_to_id(special.content) != ids[special.content]:
            found, meant = result.token_to_id(special.content), ids[special.content]
            raise VerificationError(f"the tokenizers library gave {special.content} id {found}, not {meant}")
    return result


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _merge(pieces: list[str], pair: Pair) -> None:
    """Join every occurrence of the pair, from the left, in place."""
    index = 0
    while index < len(pieces) - 1:
        if (pieces[index], pieces[index + 1]) == pair:
            pieces[index : index + 2] = ["".join(pair)]
        index += 1
