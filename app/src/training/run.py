"""A fine-tuning from beginning to end: pairs, split, figures before, training, folder, figures after. Knows the parts
and the core's trainer; no HTTP, no terminal, no generations.
"""

from __future__ import annotations

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
from app.src.core.finetune.recipe import Pace, Recipe, Technique, Trained, TrainingJob, Watch
from app.src.service.wiring import Parts
from app.src.training import card
from app.src.training.evaluation import Figures, Trial
from app.src.training.pairs import Pairs, read_file, read_rows
from app.src.training.split import Split, split
from app.src.training.work import Work
from connector.errors import ConfigurationError
from connector.extras import install_command
from connector.model import CollectionSpec, ModelSource

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine

EPOCHS, BATCH_SIZE, LEARNING_RATE, SEED, MOST_PAIRS = 1, 16, 2e-5, 7, 100_000
_EMBEDDED_AT_ONCE = 512
"""Texts; a wish to stop is heard between two such blocks."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: pairs out of `file`, or out of two `columns` of the collection's rows. None: the default, or,
    going on with an unfinished training (`resume`), what that was begun with."""

    file: Path | None = None
    columns: tuple[str, str] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    most_pairs: int | None = None
    resume: bool = False

    def chosen(self) -> dict[str, Any]:
        """As they are written down; only what was given."""
        given = asdict(self) | {
            "file": None if self.file is None else str(self.file.absolute()),
            "columns": None if self.columns is None else list(self.columns),
        }
        return {name: value for name, value in given.items() if name != "resume" and value is not None}


DEFAULTS = {
    "epochs": EPOCHS,
    "batch_size": BATCH_SIZE,
    "learning_rate": LEARNING_RATE,
    "seed": SEED,
    "most_pairs": MOST_PAIRS,
}


@dataclass(frozen=True, slots=True)
class Onlooker:
    """`say`: a sentence for people; `step`: steps done, steps in all, last loss; `stop`: asked often, true ends it with
    a checkpoint."""

    say: Callable[[str], None] = lambda _text: None
    step: Callable[[int, int, float | None], None] = lambda _done, _steps, _loss: None
    stop: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class Report:
    """`folder` is the finished model, None when `stopped`; `worse`: it finds less than the base model, so it is not to
    be used. `generation`: that was built with it, None for none."""

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
    """Between two blocks of an evaluation."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model to begin with, its files checked."""

    source: ModelSource
    folder: Folder
    weights_sha256: str

    @classmethod
    def of(cls, source: ModelSource) -> Base:
        """Raises ConfigurationError for the hashing embedder; the engine's errors for a model that is not there."""
        if source.name.startswith("hash:"):
            raise ConfigurationError(f'"{source.name}" is for tests and has nothing to train: set a model')
        path = find_folder(source.name, source.revision)
        folder = read_folder(path, display_name(source.name, path))
        return cls(source, folder, check_files(folder, source.weights_sha256))

    def as_dict(self) -> dict[str, Any]:
        return {"model": self.folder.name, "weights_sha256": self.weights_sha256}


def finetune(
    spec: CollectionSpec, parts: Parts, source: ModelSource, request: Request, work: Work, onlooker: Onlooker
) -> Report:
    """Train `source` and write the model to `work.out`. Raises ConfigurationError for what cannot be begun,
    TrainingFailed, the errors of the engine and of the rows' source."""
    started = time.monotonic()
    check_packages()
    base, profile = Base.of(source), _profile(parts.settings.embedding.device)
    with work.opened(resume=request.resume):
        report = _Run(spec, parts, base, profile, work, onlooker)(request)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def check_packages() -> None:
    """Raises ConfigurationError with what to install."""
    from app.src.core.finetune.trainer import missing_packages

    if missing := missing_packages():
        raise ConfigurationError(
            f"training needs {' and '.join(missing)}, which cannot be imported: {install_command('train')}"
        )


def _profile(device: str) -> DeviceProfile:
    try:
        return detect(device)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    except ImportError as error:
        raise ConfigurationError(
            f"training needs {error.name or 'torch'}, which cannot be imported: {install_command('train')}"
        ) from error


class _Run:
    """One fine-tuning in its work folder."""

    def __init__(
        self, spec: CollectionSpec, parts: Parts, base: Base, profile: DeviceProfile, work: Work, onlooker: Onlooker
    ) -> None:
        self._spec = spec
        self._parts = parts
        self._base = base
        self._profile = profile
        self._work = work
        self._onlooker = onlooker

    def __call__(self, request: Request) -> Report:
        begun = self._work.facts() if request.resume else {}
        chosen = self._chosen(request, begun)
        if "columns" in chosen:
            self._onlooker.say(card.LICENCE_NOTICE)
        pairs = self._pairs(chosen)
        report = Report(self._spec.name, self._base.as_dict(), pairs.counts())
        try:
            if self._onlooker.stop():  # then the reading was cut short
                raise _Stopped
            self._finish(chosen, begun, pairs, report)
        except _Stopped:
            report.stopped = True
        if report.stopped and self._work.begun:
            report.unfinished = str(self._work.folder)
        return report

    def _chosen(self, request: Request, begun: dict[str, Any]) -> dict[str, Any]:
        given = request.chosen()
        before = begun.get("chosen", {})
        for name, value in given.items():
            if request.resume and value != before.get(name):
                raise ConfigurationError(
                    f"the training in {self._work.folder} was begun with {name} {before.get(name)}, not {value}: "
                    "leave it out to go on, or delete the folder"
                )
        chosen = (DEFAULTS if not request.resume else before) | given
        if ("file" in chosen) == ("columns" in chosen):
            raise ConfigurationError(
                "say what to learn from: --pairs FILE.jsonl, or --columns TITLE LONGTEXT for rows of the collection"
            )
        if request.resume and begun.get("base") != self._base.as_dict():
            raise ConfigurationError(
                f"the training in {self._work.folder} was begun with another base model than {self._base.folder.name} "
                "is now: delete the folder and begin again"
            )
        return chosen

    def _pairs(self, chosen: dict[str, Any]) -> Pairs:
        limit = chosen["most_pairs"]
        if "file" in chosen:
            pairs = read_file(Path(chosen["file"]), limit)
        else:
            columns: tuple[str, str] = (chosen["columns"][0], chosen["columns"][1])
            rows = self._parts.settings.sync.page_rows
            pairs = read_rows(self._spec, columns, self._parts.source, limit, page_rows=rows, stop=self._onlooker.stop)
        self._onlooker.say(_told(pairs))
        return pairs

    def _finish(self, chosen: dict[str, Any], begun: dict[str, Any], pairs: Pairs, report: Report) -> None:
        divided = split(pairs.pairs, chosen["seed"])
        trial = Trial.of(divided.held_out, divided.training)
        report.training = {name: chosen[name] for name in ("epochs", "batch_size", "learning_rate", "seed")}
        report.training |= {"pairs": len(divided.training), "held_out": len(divided.held_out)}
        before = self._before(begun, pairs, trial)
        report.before = before.as_dict()
        if not begun:
            facts = {"chosen": chosen, "base": self._base.as_dict(), "pairs": pairs.digest, "before": report.before}
            self._work.begin(facts)
        trained = self._train(chosen, divided, report)
        if trained.stopped:
            report.stopped = True
            return
        weights = sha256_of(read_folder(self._work.candidate, self._work.out.name).weights)
        after = self._figures(trial, ModelSource(str(self._work.candidate), None, weights, self._base.source.precision))
        report.after, report.weights_sha256, report.worse = after.as_dict(), weights, after.worse_than(before)
        card.write(self._work.candidate, self._work.out.name, self._facts(report))
        self._work.finish()
        report.folder = str(self._work.out)

    def _before(self, begun: dict[str, Any], pairs: Pairs, trial: Trial) -> Figures:
        if not begun:
            return self._figures(trial, self._base.source)
        if begun.get("pairs") != pairs.digest:
            raise ConfigurationError(
                f"the pairs are not those that the training in {self._work.folder} was begun with, because the rows or "
                "the file changed: delete the folder and begin again"
            )
        return Figures(**begun["before"])

    def _figures(self, trial: Trial, source: ModelSource) -> Figures:
        """By the engine as it would serve; closed afterwards, because the training needs the memory."""
        with self._parts.load(source) as engine:
            figures = trial.run(lambda texts: self._embedded(engine, texts))
        self._onlooker.say(
            f"recall@10 {figures.recall_at_10:.4f}, mean reciprocal rank {figures.mrr:.4f}: {figures.queries} held-out "
            f"queries among {figures.texts} texts"
        )
        return figures

    def _embedded(self, engine: EmbeddingEngine, texts: Sequence[str]) -> NDArray[np.float32]:
        blocks = []
        for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
            if self._onlooker.stop():
                raise _Stopped
            blocks.append(engine.embed(list(texts[start : start + _EMBEDDED_AT_ONCE])))
        return np.concatenate(blocks)

    def _train(self, chosen: dict[str, Any], divided: Split, report: Report) -> Trained:
        from app.src.core.finetune.saving import save
        from app.src.core.finetune.trainer import train

        technique = Technique.of(self._profile)
        recipe = Recipe(chosen["epochs"], chosen["batch_size"], chosen["learning_rate"], chosen["seed"])
        pairs = [(pair.query, pair.text) for pair in divided.training]
        job = TrainingJob(self._base.folder.path, self._work.checkpoints, pairs, recipe, self._profile, technique)
        self._onlooker.say(
            f"training on {self._profile.name}: {len(pairs)} pairs, {job.steps} steps; {', '.join(technique.reasons)}"
        )
        model, trained = train(job, Watch(self._onlooker.step, self._halved, self._onlooker.stop))
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
            self._work.clear_candidate()
            save(model, self._base.folder, self._work.candidate)
        return trained

    def _halved(self, pace: Pace) -> None:
        self._onlooker.say(
            f"out of memory: going on with {pace.micro} pairs at once, {pace.accumulation} times for each step"
        )

    def _facts(self, report: Report) -> dict[str, Any]:
        """What the folder keeps: nothing of the texts, no path."""
        names = ("collection", "base", "pairs", "training", "before", "after", "weights_sha256", "worse")
        return {name: getattr(report, name) for name in names} | {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": version(),
        }


def version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("owl-sap-connector")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _told(pairs: Pairs) -> str:
    counts = pairs.counts()
    left_out = {
        "without both texts": counts["incomplete"],
        "met before": counts["duplicates"],
        "with the same text twice": counts["same"],
        "not to be shown": counts["unreadable"],
    }
    unit = "rows" if pairs.origin == "rows" else "lines"
    parts = [f"{len(pairs.pairs)} pairs out of {pairs.read} {unit}"]
    parts += [f"{count} {what} left out" for what, count in left_out.items() if count]
    if pairs.limited:
        parts.append("the rest not read")
    return ", ".join(parts)
