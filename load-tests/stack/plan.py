"""Reads docker-compose.yml and says how its services run as plain processes.

Each service gets a loopback address of its own in place of its host name, so that ports stay as they are written. Files that
Compose would mount are copied into a folder that stands for the container's root, with those addresses in them.
"""

import os
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
# Has no use without its image.
LEFT_OUT = {"grafana"}
TRAFFIC = "traffic"
ROUTER = "router"
PROMETHEUS = "prometheus"
# What the images of others start. Ours start the program that their build stage is named after.
ENTRYPOINTS = {"prometheus": ["prometheus"]}
# Where ./test.sh unpacks Prometheus.
UNPACKED = REPOSITORY / ".test/prometheus/usr/bin"
# Of the router, by which a setting is overridden.
OVERRIDE_PREFIX = "TIDEGATE__"
STOP_GRACE_S = 10
# Of addresses 127.a.b.x, x of the first service.
FIRST_HOST = 1
EVERYWHERE = "0.0.0.0"
ITSELF = re.compile(r"\b(?:localhost|127\.0\.0\.1)(?=:\d)")


class PlanError(Exception):
    """The files say something that cannot be done here."""


@dataclass(frozen=True)
class Options:
    bin: Path
    net: str
    work: Path
    traffic: bool = False
    # None: as in the file.
    scrape_interval: str | None = None


@dataclass
class Service:
    """How one service runs."""

    name: str
    host: str
    port: int | None
    command: list[str]
    # None: it is healthy when it runs.
    check: list[str] | None
    needs: set[str]
    stop_grace_s: int = STOP_GRACE_S
    env: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}" if self.port else "listens nowhere"


class Plan:
    """Every service of the compose file that runs here, none of them started."""

    def __init__(self, options: Options, compose_file: Path = COMPOSE_FILE):
        self.options = options
        wanted = {
            name: given
            for name, given in yaml.safe_load(compose_file.read_text())["services"].items()
            if name not in LEFT_OUT and (name != TRAFFIC or options.traffic)
        }
        self.hosts = {name: f"{options.net}.{FIRST_HOST + i}" for i, name in enumerate(wanted)}
        names = "|".join(map(re.escape, self.hosts))
        # A service's name as Compose's network would resolve it, where a port follows.
        self.host_name = re.compile(rf"(?<![\w.-])({names})(?=:\d)")
        self.services = {name: self.service(name, given) for name, given in wanted.items()}
        self.check_needs()

    def service(self, name: str, given: dict) -> Service:
        root = self.options.work / name
        root.mkdir(parents=True, exist_ok=True)
        mounted = self.mount(name, given.get("volumes", []), root)
        command = [self.translate(name, word, mounted) for word in self.words(name, given)]
        return Service(
            name,
            self.hosts[name],
            port_of(given),
            self.program(command) + self.extra_flags(name, command[0], root),
            self.check(name, given),
            set(given.get("depends_on", {})),
            int(given.get("stop_grace_period", f"{STOP_GRACE_S}s").removesuffix("s")),
            self.environment(name, given, root),
        )

    def words(self, name: str, given: dict) -> list[str]:
        """Its command line in the container."""
        command = given.get("command", [])
        if isinstance(command, str):
            command = shlex.split(command)
        if "entrypoint" in given:
            return [*given["entrypoint"], *command]
        if "build" in given:
            return [given["build"]["target"], *command]
        return [*ENTRYPOINTS.get(name, []), *command]

    def translate(self, name: str, text: str, mounted: dict[str, Path] | None = None) -> str:
        """Addresses, and files of the container, as they are here."""
        text = self.host_name.sub(lambda found: self.hosts[found[1]], text)
        text = ITSELF.sub(self.hosts[name], text).replace(EVERYWHERE, self.hosts[name])
        for target, here in (mounted or {}).items():
            text = re.sub(rf"(?<![\w.]){re.escape(target)}(?=$|/)", str(here), text)
        return text

    def mount(self, name: str, volumes: list[str], root: Path) -> dict[str, Path]:
        """Where each mounted path of the container is here."""
        mounted = {}
        for volume in volumes:
            source, target = volume.split(":")[:2]
            here = root / target.lstrip("/")
            if not source.startswith("./"):  # a volume of Compose's own, empty at first
                shutil.rmtree(here, ignore_errors=True)
                here.mkdir(parents=True)
            elif (REPOSITORY / source).is_dir():
                here = REPOSITORY / source
            else:
                here.parent.mkdir(parents=True, exist_ok=True)
                here.write_text(self.configuration(name, here.name, (REPOSITORY / source).read_text()))
            mounted[target] = here
        return mounted

    def configuration(self, service: str, file: str, text: str) -> str:
        text = self.translate(service, text)
        if file != "prometheus.yml" or not self.options.scrape_interval:
            return text
        settings = yaml.safe_load(text)
        every = self.options.scrape_interval
        settings["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
        return yaml.safe_dump(settings)

    def program(self, command: list[str]) -> list[str]:
        """The command with the program's path: one of ours, or one that is installed."""
        name, rest = command[0], command[1:]
        ours = name in ("tidegate", "engine-sim", "kv-store", "s3-server")
        path = str(self.options.bin / name) if ours else shutil.which(name, path=f"{os.environ['PATH']}:{UNPACKED}")
        if path is None:
            raise PlanError(f"missing, please install: {name}")
        if not os.access(path, os.X_OK):
            raise PlanError(f"{path} is not there: run `cargo build --release --workspace`, or name its folder with --bin")
        return [path, *rest]

    def extra_flags(self, name: str, program: str, root: Path) -> list[str]:
        """What an image does by itself: listen inside of its own network, write inside of its own root."""
        if program == "redis-server":
            return ["--bind", self.hosts[name], "--dir", str(root)]
        if program == "prometheus":
            return [f"--web.listen-address={self.hosts[name]}:9090"]
        return []

    def check(self, name: str, given: dict) -> list[str] | None:
        """Its health check. What one image's wget asks, our own healthcheck asks too."""
        words = [self.translate(name, word) for word in given.get("healthcheck", {}).get("test", [])[1:]]
        if not words:
            return None
        if words[0] == "wget":
            words = ["tidegate", "healthcheck", "--url", words[-1]]
        if words[0] == "redis-cli":
            words = [words[0], "-h", self.hosts[name], *words[1:]]
        return self.program(words)

    def environment(self, name: str, given: dict, root: Path) -> dict[str, str]:
        """Like a container's: what Compose hands on, and little else."""
        env = {"PATH": os.environ["PATH"], "HOME": str(root)}
        handed_on = given.get("environment", [])
        env |= {key: os.environ[key] for key in handed_on if key in os.environ}
        if name == ROUTER:
            env |= {key: value for key, value in os.environ.items() if key.startswith(OVERRIDE_PREFIX)}
        for mount in given.get("tmpfs", []):
            folder = root / mount.split(":")[0].lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            env["TMPDIR"] = str(folder)
        return env

    def check_needs(self) -> None:
        for service in self.services.values():
            if unknown := service.needs - set(self.services):
                raise PlanError(f"{service.name} depends on {', '.join(sorted(unknown))}, which does not run here")


def port_of(given: dict) -> int | None:
    """The port inside of the container."""
    listed = given.get("expose") or given.get("ports")
    return int(str(listed[0]).rpartition(":")[2]) if listed else None
