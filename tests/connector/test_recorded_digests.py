"""Ids and digests as earlier versions stored them. If one changes, every user's next sync writes all rows again."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal

import pytest

from connector.document.document import Renderer, content_hash, document_id, document_ids, quarantine_id
from connector.errors import RowRejected
from connector.model import Cells, CollectionSpec, Column, Document, Page, Row, Table, TableRef

KINDS = ("NVARCHAR", "DOUBLE")  # columns of floating numbers make the digest of every row another one
NAMES = ("K", "N", "A", "B", "C", "D", "BUDAT", "MATNR")
ROWS = (
    ("k", 1, "text", "more", None, Decimal("12.50"), "20240131", "000000000000004711"),
    ("k,],[", 2, "a],[b", "", " x ", Decimal("-0.00"), "00000000", "X1"),
    ("\ud83d\ude00", 3, "line\nbreak\x00", "ü  ", date(2024, 1, 31), datetime(2024, 1, 31, 9, 30, 0, 5), None, ""),
    ("a\ud800", -4, "half \udc00", "\u2028", time(9, 30), b"\x00\xff", "2024013", "0000000000"),
    (b"\x01\x02", 2**70, None, None, None, None, None, None),
    ("", 6, "", " ", "", 0, "", " "),
    (None, 7, True, False, 1, 0, 1, 2**63),
    (Decimal("1.50"), 8, Decimal("1E+3"), Decimal("0.10"), Decimal("1.5"), Decimal("7"), "20241399", "0"),
    (date(2024, 2, 29), datetime(2024, 2, 29), b"", bytes(3), [], "x", "20240229", "12"),
    (1.5, -0.0, -0.0, 1e300, 0.1, 5.0, "20240229", "12"),
    ("nan", 9, float("nan"), float("inf"), 1.0, 2.0, "20240229", "12"),
)

RECORDED = {
    "NVARCHAR": [
        (
            '["k",1]',
            "4b210626e97f4ea0",
            "4711: text, more (12.5). 2024-01-31",
            "46668b8e8ac6510c62d1ea1d2efe38914b210626e97f4ea0",
            "324d1999e1497b53fe9b36467803d04261d992d89b8c209c",
        ),
        (
            '["k,],[",2]',
            "3a3e1259b24958ea",
            "X1: a],[b, (0)",
            "ee3e373391cc7db6548674e468df4fe33a3e1259b24958ea",
            "4e587bd96363b24704722da73f67b26110c686a7c0ba36d6",
        ),
        (
            '["\U0001f600",3]',
            "2cd70e56f71c7493",
            "line\nbreak, \xfc (2024-01-31 09:30:00.000005)",
            "d0765fef0eef17558e4b67c76146387e2cd70e56f71c7493",
            "38815f42669a4c26fe297146a3e200b3062f9aa885ef1aaf",
        ),
        (
            '["a\\ud800",-4]',
            "37ee955483acbfa3",
            "half \ufffd, (00FF). 2024013",
            "96ec193374daa121b38130ce1f0c3c0b37ee955483acbfa3",
            "bc1593a404ac8dc4fc655d63ed3f4b061d1601aaf15fd19f",
        ),
        (
            '[{"bytes":"0102"},1180591620717411303424]',
            "ebcfce4575d9a0bf",
            "",
            "79d9204bfd72a14bf1989345cadc1790ebcfce4575d9a0bf",
            "d8855b24a1768c4fbc075061defb946cc1375abb072ace83",
        ),
        (
            '["",6]',
            "094de74be98327cf",
            "(0)",
            "bfeb785c6a72a94960cbe3f14808fcee094de74be98327cf",
            "161a0f1a3426a5fc427c71365747f05923b573b59b7049f3",
        ),
        (
            "[null,7]",
            "e82a19a10a6f7855",
            "9223372036854775808: true, false (0). 1",
            "18d4e00b912215fb1488429a0e209e80e82a19a10a6f7855",
            "509a9c70dd8bb6decad986257063c1bdc2d28d5f789c1669",
        ),
        (
            '[{"decimal":"1.5"},8]',
            "ec5791f501030fd5",
            "1000, 0.1 (7). 20241399",
            "3aaf01a46e4e3a67001538e3ddd5b14fec5791f501030fd5",
            "8ae3dc148f1b7678e521cfffc5017805c6af050b73f061e9",
        ),
        (
            '[{"date":"2024-02-29"},{"datetime":"2024-02-29T00:00:00"}]',
            "f2597cf6cf355a4f",
            "12: 000000 (x). 2024-02-29",
            "66169998cba68bfab849967f0bb7a657f2597cf6cf355a4f",
            "085f4732401c3a3f7e43237dc0bbdda2d8a1e808bdc63473",
        ),
        (
            "[1.5,0.0]",
            "ca1eaf302eee4208",
            "12: 0, 1e+300 (5). 2024-02-29",
            "869ab775160cbcb5e76bdecf5161732bca1eaf302eee4208",
            "d68cf6b8d10f5d0e1d7632fe3d4a0e90e0e63bce5c1d2c34",
        ),
        ('["nan",9]', "f4acf480b5ee4e65", "column 'A' has a value that cannot be rendered (ValueError)"),
    ],
    "DOUBLE": [
        (
            '["k",1]',
            "f2f1f6ed167256ad",
            "4711: text, more (12.5). 2024-01-31",
            "46668b8e8ac6510c62d1ea1d2efe3891f2f1f6ed167256ad",
            "324d1999e1497b53fe9b36467803d042d809621364813891",
        ),
        (
            '["k,],[",2]',
            "133452645a11670a",
            "X1: a],[b, (0)",
            "ee3e373391cc7db6548674e468df4fe3133452645a11670a",
            "4e587bd96363b24704722da73f67b26139ccc69a28e20936",
        ),
        (
            '["\U0001f600",3]',
            "8dc8a1be43709c08",
            "line\nbreak, \xfc (2024-01-31 09:30:00.000005)",
            "d0765fef0eef17558e4b67c76146387e8dc8a1be43709c08",
            "38815f42669a4c26fe297146a3e200b3a73035403183f234",
        ),
        (
            '["a\\ud800",-4]',
            "1e683add32573d2d",
            "half \ufffd, (00FF). 2024013",
            "96ec193374daa121b38130ce1f0c3c0b1e683add32573d2d",
            "bc1593a404ac8dc4fc655d63ed3f4b063490ae2340a45311",
        ),
        (
            '[{"bytes":"0102"},1180591620717411303424]',
            "f7ad017a32be4f8d",
            "",
            "79d9204bfd72a14bf1989345cadc1790f7ad017a32be4f8d",
            "d8855b24a1768c4fbc075061defb946cdd559584404d21b1",
        ),
        (
            '["",6]',
            "2f6840b528b8791a",
            "(0)",
            "bfeb785c6a72a94960cbe3f14808fcee2f6840b528b8791a",
            "161a0f1a3426a5fc427c71365747f0590590d44b5a4b1726",
        ),
        (
            "[null,7]",
            "22b79d30ca564b5d",
            "9223372036854775808: true, false (0). 1",
            "18d4e00b912215fb1488429a0e209e8022b79d30ca564b5d",
            "509a9c70dd8bb6decad986257063c1bd084f09ceb8a52561",
        ),
        (
            '[{"decimal":"1.5"},8]',
            "22b8d69721f144c3",
            "1000, 0.1 (7). 20241399",
            "3aaf01a46e4e3a67001538e3ddd5b14f22b8d69721f144c3",
            "8ae3dc148f1b7678e521cfffc50178050840426953022aff",
        ),
        (
            '[{"date":"2024-02-29"},{"datetime":"2024-02-29T00:00:00"}]',
            "c07121c563f0cf1e",
            "12: 000000 (x). 2024-02-29",
            "66169998cba68bfab849967f0bb7a657c07121c563f0cf1e",
            "085f4732401c3a3f7e43237dc0bbdda2ea89b53b1103a122",
        ),
        (
            "[1.5,0.0]",
            "fec4cfe6c0e1b3dc",
            "12: 0, 1e+300 (5). 2024-02-29",
            "869ab775160cbcb5e76bdecf5161732bfec4cfe6c0e1b3dc",
            "d68cf6b8d10f5d0e1d7632fe3d4a0e90d43c5b18b212dde0",
        ),
        ('["nan",9]', "c45d11db083657b7", "column 'A' has a value that cannot be rendered (ValueError)"),
    ],
}


class NoModel:
    dimension, model, fingerprint, max_tokens = 8, "none", "none", 100
    database_model = None

    def count_tokens(self, texts):
        return [1] * len(texts)


def renderer(kind: str) -> Renderer:
    columns = [Column(name, "NVARCHAR", 18) for name in NAMES]
    columns[2] = Column("A", kind, 18)
    columns[5] = Column("D", "DECIMAL", 15, 2)
    columns[6] = Column("BUDAT", "NVARCHAR", 8)
    table = Table(TableRef("S", "T"), tuple(columns), ("K", "N"))
    template = "{MATNR}: {A}, {B} ({D}). {BUDAT}"
    return Renderer(CollectionSpec("c", table.ref, template, metadata=("C", "B", "BUDAT", "A")), table, NoModel())


def read(values: tuple[object, ...], made: Renderer) -> Row:
    by_name = dict(zip(NAMES, values, strict=True))
    names = (*made.key, *(name for name in made.query.columns if name not in made.key))
    return Row(values[:2], Cells({name: at for at, name in enumerate(names)}, tuple(by_name[name] for name in names)))


def shown(values: tuple[object, ...], made: Renderer) -> tuple[str, ...]:
    """Return the id or its error, then the row's digest, and what a rendered row is stored with."""
    row = read(values, made)
    try:
        return result(made.document(row), row, made)
    except RowRejected as error:
        return result(error, row, made)


def result(document: Document | RowRejected, row: Row, made: Renderer) -> tuple[str, ...]:
    digest = made.row_digest(row).hex()
    if isinstance(document, RowRejected):
        return quarantine_id(row.key), digest, str(document)
    assert document.id == document_id(row.key)
    return document.id, digest, document.text, content_hash(document, 0, 1).hex(), content_hash(document, 1, 3).hex()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copies", [1, 3])  # three: texts repeat
@pytest.mark.parametrize("invalid", [0, 1])  # the last row is rejected
def test_rows_together_are_as_one_by_one(kind: str, copies: int, invalid: int) -> None:
    one = renderer(kind)
    rows = [read(values, one) for values in ROWS[: len(ROWS) - 1 + invalid]] * copies
    page = Page(rows[0].values._places, 2, [row.values.in_order for row in rows])
    ids = document_ids(page.keys)
    assert ids == [document_id(row.key) for row in rows]
    assert one.row_digests(page) == [one.row_digest(row) for row in rows]
    expected = [shown(values, one) for values in ROWS[: len(ROWS) - 1 + invalid]] * copies
    for some in (rows, page):
        documents = one.documents(some, ids)
        assert [result(document, row, one) for document, row in zip(documents, rows, strict=True)] == expected
    uniform = [
        Row(("k", number), Cells(rows[0].values._places, ("k", number, *rows[0].values.in_order[2:])))
        for number in range(4)
    ]
    assert document_ids([row.key for row in uniform]) == [document_id(row.key) for row in uniform]
    assert one.documents(uniform, document_ids([row.key for row in uniform])) == list(map(one.document, uniform))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_digests_are_as_recorded(kind: str) -> None:
    assert [shown(values, renderer(kind)) for values in ROWS] == RECORDED[kind]
