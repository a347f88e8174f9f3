"""The verb `grants`: the rights in HANA that these settings need, as SQL for whoever administers it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, loaded_for, verb

if TYPE_CHECKING:
    from app.src.service.grants import Statement

_HEAD = (
    "The rights that the technical user needs, and nothing more; made by owl-sap grants. To be run by the owner of the "
    "tables, or an administrator, from the first line to the last. The user himself is made apart, for his password "
    "stands in no file: CREATE USER ... PASSWORD ... NO FORCE_FIRST_PASSWORD_CHANGE; then ALTER USER ... DISABLE "
    "PASSWORD LIFETIME. A grant on a change log can be run once the log is there."
)


@verb(app, "grants")
def grants(
    ctx: typer.Context,
    user: Annotated[str | None, typer.Option(help="Who gets them; default: the user of the settings.")] = None,
    role: Annotated[str | None, typer.Option(help="Through this role, which the user is given.")] = None,
    search_only: Annotated[
        bool, typer.Option("--search-only", help="For a process that searches and never syncs.")
    ] = False,
    setup: Annotated[
        bool, typer.Option("--setup", help="To put change logs in (changes install --apply); to be taken back after.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Print the least HANA rights these settings need, as SQL. An administrator runs it once (grants.sql)."""
    from app.src.service.grants import Grantee, statements

    grantee = Grantee(user=user, role=role, search_only=search_only, setup=setup)
    found = statements(loaded_for(ctx).settings, grantee)
    if json:
        output.write_json([statement.as_dict() for statement in found])
    else:
        typer.echo("\n".join(_script(found)))


def _script(found: Sequence[Statement]) -> Iterator[str]:
    yield from (f"-- {line}" for line in textwrap.wrap(_HEAD, 110, break_on_hyphens=False))
    for system, statements in groupby(found, lambda statement: statement.system):
        yield f"\n-- in the HANA of [{system}]"
        for statement in statements:
            yield f"-- {' '.join(statement.why.split())}"  # a name with a line break would end the comment
            yield f"{statement.sql};"
