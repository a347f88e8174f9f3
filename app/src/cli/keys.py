"""`owl-sap keys`: the API keys of the REST service. A key is shown once, at its creation, and stored only as a
digest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from app.src.access.files import write_private
from app.src.access.principal import SCOPES, AccessUnusable, Scope
from app.src.cli import output
from app.src.cli.application import JsonFlag, keys_app, read_settings, verb
from app.src.cli.exits import UsageFault
from app.src.settings import seconds

if TYPE_CHECKING:
    from app.src.access.keys import Key

_COLUMNS = ("id", "name", "state", "scopes", "claims", "every_row", "created", "expires", "rate", "concurrency")
Which = Annotated[str, typer.Argument(help="Its id or its name.", metavar="KEY")]
Out = Annotated[
    Path | None,
    typer.Option(help="Write the key to this file, for its owner alone, instead of stdout.", metavar="FILE"),
]


@verb(keys_app, "create")
def create(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Annotated[str, typer.Argument(help="Its purpose or owner.", metavar="NAME")],
    scope: Annotated[list[str], typer.Option(help=f"Its scopes: {' '.join(SCOPES)}; may be repeated.")],
    claim: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for row rules; repeated with one name: several values.")
    ] = None,
    every_row: Annotated[bool, typer.Option("--every-row", help="Row rights do not apply to it.")] = False,
    expires: Annotated[str | None, typer.Option(help='It expires after this time: "90d", "12h".')] = None,
    rate: Annotated[str | None, typer.Option(help='Its own limit of requests: "600/minute", or "unlimited".')] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=0, help="Its own limit of requests at once; 0: any number.")
    ] = None,
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Create a key. It is printed once; a running service accepts it half a second later."""
    from app.src.access import keys

    if unknown := [each for each in scope if each not in SCOPES]:
        raise UsageFault(f"unknown scope {unknown[0]!r}; use one of: {', '.join(SCOPES)}")
    scopes = cast("list[Scope]", list(dict.fromkeys(scope)))
    grant = keys.Grant(name, scopes, _claims(claim or ()), every_row, _lifetime(expires), rate, concurrency)
    path = _path()
    _check_target(out)
    try:
        key, secret = keys.create(path, grant)
    except ValueError as error:
        raise UsageFault(str(error)) from None
    _hand_over(path, key, secret, out, json)


@verb(keys_app, "list")
def list_(json: JsonFlag = False) -> None:
    """List the keys and what they may do. The keys themselves are not stored."""
    from app.src.access import keys

    now = datetime.now(UTC)
    rows = [key.shown(now) for key in keys.read(_path())]
    shown = [row | {column: _day(row[column]) for column in ("created", "expires")} for row in rows]
    output.data(rows, "API keys", _COLUMNS, json=json, rows=shown, whole=False)


@verb(keys_app, "revoke")
def revoke(which: Which, json: JsonFlag = False) -> None:
    """Revoke a key. A name revokes all active keys of that name."""
    from app.src.access import keys

    try:
        gone = keys.revoke(_path(), which)
    except ValueError as error:
        raise UsageFault(str(error)) from None
    now = datetime.now(UTC)
    if json:
        output.write_json([key.shown(now) for key in gone])
    else:
        output.say(f"revoked: {', '.join(f'{key.id} ({key.name})' for key in gone)}")


@verb(keys_app, "rotate")
def rotate(
    which: Which,
    overlap: Annotated[str, typer.Option(help="How long the old key stays valid.")] = "24h",
    expires: Annotated[str | None, typer.Option(help="Of the new key; default: as long as the old one had.")] = None,
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Replace a key by a new one with the same rights. The old one ends after the overlap."""
    from app.src.access import keys

    _check_target(out)
    lifetime = _lifetime(expires)
    path = _path()
    before = keys.read(path) if path.exists() else ()
    try:
        key, secret = keys.rotate(path, which, _seconds(overlap, "--overlap"), lifetime)
    except ValueError as error:
        raise UsageFault(str(error)) from None
    _hand_over(path, key, secret, out, json, before)
    output.say(f"the old key stays valid for {overlap}")


def _path() -> Path:
    path = read_settings().settings.access.keys
    if path is None:
        raise UsageFault('no file of API keys configured: [access] keys = "keys.json", or OWL_SAP_ACCESS__KEYS')
    return path


def _check_target(out: Path | None) -> None:
    """Check the file before the key is created."""
    if out is None:
        return
    if not out.parent.is_dir():
        raise UsageFault(f"{out.parent}: folder not found; create it: mkdir -m 700 {out.parent}")
    if out.exists() and not out.is_file():
        raise UsageFault(f"{out}: not a regular file; without --out the key goes to stdout")


def _hand_over(path: Path, key: Key, secret: str, out: Path | None, json: bool, before: Sequence[Key] = ()) -> None:
    """Write or print the new key. `before`: the keys before the change, to restore their ends if that fails."""
    from app.src.access import keys

    document: dict[str, Any] = key.shown(datetime.now(UTC))
    if out is not None:
        try:
            write_private(out, secret.encode())
        except AccessUnusable:
            keys.take_back(path, key, before)  # the key could not be delivered
            raise
        document["file"] = str(out)
    else:
        document["key"] = secret
    if json:
        output.write_json(document)
    elif out is None:
        typer.echo(secret)
    where = f"is in {out}" if out is not None else "is shown this once"
    until = f", until {_day(document['expires'])} UTC" if document["expires"] else ""
    may = ", ".join(key.scopes)
    output.say(f"key {key.id} ({key.name}) may: {may}{until}; it {where}, and stored as a digest only")


def _claims(given: Sequence[str]) -> dict[str, Any]:
    claims: dict[str, Any] = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not (separator and name and value):
            raise UsageFault("a claim is written NAME=VALUE")
        before = claims.get(name)
        claims[name] = value if before is None else [*before, value] if isinstance(before, list) else [before, value]
    return claims


def _seconds(text: str, option: str) -> float:
    """Parse a duration with a unit: a bare 90 would mean seconds, where users mean days."""
    number = text.strip()
    if number.replace(".", "", 1).isdecimal():
        raise UsageFault(f"{option} {number} needs a unit: write {number}d for days, {number}h for hours")
    try:
        return seconds(text)
    except ValueError as error:
        raise UsageFault(str(error)) from None


def _lifetime(text: str | None) -> float | None:
    if text is None:
        return None
    length = _seconds(text, "--expires")
    if length <= 0:
        raise UsageFault("--expires must be above 0")
    return length


def _day(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M")
