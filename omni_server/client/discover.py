"""Asks a server for its models, voices and version."""

from dataclasses import dataclass

import aiohttp
from pydantic import BaseModel, ValidationError

from omni_server.client.stream import error_message, why_unreachable
from omni_server.command_line import program
from omni_server.errors import ConfigError

_DEFAULT_VOICE = "Chelsie"


class _Model(BaseModel):
    id: str
    voices: list[str] = []


class _ModelList(BaseModel):
    data: list[_Model]


class _Version(BaseModel):
    version: str


@dataclass(frozen=True)
class Served:
    model: str
    voice: str
    version: str | None
    voices: tuple[str, ...] = ()
    """As `/v1/models` lists them; empty for text-only models and for servers that list none."""


async def discover(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str | None,
    voice: str | None,
    timeout_s: float = 30.0,
) -> Served:
    """Uses `model` and `voice` as given; None selects the first that `/v1/models` lists. Raises `ConfigError`
    if no server answers, or if the answer is unexpected."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url, timeout=timeout) as response:
            status, body = response.status, await response.read()
        async with session.get(f"{base_url}/version", timeout=timeout) as response:
            version = _version(await response.read()) if response.status == 200 else None
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise ConfigError(
            f"'{base_url}' is not the URL of a server, such as http://127.0.0.1:8091"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(
            f"no server answers at {base_url} ({why_unreachable(error)}). Is it running? Start one with "
            f"'{program()} serve MODEL', or with 'scripts/serve' in a checkout for the demo model; --url "
            "names another address"
        ) from error
    if status == 401:
        raise ConfigError(f"{base_url} asks for a key: give one with --api-key")
    if status != 200:
        raise ConfigError(f"{url} answers {status}: {error_message(body)}")
    try:
        models = _ModelList.model_validate_json(body).data
    except ValidationError as error:
        raise ConfigError(f"{url} does not answer with a list of models") from error
    if not models:
        raise ConfigError(f"{url} lists no model")
    chosen = next((listed for listed in models if model in (None, listed.id)), None)
    voices = chosen.voices if chosen is not None else []
    return Served(
        # An unlisted model may still be served: the requests will show it.
        model=chosen.id if chosen is not None else str(model),
        voice=voice if voice is not None else next(iter(voices), _DEFAULT_VOICE),
        version=version,
        voices=tuple(voices),
    )


def _version(body: bytes) -> str | None:
    try:
        return _Version.model_validate_json(body).version
    except ValidationError:
        return None
