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
from ruamel.yaml import YAML

from app.src.core.device import BUILDS, CARDS, DeviceProfile, builds_for, choose_precision, driver_ceiling
from app.src.observe.metrics import FIGURES, Metrics
from app.src.settings import Settings
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES
from tests.docs import variables_by_card
from tests.docs.sections import ROOT, check_section


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
    return "" if field.default in (None, (), "", {}) else f"`{_toml(field.default)}`"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
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
    lines += [f"| `{name}` | {', '.join(labels)} | {said} |" for name, (said, labels) in FIGURES.items()]
    return "\n".join(lines)


def alerts_table() -> str:
    files = sorted((ROOT / "monitoring/prometheus/rules").glob("*.yml"))
    groups = (group for file in files for group in YAML(typ="safe").load(file)["groups"])
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    lines = _head(("alert", "severity", "after", ""))
    for alert in alerts:
        said = alert["annotations"]["description"].replace("|", "\\|")
        lines.append(_row(f"`{alert['alert']}`", alert["labels"]["severity"], alert["for"], said))
    return "\n".join(lines)


def cards_table() -> str:
    rates = ("fp32", "fp16", "int8", "fp8")
    head = ("card", "compute capability", '`precision = "auto"`', "on tensor cores", *rates, "GB/s")
    lines = _head(head)
    for profile in _cards():
        cores = " ".join(profile.tensor_core_formats) or "nothing"
        cells = [_rate(profile.name, kind) for kind in rates]
        chosen = choose_precision(profile)[0]
        lines.append(_row(profile.name, _dotted(profile), chosen, cores, *cells, f"{profile.bandwidth:g}"))
    return "\n".join(lines)


def needs_table() -> str:
    padded = ("fp32", "tf32", "fp16", "int8")
    head = ("card", f"lengths padded in {', '.join(padded)}", "torch, best first", "driver")
    lines = _head(head)
    for profile in _cards():
        multiples = ", ".join(str(profile.padding_multiple(kind)) for kind in padded)  # type: ignore[arg-type]
        assert profile.capability is not None
        fitting = builds_for(profile.capability)
        builds = "; ".join(f"{build.torch} for CUDA {build.cuda}" for build in fitting)
        ceiling = driver_ceiling(profile.capability)
        drivers = f"{min(build.driver for build in fitting)} " + (f"to {ceiling}" if ceiling else "or newer")
        lines.append(_row(profile.name, multiples, builds, drivers))
    return "\n".join(lines)


def builds_table() -> str:
    lines = _head(("torch", "CUDA", "kernels", "driver at least", "until torch", ""))
    for build in BUILDS:
        kernels = " ".join(name.removeprefix("sm_") for name in build.architectures)
        lines.append(_row(build.torch, build.cuda, kernels, str(build.driver), build.last or "", f"`{build.command}`"))
    return "\n".join(lines)


def _cards() -> list[DeviceProfile]:
    return [DeviceProfile.of_card(name) for name, card in sorted(CARDS.items(), key=lambda item: item[1][0])]


def _rate(name: str, kind: Any) -> str:
    peaks = CARDS[name][3]
    return f"{peaks[kind]:g}" if kind in peaks else ""


def _dotted(profile: DeviceProfile) -> str:
    return ".".join(map(str, profile.capability or ()))


def _head(names: tuple[str, ...]) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("docs/settings.md", settings_table),
    "metrics": ("docs/monitoring.md", metrics_table),
    "alerts": ("docs/monitoring.md", alerts_table),
    "cards": ("docs/gpu.md", cards_table),
    "needs": ("docs/gpu.md", needs_table),
    "builds": ("docs/gpu.md", builds_table),
    "variables": ("docs/gpu.md", variables_table),
    "variables by card": ("docs/gpu.md", variables_by_card.table),
}


@pytest.mark.parametrize("name", TABLES)
def test_table_is_what_the_code_declares(name: str) -> None:
    file, make = TABLES[name]
    wanted = make()
    assert len(wanted.splitlines()) > 4
    check_section(file, name, wanted, "tests/docs/test_tables.py")


def test_every_variable_has_its_effect_on_every_card() -> None:
    """What changes nothing by itself changes nothing on any card, unless a library reads it; what sets something does
    so somewhere; and each card is asked."""
    known = variables_by_card.guides_variables()
    cells: dict[str, set[str]] = {}
    for name, _text, cell in variables_by_card.ROWS:
        cells.setdefault(name, set()).update(map(cell, variables_by_card.COLUMNS.values()))
    assert set(cells) == set(known)
    for name, variable in known.items():
        effects = cells[name] - {variables_by_card.NOTHING}
        if variable.assign is None and not variable.note.startswith("read by "):
            assert not effects, name
        elif variable.assign is not None:
            assert effects, name
    capabilities = {profile.capability for profile in variables_by_card.COLUMNS.values()}
    assert len(capabilities) == len(variables_by_card.COLUMNS)


def test_the_variables_text_in_the_table_is_one_that_it_takes() -> None:
    known = variables_by_card.guides_variables()
    for name, text, _cell in variables_by_card.ROWS:
        variable = known[name]
        if variable.assign is not None:
            variable.assign(text)
