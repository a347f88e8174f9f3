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
            "b582dfbbea662fbd",
            "4711: text, more (12.5). 2024-01-31",
            "46668b8e8ac6510c62d1ea1d2efe3891b582dfbbea662fbd",
            "324d1999e1497b53fe9b36467803d0429f7a4b4598954181",
        ),
        (
            '["k,],[",2]',
            "8669526cb7c2d039",
            "X1: a],[b, (0)",
            "ee3e373391cc7db6548674e468df4fe38669526cb7c2d039",
            "4e587bd96363b24704722da73f67b261ac91c692c531be05",
        ),
        (
            '["\U0001f600",3]',
            "a99f5c107bd5616f",
            "line\nbreak, \xfc (2024-01-31 09:30:00.000005)",
            "d0765fef0eef17558e4b67c76146387ea99f5c107bd5616f",
            "38815f42669a4c26fe297146a3e200b38367c8ee09260f53",
        ),
        (
            '["a\\ud800",-4]',
            "f6702fd86df68dd3",
            "half \ufffd, (00FF). 2024013",
            "96ec193374daa121b38130ce1f0c3c0bf6702fd86df68dd3",
            "bc1593a404ac8dc4fc655d63ed3f4b06dc88bb261f05e3ef",
        ),
        (
            '[{"bytes":"0102"},1180591620717411303424]',
            "7aad68db1265c114",
            "",
            "79d9204bfd72a14bf1989345cadc17907aad68db1265c114",
            "d8855b24a1768c4fbc075061defb946c5055fc256096af28",
        ),
        (
            '["",6]',
            "6c3a35eda381253b",
            "(0)",
            "bfeb785c6a72a94960cbe3f14808fcee6c3a35eda381253b",
            "161a0f1a3426a5fc427c71365747f05946c2a113d1724b07",
        ),
        (
            "[null,7]",
            "8cf6064e75260011",
            "9223372036854775808: true, false (0). 1",
            "18d4e00b912215fb1488429a0e209e808cf6064e75260011",
            "509a9c70dd8bb6decad986257063c1bda60e92b007d56e2d",
        ),
        (
            '[{"decimal":"1.5"},8]',
            "3a289ae7418eb79d",
            "1000, 0.1 (7). 20241399",
            "3aaf01a46e4e3a67001538e3ddd5b14f3a289ae7418eb79d",
            "8ae3dc148f1b7678e521cfffc501780510d00e19337dd9a1",
        ),
        (
            '[{"date":"2024-02-29"},{"datetime":"2024-02-29T00:00:00"}]',
            "969189670e92bd0e",
            "12: 000000 (x). 2024-02-29",
            "66169998cba68bfab849967f0bb7a657969189670e92bd0e",
            "085f4732401c3a3f7e43237dc0bbdda2bc691d997c61d332",
        ),
        (
            "[1.5,0.0]",
            "348183c5794fc02d",
            "12: 0, 1e+300 (5). 2024-02-29",
            "869ab775160cbcb5e76bdecf5161732b348183c5794fc02d",
            "d68cf6b8d10f5d0e1d7632fe3d4a0e901e79173b0bbcae11",
        ),
        ('["nan",9]', "0dbf802fe40f419a", "column 'A' has a value that cannot be rendered (ValueError)"),
    ],
    "DOUBLE": [
        (
            '["k",1]',
            "6f59da063477c047",
            "4711: text, more (12.5). 2024-01-31",
            "46668b8e8ac6510c62d1ea1d2efe38916f59da063477c047",
            "324d1999e1497b53fe9b36467803d04245a14ef84684ae7b",
        ),
        (
            '["k,],[",2]',
            "8f41b3e8c25ecdf5",
            "X1: a],[b, (0)",
            "ee3e373391cc7db6548674e468df4fe38f41b3e8c25ecdf5",
            "4e587bd96363b24704722da73f67b261a5b92716b0ada3c9",
        ),
        (
            '["\U0001f600",3]',
            "089c22f409dace49",
            "line\nbreak, \xfc (2024-01-31 09:30:00.000005)",
            "d0765fef0eef17558e4b67c76146387e089c22f409dace49",
            "38815f42669a4c26fe297146a3e200b32264b60a7b29a075",
        ),
        (
            '["a\\ud800",-4]',
            "d3eaac745217409f",
            "half \ufffd, (00FF). 2024013",
            "96ec193374daa121b38130ce1f0c3c0bd3eaac745217409f",
            "bc1593a404ac8dc4fc655d63ed3f4b06f912388a20e42ea3",
        ),
        (
            '[{"bytes":"0102"},1180591620717411303424]',
            "3a8e5bbc79e83dbb",
            "",
            "79d9204bfd72a14bf1989345cadc17903a8e5bbc79e83dbb",
            "d8855b24a1768c4fbc075061defb946c1076cf420b1b5387",
        ),
        (
            '["",6]',
            "6879a0cda413f3fa",
            "(0)",
            "bfeb785c6a72a94960cbe3f14808fcee6879a0cda413f3fa",
            "161a0f1a3426a5fc427c71365747f05942813433d6e09dc6",
        ),
        (
            "[null,7]",
            "803659b0201c5982",
            "9223372036854775808: true, false (0). 1",
            "18d4e00b912215fb1488429a0e209e80803659b0201c5982",
            "509a9c70dd8bb6decad986257063c1bdaacecd4e52ef37be",
        ),
        (
            '[{"decimal":"1.5"},8]',
            "4e0e305b8c347fa3",
            "1000, 0.1 (7). 20241399",
            "3aaf01a46e4e3a67001538e3ddd5b14f4e0e305b8c347fa3",
            "8ae3dc148f1b7678e521cfffc501780564f6a4a5fec7119f",
        ),
        (
            '[{"date":"2024-02-29"},{"datetime":"2024-02-29T00:00:00"}]',
            "829aac52fe75e3a8",
            "12: 000000 (x). 2024-02-29",
            "66169998cba68bfab849967f0bb7a657829aac52fe75e3a8",
            "085f4732401c3a3f7e43237dc0bbdda2a86238ac8c868d94",
        ),
        (
            "[1.5,0.0]",
            "8aeb54c9148d9dfd",
            "12: 0, 1e+300 (5). 2024-02-29",
            "869ab775160cbcb5e76bdecf5161732b8aeb54c9148d9dfd",
            "d68cf6b8d10f5d0e1d7632fe3d4a0e90a013c037667ef3c1",
        ),
        ('["nan",9]', "6c3fe8f7c849fcf1", "column 'A' has a value that cannot be rendered (ValueError)"),
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
