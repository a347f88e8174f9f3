"""The template language, and what stays of the text around empty columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.document.template import Template
from connector.errors import ConfigurationError


def render(template: str, *values: str) -> str:
    return Template.parse(template).render(values)


@pytest.mark.parametrize(
    ("text", "slots", "literals"),
    [
        ("{MAKTX}", ("MAKTX",), ("", "")),
        ("{ MAKTX }", ("MAKTX",), ("", "")),
        ("{MAKTX}. {LTEXT}", ("MAKTX", "LTEXT"), ("", ". ", "")),
        ('{"/BIC/TXT"}!', ("/BIC/TXT",), ("", "!")),
        ("{/BIC/TXT}", ("/BIC/TXT",), ("", "")),
        ('{"a""b}c"}', ('a"b}c',), ("", "")),
        ('{" A "}', (" A ",), ("", "")),
        ("{two words}", ("two words",), ("", "")),
        ("a {{b}} {C}", ("C",), ("a {b} ", "")),
        ("{{{A}}}", ("A",), ("{", "}")),
        ("{A}{A}", ("A", "A"), ("", "", "")),
        ("50 %s {A} 100%", ("A",), ("50 %s ", " 100%")),
        ("\ufeffa {A}\0", ("A",), (" a ", " ")),
    ],
)
def test_parsing(text, slots, literals):
    template = Template.parse(text)
    assert template.slots == slots
    assert template.literals == literals
    assert template.columns == tuple(dict.fromkeys(slots))


@pytest.mark.parametrize(
    ("text", "position"),
    [("ab {MAKTX", 4), ("ab } {A}", 4), ("{} {A}", 1), ("{  } {A}", 1), ('{A"B}', 1), ("{A}{B{C}", 4)],
)
def test_mistakes_are_told_with_their_position(text, position):
    with pytest.raises(ConfigurationError, match=rf"position {position}\b.*literal brace"):
        Template.parse(text)


@pytest.mark.parametrize("text", ["", "only text", "{{A}}"])
def test_a_template_without_a_column_is_refused(text):
    with pytest.raises(ConfigurationError, match="names no column"):
        Template.parse(text)


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("{A}. {B}", ("x", "y"), "x. y"),
        ("{A}. {B}", ("x", ""), "x"),
        ("{A}. {B}", ("", "y"), "y"),
        ("{A}. {B}", ("", ""), ""),
        ("Material: {A}. {B}", ("", ""), ""),
        ("{A}. {B}. {C}", ("a", "", "c"), "a. c"),
        ("{A}. {B}.", ("a", ""), "a."),
        ("{A} - {B}.", ("a", ""), "a."),
        ("{A}\n{B}\n{C}", ("a", "", "c"), "a\nc"),
        ("{A}, {B}\n{C}", ("a", "", "c"), "a\nc"),
        ("{A}, {B}. {C}", ("a", "", "c"), "a. c"),
        ("{A} {B} {C}", ("a", "", "c"), "a c"),
        ("{A}: {B}", ("", "b"), "b"),
        ("Material {A}: {B}", ("", "b"), "Material: b"),
        ("{A} ({B})", ("a", ""), "a"),
        ("{A} ({B}), {C}", ("a", "", "c"), "a, c"),
        ("{A} ({B}, {C})", ("a", "", "c"), "a (c)"),
        ("{A} ({B}, {C})", ("a", "b", ""), "a (b)"),
        ("{A} ({B}, {C})", ("a", "", ""), "a"),
        ("[{A}] {B}", ("", "b"), "b"),
        ("{A}. Colour: {B}. Size: {C}", ("a", "", ""), "a"),
        ("{A}. Colour: {B}. Size: {C}", ("a", "", "XL"), "a. Size: XL"),
        ("{A}. Weight: {B} kg. {C}", ("a", "", "c"), "a. c"),
        ("{A}. Weight: {B} kg", ("a", ""), "a"),
        ("Weight: {B} kg. {C}", ("", "c"), "c"),
        ("Part: {A} ({B})", ("", "b"), "(b)"),
        ("{A}. Part: {B} [{C}]", ("a", "", "c"), "a. [c]"),
        ("Part: {A} ({B}) {C}", ("", "", "c"), "c"),
        ("Weight: {A} kg (net, [dry]) {B}", ("", "b"), "b"),
        ("Size: {A} cm (approx. {B})", ("", "b"), "(approx. b)"),
        ("({A}): {B}", ("a", ""), "(a)"),
        ("{A} (net) Volume: {B}", ("a", ""), "a (net)"),
        ("{A}. Weight (net): {B} kg", ("a", ""), "a"),
        ("Name: {A} <{B}>", ("", "b"), "<b>"),
        ("{A} ({B}, [{C}])", ("a", "", ""), "a"),
        ("a) Name: {A}, b) Place: {B}", ("", "b"), "b) Place: b"),
        ("1) Name: {A} 2) Place: {B}", ("a", ""), "1) Name: a"),
        ("Weight <= {A} kg, Width: {B}", ("", "b"), "Width: b"),
        ("Old -> new: {A}, Name: {B} ({C})", ("", "b", ""), "Name: b"),
        ("{A} (now: {B}. Old -> new: {C}", ("a", "", "c"), "a. Old -> new: c"),
        ("100% {A} %s {B}", ("a", "b"), "100% a %s b"),
        ("{A} | {B} | {C} | {D}", ("a", "", "", "d"), "a | d"),
    ],
)
def test_what_stays_around_empty_columns(template, values, expected):
    assert render(template, *values) == expected


def test_punctuation_inside_values_is_left_alone():
    assert render("{A}. {B}", "etc. . .", "(, )") == "etc. . .. (, )"
    assert render("{A}. {B}", "wait ...", "") == "wait ..."


SHOWN = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), max_size=5).map(str.strip)
"""As formatters give them; U+0085 and U+00A0 are blanks too."""
VALUES = st.lists(SHOWN, min_size=4, max_size=4)


@given(VALUES)
def test_every_value_appears_in_order_and_nothing_is_left_of_none(values):
    template = Template.parse("Name: {A}. {B} ({C}), weight {D} kg")
    text = template.render(values)
    at = 0
    for value in values:
        at = text.index(value, at) + len(value)
    assert bool(text) == any(values)
    assert text == text.strip()


@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_no_doubled_separators(filled):
    text = Template.parse("{A}. {B}. {C}").render([word if on else "" for word, on in zip("xyz", filled, strict=True)])
    assert text == ". ".join(word for word, on in zip("xyz", filled, strict=True) if on)


@given(st.text(max_size=30))
def test_parsing_never_fails_otherwise(text):
    try:
        template = Template.parse(text)
    except ConfigurationError:
        return
    assert len(template.literals) == len(template.slots) + 1


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_any_name_can_be_written_in_quotes(name):
    quoted = name.replace('"', '""')
    assert Template.parse('{"' + quoted + '"}').slots == (name,)


def test_memory_for_combinations_is_bounded():
    template = Template.parse("".join(f"{{C{n}}} " for n in range(12)))
    for mask in range(4096):
        template.render(["x" if mask >> bit & 1 else "" for bit in range(12)])
    assert len(template._plans) <= 1024
