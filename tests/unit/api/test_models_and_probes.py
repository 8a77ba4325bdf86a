"""`/v1/models`, the probes, and the API's own description."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import NotFoundError

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.openapi import EXAMPLE_MODEL
from omni_server.api.state import ServerState
from omni_server.errors import StageDownError
from tests.unit.api.clients import app_of, chat, error_of, http_client, openai_client, post
from tests.unit.api.fake_generator import IMAGE_MODEL, TEXT_ONLY_MODEL, VERSATILE_MODEL, FakeGenerator
from tests.unit.api.schema import check_model


async def test_models_are_listed_by_every_served_name() -> None:
    async with openai_client(app_of(FakeGenerator())) as client:
        models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["org/omni-tiny", "omni"]
    for model in models:
        check_model(model.model_dump())
        assert model.created == 1_780_000_000
        assert model.model_extra is not None
        assert model.model_extra["max_model_len"] == 2048
        assert model.model_extra["voices"] == ["Chelsie", "Ethan"]
        assert model.model_extra["modalities"] == {
            "input": ["text", "audio", "image", "video"],
            "output": ["text", "audio"],
        }


async def test_model_is_retrieved_by_an_id_with_a_slash() -> None:
    async with openai_client(app_of(FakeGenerator())) as client:
        assert (await client.models.retrieve("org/omni-tiny")).id == "org/omni-tiny"
        assert (await client.models.retrieve("omni")).id == "omni"
        with pytest.raises(NotFoundError) as caught:
            await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_model_without_a_talker_has_no_voices() -> None:
    async with http_client(app_of(FakeGenerator(TEXT_ONLY_MODEL))) as client:
        card = (await client.get("/v1/models/omni")).json()
    assert card["voices"] == []
    assert card["modalities"]["output"] == ["text"]


async def status_of(state: ServerState, path: str, method: str = "GET") -> int:
    async with http_client(create_app(state, ApiConfig())) as client:
        response = await client.request(method, path)
    if response.status_code != 200 and method == "GET":
        error_of(response, response.status_code)
        assert "retry-after" in response.headers
    return response.status_code


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_follow_the_life_of_the_server(method: str) -> None:
    state = ServerState()

    async def statuses() -> list[int]:
        return [await status_of(state, path, method) for path in ("/health", "/ready", "/live")]

    assert await statuses() == [503, 503, 200]
    generator = FakeGenerator()
    generator.ready = False
    state.generator = generator
    assert await statuses() == [503, 503, 200]
    generator.ready = True
    assert await statuses() == [200, 200, 200]
    assert [await status_of(state, path, method) for path in ("/healthz", "/readyz", "/livez")] == [
        200,
        200,
        200,
    ]
    state.draining.set()
    assert await statuses() == [200, 503, 200]
    state.draining.clear()
    generator.alive = False
    assert await statuses() == [503, 503, 200]


async def test_ready_names_the_stage_that_is_down_and_other_requests_are_served() -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        generator.down = StageDownError("talker")
        ready = await client.get("/ready")
        error = error_of(ready, 503)
        assert error["code"] == "talker_down"
        assert "'talker'" in error["message"]
        assert ready.headers["retry-after"] == "5"
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        generator.down = None
        assert (await client.get("/ready")).status_code == 200


async def test_ready_names_the_replicas_that_have_failed_while_others_serve() -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        assert (await client.get("/ready")).json() == {"status": "ready"}
        generator.failed = ("talker/1",)
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (
            200,
            {"status": "ready", "failed_replicas": ["talker/1"]},
        )


async def test_health_has_no_body() -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        assert (await client.get("/health")).content == b""


@pytest.mark.parametrize(
    ("state", "code"),
    [("starting", "model_not_ready"), ("draining", "server_shutting_down"), ("dead", "engine_dead")],
)
async def test_requests_are_refused_while_the_server_cannot_serve(state: str, code: str) -> None:
    generator = FakeGenerator()
    generator.alive = state != "dead"
    shared = ServerState(None if state == "starting" else generator)
    if state == "draining":
        shared.draining.set()
    app = create_app(shared, ApiConfig())
    response = await post(app, chat())
    assert error_of(response, 503)["code"] == code
    assert 1 <= int(response.headers["retry-after"]) <= 120
    async with http_client(app) as client:
        assert error_of(await client.get("/v1/models"), 503)["code"] == code
        assert error_of(await client.get("/ready"), 503)["code"] == code
    assert generator.requests == []


async def test_description_declares_the_envelope_on_every_operation() -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    chat_operation = document["paths"]["/v1/chat/completions"]["post"]
    assert {"400", "404", "413", "500", "503"} <= set(chat_operation["responses"])
    assert set(chat_operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["required"] == ["model", "messages"]
    for path in document["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if status != "200":
                    schema = response["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorEnvelope"}
    references = str(document).split("#/components/schemas/")[1:]
    assert {reference.split("'")[0] for reference in references} <= set(schemas)


async def test_description_without_keys_has_no_security_but_tells_of_other_sites() -> None:
    for config in (ApiConfig(), ApiConfig(host="0.0.0.0")):
        document = app_of(FakeGenerator(), config).openapi()
        assert "securitySchemes" not in document["components"]
        for methods in document["paths"].values():
            for operation in methods.values():
                assert "403" in operation["responses"]
                assert "security" not in operation


async def test_examples_of_the_description_are_answered() -> None:
    app = app_of(FakeGenerator(replace(VERSATILE_MODEL, name=EXAMPLE_MODEL)))
    image_app = app_of(FakeGenerator(replace(IMAGE_MODEL, name=EXAMPLE_MODEL)))
    num_examples = 0
    async with http_client(app) as client, http_client(image_app) as image_client:
        for path, methods in app.openapi()["paths"].items():
            for method, operation in methods.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                for example in content.get("examples", {}).values():
                    is_image = example["value"].get("modalities") == ["image"]
                    asked = image_client if is_image else client
                    response = await asked.request(method, path, json=example["value"])
                    assert response.status_code == 200, response.text
                    num_examples += 1
    assert num_examples == 16


@pytest.mark.parametrize(
    ("result", "is_valid"),
    [({"tool_call_id": "a"}, True), ({}, False), ({"tool_call_id": None}, False)],
    ids=["with the id of its call", "without it", "null"],
)
async def test_description_requires_of_a_tool_message_what_the_server_does(
    result: dict[str, Any], *, is_valid: bool
) -> None:
    app = app_of(FakeGenerator())
    body = chat()
    body["messages"] += [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "content": "1", **result},
    ]
    components = app.openapi()["components"]
    schema = {"$ref": "#/components/schemas/ChatCompletionRequest", "components": components}
    assert Draft202012Validator(schema).is_valid(body) == is_valid
    assert ((await post(app, body)).status_code == 200) == is_valid


async def test_description_can_be_switched_off() -> None:
    async with http_client(app_of(FakeGenerator(), ApiConfig(docs=False))) as client:
        for path in ("/openapi.json", "/docs", "/docs/swagger-ui-bundle.js"):
            assert (await client.get(path)).status_code == 404


def test_api_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, omni_server.api.server; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )
    assert (result.stdout.strip(), result.stderr) == ("set()", "")
