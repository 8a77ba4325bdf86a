"""Rows E01 to E14: errors, headers, keys, limits."""

from contextlib import ExitStack

import openai
import pytest

from tests.integration.checklist.curl import Curl, answer, connect
from tests.integration.checklist.guarded import KEY, MAX_BODY_BYTES, MAX_QUEUE, SITE
from tests.integration.checklist.test_chat import SHORT
from tests.integration.server_process import ServerProcess
from tests.integration.test_server import ENDLESS, arguments, written
from tests.unit.api.clients import URL, chat, error_of

OPEN = ["/health", "/ready", "/live", "/version", "/metrics", "/load"]


TOO_LARGE = chat("x" * (MAX_BODY_BYTES + 1))


@pytest.mark.parametrize("row", ["E05 Content-Length", "E05 chunked"])
def test_body_above_the_limit(guarded: ServerProcess, row: str) -> None:
    chunked = ("--header", "Transfer-Encoding: chunked") if row == "E05 chunked" else ()
    curl = Curl(guarded.url, KEY)
    assert error_of(curl.post(URL, TOO_LARGE, *chunked), 413)["code"] == "request_too_large"
    assert curl.post(URL, written(**SHORT)).status_code == 200


def test_e05_connection_is_closed_and_the_next_one_served(guarded: ServerProcess) -> None:
    head = f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    length = 2 * MAX_BODY_BYTES
    with connect(guarded.url) as raw:
        raw.sendall(f"POST {URL} HTTP/1.1\r\n{head}Content-Length: {length}\r\n\r\n".encode())
        refusal = answer(raw)  # although no byte of the body was sent
        assert refusal.status == 413
        assert refusal.headers["connection"] == "close"
        assert raw.recv(1) == b""
    with connect(guarded.url) as raw:
        raw.sendall(f"GET /v1/models HTTP/1.1\r\n{head}\r\n".encode())
        assert answer(raw).status == 200


WRONG_KEYS: dict[str, tuple[str, ...]] = {
    "E06 none": (),
    "E06 wrong": ("--header", "Authorization: Bearer sk-wrong"),
    "E06 wrong scheme": ("--header", f"Authorization: Basic {KEY}"),
}


@pytest.mark.parametrize("row", WRONG_KEYS)
def test_without_a_key_there_is_401(guarded: ServerProcess, row: str) -> None:
    curl = Curl(guarded.url)
    for path in ("/v1/models", URL, "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/nope"):
        response = curl.get(path, *WRONG_KEYS[row])
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"].startswith("Bearer")


def test_e06_official_client_raises_its_own_error(guarded: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(**arguments(written()))


@pytest.mark.parametrize("path", OPEN, ids=[f"E07 {path}" for path in OPEN])
def test_probes_and_metrics_need_no_key(guarded: ServerProcess, path: str) -> None:
    assert Curl(guarded.url).get(path).status_code == 200


PREFLIGHT = (
    *("--request", "OPTIONS"),
    *("--header", "Access-Control-Request-Method: POST"),
    *("--header", "Access-Control-Request-Headers: authorization,content-type"),
)


def test_e07_e12_preflight_of_the_allowed_site_needs_no_key(guarded: ServerProcess) -> None:
    response = Curl(guarded.url).get(URL, *PREFLIGHT, "--header", f"Origin: {SITE}")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == SITE
    assert "POST" in response.headers["access-control-allow-methods"]


def test_e12_other_sites_are_refused_and_get_no_header(guarded: ServerProcess) -> None:
    for path, options in ((URL, PREFLIGHT), ("/v1/models", ())):
        response = Curl(guarded.url, KEY).get(path, *options, "--header", "Origin: https://other.example")
        assert not [name for name in response.headers if name.startswith("access-control-allow-origin")]


@pytest.mark.parametrize("status", [200, 400, 401, 404, 405, 413], ids=lambda status: f"E12 {status}")
def test_answers_to_the_allowed_site_can_be_read_by_it(guarded: ServerProcess, status: int) -> None:
    curl = Curl(guarded.url, "sk-wrong" if status == 401 else KEY)
    path, body = {
        200: ("/v1/models", None),
        400: (URL, chat(None)),
        401: ("/v1/models", None),
        404: ("/v1/nope", None),
        405: (URL, None),
        413: (URL, TOO_LARGE),
    }[status]
    origin = ("--header", f"Origin: {SITE}")
    response = curl.get(path, *origin) if body is None else curl.post(path, body, *origin)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == SITE


def fields_for(server: ServerProcess, given: bytes, status: int = 200) -> list[tuple[str, str]]:
    """The header fields that a raw socket gets for a request with this one."""
    with connect(server.url) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n" + given + b"\r\n")
        response = answer(raw)
        assert response.status == status
        return [(name.lower(), value) for name, value in response.getheaders()]


@pytest.mark.parametrize(("line_break", "status"), [(b"\r", 400), (b"\r\n", 200)])
def test_e08_line_breaks_in_a_request_id_add_no_field(
    server: ServerProcess, line_break: bytes, status: int
) -> None:
    """A line that begins with a space continues the last one: RFC 9112, 5.2."""
    fields = fields_for(server, b"X-Request-Id: a" + line_break + b" X-Evil: b\r\n", status=status)
    assert "x-evil" not in dict(fields)
    assert "Evil" not in "".join(value for _, value in fields)


@pytest.mark.parametrize("row", ["E09 200", "E09 400", "E09 404", "E09 405", "E09 stream"])
def test_answers_have_a_request_id(curl: Curl, row: str) -> None:
    bodies = {"E09 200": written(**SHORT), "E09 400": chat(None), "E09 stream": written(stream=True, **SHORT)}
    path = "/nope" if row == "E09 404" else URL
    own = ("--header", "X-Request-Id: mine")
    response = curl.post(path, bodies[row], *own) if row in bodies else curl.get(path, *own)
    assert response.status_code == (200 if row == "E09 stream" else int(row.removeprefix("E09 ")))
    assert response.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.parametrize("status", [401, 413], ids=lambda status: f"E09 {status}")
def test_refusals_before_the_body_have_a_request_id(guarded: ServerProcess, status: int) -> None:
    curl = Curl(guarded.url, "sk-wrong" if status == 401 else KEY)
    response = curl.post(URL, TOO_LARGE, "--header", "X-Request-Id: mine")
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_e10_full_server_says_when_to_come_back(guarded: ServerProcess) -> None:
    curl = Curl(guarded.url, KEY)
    headers = {"Authorization": f"Bearer {KEY}"}
    with guarded.client() as client, ExitStack() as streams:
        for _ in range(MAX_QUEUE):
            response = streams.enter_context(
                client.stream("POST", URL, json=written(**ENDLESS, stream=True), headers=headers)
            )
            assert response.status_code == 200
        assert curl.get("/load").json() == {"server_load": MAX_QUEUE}
        refusal = curl.post(URL, written(**SHORT))
        assert error_of(refusal, 503)["code"] == "server_overloaded"
        assert 1 <= int(refusal.headers["retry-after"]) <= 120
        assert error_of(curl.get("/ready"), 503)["code"] == "server_overloaded"
        assert curl.get("/health").status_code == 200


def test_e14_slow_uploads_do_not_block_others(server: ServerProcess, curl: Curl) -> None:
    fields = "Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    head = f"POST {URL} HTTP/1.1\r\n{fields}".encode()
    with ExitStack() as sockets:
        for begun in (head, head + b"\r\n", head + b'\r\n{"model":') * 20:
            sockets.enter_context(connect(server.url)).sendall(begun)
        assert curl.get("/health").status_code == 200
        assert curl.post(URL, written(**SHORT)).status_code == 200
