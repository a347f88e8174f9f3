"""A fine-tuning: read pairs, split, measure, train, measure again, write the model folder."""

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
from app.src.core.finetune.recipe import TrainingJob, TrainingObserver, missing_packages, precision_of
from app.src.training import card
from app.src.training.held_out import Figures, Trial, split
from app.src.training.pairs import Pair, Pairs, read_file, read_rows
from app.src.training.work import Work
from connector.errors import ConfigurationError
from connector.extras import install_command
from connector.model import CollectionSpec, ModelSource
from connector.protocols import Source

if TYPE_CHECKING:
    from app.src.core.engine import EmbeddingEngine

DEFAULTS = {"epochs": 1, "batch_size": 16, "learning_rate": 2e-5, "seed": 7, "most_pairs": 100_000}
_EMBEDDED_AT_ONCE = 512  # texts between two checks of `TrainingObserver.stop`


@dataclass(frozen=True, slots=True)
class Request:
    """Pairs come from `file`, or from two `columns` of the collection's rows. None: the default, or with `resume` the
    value of the unfinished training."""

    file: Path | None = None
    columns: tuple[str, str] | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    seed: int | None = None
    most_pairs: int | None = None
    resume: bool = False

    def given(self) -> dict[str, Any]:
        """Return the given options as JSON."""
        options = asdict(self) | {
            "file": None if self.file is None else str(self.file.absolute()),
            "columns": None if self.columns is None else list(self.columns),
        }
        return {name: value for name, value in options.items() if name != "resume" and value is not None}


@dataclass(frozen=True, slots=True)
class Resources:
    """The process's resources for a training. `source` connects when called; `load` returns an engine that the caller
    closes."""

    source: Callable[[], Source]
    load: Callable[[ModelSource], EmbeddingEngine]
    device: str
    page_rows: int


@dataclass(slots=True)
class Report:
    """`folder`: the finished model, None when `stopped`. `worse`: it finds less than the base model and should not be
    used. `generation`: the one built with it, or None."""

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
    """The observer stopped the training or an evaluation."""


def finetune(
    spec: CollectionSpec,
    model: ModelSource,
    request: Request,
    work: Work,
    resources: Resources,
    observer: TrainingObserver,
) -> Report:
    """Train `model` and write the result to `work.out`. Raises ConfigurationError for invalid input, TrainingFailed,
    and the errors of the engine and of the rows' source."""
    started = time.monotonic()
    if missing := missing_packages():
        raise _not_importable(" and ".join(missing))
    if model.name.startswith("hash:"):
        raise ConfigurationError(f'"{model.name}" is the test embedder and cannot be trained: set another model')
    path = find_folder(model.name, model.revision)
    base = read_folder(path, display_name(model.name, path))
    base_facts = {"model": base.name, "weights_sha256": check_files(base, model.weights_sha256)}
    try:
        profile = detect(resources.device)
    except DeviceError as error:
        raise DeviceUnavailable(str(error)) from error
    except ImportError as error:
        raise _not_importable(error.name or "torch") from error
    with work.opened(resume=request.resume):
        begun = work.facts() if request.resume else {}
        chosen = _chosen(request, begun, work, base_facts)
        if "columns" in chosen:
            observer.say(card.LICENCE_NOTICE)
            columns = chosen["columns"][0], chosen["columns"][1]
            limit, source = chosen["most_pairs"], resources.source()
            pairs = read_rows(spec, columns, source, limit, page_rows=resources.page_rows, stop=observer.stop)
        else:
            pairs = read_file(Path(chosen["file"]), chosen["most_pairs"])
        observer.say(str(pairs))
        report = Report(spec.name, base_facts, pairs.counts())
        try:
            if observer.stop():  # the reading may have been cut short
                raise _Stopped
            _Run(model, base, profile, work, resources, observer).finish(chosen, begun, pairs, report)
        except _Stopped:
            report.stopped = True
        if report.stopped and work.begun:
            report.unfinished = str(work.folder)
    report.seconds = round(time.monotonic() - started, 3)
    return report


def _not_importable(packages: str) -> ConfigurationError:
    return ConfigurationError(f"training needs {packages}, which cannot be imported: {install_command('train')}")


def _chosen(request: Request, begun: dict[str, Any], work: Work, base_facts: dict[str, Any]) -> dict[str, Any]:
    """Return the options in force; a resumed training keeps its first ones."""
    given, before = request.given(), begun.get("chosen", {})
    for name, value in given.items():
        if request.resume and value != before.get(name):
            raise ConfigurationError(
                f"the training in {work.folder} was begun with {name} {before.get(name)}, not {value}: "
                "omit the option to continue, or delete the folder"
            )
    chosen = (before if request.resume else DEFAULTS) | given
    if ("file" in chosen) == ("columns" in chosen):
        raise ConfigurationError(
            "name the pairs to learn from: --pairs FILE.jsonl, or --columns TITLE LONGTEXT for rows of the collection"
        )
    if request.resume and begun.get("base") != base_facts:
        raise ConfigurationError(
            f"the training in {work.folder} was begun with another base model than {base_facts['model']} is now: "
            "delete the folder and start again"
        )
    return chosen


@dataclass(frozen=True, slots=True)
class _Run:
    model: ModelSource
    base: Folder
    profile: DeviceProfile
    work: Work
    resources: Resources
    observer: TrainingObserver

    def finish(self, chosen: dict[str, Any], begun: dict[str, Any], pairs: Pairs, report: Report) -> None:
        """Measure, train, measure again and write the model. Raises _Stopped."""
        work = self.work
        training, held_out = split(pairs.pairs, chosen["seed"])
        trial = Trial.of(held_out, training)
        report.training = {name: chosen[name] for name in ("epochs", "batch_size", "learning_rate", "seed")}
        report.training |= {"pairs": len(training), "held_out": len(held_out)}
        if begun and begun.get("pairs") != pairs.digest:
            raise ConfigurationError(
                f"the pairs differ from those that the training in {work.folder} was begun with, because the rows or "
                "the file changed: delete the folder and start again"
            )
        before = Figures(**begun["before"]) if begun else self._figures(trial, self.model)
        report.before = asdict(before)
        if not begun:
            work.begin({"chosen": chosen, "base": report.base, "pairs": pairs.digest, "before": report.before})
        self._train(chosen, training, report)
        weights = sha256_of(read_folder(work.candidate, work.out.name).weights)
        after = self._figures(trial, ModelSource(str(work.candidate), None, weights, self.model.precision))
        report.after, report.weights_sha256, report.worse = asdict(after), weights, after.worse_than(before)
        names = ("collection", "base", "pairs", "training", "before", "after", "weights_sha256", "worse")
        facts = {name: getattr(report, name) for name in names}  # no text, no path
        made = datetime.now(UTC).isoformat(timespec="seconds")
        version = importlib.metadata.version("owl-sap-connector")
        card.write(work.candidate, work.out.name, facts | {"made": made, "version": version})
        work.finish()
        report.folder = str(work.out)

    def _figures(self, trial: Trial, source: ModelSource) -> Figures:
        """Measure with the serving engine, closed afterwards because training needs the memory."""

        def embed(texts: Sequence[str]) -> NDArray[np.float32]:
            blocks = []
            for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
                if self.observer.stop():
                    raise _Stopped
                blocks.append(engine.embed(list(texts[start : start + _EMBEDDED_AT_ONCE])))
            return np.concatenate(blocks)

        with self.resources.load(source) as engine:
            figures = trial.run(embed)
        self.observer.say(
            f"recall@10 {figures.recall_at_10:.4f}, mean reciprocal rank {figures.mrr:.4f}: {figures.queries} held-out "
            f"queries among {figures.texts} texts"
        )
        return figures

    def _train(self, chosen: dict[str, Any], pairs: list[Pair], report: Report) -> None:
        from app.src.core.finetune.trainer import save, train

        recipe = {name: chosen[name] for name in ("epochs", "batch_size", "learning_rate", "seed")}
        texts = [(pair.query, pair.text) for pair in pairs]
        job = TrainingJob(self.base.path, self.work.checkpoints, texts, self.profile, **recipe)
        precision, reason = precision_of(self.profile)
        self.observer.say(f"training on {self.profile.name}: {len(pairs)} pairs, {job.steps} steps; {reason}")
        model, trained = train(job, self.observer)
        report.training |= {
            "steps": trained.steps,
            "began_at": trained.began_at,
            "precision": precision,
            "device": self.profile.name,
            "losses": [[step, loss] for step, loss in trained.losses.items()],
        }
        if trained.stopped:
            raise _Stopped
        shutil.rmtree(self.work.candidate, ignore_errors=True)  # a kill may have left an incomplete one
        save(model, self.base, self.work.candidate)
