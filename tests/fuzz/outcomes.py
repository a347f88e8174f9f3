"""What may come of input that nobody meant: of a filter, a template, a configuration. Anything else is a fault of ours,
whoever made the input: hypothesis, atheris or a person.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.src.settings import Loaded, SettingsError, load
from connector.document.template import Template
from connector.errors import BadFilter, ConfigurationError
from connector.stores import filters
from tests.filter_oracle import matches

CANARY = "canary-0b5e1c"
"""Stands in every secret; no message may repeat it."""
LONGEST_MESSAGE = 1_500
_PLACE = re.compile(r"(owl-sap\.toml|environment [A-Z]|\.env [A-Z]|settings)")

# ------------------------------------------------------------------------------------------------------------ filters


def parsed(where: Any) -> filters.Condition | None:
    """None for no filter, and for what is refused, with words that say where and do not repeat the values."""
    try:
        found = filters.parse(where)
    except BadFilter as error:
        _check_message(str(error), "filter at ")
        return None
    assert found == filters.parse(where)
    return found


def check_filter(where: Any, metadata: Mapping[str, Any], database: sqlite3.Connection) -> None:
    """It is refused, or Python and SQLite say the same of the record, and HANA's form has a value for each mark."""
    condition = parsed(where)
    if condition is None:
        return
    for_hana = filters.to_hana(condition)
    assert for_hana.sql.count("?") == len(for_hana.parameters)
    compiled = filters.to_sqlite(condition, "?1")
    stored = json.dumps(metadata)
    sql = f"SELECT {compiled.sql.replace('?1', 'meta')} FROM (SELECT ? AS meta)"
    try:
        expected = matches(condition, metadata)
    except BadFilter as error:
        _check_message(str(error), "the filter compares ")
        return  # SQLite may look at the parts in another order
    try:
        (found,) = database.execute(sql, (*compiled.parameters, stored)).fetchone()
    except sqlite3.OperationalError as error:
        if not filters.is_unreadable(error) or not isinstance(condition, filters.Group):
            raise  # in a group only, SQLite may have looked at a part that Python skipped
        return
    assert bool(found) is expected


def database() -> sqlite3.Connection:
    """With the functions that compiled filters use."""
    connection = sqlite3.connect(":memory:")
    filters.register(connection)
    return connection


# ---------------------------------------------------------------------------------------------------------- templates


def check_template(text: str, values: Sequence[str]) -> Template | None:
    """It is refused with a position, or renders the same whenever it is asked; with every column filled the values
    stand in it in their order, and with none there is no text."""
    try:
        template = Template.parse(text)
    except ConfigurationError as error:
        _check_message(str(error), "template, position ", "the template names no column")
        return None
    assert len(template.literals) == len(template.slots) + 1
    assert template.columns
    assert all(template.columns)
    count = len(template.slots)
    given = [values[place % len(values)] if values else "" for place in range(count)]
    rendered = template.render(given)
    assert rendered == Template.parse(text).render(given) == template.render(given)
    assert rendered == rendered.strip()
    assert template.render([""] * count) == ""
    filled = [f"<{place}>" for place in range(count)]
    place = 0
    whole = template.render(filled)
    for value in filled:
        place = whole.index(value, place) + len(value)
    return template


# ------------------------------------------------------------------------------------------------------ configuration


def check_configuration(folder: Path, toml: bytes, environ: Mapping[str, str]) -> Loaded | None:
    """It is refused, each line saying where, none of them a secret; or what follows from it can be asked for."""
    file = folder / "owl-sap.toml"
    file.write_bytes(toml)
    try:
        loaded = load(file, environ=environ, folder=folder)
    except SettingsError as error:
        message = str(error)
        assert message.strip(), "it does not say why"
        assert CANARY not in message
        assert "Traceback" not in message
        for line in message.splitlines():
            assert _PLACE.search(line), line
        return None
    settings = loaded.settings
    assert CANARY not in repr(loaded)
    assert CANARY not in str(settings.model_dump())
    for collection in settings.collections:
        spec = collection.spec()
        with contextlib.suppress(ConfigurationError):
            Template.parse(spec.template)
    assert settings.state_folder(loaded.file)
    return loaded


def _check_message(message: str, *starts: str) -> None:
    assert message.startswith(starts), message
    assert len(message) <= LONGEST_MESSAGE, "the message repeats the input"
    assert CANARY not in message
