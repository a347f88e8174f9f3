"""Tables in the documentation that repeat what the code declares: settings, foreign variables, metrics, cards.

They stand between `<!-- name: begin -->` and `<!-- name: end -->`. After a change of the code write them anew:
OWL_WRITE_DOCS=1 ./scripts/test tests/docs/test_tables.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.src.core.device import CARDS, PRECISIONS, DeviceProfile, choose_precision
from app.src.metrics import Metrics
from app.src.settings import Settings
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES
from tests.docs.sections import check_section


def settings_table() -> str:
    lines = ["| setting | default | |", "|---|---|---|"]
    for path, field in _fields(Settings):
        lines.append(f"| `{path}` | {_default(field)} | {_note(field)} |")
    return "\n".join(lines)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        inner = _model_in(field.annotation)
        if inner is None:
            yield path, field
        elif path == "store.hana":
            yield path, FieldInfo(default=None, description="a section like [hana]; variables HANA_STORE_*")
        else:
            yield from _fields(inner, path + ("[]." if get_origin(field.annotation) is tuple else "."))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is tuple or isinstance(annotation, UnionType):
        return next((model for part in get_args(annotation) if (model := _model_in(part))), None)
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "" if field.default in (None, (), "") else f"`{_toml(field.default)}`"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _note(field: FieldInfo) -> str:
    choices = " ".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else ""
    return (field.description or choices).replace("|", "\\|")


def variables_table() -> str:
    guides = (variable for variable in (*VARIABLES, *GUIDE_VARIABLES) if not variable.name.startswith("HANA_"))
    return "\n".join(["| variable | |", "|---|---|", *(f"| `{guide.name}` | {guide.note} |" for guide in guides)])


def metrics_table() -> str:
    lines = ["| metric | labels | |", "|---|---|---|"]
    for metric in Metrics().__dict__.values():
        if hasattr(metric, "_labelnames"):
            name = metric._name + ("_total" if metric._type == "counter" else "")
            lines.append(f"| `{name}` | {', '.join(metric._labelnames)} | {metric._documentation} |")
    return "\n".join(lines)


def cards_table() -> str:
    head = ("card", "compute capability", '`precision = "auto"`', "on tensor cores", "fp32", "fp16", "int8")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, card in sorted(CARDS.items(), key=lambda item: item[1].capability):
        profile = DeviceProfile.of_card(name)
        cores = " ".join(kind for kind in PRECISIONS if kind in profile.tensor_cores) or "nothing"
        rates = " | ".join(str(card.peaks.get(kind, "")) for kind in ("fp32", "fp16", "int8"))
        dotted = ".".join(map(str, card.capability))
        lines.append(f"| {name} | {dotted} | {choose_precision(profile)[0]} | {cores} | {rates} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("docs/operations.md", settings_table),
    "metrics": ("docs/operations.md", metrics_table),
    "cards": ("docs/gpu.md", cards_table),
    "variables": ("docs/gpu.md", variables_table),
}


@pytest.mark.parametrize("name", TABLES)
def test_table_is_what_the_code_declares(name: str) -> None:
    file, make = TABLES[name]
    wanted = make()
    assert len(wanted.splitlines()) > 5
    check_section(file, name, wanted, "tests/docs/test_tables.py")
