"""The status page as a browser shows it: what /admin knows, as text and never as markup."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import MODEL

LOADS_WITHIN_S = 60  # a browser's first start on a busy machine
VIRTUAL_MS = 6000  # three looks of the page
MARKUP = "<img/src=x/onerror=document.title='run'>"  # visible ASCII, so that it passes as a request id


@pytest.fixture(scope="module")
def browser():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.fail("no Chromium here: install Debian's package chromium", pytrace=False)


def run(browser, profile, *arguments):
    command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        command.append("--no-sandbox")  # root has none
    command += ["--window-size=1280,1000", f"--virtual-time-budget={VIRTUAL_MS}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LOADS_WITHIN_S, check=True).stdout


def test_the_page_shows_backends_and_decisions_as_text(demo, http, browser, tmp_path):
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "The tides of the page."}]}
    for request_id in ("page-request-1", MARKUP):
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
        assert answer.status_code == 200
    chosen = answer.headers["x-tidegate-backend"]

    shown = run(browser, tmp_path / "profile", "--dump-dom", f"{demo.url}/admin/")
    for backend in http.get("/admin/backends").json()["backends"]:
        assert f">{backend['name']}</td>" in shown
    rows = re.findall(r"<tr>.*?</tr>", shown)
    row = next(row for row in rows if "page-request-1" in row)
    assert f">{MODEL.split('/')[-1]}</td>" in row and ">ok</td>" in row and ">200</td>" in row
    assert any(f">{chosen}</td>" in row and "onerror" in row for row in rows)
    assert "<img" not in shown and "<title>Tidegate</title>" in shown, "what clients send must not become markup"
    assert "as of " in shown
    assert "The tides of the page" not in shown

    picture = os.environ.get("TIDEGATE_STATUS_PICTURE")
    if picture:
        run(browser, tmp_path / "profile", f"--screenshot={picture}", f"{demo.url}/admin/")
