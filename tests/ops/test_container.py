"""What Dockerfile.t4 and the compose file promise, read from the files: no image is built here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile.t4").read_text(encoding="utf-8")
COMPOSE = (ROOT / "docker-compose.t4-optimized.yml").read_text(encoding="utf-8")


def api() -> dict[str, Any]:
    service: dict[str, Any] = YAML(typ="safe").load(COMPOSE)["services"]["api"]
    return service


def copied() -> set[str]:
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)
    return {source for line in lines for source in line.split()[:-1]}


def test_everything_copied_exists_and_reaches_the_build() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in copied():
        assert (ROOT / source).exists()
        assert source in allowed


def test_build_context_holds_no_secret() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    first = next(line for line in lines if not line.startswith("#"))
    assert first == "*"
    assert "**/.env*" in lines
    assert not re.search(r"(?i)(ENV|ARG)\s+\S*(PASSWORD|SECRET|API_KEY|HANA_)", DOCKERFILE)


def test_folder_of_secrets_is_mounted_read_only_and_kept_out_of_git_and_image() -> None:
    assert "./secrets:/run/secrets:ro" in api()["volumes"]
    for name in (".gitignore", ".dockerignore"):
        assert "secrets/" in (ROOT / name).read_text().splitlines()


def test_paths_that_the_example_gives_are_mounted() -> None:
    targets = [mount.split(":")[1] for mount in api()["volumes"]]
    paths = re.findall(r"^#?[A-Z_]+=(/\S+)$", (ROOT / ".env.example").read_text(), re.M)
    assert len(paths) >= 2
    for path in paths:
        assert any(path.startswith(target + "/") for target in targets), path


def test_image_holds_our_distribution_so_that_the_version_is_known() -> None:
    stage, last = DOCKERFILE.split("AS distribution")[1].rsplit("\nFROM ", 1)
    target = re.search(r"^RUN pip install --no-deps --target (\S+) \.$", stage, re.M)
    assert target
    assert f"COPY --from=distribution {target[1]} /app\n" in last
    assert "PYTHONPATH=/app " in last
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "app", "connector", project["readme"]} <= copied()


def test_image_is_slim_unprivileged_offline_and_watched() -> None:
    assert "ARG BASE_IMAGE=python:3.11-slim" in DOCKERFILE
    last_stage = DOCKERFILE.rsplit("\nFROM ", 1)[1]
    assert "USER 10001:10001" in last_stage
    assert "HF_HUB_OFFLINE=1" in last_stage
    assert "/health/ready" in last_stage
    assert "curl" not in last_stage
    assert "/app/monitor_gpu.sh" in last_stage


def test_image_takes_its_dependencies_from_pyproject() -> None:
    program = re.search(r'python -c "(import tomllib;.*?)" >', DOCKERFILE)
    assert program
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"o\['(\w+)'\]", program[1]):
        assert extra in extras
    assert "index-url" not in DOCKERFILE


def test_container_is_hardened() -> None:
    service = api()
    assert service["container_name"] == "owl-sap-connector-t4"
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "10001:10001"
    assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
    assert "privileged" not in service


def test_service_listens_on_the_hosts_loopback_only() -> None:
    # Without authentication it refuses other addresses, and a bridge network could not reach its loopback.
    service = api()
    assert service["network_mode"] == "host"
    assert "ports" not in service
    assert service["command"][-2:] == ["--host", "127.0.0.1"]


def test_one_gpu_is_reserved() -> None:
    devices = api()["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def test_compose_holds_no_value_that_belongs_into_env() -> None:
    assert api()["env_file"] == ".env"
    assert "HANA" not in " ".join(api()["environment"])


def test_torch_of_image_and_compose_and_deploy_agree() -> None:
    torch = re.search(r"^ARG TORCH=(.*)$", DOCKERFILE, re.M)
    assert torch
    assert f"${{OWL_TORCH:-{torch[1]}}}" in COMPOSE
    assert f"torch_spec='{torch[1]}'" in (ROOT / "scripts/lib/deploy/host.sh").read_text()
