"""What Dockerfile.t4 promises, read from the file: no image was built here. What its commands do is tested by running
them, in tests/surface/test_containers.py.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

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


def test_everything_copied_exists_and_reaches_the_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in copied():
        assert (ROOT / source).exists()
        assert any(source == name or source.startswith(name + "/") for name in allowed), source


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
