"""Every documented environment variable: the setting it reaches, or the reason why it does nothing; and precedence."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.src.settings import Loaded, Settings, SettingsError, load, show
from app.src.settings.sources import OWN_VARIABLES
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES

CANARY = "canary-5926"
LISTED = {variable.name: variable for variable in (*VARIABLES, *GUIDE_VARIABLES)}

# name, text, setting, value: those that reach a setting
REACHING: list[tuple[str, str, str, Any]] = [
    ("HANA_HOST", "db.example", "hana.host", "db.example"),
    ("HANA_PORT", "30015", "hana.port", 30015),
    ("HANA_USER", "OWL", "hana.user", "OWL"),
    ("HANA_PASSWORD", CANARY, "hana.password", "**********"),
    ("HANA_USERKEY", "PROD", "hana.userkey", "PROD"),
    ("HANA_SCHEMA", "SAPABAP1", "hana.schema", "SAPABAP1"),
    ("HANA_ENCRYPT", "false", "hana.encrypt", False),
    ("HANA_SSL_TRUST_STORE", "/etc/ca.pem", "hana.trust_store", "/etc/ca.pem"),
    ("HANA_SSL_VALIDATE", "no", "hana.validate_certificate", False),
    ("HANA_STORE_HOST", "vectors.example", "store.hana.host", "vectors.example"),
    ("HANA_STORE_PORT", "443", "store.hana.port", 443),
    ("HANA_STORE_USER", "VEC", "store.hana.user", "VEC"),
    ("HANA_STORE_PASSWORD", CANARY, "store.hana.password", "**********"),
    ("HANA_STORE_USERKEY", "VEC", "store.hana.userkey", "VEC"),
    ("HANA_STORE_SCHEMA", "VECTORS", "store.hana.schema", "VECTORS"),
    ("HANA_STORE_ENCRYPT", "0", "store.hana.encrypt", False),
    ("HANA_STORE_SSL_TRUST_STORE", "ca.pem", "store.hana.trust_store", "ca.pem"),
    ("HANA_STORE_SSL_VALIDATE", "off", "store.hana.validate_certificate", False),
    ("T4_GPU_FP16_MODE", "false", "embedding.precision", "fp32"),
    ("T4_GPU_INT8_MODE", "true", "tensorrt.enabled", True),
    ("T4_GPU_MAX_WORKSPACE_SIZE", "1073741824", "tensorrt.workspace_mb", 1024),
    ("T4_GPU_OPTIMIZATION_LEVEL", "5", "tensorrt.optimization_level", 5),
    ("T4_GPU_ENABLE_TENSOR_CORES", "false", "embedding.precision", "fp32"),
    ("T4_GPU_MEMORY_FRACTION", "0.7", "embedding.memory_fraction", 0.7),
    ("USE_GPU", "false", "embedding.device", "cpu"),
    ("USE_GPU", "true", "embedding.expect_gpu", True),
    ("GPU_DEVICE_ID", "2", "embedding.device", "cuda:2"),
    ("GPU_MEMORY_FRACTION", "0.6", "embedding.memory_fraction", 0.6),
    ("WORKER_CONCURRENCY", "4", "worker.concurrency", 4),
    ("WORKER_MAX_TASKS_PER_CHILD", "100", "worker.max_jobs", 100),
    ("RESERVE_MEMORY", "2048", "embedding.reserve_mb", 2048),
    ("OWL_SAP_HANA__CONNECT_TIMEOUT", "2.5", "hana.connect_timeout", 2.5),
    ("OWL_SAP_HANA__HOST_NAME_IN_CERTIFICATE", "db", "hana.host_name_in_certificate", "db"),
    ("OWL_SAP_STORE__HANA__POOL_SIZE", "3", "store.hana.pool_size", 3),
    ("OWL_SAP_EMBEDDING__MODEL", "hash:64", "embedding.model", "hash:64"),
    ("OWL_SAP_EMBEDDING__THREADS", "2", "embedding.threads", 2),
    ("OWL_SAP_SYNC__MAX_DELETES", "1", "sync.max_deletes", 1.0),
    ("OWL_SAP_SYNC__PAGE_ROWS", "500", "sync.page_rows", 500),
    ("OWL_SAP_API__PORT", "0", "api.port", 0),
]

# name, a word of the reason: accepted, and inert
INERT = [
    ("T4_GPU_FP16_MODE", "true", "true changes nothing"),
    ("T4_GPU_DYNAMIC_BATCH_SIZE", "true", "tokens"),
    ("T4_GPU_ENABLE_TENSOR_CORES", "true", "true changes nothing"),
    ("T4_GPU_ENABLE_SPARSE", "true", "8.0"),
    ("T4_GPU_MAX_BATCH_SIZE", "64", "tokens"),
    ("GPU_DEVICE_ID", "0", "the first card is the default"),
    ("T4_GPU_ENABLE_PROFILING", "true", "need no switch"),
    ("CUDNN_BENCHMARK", "true", "convolutions"),
    ("ENABLE_AMP", "true", "autocast"),
    ("TF32_OVERRIDE", "1", "embedding.precision"),
    ("NVIDIA_TF32_OVERRIDE", "1", "0 forces TF32 off"),
    ("CUDNN_FRONTEND_ENABLE_TENSOR_CORE_MATH_FP32", "1", "no such variable"),
    ("CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP16", "1", "no such variable"),
    ("CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP32", "1", "no such variable"),
    ("INFERENCE_BATCH_SIZE", "128", "tokens"),
    ("NER_BATCH_SIZE", "128", "named-entity"),
    ("DOCUMENT_BATCH_SIZE", "32", "tokens"),
    ("CUDA_VISIBLE_DEVICES", "0", "CUDA itself"),
    ("CUDA_MODULE_LOADING", "LAZY", "12.2"),
    ("CUDA_LAUNCH_BLOCKING", "1", "CUDA itself"),
    ("PYTORCH_CUDA_ALLOC_CONF", "x", "PYTORCH_ALLOC_CONF"),
    ("PYTORCH_JIT", "1", "TorchScript"),
]


def loaded(folder: Path, environ: Mapping[str, str], text: str = "") -> Loaded:
    if text:
        (folder / "owl-sap.toml").write_text(text, encoding="utf-8")
    return load(environ=environ, folder=folder)


def fault(folder: Path, environ: Mapping[str, str], text: str = "") -> str:
    with pytest.raises(SettingsError) as caught:
        loaded(folder, environ, text)
    return str(caught.value)


def value_of(got: Loaded, setting: str) -> tuple[Any, str]:
    (row,) = [row for row in show(got) if row["setting"] == setting]
    return row["value"], row["origin"]


@pytest.mark.parametrize(("name", "text", "setting", "value"), REACHING, ids=lambda value: str(value)[:40])
def test_it_reaches_its_setting_and_no_other(tmp_path: Path, name: str, text: str, setting: str, value: Any) -> None:
    got = loaded(tmp_path, {name: text})
    assert value_of(got, setting) == (value, f"environment {name}")
    before = {row["setting"]: row["value"] for row in show(Loaded(Settings()))}
    after = {row["setting"]: row["value"] for row in show(got)}
    changed = {key for key in after if after[key] != before[key]}
    section = setting.rpartition(".")[0]
    allowed = {key for key in after if key.startswith("store.hana.")} if section == "store.hana" else {setting}
    assert changed <= allowed
    assert got.inert == {}


@pytest.mark.parametrize(("name", "text", "reason"), INERT)
def test_it_does_nothing_and_says_why(tmp_path: Path, name: str, text: str, reason: str) -> None:
    got = loaded(tmp_path, {name: text})
    assert got.settings == Settings()
    assert set(got.inert) == {name}
    assert reason in got.inert[name]


def test_these_are_all_there_are() -> None:
    named = [entry[0] for entry in REACHING] + [entry[0] for entry in INERT]
    assert {name for name in named if not name.startswith("OWL_SAP_")} == set(LISTED)


@pytest.mark.parametrize("name", sorted(LISTED))
def test_its_note_is_a_sentence_for_people(name: str) -> None:
    note = LISTED[name].note
    assert 10 < len(note) < 160
    assert note[0].islower()
    assert note[-1] != "."


# ----------------------------------------------------------------------------------------------------------- precedence


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("T4_GPU_MAX_BATCH_SIZ", "T4_GPU_MAX_BATCH_SIZE"),
        ("T4_GPU_MEMORY_FRACTON", "T4_GPU_MEMORY_FRACTION"),
        ("T4_GPU_FP16", "T4_GPU_FP16_MODE"),
        ("T4_GPU_MEMORY_FRACTIO_FILE", "T4_GPU_MEMORY_FRACTION"),
    ],
)
def test_a_misspelt_variable_of_the_guides_is_no_silence(tmp_path: Path, name: str, meant: str) -> None:
    assert fault(tmp_path, {name: "1"}) == (
        f'environment {name}: no such variable; did you mean "{meant}"? (docs/gpu.md lists them)'
    )


def test_variables_that_only_begin_like_the_guides_are_somebody_elses(tmp_path: Path) -> None:
    """As those that Kubernetes sets for a service called t4-gpu."""
    names = ("T4_GPU_SERVICE_HOST", "T4_GPU_SERVICE_PORT", "T4_GPU_PORT", "T4_GPU_PORT_80_TCP_ADDR", "T4_GPU_COUNT")
    assert loaded(tmp_path, dict.fromkeys(names, "1")).origins == {}


# environment, .env, owl-sap.toml -> value of embedding.device and where it comes from
DEVICE = [
    ({}, "", "", "auto", "default"),
    ({}, "", "cuda:3", "cuda:3", "owl-sap.toml"),
    ({"GPU_DEVICE_ID": "1"}, "", "cuda:3", "cuda:1", "environment GPU_DEVICE_ID"),
    ({"GPU_DEVICE_ID": "0"}, "", "cuda:3", "cuda:3", "owl-sap.toml"),
    ({"USE_GPU": "no", "GPU_DEVICE_ID": "1"}, "", "cuda:3", "cpu", "environment USE_GPU"),
    ({"USE_GPU": "yes", "GPU_DEVICE_ID": "1"}, "", "cuda:3", "cuda:1", "environment GPU_DEVICE_ID"),
    (
        {"USE_GPU": "no", "OWL_SAP_EMBEDDING__DEVICE": "cuda"},
        "",
        "cpu",
        "cuda",
        "environment OWL_SAP_EMBEDDING__DEVICE",
    ),
    ({}, "USE_GPU=false", "cuda:3", "cpu", ".env USE_GPU"),
    ({"USE_GPU": "true"}, "USE_GPU=false", "cuda:3", "cuda:3", "owl-sap.toml"),
    ({"USE_GPU": "no"}, "OWL_SAP_EMBEDDING__DEVICE=cuda:2", "", "cuda:2", ".env OWL_SAP_EMBEDDING__DEVICE"),
    ({"OWL_SAP_EMBEDDING__DEVICE": ""}, "", "cuda:3", "cuda:3", "owl-sap.toml"),
]


@pytest.mark.parametrize(("environ", "dotenv", "toml", "value", "origin"), DEVICE, ids=str)
def test_precedence_of_the_schemes(
    tmp_path: Path, environ: dict[str, str], dotenv: str, toml: str, value: str, origin: str
) -> None:
    if dotenv:
        (tmp_path / ".env").write_text(dotenv + "\n")
    got = loaded(tmp_path, environ, f'[embedding]\ndevice = "{toml}"' if toml else "")
    assert value_of(got, "embedding.device") == (value, origin)


@pytest.mark.parametrize(
    ("setting", "alias", "own"),
    [
        ("hana.host", "HANA_HOST", "OWL_SAP_HANA__HOST"),
        ("hana.trust_store", "HANA_SSL_TRUST_STORE", "OWL_SAP_HANA__TRUST_STORE"),
        ("store.hana.user", "HANA_STORE_USER", "OWL_SAP_STORE__HANA__USER"),
    ],
)
def test_our_own_name_beats_saps(tmp_path: Path, setting: str, alias: str, own: str) -> None:
    """Whatever the order in which the variables stand."""
    for environ in ({alias: "a", own: "o"}, {own: "o", alias: "a"}):
        assert value_of(loaded(tmp_path, environ), setting) == ("o", f"environment {own}")
    assert value_of(loaded(tmp_path, {alias: "a"}), setting) == ("a", f"environment {alias}")


@pytest.mark.parametrize("flag", [9001, 0])
def test_flags_beat_everything(tmp_path: Path, flag: int) -> None:
    (tmp_path / ".env").write_text("OWL_SAP_API__PORT=2\n")
    (tmp_path / "owl-sap.toml").write_text("[api]\nport = 1\n")
    got = load(environ={"OWL_SAP_API__PORT": "3"}, folder=tmp_path, flags={("api", "port"): flag})
    assert (got.settings.api.port, got.origins["api", "port"]) == (flag, "flag")
    assert got.settings.api.host == "127.0.0.1"


def test_a_layer_replaces_single_keys_and_keeps_the_others(tmp_path: Path) -> None:
    text = '[hana]\nhost = "file"\nuser = "FILE"\nport = 30013\n[store.hana]\nhost = "vectors"\n'
    settings = loaded(tmp_path, {"HANA_USER": "ENV", "HANA_STORE_PORT": "444"}, text).settings
    assert (settings.hana.host, settings.hana.user, settings.hana.port) == ("file", "ENV", 30013)
    assert (settings.store_hana.host, settings.store_hana.port) == ("vectors", 444)


def test_another_file_by_variable_or_flag(tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_text("[api]\nport = 1\n")
    for number in (2, 3):
        (tmp_path / f"{number}.toml").write_text(f"[api]\nport = {number}\n")
    environ = {"OWL_SAP_CONFIG": str(tmp_path / "2.toml")}
    assert load(environ=environ, folder=tmp_path).settings.api.port == 2
    assert load(tmp_path / "3.toml", environ=environ, folder=tmp_path).settings.api.port == 3


# ------------------------------------------------------------------------------------------------------ faults, secrets


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"OWL_SAP_HANA__PASWORD": CANARY}, ["OWL_SAP_HANA__PASWORD", "OWL_SAP_HANA__PASSWORD"]),
        ({"OWL_SAP_": "1"}, ["environment OWL_SAP_", "no such setting"]),
        ({"OWL_SAP_XYZZY": "1"}, ["OWL_SAP_XYZZY", "config schema"]),
        ({"OWL_SAP_HANA_HOST": "x"}, ['did you mean "OWL_SAP_HANA__HOST"']),
        ({"OWL_SAP_HANA": "x"}, ["OWL_SAP_HANA"]),
        ({"owl_sap_config": "ignored", "OWL_SAP_API__PROT_FILE": "x"}, ["OWL_SAP_API__PROT_FILE", "OWL_SAP_API__PORT"]),
        ({"HANA_PORT": "0"}, ["HANA_PORT", "hana.port", "greater"]),
        ({"HANA_PORT": "65536"}, ["hana.port", "less"]),
        ({"HANA_ENCRYPT": "maybe"}, ["HANA_ENCRYPT", "hana.encrypt", "boolean"]),
        ({"GPU_DEVICE_ID": "-1"}, ["GPU_DEVICE_ID", "number of a GPU"]),
        ({"GPU_DEVICE_ID": "1" * 5000}, ["GPU_DEVICE_ID", "number of a GPU"]),
        ({"T4_GPU_MAX_WORKSPACE_SIZE": "9" * 5000}, ["T4_GPU_MAX_WORKSPACE_SIZE", "15 digits at most"]),
        ({"T4_GPU_FP16_MODE": CANARY}, ["T4_GPU_FP16_MODE", "true or false"]),
        ({"GPU_MEMORY_FRACTION": "80"}, ["GPU_MEMORY_FRACTION", "embedding.memory_fraction"]),
        ({"GPU_MEMORY_FRACTION": "nan"}, ["embedding.memory_fraction"]),
        ({"T4_GPU_MAX_WORKSPACE_SIZE": "4096"}, ["T4_GPU_MAX_WORKSPACE_SIZE", "in bytes"]),
        ({"T4_GPU_MAX_WORKSPACE_SIZE": "4GB"}, ["T4_GPU_MAX_WORKSPACE_SIZE", "whole number"]),
        ({"T4_GPU_OPTIMIZATION_LEVEL": "6"}, ["T4_GPU_OPTIMIZATION_LEVEL", "tensorrt.optimization_level", "less"]),
        ({"RESERVE_MEMORY": "1GB"}, ["RESERVE_MEMORY", "embedding.reserve_mb", "integer"]),
        ({"OWL_SAP_EMBEDDING__DEVICE": "gpu0"}, ["embedding.device"]),
        ({"OWL_SAP_STORE__KIND": "local"}, ["OWL_SAP_STORE__KIND", "path"]),
        ({"OWL_SAP_API__THREADS": "129"}, ["api.threads"]),
        ({"OWL_SAP_HANA__CONNECT_TIMEOUT": "0"}, ["hana.connect_timeout", "greater than 0"]),
        ({"OWL_SAP_SYNC__MAX_DELETES": "1.01"}, ["sync.max_deletes", "less"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_variable_is_named_with_its_setting(tmp_path: Path, environ: dict[str, str], words: list[str]) -> None:
    message = fault(tmp_path, environ)
    assert all(word in message for word in words), message
    assert CANARY not in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[hana\nhost = 'x'", 1),
        ("[hana]\nhost = x\n", 2),
        ("[hana]\nhost = 'x'\nhost = 'y'\n", 3),
        ("[hana]\n[api]\n[hana]\n", 3),
        ("[hana]\n\n\npassword = 'open\nhost = 'x'\n", 4),
    ],
)
def test_errors_of_toml_have_their_line(tmp_path: Path, text: str, line: int) -> None:
    message = fault(tmp_path, {}, text)
    assert f"line {line}" in message
    assert str(tmp_path / "owl-sap.toml") in message


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "owl-sap.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read" in fault(tmp_path, {})
    (tmp_path / "owl-sap.toml").unlink()
    (tmp_path / "secret").write_bytes(b"\xff")
    assert "HANA_PASSWORD_FILE" in fault(tmp_path, {"HANA_PASSWORD_FILE": str(tmp_path / "secret")})
    assert "cannot be read" in fault(tmp_path, {"HANA_PASSWORD_FILE": str(tmp_path)})


@pytest.mark.parametrize(
    ("content", "password"),
    [
        ("pw", "pw"),
        ("pw\n", "pw"),
        ("pw\r\n", "pw"),
        (" p w ", " p w "),
        ("two\nlines\n", "two\nlines"),
        ("Pässwört\n", "Pässwört"),
    ],
)
def test_a_secret_from_a_file_loses_only_its_line_end(tmp_path: Path, content: str, password: str) -> None:
    (tmp_path / "secret").write_bytes(content.encode())
    for name in ("HANA_PASSWORD_FILE", "OWL_SAP_HANA__PASSWORD_FILE"):
        found = loaded(tmp_path, {name: str(tmp_path / "secret")}).settings.hana.password
        assert found is not None
        assert found.get_secret_value() == password


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HANA_PASSWORD": CANARY}, ""),
        ({"HANA_STORE_PASSWORD": CANARY}, ""),
        ({"OWL_SAP_HANA__PASSWORD": CANARY}, ""),
        ({}, f'[hana]\npassword = "{CANARY}"'),
        ({}, f'[store.hana]\npassword = "{CANARY}"'),
    ],
    ids=["HANA_PASSWORD", "HANA_STORE_PASSWORD", "own", "file", "store in file"],
)
def test_a_secret_shows_nowhere(tmp_path: Path, environ: dict[str, str], text: str) -> None:
    got = loaded(tmp_path, environ, text)
    shown = [repr(got), str(got.settings), json.dumps(show(got)), got.settings.model_dump_json(), repr(got.origins)]
    assert CANARY not in "".join(shown)
    secret = got.settings.hana.password or got.settings.store_hana.password
    assert secret is not None
    assert secret.get_secret_value() == CANARY
    assert "*****" in json.dumps(show(got))


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"HANA_PASSWORD": CANARY, "HANA_PORT": "x"}, ""),
        ({"OWL_SAP_HANA__PASSWRD": CANARY}, ""),
        ({}, f'[hana]\npasword = "{CANARY}"'),
        ({}, f'[hana]\npassword = ["{CANARY}"]'),
        ({}, f'[hana]\npassword = {{ is = "{CANARY}" }}'),
        ({}, f'[hanna]\npassword = "{CANARY}"'),
        ({}, f'password = "{CANARY}"'),
        ({}, f'[hana]\npassword = "{CANARY}\n'),
        ({}, f"[hana]\npassword = {CANARY}\n"),
        ({}, f'[hana]\npassword = "{CANARY}"\npassword = "{CANARY}"\n'),
        ({}, f'hana = "{CANARY}"'),
        ({}, f'[store]\nhana = "{CANARY}"'),
        ({"OWL_SAP_COLLECTIONS": f'[[collections]]\nx = "{CANARY}"'}, ""),
    ],
)
def test_no_error_repeats_a_secret(
    tmp_path: Path, environ: dict[str, str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert CANARY not in fault(tmp_path, environ, text)
    assert CANARY not in caplog.text


def test_dotenv_that_cannot_be_parsed_logs_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / ".env").write_text(f"HANA_PASSWORD='{CANARY}\nHANA_USER=OWL\n")
    load(environ={}, folder=tmp_path)
    assert CANARY not in caplog.text


def test_a_section_that_is_no_section_is_refused_whatever_the_environment_says(tmp_path: Path) -> None:
    for environ in ({}, {"HANA_HOST": "x"}):
        assert "hana" in fault(tmp_path, environ, "hana = 3\n")


def test_the_environment_itself_is_read_when_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWL_SAP_API__PORT", "8123")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owl-sap.toml").write_text("[api]\nhost = 'localhost'\n")
    settings = load().settings
    assert (settings.api.port, settings.api.host) == (8123, "localhost")


def test_every_own_variable_can_be_set_from_its_default(tmp_path: Path) -> None:
    """The default of each setting, written as text, gives the same settings again."""
    defaults = {row["setting"]: row["value"] for row in show(Loaded(Settings()))}
    environ = {
        name: ", ".join(value) if isinstance(value, list) else str(value)
        for name, path in OWN_VARIABLES.items()
        if (value := defaults[".".join(path)]) is not None and path != ("collections",)
    }
    assert len(environ) >= 25
    assert loaded(tmp_path, environ).settings == Settings()


@pytest.mark.parametrize(
    ("environ", "text", "where"),
    [
        ({}, '[hana]\nhost_name_in_certificate = "*"', "hana.host_name_in_certificate"),
        ({}, '[store.hana]\nhost_name_in_certificate = " * "', "store.hana.host_name_in_certificate"),
        (
            {"OWL_SAP_HANA__HOST_NAME_IN_CERTIFICATE": "*"},
            "",
            "environment OWL_SAP_HANA__HOST_NAME_IN_CERTIFICATE: hana.host_name_in_certificate",
        ),
        (
            {"OWL_SAP_STORE__HANA__HOST_NAME_IN_CERTIFICATE": "*"},
            "",
            "environment OWL_SAP_STORE__HANA__HOST_NAME_IN_CERTIFICATE: store.hana.host_name_in_certificate",
        ),
    ],
)
def test_a_certificate_for_any_name_is_refused(
    tmp_path: Path, environ: Mapping[str, str], text: str, where: str
) -> None:
    """The driver then connects to whatever server has some certificate of a trusted authority."""
    told = fault(tmp_path, environ, text)
    assert f'{where}: "*" accepts a certificate for any name; set the name that the certificate carries' in told
