"""The demo model that `omni-server serve --demo qwen3_omni` makes."""

from pathlib import Path

import pytest

from omni_server.demos import DEMOS
from tests.integration.conftest import SharedServers
from tests.omni_families import QWEN3_OMNI


def test_the_demo_is_made_once_and_is_what_the_script_makes(
    shared_servers: SharedServers, qwen3_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shared_servers.of(QWEN3_OMNI)
    assert server.log.count("making the demo model qwen3-omni-demo, with random weights") == 1
    for name, value in shared_servers.demo_environment.items():
        monkeypatch.setenv(name, value)
    progress: list[str] = []
    folder = DEMOS["qwen3_omni"].folder(progress.append)
    assert progress == []
    made, wanted = (
        {file.name: file.read_bytes() for file in path.iterdir()} for path in (folder, qwen3_checkpoint)
    )
    assert made == wanted


def test_terminal_and_page_say_that_its_weights_are_random(shared_servers: SharedServers) -> None:
    server = shared_servers.of(QWEN3_OMNI)
    notice = "The weights of this model are random: it generates nonsense and noise."
    assert f"  Note     {notice}\n" in server.log
    with server.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
    assert model["about"]["notice"] == notice
