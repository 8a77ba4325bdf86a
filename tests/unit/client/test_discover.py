"""What is said where no server, or something else than one, answers at the address."""

import socket
import threading
from collections.abc import Iterator

import pytest

from omni_server.cli.main import main
from tests.unit.bench.frames import spoken
from tests.unit.bench.scripted_server import Reply, ScriptedServer


def complaint(url: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["chat", "--url", url, "--once", "Hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def plain_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(lambda body, number: Reply(spoken(8, 40)))
    yield server
    server.close()


def test_what_is_no_url_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint("127.0.0.1:8091", capsys) == (
        "omni-server: error: '127.0.0.1:8091' is not the URL of a server, such as http://127.0.0.1:8091"
    )


@pytest.mark.parametrize("command", [["chat", "--once", "Hi"], ["bench"]])
def test_a_port_where_nothing_listens_is_told_with_how_to_start_a_server(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main([*command, "--url", url]) == 2

    line = capsys.readouterr().err
    assert f"no server answers at {url} (Connection refused). Is it running? Start one with '" in line
    assert "ssl" not in line


def test_https_where_the_server_speaks_http_is_told(
    plain_server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = plain_server.url.replace("http:", "https:")

    assert f"no server answers at {url} (TLS failed: " in complaint(url, capsys)


def test_another_protocol_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                connection.recv(65536)

        thread = threading.Thread(target=answer)
        thread.start()
        line = complaint(f"http://127.0.0.1:{listener.getsockname()[1]}", capsys)
        thread.join(60)

    assert "(what answers does not speak HTTP)" in line


def test_a_refusal_is_told_in_the_words_of_the_server(
    plain_server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_server.models_status = 503
    plain_server.models = {
        "error": {"message": "The model is still loading.", "type": "service_unavailable_error"}
    }

    assert complaint(plain_server.url, capsys) == (
        f"omni-server: error: {plain_server.url}/v1/models answers 503: The model is still loading."
    )
