"""atheris runs each target for half a minute, or a quarter, from a small corpus of what the target reads.

Longer, or to go on with a corpus of one's own: `python -m tests.fuzz.sql_target CORPUS -max_total_time=600`.
"""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from emulator_sql import STATEMENTS
from hana_emulator.testing import running
from tests.fuzz import recordings
from tests.fuzz.packets import HEADER_SIZE
from tests.fuzz.statements import SEEDS, TABLES, WORDS
from tests.fuzz.test_configuration_fuzz import EXAMPLE, FULL

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed (extra: fuzz)"),
]
SECONDS = 30
FEWER_SECONDS = 15
"""For what is small: a filter, a template, a configuration file."""
REQUEST, PARAMETERS, LOBS = 0, 1, 4
"""Places in `packet_target.READERS`."""


def parts_of(packet: bytes) -> list[tuple[int, bytes]]:
    (count,) = struct.unpack_from("<h", packet, HEADER_SIZE + 8)
    found, position = [], HEADER_SIZE + 24
    for _ in range(count):
        kind, _attributes, _small, _big, length = struct.unpack_from("<bbhii", packet, position)
        found.append((kind, packet[position + 16 : position + 16 + length]))
        position += 16 + length + -length % 8
    return found


def packet_seeds(folder: Path) -> list[bytes]:
    with running() as emulator:
        recordings.create_tables(emulator)
        recorded = recordings.record(emulator, folder)
    packets = [packet[:2_000] for session in recorded.values() for packet in session]
    seeds = [bytes([REQUEST]) + packet for packet in packets]
    for session in recorded.values():
        for packet in session:
            for kind, data in parts_of(packet):
                reader = PARAMETERS if kind == 32 else LOBS if kind in (17, 28, 49) else None
                if reader is not None:
                    seeds.append(bytes([reader, 2, 7, 1]) + data[:500])
    return seeds


def run(module: str, corpus: Path, artifacts: Path, *options: str, seconds: int = SECONDS) -> None:
    """Fails with what the fuzzer says; the input that it found lies beside, and its Base64 is in the message."""
    command = [
        *(sys.executable, "-m", module, str(corpus), f"-max_total_time={seconds}", "-timeout=20", "-rss_limit_mb=3000"),
        *(f"-artifact_prefix={artifacts}/", "-print_final_stats=1", *options),
    ]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-1_500:]}\n{done.stderr[-3_000:]}"
    assert not list(artifacts.iterdir())
    assert "Done " in done.stderr


def fill(corpus: Path, seeds: list[bytes]) -> None:
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / f"{number:03}").write_bytes(seed)


def test_packet_decoder(tmp_path: Path) -> None:
    (recorded := tmp_path / "recorded").mkdir()
    (artifacts := tmp_path / "artifacts").mkdir()
    fill(tmp_path / "corpus", packet_seeds(recorded))
    run("tests.fuzz.packet_target", tmp_path / "corpus", artifacts)


def test_prepare_and_execute(tmp_path: Path) -> None:
    (artifacts := tmp_path / "artifacts").mkdir()
    fill(tmp_path / "corpus", [text.encode() for text in (*TABLES, *STATEMENTS, *SEEDS)])
    words = {word.encode("utf-8", "replace").decode() for word in WORDS}
    words = {word.replace("\\", "\\\\").replace('"', '\\"').replace("\0", "\\x00") for word in words if word.isascii()}
    dictionary = tmp_path / "words.dict"
    dictionary.write_text("".join(f'"{word}"\n' for word in sorted(words)))
    run("tests.fuzz.sql_target", tmp_path / "corpus", artifacts, f"-dict={dictionary}", "-max_len=500")


FILTERS = (
    b'{"A": "x"}\0{"A": "x"}',
    b'{"A": {"$in": [1, 2.5]}, "B": null}\0{"A": "1", "B": null}',
    b'{"$or": [{"A": {"$like": "a%_"}}, {"A": {"$contains": "ball bearing"}}]}\0{"A": "a ball bearing"}',
    b'{"A": {"$between": [{"type": "date", "date": "2024-01-31"}, "2024-02-01"]}}\0{"A": "20240131"}',
    b'{"$and": [{"A": {"$nin": [true]}}, {"A": {"$gte": -1e3}}]}\0{"A": true}',
)
TEMPLATES = (
    b"{MAKTX}. {LTEXT}\0pump\0",
    b'Weight: {BRGEW} kg, ({"/BIC/TXT"}) [{A}]\0\0x',
    b"{{literal}} {A}: {B} = {C}; {D}\0a\0\0%s",
)


@pytest.mark.parametrize(
    ("target", "seeds"),
    [
        ("filter_target", FILTERS),
        ("template_target", TEMPLATES),
        ("configuration_target", (EXAMPLE.encode(), f"{FULL}\0HANA_PORT=30015\nUSE_GPU=true".encode())),
    ],
    ids=["filters", "templates", "configuration"],
)
def test_what_people_write(tmp_path: Path, target: str, seeds: tuple[bytes, ...]) -> None:
    (artifacts := tmp_path / "artifacts").mkdir()
    fill(tmp_path / "corpus", list(seeds))
    run(f"tests.fuzz.{target}", tmp_path / "corpus", artifacts, "-max_len=3000", seconds=FEWER_SECONDS)
