from __future__ import annotations

import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from hyperqwen.errors import BadInputError
from hyperqwen.prepare import bpe

SPECIALS = (bpe.Special("<|stop|>", control=True), bpe.Special("<think>", control=False))
TEXT = "the cat sat on the mat, the hat sat\non the cat\n\n"
WORDS = sorted(set(bpe.split_words(TEXT)))
VOCABULARY = bpe.train(WORDS, SPECIALS, 512)
TOKENIZER = bpe.tokenizer(VOCABULARY)


def test_the_byte_alphabet_is_the_one_of_byte_level_tokenizers() -> None:
    alphabet = bpe.byte_alphabet()

    assert len(set(alphabet)) == 256
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    mapped = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é \n\x00~")
    assert "".join(part for part, _ in mapped) == bpe.to_units("é \n\x00~")


@given(st.text())
def test_units_are_bytes(text: str) -> None:
    assert bpe.to_bytes(bpe.to_units(text)) == text.encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("one two", ["one", "Ġtwo"]),
        ("one  two", ["one", "Ġ", "Ġtwo"]),
        ("end.\n\nNext", ["end", ".ĊĊ", "Next"]),
        ("x = 12", ["x", "Ġ=", "Ġ", "1", "2"]),
        ('he (the "one") said', ["he", "Ġ(", "the", 'Ġ"', "one", '")', "Ġsaid"]),
        ("tail \n", ["tail", "ĠĊ"]),
    ],
)
def test_where_words_end(text: str, words: list[str]) -> None:
    assert bpe.split_words(text) == words


def test_every_word_becomes_one_token() -> None:
    for word in WORDS:
        assert TOKENIZER.encode(bpe.to_bytes(word).decode()).tokens == [word]


def test_the_most_frequent_pair_is_merged_first_and_ties_by_spelling() -> None:
    trained = bpe.train(["cab", "xab", "cd"], (), 512)

    assert trained.merges == (("a", "b"), ("c", "ab"), ("c", "d"), ("x", "ab"))


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_words_does_not_matter(shuffle: random.Random) -> None:
    words = [*WORDS, *WORDS]
    shuffle.shuffle(words)

    assert bpe.train(words, SPECIALS, 512) == VOCABULARY


def test_ids_are_bytes_then_merges_then_specials() -> None:
    ids = VOCABULARY.ids()

    assert [ids[unit] for unit in bpe.byte_alphabet()] == list(range(256))
    assert ids["<think>"] == len(VOCABULARY) - 1
    assert TOKENIZER.get_vocab_size() == len(VOCABULARY)
    assert TOKENIZER.get_vocab() == ids


@given(st.text())
def test_any_text_comes_back_composed(text: str) -> None:
    ids = TOKENIZER.encode(text).ids

    assert TOKENIZER.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_special_tokens_are_cut_out_first() -> None:
    encoded = TOKENIZER.encode("the<think>\ncat<|stop|>")

    assert encoded.tokens == ["the", "<think>", "Ċ", "cat", "<|stop|>"]
    assert TOKENIZER.decode(encoded.ids, skip_special_tokens=True) == "the<think>\ncat"


def test_a_vocabulary_that_is_too_small_says_so() -> None:
    with pytest.raises(BadInputError, match=r"tokenizer\.limit = 260 is too small: \d+ of 11 words"):
        bpe.train(WORDS, SPECIALS, 260)
