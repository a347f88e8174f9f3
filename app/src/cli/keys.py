"""`owl-sap keys`: the API keys of the REST service. A key is shown once, at its creation, and stored only as a
digest."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from app.src.access.principal import SCOPES, Scope
from app.src.cli import output
from app.src.cli.application import JsonFlag, keys_app, read_settings, verb
from app.src.cli.exits import UsageFault, refusals

if TYPE_CHECKING:
    from app.src.access.keys import Deliver, Key

_COLUMNS = ("id", "name", "state", "scopes", "claims", "every_row", "created", "expires", "rate", "concurrency")
Which = Annotated[str, typer.Argument(help="Its id or its name.", metavar="KEY")]
Out = Annotated[Path | None, typer.Option(help="Write the key to this file instead of stdout.", metavar="FILE")]


@verb(keys_app, "create")
def create(  # noqa: PLR0913 - a verb has as many parameters as options
    name: Annotated[str, typer.Argument(help="Its purpose or owner.", metavar="NAME")],
    scope: Annotated[list[str], typer.Option(help=f"Its scopes: {' '.join(SCOPES)}; may be repeated.")],
    claim: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for row rights; repeatable.")] = None,
    every_row: Annotated[bool, typer.Option("--every-row", help="Row rights do not apply to it.")] = False,
    expires: Annotated[str | None, typer.Option(help='It expires after this time: "90d", "12h".')] = None,
    rate: Annotated[str | None, typer.Option(help='Its own limit of requests: "600/minute", or "unlimited".')] = None,
    concurrency: Annotated[int | None, typer.Option(min=0, help="Its own requests at once; 0: any.")] = None,
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Create a key. It is printed once; a running service accepts it half a second later."""
    from app.src.access import keys

    if unknown := [each for each in scope if each not in SCOPES]:
        raise UsageFault(f"unknown scope {unknown[0]!r}; use one of: {', '.join(SCOPES)}")
    claims: dict[str, Any] = {}
    for each in claim or ():
        key, separator, value = each.partition("=")
        if not (separator and key and value):
            raise UsageFault("a claim is written NAME=VALUE")
        before = claims.get(key)
        claims[key] = value if before is None else [*before, value] if isinstance(before, list) else [before, value]
    scopes = cast("list[Scope]", list(dict.fromkeys(scope)))
    lifetime = None if expires is None else _seconds(expires, "--expires")
    grant = keys.Grant(name, scopes, claims, every_row, lifetime, rate, concurrency)
    _make(lambda path, deliver: keys.create(path, grant, deliver=deliver), out, json)


@verb(keys_app, "list")
def list_(json: JsonFlag = False) -> None:
    """List the keys and what they may do. The keys themselves are not stored."""
    from app.src.access import keys

    rows = [key.shown(datetime.now(UTC)) for key in keys.read(_path())]
    shown = [row | {column: _day(row[column]) for column in ("created", "expires")} for row in rows]
    output.data(rows, "API keys", _COLUMNS, json=json, rows=shown, whole=False)


@verb(keys_app, "revoke")
def revoke(which: Which, json: JsonFlag = False) -> None:
    """Revoke a key. A name revokes all active keys of that name."""
    from app.src.access import keys

    with refusals():
        gone = keys.revoke(_path(), which)
    if json:
        output.write_json([key.shown(datetime.now(UTC)) for key in gone])
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

    kept = _seconds(overlap, "--overlap", zero=True)
    lifetime = None if expires is None else _seconds(expires, "--expires")
    _make(lambda path, deliver: keys.rotate(path, which, kept, lifetime, deliver=deliver), out, json)
    output.say(f"the old key stays valid for {overlap}")


def _path() -> Path:
    path = read_settings().settings.access.keys
    if path is None:
        raise UsageFault('no file of API keys configured: [access] keys = "keys.json", or OWL_SAP_ACCESS__KEYS')
    return path


def _make(make: Callable[[Path, Deliver | None], tuple[Key, str]], out: Path | None, json: bool) -> None:
    """Make a key, and write it to `out` or print it. Its digest is stored only after `out` has been written."""
    from app.src.access.files import write_private

    path = _path()
    if out is not None and not out.parent.is_dir():
        raise UsageFault(f"{out.parent}: folder not found; create it: mkdir -m 700 {out.parent}")
    if out is not None and out.exists() and not out.is_file():
        raise UsageFault(f"{out}: not a regular file; without --out the key goes to stdout")
    with refusals():
        key, secret = make(path, None if out is None else lambda new: write_private(out, new.encode()))
    document = key.shown(datetime.now(UTC)) | ({"key": secret} if out is None else {"file": str(out)})
    if json:
        output.write_json(document)
    elif out is None:
        typer.echo(secret)
    where = f"is in {out}" if out is not None else "is shown this once"
    may = ", ".join(key.scopes) + (f", until {_day(key.expires)} UTC" if key.expires else "")
    output.say(f"key {key.id} ({key.name}) may: {may}; it {where}, and stored as a digest only")


def _seconds(text: str, option: str, *, zero: bool = False) -> float:
    """Parse a duration, which needs a unit: a bare 90 would mean seconds, but users mean days."""
    if text.strip().replace(".", "", 1).isdecimal():
        raise UsageFault(f"{option} {text} needs a unit: write {text}d for days, {text}h for hours")
    from app.src.settings import seconds

    with refusals():
        length = seconds(text)
    if not length and not zero:
        raise UsageFault(f"{option} must be above 0")
    return length


def _day(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%d %H:%M")
