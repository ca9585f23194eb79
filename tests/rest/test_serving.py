"""Where the API is served, by the options of the jobs, and to whom."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading

import pytest

from stillframe.config import JobConfig, job_config
from stillframe.errors import BuildError, StartRefused
from stillframe.rest import connections, serving
from stillframe.rest.server import RestServer, is_loopback

TOKEN = "a-token-for-these-tests"


@pytest.fixture
def process(monkeypatch):
    """A process without a server so far."""
    monkeypatch.setattr(serving, "_server", None)
    yield
    if serving._server is not None:
        serving._server.close()


def ask(port: int, path: str = "/jobs", token: str | None = None, host: str = "127.0.0.1"):
    connection = http.client.HTTPConnection(host, port, timeout=60)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("text", "port"), [("0", 0), ("8081", 8081), ("off", "off"), ("OFF", "off")]
)
def test_the_port_is_a_number_or_off(text, port):
    assert job_config({"restPort": text}).rest_port == port


@pytest.mark.parametrize("text", ["", "-1", "65536", "http", "80.5"])
def test_anything_else_is_refused(text):
    with pytest.raises(BuildError, match="option restPort is a port up to 65535, 0 for any"):
        job_config({"restPort": text})


def test_unless_told_otherwise_it_is_any_port_of_this_machine_alone():
    assert (JobConfig().rest_port, JobConfig().rest_bind_address) == (0, "127.0.0.1")


def test_all_jobs_of_a_process_have_one_server(process, driver):
    first, second = (driver.prepare(name)[0] for name in ("first", "second"))

    servers = {serving.serve(first), serving.serve(second)}

    assert len(servers) == 1
    _, told = ask(servers.pop().port, "/jobs/overview")
    assert [job["name"] for job in told["jobs"]] == ["first", "second"]


def test_a_job_that_wants_none_has_none(process, driver):
    assert serving.serve(driver.prepare("first", restPort="off")[0]) is None
    assert serving._server is None


def test_a_server_that_ends_by_an_error_says_so_and_keeps_nobody_waiting(
    process, driver, monkeypatch, caplog
):
    broken = threading.Event()

    async def breaks(*given):
        broken.set()
        raise RuntimeError("no room for a loop")

    monkeypatch.setattr(connections, "serve", breaks)
    server = serving.serve(driver.prepare("first")[0])

    assert broken.wait(30)
    server.close()

    assert "the HTTP API of this driver has ended; its jobs go on" in caplog.text
    with pytest.raises(ConnectionRefusedError):
        ask(server.port)


def test_a_port_that_is_taken_is_refused_at_the_start(process, driver):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        query, _ = driver.prepare("first", restPort=str(port))

        with pytest.raises(StartRefused, match=rf"on 127\.0\.0\.1 port {port} .*in use.*another"):
            serving.serve(query)


def test_an_address_that_is_not_of_this_machine_is_refused(process, driver):
    query, _ = driver.prepare("first", restBindAddress="192.0.2.1")

    with pytest.raises(StartRefused, match=r"cannot be served on 192\.0\.2\.1 port 0"):
        serving.serve(query)


def test_a_job_with_another_wish_than_the_first_is_refused(process, driver):
    server = serving.serve(driver.prepare("first")[0])

    for wish in ({"restPort": "1"}, {"restBindAddress": "0.0.0.0"}):
        with pytest.raises(StartRefused, match="give all its jobs the same restPort"):
            serving.serve(driver.prepare("second", **wish)[0])
    assert serving.serve(driver.prepare("third", restPort=str(server.port))[0]) is server


def test_the_token_is_any_unless_the_environment_has_one(process, driver, monkeypatch):
    monkeypatch.delenv("STILLFRAME_TOKEN", raising=False)
    assert len(serving.chosen_token()) >= 32
    assert serving.chosen_token() != serving.chosen_token()

    monkeypatch.setenv("STILLFRAME_TOKEN", TOKEN)
    assert serving.serve(driver.prepare("first")[0]).token == TOKEN


@pytest.mark.parametrize(
    "token", ["", "short", "with a line\nbreak in it", "nicht-ASCII-äöüß-Zeichen"]
)
def test_a_token_that_is_none_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("STILLFRAME_TOKEN", token)

    with pytest.raises(StartRefused, match="STILLFRAME_TOKEN has") as error:
        serving.chosen_token()
    assert token == "" or token not in str(error.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("driver.example", False),
    ],
)
def test_loopback_is_told_from_all_else(host, expected):
    assert is_loopback(host) is expected


def test_bound_elsewhere_reading_needs_the_token_too():
    server = RestServer("0.0.0.0", 0, TOKEN)
    try:
        for path in ("/jobs", "/openapi.json", "/nothing"):
            status, told = ask(server.port, path)
            assert status == 401
            assert told["errors"][0].startswith("the token is missing")
        assert ask(server.port, token=TOKEN) == (200, {"jobs": []})
        _, document = ask(server.port, "/openapi.json", TOKEN)
        assert document["paths"]["/jobs"]["get"]["security"] == [{"token": []}]
        assert server.url == f"http://{socket.gethostname()}:{server.port}"
    finally:
        server.close()


def test_it_can_be_served_over_ipv6():
    try:
        server = RestServer("::1", 0, TOKEN)
    except StartRefused:
        pytest.skip("there is no IPv6 here")
    try:
        assert ask(server.port, host="::1") == (200, {"jobs": []})
        assert server.url == f"http://[::1]:{server.port}"
    finally:
        server.close()


def test_a_server_that_is_closed_has_left_its_port():
    server = RestServer("127.0.0.1", 0, TOKEN)
    assert ask(server.port)[0] == 200
    server.close()

    RestServer("127.0.0.1", server.port, TOKEN).close()


UNSERVED = """
import sys
from types import SimpleNamespace

def web():
    return {"uvicorn", "h11", "starlette", "prometheus_client"} & set(sys.modules)

import stillframe.spark.deployment.entry, stillframe.spark.deployment.stage
assert not web(), f"an executor loads {web()}"
import stillframe.spark.session, stillframe.spark.launch
from stillframe.config import job_config
from stillframe.rest.serving import serve
assert serve(SimpleNamespace(config=job_config({"restPort": "off"}), name="unserved")) is None
assert not web(), f"a driver that answers nobody loads {web()}"
"""


def test_executors_and_drivers_that_answer_nobody_load_nothing_of_the_web():
    command = [sys.executable, "-c", UNSERVED]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
