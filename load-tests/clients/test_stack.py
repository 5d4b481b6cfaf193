"""Holds the compose stack together: services, settings, scrape targets and image stages must name the same things."""

import re
import shlex

import pytest
import yaml

from conftest import MODEL, REPOSITORY

COMPOSE = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
SETTINGS = yaml.safe_load((REPOSITORY / "config/compose.yaml").read_text())
SCRAPES = yaml.safe_load((REPOSITORY / "grafana/prometheus.yml").read_text())["scrape_configs"]
ENGINES = sorted(name for name in SERVICES if name.startswith("vllm-"))


# What `docker-compose up` starts; the others ask for --profile.
ALWAYS = {name: service for name, service in SERVICES.items() if "profiles" not in service}


def backends() -> dict[str, str]:
    """Each backend of the settings: its name and the host and port of its URL."""
    return {backend["name"]: backend["url"].removeprefix("http://") for backend in SETTINGS["backends"]}


def command(service: str) -> list[str]:
    given = SERVICES[service]["command"]
    return shlex.split(given) if isinstance(given, str) else given


def test_every_backend_is_a_service_and_every_engine_a_backend():
    assert sorted(backends().values()) == [f"{engine}:8000" for engine in ENGINES]
    assert len(ENGINES) == 6


def test_every_other_host_in_the_settings_is_a_service():
    assert SETTINGS["response_cache"]["redis"]["url"] == "redis://redis-cluster:6379"
    assert "redis-cluster" in SERVICES
    assert SETTINGS["response_cache"]["l2"]["endpoint"] == "${S3_ENDPOINT:-http://s3:9000}"
    words = command("s3")
    assert SETTINGS["response_cache"]["l2"]["bucket"] == "${S3_BUCKET:-%s}" % words[words.index("--bucket") + 1]
    assert SETTINGS["response_cache"]["l2"]["secret_key"] == "${S3_SECRET_KEY:-%s}" % words[words.index("--secret-key") + 1]
    for source in SETTINGS["kv_cache_index"]["event_sources"]:
        assert source["endpoint"] == f"http://{backends()[source['backend_name']]}/v1/kv_events"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_serves_the_model_on_the_port_that_is_routed_to(engine):
    words = command(engine)
    assert words[:2] == ["serve", MODEL], words
    assert words[words.index("--port") + 1] == "8000", words
    assert words[words.index("--host") + 1] == "0.0.0.0", words


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_s_transfer_role_fits_its_role(engine):
    words = command(engine)
    transfer = words[words.index("--kv-transfer-config") + 1] if "--kv-transfer-config" in words else None
    wanted = {"prefill": "kv_producer", "decode": "kv_consumer"}.get(engine.split("-")[1])
    assert (yaml.safe_load(transfer)["kv_role"] if transfer else None) == wanted


def test_only_the_router_and_grafana_are_published_and_only_on_loopback():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"router": ["127.0.0.1:8080:8080"], "grafana": ["127.0.0.1:3000:3000"]}


def test_every_service_restarts_and_has_a_health_check():
    assert all(service.get("restart") == "unless-stopped" for service in SERVICES.values())
    # The generator of traffic listens nowhere, and ends by itself when the router is not to be had.
    for name, service in ALWAYS.items():
        assert service.get("healthcheck", {}).get("test", ["NONE"])[0] == "CMD", name


def test_the_router_waits_for_the_health_of_what_it_needs():
    waits = SERVICES["router"]["depends_on"]
    assert sorted(waits) == sorted([*ENGINES, "kv-store", "redis-cluster", "s3"])
    assert {wait["condition"] for wait in waits.values()} == {"service_healthy"}


def test_traffic_comes_only_when_asked_for_and_goes_to_the_router():
    traffic = SERVICES["traffic"]
    assert sorted(set(SERVICES) - set(ALWAYS)) == ["traffic"]
    assert traffic["profiles"] == ["load"]
    assert traffic["depends_on"] == {"router": {"condition": "service_healthy"}}
    words = command("traffic")
    assert words[words.index("--url") + 1] == f"http://router:{SETTINGS['server']['port']}"
    (volume,) = traffic["volumes"]
    source, target, mode = volume.split(":")
    script = next(word for word in words if word.endswith(".py"))
    assert (mode, (REPOSITORY / source / script.removeprefix(f"{target}/")).is_file()) == ("ro", True)


def test_what_we_wrote_is_confined():
    ours = [name for name, service in SERVICES.items() if "build" in service or "profiles" in service]
    assert sorted(ours) == sorted(["router", *ENGINES, "kv-store", "s3", "traffic"])
    for name in ours:
        service = SERVICES[name]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_the_router_gets_longer_to_stop_than_it_takes_to_drain():
    drain_s = 30
    assert int(SERVICES["router"]["stop_grace_period"].removesuffix("s")) > drain_s


def test_every_image_has_an_exact_version():
    for name, service in SERVICES.items():
        version = service["image"].rpartition(":")[2]
        assert version == "local" or re.fullmatch(r"v?\d+\.\d+\.\d+(-alpine|-slim)?", version), f"{name}: {service['image']}"


def test_every_built_service_names_a_stage_of_the_dockerfile():
    stages = set(re.findall(r"^FROM .* AS (\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.M))
    for name, service in SERVICES.items():
        if "build" in service:
            assert service["build"]["target"] in stages, name


def test_every_mounted_file_is_there():
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (REPOSITORY / source).exists(), f"{name}: {source}"


def test_the_dockerfile_needs_no_buildkit():
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    code = "\n".join(line for line in dockerfile.splitlines() if not line.startswith("#"))
    assert not re.search(r"^RUN\s+--|<<|^COPY\s+--(?!from=)", code, re.M)


def test_prometheus_scrapes_the_router_and_every_engine_under_its_name_in_the_settings():
    jobs = {scrape["job_name"]: scrape["static_configs"] for scrape in SCRAPES}
    assert jobs["tidegate"] == [{"targets": [f"router:{SETTINGS['server']['port']}"]}]
    scraped = {config["labels"]["backend"]: config["targets"][0] for config in jobs["engines"]}
    assert scraped == backends()
    assert "prometheus" in jobs


def test_the_kubernetes_example_is_settings_that_the_router_takes_and_probes_what_it_serves():
    kinds = {part["kind"]: part for part in yaml.safe_load_all((REPOSITORY / "deploy/kubernetes.yaml").read_text())}
    settings = yaml.safe_load(kinds["ConfigMap"]["data"]["tidegate.yaml"])
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    seconds = [int(settings["drain"][key].removesuffix("s")) for key in ("delay", "timeout")]
    assert pod["terminationGracePeriodSeconds"] > sum(seconds)
    assert seconds[0] >= 2 * container["readinessProbe"]["periodSeconds"]
    assert all("subPath" not in mount for mount in container["volumeMounts"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    named = [*container["args"][1::2], settings["api_keys"]["file"]]
    assert all(any(path.startswith(mount + "/") for mount in mounts) for path in named)


def test_the_override_for_real_workers_names_workers_of_its_settings():
    override = yaml.safe_load((REPOSITORY / "docker-compose.real.yml").read_text())["services"]
    settings = yaml.safe_load((REPOSITORY / "config/real-engines.yaml").read_text())
    scrapes = yaml.safe_load((REPOSITORY / "grafana/prometheus-real.yml").read_text())["scrape_configs"]
    workers = {backend["url"].removeprefix("http://") for backend in settings["backends"]}
    hosts = {entry.split(":")[0] for entry in override["router"]["extra_hosts"]}
    assert {worker.split(":")[0] for worker in workers} == hosts
    scraped = {target for job in scrapes if job["job_name"] == "engines" for of in job["static_configs"] for target in of["targets"]}
    assert scraped == workers
    assert override["router"]["command"][-1].endswith("/real-engines.yaml")
