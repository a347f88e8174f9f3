"""deploy_t4_optimized.sh on hosts made of stubs: what it refuses, what it does, and what it never prints."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slow import slow

if TYPE_CHECKING:
    from tests.ops.conftest import Host

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "deploy_t4_optimized.sh"
COMPOSE = "docker compose -f docker-compose.t4-optimized.yml --profile monitoring"


def old_compose(host: Host) -> None:
    host.variables["STUB_COMPOSE"] = "none"


def set_to(**variables: str) -> Callable[[Host], None]:
    return lambda host: host.variables.update(variables)


def remove(path: str) -> Callable[[Host], None]:
    return lambda host: (host.folder / path).unlink()


def write(path: str, text: str, mode: int = 0o600) -> Callable[[Host], None]:
    def do(host: Host) -> None:
        (host.folder / path).parent.mkdir(exist_ok=True)
        (host.folder / path).write_text(text)
        (host.folder / path).chmod(mode)

    return do


def write_env(text: str) -> Callable[[Host], None]:
    return write(".env", text)


def example_host(host: Host) -> None:
    write_env("HANA_USER=u\nHANA_PASSWORD=x1\n")(host)
    write("owl-sap.toml", '[hana]\nhost = "db.example.com"\n')(host)


def with_replica(**variables: str) -> Callable[[Host], None]:
    """A second service runs, and these variables are set."""

    def do(host: Host) -> None:
        (host.folder.parent / "docker/replica").write_text("sha256:zero\n")
        host.variables.update(variables)

    return do


def certificate_beside_a_replica(host: Host) -> None:
    with_replica()(host)
    write("owl-sap.toml", '[api]\ntls_certificate = "/run/secrets/a.crt"\n', 0o644)(host)


def proxy_shut(host: Host) -> None:
    with_replica()(host)
    (host.folder / "deployment/nginx/replicas.conf").chmod(0o600)


REFUSALS: dict[str, tuple[Callable[[Host], object], str, str]] = {
    # situation: (how the host differs, what is wrong, what to do)
    "no docker": (lambda host: host.without("docker"), "docker was not found", "Install Docker Engine"),
    "no daemon": (set_to(STUB_DAEMON="down"), "daemon does not answer", "systemctl start docker"),
    "no compose": (old_compose, "Docker Compose was not found", "docker-compose-plugin"),
    "no nvidia runtime": (set_to(STUB_RUNTIME="runc"), "no NVIDIA runtime", "nvidia-container-toolkit"),
    "no driver": (lambda host: host.without("nvidia-smi"), "nvidia-smi was not found", "R580"),
    "no gpu": (set_to(STUB_GPU=""), "reports no GPU", "nvidia-smi"),
    "no such gpu": (set_to(GPU_DEVICE_ID="7"), "reports no GPU 7", "GPU_DEVICE_ID right"),
    "no number of a gpu": (set_to(GPU_DEVICE_ID="all"), "GPU_DEVICE_ID is no number", ".env"),
    "old driver": (set_to(STUB_DRIVER="470.82.01"), "driver 470.82.01 is too old", "Update the driver"),
    "old card": (set_to(STUB_CAPABILITY="6.1"), "compute capability 6.1", "T4 or newer"),
    "no .env": (remove(".env"), ".env is missing", "cp .env.example .env"),
    "open .env": (lambda host: (host.folder / ".env").chmod(0o644), "every user of this machine", "chmod 600 .env"),
    "windows line ends": (write_env("HANA_HOST=h\r\n"), "line ends of Windows", "sed -i"),
    "key missing": (write_env("HANA_HOST=h\nHANA_USER=u\n"), "no value to HANA_PASSWORD", ".env.example"),
    "key empty": (write_env('HANA_HOST=h\nHANA_USER=u\nHANA_PASSWORD=""\n'), "HANA_PASSWORD", ".env.example"),
    "keys commented out": (write_env("#HANA_HOST=h\n# HANA_USER=u\n"), "HANA_HOST HANA_USER HANA_PASSWORD", "Add"),
    "placeholder": (
        write_env("HANA_HOST=h\nexport HANA_USER='<user>'\nHANA_PASSWORD=ChangeMe\n"),
        "a placeholder for HANA_USER HANA_PASSWORD.",
        "real value",
    ),
    "example host": (example_host, "names the example's host", "HANA_HOST"),
    "example host in .env": (
        write_env("HANA_HOST=db.example.com\nHANA_USER=u\nHANA_PASSWORD=x1\n"),
        "a placeholder for HANA_HOST.",
        "real value",
    ),
    "unquoted dollar": (
        write_env('HANA_HOST=h\nHANA_USER=u\nHANA_PASSWORD="s3cret$canary"\n'),
        "HANA_PASSWORD in .env holds $ or #",
        "single quotes",
    ),
    "named file absent": (
        write_env("HANA_HOST=h\nHANA_USER=u\nHANA_PASSWORD_FILE=/run/secrets/hana_password\n"),
        "HANA_PASSWORD_FILE names a file that is not in the folder secrets",
        "Put it there",
    ),
    "named file elsewhere": (
        write_env("HANA_HOST=h\nHANA_USER=u\nHANA_PASSWORD=x1\nHANA_SSL_TRUST_STORE=/etc/ssl/canary.pem\n"),
        "HANA_SSL_TRUST_STORE names a file that the container does not see",
        "/run/secrets/NAME",
    ),
    "secrets is a file": (write("secrets", "x"), "secrets is no folder", "Move"),
    "open secret": (write("secrets/keys.json", "{}", 0o644), "secrets/keys.json can be read by every user", "chmod o="),
    "configuration shut": (
        lambda host: (host.folder / "owl-sap.toml").chmod(0o600),
        "owl-sap.toml cannot be read by user 10001",
        "chmod 640 owl-sap.toml",
    ),
    "password in an open configuration": (
        write("owl-sap.toml", '[hana]\npassword = "s3cret-canary"\n', 0o644),
        "owl-sap.toml holds the password and every user of this machine can read it",
        "chmod 640 owl-sap.toml",
    ),
    "monitoring shut": (write("monitoring/x.yml", "", 0o640), "monitoring/x.yml cannot be read", "chmod -R o+rX"),
    "receivers absent": (
        set_to(OWL_ALERTMANAGER_CONFIG="./secrets/alertmanager.yml"),
        "OWL_ALERTMANAGER_CONFIG names a file that is not there",
        "copy monitoring/alertmanager/alertmanager.yml",
    ),
    "receivers shut": (
        lambda host: (
            write("secrets/alertmanager.yml", "x")(host),
            set_to(OWL_ALERTMANAGER_CONFIG="./secrets/alertmanager.yml")(host),
        ),
        "cannot be read by group 10001",
        "chmod 640 ./secrets/alertmanager.yml",
    ),
    "receivers by a bare name": (
        set_to(OWL_ALERTMANAGER_CONFIG="alertmanager.yml"),
        "OWL_ALERTMANAGER_CONFIG is no path",
        "./secrets/alertmanager.yml",
    ),
    "CUDA beyond the driver": (
        lambda host: host.variables.update(STUB_DRIVER="535.183.01", OWL_CUDA="13"),
        "OWL_CUDA is 13, which needs driver 580",
        "out of .env",
    ),
    "no configuration": (remove("owl-sap.toml"), "owl-sap.toml is missing", "cp owl-sap.example.toml"),
    "shares of three": (
        with_replica(OWL_API_MEMORY_FRACTION="0.35"),
        "twice OWL_API_MEMORY_FRACTION and OWL_WORKER_MEMORY_FRACTION are 0.9",
        "Lower them",
    ),
    "port of the proxy twice": (with_replica(OWL_REPLICAS_PORT="1"), "and OWL_REPLICAS_PORT are the same port", ".env"),
    "proxy before TLS": (certificate_beside_a_replica, "the proxy speaks no TLS", "Take tls_certificate out"),
    "proxy shut": (proxy_shut, "replicas.conf cannot be read by the proxy", "chmod o+r"),
    "port no number": (set_to(OWL_SAP_API__PORT="70000"), "OWL_SAP_API__PORT is no port", ".env"),
    "one port twice": (set_to(OWL_GRAFANA_PORT="2"), "OWL_PROMETHEUS_PORT and OWL_GRAFANA_PORT are the same", ".env"),
    "build fails": (set_to(STUB_BUILD="fails"), "image could not be built", "left as it is"),
    "no image": (set_to(STUB_BUILT=""), "there is no image owl-sap-connector:t4", "docker load"),
    "gpu not visible": (set_to(STUB_RUN="fails"), "cannot see the GPU", "--gpus all"),
    "keys not made": (set_to(STUB_KEYS="fails"), "keys and passwords could not be made", "message above"),
    "start fails": (set_to(STUB_UP="fails"), "could not be started", "message above"),
    "exits at once": (set_to(STUB_HEALTH="exited "), "(owl-sap-connector-t4: exited )", "docker logs"),
    "unhealthy": (set_to(STUB_HEALTH="running unhealthy"), "did not become ready", "docker logs"),
    "never ready": (set_to(STUB_HEALTH="running starting"), "did not become ready", "docker logs"),
    "worker unhealthy": (set_to(STUB_WORKER="exited "), "not become ready (c-worker: exited )", "docker logs c-worker"),
    "no worker": (set_to(STUB_WORKER="gone"), "not become ready (worker: no such container)", "docker logs worker"),
    "search fails": (set_to(STUB_SEARCH="fails"), "ready, but the search above failed", "app doctor"),
}


OFTEN = {
    *("no docker", "no gpu", "old driver", "no .env", "open .env", "placeholder", "unquoted dollar", "open secret"),
    *("password in an open configuration", "configuration shut", "no configuration", "build fails", "search fails"),
    *("unhealthy", "worker unhealthy", "no worker", "shares of three"),
}
"""The others are looked at in the slow suite: secrets that others could read, and one of each kind, are here."""


@pytest.mark.parametrize(
    "situation", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.slow) for each in REFUSALS]
)
def test_refusal_is_one_line_with_the_fix(host: Host, situation: str) -> None:
    spoil, wrong, fix = REFUSALS[situation]
    spoil(host)
    result = host.run(SCRIPT)
    assert result.returncode == 1, result.stdout + result.stderr
    refusals = [line for line in result.stderr.splitlines() if line.startswith("deploy: ")]
    assert len(refusals) == 1, result.stderr
    assert wrong in refusals[0]
    assert fix in refusals[0]
    assert "canary" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "given",
    [pytest.param("HANA_PASSWORD='a$b #c'", marks=pytest.mark.slow), "HANA_PASSWORD_FILE=/run/secrets/hana_password"],
)
def test_password_or_its_file_is_enough(host: Host, given: str) -> None:
    write("secrets/hana_password", "x")(host)
    (host.folder / ".env").write_text(f"HANA_HOST=h\nHANA_USER=u\n{given}\n")
    result = host.run(SCRIPT, "--dry-run")
    assert result.returncode == 0, result.stderr
    unreadable = "that HANA_PASSWORD_FILE names is not readable by user 10001"
    assert (unreadable in result.stdout) == ("_FILE" in given)
    (host.folder / "secrets/hana_password").chmod(0o604)
    (host.folder / "secrets").chmod(0o700)
    assert unreadable not in host.run(SCRIPT, "--dry-run").stdout


def test_host_and_user_may_emulator_the_configuration(host: Host) -> None:
    (host.folder / ".env").write_text("HANA_PASSWORD=x\n")
    (host.folder / "owl-sap.toml").write_text('[hana]\nhost = "h"\nuser = "u"\n[store]\n')
    assert host.run(SCRIPT, "--dry-run").returncode == 0
    (host.folder / "owl-sap.toml").write_text('[store.hana]\nhost = "h"\nuser = "u"\n')
    assert "HANA_HOST HANA_USER" in host.run(SCRIPT, "--dry-run").stderr


def test_the_examples_as_copied_lack_only_what_is_secret(host: Host) -> None:
    shutil.copyfile(ROOT / ".env.example", host.folder / ".env")
    shutil.copy(ROOT / "owl-sap.example.toml", host.folder / "owl-sap.toml")
    result = host.run(SCRIPT, "--dry-run")
    assert "no value to HANA_PASSWORD." in result.stderr


def test_env_that_its_group_can_read_is_noted(host: Host) -> None:
    (host.folder / ".env").chmod(0o640)
    assert "note: .env can be read by its group: chmod 600 .env" in host.run(SCRIPT, "--dry-run").stdout


def test_env_may_be_a_link_to_a_private_file(host: Host) -> None:
    (host.folder / ".env").rename(host.folder / "production.env")
    (host.folder / ".env").symlink_to("production.env")
    assert host.run(SCRIPT, "--dry-run").returncode == 0
    (host.folder / "production.env").chmod(0o644)
    assert "every user of this machine can read it" in host.run(SCRIPT, "--dry-run").stderr


def test_a_public_certificate_may_be_readable(host: Host) -> None:
    write("secrets/hana_ca.pem", "pem", 0o644)(host)
    assert host.run(SCRIPT, "--dry-run").returncode == 0


# ------------------------------------------------------------------------------------------------------------- ports


@pytest.mark.parametrize(
    ("variable", "service"),
    [
        ("OWL_SAP_API__PORT", "api"),
        pytest.param("OWL_PROMETHEUS_PORT", "prometheus", marks=pytest.mark.slow),
        pytest.param("OWL_GRAFANA_PORT", "grafana", marks=pytest.mark.slow),
        pytest.param("OWL_ALERTMANAGER_PORT", "alertmanager", marks=pytest.mark.slow),
    ],
)
def test_taken_port_is_refused_unless_it_is_ours(host: Host, variable: str, service: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        del host.variables[variable]
        with (host.folder / ".env").open("a") as env:
            env.write(f"{variable}={port}\n")
        refused = host.run(SCRIPT)
        running(host, "sha256:one")
        ours = host.run(SCRIPT)
        host.variables["STUB_PUBLISHES"] = "9"  # our container runs, on another port
        other = host.run(SCRIPT)
    for result in (refused, other):
        assert result.returncode == 1
        assert f"port {port} on 127.0.0.1, for {service}, is taken" in result.stderr
        assert variable in result.stderr
    assert ours.returncode == 0, ours.stderr


@pytest.mark.slow
def test_ports_of_the_monitoring_matter_only_with_it(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host.variables["OWL_GRAFANA_PORT"] = str(listener.getsockname()[1])
        assert host.run(SCRIPT, "--dry-run").returncode == 1
        assert host.run(SCRIPT, "--dry-run", "--no-monitoring").returncode == 0


# --------------------------------------------------------------------------------------------------------- deploying


def running(host: Host, image: str) -> None:
    """As after an earlier deployment of this image."""
    tags = host.folder.parent / "docker/tags"
    tags.mkdir(parents=True, exist_ok=True)
    (tags / "owl-sap-connector:t4").write_text(f"{image}\n")
    (tags.parent / "container").write_text(f"{image}\n")


def tags(host: Host) -> dict[str, str]:
    folder = host.folder.parent / "docker/tags"
    return {path.name.removeprefix("owl-sap-connector:"): path.read_text().strip() for path in folder.iterdir()}


def recreated(host: Host) -> list[str]:
    path = host.folder.parent / "docker/recreated"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def acts(host: Host) -> list[str]:
    """What docker was asked to do; questions left out."""
    questions = ("docker info", "docker inspect", "docker image inspect", "docker ps", "docker compose version")
    return [line for line in host.log.splitlines() if not line.startswith(questions) and " ps" not in line]


def test_deploys_in_order_and_says_where_it_is(host: Host) -> None:
    result = host.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert "ready: http://127.0.0.1:1  " in result.stdout
    assert "Prometheus: http://127.0.0.1:2   Grafana: http://127.0.0.1:3 " in result.stdout
    assert "measured: Tesla T4" in result.stdout
    assert "search in materials: 3 hits" in result.stdout
    done = [line for line in acts(host) if line.startswith("docker")]
    confined = "--user 10001:10001 --read-only"
    starts = [
        f"{COMPOSE} build",
        "docker run --rm --gpus all --network none --entrypoint nvidia-smi owl-sap-connector:t4 -L",
        f"docker run --rm --network none {confined} --cap-drop ALL",
        "docker run --rm --network none --user 0:0 --cap-drop ALL",
        f"docker run --rm --gpus device=0 --network none {confined} --tmpfs /tmp --cap-drop ALL",
        f"{COMPOSE} up -d --no-build",
        f"docker run --rm --network host {confined} --cap-drop ALL",
    ]
    assert len(done) == len(starts)
    for line, start in zip(done, starts, strict=True):
        assert line.startswith(start)


def test_a_second_deployment_restarts_nothing_and_keeps_the_way_back(host: Host) -> None:
    running(host, "sha256:zero")
    assert host.run(SCRIPT).returncode == 0
    before = tags(host)
    assert before == {"t4": "sha256:one", "t4-previous": "sha256:zero"}
    again = host.run(SCRIPT)
    assert again.returncode == 0, again.stderr
    assert tags(host) == before
    assert recreated(host) == ["recreated sha256:one"]
    assert "+ make in the folder secrets" not in again.stdout


@pytest.mark.slow
def test_another_configuration_starts_the_service_anew(host: Host) -> None:
    """Compose sees the name of the mounted file alone: a new collection would never be served."""
    assert host.run(SCRIPT).returncode == 0
    assert recreated(host) == ["recreated sha256:one"]
    (host.folder / "owl-sap.toml").write_text('[[collections]]\nname = "materials"\nsource = "S.MARA"\n')
    for _ in range(2):
        assert host.run(SCRIPT, "--no-build").returncode == 0
        assert recreated(host) == ["recreated sha256:one"] * 2
    (host.folder.parent / "docker/tags/owl-sap-connector:t4-previous").write_text("sha256:zero\n")
    assert host.run(SCRIPT, "--rollback").returncode == 0
    assert recreated(host)[2:] == ["recreated sha256:zero"]


def test_what_containers_read_at_their_start_has_sums_of_its_own(host: Host) -> None:
    """So that a rule that came with `git pull` is in force after the next run."""
    shutil.copytree(ROOT / "monitoring", host.folder / "monitoring")
    config = "monitoring/alertmanager/alertmanager.yml"
    script = (
        f"declare -A setting=([OWL_ALERTMANAGER_CONFIG]={config}); . scripts/lib/deploy/release.sh; export_sums; env"
    )
    host.stub("sums", f"#!/usr/bin/env bash\n{script}\n")

    def sums() -> dict[str, str]:
        told = host.run("../bin/sums").stdout.splitlines()
        return dict(line.split("=", 1) for line in told if line.startswith("OWL_SUM_"))

    before = sums()
    assert sums() == before
    assert len(set(before.values())) == 6
    changed = {
        "SERVICE": "owl-sap.toml",
        "PROXY": "deployment/nginx/replicas.conf",
        "DCGM": "monitoring/dcgm/counters.csv",
        "PROMETHEUS": "monitoring/prometheus/rules/alerts.yml",
        "ALERTMANAGER": config,
        "GRAFANA": "monitoring/grafana/provisioning/datasources/prometheus.yml",
    }
    for name, file in changed.items():
        with (host.folder / file).open("a") as text:
            text.write("# changed\n")
        now = sums()
        assert {key for key in now if now[key] != before[key]} == {f"OWL_SUM_{name}"}
        before = now


@pytest.mark.slow
def test_alerts_that_reach_nobody_are_said(host: Host) -> None:
    assert "Alertmanager: http://127.0.0.1:4   (tells nobody yet: docs/monitoring.md)" in host.run(SCRIPT).stdout
    write("secrets/alertmanager.yml", "route: {receiver: me}\n", 0o604)(host)
    with (host.folder / ".env").open("a") as env:
        env.write("OWL_ALERTMANAGER_CONFIG=./secrets/alertmanager.yml\n")
    told = host.run(SCRIPT, "--no-build")
    assert "Alertmanager: http://127.0.0.1:4\n" in told.stdout, told.stderr


def test_no_build_starts_what_is_there(host: Host) -> None:
    running(host, "sha256:one")
    assert host.run(SCRIPT, "--no-build").returncode == 0
    assert " build" not in "\n".join(acts(host))


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("580.95.05", "13"),
        pytest.param("550.54.14", "12", marks=pytest.mark.slow),
        pytest.param("525.60.13", "12", marks=pytest.mark.slow),
    ],
)
def test_torch_is_chosen_by_the_driver(host: Host, driver: str, cuda: str) -> None:
    host.variables["STUB_DRIVER"] = driver
    assert f"torch for this driver: CUDA {cuda}\n" in host.run(SCRIPT, "--dry-run").stdout


@pytest.mark.parametrize("driver", ["580.95.05", pytest.param("535.183.01", marks=pytest.mark.slow)])
def test_the_cuda_of_env_wins_over_the_drivers(host: Host, driver: str) -> None:
    host.variables["STUB_DRIVER"] = driver
    with (host.folder / ".env").open("a") as env:
        env.write("OWL_CUDA=12\n")
    assert "torch for this driver: CUDA 12\n" in host.run(SCRIPT, "--dry-run").stdout


def test_the_cuda_of_the_build_the_commit_and_pinned_images_reach_compose(host: Host) -> None:
    digest = f"prom/prometheus:v3@sha256:{'0' * 64}"
    write("deployment/images.env", f"# pinned\nOWL_PROMETHEUS_IMAGE={digest}\nOWL_GRAFANA_IMAGE=pinned\n")(host)
    with (host.folder / ".env").open("a") as env:
        env.write("OWL_GRAFANA_IMAGE=mine\n")
    host.variables["STUB_DRIVER"] = "550.54.14"
    shebang, rest = (host.bin / "docker").read_text().split("\n", 1)
    tell = '[[ "$*" != *build ]] || env | grep ^OWL_ >>"$STUB_LOG"'
    host.stub("docker", f"{shebang}\n{tell}\n{rest}")
    host.stub("git", "#!/usr/bin/env bash\necho 0ddba11\n")
    assert host.run(SCRIPT).returncode == 0
    told = dict(line.split("=", 1) for line in host.log.splitlines() if line.startswith("OWL_"))
    assert (told["OWL_CUDA"], told["OWL_REVISION"], told["OWL_PROMETHEUS_IMAGE"]) == ("12", "0ddba11", digest)
    assert "OWL_GRAFANA_IMAGE" not in told  # compose reads it from .env


@pytest.mark.slow
def test_compose_v1_is_used_where_there_is_no_v2(host: Host) -> None:
    old_compose(host)
    told = 'printf "v1 %s\\n" "$DOCKER_BUILDKIT$COMPOSE_DOCKER_CLI_BUILD" >>"$STUB_LOG"'
    host.stub("docker-compose", f'#!/usr/bin/env bash\n{told}\nexec docker compose "$@"\n')
    result = host.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert "+ docker-compose -f docker-compose.t4-optimized.yml --profile monitoring up -d --no-build" in result.stdout
    assert "end of life" in result.stdout
    assert "v1 11\n" in host.log


@pytest.mark.slow
def test_without_monitoring(host: Host) -> None:
    result = host.run(SCRIPT, "--no-monitoring")
    assert result.returncode == 0, result.stderr
    assert "--profile monitoring" not in host.log
    assert "Grafana" not in result.stdout
    assert sorted(path.name for path in (host.folder / "secrets").iterdir()) == ["deploy_key", "keys.json"]


def test_dry_run_changes_nothing(host: Host) -> None:
    before = sorted(host.folder.rglob("*"))
    result = host.run(SCRIPT, "--dry-run", "--apply-gpu-settings")
    assert result.returncode == 0, result.stderr
    assert f"+ {COMPOSE} up -d --no-build" in result.stdout
    assert "+ make in the folder secrets: keys.json deploy_key metrics_token grafana_password" in result.stdout
    assert not acts(host) or all(line.startswith("nvidia-smi") for line in acts(host))
    assert sorted(host.folder.rglob("*")) == sorted({*before, host.folder / "stub.log"})


def test_the_measurement_ends_in_its_container_within_the_bound_that_is_said(host: Host) -> None:
    """Without `timeout` inside, the docker client alone would end."""
    result = host.run(SCRIPT)
    told = re.search(r"measuring the card \((\d+) s at most", result.stdout)
    assert told
    (line,) = (each for each in host.log.splitlines() if "t4_gpu_optimizer" in each)
    assert f" --entrypoint timeout owl-sap-connector:t4 -k 10 {told[1]} sh -c " in line
    assert " --memory 6g " in line


@pytest.mark.slow
def test_a_failed_measurement_does_not_fail_the_deployment(host: Host) -> None:
    host.variables["STUB_MEASURE"] = "fails"
    result = host.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert "note: the card could not be measured; .owl-deploy/deploy.log says why." in result.stdout
    assert "out of memory" in (host.folder / ".owl-deploy/deploy.log").read_text()
    host.variables["OWL_DEPLOY_MEASURE"] = "no"
    assert "measur" not in host.run(SCRIPT).stdout


def test_a_card_in_use_is_not_measured_and_torch_is_read_before_anything_is_replaced(host: Host) -> None:
    running(host, "sha256:zero")
    host.variables |= {"STUB_BUSY": "4711", "STUB_TORCH": "fails"}
    refused = host.run(SCRIPT)
    assert refused.returncode == 1
    assert "torch could not be loaded from the image within 10 minutes" in refused.stderr
    assert recreated(host) == []
    host.variables["STUB_TORCH"] = "works"
    result = host.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert "note: the card is in use, so it was not measured." in result.stdout
    assert "t4_gpu_optimizer" not in host.log


@pytest.mark.parametrize(("free", "code"), [("29", 1), ("31", 0)])
def test_the_disk_holds_what_the_build_writes(host: Host, free: str, code: int) -> None:
    host.stub("df", f"#!/usr/bin/env bash\nprintf 'head\n/dev/sda 0 0 %s 0 /\n' $(({free} * 1048576))\n")
    result = host.run(SCRIPT, "--dry-run")
    assert result.returncode == code
    assert ("29 GiB free in /, the build needs 30" in result.stderr) == bool(code)


@pytest.mark.parametrize(
    ("processors", "given", "worker"), [("16", "", "14"), ("4", "", "2"), *slow(("", "", "2"), ("16", "3", "3"))]
)
def test_the_worker_gets_the_processors_that_the_service_leaves(
    host: Host, processors: str, given: str, worker: str
) -> None:
    shebang, rest = (host.bin / "docker").read_text().split("\n", 1)
    tell = '[[ "$*" != *"up -d"* ]] || printf "worker: %s\n" "${OWL_WORKER_CPUS-}" >>"$STUB_LOG"'
    host.stub("docker", f"{shebang}\n{tell}\n{rest}")
    host.variables["STUB_PROCESSORS"] = processors or "unknown"
    with (host.folder / ".env").open("a") as env:
        env.write(f"OWL_WORKER_CPUS={given}\n")
    assert host.run(SCRIPT).returncode == 0
    assert f"worker: {worker}\n" in host.log


def test_unsynchronised_clock_is_noted(host: Host) -> None:
    host.stub("timedatectl", "#!/usr/bin/env bash\necho no\n")
    assert "the clock is not synchronised" in host.run(SCRIPT, "--dry-run").stdout


@pytest.mark.parametrize("where", [pytest.param("env", marks=pytest.mark.slow), "toml"])
def test_a_certificate_of_the_service_itself_reaches_the_search(host: Host, where: str) -> None:
    path = "/run/secrets/api_cert.pem"
    if where == "env":
        with (host.folder / ".env").open("a") as env:
            env.write(f"OWL_SAP_API__TLS_CERTIFICATE={path}\n")
    else:
        (host.folder / "owl-sap.toml").write_text(f'[api]\ntls_certificate = "{path}"\n')
    shebang, rest = (host.bin / "docker").read_text().split("\n", 1)
    host.stub("docker", f'{shebang}\n[[ "$*" != *deploy_key* ]] || printf "%s\\n" "${{@: -3}}" >>"$STUB_LOG"\n{rest}')
    result = host.run(SCRIPT)
    assert "ready: https://127.0.0.1:1 " in result.stdout
    assert f"\nhttps://127.0.0.1:1\n/run/secrets/deploy_key\n{path}\n" in host.log


def test_help_and_usage(host: Host) -> None:
    assert "usage:" in host.run(SCRIPT, "--help").stdout
    wrong = host.run(SCRIPT, "--dryrun")
    assert wrong.returncode == 2
    assert "usage:" in wrong.stderr


# ----------------------------------------------------------------------------------------------------------- secrets


def test_keys_and_passwords_are_made_once_private_and_never_shown(host: Host) -> None:
    first = host.run(SCRIPT)
    assert first.returncode == 0, first.stderr
    folder = host.folder / "secrets"
    assert folder.stat().st_mode & 0o777 == 0o750
    made = {path.name: path for path in folder.iterdir()}
    assert sorted(made) == ["deploy_key", "grafana_password", "keys.json", "metrics_token"]
    modes = {name: path.stat().st_mode & 0o777 for name, path in made.items()}
    # Prometheus and Grafana read theirs as members of the service's group.
    assert modes == {"keys.json": 0o600, "deploy_key": 0o600, "metrics_token": 0o640, "grafana_password": 0o640}
    before = {name: path.read_bytes() for name, path in made.items()}
    for name in ("deploy_key", "metrics_token", "grafana_password"):
        assert before[name].startswith(b"k3y-canary-")
    owners = {line.split()[2]: line.split()[1] for line in host.log.splitlines() if line.startswith("chown")}
    assert owners.pop("secrets").startswith("10001:")
    assert owners == dict.fromkeys(made, "10001:10001")
    second = host.run(SCRIPT)
    assert {name: path.read_bytes() for name, path in made.items()} == before
    kept = (host.folder / ".owl-deploy/deploy.log").read_text()
    for shown in (first.stdout, first.stderr, second.stdout, second.stderr, host.log, kept):
        assert "canary" not in shown


@pytest.mark.slow
def test_a_lost_key_is_revoked_and_made_again(host: Host) -> None:
    assert host.run(SCRIPT).returncode == 0
    kept = (host.folder / "secrets/metrics_token").read_bytes()
    (host.folder / "secrets/deploy_key").unlink()
    again = host.run(SCRIPT)
    assert "+ make in the folder secrets: deploy_key\n" in again.stdout
    assert [line for line in host.log.splitlines() if line.startswith("revoke")] == ["revoke deploy"]
    assert (host.folder / "secrets/metrics_token").read_bytes() == kept
    assert "restart" not in host.log
    (host.folder / "secrets/metrics_token").unlink()
    assert f"+ {COMPOSE} restart prometheus\n" in host.run(SCRIPT).stdout  # or it would show the old one for ever


@pytest.mark.slow
def test_without_the_file_of_keys_the_keys_are_made_again(host: Host) -> None:
    for name in ("deploy_key", "metrics_token", "grafana_password"):
        write(f"secrets/{name}", "old")(host)
    assert host.run(SCRIPT).returncode == 0
    assert (host.folder / "secrets/deploy_key").read_text() != "old"
    assert (host.folder / "secrets/metrics_token").read_text() != "old"
    assert (host.folder / "secrets/grafana_password").read_text() == "old"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        pytest.param(["--dry-run"], marks=pytest.mark.slow),
        ["--status"],
        pytest.param(["--rollback"], marks=pytest.mark.slow),
    ],
)
def test_no_value_of_env_is_printed(host: Host, arguments: list[str]) -> None:
    running(host, "sha256:one")
    result = host.run(SCRIPT, *arguments)
    for secret in ("s3cret-canary", "hana.test"):
        assert secret not in result.stdout + result.stderr + host.log


def test_scripts_keys_hands_the_verb_to_the_image(host: Host) -> None:
    assert "Deploy first" in host.run("scripts/keys", "list").stderr
    (host.folder / "secrets").mkdir()
    assert host.run("scripts/keys", "create", "bi", "--scope", "search").returncode == 0
    assert "owl-sap-connector:t4 keys create bi --scope search" in host.log
    assert "--user 10001:10001 --read-only" in host.log
    assert host.run("scripts/keys").returncode == 2
