"""Read settings, with the origin of each value. In order of precedence: flags, environment, .env, owl-sap.toml.
The only module that reads the environment. Messages name file or variable and key, never a value."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from dotenv import dotenv_values
from pydantic import BaseModel, SecretStr, ValidationError

from app.src.settings.collections import CollectionSettings
from app.src.settings.model import Settings
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES
from connector import failpoints

DEFAULT_FILE = "owl-sap.toml"
PREFIX = "OWL_SAP_"
_CONFIG_VARIABLE = "OWL_SAP_CONFIG"
# Only for crash tests, and only as a variable, so that no configuration file can set it.
_FAILPOINT_VARIABLE = "OWL_SAP_FAILPOINT"
_FILE_SUFFIX = "_FILE"
_SLIP = 0.8  # similarity (difflib) from which a name counts as misspelt

SettingPath = tuple[str, ...]
_Variables = Mapping[str, tuple[str, str]]  # name -> text, origin


class SettingsError(Exception):
    """The settings are invalid. One line per error: where, what, and the fix."""


class InvalidCollection(Exception):
    """A collection's settings are invalid. `faults`: the place in the block, and what is wrong there."""

    def __init__(self, faults: Sequence[tuple[tuple[str | int, ...], str]]) -> None:
        super().__init__("; ".join(": ".join([*filter(None, [".".join(map(str, at))]), what]) for at, what in faults))
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Loaded:
    """`origins`: the source of each set value, by path; absent: the default. `inert`: variables without effect.
    `failpoint`: where a crash test ends this process."""

    settings: Settings
    origins: Mapping[SettingPath, str] = field(default_factory=dict)
    inert: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    failpoint: str = ""


def load(
    config: Path | None = None,
    flags: Mapping[SettingPath, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Loaded:
    """Read all settings. `folder` (default: the working directory) contains owl-sap.toml and .env. A given `config`
    must exist; without one, owl-sap.toml is optional. Raises SettingsError."""
    folder = folder or Path.cwd()
    actual = os.environ if environ is None else environ  # noqa: TID251 - the one place
    # Without interpolation: a password may contain a $. Empty variables, which Docker Compose passes, count as unset.
    written = _parsed(folder / ".env", partial(dotenv_values, interpolate=False))
    variables = {name: (text, f".env {name}") for name, text in written.items() if text}
    variables |= {name: (text, f"environment {name}") for name, text in actual.items() if text}
    if config is None and _CONFIG_VARIABLE in variables:
        config = Path(variables[_CONFIG_VARIABLE][0])
    if config is not None and not config.is_file():
        raise SettingsError(f"{config}: configuration file not found; see owl-sap.example.toml for a start")
    file = config or folder / DEFAULT_FILE
    inert: dict[str, str] = {}
    written = _parsed(file, lambda toml: tomllib.loads(toml.read_text(encoding="utf-8-sig")))
    assigned = list(_in_file(written, str(config or file.name)))
    assigned += _assigned_by(variables, inert)
    assigned += [(path, value, "flag") for path, value in (flags or {}).items()]
    tree: dict[str, Any] = {}
    origins: dict[SettingPath, str] = {}
    for path, value, origin in assigned:
        node = tree
        for depth, name in enumerate(path[:-1], start=1):
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise SettingsError(f"{origins[path[:depth]]}: {name}: {_NO_SECTION}")
        node[path[-1]] = value
        origins[path] = origin
    text, origin = variables.get(_FAILPOINT_VARIABLE, ("", ""))
    if text and not origin.startswith("environment "):
        raise SettingsError(f"{origin}: only the environment, not a file, may arm a failpoint")
    try:
        if text:
            failpoints.hook(text)  # only to check the text
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise SettingsError("\n".join(_explained(error, tree, origins))) from None
    except ValueError as error:
        raise SettingsError(f"{origin}: {error}") from None
    return Loaded(settings, origins, inert, file if file.is_file() else None, text)


def no_collections(file: Path | None) -> str:
    """Return the message for missing collections; `file` as in Loaded. Names no folder, because REST clients see it."""
    if file is None:
        return f"no {DEFAULT_FILE} in the working directory; `owl-sap init` writes one, or give --config"
    return f"{file.name} has no [[collections]] block; `owl-sap introspect SCHEMA.TABLE` proposes one"


def _parsed(file: Path, parse: Callable[[Path], Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the file's content, {} without the file. Raises SettingsError."""
    try:
        return parse(file) if file.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read ({type(error).__name__})") from None
    except (ValueError, RecursionError):  # Python's parser raises these without a location
        raise SettingsError(f"{file}: not valid TOML: a number too long, or brackets too deep") from None


_Assigned = tuple[SettingPath, Any, str]  # a setting, its value, the value's origin


def _in_file(tree: Mapping[str, Any], origin: str, prefix: SettingPath = ()) -> Iterator[_Assigned]:
    for name, value in tree.items():
        path = (*prefix, name)
        if isinstance(value, dict) and path in _SECTIONS:
            yield path, {}, origin
            yield from _in_file(value, origin, path)
        else:
            yield path, value, origin


def _assigned_by(variables: _Variables, inert: dict[str, str]) -> Iterator[_Assigned]:
    """Yield the assignments of variables. `inert` gets the variables without effect. Raises SettingsError for unknown
    and invalid ones."""
    for variable in (*GUIDE_VARIABLES, *VARIABLES):
        text, origin = _text_of(variable.name, variables)
        try:
            assigned = {} if variable.assign is None or text is None else variable.assign(text)
        except ValueError as error:
            raise SettingsError(f"{origin}: {error}") from None
        if text is not None and not assigned:
            inert[variable.name] = variable.note
        yield from ((path, value, origin) for path, value in assigned.items())
    own, guides = OWN_VARIABLES, [each.name for each in VARIABLES if each.name.startswith("T4_GPU_")]
    for name, (_, origin) in variables.items():
        base = name if name in own else name.removesuffix(_FILE_SUFFIX)
        if name.startswith("T4_GPU_") and base not in guides:
            # Accept other names: Kubernetes sets some for a service named t4-gpu.
            if near := _nearest(base, guides, _SLIP):
                raise SettingsError(f"{origin}: no such variable{near} (docs/gpu.md lists them)")
        elif name.startswith(PREFIX) and name not in (_CONFIG_VARIABLE, _FAILPOINT_VARIABLE):
            if base not in own:
                raise SettingsError(f"{origin}: no such setting{_nearest(name, list(own))}; see owl-sap config schema")
            value: Any
            value, origin = _text_of(base, variables)
            if own[base] == ("collections",) and value is not None:
                try:
                    value = tomllib.loads(value)["collections"]
                except (ValueError, KeyError, RecursionError):
                    raise SettingsError(f"{origin}: must be [[collections]] blocks in TOML") from None
            yield own[base], value, origin


def _text_of(name: str, variables: _Variables) -> tuple[str | None, str]:
    """Return the variable's text, or the content of the file that NAME_FILE names; and the origin."""
    direct, indirect = variables.get(name), variables.get(name + _FILE_SUFFIX)
    if indirect is None:
        return direct or (None, "")
    if direct is not None:
        raise SettingsError(f"{direct[1]} and {indirect[1]} are both set; keep one of them")
    try:
        return Path(indirect[0]).read_text(encoding="utf-8").rstrip("\r\n"), indirect[1]
    except (OSError, ValueError) as error:
        # Do not show the value: the variable may hold the secret itself.
        raise SettingsError(f"{indirect[1]}: the file it names cannot be read ({type(error).__name__})") from None


_NO_SECTION = "must be a section, not a single value"


def _sections(model: type[BaseModel], path: SettingPath = ()) -> Iterator[tuple[SettingPath, type[BaseModel]]]:
    """Yield the path and model of each section; a list of blocks has one entry, with the path of the list."""
    yield path, model
    for name, info in model.model_fields.items():
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind, (*path, info.alias or name))


_SECTIONS = dict(_sections(Settings))
_NAMES = {path: [info.alias or name for name, info in model.model_fields.items()] for path, model in _SECTIONS.items()}
_ALL = [(*path, name) for path, names in _NAMES.items() if path[:1] != ("collections",) for name in names]
# A list of blocks is one value: each source replaces it completely.
_LEAVES = [*(path for path in _ALL if path not in _SECTIONS), ("collections",)]


OWN_VARIABLES: Mapping[str, SettingPath] = {PREFIX + "__".join(path).upper(): path for path in _LEAVES}


def show(loaded: Loaded) -> list[dict[str, Any]]:
    """Return each setting as `{"setting", "value", "origin"}`; a secret that is set shows as asterisks."""
    rows = []
    for path in _LEAVES:
        value: Any = loaded.settings
        for name in path:
            value = getattr(value, "schema_name" if name == "schema" else name, None)
        if path == ("collections",):
            value = [item.model_dump(mode="json", by_alias=True) for item in value]
        elif isinstance(value, tuple | dict):  # in the format of its environment variable
            parts = value if isinstance(value, tuple) else (f"{name}={inner}" for name, inner in value.items())
            value = ", ".join(map(str, parts))
        elif isinstance(value, SecretStr | Path):
            value = str(value)
        rows.append({"setting": ".".join(path), "value": value, "origin": loaded.origins.get(path, "default")})
    return rows


def collection_of(block: Mapping[str, Any]) -> CollectionSettings:
    """Return the settings of one [[collections]] block. Raises InvalidCollection."""
    try:
        return CollectionSettings.model_validate(block)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        faults = [(fault["loc"], _told(fault["type"], fault["msg"], ("collections", *fault["loc"]))) for fault in found]
        raise InvalidCollection(faults) from None


def _explained(error: ValidationError, tree: Mapping[str, Any], origins: Mapping[SettingPath, str]) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        location = fault["loc"]
        told = _told(fault["type"], fault["msg"], location)
        if not location:  # settings of several sections that do not fit each other
            yield f"settings: {told}"
            continue
        # A section that only variables set has the origin of the first variable.
        begun = [tuple(map(str, location[:length])) for length in range(len(location), 0, -1)]
        inside = (origin for path, origin in origins.items() if path[: len(location)] == tuple(location))
        origin = next((origins[path] for path in begun if path in origins), None) or next(inside, "settings")
        shown = ".".join(map(str, location))
        if location[0] == "collections" and len(location) > 1:  # show a collection's name instead of its index
            index = int(location[1])
            block = tree["collections"][index]
            name = isinstance(block, Mapping) and block.get("name")
            named = name if isinstance(name, str) and name else f"number {index + 1}"
            shown = f"[[collections]] {'.'.join([named, *map(str, location[2:])])}"
        yield f"{origin}: {shown}: {told}"


def _told(kind: str, message: str, location: Sequence[str | int]) -> str:
    """Return pydantic's message on one line; for an unknown key, the nearest known one."""
    if kind != "extra_forbidden":
        return " ".join((_NO_SECTION if kind == "model_type" else message.removeprefix("Value error, ")).split())
    *parent, name = (part for part in location if isinstance(part, str))
    names = _NAMES.get(tuple(parent), _NAMES[()])
    elsewhere = [".".join(path) for path in _LEAVES if path[-1] == name and path[:-1] != tuple(parent)]
    known = f"; did you mean {elsewhere[0]}?" if elsewhere else f"; known keys: {', '.join(names)}"
    return f"unknown key{_nearest(name, names) or known}"


def _nearest(name: str, names: Sequence[str], cutoff: float = 0.6) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f'; did you mean "{near[0]}"?' if near else ""
