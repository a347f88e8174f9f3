"""`owl-sap init`: write owl-sap.toml and .env.example from the database's tables and the user's answers."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, file_text, opened, read_settings, verb
from app.src.cli.exits import UsageFault
from app.src.settings import Loaded, Settings, load
from app.src.settings.writing import Start, environment_file, settings_file
from connector.errors import NoProposal
from connector.model import TableRef

if TYPE_CHECKING:
    from app.src.service.service import Service
    from connector.discovery.candidates import Candidate


_FILE, _ENVIRONMENT = "owl-sap.toml", ".env.example"
_VECTORS = "vectors"
_TAKEN_BY_ITSELF = 3  # tables that --yes chooses from the best candidates
_SCHEMAS_SHOWN = 10
_OF_HANA = (
    *("host", "port", "user", "userkey", "encrypt", "validate_certificate", "trust_store", "host_name_in_certificate"),
)


@dataclass(frozen=True, slots=True)
class InitOptions:
    """The options; `ask`: questions are allowed."""

    schema: str | None
    tables: Sequence[str]
    store: str | None
    languages: Sequence[str]
    ask: bool
    accept: bool


@verb(app, "init")
def init(  # noqa: PLR0913 - a verb has as many parameters as options
    host: Annotated[str | None, typer.Option(help="HANA host name; default: HANA_HOST.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="443, 3NN13 or 3NN15.")] = None,
    user: Annotated[str | None, typer.Option(help="The technical user.")] = None,
    password_file: Annotated[
        Path | None, typer.Option(help="A file with the password; default: HANA_PASSWORD, or it is asked for.")
    ] = None,
    encrypt: Annotated[bool | None, typer.Option("--encrypt/--no-encrypt", help="TLS; on unless switched off.")] = None,
    trust_store: Annotated[str | None, typer.Option(help="PEM file of the authority to trust.")] = None,
    schema: Annotated[str | None, typer.Option(help="Where the tables are.")] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="A table or view, SCHEMA.TABLE or, with --schema, TABLE; repeatable.")
    ] = None,
    store: Annotated[
        Literal["hana", "local"] | None, typer.Option(help="Where vectors go; default: hana where it has vector types.")
    ] = None,
    language: Annotated[
        list[str] | None, typer.Option(help="Of texts in proposed views, best first: E, D or en, de ...; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write into, created if absent.")] = Path(),
    offline: Annotated[bool, typer.Option("--offline", help="Ask no database: a template to fill in.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; without --table take the likeliest tables.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write owl-sap.toml and .env.example from what the database has. Each chosen table gets a commented block; nothing
    in HANA changes."""
    if offline and (table or schema or language):
        raise UsageFault("--table, --schema and --language ask the database: leave them out, or leave out --offline")
    if out.exists() and not out.is_dir():
        raise UsageFault(f"--out {out}: not a folder")
    there = [str(out / name) for name in (_FILE, _ENVIRONMENT) if (out / name).exists()]
    if there and not force:
        raise UsageFault(f"{' and '.join(there)} would be overwritten: --force does so, --out FOLDER writes elsewhere")
    if trust_store is not None and "-----BEGIN" not in trust_store and out.resolve() != Path.cwd():
        trust_store = str(Path(trust_store).resolve())  # relative paths start at the working directory
    ask = sys.stdin.isatty() and not yes and not offline
    # The names of collections in an overwritten file are free again.
    flags: dict[tuple[str, ...], Any] = {("collections",): []}
    given = {"host": host, "port": port, "user": user, "encrypt": encrypt, "trust_store": trust_store}
    flags |= {("hana", name): value for name, value in given.items() if value is not None}
    if password_file is not None:
        flags["hana", "password"] = file_text(password_file, "the file of --password-file").rstrip("\r\n")
    loaded = read_settings(flags)
    if offline:
        start = Start(_offline(loaded, store), made_by="Made by owl-sap init --offline.")
        _write(out, start, [], json)
        return
    if ask:
        loaded = read_settings(flags | _asked(loaded.settings, flags))
    elif not loaded.settings.hana.configured:
        raise UsageFault(
            "no HANA named: give --host, --port and --user, set HANA_HOST ..., or use --offline for a template"
        )
    wanted = InitOptions(schema, table or [], store, language or [], ask, yes)
    with opened(loaded) as service:
        blocks = _blocks(service, wanted)
        start = _start(service, loaded, wanted, blocks)
    _write(out, start, [block["name"] for block in blocks], json)


# ---------------------------------------------------------------------------------------------------------- questions


def _asked(settings: Settings, flags: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """Ask the user for missing values."""
    hana = settings.hana
    answers: dict[tuple[str, ...], Any] = {}
    if not hana.configured:
        answers["hana", "host"] = typer.prompt("HANA host name", err=True)
        if ("hana", "port") not in flags:
            answers["hana", "port"] = typer.prompt("Port (443 Cloud, 3NN13 or 3NN15)", default=443, type=int, err=True)
        if ("hana", "encrypt") not in flags:
            answers["hana", "encrypt"] = typer.confirm("Encrypt by TLS (the emulator does not)", default=True, err=True)
    if not hana.userkey and not hana.user:
        answers["hana", "user"] = typer.prompt("Technical user", err=True)
    if not hana.userkey and hana.password is None:
        answers["hana", "password"] = typer.prompt("Password (not written to any file)", hide_input=True, err=True)
    return answers


def _tables(service: Service, wanted: InitOptions) -> list[TableRef]:
    if wanted.tables:
        return [_ref(name, wanted.schema) for name in wanted.tables]
    schema = wanted.schema or _schema(service, wanted)
    found = service.catalog.candidates(schema)
    if not found:
        raise UsageFault(f"schema {schema} has no table or view with text columns that this user can see")
    if wanted.ask:
        return _chosen(found, schema)
    if wanted.accept:
        return [each.ref for each in found[:_TAKEN_BY_ITSELF]]
    best = ", ".join(each.ref.name for each in found[:_SCHEMAS_SHOWN])
    raise UsageFault(
        f"no table of {schema} named: give --table NAME (repeatable), or --yes for the first three of: {best}"
    )


def _ref(name: str, schema: str | None) -> TableRef:
    try:
        return TableRef.parse(name)
    except ValueError as error:
        if schema is None or "." in name:
            raise UsageFault(f"--table {name}: {error}") from None
        return TableRef(schema, name.strip('"'))


def _schema(service: Service, wanted: InitOptions) -> str:
    """Return the only schema with texts, else ask the user."""
    names = [name for name in service.catalog.schemas() if service.catalog.candidates(name, 1)]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UsageFault("this user can see no table with text columns; owl-sap tables lists all visible tables")
    shown = ", ".join(names[:_SCHEMAS_SHOWN]) + (" ..." if len(names) > _SCHEMAS_SHOWN else "")
    if not wanted.ask:
        raise UsageFault(f"several schemas have texts: give --schema NAME, one of: {shown}")
    output.say(f"Schemas with texts: {shown}")
    answer: str = typer.prompt("Schema", default=names[0], err=True)
    return answer


def _chosen(found: Sequence[Candidate], schema: str) -> list[TableRef]:
    output.say(f"Tables and views of {schema} with text columns, most likely first:")
    for number, each in enumerate(found, 1):
        rows = "view" if each.rows is None else f"{each.rows:,} rows"
        texts = ", ".join(each.texts[:3]) + (" ..." if len(each.texts) > 3 else "")
        output.say(f"{number:>3}  {each.ref.name:<28} {rows:>16}  {output.shorten(texts, 28)}")
    while True:
        answer: str = typer.prompt("Tables to use (numbers or names, separated by commas)", default="1", err=True)
        try:
            if chosen := [_picked(part.strip(), found, schema) for part in answer.split(",") if part.strip()]:
                return chosen
        except UsageFault as error:
            output.fail(str(error))


def _picked(answer: str, found: Sequence[Candidate], schema: str) -> TableRef:
    if not answer.isdecimal():
        return _ref(answer, schema)
    if not 1 <= int(answer) <= len(found):
        raise UsageFault(f"{answer} is not in the list (1 to {len(found)})")
    return found[int(answer) - 1].ref


# ------------------------------------------------------------------------------------------------------------ the file


def _blocks(service: Service, wanted: InitOptions) -> list[dict[str, Any]]:
    """Return one proposal per source. Raises NoProposal for a named table without one, and if there is none at all."""
    blocks: dict[str, dict[str, Any]] = {}
    why = ""
    for ref in dict.fromkeys(_tables(service, wanted)):
        output.say(f"reading {ref} ...")
        try:
            taken = [block["name"] for block in blocks.values()]
            block = service.catalog.introspect(ref, languages=wanted.languages, taken=taken)
        except NoProposal as error:
            if wanted.tables or wanted.ask:
                raise
            why = str(error)
            continue
        if block["source"] in blocks:
            output.say(f"{ref}: its texts are in {block['source']}, which already has a block")
        blocks.setdefault(block["source"], block)
    if not blocks:
        raise NoProposal(f"no collection can be proposed for the most likely tables; the last one: {why}")
    return list(blocks.values())


def _start(service: Service, loaded: Loaded, wanted: InitOptions, blocks: Sequence[dict[str, Any]]) -> Start:
    settings, why = loaded.settings, {}
    kind = wanted.store or (settings.store.kind if ("store", "kind") in loaded.origins else None)
    if kind is None:
        kind = "hana" if service.catalog.has_vectors() else "local"
        why["store.kind"] = "this HANA has REAL_VECTOR" if kind == "hana" else "this HANA has no vector type"
    given = _given(settings, kind)
    if kind == "hana" and not settings.store_schema:
        given["store"]["schema"], why["store.schema"] = _home(service, settings, blocks)
    made = f"Made by owl-sap init on {datetime.now(UTC):%Y-%m-%d} from {settings.hana.host or 'the secure user store'}."
    return Start(given, why, [block["toml"] for block in blocks], made)


def _offline(loaded: Loaded, store: str | None) -> dict[str, dict[str, Any]]:
    """Return only given values; the user fills in the rest."""
    given = _given(loaded.settings, store or loaded.settings.store.kind)
    said = {path[1] for path in loaded.origins if path[0] == "hana" and len(path) > 1}
    return given | {"hana": {name: value for name, value in given["hana"].items() if name in said}}


def _given(settings: Settings, kind: str) -> dict[str, dict[str, Any]]:
    hana = {name: getattr(settings.hana, name) for name in _OF_HANA}
    hana["schema"] = settings.hana.schema_name
    if hana["validate_certificate"]:
        del hana["validate_certificate"]
    store: dict[str, Any] = {"kind": kind, "schema": settings.store.schema_name}
    if kind == "local":
        store = {"kind": kind, "path": str(settings.store.path or _VECTORS)}
    return {
        "hana": hana,
        "store": store,
        "embedding": {"model": settings.embedding.model},
        "sync": {"max_deletes": settings.sync.max_deletes},
    }


def _home(service: Service, settings: Settings, blocks: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return a schema for the vectors, and the reason."""
    own = (settings.hana.user or "").upper()
    if own in service.catalog.schemas():
        return own, "the user's own; make one for the vectors where others search them too"
    first = TableRef.parse(blocks[0]["source"]).schema
    return first, "GUESS: where the first table is; better one of its own: CREATE SCHEMA, see owl-sap grants"


def _write(out: Path, start: Start, names: Sequence[str], json: bool) -> None:
    text = settings_file(start)
    _check(text, names)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in ((_FILE, text), (_ENVIRONMENT, environment_file(start))):
            _replace(out / name, content)
    except OSError as error:
        raise UsageFault(f"cannot write to {out}: {error.strerror}") from None
    commands = _next(out, names)
    if json:
        written = {"file": str(out / _FILE), "environment": str(out / _ENVIRONMENT)}
        output.write_json(written | {"collections": list(names), "next": commands})
        return
    output.say(f"wrote {out / _FILE} and {out / _ENVIRONMENT}; check the lines marked GUESS, then run:")
    for command in commands:
        output.say(f"  {command}")


def _check(text: str, names: Sequence[str]) -> None:
    """Check that the text loads before it is written."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_text(text, encoding="utf-8")
        read = load(environ={}, folder=Path(folder))
    assert [collection.name for collection in read.settings.collections] == list(names)


def _replace(file: Path, content: str) -> None:
    """Replace the file atomically."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as written:
        written.write(content)
    try:
        Path(written.name).chmod(0o644)
        os.replace(written.name, file)
    except OSError:
        Path(written.name).unlink()
        raise


def _next(out: Path, names: Sequence[str]) -> list[str]:
    where = "" if out.resolve() == Path.cwd() else f"cd {shlex.quote(str(out))} && "
    if not names:
        return [f"{where}owl-sap doctor", "owl-sap tables", "owl-sap introspect SCHEMA.TABLE >> owl-sap.toml"]
    return [
        f"{where}owl-sap plan {names[0]}",
        f"owl-sap sync {names[0]}",
        f'owl-sap search {names[0]} "what you look for"',
    ]
