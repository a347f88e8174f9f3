"""Settings: precedence, names, secrets, and the messages for what cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.src.settings import CollectionSettings, Settings, SettingsError, load, show
from app.src.settings.sources import OWN_VARIABLES
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES
from connector.model import NO_TABLE, ChangeSpec, ChunkSpec, TableRef, delta_of

ROOT = Path(__file__).parents[2]
COLLECTION = """
[[collections]]
name = "materials"
source = 'S."a.b"'
template = "{MAKTX}"
"""
NOTES = """
[[collections]]
name = "notes"
documents = true
"""
SECRET = "canary-3141"


def written(folder: Path, text: str) -> Path:
    (folder / "owl-sap.toml").write_text(text, encoding="utf-8")
    return folder


def loaded(folder: Path, text: str = "", **environ: str) -> Settings:
    return load(environ=environ, folder=written(folder, text)).settings


def fault(folder: Path, text: str = "", **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        loaded(folder, text, **environ)
    return str(caught.value)


def test_without_anything_the_defaults_hold(tmp_path: Path) -> None:
    settings = load(environ={}, folder=tmp_path).settings
    assert settings.embedding.model == "all-MiniLM-L6-v2"
    assert (settings.hana.encrypt, settings.hana.validate_certificate) == (True, True)
    assert (settings.api.host, settings.sync.max_deletes) == ("127.0.0.1", 0.2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[embedding]\nremote_source = "R"', '[embedding]: remote_source belongs to a model "hana:MODEL"'),
        (
            '[store]\nkind = "local"\npath = "x"\n[state]\nrecords = "store"',
            'state.records = "store" needs a store in HANA',
        ),
    ],
)
def test_sections_that_do_not_fit_each_other(tmp_path: Path, text: str, told: str) -> None:
    assert fault(tmp_path, text).startswith(f"settings: {told}")


FRACTION = ("embedding", "memory_fraction")


def test_precedence_for_one_setting(tmp_path: Path) -> None:
    """Each layer beats all before it."""
    folder = written(tmp_path, "[embedding]\nmemory_fraction = 0.1")
    environ: dict[str, str] = {}

    def now(flags: dict[tuple[str, ...], float]) -> tuple[float, str]:
        got = load(environ=environ, folder=folder, flags=flags)
        return got.settings.embedding.memory_fraction, got.origins[FRACTION]

    assert now({}) == (0.1, "owl-sap.toml")
    for name, text in [
        ("GPU_MEMORY_FRACTION", "0.2"),
        ("T4_GPU_MEMORY_FRACTION", "0.3"),
        ("OWL_SAP_EMBEDDING__MEMORY_FRACTION", "0.4"),
    ]:
        environ[name] = text
        assert now({}) == (float(text), f"environment {name}")
    assert now({FRACTION: 0.5}) == (0.5, "flag")


@pytest.mark.parametrize("written_as", ["pa${HOME}x", "'pa${HOME}x'", '"pa${HOME}x"'])
def test_a_dollar_in_dotenv_stays_as_written(tmp_path: Path, written_as: str) -> None:
    (tmp_path / ".env").write_text(f"HANA_PASSWORD={written_as}\n")
    password = load(environ={"HOME": "/root"}, folder=tmp_path).settings.hana.password
    assert password is not None
    assert password.get_secret_value() == "pa${HOME}x"


def test_environment_beats_dotenv_and_empty_counts_as_unset(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("HANA_HOST=from-file\nHANA_USER=FILE\nHANA_SCHEMA=\nUNRELATED=1\n")
    got = load(environ={"HANA_HOST": "from-env", "HANA_USER": ""}, folder=tmp_path)
    assert (got.settings.hana.host, got.settings.hana.user) == ("from-env", "FILE")
    assert got.settings.hana.schema_name is None
    assert got.origins[("hana", "host")] == "environment HANA_HOST"
    assert got.origins[("hana", "user")] == ".env HANA_USER"


def test_every_setting_has_its_variable(tmp_path: Path) -> None:
    variables = OWN_VARIABLES
    assert variables["OWL_SAP_HANA__SCHEMA"] == ("hana", "schema")
    assert variables["OWL_SAP_STORE__HANA__PORT"] == ("store", "hana", "port")
    settings = loaded(tmp_path, "", OWL_SAP_STORE__HANA__PORT="30015", OWL_SAP_HANA__ENCRYPT="false")
    assert settings.store_hana.port == 30015
    assert settings.hana.encrypt is False


def test_the_guides_variables_are_all_answered() -> None:
    guides = """T4_GPU_FP16_MODE T4_GPU_INT8_MODE T4_GPU_MAX_WORKSPACE_SIZE T4_GPU_DYNAMIC_BATCH_SIZE
        T4_GPU_ENABLE_PROFILING T4_GPU_ENABLE_TENSOR_CORES T4_GPU_ENABLE_SPARSE T4_GPU_MEMORY_FRACTION
        T4_GPU_MAX_BATCH_SIZE T4_GPU_OPTIMIZATION_LEVEL USE_GPU GPU_DEVICE_ID GPU_MEMORY_FRACTION RESERVE_MEMORY
        ENABLE_AMP CUDNN_BENCHMARK TF32_OVERRIDE NVIDIA_TF32_OVERRIDE INFERENCE_BATCH_SIZE NER_BATCH_SIZE
        DOCUMENT_BATCH_SIZE WORKER_CONCURRENCY WORKER_MAX_TASKS_PER_CHILD CUDA_VISIBLE_DEVICES CUDA_MODULE_LOADING
        CUDA_LAUNCH_BLOCKING PYTORCH_CUDA_ALLOC_CONF PYTORCH_JIT"""
    assert set(guides.split()) <= {variable.name for variable in (*VARIABLES, *GUIDE_VARIABLES)}


def test_a_variable_that_does_nothing_is_accepted_and_explained(tmp_path: Path) -> None:
    got = load(environ={"PYTORCH_JIT": "1"}, folder=tmp_path)
    assert "TorchScript" in got.inert["PYTORCH_JIT"]
    assert got.settings == Settings()


@pytest.mark.parametrize(
    ("environ", "section", "expected"),
    [
        ({"USE_GPU": "false", "GPU_DEVICE_ID": "1"}, "device", "cpu"),
        ({"USE_GPU": "true", "GPU_DEVICE_ID": "1"}, "device", "cuda:1"),
        ({"USE_GPU": "true", "GPU_DEVICE_ID": "0"}, "device", "auto"),
        ({"USE_GPU": "true"}, "expect_gpu", True),
        ({"T4_GPU_FP16_MODE": "false"}, "precision", "fp32"),
        ({"T4_GPU_FP16_MODE": "true"}, "precision", "auto"),
        ({"RESERVE_MEMORY": "1024"}, "reserve_mb", 1024),
    ],
)
def test_guide_variables(tmp_path: Path, environ: dict[str, str], section: str, expected: object) -> None:
    assert getattr(loaded(tmp_path, "", **environ).embedding, section) == expected


@pytest.mark.parametrize(
    ("text", "variable", "device"),
    [
        ('device = ["cuda:0", "cuda:1"]', "", "cuda:0,cuda:1"),
        ("", "cuda:0, cuda:1", "cuda:0, cuda:1"),
        ('device = "all"', "", "all"),
        ('device = ["cuda:2"]', "", "cuda:2"),
    ],
)
def test_several_devices(tmp_path: Path, text: str, variable: str, device: str) -> None:
    embedding = loaded(tmp_path, f"[embedding]\n{text}", OWL_SAP_EMBEDDING__DEVICE=variable).embedding
    assert (embedding.device, embedding.on_named_card, embedding.on_cpu) == (device, True, False)


@pytest.mark.parametrize("device", ["[]", '["auto", "cuda:1"]', '["all", "cpu"]', '"cuda:x"', '["cuda:0", ""]', "7"])
def test_unknown_devices_are_refused(tmp_path: Path, device: str) -> None:
    assert "embedding.device" in fault(tmp_path, f"[embedding]\ndevice = {device}").replace("] ", ".").replace("[", "")


def test_secrets_come_from_files_and_never_show(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    got = load(environ={"HANA_PASSWORD_FILE": str(tmp_path / "secret")}, folder=tmp_path)
    assert got.settings.hana.password is not None
    assert got.settings.hana.password.get_secret_value() == SECRET
    assert SECRET not in repr(got)
    assert SECRET not in json.dumps(show(got))
    assert "HANA_PASSWORD_FILE" in got.origins[("hana", "password")]


def test_OWN_VARIABLES_have_file_variants_too(tmp_path: Path) -> None:
    (tmp_path / "user").write_text("OWL")
    assert loaded(tmp_path, "", OWL_SAP_HANA__USER_FILE=str(tmp_path / "user")).hana.user == "OWL"


def test_a_secret_named_twice_or_missing_is_refused(tmp_path: Path) -> None:
    message = fault(tmp_path, HANA_PASSWORD=SECRET, HANA_PASSWORD_FILE="/nowhere/x")
    assert "both set" in message
    assert SECRET not in message
    message = fault(tmp_path, HANA_PASSWORD_FILE="/nowhere/x")
    assert "HANA_PASSWORD_FILE: the file it names cannot be read (FileNotFoundError)" in message
    assert "/nowhere/x" not in message, "it may be the secret itself, written into the wrong variable"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[embedding]\nmodle = 'x'", ["owl-sap.toml", "embedding.modle", 'did you mean "model"']),
        ("[hana]\nport = 'abc'", ["owl-sap.toml", "hana.port", "integer"]),
        ("[hana]\nkind = 'local'", ["hana.kind", "store.kind"]),
        ("[hanna]\nhost = 'x'", ["hanna", 'did you mean "hana"']),
        ("hana = 'x'", ["owl-sap.toml: hana: must be a section"]),
        ("hana = 3", ["owl-sap.toml", "hana"]),
        ("[store]\nkind = 'local'", ["store", "path"]),
        ("[store]\nkind = 'local'\npath = 'v'\nvector_type = 'half'", ["vector_type", "hana"]),
        ("[embedding]\nprecision = 'fp8'", ["embedding.precision", "'fp16'"]),
        (COLLECTION + COLLECTION, ["two collections", '"materials"']),
        (COLLECTION + "templat = 'x'", ["[[collections]] materials.templat", 'did you mean "template"']),
        (
            COLLECTION + "changes = { method = 'lok' }",
            ["[[collections]] materials.changes.method", "'log'"],
        ),
        (COLLECTION + "changes = { methot = 'log' }", ["[[collections]] materials.changes.methot", "method"]),
        (COLLECTION + "changes = 'full'", ["[[collections]] materials.changes", "section"]),
        (COLLECTION + "changes = { method = 'watermark' }", ["[[collections]] materials.changes", "needs column"]),
        (
            COLLECTION + "changes = { method = 'log', column = 'A' }",
            ["[[collections]] materials.changes", "belongs to"],
        ),
        (
            COLLECTION + "changes = { method = 'rowid', hash = 'server' }",
            ["[[collections]] materials.changes", "belongs to"],
        ),
        (COLLECTION + "changes = { method = 'rowid', reconcile = '0s' }", ["changes.reconcile", "greater than 0"]),
        (COLLECTION + "changes = { method = 'rowid', reconcile = 'soon' }", ["changes.reconcile", "1h30m"]),
        (COLLECTION + "changes = { method = 'log', log = 'X' }", ["changes.log", "SCHEMA.TABLE"]),
        (COLLECTION + "changes = { method = 'delta', table = 'X' }", ["changes.table", "SCHEMA.TABLE"]),
        (COLLECTION + "changes = { method = 'log', at = 'X' }", ['at belongs to method = "delta"']),
        (COLLECTION + "chunk = { max_tokens = 8, overlap = 8 }", ["[[collections]] materials.chunk", "smaller"]),
        (COLLECTION.replace("materials", "a b"), ["[[collections]] a b.name", "letters"]),
        (COLLECTION.replace("""'S."a.b"'""", '"MARA"'), ["[[collections]] materials.source", "SCHEMA.TABLE"]),
        ("[[collections]]\nname = 'm'\nsource = 'S.T'", ["[[collections]] m:", "template missing", "documents = true"]),
        ("[[collections]]\nsource = 'S.T'", ["[[collections]] number 1.name: Field required"]),
        ("[[collections]]\nname = 'm'", ["[[collections]] m:", "source and template missing"]),
        (COLLECTION + "documents = true", ["[[collections]] materials", "table settings (source, template)"]),
        (NOTES + "schedule = { every = '5m' }", ["[[collections]] notes", "table settings (schedule)"]),
        (NOTES + "key = ['id']\nwhere = '1 = 1'", ["[[collections]] notes", "table settings (key, where)"]),
        (NOTES + "metadata = ['/BIC/X']", ["[[collections]] notes", '"/BIC/X" of documents: use letters']),
        (NOTES + "row_rights = { plant = 'plants' }", ["[[collections]] notes", "not declared in metadata"]),
        ("[hana]\nport = \n", ["owl-sap.toml", "TOML", "line 2"]),
    ],
)
def test_faults_in_the_file_name_file_and_key(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = fault(tmp_path, text)
    assert all(part in message for part in parts), message


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    assert len(fault(tmp_path, "[hana]\nport = 0\nhots = 'x'\n[api]\nport = -1").splitlines()) == 3


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"OWL_SAP_HANA__PROT": "1"}, ["OWL_SAP_HANA__PROT", 'did you mean "OWL_SAP_HANA__PORT"']),
        ({"OWL_SAP_HANA__PORT": "x"}, ["environment OWL_SAP_HANA__PORT", "hana.port"]),
        ({"HANA_PORT": "x"}, ["environment HANA_PORT", "hana.port"]),
        ({"USE_GPU": "maybe"}, ["environment USE_GPU", "true or false"]),
        ({"OWL_SAP_CONFIG": "/nowhere.toml"}, ["/nowhere.toml", "not found"]),
        ({"OWL_SAP_COLLECTIONS": "x"}, ["OWL_SAP_COLLECTIONS", "TOML"]),
    ],
)
def test_faults_in_the_environment_name_the_variable(tmp_path: Path, environ: dict[str, str], parts: list[str]) -> None:
    message = fault(tmp_path, "", **environ)
    assert all(part in message for part in parts), message


def test_a_misspelt_variable_in_dotenv_is_refused_there(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OWL_SAP_API__PROT=1\n")
    assert ".env OWL_SAP_API__PROT" in fault(tmp_path)


def test_collections_become_specs(tmp_path: Path) -> None:
    text = COLLECTION + 'key = "MANDT, MATNR"\nmetadata = ["MTART"]\nchunk = { max_tokens = 64, overlap = 4 }'
    (collection,) = loaded(tmp_path, text).collections
    spec = collection.spec()
    assert spec.source == TableRef("S", "a.b")
    assert spec.key == ("MANDT", "MATNR")
    assert spec.metadata == ("MTART",)
    assert spec.chunk == ChunkSpec(64, 4)


def test_changes_by_a_delta_table_become_a_spec(tmp_path: Path) -> None:
    """By default it is Datasphere's table beside the source, with the names that SAP's tools give."""
    (collection,) = loaded(tmp_path, COLLECTION + "changes = { method = 'delta' }").collections
    assert delta_of(collection.spec()) == TableRef("S", "a.b_Delta")
    changes = "changes = { method = 'delta', table = 'S.D', type = 'CHANGE_TYPE', at = 'CHANGE_DATE', delay = '5m' }"
    (collection,) = loaded(tmp_path, COLLECTION + changes).collections
    spec = collection.spec()
    wanted = ChangeSpec("delta", delay=300, table=TableRef("S", "D"), type="CHANGE_TYPE", at="CHANGE_DATE")
    assert (spec.changes, delta_of(spec)) == (wanted, TableRef("S", "D"))


def test_a_collection_that_clients_write_has_no_table(tmp_path: Path) -> None:
    text = COLLECTION + NOTES + "model = 'hash:8'\nmetadata = ['plant']\nchunk = { max_tokens = 64, overlap = 4 }"
    settings = loaded(tmp_path, text)
    assert [each.name for each in settings.synced] == ["materials"]
    spec = settings.collections[1].spec()
    assert spec.written_by_clients
    assert (spec.source, spec.key, spec.metadata) == (NO_TABLE, ("id",), ("plant",))
    assert spec.chunk == ChunkSpec(64, 4)


def test_collections_from_the_environment(tmp_path: Path) -> None:
    assert loaded(tmp_path, "", OWL_SAP_COLLECTIONS=COLLECTION).collections[0].name == "materials"


def test_the_store_has_its_own_hana_or_that_of_the_rows(tmp_path: Path) -> None:
    both = loaded(tmp_path, "[hana]\nhost='a'\nschema='A'\n[store.hana]\nhost='b'\nschema='B'")
    assert (both.store_hana.host, both.store_schema) == ("b", "B")
    one = loaded(tmp_path, "[hana]\nhost='a'\nschema='A'\n[store]\nschema='V'")
    assert (one.store_hana.host, one.store_schema) == ("a", "V")


def test_settings_cannot_change() -> None:
    with pytest.raises(ValidationError):
        Settings().hana.port = 1


def test_show_names_every_setting_and_its_origin(tmp_path: Path) -> None:
    rows = {row["setting"]: row for row in show(load(environ={"HANA_PORT": "30015"}, folder=tmp_path))}
    assert rows["hana.port"] == {"setting": "hana.port", "value": 30015, "origin": "environment HANA_PORT"}
    assert rows["api.port"]["origin"] == "default"
    assert {".".join(path) for path in OWN_VARIABLES.values()} == set(rows)


def test_the_examples_are_valid(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text((ROOT / ".env.example").read_text())
    example = (ROOT / "owl-sap.example.toml").read_text()
    settings = loaded(tmp_path, example)
    assert settings.collections[0].name == "materials"
    commented = [
        line.lstrip("#")
        for line in (ROOT / ".env.example").read_text().splitlines()
        if line[:1] == "#" and line[1:2].isalpha()
    ]
    names = {line.split("=")[0] for line in commented if "=" in line and line.split("=")[0].isupper()}
    known = {*OWN_VARIABLES, *(variable.name for variable in (*VARIABLES, *GUIDE_VARIABLES)), "OWL_SAP_CONFIG"}
    compose = (ROOT / "docker-compose.t4-optimized.yml").read_text()
    known |= set(re.findall(r"\$\{(OWL_[A-Z_]+):-", compose)) - {"OWL_SAP_API__PORT"}
    assert {name.removesuffix("_FILE") for name in names} <= known


def test_what_the_example_has_as_comments_fits_the_section_it_stands_in() -> None:
    """Whoever takes the `#` away gets that setting, and a file that TOML takes."""
    names, section = OWN_VARIABLES.values(), ""
    seen: list[str] = []
    known = {".".join(path) for path in names}
    for line in (ROOT / "owl-sap.example.toml").read_text().splitlines():
        if header := re.match(r"(?:# )?\[([a-z.]+)\]", line):
            section = header[1]
            seen.append(section)
        elif line.startswith("[["):
            break
        elif (setting := re.match(r"(?:# )?([a-z_]+) = ", line)) and not section.startswith("store.hana"):
            assert f"{section}.{setting[1]}" in known
    assert len(seen) == len(set(seen))


def collection_or_why(**fields: str) -> CollectionSettings | str:
    try:
        return CollectionSettings.model_validate({"name": "a", "source": "S.T", "template": "{A}"} | fields)
    except ValidationError as error:
        return str(error)


@given(st.text(max_size=30))
def test_any_collection_name_is_taken_or_refused_clearly(name: str) -> None:
    result = collection_or_why(name=name)
    if isinstance(result, str):
        assert "letters, digits" in result
    else:
        assert result.name == name
        assert name.isascii()


@given(st.text(alphabet='ab."é', max_size=12))
def test_any_source_is_parsed_or_refused(source: str) -> None:
    result = collection_or_why(source=source)
    if isinstance(result, str):
        assert "SCHEMA.TABLE" in result
    else:
        assert result.spec().source == TableRef.parse(source)
