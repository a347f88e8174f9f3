"""How much of a search text's words a row holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.coverage import content_words, coverage, parts_of, related, stem


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("what is the noise from the gearbox", ("noise", "gearbox")),
        ("Öl tropft aus dem Getriebe", ("Öl", "tropft", "Getriebe")),
        ("Für wen?", ("wen",)),
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
    row = parts_of("Getriebeöl ISO-VG 320, für hohe Last. M-4711")
    assert coverage(content_words("Getriebeöl 320"), row) == 1
    assert coverage(content_words("Getriebeöl 460"), row) == 0.5
    assert coverage(content_words("the and of"), row) == 0
    assert coverage(content_words("M-4711/2"), row) == 0, "a word of three parts, of which one is not there"
    assert coverage(("x",), frozenset()) == 0


letters = st.text(alphabet="aäöüßéABCxyz 0123,.-/", max_size=40)


@given(letters, letters)
def test_any_text_has_a_share_between_none_and_all(asked: str, row: str) -> None:
    words = content_words(asked)
    assert 0 <= coverage(words, parts_of(row)) <= 1
    assert coverage(words, parts_of(asked)) == (1 if words else 0)


@given(st.text(alphabet="abcdefghinrsy", max_size=14))
def test_a_stem_is_a_beginning_of_four_letters_and_more(word: str) -> None:
    assert word.startswith(stem(word))
    assert len(stem(word)) >= min(4, len(word))
