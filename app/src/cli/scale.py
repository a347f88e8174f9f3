"""The options of verbs that embed on a Ray cluster, and the verb `scale check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, opened, read_settings, scale_app, verb
from app.src.cli.exits import FAILED, OK, UsageFault

if TYPE_CHECKING:
    from app.src.settings import Loaded

ScaleFlag = Annotated[
    Literal["off", "ray"] | None,
    typer.Option("--scale", help="Where to embed: here, or on a Ray cluster (docs/scale.md)."),
]
ActorsFlag = Annotated[int | None, typer.Option(min=0, help="Workers of the Ray cluster; 0: by its GPUs.")]
_COLUMNS = ("host", "pid", "device", "gpus", "Python", "ray", "torch")


def read_scaled(
    scale: str | None, actors: int | None, flags: Mapping[tuple[str, ...], Any] | None = None, *, serving: bool = False
) -> Loaded:
    """Read the settings with the options --scale and --actors. `flags`: as for `read_settings`; `serving`: refuse a
    cluster, which embeds for no waiting callers."""
    loaded = read_settings({**(flags or {}), ("scale", "engine"): scale, ("scale", "actors"): actors})
    if actors is not None and loaded.settings.scale.engine == "off":
        raise UsageFault("--actors needs --scale ray")
    if serving and loaded.settings.scale.engine == "ray":
        raise UsageFault("the service does not embed on a Ray cluster: give --scale off with --serve")
    return loaded


@verb(scale_app, "check")
def check(actors: ActorsFlag = None, json: JsonFlag = False) -> int:
    """Start the workers of [scale] and load every configured model on them. Checks token, versions and fingerprints;
    a difference is an error that names it. Exit 1 when a worker does not start."""
    with opened(read_scaled("ray", actors), scaled=True) as service:
        names = service.collections.synced_names
        embedders = [service.parts.embedder_for(name) for name in names] or [service.parts.embedder]
        fingerprints = list(dict.fromkeys(each.fingerprint for each in embedders))
        reports, missing = service.parts.cluster.reports(), service.parts.cluster.missing
        address = service.settings.scale.address
    rows = [
        {name: report[name] for name in ("host", "pid", "device", "gpus")} | report["versions"] for report in reports
    ]
    if json:
        output.write_json({"address": address, "workers": rows, "missing": missing, "fingerprints": fingerprints})
    else:
        output.data(rows, f"Workers of the Ray cluster at {address}", _COLUMNS, json=False, whole=False)
        for fingerprint in fingerprints:
            output.say(f"same on every worker: {fingerprint}")
        for reason in missing:
            output.say(f"a worker is missing: {reason}")
    return FAILED if missing else OK
