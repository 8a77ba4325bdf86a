"""Dockerfile, .dockerignore and compose.yaml against the package, the server's flags and each other."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.cli import serve
from omni_server.cli.main import main
from omni_server.cli.serve_flags import ServeOptions
from tests.unit.api.clients import http_client
from tests.unit.api.fake_generator import FakeGenerator

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPOSE_TEXT = (ROOT / "compose.yaml").read_text()
SERVICES = yaml.safe_load(COMPOSE_TEXT)["services"]
PAGE = (ROOT / "docs" / "container.md").read_text()


def instructions_of(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction and what follows it, continued lines joined, comments left out."""
    lines = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    found = [line.partition(" ") for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in found]


INSTRUCTIONS = instructions_of((ROOT / "Dockerfile").read_text())


def only(name: str) -> str:
    (rest,) = [rest for found, rest in INSTRUCTIONS if found == name]
    return rest


def copied() -> set[str]:
    return {source for name, rest in INSTRUCTIONS if name == "COPY" for source in rest.split()[:-1]}


def interpolated(text: str, **given: str) -> str:
    """As Compose does it with `${NAME:-default}`, the one form that the file uses."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: given.get(match[1]) or match[2], text)


def test_the_image_is_built_from_what_the_wheel_needs_and_nothing_else() -> None:
    project = PROJECT["project"]
    needed = {"pyproject.toml", "setup.py", project["readme"], *project["license-files"]}
    needed |= {"omni_server", "stages", "configs"}
    assert copied() == needed
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == needed


def test_the_cpu_image_has_the_torch_that_an_environment_gets() -> None:
    torch = re.search(r"^TORCH_CPU='(.*)'$", (ROOT / "scripts" / "setup-env").read_text(), re.MULTILINE)
    assert torch is not None
    assert any(f" {torch[1]};" in rest for name, rest in INSTRUCTIONS if name == "RUN")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """Options that `serve` was called with; nothing is started."""
    calls: list[ServeOptions] = []

    def record(options: ServeOptions) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr(serve, "serve", record)
    return calls


def arguments_in(text: str) -> str:
    """An example of what OMNI_ARGS is to hold."""
    example = re.search(r'OMNI_ARGS="(.+?)"', text)
    assert example is not None
    return example[1]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("arguments", [arguments_in(COMPOSE_TEXT), arguments_in(PAGE)])
def test_the_server_understands_what_a_service_is_started_with(
    service: str, arguments: str, parsed: list[ServeOptions]
) -> None:
    """Of the command line without MODEL, tests/unit/cli/test_serve.py has the tests."""
    entry_point = json.loads(only("ENTRYPOINT"))
    assert entry_point[0] in PROJECT["project"]["scripts"]
    command = shlex.split(interpolated(SERVICES[service]["command"], OMNI_ARGS=arguments))
    main([*entry_point[1:], *command])
    (options,) = parsed
    assert options.api.host == "0.0.0.0"
    assert options.model == arguments.split()[0]


async def test_the_health_check_asks_for_what_is_served() -> None:
    setting = next(rest for name, rest in INSTRUCTIONS if rest.startswith("OMNI_SERVER_"))
    variable, _, address = setting.partition("=")
    assert variable in only("HEALTHCHECK")
    url = urlsplit(address)
    assert url.port == ApiConfig().port
    async with http_client(create_app(ServerState(FakeGenerator()), ApiConfig())) as client:
        assert (await client.get(url.path)).status_code == 200


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_fits_the_image(service: dict[str, object]) -> None:
    (port,) = service["ports"]
    assert only("EXPOSE") == str(ApiConfig().port)
    # On all addresses only for those who say so: without a key, everybody who reaches the port is served.
    assert interpolated(port) == f"127.0.0.1:{ApiConfig().port}:{ApiConfig().port}"
    assert interpolated(port, OMNI_LISTEN="8000") == f"8000:{ApiConfig().port}"
    (volume,) = service["volumes"]
    assert volume.partition(":")[2] == only("VOLUME")
    assert volume.partition(":")[0] in yaml.safe_load(COMPOSE_TEXT)["volumes"]
    assert "healthcheck" not in service
    assert float(service["stop_grace_period"].removesuffix("s")) >= ApiConfig().shutdown_timeout_s + 10
