"""What a person in trouble checks first, in order, each line with its fix: `machine` and `network` look for themselves,
the rest is asked of a Patient. Builds nothing and never prints a secret.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from app.src.observe.doctor import certificate, machine
from app.src.observe.doctor.machine import why_no_gpu
from app.src.observe.doctor.network import Network
from app.src.observe.doctor.report import Check, Fault, Step
from app.src.settings import CollectionSettings, HanaSettings, Settings

__all__ = ["Check", "Fault", "Patient", "examine", "why_no_gpu"]


class Patient(Protocol):
    """What `probes` offers for looking at. Each call may raise the errors of connector and engine."""

    @property
    def settings(self) -> Settings: ...

    @property
    def expected_errors(self) -> tuple[type[Exception], ...]: ...

    def probe_model(self) -> str: ...

    def probe_gpu_use(self) -> str: ...

    def probe_choices(self) -> str: ...

    def probe_login(self, hana: HanaSettings) -> str: ...

    def probe_rights(self, hana: HanaSettings) -> str: ...

    def probe_clock(self, hana: HanaSettings) -> str: ...

    def probe_vector_types(self) -> str: ...

    def probe_table(self, collection: CollectionSettings) -> str: ...

    def probe_store(self) -> str: ...

    def probe_access(self) -> str: ...


def examine(patient: Patient) -> list[Check]:
    """Run every check that makes sense for these settings, in an order that never changes. A failed prerequisite marks
    its dependants as skipped, so that nobody logs in twice with a wrong password."""
    done: dict[str, Check] = {}
    for step in _steps(patient):
        done[step.name] = step.run(done, patient.expected_errors)
    return list(done.values())


def _steps(patient: Patient) -> Iterator[Step]:
    settings = patient.settings
    yield Step("python", machine.python)
    yield Step("torch", lambda: machine.torch(settings.embedding))
    yield Step("gpu", lambda: machine.gpu(settings.embedding))
    yield Step("kernels", lambda: machine.kernels(settings.embedding))
    yield Step("model", patient.probe_model, ("torch",), "check [embedding] model")
    if settings.embedding.expect_gpu:
        yield Step("gpu in use", patient.probe_gpu_use, ("model",))
    yield Step("settings", patient.probe_choices, ("model",))
    yield Step("proxies", machine.proxies)
    if settings.hana.configured or settings.synced or settings.store.kind == "hana":
        yield Step("hdbcli", machine.hdbcli)
        yield from _hana_steps("hana", settings.hana, patient)
    if settings.store.kind == "hana" and settings.store.hana is not None:
        yield from _hana_steps("store hana", settings.store.hana, patient)
    for collection in settings.synced:
        yield Step(
            f"table of {collection.name}",
            functools.partial(patient.probe_table, collection),
            ("hana login", "model"),
            f"correct [[collections]] {collection.name}",
        )
    yield from _store_steps(settings, patient)
    yield Step("disk", lambda: machine.disk(settings.store.path or Path()))
    if settings.api.tls_certificate is not None:
        yield Step("certificate", lambda: certificate.of_service(settings.api))
    yield Step("port", lambda: machine.port(settings.api))
    if settings.access.configured:
        yield Step("access", patient.probe_access, (), "see the message; docs/access.md")


def _hana_steps(label: str, hana: HanaSettings, patient: Patient) -> Iterator[Step]:
    if hana.userkey:
        yield Step(f"{label} userkey", lambda: machine.user_store(hana.userkey or ""))
    if not hana.userkey or hana.host:
        network = Network(hana, "HANA_STORE" if label == "store hana" else "HANA")
        yield Step(f"{label} address", network.address)
        yield Step(f"{label} dns", network.dns, (f"{label} address",))
        yield Step(f"{label} tcp", network.tcp, (f"{label} dns",))
        yield Step(f"{label} tls", network.tls, (f"{label} tcp",))
    needs = ("hdbcli", f"{label} userkey", f"{label} tls")
    yield Step(f"{label} login", lambda: patient.probe_login(hana), needs, "check user, password and port")
    yield Step(f"{label} rights", lambda: patient.probe_rights(hana), (f"{label} login",))
    yield Step(f"{label} clock", lambda: patient.probe_clock(hana), (f"{label} login",))


def _store_steps(settings: Settings, patient: Patient) -> Iterator[Step]:
    if settings.store.kind == "hana":
        login = "store hana login" if settings.store.hana is not None else "hana login"
        yield Step("vector types", patient.probe_vector_types, (login,), 'use [store] kind = "local" on this HANA')
        yield Step("store writable", patient.probe_store, ("vector types",), "see the message")
    else:
        yield Step("store writable", patient.probe_store, (), "check [store] path and its rights")
