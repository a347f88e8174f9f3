"""deployment/kubernetes, without a cluster: every manifest by Kubernetes' own schemas, what kustomize makes of the
overlays, each point of hardening, and that names agree with the product (settings, metrics, ports, keys of Secrets)."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML

from app.src.observe.gpu import FIRST_LOOK_SECONDS
from app.src.observe.metrics import Metrics
from app.src.scaling.cluster import LEAST_STORE
from app.src.settings import Settings, SettingsError, load
from scripts.lib import locks

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deployment/kubernetes"
OVERLAYS = sorted(path.parent for path in FOLDER.glob("overlays/*/kustomization.yaml"))
KUSTOMIZATIONS = sorted(FOLDER.rglob("kustomization.yaml"))
PATCHES = sorted(FOLDER.rglob("patch-*.yaml"))
MANIFESTS = sorted({*FOLDER.rglob("*.yaml")} - {*KUSTOMIZATIONS, *PATCHES})
OPERATORS_KINDS = {"PodMonitor", "RayCluster"}
"""Their schemas are the Prometheus operator's and KubeRay's, not Kubernetes'."""
OLDEST = "1.31"
FEW_OVERLAYS = [
    each if each.name == "search-replicas" else pytest.param(each, marks=pytest.mark.slow) for each in OVERLAYS
]
Document = dict[str, Any]


def documents(text: str) -> list[Document]:
    return [document for document in YAML(typ="safe").load_all(text) if document is not None]


@functools.cache
def parsed(path: Path) -> list[Document]:
    return documents(path.read_text(encoding="utf-8"))


def read(path: Path) -> list[Document]:
    return copy.deepcopy(parsed(path))


def only(path: Path) -> Document:
    (document,) = read(path)
    return document


@functools.cache
def built(overlay: Path) -> tuple[Document, ...]:
    """What `kubectl kustomize` makes of it. Skips by name without kubectl; the checks of the sources remain."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here: what kustomize makes of the overlays was not looked at, the sources were")
    command = ["kubectl", "kustomize", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(documents(done.stdout))


def name_of(path: Path) -> str:
    return str(path.relative_to(FOLDER))


# -------------------------------------------------------------------------------------------------- schemas, kustomize


NEWEST = kubernetes_validate.latest_version()


def check_schema(document: Document, *versions: str) -> None:
    if document["kind"] not in OPERATORS_KINDS:
        for version in versions or (OLDEST, NEWEST):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", [*MANIFESTS, *PATCHES], ids=name_of)
def test_manifest_is_as_its_schema_says(path: Path) -> None:
    for document in read(path):
        if path in PATCHES:  # a patch lacks what its target has
            spec = document["spec"]
            spec["selector"] = {}
            for container in spec["template"]["spec"].setdefault("containers", []):
                container.setdefault("image", "any")
        check_schema(document)


def test_the_schema_check_can_fail() -> None:
    document = only(FOLDER / "base/deployment.yaml")
    document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(document)


@pytest.mark.parametrize("overlay", FEW_OVERLAYS, ids=name_of)
def test_what_kustomize_makes_is_as_its_schema_says(overlay: Path) -> None:
    for document in built(overlay):
        if document["kind"] == "Deployment":  # the others are as they were, but for namespace and labels
            check_schema(document, NEWEST)


def sources(kustomization: Path, seen: set[Path]) -> Iterator[Document]:
    """Every resource that it names, by way of others too. Without kustomize."""
    content = only(kustomization)
    for entry in [*content.get("resources", []), *content.get("components", [])]:
        path = (kustomization.parent / entry).resolve()
        inner = path / "kustomization.yaml" if path.is_dir() else path
        assert inner.is_file(), f"{name_of(kustomization)} names {entry}, which is not there"
        if inner not in seen:
            seen.add(inner)
            yield from sources(inner, seen) if path.is_dir() else read(inner)


@pytest.mark.parametrize("overlay", [*OVERLAYS, FOLDER / "base"], ids=name_of)
def test_all_that_a_kustomization_names_is_there(overlay: Path) -> None:
    seen: set[Path] = set()
    found = {
        (document["kind"], document["metadata"]["name"]) for document in sources(overlay / "kustomization.yaml", seen)
    }
    assert ("Deployment", "owl-sap") in found
    for kustomization in (
        path for path in {*seen, overlay / "kustomization.yaml"} if path.name == "kustomization.yaml"
    ):
        content = only(kustomization)
        for generator in content.get("configMapGenerator", []):
            for file in generator["files"]:
                assert (kustomization.parent / file).is_file()
        for patch in content.get("patches", []):
            (document,) = read(kustomization.parent / patch["path"]) if "path" in patch else documents(patch["patch"])
            target = patch.get("target") or {"kind": document["kind"], "name": document["metadata"]["name"]}
            assert [kind for kind, name in found if kind == target["kind"] and target.get("name", name) == name]


def test_every_manifest_is_used_by_an_overlay_but_the_example_of_secrets() -> None:
    seen: set[Path] = set()
    for overlay in OVERLAYS:
        list(sources(overlay / "kustomization.yaml", seen))
    assert set(MANIFESTS) - seen == {FOLDER / "secret.example.yaml"}
    patches = {
        (path.parent / patch["path"]).resolve()
        for path in KUSTOMIZATIONS
        for patch in only(path).get("patches", [])
        if "path" in patch
    }
    assert patches == set(PATCHES)


@pytest.mark.parametrize("overlay", FEW_OVERLAYS, ids=name_of)
def test_everything_is_built_into_the_namespace_with_the_image_and_the_configuration(overlay: Path) -> None:
    made = built(overlay)
    (config,) = [document for document in made if document["kind"] == "ConfigMap"]
    assert re.fullmatch(r"owl-sap-config-[0-9a-z]{10}", config["metadata"]["name"])
    assert config["data"]["owl-sap.toml"] == (FOLDER / "base/owl-sap.toml").read_text(encoding="utf-8")
    for document in made:
        assert document["metadata"].get("namespace") == (None if document["kind"] == "Namespace" else "owl-sap")
    for document in (document for document in made if document["kind"] == "Deployment"):
        pod = document["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == "registry.invalid/owl-sap-connector:t4"
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "config")
        assert volume["configMap"]["name"] == config["metadata"]["name"], "a changed file starts the pods anew"
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "Tesla-T4"}
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


# ----------------------------------------------------------------------------------------------------------- hardening

DEPLOYMENTS = [document for path in MANIFESTS for document in read(path) if document["kind"] == "Deployment"]
pods = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda document: document["metadata"]["name"])
RAY = only(FOLDER / "components/ray/raycluster.yaml")
RAY_SYNC = only(FOLDER / "components/ray/sync.yaml")
RAY_PODS: list[Document] = [
    {"metadata": {"name": name}, "spec": {"template": template}}
    for name, template in (
        ("ray-head", RAY["spec"]["headGroupSpec"]["template"]),
        ("ray-worker", RAY["spec"]["workerGroupSpecs"][0]["template"]),
        ("ray-sync", RAY_SYNC["spec"]["jobTemplate"]["spec"]["template"]),
    )
]
"""In the form of a Deployment."""
pods_of_ray = pytest.mark.parametrize("deployment", RAY_PODS, ids=lambda document: document["metadata"]["name"])
all_pods = pytest.mark.parametrize(
    "deployment", [*DEPLOYMENTS, *RAY_PODS], ids=lambda document: document["metadata"]["name"]
)
PERMITTED_VOLUMES = {"configMap", "secret", "persistentVolumeClaim", "emptyDir"}


def pod_of(deployment: Document) -> Document:
    pod: Document = deployment["spec"]["template"]["spec"]
    return pod


def container_of(deployment: Document) -> Document:
    (container,) = pod_of(deployment)["containers"]
    assert isinstance(container, dict)
    return container


def test_there_are_the_three_deployments() -> None:
    assert {document["metadata"]["name"] for document in DEPLOYMENTS} == {"owl-sap", "owl-sap-worker", "owl-sap-search"}


@all_pods
def test_pod_meets_the_restricted_standard(deployment: Document) -> None:
    pod, container = pod_of(deployment), container_of(deployment)
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
    }
    for field in ("hostNetwork", "hostPID", "hostIPC", "initContainers", "shareProcessNamespace"):
        assert field not in pod
    assert "hostPort" not in str(container.get("ports"))
    for volume in pod["volumes"]:
        assert set(volume) - {"name"} <= PERMITTED_VOLUMES


def test_namespace_enforces_it() -> None:
    labels = only(FOLDER / "base/namespace.yaml")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@all_pods
def test_pod_has_no_rights_in_the_cluster(deployment: Document) -> None:
    pod = pod_of(deployment)
    account = only(FOLDER / "base/serviceaccount.yaml")
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is False
    assert account["automountServiceAccountToken"] is False
    assert not [path for path in MANIFESTS for document in read(path) if "Role" in document["kind"]]


@pods
def test_pod_has_one_gpu_and_bounds(deployment: Document) -> None:
    resources = container_of(deployment)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 1
    for resource in ("memory", "ephemeral-storage"):
        assert resource in resources["limits"]
        assert resource in resources["requests"]
    assert "cpu" in resources["requests"]
    for volume in pod_of(deployment)["volumes"]:
        assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]


@pods
def test_only_data_and_tmp_can_be_written(deployment: Document) -> None:
    container = container_of(deployment)
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/data", "/tmp"}
    volumes = {volume["name"] for volume in pod_of(deployment)["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


@pods
def test_probes_name_ports_and_routes_that_there_are(deployment: Document) -> None:
    container = container_of(deployment)
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "liveness")}
    if "readinessProbe" in container:
        probes["readiness"] = container["readinessProbe"]
        assert ports == {"http": int(variables["OWL_SAP_API__PORT"])}
        assert variables["OWL_SAP_API__HOST"] == "0.0.0.0"
        assert probes["readiness"]["httpGet"] == {"path": "/health/ready", "port": "http"}
        for kind in ("startup", "liveness"):
            assert probes[kind]["httpGet"] == {"path": "/health/live", "port": "http"}
    else:
        assert ports == {"metrics": int(variables["OWL_SAP_WORKER__METRICS_PORT"])}
        assert variables["OWL_SAP_WORKER__METRICS_HOST"] == "0.0.0.0"
        assert all("exec" in probe for probe in probes.values())
    # Reading torch and loading a model take minutes on a slow volume; a hanging store must not have the pod killed.
    assert probes["startup"]["failureThreshold"] * probes["startup"]["periodSeconds"] >= FIRST_LOOK_SECONDS + 300
    assert probes["liveness"]["failureThreshold"] * probes["liveness"]["periodSeconds"] >= 60


@pods
def test_pod_may_take_its_time_to_end(deployment: Document) -> None:
    stop = (
        container_of(deployment).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    )
    bound = Settings().model_dump()["api"].get("shutdown_seconds", 3)
    assert pod_of(deployment)["terminationGracePeriodSeconds"] >= int(stop[1]) + bound + 30


def test_no_secret_has_a_value_here() -> None:
    for path in MANIFESTS:
        for document in read(path):
            if document["kind"] == "Secret":
                assert path.name == "secret.example.yaml"
                assert all(re.fullmatch(r"<[^<>]+>", value) for value in document["stringData"].values())
    text = "".join(path.read_text(encoding="utf-8") for path in KUSTOMIZATIONS)
    assert "secretGenerator" not in text
    assert "secret.example" not in text


# ------------------------------------------------------------------------------------------------------- names agree


def of_kind(kind: str) -> list[Document]:
    return [document for path in MANIFESTS for document in read(path) if document["kind"] == kind]


@pods
def test_secrets_and_claims_that_are_mounted_are_described(deployment: Document) -> None:
    example = {document["metadata"]["name"]: set(document["stringData"]) for document in of_kind("Secret")}
    claims = {document["metadata"]["name"] for document in of_kind("PersistentVolumeClaim")}
    container = container_of(deployment)
    files = {
        entry["name"]: Path(entry["value"]) for entry in container["env"] if entry["value"].startswith("/run/secrets")
    }
    assert len(files) == 4
    mounts = {Path(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(deployment)["volumes"]}
    for path in files.values():
        secret = volumes[mounts[path.parent]]["secret"]
        assert path.name in example[secret["secretName"]]
        assert secret["defaultMode"] == 0o440
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in claims


@pods
def test_the_settings_that_a_pod_gets_are_understood(deployment: Document, tmp_path: Path) -> None:
    """By the product itself: a variable that it does not know, or that comes too late, is an error."""
    given = {}
    for entry in container_of(deployment)["env"]:
        given[entry["name"]] = entry["value"]
        if entry["name"].endswith("_FILE"):
            file = tmp_path / entry["name"]
            file.write_text("any.host\n")
            given[entry["name"]] = str(file)
    given["OWL_SAP_CONFIG"] = str(FOLDER / "base/owl-sap.toml")
    settings = load(environ=given, folder=tmp_path).settings
    assert (settings.hana.host, settings.store.kind) == ("any.host", "hana")
    assert settings.embedding.expect_gpu
    assert settings.access.keys == Path("/run/secrets/keys/keys.json")
    assert settings.state.path == Path("/data/state")
    if deployment["metadata"]["name"] == "owl-sap-worker":
        assert (settings.worker.metrics_host, settings.worker.metrics_port) == ("0.0.0.0", 8001)
        assert settings.access.configured, "or it would refuse that address"
    if deployment["metadata"]["name"] == "owl-sap-search":
        assert (settings.api.job_workers, settings.api.run_schedules) == (0, False)


def test_the_clusters_OWN_VARIABLES_would_be_refused(tmp_path: Path) -> None:
    """Why enableServiceLinks is false: for a Service owl-sap the cluster sets such variables in every pod."""
    with pytest.raises(SettingsError, match="OWL_SAP_SERVICE_HOST"):
        load(environ={"OWL_SAP_SERVICE_HOST": "10.0.0.1"}, folder=tmp_path)
    for deployment in (*DEPLOYMENTS, *RAY_PODS):
        assert pod_of(deployment)["enableServiceLinks"] is False


def test_services_budgets_policies_and_the_autoscaler_find_their_pods() -> None:
    components = {
        document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for document in DEPLOYMENTS
    }
    for document in DEPLOYMENTS:
        assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
    selectors = [document["spec"]["selector"] for document in of_kind("Service")]
    selectors += [document["spec"]["selector"]["matchLabels"] for document in of_kind("PodDisruptionBudget")]
    assert len(selectors) == 4
    for selector in selectors:
        assert set(selector) == {"app.kubernetes.io/component"}
        assert selector["app.kubernetes.io/component"] in components
    for document in of_kind("Service"):
        assert [port["targetPort"] for port in document["spec"]["ports"]] == ["http"]
        assert document["spec"]["type"] == "ClusterIP"
    (autoscaler,) = of_kind("HorizontalPodAutoscaler")
    assert autoscaler["spec"]["scaleTargetRef"]["name"] in {document["metadata"]["name"] for document in DEPLOYMENTS}


def test_the_network_is_closed_but_for_clients_names_and_hana() -> None:
    policies = {document["metadata"]["name"]: document["spec"] for document in of_kind("NetworkPolicy")}
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (ingress,) = policies["allow-clients"]["ingress"]
    assert ingress["ports"] == [{"port": "http", "protocol": "TCP"}]
    for peer in ingress["from"]:
        assert {"namespaceSelector", "podSelector"} == set(peer), "both must fit"
    names, hana = policies["allow-dns-and-hana"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert hana["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert "169.254.0.0/16" in hana["to"][0]["ipBlock"]["except"]
    assert policies["allow-dns-and-hana"]["policyTypes"] == ["Egress"]


def test_one_pod_owns_the_records_of_jobs() -> None:
    """SQLite and kernel locks: one machine, and never two generations of a pod at once."""
    by_name = {document["metadata"]["name"]: document for document in DEPLOYMENTS}
    for name in ("owl-sap", "owl-sap-worker"):
        assert by_name[name]["spec"]["replicas"] == 1
        assert by_name[name]["spec"]["strategy"] == {"type": "Recreate"}
    (together,) = pod_of(by_name["owl-sap-worker"])["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert together["topologyKey"] == "kubernetes.io/hostname"
    assert together["labelSelector"]["matchLabels"] == by_name["owl-sap"]["spec"]["selector"]["matchLabels"]
    search = by_name["owl-sap-search"]
    assert "replicas" not in search["spec"], "the autoscaler's; kubectl apply would set it back"
    data = next(volume for volume in pod_of(search)["volumes"] if volume["name"] == "data")
    assert "emptyDir" in data
    assert search["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_replicas_share_records_in_hana_and_no_disk() -> None:
    made = built(FOLDER / "overlays/replicas")
    (deployment,) = [document for document in made if document["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    pod, variables = pod_of(deployment), container_of(deployment)["env"]
    assert {"name": "OWL_SAP_STATE__RECORDS", "value": "store"} in variables
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(volumes["data"]) == {"name", "emptyDir"}
    assert volumes["models"]["persistentVolumeClaim"]["readOnly"] is True
    claims = [document["metadata"]["name"] for document in made if document["kind"] == "PersistentVolumeClaim"]
    assert claims == ["owl-sap-models"]
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"] == deployment["spec"]["selector"]


def test_split_worker_takes_the_jobs_from_the_service() -> None:
    patch = only(FOLDER / "components/split-worker/patch-api.yaml")
    names = {entry["name"]: entry["value"] for entry in patch["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert names == {"OWL_SAP_API__JOB_WORKERS": "0", "OWL_SAP_API__RUN_SCHEDULES": "false"}


def test_the_autoscaler_asks_for_a_metric_that_is_made_from_ours() -> None:
    (autoscaler,) = of_kind("HorizontalPodAutoscaler")
    (metric,) = autoscaler["spec"]["metrics"]
    (rule,) = YAML(typ="safe").load(FOLDER / "components/search-replicas/prometheus-adapter.example.yml")
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    series = re.match(r"\w+", rule["seriesQuery"])
    assert series is not None
    assert re.fullmatch(rule["name"]["matches"], series[0])
    metrics = Metrics()
    metrics.embed_wait_seconds.labels("interactive").observe(0.1)
    samples = [
        sample for family in text_string_to_metric_families(metrics.render().decode()) for sample in family.samples
    ]
    assert [sample for sample in samples if sample.name == series[0] and sample.labels == {"lane": "interactive"}]


def test_prometheus_is_sent_to_ports_and_a_secret_that_there_are_and_let_in() -> None:
    secrets = {document["metadata"]["name"]: document["stringData"] for document in of_kind("Secret")}
    asked: set[tuple[str, str]] = set()
    for monitor in of_kind("PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        credentials = endpoint["authorization"]["credentials"]
        assert credentials["key"] in secrets[credentials["name"]]
        asked |= {(component, endpoint["port"]) for component in selected(monitor["spec"]["selector"])}
        (relabelled,) = endpoint["relabelings"]
        job = {"http": "owl-sap-api", "metrics": "owl-sap-worker"}[endpoint["port"]]
        assert relabelled == {"action": "replace", "targetLabel": "job", "replacement": job}, "as the alerts have it"
    there = {
        (document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"], port["name"])
        for document in DEPLOYMENTS
        for port in container_of(document)["ports"]
    }
    assert asked == there
    prometheus = {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}
    let_in = {
        (component, port["port"])
        for policy in of_kind("NetworkPolicy")
        for rule in policy["spec"].get("ingress", [])
        if prometheus in [peer["podSelector"] for peer in rule["from"]]
        for port in rule["ports"]
        for component in selected(policy["spec"]["podSelector"])
    }
    assert let_in == there


def selected(selector: Document) -> set[str]:
    """The components that it names, in either of its two forms."""
    name = "app.kubernetes.io/component"
    if "matchLabels" in selector:
        return {selector["matchLabels"][name]}
    (expression,) = selector["matchExpressions"]
    assert (expression["key"], expression["operator"]) == (name, "In")
    return set(expression["values"])


def test_only_prometheus_asks_the_worker() -> None:
    (policy,) = [each["spec"] for each in of_kind("NetworkPolicy") if "worker" in each["metadata"]["name"]]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert {"namespaceSelector", "podSelector"} == set(peer), "both must fit"
    assert policy["policyTypes"] == ["Ingress"]


# ------------------------------------------------------------------------------------------------------ a Ray cluster


def check_ray(*files: Path) -> int:
    """Return the exit code of the check that scripts/check makes."""
    schema = ROOT / "tests/ops/raycluster.schema.json"
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema), *map(str, files)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


def test_the_ray_cluster_is_as_kuberays_schema_says(tmp_path: Path) -> None:
    planted = copy.deepcopy(RAY)
    planted["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-gpu"] = "1"
    file = tmp_path / "planted.yaml"
    YAML(typ="safe").dump(planted, file)
    assert (check_ray(FOLDER / "components/ray/raycluster.yaml"), check_ray(file)) == (0, 1)
    assert RAY["spec"]["rayVersion"] == str(locks.pins((locks.FOLDER / "cuda13-ray.txt").read_text())["ray"].version)


@pods_of_ray
def test_pod_of_ray_is_bounded_and_is_as_kubernetes_schema_says(deployment: Document) -> None:
    template, container = deployment["spec"]["template"], container_of(deployment)
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any", **template["metadata"]}}
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(whole | {"spec": template["spec"]}, version, strict=True)
    for resource in ("memory", "ephemeral-storage"):
        assert {resource} <= set(container["resources"]["limits"]) & set(container["resources"]["requests"])
    assert "cpu" in container["resources"]["requests"]
    volumes = {volume["name"]: volume for volume in pod_of(deployment)["volumes"]}
    assert set(volumes) == {mount["name"] for mount in container["volumeMounts"]}
    writable = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"] if len(mount) == 2}
    assert set(writable) == {"/dev/shm", "/tmp"}
    assert all("sizeLimit" in volume["emptyDir"] for volume in writable.values())
    assert writable["/dev/shm"]["emptyDir"]["medium"] == "Memory"


@pods_of_ray
def test_pod_of_ray_authenticates_by_a_file_and_reports_nothing(deployment: Document) -> None:
    variables = {entry["name"]: entry["value"] for entry in container_of(deployment)["env"]}
    assert (variables["RAY_AUTH_MODE"], variables["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
    assert "RAY_AUTH_TOKEN" not in variables
    volumes = {volume["name"]: volume for volume in pod_of(deployment)["volumes"]}
    token = volumes["token"]["secret"]
    assert token["defaultMode"] == 0o440, "fsGroup opens any stricter one to the group"
    (file,) = {document["metadata"]["name"]: document for document in of_kind("Secret")}[token["secretName"]][
        "stringData"
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in container_of(deployment)["volumeMounts"]}
    if deployment["metadata"]["name"] != "ray-sync":
        assert variables["RAY_AUTH_TOKEN_PATH"] == f"{mounts['token']}/{file}"
        assert not [name for name in variables if name.startswith(("HANA_", "OWL_SAP_"))]
        assert set(volumes) == {"token", "shm", "tmp"}, "nodes know no HANA"


def test_workers_have_the_cards_and_the_head_computes_nothing() -> None:
    head, (worker,) = RAY["spec"]["headGroupSpec"], RAY["spec"]["workerGroupSpecs"]
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    resources = container_of(RAY_PODS[1])["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == int(worker["rayStartParams"]["num-gpus"]) == 1
    assert resources["requests"]["cpu"] == worker["rayStartParams"]["num-cpus"]
    assert "nvidia.com/gpu" not in {**container_of(RAY_PODS[0])["resources"]["limits"]}
    for group, deployment in ((head, RAY_PODS[0]), (worker, RAY_PODS[1])):
        assert int(group["rayStartParams"]["object-store-memory"]) >= LEAST_STORE
        container = container_of(deployment)
        (port,) = container["ports"]
        assert port["containerPort"] == int(group["rayStartParams"].get("node-manager-port", 6379))
        for kind in ("startup", "readiness", "liveness"):  # KubeRay's own ask the dashboard, which is not installed
            assert container[f"{kind}Probe"]["tcpSocket"] == {"port": port["name"]}


def test_the_sync_joins_the_cluster_with_a_token_of_its_own(tmp_path: Path) -> None:
    """Its script, with stubs of both commands: a Secret's file is open to the group, and owl-sap refuses such a one."""
    bash, _, text = container_of(RAY_PODS[2])["command"]
    variables = {entry["name"]: entry["value"] for entry in container_of(RAY_PODS[2])["env"]}
    secret, own = tmp_path / "secret", tmp_path / "auth_token"
    secret.write_text("t0ken")
    secret.chmod(0o440)
    for name in ("ray", "owl-sap"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\ntest "$RAY_JOINS" = yes\n')
        (tmp_path / name).chmod(0o755)
    text = text.replace("/run/secrets/ray/auth_token", str(secret))
    environment = variables | {"RAY_AUTH_TOKEN_PATH": str(own), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for joins in ("yes", "no"):
        own.unlink(missing_ok=True)
        done = subprocess.run(
            [bash, "-euc", text], env=environment | {"RAY_JOINS": joins}, capture_output=True, text=True, check=False
        )
        joined, *synced = done.stdout.splitlines()
        assert joined.startswith(
            f"ray start --address {RAY['metadata']['name']}-head-svc:6379 --num-cpus 0 --num-gpus 0 "
        )
        assert synced == (["owl-sap sync --all --scale ray"] if joins == "yes" else []), done.stderr
        assert (own.read_text(), own.stat().st_mode & 0o777) == ("t0ken", 0o400)


def test_the_settings_of_the_sync_are_understood(tmp_path: Path) -> None:
    given = {entry["name"]: entry["value"] for entry in container_of(RAY_PODS[2])["env"]}
    for name in ("HANA_HOST_FILE", "HANA_USER_FILE", "HANA_PASSWORD_FILE"):
        given[name] = str(tmp_path / name)
        Path(given[name]).write_text("any.host\n")
    given["OWL_SAP_CONFIG"] = str(FOLDER / "base/owl-sap.toml")
    settings = load(environ=given, folder=tmp_path).settings
    assert (settings.scale.address, settings.scale.ranges) == (f"{RAY['metadata']['name']}-head-svc:6379", False)
    assert settings.hana.host == "any.host"


def test_the_commands_of_the_docs_name_what_there_is() -> None:
    """Each command about the cluster or its sync, in our namespace; a sync after the nodes are ready."""
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    commands = re.findall(r"^kubectl (?:patch|wait|create job) .*", text, re.M)
    names = (f"raycluster/{RAY['metadata']['name']} ", f"raycluster {RAY['metadata']['name']} ")
    for command in commands:
        assert f"--namespace {only(FOLDER / 'base/namespace.yaml')['metadata']['name']} " in command
        assert f"--from=cronjob/{RAY_SYNC['metadata']['name']} " in command or any(name in command for name in names)
    assert re.findall(r'RayCluster\w+|"suspend": \w+|create job', "".join(commands)) == [
        *("RayClusterProvisioned", "create job"),
        *('"suspend": true', "RayClusterSuspended", '"suspend": false', "RayClusterProvisioned"),
    ]


def test_only_nodes_of_ray_reach_each_other() -> None:
    (policy,) = [each["spec"] for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == "allow-ray"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert policy["egress"] == [{"to": [{"podSelector": policy["podSelector"]}]}]
    labels = {each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for each in RAY_PODS}
    assert selected(policy["podSelector"]) == labels
    assert not labels & {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] for each in DEPLOYMENTS
    }


def test_in_key_ranges_the_nodes_get_the_configuration_and_the_login(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "kubernetes"))
    file = folder / "overlays/ray/kustomization.yaml"
    file.write_text(file.read_text().replace("# - ../../components/ray-ranges", "- ../../components/ray-ranges"))
    for overlay, ranges in ((FOLDER / "overlays/ray", False), (file.parent, True)):
        made = {document["kind"]: document for document in built(overlay)}
        cluster, job = made["RayCluster"]["spec"], made["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        worker, head = cluster["workerGroupSpecs"][0]["template"]["spec"], cluster["headGroupSpec"]["template"]["spec"]
        images = {pod["containers"][0]["image"] for pod in (worker, head, job)}
        assert images == {"registry.invalid/owl-sap-connector:t4"}
        assert worker["nodeSelector"] == {"nvidia.com/gpu.product": "Tesla-T4"}
        assert "hana" not in str(head)
        shared = ("OWL_SAP_CONFIG", "HANA_HOST_FILE", "HANA_USER_FILE", "HANA_PASSWORD_FILE")
        variables = {entry["name"]: entry["value"] for entry in job["containers"][0]["env"]}
        assert ("OWL_SAP_SCALE__RANGES" in variables) == ranges
        given = {entry["name"]: entry["value"] for entry in worker["containers"][0]["env"]}
        assert {name: given.get(name) for name in shared} == {
            name: variables[name] if ranges else None for name in shared
        }
        for name in ("config", "hana"):
            volume = [each for each in worker["volumes"] if each["name"] == name]
            mount = [each for each in worker["containers"][0]["volumeMounts"] if each["name"] == name]
            assert volume == ([each for each in job["volumes"] if each["name"] == name] if ranges else [])
            assert mount == (
                [each for each in job["containers"][0]["volumeMounts"] if each["name"] == name] if ranges else []
            )
