"""HANA's error codes that the emulator raises. A `HanaError` becomes an error segment."""

from __future__ import annotations

# Codes of errors with which HANA rolls the transaction back. Source: SAP's sqlalchemy-hana, `errors.py`; SAP HANA SQL
# error codes ("transaction rolled back by ...").
ENDS_TRANSACTION = frozenset({129, 131, 133, 138, 139, 143, 145, 149})


class HanaError(Exception):
    """An error for the client: `code` and `text` become hdbcli's `errorcode` and `errortext`.

    `position` is the 1-based character in the statement, 0 if unknown. `rolls_back`: the whole transaction was undone,
    not only the statement. The codes of `ENDS_TRANSACTION` (lock wait 131, deadlock 133, cancel 139 ...) always set it.
    """

    def __init__(self, code: int, text: str, *, position: int = 0, rolls_back: bool = False) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code
        self.text = text
        self.position = position
        self.rolls_back = rolls_back or code in ENDS_TRANSACTION


def syntax_error(detail: str, position: int = 0) -> HanaError:
    return HanaError(257, f"sql syntax error: {detail}", position=position)


def not_supported(what: str) -> HanaError:
    """HanaError 7, for a statement or function that the emulator lacks, whether or not HANA has it."""
    return HanaError(7, f"feature not supported: {what} (by this emulator)")


def out_of_memory(detail: str) -> HanaError:
    return HanaError(4, f"cannot allocate enough memory: {detail}")


def authentication_failed() -> HanaError:
    return HanaError(10, "authentication failed")


def lock_wait_timeout(detail: str) -> HanaError:
    return HanaError(131, f"transaction rolled back by lock wait timeout: {detail}")


def invalid_table(name: str) -> HanaError:
    return HanaError(259, f"invalid table name: Could not find table/view {name}")


def invalid_column(name: str) -> HanaError:
    return HanaError(260, f"invalid column name: {name}")


def value_too_large(detail: str) -> HanaError:
    return HanaError(274, f"inserted value too large for column: {detail}")


def null_not_allowed(column: str) -> HanaError:
    return HanaError(287, f"cannot insert NULL or update to NULL: {column}")


def duplicate_table(name: str) -> HanaError:
    return HanaError(288, f"cannot use duplicate table name: {name}")


def unique_violated(detail: str) -> HanaError:
    return HanaError(301, f"unique constraint violated: {detail}")


def invalid_number(detail: str) -> HanaError:
    return HanaError(339, f"invalid number: {detail}")


def invalid_schema(name: str) -> HanaError:
    return HanaError(362, f"invalid schema name: {name}")
