"""CREATE HNSW VECTOR INDEX: its options and their ranges (source: langchain-hana). The index is recorded only."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hana_emulator.errors import HanaError
from hana_emulator.sql.language.reader import Name, TokenReader

_FUNCTIONS = ("COSINE_SIMILARITY", "L2DISTANCE")
_BUILD = {"M": (4, 1_000), "efConstruction": (1, 100_000)}
_SEARCH = {"efSearch": (1, 100_000)}


@dataclass(frozen=True, slots=True)
class HnswIndex:
    """One CREATE HNSW VECTOR INDEX as written; `options` is JSON for the catalogue."""

    name: Name
    table: Name
    column: str
    options: str


def parse_hnsw(reader: TokenReader) -> HnswIndex:
    """Everything after the words CREATE HNSW VECTOR INDEX. Raises HanaError 257 and, for a bad option, 2."""
    name = reader.name()
    reader.expect("ON")
    table = reader.name()
    columns = reader.identifiers()
    if len(columns) != 1:
        raise reader.error("one column")
    reader.expect("SIMILARITY", "FUNCTION")
    function = reader.identifier()
    if function not in _FUNCTIONS:
        raise HanaError(
            7, f"feature not supported: similarity function {function}; {' or '.join(_FUNCTIONS)} are known"
        )
    build = _configuration(reader.string(), _BUILD) if reader.take("BUILD", "CONFIGURATION") else {}
    search = _configuration(reader.string(), _SEARCH) if reader.take("SEARCH", "CONFIGURATION") else {}
    online = reader.take("ONLINE")
    options = {"function": function, "build": build, "search": search, "online": online}
    return HnswIndex(name, table, columns[0], json.dumps(options))


def _configuration(text: str, ranges: dict[str, tuple[int, int]]) -> dict[str, int]:
    try:
        found = json.loads(text)
    except ValueError:
        raise HanaError(2, "general error: the index configuration is not JSON") from None
    if not isinstance(found, dict):
        raise HanaError(2, "general error: the index configuration is not a JSON object")
    for key, value in found.items():
        if key not in ranges:
            raise HanaError(2, f"general error: unknown index option {key}; known: {', '.join(ranges)}")
        low, high = ranges[key]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise HanaError(2, f"general error: index option {key} must be a whole number from {low} to {high}")
    return found
