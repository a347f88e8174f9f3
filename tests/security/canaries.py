"""Secrets and texts that are planted to be looked for, in every form that a program may give a text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, quote_plus


@dataclass(frozen=True)
class Canary:
    """`allowed`: surfaces whose purpose is to show it to who asked."""

    name: str
    text: str
    allowed: frozenset[str] = frozenset()

    def forms(self) -> Iterator[tuple[str, bytes]]:
        """Long enough that nothing else looks like it."""
        raw = self.text.encode()
        yield "as it is", raw
        yield "UTF-16", self.text.encode("utf-16-le")
        yield "as JSON", json.dumps(self.text)[1:-1].encode()
        yield "as JSON, not escaped", json.dumps(self.text, ensure_ascii=False)[1:-1].encode()
        yield "as Python", repr(self.text)[1:-1].encode()
        yield "as SQL", self.text.replace("'", "''").encode()
        yield "in a URL", quote(self.text, safe="").encode()
        yield "in a URL, slashes kept", quote(self.text).encode()
        yield "in a form", quote_plus(self.text).encode()
        yield "as hex", raw.hex().encode()
        yield "as HEX", raw.hex().upper().encode()
        for start in range(3):  # whatever stands before it, three of a kind are enough
            for encode in (base64.b64encode, base64.urlsafe_b64encode):
                yield "in base64", encode(raw[start : start + (len(raw) - start) // 3 * 3])

    def found_in(self, output: bytes) -> str | None:
        """The form in which it stands there; also the core of it, where the ends were changed."""
        forms = [*self.forms(), ("its core", self.text[3:-3].encode())]
        return next((form for form, text in forms if text in output), None)
