"""The files for containers fit the program and each other; nothing is built or started here."""

import re

import pytest
import yaml

from fedpriv.experiment.config import load_config
from tests.test_docs import ROOT, check_command

FOLDER = ROOT / "docs" / "docker"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
NODES = [name for name in SERVICES if name.startswith("node-")]
OURS = ["server", *NODES]
HOME = "/var/lib/fedpriv"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
FEDERATION = load_config(FOLDER / "server" / "experiment.toml").federation


def arguments(words: list[str]) -> list[str]:
    """Options apart from their values."""
    return [part for word in words for part in word.split("=", 1)]


def option(service: str, name: str) -> str:
    words = arguments(SERVICES[service]["command"])
    return words[words.index(name) + 1]


def mounts(service: str) -> dict[str, str]:
    """What is mounted, by where; each mount of a folder of ours is read-only."""
    found = {}
    for volume in SERVICES[service]["volumes"]:
        source, target, *mode = volume.split(":")
        assert mode == (["ro"] if source.startswith("./") else [])
        found[target] = source
    return found


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("service", OURS)
def test_each_service_runs_a_command_that_exists(service: str) -> None:
    assert instructions("ENTRYPOINT") == ['["fedpriv"]']
    check_command(arguments(SERVICES[service]["command"]))


@pytest.mark.parametrize("service", OURS)
def test_nothing_runs_as_root_or_writes_elsewhere_than_to_its_volume(service: str) -> None:
    settings = SERVICES[service]
    (made,) = [line for line in instructions("RUN") if "useradd" in line]
    assert settings["user"] == "10001:10001"
    assert "--uid 10001" in made
    assert f"--home-dir {HOME} " in made
    assert f"chmod 0700 {HOME}" in made
    assert settings["read_only"]
    assert mounts(service)[HOME] in COMPOSE["volumes"]
    name = "--out" if service == "server" else "--state"
    assert option(service, name).startswith(HOME)


@pytest.mark.parametrize("service", OURS)
def test_each_service_reads_the_folder_that_is_mounted_where_it_works(service: str) -> None:
    assert instructions("WORKDIR")[-1] == "/etc/fedpriv"
    assert mounts(service)["/etc/fedpriv"] == f"./{service}"


def test_no_two_services_share_what_they_write() -> None:
    volumes = [mounts(service)[HOME] for service in OURS]
    assert sorted({*volumes, "prometheus"}) == sorted(COMPOSE["volumes"])
    assert len(set(volumes)) == len(volumes)


def test_the_image_is_built_from_files_that_exist() -> None:
    build = SERVICES["server"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).samefile(FOLDER / "Dockerfile")
    sources = [source for line in instructions("COPY") for source in line.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*"  # keys, data and runs stay where they are
    sent = sorted(line.removeprefix("!") for line in ignored if line.startswith("!"))
    assert sent == sorted(sources)
    assert set(build["args"]) == set(instructions("ARG"))
    constrained = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (torch,) = re.findall(r"torch==\S+", DOCKERFILE)
    assert torch in constrained


def test_nodes_come_to_the_port_that_the_server_listens_on() -> None:
    host, port = FEDERATION.address.split(":")
    assert host == "0.0.0.0"
    assert SERVICES["server"]["ports"] == [f"{port}:{port}"]
    assert len(NODES) == FEDERATION.least_nodes == 3
    for node in NODES:
        assert option(node, "--server") == f"server:{port}"
        check = SERVICES[node]["healthcheck"]["test"]
        assert check[:3] == ["CMD", "fedpriv", "status"]
        assert set(check[3:]) <= set(SERVICES[node]["command"])
        check_command(arguments(check[2:]))


def test_metrics_are_seen_in_the_network_of_the_operator_alone() -> None:
    address = FEDERATION.metrics_address
    operator = SERVICES["server"]["networks"]["operator"]
    assert address == f"{operator['ipv4_address']}:9464"
    assert f'"http://{address}/metrics"' in SERVICES["server"]["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": [address]}]
    assert SERVICES["prometheus"]["networks"] == ["operator"]
    for node in NODES:
        assert SERVICES[node]["networks"] == ["federation"]
    assert SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]


def test_the_guide_makes_what_is_mounted() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    said = text.partition("## In containers")[2].partition("\n## ")[0]
    for name in (*OURS, "certificates", "consent.toml", "enrolment.toml", "users", "10001"):
        assert name in said, name
    assert FEDERATION.certificates.endswith("certificates")
    assert FEDERATION.enrolment.endswith("enrolment.toml")


def test_a_stop_takes_no_longer_than_it_may() -> None:
    unit = (ROOT / "docs" / "systemd" / "fedpriv-server.service").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert SERVICES["server"]["stop_grace_period"] == f"{seconds}s"
