"""Bad requests: one sentence each with the right status, and the driver lives on."""

from __future__ import annotations

import json
import socket
from contextlib import closing

import pytest

from stillframe.rest.connections import CONNECTIONS_MAX

ANY_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def client(quiet):
    driver, query = quiet
    yield driver.client
    assert query.isActive
    assert driver.client.get("/jobs")["jobs"][0]["status"] == "RUNNING"


def raw(client, data: bytes, half_closed: bool = False) -> bytes:
    """All that comes back for these bytes, until the server closes."""
    with closing(socket.create_connection(("127.0.0.1", client.server.port), 60)) as connection:
        connection.sendall(data)
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
        return answer


CHANGES = [
    ("PATCH", "/jobs/counts?mode=cancel"),
    ("POST", "/jobs/counts/checkpoints"),
    ("POST", "/jobs/counts/savepoints"),
    ("POST", "/jobs/counts/stop"),
    ("PATCH", "/jobs/counts/rescaling?parallelism=3"),
    ("POST", "/jobs/nobody/stop"),
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(
    ("authorization", "how"),
    [
        (None, "missing"),
        ("Bearer a-token-for-these-test", "wrong"),
        ("Bearer a-token-for-these-tests-and-more", "wrong"),
        ("Bearer", "wrong"),
        ("Bearer Ä€", "wrong"),
        ("Basic a-token-for-these-tests", "wrong"),
    ],
)
def test_what_changes_something_needs_the_token(client, method, path, authorization, how):
    headers = {} if authorization is None else {"Authorization": authorization.encode()}

    said = client.ask(method, path, {}, **headers)

    assert said.status == 401
    assert said.error.startswith(f"the token is {how}: send the header")
    assert said.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("method", "path", "status", "sentence"),
    [
        (
            "GET",
            "/nothing",
            404,
            "there is nothing at '/nothing': GET /openapi.json tells what there is",
        ),
        ("GET", "/jobs/counts/nothing", 404, "there is nothing at '/jobs/counts/nothing'"),
        ("GET", "/jobs/nobody", 404, "this driver has no job 'nobody': GET /jobs/overview"),
        ("GET", "/jobs/", 400, "jobid is ''"),
        ("GET", "/jobs/%ff", 400, "is not valid UTF-8"),
        ("GET", "/jobs?x=1", 400, "there is no parameter 'x' here: it has none"),
        ("GET", "/jobs/counts/exceptions?maxExceptions=0", 400, "a whole number from 1 to 100"),
        ("GET", "/jobs/counts/exceptions?maxExceptions=x", 400, "is a whole number, not 'x'"),
        ("GET", "/jobs/counts/checkpoints/details/0", 400, "a whole number from 1 to 90071"),
        ("GET", "/jobs/counts/checkpoints/details/999", 404, "has no checkpoint 999 that is"),
        ("GET", "/jobs/counts/checkpoints/xyz", 400, "triggerid is 'xyz': What the request was"),
        ("GET", f"/jobs/counts/checkpoints/{ANY_ID}", 404, "no checkpoint of this job has"),
        ("GET", f"/jobs/counts/checkpoints/details/1/subtasks/{ANY_ID}", 404, "has no task"),
        ("PATCH", "/jobs/counts", 400, "the parameter mode is missing: add ?mode=…"),
        ("PATCH", "/jobs/counts?mode=stop", 400, "the parameter mode is cancel, not 'stop'"),
        ("PATCH", "/jobs/counts?mode=cancel&mode=cancel", 400, "mode is given twice: give it"),
        ("PATCH", "/jobs/counts/rescaling?parallelism=0", 400, "from 1 to 32768, not 0"),
        ("PATCH", "/jobs/counts/rescaling?parallelism=-1", 400, "a whole number, not '-1'"),
        ("PATCH", "/jobs/counts/rescaling?parallelism=1e9", 400, "a whole number, not '1e9'"),
        ("PATCH", "/jobs/counts/rescaling?parallelism=٣", 400, "a whole number, not"),
    ],
)
def test_an_address_that_means_nothing_is_refused(client, method, path, status, sentence):
    from urllib.parse import quote

    said = client.change(method, quote(path, safe="/?=&%"))

    assert said.status == status
    assert sentence in said.error


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[]", "the body is a JSON object, not []"),
        (b"{", "the body is no JSON: the reader says"),
        (b"\xff", "the body is no JSON: the reader says"),
        (b'{"target-directory": NaN}', "NaN is no number"),
        (b"[" * 60_000, "the body is no JSON: the reader is nested too deeply"),
        (b"1" * 60_000, "the body is no JSON: the reader says"),
        ({}, "the body lacks target-directory: An absolute path, or a URL, of a directory"),
        ({"target-directory": 7}, "target-directory of the body is a text, not 7"),
        ({"target-directory": ""}, "target-directory of the body is ''"),
        ({"target-directory": "here"}, "is 'here': An absolute path, or a URL, of a directory"),
        ({"target-directory": "/a\0b"}, "An absolute path"),
        ({"target-directory": "/" + "x" * 5000}, "An absolute path"),
        (b'{"target-directory": "/\\ud800"}', "is not valid Unicode"),
        ({"target-directory": "/x", "cancel-job": "yes"}, "is true or false, not 'yes'"),
        ({"target-directory": "/x", "formatType": "NATIVE"}, "is CANONICAL, not 'NATIVE'"),
        ({"target-directory": "/x", "triggerId": "1"}, "32 hexadecimal digits that the client"),
        ({"targetDirectory": "/x"}, "the body has no field 'targetDirectory': it may have target"),
    ],
)
def test_a_body_that_does_not_fit_is_refused(client, body, sentence):
    said = client.change("POST", "/jobs/counts/savepoints", body)

    assert said.status == 400
    assert sentence in said.error
    assert len(said.error) < 500


def test_to_drain_without_a_savepoint_is_refused(client):
    said = client.change("POST", "/jobs/counts/stop", {"drain": True})

    assert said.error == "drain of the body wants targetDirectory too"


@pytest.mark.parametrize("method", ["DELETE", "PUT", "POST", "TRACE", "CONNECT", "NONSENSE"])
def test_a_method_that_a_path_does_not_have_is_refused_with_those_it_has(client, method):
    said = client.ask(method, "/jobs/overview")

    assert (said.status, said.headers["Allow"]) == (405, "GET, HEAD, OPTIONS")
    assert said.error == f"{method!r} cannot be done here, only GET, HEAD, OPTIONS"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/openapi.json", "GET, HEAD, OPTIONS"),
        ("/jobs/counts", "GET, HEAD, OPTIONS, PATCH"),
        ("/jobs/counts/checkpoints", "GET, HEAD, OPTIONS, POST"),
        ("/jobs/counts/stop", "OPTIONS, POST"),
    ],
)
def test_options_tells_the_methods(client, path, allowed):
    said = client.ask("OPTIONS", path)

    assert (said.status, said.headers["Allow"], said.text) == (204, allowed, "")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:80", "", "[::2]", "localhost:80:80", "a@localhost"],
)
def test_a_request_for_another_host_is_refused(client, host):
    """A page in a browser whose name was made to lead here."""
    said = client.ask("GET", "/jobs", Host=host)

    assert said.status == 400
    assert "which this driver is not: call it 127.0.0.1 or localhost" in said.error


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:8081"])
def test_the_names_of_this_machine_are_all_right_also_through_a_tunnel(client, host):
    assert client.ask("GET", "/jobs", Host=host).status == 200


# --- bytes


def test_a_body_that_is_too_long_is_refused(client):
    said = client.change("POST", "/jobs/counts/stop", b"x" * (64 * 1024 + 1))

    assert said.status == 413
    assert said.error == "the body has 65537 bytes, but 65536 are the most there may be"
    assert said.headers["Connection"] == "close"


def test_a_body_that_is_far_too_long_is_refused_before_it_is_sent(client):
    request = (
        b"POST /jobs/counts/stop HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Content-Length: 999999999999\r\n\r\n"
    )

    answer = raw(client, request)

    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(client):
    head = (
        b"POST /jobs/counts/stop HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\nContent-Length: 2\r\n\r\n"
    )

    answer = raw(client, head + b"{}")

    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 401 ")


def test_a_body_in_chunks_is_read_and_bounded_like_any_other(client):
    head = (
        b"POST /jobs/counts/savepoints HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Authorization: Bearer a-token-for-these-tests\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    long = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"

    assert b"the body lacks target-directory" in raw(client, head + b"2\r\n{}\r\n0\r\n\r\n")
    assert b"HTTP/1.1 413 " in raw(client, head + 3 * long + b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Transfer-Encoding: chunked\r\n", 400),
        (b"Transfer-Encoding: gzip\r\n", 501),
        (b"Content-Length: -1\r\n", 400),
        (b"Content-Length: 1_0\r\n", 400),
        (b"Content-Length: 2\r\nContent-Length: 3\r\n", 400),
        (b"Content-Length: " + b"9" * 5000 + b"\r\n", 400),
        (b"X: " + b"x" * 70_000 + b"\r\n", 431),
    ],
)
def test_a_request_whose_end_cannot_be_told_is_refused_and_the_connection_closed(
    client, lines, status
):
    head = b"POST /jobs/counts/stop HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n"

    answer = raw(client, head + b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")

    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1 ") == 1, "what followed was not taken for a request"
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["errors"]


@pytest.mark.parametrize(
    "request_line",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # a client that speaks TLS
        b"GET /jobs HTTP/9.9",
        b"GET /jobs HTTP/x",
        b"GET  ",
        b"nonsense",
        b"GET " + b"/" + b"x" * 70_000 + b" HTTP/1.1",
        b"GET http://[/jobs HTTP/1.1",
        b"GET jobs HTTP/1.1",
        b"GET * HTTP/1.1",
        b"\xff\xfe\x00",
    ],
)
def test_what_is_no_request_is_refused(client, request_line):
    ending = b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    answer = raw(client, request_line + ending, half_closed=True)

    assert b'"errors"' in answer
    assert b"HTTP/1.1 2" not in answer


def test_a_whole_address_is_understood_as_its_path(client):
    head = b"GET http://localhost/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    assert raw(client, head).startswith(b"HTTP/1.1 200 ")


def test_requests_that_are_sent_at_once_are_answered_in_order(client):
    one = b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    two = b"POST /jobs/counts/stop HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    last = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    answer = raw(client, one + two + last)

    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"401", b"404"]


# --- slow and many


def test_a_client_that_sends_slowly_is_cut_off_whatever_it_sends(hurried):
    """Byte by byte, each in good time, but never a whole request."""
    with closing(socket.create_connection(("127.0.0.1", hurried.server.port), 60)) as slow:
        slow.sendall(b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: ")
        slow.settimeout(0.05)
        answer, is_open = b"", True
        while is_open:
            try:
                slow.sendall(b"x")
                part = slow.recv(65_536)
                answer, is_open = answer + part, bool(part)
            except TimeoutError:
                continue
            except ConnectionError:
                break

    assert answer == b"" or b"the request did not arrive within 1 s" in answer
    assert hurried.client.get("/jobs") == {"jobs": []}


def test_a_client_that_sends_half_a_body_is_told_and_cut_off(hurried):
    head = b"POST /jobs/x/stop HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"

    answer = raw(hurried.client, head)

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the request did not arrive within 1 s" in answer


def test_a_connection_on_which_nothing_comes_is_closed(hurried):
    assert raw(hurried.client, b"") == b""


def test_more_connections_than_there_may_be_are_turned_away_and_the_rest_served(driver):
    address = ("127.0.0.1", driver.server.port)
    held = [socket.create_connection(address, 60) for _ in range(CONNECTIONS_MAX)]
    try:
        for each in held:
            each.sendall(b"GET /jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert each.recv(65_536).startswith(b"HTTP/1.1 200 ")
        with closing(socket.create_connection(address, 60)) as one_more:
            answer = b""
            while part := one_more.recv(65_536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connections are open already: try again soon" in answer
    finally:
        for each in held:
            each.close()


def test_a_client_that_goes_away_in_the_middle_harms_nobody(client):
    for data in (b"GET /jo", b"POST /jobs/counts/stop HTTP/1.1\r\nContent-Length: 10\r\n\r\n{"):
        with closing(socket.create_connection(("127.0.0.1", client.server.port), 60)) as gone:
            gone.sendall(data)
