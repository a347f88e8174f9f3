"""Reply segments and their small parts: row counts, transaction flags, errors, result sets."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hana_emulator import cesu8
from hana_emulator.errors import HanaError
from hana_emulator.protocol.codes import PartAttribute, PartKind, TransactionFlag
from hana_emulator.protocol.options import option_part
from hana_emulator.protocol.output import ResultSet
from hana_emulator.protocol.packet import Part, Reply

_ERROR = struct.Struct("<iiib5s")
_LEVEL_ERROR = 1
_SQL_STATES = {301: b"23000", 287: b"23000", 131: b"40001", 133: b"40001", 10: b"28000", 257: b"42000"}
_GENERAL_STATE = b"HY000"
_ALIGNMENT = 8
_COUNT_SIZE = 4
FIRST_PAGE = 32  # Rows in the reply that opens a result set, as in HANA
NEXT_PAGE = 32_767  # Rows in a reply to FETCHNEXT if the client gives no number


def rows_affected(counts: Sequence[int]) -> Part:
    return Part(PartKind.ROWSAFFECTED, struct.pack(f"<{len(counts)}i", *counts), len(counts))


def counts_of_last_row(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The ROWSAFFECTED part of `parts`, if any, reduced to the count of the last row."""
    return tuple(
        Part(part.kind, part.data[-_COUNT_SIZE:], min(part.count, 1))
        for part in parts
        if part.kind == PartKind.ROWSAFFECTED
    )


def transaction_flags(*flags: TransactionFlag) -> Part:
    return option_part(PartKind.TRANSACTIONFLAGS, dict.fromkeys(flags, True))


def error_reply(error: HanaError) -> Reply:
    """An error reply, with the rollback flag if the server rolled back (131, 133, 139, a full disk)."""
    parts = [Part(PartKind.ERROR, _entries([error]))]
    if error.rolls_back:
        parts.append(transaction_flags(TransactionFlag.ROLLED_BACK))
    return Reply(0, tuple(parts), error=True)


def _entries(errors: Sequence[HanaError]) -> bytes:
    """The data of an ERROR part. HANA adds one byte to a single error and aligns several to eight bytes each.

    Source: go-hdb, `driver/internal/protocol/error.go`, which waits for that byte. Each of several errors ends
    in a zero byte, because hdbcli 2.30 crashes if text and alignment leave none.
    """
    entries = [_entry(error) for error in errors]
    if len(entries) == 1:
        return entries[0] + b"\0"
    return b"".join(entry + bytes(1 + -(len(entry) + 1) % _ALIGNMENT) for entry in entries)


def _entry(error: HanaError) -> bytes:
    text = cesu8.encode(error.text)
    state = _SQL_STATES.get(error.code, _GENERAL_STATE)
    return _ERROR.pack(error.code, error.position, len(text), _LEVEL_ERROR, state) + text


def batch_error_reply(errors: Sequence[HanaError], counts: Sequence[int], flags: Part) -> Reply:
    """An error reply with one error for each `seam.FAILED` count, in row order, so that clients find the rows."""
    part = Part(PartKind.ERROR, _entries(errors), len(errors))
    return Reply(0, (part, rows_affected(counts), flags), error=True)


def result_page(results: ResultSet, max_rows: int, *, first: bool) -> Part:
    """The next page; its attributes say whether more rows follow."""
    data, count = results.page(max_rows)
    attributes = PartAttribute.LAST | PartAttribute.CLOSED if results.exhausted else PartAttribute.NEXT
    if first:
        attributes |= PartAttribute.FIRST
    if not count:
        attributes |= PartAttribute.ROW_NOT_FOUND
    return Part(PartKind.RESULTSET, data, count, attributes)
