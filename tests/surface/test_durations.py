"""Spans of time and schedules in the settings: what is taken, and what a person is told about the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.settings import SettingsError, load, seconds
from app.src.settings.collections import ScheduleSettings
from app.src.settings.model import SyncSettings
from app.src.settings.section import LONGEST

BLOCK = """
[[collections]]
name = "materials"
source = "S.MARA"
template = "{{MAKTX}}"
schedule = {}
"""


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5400),
        ("1d", 86_400),
        ("1d2h3m4s", 93_784),
        ("0.5s", 0.5),
        ("1.5h", 5400),
        ("90", 90),
        ("0", 0),
        (" 1h 30m ", 5400),
        ("5M", 300),
        ("3650d", LONGEST),
    ],
)
def test_it_is_read_as_it_is_written(text: str, length: float) -> None:
    assert seconds(text) == length


@pytest.mark.parametrize(
    "text",
    ["", " ", "m", "5x", "5m1h", "5m5m", "-5m", "five", "1e9", "٣s", "3651d", "9" * 400 + "d", "nan", "inf"],
)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        seconds(text)


@given(st.integers(0, 3649), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(days: int, hours: int, minutes: int, rest: int) -> None:
    assert seconds(f"{days}d{hours}h{minutes}m{rest}s") == ((days * 24 + hours) * 60 + minutes) * 60 + rest


@pytest.mark.parametrize("value", [True, None, [5], {"m": 5}, -1, float("nan"), float("inf")])
def test_a_setting_takes_text_and_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="duration"):
        SyncSettings(longest_wait=value)
    assert SyncSettings.model_validate({"longest_wait": "2m", "give_up_after": 60}).longest_wait == 120


def fault(folder: Path, schedule: str) -> str:
    (folder / "owl-sap.toml").write_text(BLOCK.format(schedule), encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load(environ={}, folder=folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("{}", "either every"),
        ('{ every = "5m", cron = "* * * * *" }', "either every"),
        ('{ every = "soon" }', "not a duration"),
        ('{ every = "0.5s" }', "greater than or equal to 1"),
        ('{ every = "5m", timezone = "Europe/Berlin" }', "timezone applies only to cron"),
        ('{ cron = "15 2 * *" }', "five fields"),
        ('{ cron = "0 15 2 * * *" }', "five fields"),
        ('{ cron = "61 2 * * *" }', "bad minute"),
        ('{ cron = "0 0 30 2 *" }', "bad day-of-month"),
        ('{ cron = "0 0 29 2 MON#6" }', "bad day-of-week"),
        ('{ cron = "15 2 * * *", timezone = "Mars/Olympus" }', "unknown time zone"),
        ('{ cron = "15 2 * * *", timezone = "../../etc/passwd" }', "unknown time zone"),
        ('{ evry = "5m" }', 'did you mean "every"'),
        ('"5m"', "schedule"),
    ],
)
def test_a_schedule_that_cannot_be_is_explained(tmp_path: Path, schedule: str, told: str) -> None:
    message = fault(tmp_path, schedule)
    assert told in message
    assert "owl-sap.toml" in message


@pytest.mark.parametrize(
    "schedule",
    [
        {"every": "5m"},
        {"every": 30, "jitter": "10s"},
        {"cron": "*/5 * * * *"},
        {"cron": "15 2 * * MON-FRI", "timezone": "Europe/Berlin"},
        {"cron": "0 4 L * *"},
    ],
)
def test_schedules_that_can(schedule: dict[str, Any]) -> None:
    assert ScheduleSettings.model_validate(schedule)


def test_the_schema_lets_editors_write_both_forms() -> None:
    schema = json.dumps(SyncSettings.model_json_schema())
    assert '"longest_wait"' in schema
    assert '["string", "number"]' in schema
