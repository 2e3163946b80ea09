"""The manifests of several pods: commands, ports, names and times fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from aserve.cli import ARGUMENTS, make_parser
from aserve.config import Facts, Raw, resolve
from aserve.http.routes import ROUTES
from tests.architecture.source import ROOT

FILES = sorted((ROOT / "docker").glob("kubernetes*.yaml"))
POD_INDEX = "apps.kubernetes.io/pod-index"
SELF_SERVED = {"/health", "/livez", "/readyz", "/startupz"}  # by a router


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


WORKLOADS = [
    pytest.param(path, each, id=f"{path.stem}-{each['metadata']['name']}")
    for path in FILES
    for each in documents(path)
    if each["kind"] in ("Deployment", "StatefulSet")
]


# All but those that run ranks for another pod, and serve nothing.
SERVING = [each for each in WORKLOADS if each.id != "kubernetes-nodes-aserve-node"]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(found)


def value_of(variable: dict[str, Any], workload: dict[str, Any]) -> str:
    """The value that the first pod gets."""
    if POD_INDEX in variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", ""):
        return str(first_ordinal(workload["spec"]))
    return str(variable.get("value", "x"))


def first_ordinal(spec: dict[str, Any]) -> int:
    return int(spec.get("ordinals", {}).get("start", 0))


def options(workload: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a pod as the command line reads them, and its variables."""
    known, unknown = make_parser().parse_known_args(container(workload)["args"])
    assert unknown == []
    environment = {
        each["name"]: value_of(each, workload)
        for each in container(workload).get("env", ())
        if each["name"].startswith("ASERVE_")
    }
    given = {name: value for name, value in vars(known).items() if name not in ARGUMENTS}
    resolve(Raw(environment=environment, command_line=given), Facts(default_model="none"))
    return vars(known) | {name.removeprefix("ASERVE_").lower(): "" for name in environment}


def addresses(given: dict[str, Any]) -> list[str]:
    """What a pod connects to, as HOST:PORT."""
    prefill = given.get("disaggregation_prefill")
    urls = [each.removeprefix("http://") for each in given.get("replica", ())]
    nodes = given.get("dist_init_addr")
    return urls + (prefill.split(",") if prefill else []) + ([nodes] if nodes else [])


@pytest.mark.parametrize(("path", "workload"), SERVING)
def test_the_command_of_a_pod_has_options_that_exist_and_fit(path: Path, workload: Any) -> None:
    given = options(workload)
    ports = {each["name"]: each["containerPort"] for each in container(workload)["ports"]}
    assert ports["http"] == int(given.get("port", 8000))
    if given.get("disaggregation_mode") == "prefill":
        assert ports["kv"] == 8998
        assert given["disaggregation_host"] == "0.0.0.0"
    assert ("disaggregation_key" in given) == ("disaggregation_mode" in given)


@pytest.mark.parametrize(("path", "workload"), WORKLOADS)
def test_a_pod_finds_the_others_by_their_names_and_ports(path: Path, workload: Any) -> None:
    found = documents(path)
    services = {each["metadata"]["name"]: each for each in found if each["kind"] == "Service"}
    sets = {each["metadata"]["name"]: each for each in found if each["kind"] == "StatefulSet"}
    for address in addresses(options(workload)):
        host, _, port = address.partition(":")
        pod, _, name = host.partition(".")
        service, owner = services[name]["spec"], sets[pod.rpartition("-")[0]]["spec"]
        first = first_ordinal(owner)
        assert int(pod.rpartition("-")[2]) in range(first, first + owner["replicas"])
        assert owner["serviceName"] == name
        assert service["clusterIP"] == "None"
        assert int(port) in {each["port"] for each in service["ports"]}
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"] == labels
    mine = [each["spec"] for each in services.values() if each["spec"]["selector"] == labels]
    assert mine, "no service leads to the pod"
    ports = {each["name"]: each["containerPort"] for each in container(workload).get("ports", ())}
    for service in mine:
        for each in service.get("ports", ()):
            assert ports[each["targetPort"]] == each["port"]


@pytest.mark.parametrize(("path", "workload"), SERVING)
def test_probes_exist_and_the_drain_fits_into_the_end(path: Path, workload: Any) -> None:
    own = container(workload)
    is_router = own["args"][0] == "route"
    public = SELF_SERVED if is_router else {each.path for each in ROUTES if each.public}
    probes = {
        own[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
    }
    assert probes <= public
    drain_s = float(own["args"][own["args"].index("--drain-timeout") + 1])
    pause_s = float(own["lifecycle"]["preStop"]["exec"]["command"][1])
    spec = workload["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= pause_s + drain_s + 10
    assert spec["securityContext"]["runAsNonRoot"]
    assert own["securityContext"]["readOnlyRootFilesystem"]


def test_the_routers_know_every_server() -> None:
    (path,) = [each for each in FILES if each.stem == "kubernetes-replicas"]
    (servers,) = [each for each in documents(path) if each["kind"] == "StatefulSet"]
    (router,) = [each for each in documents(path) if each["kind"] == "Deployment"]
    assert len(set(addresses(options(router)))) == servers["spec"]["replicas"]


def test_the_pods_of_one_engine_are_as_many_nodes_with_numbers_of_their_own() -> None:
    (path,) = [each for each in FILES if each.stem == "kubernetes-nodes"]
    sets = [each for each in documents(path) if each["kind"] == "StatefulSet"]
    zero, others = sets
    given = [options(each) for each in sets]
    (variable,) = [each for each in container(others)["env"] if "RANK" in each["name"]]
    first = int(value_of(variable, others))
    assert [0, *range(first, first + others["spec"]["replicas"])] == [
        *range(int(given[0]["nnodes"]))
    ]
    assert zero["spec"]["replicas"] == 1
    own, theirs = (container(each)["args"] for each in sets)
    assert own[-len(theirs) + 1 :] == theirs[1:]
    assert all("dist_key" in each for each in given)
    # They serve nothing that could be probed, and end by themselves.
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & {*container(others)}
    assert others["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
    assert container(others)["securityContext"]["readOnlyRootFilesystem"]
