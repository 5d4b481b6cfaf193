"""Looks at the compose stack from outside, ends some of its containers, and says what holds.

    COMPOSE_PROJECT=NAME python3 load-tests/docker/checks.py

Called by up.sh. One line for each check; ends with 1 when any fails. Prometheus is not published, so it is asked from
within its container.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

ROUTER = "http://127.0.0.1:8080"
PROJECT = os.environ.get("COMPOSE_PROJECT", "tidegate-check")
MODEL = "meta-llama/Llama-3.1-70B-Instruct"
START_SECONDS = 180
CHANGE_SECONDS = 90
POLL_SECONDS = 1.0
REQUESTS_PER_CHECK = 20
ANSWER_SECONDS = 60
IMAGE_BYTES_MAX = 60 * 1000 * 1000

failed = []


def check(what, holds, detail=""):
    print(f"{'ok  ' if holds else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
    if not holds:
        failed.append(what)


def until(seconds, condition):
    """The first true value of the condition within so many seconds, else the last."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value or time.monotonic() > end:
            return value
        time.sleep(POLL_SECONDS)


def docker(*arguments):
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def container(service):
    """The container of a service; Compose 1 joins names by _, Compose 2 by -."""
    found = docker(
        "ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}", "--filter", f"label=com.docker.compose.service={service}"
    )
    return found.splitlines()[0]


def get(path):
    with urllib.request.urlopen(ROUTER + path, timeout=5) as answer:
        return answer.read().decode()


def is_ready():
    try:
        return get("/ready") is not None
    except OSError:
        return False


def ask(text, **more):
    """Status and headers of one chat request."""
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": text}], **more}
    request = urllib.request.Request(
        ROUTER + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            answer.read()
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def all_are_answered(what):
    answers = [ask(f"{what}, question {n}: " + "word " * (20 + 60 * n)) for n in range(REQUESTS_PER_CHECK)]
    bad = [status for status, _ in answers if status != 200]
    paths = sorted({str(headers.get("x-tidegate-path")) for _, headers in answers})
    check(f"{what}: {REQUESTS_PER_CHECK} requests are answered", not bad, f"by {', '.join(paths)}" if not bad else str(bad))


def query(text):
    """The values of an instant query, by their labels."""
    url = "http://127.0.0.1:9090/api/v1/query?query=" + urllib.parse.quote(text)
    answer = json.loads(docker("exec", container("prometheus"), "wget", "-q", "-O", "-", url))
    return [(of["metric"], float(of["value"][1])) for of in answer["data"]["result"]]


def targets():
    return {of["instance"]: value for of, value in query("up")}


def metric(name, *labels):
    lines = [line for line in get("/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def state(backend):
    for word in ("healthy", "unhealthy", "starting", "draining"):
        if metric("tidegate_backend_state", f'backend="{backend}"', f'state="{word}"') == 1:
            return word
    return "none"


def image_size():
    size = int(docker("image", "inspect", "-f", "{{.Size}}", "tidegate:local"))
    check("the router's image is smaller than 60 MB", size < IMAGE_BYTES_MAX, f"{size / 1e6:.1f} MB")


def cache_hits():
    question = "What is cached is not asked again."
    hit = until(20, lambda: ask(question, temperature=0)[1].get("x-cache-tier"))
    check("a repeated question is answered from the cache", bool(hit), str(hit))


def one_engine_dies():
    backend, service = "decode-worker-1", "vllm-decode-1"
    docker("kill", container(service))
    all_are_answered("a decode engine was killed")
    gone = until(CHANGE_SECONDS, lambda: state(backend) == "unhealthy")
    check("the router says that it is unhealthy", gone, state(backend))
    down = until(CHANGE_SECONDS, lambda: targets().get(f"{service}:8000") == 0)
    check("Prometheus says that it is down", down)
    docker("start", container(service))
    back = until(CHANGE_SECONDS, lambda: state(backend) == "healthy")
    check("started again, it is healthy again", back, state(backend))


def redis_dies():
    docker("kill", container("redis-cluster"))

    def tier_is_down():
        ask("Redis is gone.", temperature=0)
        return metric("tidegate_cache_tier_up", 'tier="redis"') == 0

    check("the router says that its Redis tier fails", until(CHANGE_SECONDS, tier_is_down))
    all_are_answered("Redis was killed")
    docker("start", container("redis-cluster"))

    def tier_is_up():
        ask("Redis is back.", temperature=0)
        return metric("tidegate_cache_tier_up", 'tier="redis"') == 1

    check("started again, it is used again", until(CHANGE_SECONDS, tier_is_up))


def storage_dies():
    docker("kill", container("kv-store"))
    all_are_answered("the KV storage was killed")
    docker("start", container("kv-store"))


def main():
    check("the router is ready", until(START_SECONDS, is_ready))
    if failed:
        return 1
    image_size()
    all_are_answered("all run")
    cache_hits()
    up = until(CHANGE_SECONDS, lambda: (found := targets()) and all(found.values()) and found)
    check("every target of Prometheus is up", bool(up), ", ".join(sorted(up or targets())))
    moved = until(CHANGE_SECONDS, lambda: metric("tidegate_requests_total") > 3 * REQUESTS_PER_CHECK)
    check("the traffic generator makes requests", bool(moved), f"{metric('tidegate_requests_total'):.0f} so far")
    one_engine_dies()
    redis_dies()
    storage_dies()
    all_are_answered("all run again")
    print(f"{len(failed)} checks failed" if failed else "all checks hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
