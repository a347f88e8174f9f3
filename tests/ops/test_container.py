"""What Dockerfile.t4 promises, read from the file, and its steps run in a folder: no image was built here. What the
image's commands do is tested in tests/surface/test_containers.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.lib import locks

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile.t4").read_text(encoding="utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def stages() -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.M)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def bases() -> dict[str, str]:
    return {stage: base for base, stage in re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.M)}


def instructions(stage: str, word: str) -> list[str]:
    joined = stages()[stage].replace("\\\n", " ")
    return re.findall(rf"^{word} (.*)$", joined, re.M)


def copied() -> set[str]:
    lines = re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.*)$", DOCKERFILE, re.M)
    return {source for line in lines for source in line.split()[:-1]}


def sent(path: str) -> bool:
    """Whether the build receives it: the last line of .dockerignore that matches it or a folder above decides."""
    parts, answer = path.split("/"), True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = re.escape(line.lstrip("!").rstrip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, "/".join(parts[:depth])) for depth in range(1, len(parts) + 1)):
            answer = line.startswith("!")
    return answer


def context() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if sent(path)]


def test_the_build_receives_what_it_copies_and_nothing_else() -> None:
    files = context()
    for source in copied():
        assert any(file == source or file.startswith(source + "/") for file in files), source
    for file in files:
        assert any(file == source or file.startswith(source + "/") for source in copied()), file
    for never in (".env", "app/.env.local", "secrets/keys.json", "app/src/__pycache__/x.pyc", "scripts/keys"):
        assert not sent(never), never


def test_build_context_holds_no_secret() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first = next(line for line in lines if not line.startswith("#"))
    assert first == "*"
    assert "**/.env*" in lines
    assert not re.search(r"(?im)^(ENV|ARG)\s+.*(PASSWORD|SECRET|TOKEN|API_KEY|HANA_|INDEX_URL)", DOCKERFILE)


def test_the_stages_build_on_each_other_and_the_last_is_the_service() -> None:
    assert bases() == {
        "build": "${BASE_IMAGE}",
        "distribution": "${BASE_IMAGE}",
        "runtime": "${BASE_IMAGE}",
        "with-model": "runtime",
        "service": "runtime",
    }
    assert list(bases())[-1] == "service"


def test_every_package_is_installed_by_its_hash() -> None:
    installs = re.findall(r"pip install (.*)", DOCKERFILE)
    ours = [line for line in installs if "--target" in line]
    assert len(ours) == 1
    assert "--no-deps --no-build-isolation" in ours[0], "the tools that build it are pinned too"
    others = [line for line in installs if "--target" not in line]
    assert len(others) == 3
    for line in others:
        assert "--require-hashes --no-deps --only-binary=:all:" in line
    assert "pip check" in stages()["build"]


def test_each_extra_that_it_names_has_its_lock_of_both_cudas() -> None:
    (named,) = re.findall(r'--build-arg EXTRAS="([a-z0-9 -]+)"', DOCKERFILE)
    assert tuple(named.split()) == locks.EXTRAS
    (path,) = re.findall(r'-r "(requirements/\S+extra\S+)"', DOCKERFILE)
    for cuda in locks.TORCH:
        for extra in locks.EXTRAS:
            file = path.replace("${CUDA}", cuda).replace("${extra}", extra)
            assert locks.pins((ROOT / "deployment" / file).read_text(encoding="utf-8")), file


def test_image_holds_our_distribution_so_that_the_version_is_known() -> None:
    found = re.search(r"^RUN pip install .* --target (\S+) \.$", stages()["distribution"], re.M)
    assert found
    assert f"COPY --from=distribution {found[1]} /app\n" in stages()["runtime"]
    assert "PYTHONPATH=/app " in stages()["runtime"]
    assert {"pyproject.toml", "app", "connector", PROJECT["readme"]} <= copied()
    assert "hana_emulator" not in copied(), "the emulator is for tests and the demo"


def test_the_command_owl_sap_begins_with_the_python_that_has_the_packages() -> None:
    """pip writes the path of its own Python into it."""
    for stage in ("build", "distribution"):
        assert instructions(stage, "RUN")[0] == "python -m venv /opt/venv", stage
        assert "PATH=/opt/venv/bin:$PATH" in instructions(stage, "ENV"), stage
    assert "COPY --from=build /opt/venv /opt/venv\n" in stages()["runtime"]
    (environment,) = instructions("runtime", "ENV")
    assert environment.startswith("PATH=/opt/venv/bin:/app/bin:$PATH")


def test_a_strict_umask_of_the_checkout_shuts_nobody_out() -> None:
    assert "--chmod=0755 scripts/monitor_gpu.sh /app/monitor_gpu.sh" in instructions("runtime", "COPY")


def test_image_is_slim_unprivileged_offline_and_watched() -> None:
    assert "ARG BASE_IMAGE=python:3.11-slim" in DOCKERFILE
    assert instructions("runtime", "USER") == ["10001:10001"]
    assert instructions("runtime", "STOPSIGNAL") == ["SIGTERM"]
    assert instructions("runtime", "VOLUME") == ['["/data", "/models"]']
    (environment,) = instructions("runtime", "ENV")
    assert "HF_HUB_OFFLINE=1" in environment
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in environment
    assert "NVIDIA_VISIBLE_DEVICES" not in environment, "it would take every card where nobody gave it one"
    (check,) = instructions("runtime", "HEALTHCHECK")
    assert check.endswith('CMD ["python", "-m", "app", "health"]')
    assert "curl" not in DOCKERFILE
    assert "/app/monitor_gpu.sh" in stages()["runtime"]
    assert "apt-get" not in DOCKERFILE


def test_nobody_after_the_runtime_stage_becomes_root() -> None:
    for stage in ("with-model", "service"):
        assert instructions(stage, "USER") == []
        assert instructions(stage, "RUN") == []


def test_a_model_comes_by_a_build_context_of_its_own() -> None:
    (line,) = instructions("with-model", "COPY")
    assert line == "--from=model --chown=0:0 . /opt/model"
    assert instructions("with-model", "ENV") == ["OWL_SAP_EMBEDDING__MODEL=/opt/model"]
    assert "--build-context model=FOLDER" in DOCKERFILE


def test_labels_say_what_it_is() -> None:
    (labels,) = instructions("service", "LABEL")
    said = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    assert said["title"] == PROJECT["name"]
    assert said["version"] == PROJECT["version"]
    assert said["revision"] == "${REVISION}"
    assert PROJECT["license"] in said["licenses"]
    assert "hdbcli" in said["licenses"]


# ---------------------------------------------------------------------------------------------------- steps in a folder


class Steps:
    """Runs steps of Dockerfile.t4 with `root` in place of `/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("build", "data", "bin", "context"):
            (root / name).mkdir()
        # A script and no link: a venv looks for its library beside the Python that made it.
        python = root / "bin/python"
        python.write_text(f'#!/bin/sh\nexec {shlex.quote(os.path.realpath(sys.executable))} "$@"\n')
        python.chmod(0o755)
        pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
        self.variables = {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root), **pip}

    def here(self, text: str) -> str:
        return re.sub(r"(?<![\w./])/(?=(opt|build|app|data|models)\b)", f"{self.root}/", text)

    def set_variables(self, line: str) -> None:
        for word in shlex.split(self.here(line)):
            name, _, value = word.partition("=")
            self.variables[name] = value.replace("$PATH", self.variables["PATH"])

    def copy(self, line: str) -> None:
        *sources, target = line.split()
        for source in sources:
            for file in (file for file in context() if file == source or file.startswith(source + "/")):
                inside = Path(file).relative_to(source) if file != source else Path(Path(file).name)
                place = self.root / "build" / (target if file != source else ".") / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, place)
                place.chmod(0o600)  # as a checkout with a strict umask has it

    def run(self, command: str, folder: str) -> str:
        command = re.sub(r"--mount=\S+", "", command)
        done = subprocess.run(
            ["sh", "-c", self.here(command)],
            cwd=self.root / folder,
            env=self.variables,
            umask=0o022,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.mark.slow
def test_our_wheel_is_built_and_runs_as_the_dockerfile_does_it(tmp_path: Path) -> None:
    """All steps but the 3 GB of packages, for which those of this environment stand in."""
    steps = Steps(tmp_path)
    for word, line in re.findall(r"^(RUN|ENV|COPY) (.*)$", stages()["distribution"].replace("\\\n", " "), re.M):
        {"RUN": lambda line: steps.run(line, "build"), "ENV": steps.set_variables, "COPY": steps.copy}[word](line)
    shutil.rmtree(tmp_path / "opt/venv")  # the tools stay behind
    steps.run(instructions("build", "RUN")[0], "build")
    (library,) = (tmp_path / "opt/venv/lib").glob("python*/site-packages")
    (library / "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))

    (environment,) = instructions("runtime", "ENV")
    steps.set_variables(environment)
    for command in instructions("runtime", "RUN")[1:]:  # the first one makes the user
        steps.run(command, "data")

    shipped = [file for file in context() if file.startswith(("app/", "connector/"))]
    assert [file for file in shipped if not (tmp_path / "app" / file).is_file()] == []
    for path in (tmp_path / "app").rglob("*"):
        assert path.stat().st_mode & 0o005 == 0o005 or (path.is_file() and path.stat().st_mode & 0o004), path
    entry = " ".join(json.loads(instructions("runtime", "ENTRYPOINT")[0]))
    assert steps.run('python -c "import app; print(app.__file__)"', "data").startswith(f"{tmp_path}/app/app/")
    for command in (entry, "owl-sap"):
        assert PROJECT["version"] in steps.run(f"{command} --version", "data")
    (tmp_path / "data/texts").write_text("steel bolt\n")
    assert steps.run(f"{entry} embed texts", "data").count(",") > 300
