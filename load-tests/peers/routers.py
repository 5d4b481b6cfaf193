"""The routers that are measured beside each other: how each is started in front of the same engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

NGINX = "/usr/sbin/nginx"


@dataclass(frozen=True)
class Place:
    """Where a router listens, whom it has behind it, and where its files go."""

    port: int
    engines: Sequence[int]
    programs: Path
    environments: Path | None
    work: Path

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.engines]


@dataclass(frozen=True)
class Router:
    """One row of the table."""

    name: str
    title: str
    # whether it sends equal beginnings of prompts to equal engines
    knows_prefixes: bool

    def command(self, place: Place) -> list[str] | None:
        """How it is started; nothing when it is not installed."""
        words = COMMANDS[self.name.split(":")[0]](place, self.name.partition(":")[2])
        return words if Path(words[0]).exists() else None


def nginx(place: Place, _: str) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{port};" for port in place.engines)
    folders = " ".join(f"{kind}_temp_path {place.work}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))
    path = place.work / "nginx.conf"
    path.write_text(
        f"daemon off; worker_processes auto; pid {place.work}/nginx.pid; error_log {place.work}/nginx.err;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; client_body_temp_path {place.work}/body; {folders} client_max_body_size 64m;\n"
        "client_body_buffer_size 256k; keepalive_requests 1000000;\n"
        f"upstream engines {{ {servers} keepalive 256; keepalive_requests 1000000; }}\n"
        f"server {{ listen 127.0.0.1:{place.port} backlog=1024; location / {{ proxy_pass http://engines;\n"
        'proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } } }\n'
    )
    return [NGINX, "-p", str(place.work), "-c", str(path)]


def tidegate(place: Place, mode: str) -> list[str]:
    index = {"ring": "", "index": "kv_cache_index: { enabled: true }\n"}[mode]
    engines = "".join(f"  - {{ name: e{n}, url: '{url}', models: [m] }}\n" for n, url in enumerate(place.urls))
    path = place.work / f"tidegate-{mode}.yaml"
    path.write_text(f"server: {{ host: 127.0.0.1, port: {place.port} }}\nbackends:\n{engines}{index}")
    return [str(place.programs / "tidegate"), "--config", str(path)]


def environment(place: Place, name: str, program: str) -> str:
    folder = place.environments or place.work
    return str(folder / name / "bin" / program)


def common(place: Place, policy: str) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(place.port), "--policy", policy, "--prometheus-port", str(place.port + 1),
            "--log-level", "error", "--worker-urls", *place.urls]  # fmt: skip


def sglang(place: Place, policy: str) -> list[str]:
    python = environment(place, "sglang", "python")
    return [python, "-m", "sglang_router.launch_router", *common(place, policy)]


def vllm(place: Place, policy: str) -> list[str]:
    return [environment(place, "vllm", "vllm-router"), *common(place, policy)]


def smg(place: Place, policy: str) -> list[str]:
    return [environment(place, "smg", "smg"), "launch", *common(place, policy)]


COMMANDS = {"nginx": nginx, "tidegate": tidegate, "sglang": sglang, "vllm": vllm, "smg": smg}

ROUTERS = [
    Router("nginx:", "nginx (no LLM logic, no log)", False),
    Router("tidegate:ring", "**Tidegate**, prefix ring (defaults)", True),
    Router("tidegate:index", "**Tidegate**, KV index by text (approximate)", True),
    Router("vllm:round_robin", "vllm-router round_robin", False),
    Router("vllm:cache_aware", "vllm-router cache_aware", True),
    Router("sglang:random", "sglang-router random", False),
    Router("sglang:cache_aware", "sglang-router cache_aware", True),
    Router("smg:round_robin", "smg round_robin", False),
    Router("smg:cache_aware", "smg cache_aware", True),
]
