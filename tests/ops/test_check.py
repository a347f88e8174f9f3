"""scripts/check: with stubs for its tools, what makes it red and what is said of tools that are not there; and with the
real tools, that they find what is planted for them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from tests.ops.conftest import Host

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "scripts/semgrep/rules.yml"
STEPS = ["format", "lint", "types", "imports", "security", "secrets", "workflows", "shell", "docker", "compose"]
TOOL_OF = {
    "ruff": "format",
    "mypy": "types",
    "lint-imports": "imports",
    "bandit": "security",
    "semgrep": "security",
    "detect-secrets-hook": "secrets",
    "zizmor": "workflows",
    "shellcheck": "shell",
    "hadolint": "docker",
    "check-jsonschema": "compose",
}
TOOL = """#!/usr/bin/env bash
name=${0##*/}
printf '%s\\n' "$name $*" >>"$STUB_LOG"
[[ $name == "${STUB_FAILS:-}" ]] && exit "${STUB_STATUS:-1}"
exit 0
"""
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "python $*" >>"$STUB_LOG"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin"; cat "$0" >"$3/bin/python"; chmod +x "$3/bin/python" ;;
  *"install"*"semgrep=="*)
    [[ ${STUB_PIP:-works} == works ]] || { echo "pip: no network" >&2; exit 1; }
    cat "${0%/*}/../../../.venv/bin/mypy" >"${0%/*}/semgrep"; chmod +x "${0%/*}/semgrep" ;;
esac
"""


@pytest.fixture
def project(host: Host) -> Host:
    """Stubs of all tools in .venv, and semgrep as something that pip can get."""
    shutil.copytree(ROOT / "scripts/lib", host.folder / "scripts/lib", dirs_exist_ok=True)
    shutil.copy(ROOT / "scripts/check", host.folder / "scripts/check")
    for name in ("chmod", "cp", "mktemp", "sort"):
        if not (host.bin / name).exists():
            (host.bin / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    host.stub("git", "#!/usr/bin/env bash\necho a-file\n")
    (host.folder / "pyproject.toml").write_text("[project]\n")
    (host.folder / ".secrets.baseline").write_text("{}")
    (host.folder / "app").mkdir()
    (host.folder / "app/code.py").write_text("")
    tools = host.folder / ".venv/bin"
    tools.mkdir(parents=True)
    for name in TOOL_OF:
        if name != "semgrep":
            (tools / name).write_text(TOOL)
            (tools / name).chmod(0o755)
    (tools / "python").write_text(PYTHON)
    (tools / "python").chmod(0o755)
    return host


def tools_run(project: Host) -> list[str]:
    return [line.split()[0] for line in project.log.splitlines() if not line.startswith("python")]


def test_every_step_in_order(project: Host) -> None:
    result = project.run("scripts/check", *STEPS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "check: all green"
    assert tools_run(project) == [
        *("ruff", "ruff", "mypy", "lint-imports", "bandit", "semgrep", "semgrep"),
        *(
            "detect-secrets-hook",
            "detect-secrets-hook",
            "zizmor",
            "check-jsonschema",
            "check-jsonschema",
            "shellcheck",
            "hadolint",
            "check-jsonschema",
        ),
    ]


def test_semgrep_is_installed_once_and_at_a_fixed_version(project: Host) -> None:
    for _ in range(2):
        assert project.run("scripts/check", "security").returncode == 0
    installed = re.findall(r"pip install .*?(\S+)$", project.log, re.M)
    semgrep = [what for what in installed if what.startswith("semgrep")]
    assert len(semgrep) == 1
    assert re.fullmatch(r"semgrep==\d+\.\d+\.\d+", semgrep[0])


def few(tools: Iterable[str]) -> list[Any]:
    """The tools, all but two of them in the slow suite alone."""
    return [tool if tool in ("bandit", "mypy") else pytest.param(tool, marks=pytest.mark.slow) for tool in tools]


@pytest.mark.parametrize("tool", few(TOOL_OF))
def test_a_red_step_is_named_and_the_others_run(project: Host, tool: str) -> None:
    project.variables["STUB_FAILS"] = tool
    result = project.run("scripts/check", *STEPS)
    assert result.returncode == 1
    assert f"FAILED: {TOOL_OF[tool]}\n" in result.stderr
    assert "all green" not in result.stdout
    assert set(tools_run(project)) == set(TOOL_OF)


@pytest.mark.parametrize("tool", few(sorted(set(TOOL_OF) - {"semgrep"})))
def test_a_missing_tool_is_named_and_red_in_ci(project: Host, tool: str) -> None:
    (project.folder / ".venv/bin" / tool).unlink()
    if tool == "mypy":  # the stub that the stub of pip copies
        project.variables["STUB_PIP"] = "no network"
    result = project.run("scripts/check", TOOL_OF[tool])
    assert result.returncode == 0
    assert f"skipped: {TOOL_OF[tool]} ({tool} is missing)" in result.stdout
    project.variables["CI"] = "true"
    result = project.run("scripts/check", TOOL_OF[tool])
    assert result.returncode == 1
    assert f"FAILED: {TOOL_OF[tool]} ({tool} is missing)" in result.stderr


@pytest.mark.slow
def test_semgrep_that_cannot_be_had(project: Host) -> None:
    project.variables |= {"STUB_PIP": "no network", "CI": "true"}
    result = project.run("scripts/check", "security")
    assert result.returncode == 1
    assert "FAILED: security (semgrep is missing)" in result.stderr
    del project.variables["STUB_PIP"]
    assert project.run("scripts/check", "security").returncode == 0, "half an environment is made anew"


@pytest.mark.parametrize(("status", "code"), [("3", 0), ("1", 1)])
def test_moved_line_numbers_are_no_secrets(project: Host, status: str, code: int) -> None:
    project.variables |= {"STUB_FAILS": "detect-secrets-hook", "STUB_STATUS": status}
    script = (project.folder / "scripts/check").read_text()
    # of the two scans only the one with the baseline, which is the one that answers 3
    (project.folder / "scripts/check").write_text(script.replace("  run_secrets 0 ", "  : "))
    assert project.run("scripts/check", "secrets").returncode == code
    assert (project.folder / ".secrets.baseline").read_text() == "{}"


def test_outside_a_checkout_secrets_are_not_looked_for_and_that_is_said(project: Host) -> None:
    project.stub("git", "#!/usr/bin/env bash\nexit 128\n")
    result = project.run("scripts/check", "secrets")
    assert result.returncode == 0
    assert "skipped: secrets (a git checkout is missing)" in result.stdout
    assert tools_run(project) == []


def test_each_step_is_a_name_and_a_function() -> None:
    text = (ROOT / "scripts/check").read_text()
    (names,) = re.findall(r"^all_steps=\(\n(.*?)^\)", text, re.M | re.S)
    assert names.split() == re.findall(r"^step_(\w+)\(\)", text, re.M)
    assert set(STEPS) <= set(names.split())


def test_steps_can_be_chosen_and_unknown_ones_are_refused(project: Host) -> None:
    assert project.run("scripts/check", "imports", "docker").returncode == 0
    assert tools_run(project) == ["lint-imports", "hadolint"]
    refused = project.run("scripts/check", "everything")
    assert refused.returncode == 2
    assert all(step in refused.stderr for step in STEPS)


# ---------------------------------------------------------------------------------------------------- the real tools


def rules() -> list[str]:
    return [rule["id"] for rule in YAML(typ="safe").load(RULES)["rules"]]


@pytest.mark.parametrize("rule", rules())
def test_each_rule_has_lines_that_it_finds_and_lines_that_it_lets_pass(rule: str) -> None:
    lines = RULES.with_suffix(".py").read_text().splitlines()
    marked = [(mark, after) for line in lines if (found := re.search(r"# (ruleid|ok): (.*)", line))
              for mark, after in [(found[1], found[2].split(", "))] if rule in after]  # fmt: skip
    assert {mark for mark, _ in marked} == {"ruleid", "ok"}


@pytest.mark.slow  # scripts/check does the same
def test_semgrep_finds_those_lines() -> None:
    semgrep = ROOT / ".venv-tools/semgrep/bin/semgrep"
    if not semgrep.exists():
        if os.environ.get("CI") == "true":
            pytest.fail("scripts/check security has not made .venv-tools/semgrep")
        pytest.skip("semgrep is made by scripts/check security")
    command = [str(semgrep), "scan", "--test", "--metrics", "off", "--disable-version-check"]
    command += ["--config", str(RULES), str(RULES.with_suffix(".py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(rules())}/{len(rules())}" in done.stdout


def tool(name: str) -> str:
    path = Path(sys.executable).with_name(name)
    if not path.exists() and os.environ.get("CI") != "true":
        pytest.skip(f"{name} is not installed")
    return str(path)


def test_a_planted_key_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "settings.toml"
    planted.write_text('access = "AKIA' + "Q3EGS7XLMNOPWXYZ" + '"\n')
    shutil.copy(ROOT / ".secrets.baseline", tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    command = [tool("detect-secrets-hook"), "--baseline", ".secrets.baseline", planted.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "settings.toml" in done.stdout


def test_nothing_listed_as_no_secret_is_gone() -> None:
    """What is in the list but no longer in its file would let the same line pass elsewhere unseen."""
    listed = YAML(typ="safe").load(ROOT / ".secrets.baseline")["results"]
    assert [name for name in listed if not (ROOT / name).exists()] == []


def test_a_planted_injection_in_a_workflow_is_found(tmp_path: Path) -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    planted = tmp_path / "ci.yml"
    planted.write_text(text.replace("run: .ci/run", "run: echo ${{ github.event.pull_request.title }}"))
    command = [tool("zizmor"), "--offline", "--quiet", str(planted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "template-injection" in done.stdout


def test_a_planted_call_is_found_by_bandit(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "import tarfile\n\n\ndef unpack(path: str) -> None:\n    tarfile.open(path).extractall('/srv')\n"
    )
    command = [tool("bandit"), "--quiet", "--configfile", str(ROOT / "pyproject.toml"), str(planted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "B202" in done.stdout


def workflow_steps(name: str) -> list[dict[str, str]]:
    workflow = YAML(typ="safe").load(ROOT / ".github/workflows" / name)
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_the_workflow_runs_what_ci_runs() -> None:
    assert ".ci/run" in [step.get("run") for step in workflow_steps("ci.yml")]


def test_the_locks_of_the_image_are_audited_and_are_in_the_bill_of_materials() -> None:
    runs = [step.get("run", "") for step in workflow_steps("ci.yml")]
    assert any("deployment/requirements/*.txt" in run and "pip-audit" in run for run in runs)
    assert any("deployment/requirements/" in run and "cyclonedx-py requirements" in run for run in runs)
    updates = YAML(typ="safe").load(ROOT / ".github/dependabot.yml")["updates"]
    watched = {(update["package-ecosystem"], update["directory"]) for update in updates}
    assert {("pip", "/"), ("pip", "/deployment/requirements"), ("docker", "/"), ("github-actions", "/")} <= watched


def test_what_publishes_a_release_runs_none_of_our_code() -> None:
    jobs = YAML(typ="safe").load(ROOT / ".github/workflows/release.yml")["jobs"]
    assert jobs["build"]["permissions"] == {"contents": "read"}
    actions = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"] if "uses" in step]
    assert actions == [
        "actions/download-artifact",
        "actions/attest-build-provenance",
        "sigstore/cosign-installer",
    ]
    assert not any("python" in step.get("run", "") for step in jobs["publish"]["steps"])
    before = "\n".join(step.get("run", "") for step in jobs["build"]["steps"]).partition("hatchling build")[0]
    assert "-m venv build" not in before, "the source archive would hold what lies in the checkout"
    assert re.findall(r"> ?(\S+)", before) == ['"$RUNNER_TEMP/notes.md"']


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / ".github/workflows").iterdir()))
def test_workflows_have_no_rights_of_their_own_and_pin_their_actions(name: str) -> None:
    text = (ROOT / ".github/workflows" / name).read_text()
    workflow = YAML(typ="safe").load(text)
    assert workflow["permissions"] == {}
    steps = workflow_steps(name)
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert len(re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.M)) == len(used)
