"""The verb `explain`: what an error's code stands for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, verb
from app.src.service import explaining


@verb(app, "explain")
def explain(
    code: Annotated[
        str | None, typer.Argument(metavar="[CODE]", help="As an error shows it: OWL-1011, or 1011; default: all.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Explain an error code such as OWL-2005. Shows its usual causes and what to do; without a code it lists all."""
    if code is None:
        entries = sorted(explaining.explained().values(), key=lambda each: each.code)
        records = [asdict(each) for each in entries]
        if json:
            output.write_json(records)
        else:
            rows = [{"code": each.code, "error": each.title} for each in entries]
            output.table("Errors", rows, records=records)
        return
    found = explaining.by_code(code)
    if json:
        output.write_json(asdict(found))
    elif output.for_people():
        output.page(_page(found))
    else:
        output.write_lines([asdict(found)])


def _page(each: explaining.Explained) -> str:
    parts = [f"{each.code}: {each.title}", each.what]
    for heading, lines in (("Usual causes", each.causes), ("What to do", each.do)):
        if lines:
            parts.append("\n".join((f"{heading}:", *(f"  - {line}" for line in lines))))
    if each.see:
        parts.append("More: " + ", ".join(f"docs/{place}" for place in each.see))
    return "\n\n".join(parts)
