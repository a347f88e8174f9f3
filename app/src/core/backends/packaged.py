"""The models that Python packages carry: names, languages, licences. Imports neither torch nor the packages."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a Python package: its folder there, and the SHA-256 of its files.

    `languages`: ISO 639-1 codes that the model was trained for; `extra`: the extra of this distribution that installs
    the package; `requirement`: the package's distribution and version. With `source_sha256`, the sums of the package's
    files, the model is converted into a folder with the files of `sha256` (`conversion.py`).
    """

    package: str
    folder: str
    sha256: Mapping[str, str]
    languages: tuple[str, ...] = ()
    licence: str = ""
    extra: str = "engine"
    requirement: str = ""
    source_sha256: Mapping[str, str] = field(default_factory=dict)


_TABLES = tomllib.loads(files(__package__).joinpath("packaged.toml").read_text(encoding="utf-8"))
PACKAGED = {
    name: PackagedModel(**{**model, "languages": tuple(model["languages"].split())}) for name, model in _TABLES.items()
}
