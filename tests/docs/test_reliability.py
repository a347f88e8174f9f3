"""docs/reliability.md: the fault matrix with the tests that prove each row, read from the markers `proves` without
importing the tests. A row without a test says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from connector import failpoints
from tests.docs.sections import ROOT, check_section
from tests.proof.mutations import mutations

PAGE = "docs/reliability.md"
TEST = "tests/docs/test_reliability.py"


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the matrix. `holds`: invariants. `untried`: what of it cannot be tried here, and why."""

    number: int
    what: str
    holds: str
    behaviour: str
    untried: str = ""


FAULTS = (
    Fault(
        1,
        "SIGKILL at any moment: at every named failpoint, around a commit, at random",
        "I1-I6, I5 after each kill",
        "the next run goes on from what is stored; at most the batches under way are done again",
    ),
    Fault(
        2,
        "SIGTERM, Ctrl-C, container stop",
        "I5, I7",
        "the batch in hand is finished; sync exits 143 or 130, serve 0; streams end",
    ),
    Fault(
        3,
        "the line drops after some bytes, is reset, falls silent",
        "I1, I5, I8",
        "bounded retries over a new connection, each page from the key where the last one ended; silence ends by the "
        "communication timeout",
    ),
    Fault(
        4,
        "HANA rolls a transaction back: 129, 131, 133, 138, 139, 145, 149",
        "I7, I8",
        "the whole transaction is run again, a bounded number of times, its keys sorted",
    ),
    Fault(5, "HANA lacks memory: 4, 613, 2048", "I8", "less at a time, and more again later"),
    Fault(
        6,
        "HANA is down or in maintenance",
        "I8, I10",
        "bounded retries, then exit 3 (a job waits); the local store goes on answering",
    ),
    Fault(7, "wrong password, missing privilege", "", "exactly one attempt, and a message that names what to change"),
    Fault(
        8,
        "certificate expired, untrusted, of another name; TLS off",
        "",
        "refused and not tried again; plain text only by name",
    ),
    Fault(
        9,
        "rows twice in a page, pages read again, redelivery",
        "I3, I4",
        "the last version wins, counted as superseded",
    ),
    Fault(
        10,
        "an older version written after a newer one, by a slow worker",
        "I4",
        "its lease is gone, and with it the right to write: the epoch is compared inside the transaction",
    ),
    Fault(
        11,
        "a row deleted before, while and after its batch is worked on; a table that empties itself",
        "I2",
        "gone by the next comparison of everything, below the brake",
    ),
    Fault(12, "a key deleted and inserted again; a key changed", "I1-I3", "the old id is removed, the new one stored"),
    Fault(
        13,
        "a commit that becomes visible late, with a watermark below the mark",
        "I1",
        "the delay keeps away from open transactions; what comes later still is found by the next full comparison",
    ),
    Fault(
        14,
        "equal watermarks over a page's border, NULL, times below a microsecond",
        "I1",
        "pages go by (watermark, key); NULL waits for the full comparison",
    ),
    Fault(
        15,
        "clocks that are wrong or jump",
        "I1, I9",
        "only the database's clock counts; the local store's lease has the machine's, and a jump costs only it",
        "daylight saving: nothing here uses local time",
    ),
    Fault(
        16,
        "disk full, quota, no right to write",
        "I5, I6",
        "the transaction is rolled back whole, exit 3 names the file; what is stored can be searched",
    ),
    Fault(
        17,
        "the store is locked by another process",
        "I5",
        "a bounded wait, then an error that names the file",
        "the owner's process id: SQLite does not tell it",
    ),
    Fault(
        18,
        "the store's file is damaged, cut off, of a later version",
        "I10",
        "refused by name, never silently empty, never changed",
    ),
    Fault(
        19,
        "the model runs out of memory",
        "I1, I4",
        "half of the batch, tried again; the vectors are those of an undisturbed run",
        "a real lack of a card's memory needs a card (marker gpu)",
    ),
    Fault(
        20,
        "errors that a card does not recover from; a lost card; no NVML",
        "I8, I10",
        "all requests end at once, the process ends with 4, and its jobs go on in the next one; NVML is not needed",
        "on a real card nobody can order one",
    ),
    Fault(
        21,
        "NaN, infinity, zero vectors",
        "I4",
        "computed again in fp32; what stays bad is quarantined; no store takes it",
    ),
    Fault(
        22,
        "poison rows: NUL, emoji, half characters, a megabyte, blanks, keys too long; a text that kills its engine",
        "I7, I8",
        "that row alone goes to quarantine, with a reason and without its text; blank rows have no vector",
    ),
    Fault(
        23,
        "the table changes while it is read: columns, types, the table itself",
        "I10",
        "a column in use pauses the collection and nothing is deleted; others do not matter",
    ),
    Fault(24, "a column changes that the collection does not use", "", "nothing is embedded"),
    Fault(
        25,
        "another model, revision, pooling, dimension, precision",
        "I4",
        "two models are never mixed: another is built beside the old and switched to in one transaction",
    ),
    Fault(
        26,
        "two workers on one collection; a worker that stood still past its lease",
        "I3, I9",
        "one owns it, the other waits; the one of before writes nothing more",
    ),
    Fault(
        27,
        "many clients, huge bodies, many inputs",
        "bounded memory",
        "413, 422, and 429 for who would wait too long; slow ones are let go; probes and job records go on answering",
        "a thousand connections at once: `benchmarks/load.py` opens them, its figures stand in benchmarks.md",
    ),
    Fault(
        28,
        "a client hangs up",
        "its place is freed",
        "what waits is taken out of the queue and never computed; of the batch in hand only its own answer is dropped",
    ),
    Fault(
        29,
        "a thread that dies, a worker or an engine that hangs",
        "I8, I10",
        "who waits gets an error; a thread is started again; /health/ready and, where only a new process helps, "
        "/health/live turn red; whoever ends the process is not held up",
    ),
    Fault(
        30,
        "power loss",
        "I5",
        "synchronous = FULL; a log that lost its end gives whole transactions",
        "that the disk keeps what it was told to keep cannot be tried here",
    ),
    Fault(
        31,
        "who reads events or records is slow or dead",
        "sync unaffected",
        "streams are bounded and taken up again where they broke off; records that cannot be written stop no work",
    ),
    Fault(
        32,
        "workers of a Ray cluster are killed, one or all of them",
        "I1, I3, I4",
        "their blocks go to others, or wait; other workers take their places",
    ),
    Fault(
        33,
        "a node of a Ray cluster is killed",
        "I1, I3, I4",
        "as for its workers; the sync goes on with the other nodes",
        "nodes on several machines: here they are processes of one",
    ),
    Fault(
        34,
        "the head of a Ray cluster is killed",
        "I5",
        "Ray ends the process; the next sync goes on from what is stored",
    ),
    Fault(35, "a text kills each worker that embeds it", "I1, I8", "its row alone is quarantined"),
    Fault(
        36,
        "a Ray cluster with another token or none, other versions or model files, too little room or shared memory",
        "I10",
        "refused with the difference before a text is sent",
    ),
    Fault(
        37,
        "the process that syncs on a Ray cluster is killed (SIGKILL)",
        "I1-I4, I9",
        "its workers end and write nothing more; the next sync waits for the lease, and goes on from what is stored",
    ),
)


@dataclass(frozen=True, slots=True)
class Proof:
    file: str
    test: str
    numbers: tuple[int, ...]
    slow: bool


@cache
def proofs() -> tuple[Proof, ...]:
    found: list[Proof] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "pytest.mark.proves" in (text := path.read_text(encoding="utf-8")):
            found += _in_module(ast.parse(text), path)
    return tuple(found)


def _in_module(tree: ast.Module, path: Path) -> Iterator[Proof]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        marks = [mark for mark in node.decorator_list if isinstance(mark, ast.Call)]
        slow = any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
        for mark in marks:
            if ast.unparse(mark.func) == "pytest.mark.proves":
                numbers = tuple(ast.literal_eval(argument) for argument in mark.args)
                yield Proof(str(path.relative_to(ROOT / "tests")), node.name, numbers, slow)


def matrix() -> str:
    lines = ["| # | fault | must hold | what happens | tests |", "|---|---|---|---|---|"]
    for fault in FAULTS:
        tests = _tests(fault.number)
        untried = f"Not tried: {fault.untried}." if fault.untried else ""
        shown = " ".join(part for part in (f"{tests}." if tests else "", untried) if part)
        lines.append(f"| {fault.number} | {fault.what} | {fault.holds} | {fault.behaviour} | {shown} |")
    return "\n".join(lines)


def _tests(number: int) -> str:
    by_file: dict[str, list[str]] = {}
    for proof in proofs():
        if number in proof.numbers:
            by_file.setdefault(proof.file, []).append(f"`{proof.test}`{' (slow)' if proof.slow else ''}")
    return "; ".join(f"{file}: {', '.join(dict.fromkeys(names))}" for file, names in sorted(by_file.items()))


def planted() -> str:
    return "\n".join(f"- {mutation.name} (`{mutation.file}`)" for mutation in mutations())


@pytest.mark.parametrize("section", ["matrix", "failpoints", "planted"])
def test_the_page_is_what_the_tests_say(section: str) -> None:
    texts = {
        "matrix": matrix(),
        "failpoints": ", ".join(f"`{name}`" for name in failpoints.NAMES),
        "planted": planted(),
    }
    check_section(PAGE, section, texts[section], TEST)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.number))
def test_each_fault_has_a_test_or_a_reason(fault: Fault) -> None:
    assert _tests(fault.number) or fault.untried
    assert fault.behaviour or not _tests(fault.number)


def test_the_rows_are_numbered_and_markers_name_only_them() -> None:
    assert [fault.number for fault in FAULTS] == list(range(1, 38))
    assert {number for proof in proofs() for number in proof.numbers} <= {fault.number for fault in FAULTS}
