"""docs/security.md names its proofs: each is a file that is there, each rule one of ours."""

from __future__ import annotations

import re
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")


def test_every_proof_is_there() -> None:
    named = set(re.findall(r"`((?:tests|benchmarks|scripts)/[\w./-]+)`", PAGE))
    assert len(named) > 15
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_threat_names_a_proof_or_says_what_is_left() -> None:
    threats = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| [STRIDE] \|", line)]
    assert {cells[0].strip("| ") for cells in threats} == set("STRIDE")
    assert [cells[1] for cells in threats if "`" not in cells[3]] == []


def test_our_rules_named_there_exist() -> None:
    rules = {rule["id"] for rule in YAML(typ="safe").load(ROOT / "scripts/semgrep/rules.yml")["rules"]}
    named = set(re.findall(r"`(owl-[a-z]+(?:-[a-z]+)+)`", PAGE)) - {"owl-sap-connector"}
    assert named
    assert named - rules == set()
