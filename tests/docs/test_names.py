"""What the documentation names exists: files it links to, variables, settings, verbs and routes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from app.src.cli import app
from app.src.cli.demo import NEXT
from app.src.settings.sources import OWN_VARIABLES
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILES = [
    *PAGES,
    *(ROOT / name for name in (".env.example", "docker-compose.t4-optimized.yml", "Dockerfile.t4")),
    ROOT / "deploy_t4_optimized.sh",
]
README = (ROOT / "README.md").read_text(encoding="utf-8")

OURS_BESIDE_SETTINGS = {"OWL_SAP_FAILPOINT", "OWL_SAP_TEST_SEED", "OWL_SAP_CONFIG", "OWL_SAP_API_KEY"}
"""OWL_SAP_CONFIG names the configuration file, and is no setting in it; OWL_SAP_API_KEY is our client's."""
OF_TESTS = {"HANA_TEST_DSN"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page))
    local = {link for link in links if "://" not in link}
    assert {link for link in local if not (page.parent / link).exists()} == set()


def test_every_page_is_in_the_index() -> None:
    index = text_of(ROOT / "docs" / "README.md")
    linked = set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_into_pages_lead_to_a_heading(page: Path) -> None:
    wrong = []
    for file, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", text_of(page)):
        target = page.parent / file if file else page
        if target.exists() and anchor not in anchors(target):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_OWN_VARIABLES_reach_a_setting(file: Path) -> None:
    known = OWN_VARIABLES
    for name in set(re.findall(r"\bOWL_SAP_[A-Z0-9_]*[A-Z0-9]\b", text_of(file))) - OURS_BESIDE_SETTINGS:
        assert name in known or name.removesuffix("_FILE") in known, f"{name}: no such setting"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_hana_variables_are_understood(file: Path) -> None:
    known = {variable.name for variable in (*VARIABLES, *GUIDE_VARIABLES)} | OF_TESTS
    named = {name.removesuffix("_FILE") for name in re.findall(r"\bHANA_[A-Z][A-Z_]*[A-Z]\b", text_of(file))}
    assert named - known == set()


def verbs() -> set[str]:
    command = get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    return set(command.commands)


def test_verbs_named_in_the_documentation_exist() -> None:
    named = {verb for page in PAGES for verb in re.findall(r"\bowl-sap (?!-)([a-z]+)\b", text_of(page))}
    assert named - verbs() == set()


def test_every_verb_is_documented() -> None:
    documentation = "".join(map(text_of, PAGES))
    assert {verb for verb in verbs() if f"owl-sap {verb}" not in documentation} == set()


def test_readme_is_short_and_filled_in() -> None:
    assert len(README.splitlines()) < 150
    assert "to be filled in" not in README


def test_readme_shows_queries_of_the_demo() -> None:
    queries = re.findall(r'^text = "(.*)"$', text_of(ROOT / "app/src/demo.toml"), re.M)
    shown = README.split("<!-- demo output: begin -->")[1].split("<!-- demo output: end -->")[0]
    assert len(queries) == 12
    asked = [line.split("  ")[0] for line in shown.splitlines() if line.endswith(" ms")]
    assert len(asked) >= 6
    assert set(asked) <= set(queries)
    assert f"{len(queries)} of {len(queries)} searches found the expected row" in shown
    assert shown.rstrip().removesuffix("```").rstrip().endswith(NEXT)


def test_nothing_is_installed_from_an_index_that_has_it_not() -> None:
    """Documentation and messages name the clone; `connector.extras` alone knows when there is another way."""
    pages = [*FILES, *(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "benchmarks").glob("*.py")]
    code = [
        path
        for folder in ("app", "connector", "owl_sap_client/owl_sap_client")
        for path in (ROOT / folder).rglob("*.py")
    ]
    wrong = re.compile(r"pip install [^`\n]*owl-sap-connector\[")
    assert [name_of(path) for path in (*pages, *code) if wrong.search(text_of(path))] == []


def test_the_extra_of_the_notebooks_opens_them() -> None:
    extras = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    assert any(re.match(r"jupyterlab\b", wanted) for wanted in extras["notebooks"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_password_of_the_emulator_is_its_default(page: Path) -> None:
    """HANA locks users after wrong logins, and so does the emulator."""
    told = set(re.findall(r"\bOwl-\w[\w-]*", text_of(page)))
    default = re.search(r'"--password", default="([^"]+)"', text_of(ROOT / "hana_emulator/hana_emulator/__main__.py"))
    assert default is not None
    assert told <= {default[1]}
