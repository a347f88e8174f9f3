"""How much of a search text's words a row holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.stores import coverage as module
from connector.stores.coverage import (
    Coverage,
    asked_words,
    content_words,
    folded,
    parts_of,
    related,
    stem,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("what is the noise from the gearbox", ("noise", "gearbox")),
        ("Öl tropft aus dem Getriebe", ("Öl", "tropft", "Getriebe")),
        ("Für wen?", ("wen",)),
        ("fuer koennen ueber", ("ueber",)),
        ("toe cap due", ("toe", "cap", "due")),
        ("to be or not to be", ()),
        ("M-4711/2 and 6205-2Z", ("M 4711 2", "6205 2Z")),
        ("000100195", ("100195",)),
        ("  ", ()),
    ],
)
def test_words_that_say_what_it_is_about(text: str, found: tuple[str, ...]) -> None:
    assert content_words(text) == found


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ("pumps", "pump"),
        ("pump", "pumping"),
        ("exactly", "exact"),
        ("leaking", "leaks"),
        ("kartons", "wellpappkarton"),
        ("lager", "kugellager"),
        ("pumpe", "brunnenpumpe"),
        ("motor", "motorschutzschalter"),
        ("getriebe", "getrieben"),
        ("100195", "000000000000100195"),
        ("000100195", "100195"),
    ],
)
def test_words_that_are_asked_for_by_another(asked: str, other: str) -> None:
    assert related(asked, other)


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ("table", "stable"),
        ("band", "verband"),
        ("100195", "9100195"),
        ("6205", "62050"),
        ("m12", "m120"),
        ("rats", "rack"),
        ("seal", "steel"),
    ],
)
def test_words_that_are_not(asked: str, other: str) -> None:
    assert not related(asked, other)


def test_the_share_of_the_words() -> None:
    row = "Getriebeöl ISO-VG 320, für hohe Last. M-4711"
    assert Coverage(content_words("Getriebeöl 320")).of(row) == 1
    assert Coverage(content_words("Getriebeöl 460")).of(row) == 0.5
    assert Coverage(content_words("the and of")).of(row) == 0
    assert Coverage(content_words("M-4711/2")).of(row) == 0, "a word of three parts, of which one is not there"
    assert Coverage(("x",)).of("") == 0


letters = st.text(alphabet="aäöüßéABCxyz 0123,.-/", max_size=40)


@given(letters, letters)
def test_any_text_has_a_share_between_none_and_all(asked: str, row: str) -> None:
    words = content_words(asked)
    assert 0 <= Coverage(words).of(row) <= 1
    assert Coverage(words).of(asked) == (1 if words else 0)


@given(letters, st.lists(letters, max_size=5))
def test_many_rows_have_the_shares_that_each_has_alone(asked: str, rows: list[str]) -> None:
    """By the definition: a word is there when each of its parts is, or something related."""
    words = asked_words(asked)
    share = Coverage(words)
    for row in rows:
        held = parts_of(row)
        there = [all(any(related(part, other) for other in held) for part in parts_of(word)) for word in words]
        assert share.of(row) == Coverage(words).of(row) == (sum(there) / len(there) if there else 0)


def test_parts_are_letters_and_digits_of_any_script() -> None:
    every = "".join(map(chr, range(0x3000)))
    spaced = "".join(char if char.isalnum() else " " for char in folded(every))
    assert parts_of(every) == frozenset(spaced.split())


def test_a_long_search_text_has_few_words() -> None:
    """20,000 words that say nothing were looked for in each passage."""
    assert len(asked_words(" ".join(f"the and of {number}" for number in range(5000)))) <= 16
    assert asked_words("the the of the") == ("the", "of")
    assert asked_words("the gearbox") == ("gearbox",)


def test_what_a_word_answers_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand hits of 150 words each cost ten seconds, through which nobody else was served."""
    compared: list[tuple[str, str]] = []

    def counting(asked: str, other: str) -> bool:
        compared.append((asked, other))
        return related(asked, other)

    monkeypatch.setattr(module, "related", counting)
    share = Coverage(("pump", "seal"))
    assert [share.of("pumps and a valve") for _ in range(100)] == [0.5] * 100
    assert len(compared) == 8


@given(st.text(alphabet="abcdefghinrsy", max_size=14))
def test_a_stem_is_a_beginning_of_four_letters_and_more(word: str) -> None:
    assert word.startswith(stem(word))
    assert len(stem(word)) >= min(4, len(word))


@pytest.mark.parametrize(
    ("asked", "other", "same"),
    [
        ("sicherheitsvential", "sicherheitsventil", True),  # one letter added
        ("keilreimen", "keilriemen", True),  # two swapped
        ("gearbx", "gearbox", True),
        ("bearing", "bearlng", True),
        ("motor", "rotor", False),  # too short to be called mistyped
        ("pumpen", "stumpf", False),
        ("210.4a", "210.5a", False),
        ("471100", "471101", False),
    ],
)
def test_one_mistyped_letter_of_a_longer_word(asked: str, other: str, same: bool) -> None:
    assert related(asked, other) == related(other, asked) == same


@pytest.mark.parametrize(
    ("asked", "text"), [("Oelfilter", "Ölfilter 5 l"), ("Maß", "MASS"), ("Schlüssel", "SCHLUESSEL")]
)
def test_umlauts_and_their_transcription_are_the_same(asked: str, text: str) -> None:
    assert Coverage((asked,)).of(text) == 1.0
    assert Coverage((text.split()[0],)).of(asked) == 1.0
