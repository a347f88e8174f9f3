"""Templates at random: any text, and texts out of what templates are made of."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connector.document.template import Template
from connector.errors import ConfigurationError
from tests.fuzz import outcomes

QUICKLY = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
PIECES = (
    *(
        "{MAKTX}",
        "{LTEXT}",
        '{"/BIC/TXT"}',
        '{"a""b"}',
        "{ A }",
        "{{",
        "}}",
        "{",
        "}",
        '"',
        '{""}',
        "{}",
        '{"',
        "{a{b}",
    ),
    *(". ", ", ", "; ", " - ", " | ", "/", "\n", "(", ")", "[", "]", "<", ">", ": ", "=", "%", "%s", "%(x)s", " "),
    *("Weight: ", " kg", "Price", "Öl", "漢", "😀", "\0", "\u2028", "\\"),
)
pieces = st.lists(st.sampled_from(PIECES), max_size=15).map("".join)
values = st.lists(
    st.one_of(st.just(""), st.sampled_from(["%", "%s", "{A}", "x", "5", " ", "\n"]), st.text(max_size=6)), max_size=5
)


@settings(QUICKLY, max_examples=150)
@given(text=st.one_of(pieces, pieces, st.text(max_size=60)), values=values)
def test_parsed_or_refused_and_rendered_alike(text: str, values: list[str]) -> None:
    outcomes.check_template(text, values)


@pytest.mark.slow
@settings(QUICKLY, max_examples=30_000)
@given(text=st.one_of(pieces, pieces, st.text(max_size=200)), values=values)
def test_templates_for_minutes(text: str, values: list[str]) -> None:
    outcomes.check_template(text, values)


def test_a_long_name_is_not_repeated_whole() -> None:
    """A message as long as the template, six characters for each that cannot be written (found by atheris)."""
    assert outcomes.check_template("{z" + "\udcff" * 5_000 + "{)}", []) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{" * 20_000,
            "{a" * 20_000,
            '{"' * 20_000,
            "{ " * 20_000,
            "{ a " + " " * 20_000,
            "{A}" + ": " * 10_000 + "{B}",
        ),
        *('{"a' + '""' * 20_000, "{A}" + "x " * 20_000 + ":{B}", "{A}" + " ." * 20_000 + "{B}", "{A}" * 5_000),
        *("{A" + "b c" * 20_000, "(" * 10_000 + "{A}" + ")" * 10_000, "{A} " + "Weight: " * 5_000 + "{B}"),
    ],
    ids=lambda text: f"{text[:8]!r} {len(text)}",
)
def test_long_ones_take_no_time(text: str) -> None:
    start = time.thread_time()
    try:
        template = Template.parse(text)
        template.render([""] + ["x"] * (len(template.slots) - 1))
    except ConfigurationError:
        pass
    assert time.thread_time() - start < 2
