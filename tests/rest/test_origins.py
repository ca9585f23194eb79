"""What browsers send on behalf of other sites' pages is refused, whatever it asks for, and no
answer says that any other site may read it."""

from __future__ import annotations

import pytest
from served_jobs import TOKEN

EVIL = "http://evil.example"


@pytest.fixture
def client(quiet):
    driver, query = quiet
    yield driver.client
    assert query.isActive


def own_host(client):
    return f"127.0.0.1:{client.server.port}"


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        pytest.param("GET", "/jobs", {"Origin": EVIL}, id="a simple request"),
        pytest.param("GET", "/jobs", {"Sec-Fetch-Site": "cross-site"}, id="an image, no origin"),
        pytest.param("GET", "/jobs", {"Sec-Fetch-Site": "same-site"}, id="another port"),
        pytest.param("GET", "/metrics", {"Origin": "null"}, id="a page without an origin"),
        pytest.param("GET", "/openapi.json", {"Origin": "http://localhost"}, id="no port"),
        pytest.param("GET", "/jobs", {"Origin": "file://127.0.0.1"}, id="a file"),
        pytest.param(
            "OPTIONS",
            "/jobs/counts/stop",
            {"Origin": EVIL, "Access-Control-Request-Method": "POST"},
            id="a preflight",
        ),
        pytest.param(
            "GET",
            "/jobs/counts/events",
            {"Origin": EVIL, "Accept": "text/event-stream", "Sec-Fetch-Mode": "cors"},
            id="an EventSource",
        ),
        pytest.param(
            "POST",
            "/jobs/counts/stop",
            {
                "Origin": EVIL,
                "Content-Type": "application/x-www-form-urlencoded",
                "Authorization": f"Bearer {TOKEN}",
            },
            id="a form",
        ),
        pytest.param("GET", "/nothing", {"Origin": EVIL}, id="what is not there"),
    ],
)
def test_a_page_of_another_origin_gets_nothing(client, method, path, headers):
    said = client.ask(method, path, **headers)

    assert said.status == 403
    assert said.error == "a page of another origin asks: only this driver's own page may"
    assert not any(name.lower().startswith("access-control") for name in said.headers)


def test_a_page_whose_name_was_made_to_lead_here_gets_nothing(client):
    """To the browser it is the same origin; the host is what it is known by."""
    said = client.ask(
        "GET", "/jobs", Host="evil.example", Origin=EVIL, Sec_Fetch_Site="same-origin"
    )

    assert said.status == 400


@pytest.mark.parametrize("site", ["same-origin", "none", None])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_its_own_page_is_answered_and_gets_no_cookie(client, site, scheme):
    headers = {"Origin": f"{scheme}://{own_host(client)}"}
    if site is not None:
        headers["Sec-Fetch-Site"] = site

    said = client.ask("GET", "/jobs", **headers)

    assert said.status == 200
    names = {name.lower() for name in said.headers}
    assert "set-cookie" not in names
    assert not any(name.startswith("access-control") for name in names)
