"""Read settings: owl-sap.toml < environment (and .env) < flags, with the origin of every value. The only module that
looks at the environment. Messages name file or variable and key, never a value."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from dotenv import dotenv_values
from pydantic import BaseModel, SecretStr, ValidationError

from app.src.settings.model import Settings
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES, BadVariable, Variable
from connector.failpoints import Failpoint

DEFAULT_FILE = "owl-sap.toml"
PREFIX = "OWL_SAP_"
_CONFIG_VARIABLE = "OWL_SAP_CONFIG"
# For tests of crashes only: no setting, so that no configuration file can arm one.
_FAILPOINT_VARIABLE = "OWL_SAP_FAILPOINT"
_FILE_SUFFIX = "_FILE"
_T4_PREFIX = "T4_GPU_"
_SLIP = 0.8  # likeness (difflib's) from which a name is taken for a misspelt one

SettingPath = tuple[str, ...]
# Former settings and their fixed values.
_REMOVED = {
    "mcp.max_hits": "50",
    "search.rerank_depth": "50",
    "state.keep_jobs": "1000",
    "tensorrt.least_cosine": "0.99",
    "tensorrt.least_int8_share": "0.5",
    "tensorrt.least_overlap": "0.9",
}


class SettingsError(Exception):
    """The settings are invalid. One line per fault: where, what, and what to do."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`origins`: the source of each set value, by path; absent: the default. `inert`: variables without effect; `kept`:
    the values of those that T4GPUConfig has a field for. `failpoint`: where a test ends this process."""

    settings: Settings
    origins: Mapping[SettingPath, str] = field(default_factory=dict)
    inert: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None
    failpoint: Failpoint | None = None


def load(
    config: Path | None = None,
    flags: Mapping[SettingPath, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Loaded:
    """Read everything. `folder` (default: the working directory) is where owl-sap.toml and .env are looked for.

    A `config` that is named must exist; without one, owl-sap.toml is read if it is there. Raises SettingsError.
    """
    folder = folder or Path.cwd()
    variables = _environment(environ, folder)
    file = _file(config, variables, folder)
    layers = _Layers()
    if file is not None:
        layers.add_tree(_toml(file), str(file.name if config is None else file))
    layers.add_variables(variables)
    for path, value in (flags or {}).items():
        layers.put(path, value, "flag")
    try:
        settings = Settings.model_validate(layers.tree)
    except ValidationError as error:
        raise SettingsError("\n".join(_explained(error, layers))) from None
    return Loaded(settings, layers.origins, layers.inert, layers.kept, file, _failpoint(variables))


def no_collections(file: Path | None) -> str:
    """Return the message for missing collections; `file` as in Loaded. Names no folder, because REST clients see it."""
    if file is None:
        return (
            f"no {DEFAULT_FILE} in the working directory; `owl-sap init` writes one (owl-sap.example.toml is another "
            "start), or give --config"
        )
    return f"{file.name} has no [[collections]] block; `owl-sap introspect SCHEMA.TABLE` proposes one"


# ------------------------------------------------------------------------------------------------ files and environment


_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def proxy_variables(environ: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Return the names of the set proxy variables (values may hold passwords), and NO_PROXY's hosts."""
    actual = os.environ if environ is None else environ  # noqa: TID251 - as in _environment
    names = [name for name in (*_PROXIES, *map(str.lower, _PROXIES)) if actual.get(name)]
    spared = actual.get("NO_PROXY") or actual.get("no_proxy") or ""
    return names, [host.strip() for host in spared.split(",") if host.strip()]


def _environment(environ: Mapping[str, str] | None, folder: Path) -> dict[str, tuple[str, str]]:
    """Name -> (text, origin). The environment beats .env; an empty variable counts as unset (compose passes those)."""
    merged: dict[str, tuple[str, str]] = {}
    file = folder / ".env"
    if file.is_file():
        try:
            # As written: a password may hold a $, which interpolation would take for a variable.
            values = dotenv_values(file, interpolate=False)
            merged |= {name: (text, f".env {name}") for name, text in values.items() if text}
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{file}: cannot be read ({type(error).__name__})") from None
    actual = os.environ if environ is None else environ  # noqa: TID251 - the one place
    return merged | {name: (text, f"environment {name}") for name, text in actual.items() if text}


def _failpoint(variables: Mapping[str, tuple[str, str]]) -> Failpoint | None:
    text, origin = variables.get(_FAILPOINT_VARIABLE, ("", ""))
    if not text:
        return None
    if not origin.startswith("environment "):
        raise SettingsError(f"{origin}: only the environment, not a file, may arm a failpoint")
    try:
        return Failpoint.parse(text)
    except ValueError as error:
        raise SettingsError(f"{origin}: {error}") from None


def _file(config: Path | None, variables: Mapping[str, tuple[str, str]], folder: Path) -> Path | None:
    named = config or (Path(variables[_CONFIG_VARIABLE][0]) if _CONFIG_VARIABLE in variables else None)
    if named is None:
        return folder / DEFAULT_FILE if (folder / DEFAULT_FILE).is_file() else None
    if not named.is_file():
        raise SettingsError(f"{named}: configuration file not found; see owl-sap.example.toml for a start")
    return named


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read ({type(error).__name__})") from None
    except (ValueError, RecursionError):
        raise SettingsError(f"{file}: {_BEYOND_TOML}") from None


_NO_SECTION = "must be a section, not a single value"
# What Python's parser stumbles over without naming it.
_BEYOND_TOML = "not valid TOML: a number of thousands of digits, or hundreds of brackets within each other"


@dataclass(slots=True)
class _Layers:
    """Layered values, later over earlier, with their origins."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[SettingPath, str] = field(default_factory=dict)
    inert: dict[str, str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def put(self, path: SettingPath, value: Any, origin: str) -> None:
        node = self.tree
        for depth, name in enumerate(path[:-1], start=1):
            inner = node.setdefault(name, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"{self.origins[path[:depth]]}: {name}: {_NO_SECTION}")
            node = inner
        node[path[-1]] = value
        self.origins[path] = origin

    def add_tree(self, tree: Mapping[str, Any], origin: str, prefix: SettingPath = ()) -> None:
        for name, value in tree.items():
            path = (*prefix, name)
            if isinstance(value, dict) and _section(path) is not None:
                self.put(path, {}, origin)
                self.add_tree(value, origin, path)
            else:
                self.put(path, value, origin)

    def add_variables(self, variables: Mapping[str, tuple[str, str]]) -> None:
        for table in (GUIDE_VARIABLES, VARIABLES):
            for variable in table:
                self._add_known(variable, variables)
        for name, (_, origin) in variables.items():
            if name.startswith(PREFIX) and name not in (_CONFIG_VARIABLE, _FAILPOINT_VARIABLE):
                self._add_own(name, origin, variables)
            elif name.startswith(_T4_PREFIX):
                _check_spelling(name, origin)

    def _add_known(self, variable: Variable, variables: Mapping[str, tuple[str, str]]) -> None:
        text, origin = _text_of(variable.name, variables)
        if text is None:
            return
        try:
            assigned = {} if variable.assign is None else variable.assign(text)
            if variable.kept is not None:
                self.kept[variable.kept] = variable.read(text)
        except BadVariable as error:
            raise SettingsError(f"{origin}: {error}") from None
        if not assigned:
            self.inert[variable.name] = variable.note
        for path, value in assigned.items():
            self.put(path, value, origin)

    def _add_own(self, name: str, origin: str, variables: Mapping[str, tuple[str, str]]) -> None:
        known = own_variables()
        base = name.removesuffix(_FILE_SUFFIX) if name not in known else name
        if base not in known:
            if removed := _removed(base.removeprefix(PREFIX).lower().replace("__", ".")):
                raise SettingsError(f"{origin}: {removed}")
            raise SettingsError(f"{origin}: no such setting{_nearest(name, list(known))}; see owl-sap config schema")
        text, origin = _text_of(base, variables)
        if text is not None:
            self.put(known[base], _parsed(base, text, origin), origin)


def _check_spelling(name: str, origin: str) -> None:
    """Refuse near misses of the guides' variables. Others pass, such as Kubernetes' own for a service named t4-gpu."""
    known = [variable.name for variable in VARIABLES if variable.name.startswith(_T4_PREFIX)]
    base = name.removesuffix(_FILE_SUFFIX)
    near = difflib.get_close_matches(base, known, n=1, cutoff=_SLIP)
    if base not in known and near:
        raise SettingsError(f'{origin}: no such variable; did you mean "{near[0]}"? (docs/gpu.md lists them)')


def _text_of(name: str, variables: Mapping[str, tuple[str, str]]) -> tuple[str | None, str]:
    """Return the variable's text, or the content of the file that NAME_FILE names."""
    direct, indirect = variables.get(name), variables.get(name + _FILE_SUFFIX)
    if indirect is None:
        return direct or (None, "")
    if direct is not None:
        raise SettingsError(f"{direct[1]} and {indirect[1]} are both set; keep one of them")
    try:
        return Path(indirect[0]).read_text(encoding="utf-8").rstrip("\r\n"), indirect[1]
    except (OSError, ValueError) as error:
        # Without its name: the variable may hold the secret itself.
        raise SettingsError(f"{indirect[1]}: the file it names cannot be read ({type(error).__name__})") from None


def _parsed(name: str, text: str, origin: str) -> Any:
    if name != PREFIX + "COLLECTIONS":
        return text
    try:
        return tomllib.loads(text)["collections"]
    except (ValueError, KeyError, RecursionError):
        raise SettingsError(f"{origin}: must be [[collections]] blocks in TOML") from None


# ------------------------------------------------------------------------------------------------- what there is to set


def own_variables() -> dict[str, SettingPath]:
    """Every OWL_SAP_* variable and its setting."""
    names = {PREFIX + "__".join(path).upper(): path for path in _leaves(Settings)}
    return names


def _leaves(model: type[BaseModel], prefix: SettingPath = ()) -> Iterator[SettingPath]:
    for name in _names(model):
        path = (*prefix, name)
        inner = _section(path)
        if inner is None:
            yield path
        else:
            yield from _leaves(inner, path)


def _names(model: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def _section(path: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the model at this path, if any; positions in lists are skipped."""
    model: type[BaseModel] = Settings
    for name in path:
        if isinstance(name, int):
            continue
        info = next((info for key, info in model.model_fields.items() if name == (info.alias or key)), None)
        inner = _model_in(info.annotation) if info is not None else None
        if inner is None:
            return None
        model = inner
    # A list of blocks is one value: a layer replaces it whole.
    return None if path and path[-1] == "collections" else model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


# ------------------------------------------------------------------------------------------------------------- messages


def _explained(error: ValidationError, layers: _Layers) -> Iterator[str]:
    for fault in error.errors(include_url=False, include_input=False, include_context=False):
        location = fault["loc"]
        where = f"{_origin(location, layers.origins)}: {_shown(location, layers.tree)}"
        if fault["type"] == "extra_forbidden":
            yield f"{where}: {_removed('.'.join(map(str, location))) or f'unknown key{_suggestion(location)}'}"
        elif fault["type"] == "model_type":
            yield f"{where}: {_NO_SECTION}"
        else:
            told = " ".join(fault["msg"].removeprefix("Value error, ").split())  # on one line
            yield f"{where}: {told}"


def _origin(location: Sequence[str | int], origins: Mapping[SettingPath, str]) -> str:
    for length in range(len(location), 0, -1):
        origin = origins.get(tuple(str(part) for part in location[:length]))
        if origin is not None:
            return origin
    # A section that only variables made: the first of them.
    return next((origin for path, origin in origins.items() if path[: len(location)] == tuple(location)), "settings")


def _shown(location: Sequence[str | int], tree: Mapping[str, Any]) -> str:
    """Return the setting's name as in the file, with the collection's name."""
    match location:
        case ["collections", int(index), *rest]:
            name = tree["collections"][index].get("name") if isinstance(tree["collections"][index], Mapping) else None
            named = str(name) if isinstance(name, str) and name else f"number {index + 1}"
            return f"[[collections]] {'.'.join([named, *map(str, rest)])}"
        case _:
            return ".".join(map(str, location))


def _removed(name: str) -> str | None:
    return f"no longer a setting, remove it; its value is always {_REMOVED[name]}" if name in _REMOVED else None


def _suggestion(location: Sequence[str | int]) -> str:
    *parent, name = location
    model = _section(parent) if not parent or parent[-1] != "collections" else None
    if parent and isinstance(parent[-1], int):
        model = _model_in(Settings.model_fields["collections"].annotation) or _collection_model()
    names = _names(model or Settings)
    elsewhere = [".".join(path) for path in own_variables().values() if path[-1] == name and path[:-1] != tuple(parent)]
    near = _nearest(str(name), names)
    return near or (f"; did you mean {elsewhere[0]}?" if elsewhere else f"; known keys: {', '.join(names)}")


def _collection_model() -> type[BaseModel]:
    return next(
        argument
        for argument in get_args(Settings.model_fields["collections"].annotation)
        if isinstance(argument, type) and issubclass(argument, BaseModel)
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


# -------------------------------------------------------------------------------------------------------------- showing


def show(loaded: Loaded) -> list[dict[str, Any]]:
    """Every setting as `{"setting", "value", "origin"}`; a secret that is set shows as asterisks."""
    rows = []
    for path in _leaves(Settings):
        value = _value(loaded.settings, path)
        rows.append({"setting": ".".join(path), "value": value, "origin": _shown_origin(path, loaded)})
    return rows


def _shown_origin(path: SettingPath, loaded: Loaded) -> str:
    return loaded.origins.get(path, "default")


def _value(settings: Settings, path: SettingPath) -> Any:
    node: Any = settings
    for name in path:
        node = getattr(node, "schema_name" if name == "schema" else name, None)
    if isinstance(node, SecretStr):
        return str(node)
    if path == ("collections",):
        return [item.model_dump(mode="json", by_alias=True) for item in node]
    if isinstance(node, tuple):  # as its variable takes it
        return ", ".join(map(str, node))
    if isinstance(node, dict):
        return ", ".join(f"{name}={value}" for name, value in node.items())
    return str(node) if isinstance(node, Path) else node


def t4_gpu(loaded: Loaded) -> dict[str, Any]:
    """Each field by the setting that its variable reaches, wherever that was set; the few that have none as the
    variables say, else left to the guides' default."""
    embedding, tensorrt = loaded.settings.embedding, loaded.settings.tensorrt
    half = embedding.precision not in ("fp32", "tf32")
    return {
        **loaded.kept,
        "fp16_mode": half,
        "enable_tensor_cores": embedding.precision != "fp32",
        "int8_mode": tensorrt.enabled or embedding.precision == "int8",
        "max_workspace_size": tensorrt.workspace_mb << 20,
        "optimization_level": tensorrt.optimization_level,
        "enable_profiling": embedding.profiling,
        "memory_fraction": embedding.memory_fraction,
        "precision": embedding.precision,
        "calibration_cache": loaded.settings.tensorrt_cache(loaded.file),
    }
