"""Sections of the documentation written from the code, between `<!-- name: begin -->` and `<!-- name: end -->`.
Compared on every run, written anew with OWL_WRITE_DOCS=1.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check_section(file: str, name: str, wanted: str, test: str) -> None:
    """Fails when the section is missing or says something else; `test` is the file that writes it."""
    path = ROOT / file
    section = re.compile(rf"(<!-- {name}: begin -->\n)(.*?)(<!-- {name}: end -->)", re.S)
    text = path.read_text(encoding="utf-8")
    if os.environ.get("OWL_WRITE_DOCS"):
        text = section.sub(lambda match: f"{match[1]}{wanted}\n{match[3]}", text)
        path.write_text(text, encoding="utf-8")
    found = section.search(text)
    assert found, f"{file} has no section {name}"
    assert found[2].strip() == wanted, f"{file} is out of date; write it: OWL_WRITE_DOCS=1 ./scripts/test {test}"
