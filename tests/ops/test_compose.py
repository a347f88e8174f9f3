"""The compose file: what each container may do, what is published, and that every variable is described. Read from the
file, for no container was started here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from app.src.core.device import BUILDS
from app.src.observe.gpu import FIRST_LOOK_SECONDS
from app.src.settings import Settings
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.t4-optimized.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = YAML(typ="safe").load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
OURS = ("api", "worker")
REPLICAS = ("replica", "proxy")
MONITORING = ("dcgm-exporter", "prometheus", "alertmanager", "grafana")
PLACEHOLDER = re.compile(r"\$\{([A-Z0-9_]+)(?::-([^}]*))?\}")
each = pytest.mark.parametrize("name", SERVICES)


def described() -> dict[str, str]:
    """Of .env.example: each name and its value, or the example that is commented out."""
    return dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", EXAMPLE, re.M))


def target(mount: str) -> str:
    return mount.split(":")[1]


def test_the_services_and_what_of_them_is_optional() -> None:
    assert set(SERVICES) == {*OURS, *REPLICAS, *MONITORING}
    assert SERVICES["api"]["container_name"] == "owl-sap-connector-t4"
    for name in MONITORING:
        assert SERVICES[name]["profiles"] == ["monitoring"]
    for name in REPLICAS:
        assert SERVICES[name]["profiles"] == ["replicas"]
    for name in OURS:
        assert "profiles" not in SERVICES[name]
        assert SERVICES[name]["image"] == "owl-sap-connector:t4"


@each
def test_a_container_may_do_nothing_that_it_need_not(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["SYS_ADMIN"] if name == "dcgm-exporter" else [])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    for never in ("privileged", "pid", "ipc", "network_mode", "devices", "userns_mode"):
        assert never not in service
    assert not any("docker.sock" in mount for mount in service["volumes"])
    assert service["user"].startswith("0:") == (name == "dcgm-exporter"), "root only where DCGM needs it"


@each
def test_a_container_has_bounds(name: str) -> None:
    service = SERVICES[name]
    assert service["pids_limit"] <= 512
    memory, processors = str(service["mem_limit"]), str(service["cpus"])
    assert re.fullmatch(r"(\$\{\w+:-)?\d+[gm]\}?", memory)
    assert re.fullmatch(r"(\$\{\w+:-)?[\d.]+\}?", processors)
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "5"}
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True


@each
def test_what_is_written_goes_to_a_volume_or_to_a_bounded_tmpfs(name: str) -> None:
    service = SERVICES[name]
    for mount in (PLACEHOLDER.sub(lambda found: found[2], mount) for mount in service["volumes"]):
        if mount.startswith("./"):
            assert mount.endswith(":ro"), mount
        else:
            assert mount.split(":")[0] in COMPOSE["volumes"]
    for mount in service.get("tmpfs", []):
        assert "size=" in mount


def test_only_named_ports_are_published_and_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "api": ["${OWL_PUBLISH:-127.0.0.1}:${OWL_SAP_API__PORT:-8000}:8000"],
        "proxy": ["127.0.0.1:${OWL_REPLICAS_PORT:-8080}:8080"],
        "prometheus": ["127.0.0.1:${OWL_PROMETHEUS_PORT:-9090}:9090"],
        "grafana": ["127.0.0.1:${OWL_GRAFANA_PORT:-3000}:3000"],
        "alertmanager": ["127.0.0.1:${OWL_ALERTMANAGER_PORT:-9093}:9093"],
    }


def test_the_counters_of_the_card_are_reached_by_prometheus_alone() -> None:
    assert COMPOSE["networks"]["gpu"] == {"internal": True}
    assert [name for name, service in SERVICES.items() if "gpu" in service["networks"]] == [
        "dcgm-exporter",
        "prometheus",
    ]
    assert SERVICES["dcgm-exporter"]["networks"] == ["gpu"]


def test_the_service_listens_inside_with_keys_and_leaves_jobs_to_the_worker() -> None:
    environment = SERVICES["api"]["environment"]
    assert (environment["OWL_SAP_API__HOST"], environment["OWL_SAP_API__PORT"]) == ("0.0.0.0", "8000")
    assert environment["OWL_SAP_ACCESS__KEYS"] == "/run/secrets/keys.json"
    assert "./secrets:/run/secrets:ro" in SERVICES["api"]["volumes"], "a single file would not show a rotated key"
    assert environment["OWL_SAP_API__JOB_WORKERS"] == "0"
    assert environment["OWL_SAP_API__RUN_SCHEDULES"] == "false"
    assert SERVICES["api"]["command"] == ["start", "serve"]
    assert SERVICES["worker"]["command"] == ["start", "worker"]


def test_the_replica_is_as_the_service_and_the_proxy_leads_to_both() -> None:
    api, replica = dict(SERVICES["api"]), dict(SERVICES["replica"])
    own = {"build", "container_name", "ports", "profiles", "networks"}
    assert {key: value for key, value in replica.items() if key not in own} == {
        key: value for key, value in api.items() if key not in own
    }
    assert set(replica["networks"]) == set(api["networks"])
    assert "data:/data" in replica["volumes"], "one file of job records, and one kernel"
    text = (ROOT / "deployment/nginx/replicas.conf").read_text(encoding="utf-8")
    port = api["environment"]["OWL_SAP_API__PORT"]
    assert re.findall(r"^\s+server (\S+) resolve max_fails=0;", text, re.M) == [f"api:{port}", f"replica:{port}"]
    assert "non_idempotent" not in text
    wait = re.search(r"proxy_read_timeout (\d+)s", text)
    assert wait is not None
    assert int(wait[1]) > Settings().api.timeout
    assert set(SERVICES["proxy"]["networks"]) & set(replica["networks"]) & set(api["networks"])


def test_torch_and_numpy_start_no_more_threads_than_processors() -> None:
    """They count the host's processors, and more threads than the container's quota stall for most of each period."""
    for name in OURS:
        assert SERVICES[name]["environment"]["OMP_NUM_THREADS"] == SERVICES[name]["cpus"]


def test_the_guides_variables_of_workers_reach_the_worker() -> None:
    environment = SERVICES["worker"]["environment"]
    for name in ("WORKER_CONCURRENCY", "WORKER_MAX_TASKS_PER_CHILD", "USE_GPU"):
        assert environment[name].startswith(f"${{{name}:-")


def test_both_processes_fit_on_one_card() -> None:
    """A CUDA context of up to 0.5 GB each lies outside of the fractions; a T4 shows about 14.9 GiB."""
    told = [SERVICES[name]["environment"]["OWL_SAP_EMBEDDING__MEMORY_FRACTION"] for name in OURS]
    fractions = [float(PLACEHOLDER.sub(lambda found: found[2], text)) for text in told]
    assert sum(fractions) * 14.9 + 2 * 0.5 < 14.9
    assert sum(fractions) < 0.9
    for name in OURS:
        assert SERVICES[name]["deploy"]["resources"]["reservations"]["devices"] == [
            {"driver": "nvidia", "device_ids": ["${GPU_DEVICE_ID:-0}"], "capabilities": ["gpu"]}
        ]
        # Of several cards the container sees that one alone, and there it is number 0, whatever .env says.
        assert SERVICES[name]["environment"]["GPU_DEVICE_ID"] == "0"


def test_own_settings_in_the_file_are_values_that_they_take() -> None:
    for name in OURS:
        for variable, text in SERVICES[name]["environment"].items():
            if not variable.startswith("OWL_SAP_") or variable == "OWL_SAP_CONFIG":
                continue
            section, _, key = variable.removeprefix("OWL_SAP_").lower().partition("__")
            model = Settings.model_fields[section].annotation
            assert model is not None
            model.model_validate({key: PLACEHOLDER.sub(lambda found: found[2] or "", text)})


def test_grafana_has_no_default_password_and_tells_nobody() -> None:
    grafana = SERVICES["grafana"]
    environment = grafana["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"
    assert grafana["secrets"] == ["grafana_password"]
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment
    for name in ("AUTH_ANONYMOUS_ENABLED", "USERS_ALLOW_SIGN_UP", "ANALYTICS_REPORTING_ENABLED"):
        assert environment[f"GF_{name}"] == "false"
    for name in ("CHECK_FOR_UPDATES", "CHECK_FOR_PLUGIN_UPDATES"):
        assert environment[f"GF_ANALYTICS_{name}"] == "false"


def test_secrets_are_files_kept_out_of_git_and_of_the_image() -> None:
    assert COMPOSE["secrets"] == {
        "metrics_token": {"file": "./secrets/metrics_token"},
        "grafana_password": {"file": "./secrets/grafana_password"},
    }
    for name in (".gitignore", ".dockerignore"):
        assert "secrets/" in (ROOT / name).read_text(encoding="utf-8").splitlines()
    for service in SERVICES.values():
        for variable in service.get("environment", {}):
            assert not re.search(r"PASSWORD$|TOKEN$|SECRET$|API_KEY$|^HANA_", variable), variable


def test_prometheus_is_bounded_and_reads_what_monitoring_holds() -> None:
    prometheus = SERVICES["prometheus"]
    assert "./monitoring/prometheus:/etc/prometheus:ro" in prometheus["volumes"]
    assert any(word.startswith("--storage.tsdb.retention.size=") for word in prometheus["command"])
    assert prometheus["secrets"] == ["metrics_token"]
    assert not any("enable-lifecycle" in word or "enable-admin" in word for word in prometheus["command"])


def test_prometheus_asks_services_of_its_networks_where_they_listen() -> None:
    scrapes = YAML(typ="safe").load((ROOT / "monitoring" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    targets = [
        target for job in scrapes["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    (api,) = [job for job in scrapes["scrape_configs"] if job["job_name"] == "owl-sap-api"]
    # By its name, which is not known while it does not run: a fixed target would be missed without the profile.
    (found,) = api["dns_sd_configs"]
    (relabelled,) = api["relabel_configs"]
    assert found["names"] == SERVICES["replica"]["networks"]["monitoring"]["aliases"]
    assert SERVICES["prometheus"]["dns_search"] == ".", "the token would go to a host of that name in a search domain"
    assert relabelled["source_labels"] == ["__meta_dns_name"], "which a fixed target has not"
    for name in found["names"]:
        match = re.fullmatch(relabelled["regex"], name)
        assert match is not None
        targets.append(match.expand(relabelled["replacement"].replace("$", "\\")))
    assert targets[-1].endswith(f":{found['port']}")
    ports = {
        "api": SERVICES["api"]["environment"]["OWL_SAP_API__PORT"],
        "replica": SERVICES["replica"]["environment"]["OWL_SAP_API__PORT"],
        "worker": SERVICES["worker"]["environment"]["OWL_SAP_WORKER__METRICS_PORT"],
        "dcgm-exporter": "9400",
        "localhost": "9090",
    }
    assert sorted(targets) == sorted(f"{name}:{port}" for name, port in ports.items())
    for name in ("api", "replica", "worker", "dcgm-exporter"):
        assert set(SERVICES[name]["networks"]) & set(SERVICES["prometheus"]["networks"]), name
    tokens = {job["authorization"]["credentials_file"] for job in scrapes["scrape_configs"] if "authorization" in job}
    assert tokens == {"/run/secrets/metrics_token"}


@each
def test_health_checks_and_who_waits_for_whom(name: str) -> None:
    service = SERVICES[name]
    for other, how in service.get("depends_on", {}).items():
        assert other in SERVICES
        # Waiting for health would make `up` itself fail, before anybody looks whether to go back.
        assert how == {"condition": "service_started"}
    if name in ("api", "replica"):
        assert "healthcheck" not in service, "the image's own"
    elif name == "dcgm-exporter":
        assert service["image"].endswith("-distroless}"), "has no shell for one"
    else:
        assert service["healthcheck"]["test"][0] == "CMD"


def test_a_first_start_on_a_slow_disk_is_waited_for() -> None:
    """The look at the card and two minutes of loading, then three failed checks before the deployment gives up."""
    dockerfile, release = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile.t4", "scripts/lib/deploy/release.sh")
    )
    period = re.search(r"--interval=(\d+)s .*--start-period=(\d+)s --retries=(\d+)", dockerfile)
    patience = re.search(r"OWL_DEPLOY_WAIT:-(\d+)", release)
    assert period
    assert patience
    interval, start, retries = map(int, period.groups())
    assert start >= FIRST_LOOK_SECONDS + 120
    assert int(patience[1]) >= start + interval * retries
    check = SERVICES["worker"]["healthcheck"]
    assert (check["interval"], check["start_period"], check["retries"]) == (f"{interval}s", f"{start}s", retries)


@each
def test_images_of_others_are_pinned_by_a_tag_and_can_be_pinned_by_digest(name: str) -> None:
    if name in (*OURS, "replica"):
        return
    found = PLACEHOLDER.fullmatch(SERVICES[name]["image"])
    assert found
    assert re.fullmatch(r"OWL_[A-Z]+_IMAGE", found[1]), "scripts/pin-images finds it by this name"
    assert re.search(r":v?\d+\.\d+\.\d+", found[2])


def test_build_arguments_are_those_of_the_dockerfile() -> None:
    dockerfile = (ROOT / "Dockerfile.t4").read_text(encoding="utf-8")
    build = SERVICES["api"]["build"]
    for name, text in build["args"].items():
        default = re.search(rf'^ARG {name}="?([^"\n]*)"?$', dockerfile, re.M)
        found = PLACEHOLDER.fullmatch(text)
        assert default
        assert found
        assert found[2] == default[1], name
    assert f" AS {build['target']}\n" in dockerfile
    assert any(each.driver == 580 for each in BUILDS), "the driver floor that .env.example names"


# ------------------------------------------------------------------------------------------------------ .env.example


def test_every_variable_of_the_compose_file_is_described_with_its_default() -> None:
    names = described()
    for name, default in PLACEHOLDER.findall(TEXT):
        assert name in names, f"{name} is not in .env.example"
        assert names[name] == default, name


def test_every_variable_of_the_guides_and_of_hana_is_described_unless_it_does_nothing() -> None:
    names = described()
    for variable in (*VARIABLES, *GUIDE_VARIABLES):
        if variable.assign is not None:
            assert variable.name in names, f"{variable.name} is not in .env.example"


def test_paths_that_the_example_gives_are_mounted() -> None:
    paths = [value for value in described().values() if value.startswith("/")]
    assert len(paths) >= 2
    for path in paths:
        for name in OURS:
            assert any(path.startswith(target(mount) + "/") for mount in SERVICES[name]["volumes"]), path


def test_the_example_holds_no_secret() -> None:
    for name, value in described().items():
        if re.search(r"PASSWORD$|TOKEN$|SECRET$", name):
            assert value == "", name
