"""What the words of a search text are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import words as module
from connector.stores.words import MAX_WORDS, Word, most_common, words, worth_it


def plain(text: str) -> list[str]:
    return [word.alternatives[0] for word in words(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hydraulic pump", ["hydraulic", "pump"]),
        ("pump, seal;(O-ring) [new]", ["pump", "seal", "O ring", "new"]),
        ("M-4711/2", ["M 4711 2"]),
        ("A_B:C", ["A B C"]),
        ("2,5 kW 1.000,00", ["2 5", "kW", "1 000 00"]),
        ("Öl für Motoren", ["Öl", "für", "Motoren"]),
        ("O\u0308l", ["Öl"]),
        ("H2O", ["H2O"]),
        ('"quoted" OR NOT a* -b text:x ^y', ["quoted", "OR", "NOT", "a", "b", "text x", "y"]),
        ("pump PUMP Pump", ["pump"]),
        ("!!! -- ★ \x00", []),
        ("a\x00b", ["a b"]),
        ("lone \ud800 half", ["lone", "half"]),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]):
    assert plain(text) == expected


@pytest.mark.parametrize("number", ["100195", "0100195", "000000000000100195"])
def test_a_number_with_and_without_zeros(number: str):
    (word,) = words(number)
    assert {"100195", "0000100195", "000000100195", "000000000000100195", number} < set(word.alternatives)
    assert all(one.lstrip("0") == "100195" for one in word.alternatives)


@pytest.mark.parametrize(
    ("text", "alternatives"), [("7", ("7",)), ("12", ("12",)), ("٣٤٥", ("٣٤٥",)), ("A100", ("A100",))]
)
def test_what_is_written_one_way_only(text: str, alternatives: tuple[str, ...]):
    assert words(text) == (Word(alternatives),)


def test_short_numbers_given_with_zeros_and_zero_itself():
    assert words("007")[0].alternatives[:2] == ("7", "007")
    assert words("000")[0].alternatives[:2] == ("0", "000")


@given(st.text(max_size=2000))
def test_nothing_but_letters_digits_and_blanks_is_left(text: str):
    found = words(text)
    assert len(found) <= MAX_WORDS
    for word in found:
        for one in word.alternatives:
            one.encode()
            assert one == one.strip() != ""
            assert all(char.isalnum() or char == " " or "\u0300" <= char <= "\u036f" for char in one)


def test_many_and_long_words_are_bounded():
    assert len(words(" ".join(f"w{number}" for number in range(500)))) == MAX_WORDS
    assert len(words("x" * 100_000)[0].alternatives[0]) == module.MAX_LENGTH


def test_common_words_are_left_out_of_large_collections_unless_alone():
    found = words("the pump seal")
    assert worth_it(found, [900, 500, 10], 999) == [0, 1, 2]
    assert worth_it(found, [900, 201, 10], 1000) == [2]
    assert worth_it(found, [900, 200, 0], 1000) == [1, 2]
    assert worth_it(found, [900, 800, 700], 1000) == [0, 1, 2]
    assert (most_common(999), most_common(1000)) == (999, 200)


@pytest.mark.parametrize(
    ("word", "alternatives"),
    [
        ("Schlüssel", ("Schlüssel", "schluessel")),
        ("SCHLUESSEL", ("SCHLUESSEL", "schlüssel")),
        ("Maß", ("Maß", "mass")),
        ("neue", ("neue",)),
        ("Frequenz", ("Frequenz",)),
    ],
)
def test_umlauts_are_searched_in_both_spellings(word: str, alternatives: tuple[str, ...]) -> None:
    assert words(word)[0].alternatives == alternatives
