"""The files with which containers are run name options, routes and files that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from aserve.cli import make_parser
from aserve.http.routes import ROUTES
from tests.architecture.source import ROOT

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()


def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return found["aserve"]


def pod() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text()))
    (deployment,) = [document for document in documents if document["kind"] == "Deployment"]
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    (found,) = pod()["containers"]
    return found


COMMANDS = {
    "compose": service()["command"],
    "kubernetes": container()["args"],
    "image": json.loads(re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[0]),
    "health check": json.loads(re.findall(r" CMD (\[.*)$", DOCKERFILE, re.MULTILINE)[0])[1:],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_has_options_that_exist(command: list[str]) -> None:
    known, unknown = make_parser().parse_known_args(command)
    assert known.command == command[0]
    assert unknown == []


def test_containers_get_more_time_to_end_than_the_server_takes_to_drain() -> None:
    command = COMMANDS["kubernetes"]
    drain_s = float(command[command.index("--drain-timeout") + 1])
    pause_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= pause_s + drain_s + 10
    command = COMMANDS["compose"]
    drain_s = float(command[command.index("--drain-timeout") + 1])
    assert float(service()["stop_grace_period"].removesuffix("s")) >= drain_s + 10


def test_what_is_probed_and_scraped_is_public() -> None:
    """Neither a probe nor Prometheus sends a key."""
    public = {route.path for route in ROUTES if route.public}
    probes = {kind: container()[f"{kind}Probe"]["httpGet"]["path"] for kind in PROBES}
    assert probes == PROBES
    assert set(PROBES.values()) <= public
    (job,) = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["metrics_path"] in {route.path for route in ROUTES}


PROBES = {"startup": "/startupz", "readiness": "/readyz", "liveness": "/livez"}


def test_nobody_is_root_and_only_mounts_can_be_written() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    users = [re.findall(r"^USER (\d+)", stage, re.MULTILINE) for stage in stages]
    last_users = {int(each[-1]) for each in users if each}
    assert last_users == {pod()["securityContext"]["runAsUser"]}
    assert 0 not in last_users
    assert pod()["securityContext"]["runAsNonRoot"]
    assert container()["securityContext"]["readOnlyRootFilesystem"]
    assert service()["read_only"]


def test_the_default_image_is_the_one_for_cpus() -> None:
    assert re.findall(r"^FROM .*$", DOCKERFILE, re.MULTILINE)[-1] == "FROM program AS cpu"


def mounted_files() -> list[Path]:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].values()
    mounts = [mount for each in services for mount in each.get("volumes", ())]
    return [DOCKER / mount.split(":")[0] for mount in mounts if mount.startswith(".")]


def test_what_compose_mounts_is_there() -> None:
    assert mounted_files()
    assert [path for path in mounted_files() if not path.exists()] == []
