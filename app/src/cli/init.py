"""`owl-sap init`: write owl-sap.toml and .env.example from the database's tables and the user's answers."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, app, file_text, opened, read_settings, verb
from app.src.cli.exits import UsageFault
from connector.errors import NoProposal

if TYPE_CHECKING:
    from app.src.service.service import Service
    from app.src.settings import Settings
    from connector.model import TableRef

_FILE, _ENVIRONMENT = "owl-sap.toml", ".env.example"
_MOST_UNPROMPTED = 3  # tables that --yes chooses from the best candidates
_NAMES_SHOWN = 10
Flags = dict[tuple[str, ...], Any]
Store = Literal["hana", "local"]


@verb(app, "init")
def init(  # noqa: PLR0913 - a verb has as many parameters as options
    host: Annotated[str | None, typer.Option(help="HANA host name; default: HANA_HOST.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="443, 3NN13 or 3NN15.")] = None,
    user: Annotated[str | None, typer.Option(help="The technical user.")] = None,
    password_file: Annotated[Path | None, typer.Option(help="File with the password; default: HANA_PASSWORD.")] = None,
    encrypt: Annotated[bool | None, typer.Option("--encrypt/--no-encrypt", help="TLS; on unless switched off.")] = None,
    trust_store: Annotated[str | None, typer.Option(help="PEM file of the trusted authority.")] = None,
    schema: Annotated[str | None, typer.Option(help="Schema of the tables.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="SCHEMA.TABLE, or TABLE with --schema; repeatable.")] = None,
    store: Annotated[Store | None, typer.Option(help="Default: hana if it has vector types.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Language of view texts: E or de; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="The folder to write into, created if absent.")] = Path(),
    offline: Annotated[bool, typer.Option("--offline", help="Write a template, without a database.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="No prompts; without --table take the likeliest tables.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write owl-sap.toml and .env.example from the database's tables. Each chosen table gets a commented block; nothing
    in HANA changes."""
    from app.src.settings.writing import settings_file
    from connector.model import TableRef

    if offline and (table or schema or language):
        raise UsageFault("--table, --schema and --language need the database: omit them, or omit --offline")
    if out.exists() and not out.is_dir():
        raise UsageFault(f"--out {out}: not a folder")
    there = [str(out / name) for name in (_FILE, _ENVIRONMENT) if (out / name).exists()]
    if there and not force:
        raise UsageFault(f"{' and '.join(there)} would be overwritten: use --force, or --out FOLDER to write elsewhere")
    if trust_store is not None and "-----BEGIN" not in trust_store and out.resolve() != Path.cwd():
        trust_store = str(Path(trust_store).resolve())  # relative paths start at the working directory
    # The names of collections in an overwritten file are free again.
    flags: Flags = {("collections",): []}
    given = {"host": host, "port": port, "user": user, "encrypt": encrypt, "trust_store": trust_store}
    flags |= {("hana", name): value for name, value in given.items() if value is not None}
    if password_file is not None:
        flags["hana", "password"] = file_text(password_file, "the file of --password-file").rstrip("\r\n")
    loaded = read_settings(flags)
    if offline:
        values = _values(loaded.settings, store or loaded.settings.store.kind)
        named = {path[1] for path in loaded.origins if path[0] == "hana" and len(path) > 1}
        values["hana"] = {name: value for name, value in values["hana"].items() if name in named}
        _write(out, settings_file(values, {}, [], "Made by owl-sap init --offline."), [], json)
        return
    ask = sys.stdin.isatty() and not yes
    if ask:
        loaded = read_settings(flags | _asked(loaded.settings, flags))
    settings = loaded.settings
    if not settings.hana.configured:
        raise UsageFault("no HANA configured: give --host, --port and --user, set HANA_HOST ..., or use --offline")
    from connector.hana.catalog import schemas
    from connector.hana.connection import HanaFeatures

    with opened(loaded) as service:
        refs = [_ref(name, schema) for name in table or ()] or _chosen(service, schema, ask, yes)
        blocks = _blocks(service, refs, language or (), strict=bool(table) or ask)
        why = {}
        kind = store or (settings.store.kind if ("store", "kind") in loaded.origins else None)
        if kind is None:
            kind = "hana" if HanaFeatures.probe(service.parts.pool("hana")).real_vector else "local"
            why["store.kind"] = "this HANA has REAL_VECTOR" if kind == "hana" else "this HANA has no vector type"
        values = _values(settings, kind)
        if kind == "hana" and not settings.store_schema:
            home, reason = (settings.hana.user or "").upper(), "the user's own; if others search too, create another"
            if home not in schemas(service.parts.pool("hana")):
                home = TableRef.parse(blocks[0]["source"]).schema
                reason = "GUESS: the first table's schema; a separate one is better: CREATE SCHEMA, see owl-sap grants"
            values["store"]["schema"], why["store.schema"] = home, reason
    made = f"Made by owl-sap init on {datetime.now(UTC):%Y-%m-%d} from {settings.hana.host or 'the secure user store'}."
    text = settings_file(values, why, [block["toml"] for block in blocks], made)
    _write(out, text, [block["name"] for block in blocks], json)


def _asked(settings: Settings, flags: Flags) -> Flags:
    """Ask the user for missing values."""
    hana = settings.hana
    answers: Flags = {}
    if not hana.configured:
        answers["hana", "host"] = typer.prompt("HANA host name", err=True)
        if ("hana", "port") not in flags:
            answers["hana", "port"] = typer.prompt("Port (443 Cloud, 3NN13 or 3NN15)", default=443, type=int, err=True)
        if ("hana", "encrypt") not in flags:
            answers["hana", "encrypt"] = typer.confirm("Use TLS (the emulator does not)", default=True, err=True)
    if not hana.userkey and not hana.user:
        answers["hana", "user"] = typer.prompt("Technical user", err=True)
    if not hana.userkey and hana.password is None:
        answers["hana", "password"] = typer.prompt("Password (not written to any file)", hide_input=True, err=True)
    return answers


def _chosen(service: Service, schema: str | None, ask: bool, accept: bool) -> list[TableRef]:
    """Return the tables that the user chooses, or with --yes the most likely ones."""
    from connector.discovery.introspection import candidates
    from connector.hana.catalog import schemas

    pool = service.parts.pool("hana")
    if schema is None:
        names = [name for name in schemas(pool) if candidates(pool, name, 1)]
        if not names:
            raise UsageFault("this user cannot see a table with text columns; owl-sap tables lists all visible tables")
        shown = ", ".join(names[:_NAMES_SHOWN]) + (" ..." if len(names) > _NAMES_SHOWN else "")
        if len(names) > 1 and not ask:
            raise UsageFault(f"several schemas have tables with texts: give --schema NAME, one of: {shown}")
        schema = names[0] if len(names) == 1 else typer.prompt(f"Schema ({shown})", default=names[0], err=True)
    found = candidates(pool, str(schema))
    if not found:
        raise UsageFault(f"schema {schema} has no table or view with text columns that this user can see")
    if not ask and accept:
        return [ref for ref, *_ in found[:_MOST_UNPROMPTED]]
    if not ask:
        best = ", ".join(ref.name for ref, *_ in found[:_NAMES_SHOWN])
        example = f"--table SCHEMA.TABLE (repeatable), for example {found[0][0]}"
        raise UsageFault(f"no table of {schema} chosen: give {example}, or --yes for three of: {best}")
    output.say(f"Tables and views of {schema} with text columns, most likely first:")
    for number, (ref, count, texts) in enumerate(found, 1):
        rows = "view" if count is None else f"{count:,} rows"
        output.say(f"{number:>3}  {ref.name:<28} {rows:>16}  {output.shorten(', '.join(texts), 28)}")
    numbered = {str(number): ref for number, (ref, *_) in enumerate(found, 1)}
    while True:
        answer: str = typer.prompt("Tables to use (numbers or names, separated by commas)", default="1", err=True)
        parts = [part.strip() for part in answer.split(",") if part.strip()]
        wrong = [part for part in parts if part.isdecimal() and part not in numbered]
        if wrong:
            output.fail(f"{wrong[0]} is not in the list (1 to {len(found)})")
        elif parts:
            return [numbered.get(part) or _ref(part, schema) for part in parts]


def _ref(name: str, schema: str | None) -> TableRef:
    from connector.model import TableRef

    try:
        return TableRef.parse(name)
    except ValueError as error:
        if schema is None or "." in name:
            raise UsageFault(f"--table {name}: {error}") from None
        return TableRef(schema, name.strip('"'))


def _blocks(service: Service, refs: Sequence[TableRef], languages: Sequence[str], *, strict: bool) -> list[Any]:
    """Return one proposal per source. Raises NoProposal if no table has one, or with `strict` if any table has none."""
    blocks: dict[str, dict[str, Any]] = {}
    why: NoProposal | None = None
    for ref in dict.fromkeys(refs):
        output.say(f"reading {ref} ...")
        try:
            taken = [block["name"] for block in blocks.values()]
            block = service.catalog.introspect(ref, languages=languages, taken=taken)
        except NoProposal as error:
            if strict:
                raise
            why = error
            continue
        if block["source"] in blocks:
            output.say(f"{ref}: its texts are in {block['source']}, which already has a block")
        blocks.setdefault(block["source"], block)
        if "model" in block["reasons"]:
            output.say(f'{block["name"]}: {block["reasons"]["model"]}, so model = "{block["model"]}" is proposed')
    if not blocks:
        raise NoProposal(f"no collection can be proposed for the most likely tables; the last error: {why}")
    return list(blocks.values())


def _values(settings: Settings, kind: str) -> dict[str, dict[str, Any]]:
    hana = settings.hana.model_dump(by_alias=True, exclude={"password"})
    if hana["validate_certificate"]:
        del hana["validate_certificate"]
    store: dict[str, Any] = {"kind": kind, "schema": settings.store.schema_name}
    if kind == "local":
        store = {"kind": kind, "path": str(settings.store.path or "vectors")}
    return {
        "hana": hana,
        "store": store,
        "embedding": {"model": settings.embedding.model},
        "sync": {"max_deletes": settings.sync.max_deletes},
    }


def _write(out: Path, text: str, names: Sequence[str], json: bool) -> None:
    """Write both files after reading the settings back as a check."""
    from app.src.settings import load
    from app.src.settings.writing import ENVIRONMENT_FILE

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_text(text, encoding="utf-8")
        read = load(environ={}, folder=Path(folder))
    assert [collection.name for collection in read.settings.collections] == names
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in ((_FILE, text), (_ENVIRONMENT, ENVIRONMENT_FILE)):
            draft = out / f".{name}.new"
            draft.write_text(content, encoding="utf-8")
            draft.replace(out / name)
    except OSError as error:
        raise UsageFault(f"cannot write to {out}: {error.strerror}") from None
    where = "" if out.resolve() == Path.cwd() else f"cd {shlex.quote(str(out))} && "
    commands = [f"{where}owl-sap doctor", "owl-sap tables", "owl-sap introspect SCHEMA.TABLE >> owl-sap.toml"]
    if names:
        search = f'owl-sap search {names[0]} "what you look for"'
        commands = [f"{where}owl-sap plan {names[0]}", f"owl-sap sync {names[0]}", search]
    if json:
        written = {"file": str(out / _FILE), "environment": str(out / _ENVIRONMENT)}
        output.write_json(written | {"collections": names, "next": commands})
        return
    output.say(f"wrote {out / _FILE} and {out / _ENVIRONMENT}; check the lines marked GUESS, then run:")
    for command in commands:
        output.say(f"  {command}")
