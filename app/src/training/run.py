"""A fine-tuning from beginning to end: pairs, split, figures before, training, figures after, model folder."""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.src.core.backends import DeviceUnavailable
from app.src.core.backends.folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from app.src.core.device import DeviceError, DeviceProfile, detect
from app.src.core.finetune.recipe import Hooks, Pace, Recipe, Technique, Trained, TrainingJob, missing_packages
from app.src.training import card
from app.src.training.held_out import Figures, Split, Trial, split
from app.src.training.pairs import Pairs, read_file, read_rows
from app.src.training.work import Work
from connector.errors import ConfigurationError
from connector.extras import install_command
from connector.model import CollectionSpec, ModelSource
from connector.protocols import Source

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine

DEFAULTS = {"epochs": 1, "batch_size": 16, "learning_rate": 2e-5, "seed": 7, "most_pairs": 100_000}
_EMBEDDED_AT_ONCE = 512  # texts between two looks at `TrainingObserver.stop`


@dataclass(frozen=True, slots=True)
class Request:
    """Pairs come from `file`, or from two `columns` of the collection's rows. None: the default, or with `resume` what
    the unfinished training was begun with."""

    file: Path | None = None
    columns: tuple[str, str] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    most_pairs: int | None = None
    resume: bool = False

    def given(self) -> dict[str, Any]:
        """Return the options that were given, as JSON."""
        options = asdict(self) | {
            "file": None if self.file is None else str(self.file.absolute()),
            "columns": None if self.columns is None else list(self.columns),
        }
        return {name: value for name, value in options.items() if name != "resume" and value is not None}


@dataclass(frozen=True, slots=True)
class Resources:
    """What a training needs of the process. `source` connects when called; `load` returns an engine to be closed."""

    source: Callable[[], Source]
    load: Callable[[ModelSource], EmbeddingEngine]
    device: str
    page_rows: int


@dataclass(frozen=True, slots=True)
class TrainingObserver:
    """`say`: a sentence for people. `step`: steps done, all steps, last loss. `stop`: true ends the training with a
    checkpoint."""

    say: Callable[[str], None] = lambda _text: None
    step: Callable[[int, int, float | None], None] = lambda _done, _steps, _loss: None
    stop: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Report:
    """`folder`: the finished model, None when `stopped`. `worse`: it finds less than the base model, so it should not
    be used. `generation`: the one built with it, None for none."""

    collection: str
    base: dict[str, Any]
    pairs: dict[str, Any]
    training: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    folder: str | None = None
    weights_sha256: str | None = None
    worse: bool = False
    stopped: bool = False
    unfinished: str | None = None
    generation: int | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Stopped(Exception):
    """`TrainingObserver.stop` ended an evaluation."""


def finetune(
    spec: CollectionSpec,
    model: ModelSource,
    request: Request,
    work: Work,
    resources: Resources,
    observer: TrainingObserver,
) -> Report:
    """Train `model` and write the result to `work.out`. Raises ConfigurationError for what cannot be begun,
    TrainingFailed, the errors of the engine and of the rows' source."""
    started = time.monotonic()
    if missing := missing_packages():
        raise _not_importable(" and ".join(missing))
    if model.name.startswith("hash:"):
        raise ConfigurationError(f'"{model.name}" is the test embedder and cannot be trained: set another model')
    path = find_folder(model.name, model.revision)
    base = read_folder(path, display_name(model.name, path))
    weights = check_files(base, model.weights_sha256)
    try:
        profile = detect(resources.device)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    except ImportError as error:
        raise _not_importable(error.name or "torch") from error
    with work.opened(resume=request.resume):
        report = _Run(spec, model, (base, weights, profile), work, resources, observer)(request)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _not_importable(packages: str) -> ConfigurationError:
    return ConfigurationError(f"training needs {packages}, which cannot be imported: {install_command('train')}")


class _Run:
    """One fine-tuning in its work folder."""

    def __init__(
        self,
        spec: CollectionSpec,
        model: ModelSource,
        base: tuple[Folder, str, DeviceProfile],
        work: Work,
        resources: Resources,
        observer: TrainingObserver,
    ) -> None:
        self._spec = spec
        self._model = model
        self._base, weights, self._profile = base
        self._base_facts = {"model": self._base.name, "weights_sha256": weights}
        self._work = work
        self._resources = resources
        self._observer = observer

    def __call__(self, request: Request) -> Report:
        begun = self._work.facts() if request.resume else {}
        chosen = self._chosen(request, begun)
        if "columns" in chosen:
            self._observer.say(card.LICENCE_NOTICE)
        pairs = self._pairs(chosen)
        report = Report(self._spec.name, dict(self._base_facts), pairs.counts())
        try:
            if self._observer.stop():  # the reading may have been cut short
                raise _Stopped
            self._finish(chosen, begun, pairs, report)
        except _Stopped:
            report.stopped = True
        if report.stopped and self._work.begun:
            report.unfinished = str(self._work.folder)
        return report

    def _chosen(self, request: Request, begun: dict[str, Any]) -> dict[str, Any]:
        given = request.given()
        before = begun.get("chosen", {})
        for name, value in given.items():
            if request.resume and value != before.get(name):
                raise ConfigurationError(
                    f"the training in {self._work.folder} was begun with {name} {before.get(name)}, not {value}: "
                    "omit the option to continue, or delete the folder"
                )
        chosen = (DEFAULTS if not request.resume else before) | given
        if ("file" in chosen) == ("columns" in chosen):
            raise ConfigurationError(
                "name the pairs to learn from: --pairs FILE.jsonl, or --columns TITLE LONGTEXT for rows of the "
                "collection"
            )
        if request.resume and begun.get("base") != self._base_facts:
            raise ConfigurationError(
                f"the training in {self._work.folder} was begun with another base model than {self._base.name} is now: "
                "delete the folder and start again"
            )
        return chosen

    def _pairs(self, chosen: dict[str, Any]) -> Pairs:
        limit = chosen["most_pairs"]
        if "file" in chosen:
            pairs = read_file(Path(chosen["file"]), limit)
        else:
            columns: tuple[str, str] = (chosen["columns"][0], chosen["columns"][1])
            source, rows = self._resources.source(), self._resources.page_rows
            pairs = read_rows(self._spec, columns, source, limit, page_rows=rows, stop=self._observer.stop)
        self._observer.say(str(pairs))
        return pairs

    def _finish(self, chosen: dict[str, Any], begun: dict[str, Any], pairs: Pairs, report: Report) -> None:
        divided = split(pairs.pairs, chosen["seed"])
        trial = Trial.of(divided.held_out, divided.training)
        report.training = {name: chosen[name] for name in ("epochs", "batch_size", "learning_rate", "seed")}
        report.training |= {"pairs": len(divided.training), "held_out": len(divided.held_out)}
        if begun and begun.get("pairs") != pairs.digest:
            raise ConfigurationError(
                f"the pairs differ from those that the training in {self._work.folder} was begun with, because the "
                "rows or the file changed: delete the folder and start again"
            )
        before = Figures(**begun["before"]) if begun else self._figures(trial, self._model)
        report.before = before.as_dict()
        if not begun:
            facts = {"chosen": chosen, "base": self._base_facts, "pairs": pairs.digest, "before": report.before}
            self._work.begin(facts)
        if self._train(chosen, divided, report).stopped:
            report.stopped = True
            return
        candidate = self._work.candidate
        weights = sha256_of(read_folder(candidate, self._work.out.name).weights)
        after = self._figures(trial, ModelSource(str(candidate), None, weights, self._model.precision))
        report.after, report.weights_sha256, report.worse = after.as_dict(), weights, after.worse_than(before)
        names = ("collection", "base", "pairs", "training", "before", "after", "weights_sha256", "worse")
        facts = {name: getattr(report, name) for name in names}  # no text, no path
        made = datetime.now(UTC).isoformat(timespec="seconds")
        card.write(candidate, self._work.out.name, facts | {"made": made, "version": version()})
        self._work.finish()
        report.folder = str(self._work.out)

    def _figures(self, trial: Trial, source: ModelSource) -> Figures:
        """Measure with the engine that would serve; it is closed afterwards, because training needs the memory."""

        def embed(texts: Sequence[str]) -> NDArray[np.float32]:
            blocks = []
            for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
                if self._observer.stop():
                    raise _Stopped
                blocks.append(engine.embed(list(texts[start : start + _EMBEDDED_AT_ONCE])))
            return np.concatenate(blocks)

        with self._resources.load(source) as engine:
            figures = trial.run(embed)
        self._observer.say(
            f"recall@10 {figures.recall_at_10:.4f}, mean reciprocal rank {figures.mrr:.4f}: {figures.queries} held-out "
            f"queries among {figures.texts} texts"
        )
        return figures

    def _train(self, chosen: dict[str, Any], divided: Split, report: Report) -> Trained:
        from app.src.core.finetune.trainer import save, train

        technique = Technique.of(self._profile)
        recipe = Recipe(chosen["epochs"], chosen["batch_size"], chosen["learning_rate"], chosen["seed"])
        pairs = [(pair.query, pair.text) for pair in divided.training]
        job = TrainingJob(self._base.path, self._work.checkpoints, pairs, recipe, self._profile, technique)
        self._observer.say(
            f"training on {self._profile.name}: {len(pairs)} pairs, {job.steps} steps; {', '.join(technique.reasons)}"
        )
        model, trained = train(job, Hooks(self._observer.step, self._halved, self._observer.stop))
        report.training |= {
            "steps": trained.steps,
            "began_at": trained.began_at,
            "at_once": trained.pace.micro,
            "accumulation": trained.pace.accumulation,
            "precision": technique.precision,
            "device": self._profile.name,
            "losses": [[step, loss] for step, loss in trained.losses.items()],
        }
        if not trained.stopped:
            shutil.rmtree(self._work.candidate, ignore_errors=True)  # a kill may have left half of one
            save(model, self._base, self._work.candidate)
        return trained

    def _halved(self, pace: Pace) -> None:
        self._observer.say(
            f"out of memory: continuing with {pace.micro} pairs at once, {pace.accumulation} times per step"
        )


def version() -> str:
    try:
        return importlib.metadata.version("owl-sap-connector")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
