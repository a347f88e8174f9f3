"""Fine-tune a model: read pairs, split, measure, train, measure again, write the model folder.

An unfinished training has a folder beside the model's, with its options, checkpoints and lock. The finished model
appears in one step.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.src.core.backends import InputType
from app.src.core.backends.folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from app.src.core.device import DeviceProfile, detect
from app.src.core.finetune.recipe import TrainingJob, TrainingObserver, precision_of
from app.src.training import card
from app.src.training.held_out import measured, split
from app.src.training.pairs import Pairs, read_file, read_rows
from connector.errors import ConfigurationError
from connector.extras import install_command
from connector.model import CollectionSpec, ModelSource
from connector.protocols import Source

if TYPE_CHECKING:
    from app.src.core.engine import Engine

RECIPE = {"epochs": 1, "batch_size": 16, "learning_rate": 2e-5, "seed": 7}
_EMBEDDED_AT_ONCE = 512  # texts between two checks of `TrainingObserver.stop`


@dataclass(slots=True)
class Report:
    """`folder`: the finished model, None when `stopped`. `worse`: the model finds less than the base model and should
    not be used. `generation`: the generation built with the model, or None."""

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


class _Stopped(Exception):
    """The observer stopped the training or an evaluation."""


@dataclass(frozen=True, slots=True)
class Finetuning:
    """The training of a collection's model into the folder `out`. `source` connects when called; `load` returns an
    engine that the caller closes."""

    spec: CollectionSpec
    model: ModelSource
    out: Path
    source: Callable[[], Source]
    load: Callable[[ModelSource], Engine]
    device: str
    page_rows: int
    observer: TrainingObserver
    cache: Path | None = None  # see find_folder

    def run(self, options: Mapping[str, Any], *, resume: bool = False) -> Report:
        """Train, and return the report. `options`: a `file` of pairs or two `columns` of the collection's rows,
        `most_pairs`, and the keys of RECIPE. A resumed training keeps its options.

        Raises ConfigurationError for invalid input, TrainingFailed, and the errors of the engine and of the source.
        """
        started, model = time.monotonic(), self.model
        if missing := [name for name in ("accelerate", "datasets", "torch") if find_spec(name) is None]:
            needed = " and ".join(missing)
            raise ConfigurationError(f"training needs {needed}, which is not installed: {install_command('train')}")
        if model.name.startswith("hash:"):
            raise ConfigurationError(f'"{model.name}" is the test embedder and cannot be trained: set another model')
        path = find_folder(model.name, model.revision, self.cache)
        base = read_folder(path, display_name(model.name, path), model.query_prompt, model.document_prompt)
        if base.universal:
            raise ConfigurationError(
                f'"{model.name}" is a Universal Sentence Encoder, which sentence-transformers cannot train: '
                "set another model"
            )
        facts = {"model": base.name, "weights_sha256": check_files(base, model.weights_sha256)}
        profile = detect(self.device)
        with self._unfinished(resume=resume) as begun:
            if resume and options:
                raise ConfigurationError(
                    f"the training in {self.folder} keeps its original options: "
                    f"omit {', '.join(options)}, or delete the folder"
                )
            chosen: dict[str, Any] = begun.get("chosen") or {**RECIPE, "most_pairs": 100_000, **options}
            if ("file" in chosen) == ("columns" in chosen):
                raise ConfigurationError(
                    "name the pairs to learn from: --pairs FILE.jsonl, or --columns TITLE LONGTEXT for rows of the "
                    "collection"
                )
            pairs = self._pairs(chosen)
            self.observer.say(str(pairs))
            report = Report(self.spec.name, facts, pairs.counts())
            try:
                if self.observer.stop():  # reading may have stopped early
                    raise _Stopped
                self._finish((base, profile), chosen, begun, pairs, report)
            except _Stopped:
                report.stopped = True
            if report.stopped and (self.folder / "begun.json").exists():
                report.unfinished = str(self.folder)
        report.seconds = round(time.monotonic() - started, 3)
        return report

    def _pairs(self, chosen: Mapping[str, Any]) -> Pairs:
        if "file" in chosen:
            return read_file(Path(chosen["file"]), chosen["most_pairs"])
        self.observer.say(card.LICENCE_NOTICE)
        columns = chosen["columns"][0], chosen["columns"][1]
        limit, stop = chosen["most_pairs"], self.observer.stop
        return read_rows(self.spec, columns, self.source(), limit, page_rows=self.page_rows, stop=stop)

    def _finish(
        self,
        base: tuple[Folder, DeviceProfile],
        chosen: Mapping[str, Any],
        begun: Mapping[str, Any],
        pairs: Pairs,
        report: Report,
    ) -> None:
        """Measure, train, measure again and write the model. Raises _Stopped."""
        from app.src.core.finetune.trainer import save, train

        folder, profile = base
        training, held_out = split(pairs.pairs, chosen["seed"])
        recipe = {name: chosen[name] for name in RECIPE}
        report.training = {**recipe, "pairs": len(training), "held_out": len(held_out)}
        if begun and begun["pairs"] != pairs.digest:
            raise ConfigurationError(
                f"the rows or the file changed after the training in {self.folder} started, so its pairs differ: "
                "delete the folder and start again"
            )

        def figures(source: ModelSource) -> dict[str, Any]:
            """Measure with the serving engine; close it afterwards, because training needs the memory."""

            def embed(texts: Sequence[str], input_type: InputType) -> NDArray[np.float32]:
                blocks = []
                for start in range(0, len(texts), _EMBEDDED_AT_ONCE):
                    if self.observer.stop():
                        raise _Stopped
                    some = list(texts[start : start + _EMBEDDED_AT_ONCE])
                    blocks.append(engine.embed(some, input_type=input_type))
                return np.concatenate(blocks)

            with self.load(source) as engine:
                found = measured(held_out, training, embed)
            self.observer.say(
                f"recall@10 {found['recall_at_10']:.4f}, mean reciprocal rank {found['mrr']:.4f}: {found['queries']} "
                f"held-out queries among {found['texts']} texts"
            )
            return found

        report.before = before = begun["before"] if begun else figures(self.model)
        if not begun:
            target = self.folder / "begun.json"
            options = {"chosen": dict(chosen), "pairs": pairs.digest, "before": before}
            target.with_suffix(".new").write_text(json.dumps(options, indent=2), encoding="utf-8")
            target.with_suffix(".new").replace(target)
        texts = [(folder.query_prompt + pair.query, folder.document_prompt + pair.text) for pair in training]
        job = TrainingJob(folder.path, self.folder / "checkpoints", texts, profile, **recipe)
        precision = precision_of(profile)
        self.observer.say(f"training on {profile.name} in {precision}: {len(texts)} pairs, {job.steps} steps")
        trained, done = train(job, self.observer)
        report.training |= {
            "steps": done["steps"],
            "began_at": done["began_at"],
            "precision": precision,
            "device": profile.name,
            "losses": [[step, loss] for step, loss in done["losses"].items()],
        }
        if done["stopped"]:
            raise _Stopped
        candidate = self.folder / "model.new"
        shutil.rmtree(candidate, ignore_errors=True)  # a killed process may have left an incomplete folder
        save(trained, folder, candidate)
        report.weights_sha256 = sha256_of(read_folder(candidate, self.out.name).weights)
        report.after = after = figures(ModelSource(str(candidate), None, report.weights_sha256, self.model.precision))
        report.worse = (after["recall_at_10"], after["mrr"]) < (before["recall_at_10"], before["mrr"])
        names = ("collection", "base", "pairs", "training", "before", "after", "weights_sha256", "worse")
        facts = {name: getattr(report, name) for name in names}  # no text, no path
        made = datetime.now(UTC).isoformat(timespec="seconds")
        version = importlib.metadata.version("owl-sap-connector")
        card.write(candidate, self.out.name, facts | {"made": made, "version": version})
        for path in (*sorted(candidate.rglob("*")), candidate):
            _sync_to_disk(path)
        candidate.rename(self.out)
        _sync_to_disk(self.out.parent)
        shutil.rmtree(self.folder)
        report.folder = str(self.out)

    @property
    def folder(self) -> Path:
        """Return the folder of the unfinished training."""
        return self.out.with_name(self.out.name + ".unfinished")

    @contextmanager
    def _unfinished(self, *, resume: bool) -> Iterator[dict[str, Any]]:
        """Hold the folder's lock; yield the stored options of a training to resume, else {}. Raises ConfigurationError
        if the training cannot be started or resumed."""
        folder, stored = self.folder, self.folder / "begun.json"
        if self.out.exists():
            raise ConfigurationError(f"{self.out} already exists; name another folder with --out")
        if resume and not stored.exists():
            raise ConfigurationError(f"nothing to resume: no training was started in {folder}")
        if not resume and stored.exists():
            raise ConfigurationError(
                f"{folder} contains an unfinished training: continue it with --resume, or delete the folder"
            )
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"{folder} cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(f"another process is training in {folder}") from None
            try:
                yield json.loads(stored.read_text(encoding="utf-8")) if resume else {}
            finally:
                if not stored.exists():  # leave no empty training folder; other files stay
                    with suppress(OSError):
                        (folder / "lock").unlink()
                        (folder / "checkpoints").rmdir()
                        folder.rmdir()
        finally:
            os.close(lock)


def next_folder(models: Path, name: str) -> Path:
    """Return the folder `NAME-N` in `models`, with N one above the highest finished number."""
    taken = [path.name.removeprefix(f"{name}-") for path in models.glob(f"{name}-*")]
    return models / f"{name}-{max((int(number) for number in taken if number.isdecimal()), default=0) + 1}"


def _sync_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
