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
            "44161a03fea465a0",
            "4711: text, more (12.5). 2024-01-31",
            "46668b8e8ac6510c62d1ea1d2efe389144161a03fea465a0",
            "324d1999e1497b53fe9b36467803d0426eee8efd8c570b9c",
        ),
        (
            '["k,],[",2]',
            "68002b4b65b1e060",
            "X1: a],[b, (0)",
            "ee3e373391cc7db6548674e468df4fe368002b4b65b1e060",
            "4e587bd96363b24704722da73f67b26142f8bfb517428e5c",
        ),
        (
            '["\U0001f600",3]',
            "e54d47d84d324942",
            "line\nbreak, \xfc (2024-01-31 09:30:00.000005)",
            "d0765fef0eef17558e4b67c76146387ee54d47d84d324942",
            "38815f42669a4c26fe297146a3e200b3cfb5d3263fc1277e",
        ),
        (
            '["a\\ud800",-4]',
            "81974b2a3c33a3af",
            "half \ufffd, (00FF). 2024013",
            "96ec193374daa121b38130ce1f0c3c0b81974b2a3c33a3af",
            "bc1593a404ac8dc4fc655d63ed3f4b06ab6fdfd44ec0cd93",
        ),
        (
            '[{"bytes":"0102"},1180591620717411303424]',
            "be2c6139dda3530c",
            "",
            "79d9204bfd72a14bf1989345cadc1790be2c6139dda3530c",
            "d8855b24a1768c4fbc075061defb946c94d4f5c7af503d30",
        ),
        (
            '["",6]',
            "fa41c5faa9041853",
            "(0)",
            "bfeb785c6a72a94960cbe3f14808fceefa41c5faa9041853",
            "161a0f1a3426a5fc427c71365747f059d0b95104dbf7766f",
        ),
        (
            "[null,7]",
            "c173eb387f28c076",
            "9223372036854775808: true, false (0). 1",
            "18d4e00b912215fb1488429a0e209e80c173eb387f28c076",
            "509a9c70dd8bb6decad986257063c1bdeb8b7fc60ddbae4a",
        ),
        (
            '[{"decimal":"1.5"},8]',
            "143bb9ec23b0fd18",
            "1000, 0.1 (7). 20241399",
            "3aaf01a46e4e3a67001538e3ddd5b14f143bb9ec23b0fd18",
            "8ae3dc148f1b7678e521cfffc50178053ec32d1251439324",
        ),
        (
            '[{"date":"2024-02-29"},{"datetime":"2024-02-29T00:00:00"}]',
            "fb6b5bb6d8e4240a",
            "12: 000000 (x). 2024-02-29",
            "66169998cba68bfab849967f0bb7a657fb6b5bb6d8e4240a",
            "085f4732401c3a3f7e43237dc0bbdda2d193cf48aa174a36",
        ),
        (
            "[1.5,0.0]",
            "223e4af895b8c169",
            "12: 0, 1e+300 (5). 2024-02-29",
            "869ab775160cbcb5e76bdecf5161732b223e4af895b8c169",
            "d68cf6b8d10f5d0e1d7632fe3d4a0e9008c6de06e74baf55",
        ),
        ('["nan",9]', "51fb5b65d4340505", "column 'A' has a value that cannot be rendered (ValueError)"),
    ],
    "DOUBLE": [
        (
            '["k",1]',
            "912e1c9e249a175e",
            "4711: text, more (12.5). 2024-01-31",
            "46668b8e8ac6510c62d1ea1d2efe3891912e1c9e249a175e",
            "324d1999e1497b53fe9b36467803d042bbd6886056697962",
        ),
        (
            '["k,],[",2]',
            "cb35c609cab2ad27",
            "X1: a],[b, (0)",
            "ee3e373391cc7db6548674e468df4fe3cb35c609cab2ad27",
            "4e587bd96363b24704722da73f67b261e1cd52f7b841c31b",
        ),
        (
            '["\U0001f600",3]',
            "09802d41d183ece8",
            "line\nbreak, \xfc (2024-01-31 09:30:00.000005)",
            "d0765fef0eef17558e4b67c76146387e09802d41d183ece8",
            "38815f42669a4c26fe297146a3e200b32378b9bfa37082d4",
        ),
        (
            '["a\\ud800",-4]',
            "db07f059fec916df",
            "half \ufffd, (00FF). 2024013",
            "96ec193374daa121b38130ce1f0c3c0bdb07f059fec916df",
            "bc1593a404ac8dc4fc655d63ed3f4b06f1ff64a78c3a78e3",
        ),
        (
            '[{"bytes":"0102"},1180591620717411303424]',
            "32feca3a86624314",
            "",
            "79d9204bfd72a14bf1989345cadc179032feca3a86624314",
            "d8855b24a1768c4fbc075061defb946c18065ec4f4912d28",
        ),
        (
            '["",6]',
            "e5e3cc86cbd42c91",
            "(0)",
            "bfeb785c6a72a94960cbe3f14808fceee5e3cc86cbd42c91",
            "161a0f1a3426a5fc427c71365747f059cf1b5878b92742ad",
        ),
        (
            "[null,7]",
            "924effa6d5b93bcf",
            "9223372036854775808: true, false (0). 1",
            "18d4e00b912215fb1488429a0e209e80924effa6d5b93bcf",
            "509a9c70dd8bb6decad986257063c1bdb8b66b58a74a55f3",
        ),
        (
            '[{"decimal":"1.5"},8]',
            "5144a8ec45a52c5e",
            "1000, 0.1 (7). 20241399",
            "3aaf01a46e4e3a67001538e3ddd5b14f5144a8ec45a52c5e",
            "8ae3dc148f1b7678e521cfffc50178057bbc3c1237564262",
        ),
        (
            '[{"date":"2024-02-29"},{"datetime":"2024-02-29T00:00:00"}]',
            "5740960866edc640",
            "12: 000000 (x). 2024-02-29",
            "66169998cba68bfab849967f0bb7a6575740960866edc640",
            "085f4732401c3a3f7e43237dc0bbdda27db802f6141ea87c",
        ),
        (
            "[1.5,0.0]",
            "481cb2a75c2bb955",
            "12: 0, 1e+300 (5). 2024-02-29",
            "869ab775160cbcb5e76bdecf5161732b481cb2a75c2bb955",
            "d68cf6b8d10f5d0e1d7632fe3d4a0e9062e426592ed8d769",
        ),
        ('["nan",9]', "70c11e7a833b51e0", "column 'A' has a value that cannot be rendered (ValueError)"),
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
