"""One request to the router and what became of it. Only the standard library, so that a plain Python image runs it."""

import http.client
import json
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

# The router gives a prefill leg a minute; nothing here should take a fraction of that.
REQUEST_TIMEOUT_S = 30
MAX_ANSWER_BYTES = 8 << 20
READY_TIMEOUT_S = 2


class Ending(Enum):
    SERVED = "served"
    REFUSED = "refused"  # the client's own fault, and meant
    FAILED = "failed"
    LEFT = "left"


@dataclass(frozen=True)
class Taken:
    """What a request came to."""

    ending: Ending
    status: int = 0
    cache: str = ""
    path: str = ""
    text: str = ""
    detail: str = ""


class Router:
    """Where the requests go. Every request gets a connection of its own, so that clients come and go."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url} is not an http:// URL")
        self.host, self.port = parts.hostname, parts.port or 80

    def ready(self) -> bool:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=READY_TIMEOUT_S)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def post(self, path: str, body: dict | bytes, headers: dict[str, str], leave_after_bytes: int | None = None) -> Taken:
        """Sends the request and reads its answer, or leaves in the middle of it."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", path, data, {"content-type": "application/json", **headers})
            answer = connection.getresponse()
            if leave_after_bytes is not None and answer.status == 200:
                answer.read(leave_after_bytes)
                return Taken(Ending.LEFT, 200)
            content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            return Taken(Ending.FAILED, detail=repr(error))
        finally:
            connection.close()
        ending = Ending.SERVED if answer.status < 400 else Ending.REFUSED if answer.status < 500 else Ending.FAILED
        return Taken(
            ending,
            answer.status,
            answer.getheader("x-cache", ""),
            answer.getheader("x-tidegate-path", ""),
            said(content),
            "" if ending is Ending.SERVED else content[:200].decode(errors="replace"),
        )


def said(content: bytes) -> str:
    """The assistant's words, of a whole answer or of a stream; nothing if there are none."""
    if not content.startswith(b"data:"):
        return "".join(words(content))
    events = (line[len(b"data:") :].strip() for line in content.splitlines() if line.startswith(b"data:"))
    return "".join(word for event in events for word in words(event))


def words(event: bytes) -> list[str]:
    try:
        choices = json.loads(event).get("choices") or []
    except (ValueError, AttributeError):
        return []
    return [(choice.get("message") or choice.get("delta") or {}).get("content") or "" for choice in choices]
