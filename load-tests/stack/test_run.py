"""What stack.sh and traffic.py say when they cannot do what they are asked for."""

import socket
import subprocess
import sys
from pathlib import Path

from plan import REPOSITORY, Options, Plan
from test_stack_live import programs

NET = "127.79.0"
ENDS_WITHIN_S = 20


def run(*command: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-B", *command], capture_output=True, text=True, timeout=ENDS_WITHIN_S)


def stack(*options: str | Path) -> subprocess.CompletedProcess:
    return run(REPOSITORY / "load-tests/stack/run.py", "--net", NET, *options)


def test_a_program_that_is_missing_is_named(tmp_path):
    ended = stack("--bin", tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{tmp_path}/tidegate is not there" in ended.stderr


def test_an_address_that_is_taken_is_named_and_nothing_starts(tmp_path):
    address = Plan(Options(programs(), NET, tmp_path / "plan")).services["s3"].address
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))):
        ended = stack("--bin", programs(), "--keep", tmp_path / "stack")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"{address}, for s3, cannot be had" in ended.stderr
    assert not list((tmp_path / "stack").glob("*.log"))


def test_a_net_that_is_not_loopback_is_refused():
    assert stack("--net", "10.0.0").returncode == 2


def test_every_service_gets_an_address_of_its_own_and_no_host_name_is_left(tmp_path):
    plan = Plan(Options(programs(), NET, tmp_path, traffic=True))
    assert len({service.host for service in plan.services.values()}) == len(plan.services)
    written = [word for service in plan.services.values() for word in service.command + (service.check or [])]
    copies = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(copies) == 3, "the settings, Prometheus' configuration and the alert rules"
    for text in written + copies:
        assert "0.0.0.0" not in text
        assert not plan.host_name.search(text), text


def test_traffic_ends_when_the_router_does_not_get_ready():
    ended = run(REPOSITORY / "load-tests/traffic/traffic.py", "--url", f"http://{NET}.1:1", "--ready-within", "0.5")
    assert ended.returncode == 1
    assert "/ready did not say 200 in 0.5 s" in ended.stderr


def test_traffic_is_bounded():
    ended = run(REPOSITORY / "load-tests/traffic/traffic.py", "--rate", "100000")
    assert ended.returncode == 2
    assert "at most 200" in ended.stderr
