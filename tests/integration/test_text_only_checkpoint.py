"""Qwen3-Omni's Thinking and Captioner releases have no talker. They are served as they are, and refuse
speech.

Their folders are alike: config.json has `enable_audio_output: false` and neither of the sections of talker
and decoder, and there are no weights of them."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.check.default_config import default_stage_config
from omni_server.omni import AsyncOmni
from tests.integration.conftest import SharedServers
from tests.omni_families import QWEN3_OMNI
from tests.unit.api.clients import URL, error_of, http_client

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"messages": [{"role": "user", "content": "Hello, who are you?"}], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(qwen3_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text_only") / "checkpoint"
    shutil.copytree(qwen3_checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    for name in [name for name in config if name.startswith(("talker_", "code2wav_", "tts_"))]:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    weights = load_file(folder / "model.safetensors")
    thinker = {name: tensor for name, tensor in weights.items() if name.startswith("thinker.")}
    save_file(thinker, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    config = default_stage_config(folder, "text-only", use_cpu=True)
    assert (list(config.stages), config.edges) == (["thinker"], ())
    omni = await AsyncOmni.start(folder, config, served_model_names=("text-only",))
    try:
        async with http_client(create_app(ServerState(omni), ApiConfig())) as client:
            yield client
    finally:
        await omni.stop()


async def test_text_is_that_of_the_same_weights_with_a_talker(
    client: httpx2.AsyncClient, shared_servers: SharedServers
) -> None:
    answer = await client.post(URL, json=ASKED | {"model": "text-only"})
    assert answer.status_code == 200, answer.text
    with shared_servers.of(QWEN3_OMNI).client() as speaking:
        same = speaking.post(URL, json=ASKED | {"model": "omni"})
    assert answer.json()["choices"] == same.json()["choices"]


async def test_speech_is_refused(client: httpx2.AsyncClient) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
    chat = await client.post(URL, json=ASKED | spoken | {"model": "text-only"})
    error = error_of(chat, 400)
    assert (error["message"], error["param"]) == ("This model answers with text only.", "modalities")
    body = {"model": "text-only", "voice": "Ethan", "input": "Read this."}
    speech = await client.post("/v1/audio/speech", json=body)
    assert error_of(speech, 400)["message"] == "This model answers with text only."
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["voices"] == []
