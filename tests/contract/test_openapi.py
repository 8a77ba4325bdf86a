"""schemathesis asks the server what its OpenAPI document describes, and what it does not allow.

It runs as a program of its own, against a socket. All its checks are on but one, where schemathesis.toml says
why. The three about resources that requests make and delete find none here.
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_server.api.openapi import EXAMPLE_MODEL
from omni_server.types import ModelInfo
from tests.unit.api.fake_generator import CLONING_MODEL, VERSATILE_MODEL, FakeGenerator
from tests.unit.api.test_server import QUIET, Life, client_of, served

ROOT = Path(__file__).parents[2]
KEY = "sk-correct-horse"
MAX_EXAMPLES = 8
"""Of each operation and kind (right, wrong), beside those that cover each keyword of each schema."""

OF_STORED_RESPONSES = {("GET", "/v1/responses/{response_id}"), ("DELETE", "/v1/responses/{response_id}")}
"""schemathesis does not find the id of one."""
OF_STORED_VOICES = {("POST", "/v1/audio/voices"), ("DELETE", "/v1/audio/voices/{name}")}
"""What a model with voices of its own refuses."""
NOT_OF_READERS = {
    ("POST", path)
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/images/generations",
        "/v1/images/edits",
        "/tokenize",
        "/detokenize",
    )
}
"""What a model that only reads aloud refuses, whatever it is asked."""


async def run_schemathesis(
    url: str, keys: tuple[str, ...], max_examples: int, folder: Path
) -> tuple[dict[str, Any], str]:
    """Its report, and what it printed."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "schemathesis.cli"]
    command += [
        "--config-file",
        str(ROOT / "tests" / "contract" / "schemathesis.toml"),
        "run",
        f"{url}/openapi.json",
    ]
    command += ["--generation-deterministic", "--max-examples", str(max_examples), "--no-color"]
    command += ["--report", "json", "--report-json-path", str(report)]
    for key in keys:
        command += ["--header", f"Authorization: Bearer {key}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,  # it leaves caches behind
        env={"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert report.exists(), output.decode()
    found: dict[str, Any] = json.loads(report.read_text())
    return found, output.decode()


async def answered(url: str) -> dict[tuple[str, str], Counter[int]]:
    """The statuses of all answers, by method and route; those that no route was asked for have the route
    "none"."""
    async with client_of(url) as client:
        text = (await client.get("/metrics")).text
    statuses: dict[tuple[str, str], Counter[int]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "http_requests_total":
                target = (sample.labels["method"], sample.labels["handler"].replace(":path", ""))
                statuses.setdefault(target, Counter())[int(sample.labels["status"])] += int(sample.value)
    return statuses


@pytest.mark.parametrize(
    ("model", "keys", "max_examples"),
    [(VERSATILE_MODEL, (KEY,), MAX_EXAMPLES), (CLONING_MODEL, (), 1)],
    ids=["with a key", "a model that only reads aloud"],
)
async def test_server_does_what_its_description_says(
    model: ModelInfo, keys: tuple[str, ...], max_examples: int, tmp_path: Path
) -> None:
    model = replace(model, aliases=(*model.aliases, EXAMPLE_MODEL))
    life = Life(FakeGenerator(model))
    async with served(life, replace(QUIET, api_keys=keys, metrics_need_key=False, log_level="critical")):
        async with client_of(life.address) as client:
            headers = {"Authorization": f"Bearer {KEY}"}
            document = (await client.get("/openapi.json", headers=headers)).json()
        report, output = await run_schemathesis(life.address, keys, max_examples, tmp_path)
        statuses = await answered(life.address)
    assert report["exit_code"] == 0, output
    assert (report["failures"], report["errors"]) == ([], [])
    operations = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert report["operations"]["tested"] == len(operations)
    assert report["test_cases"]["generated"] > 1000
    # What is refused as a whole shows little: each operation has been answered as it should be, too.
    refused = NOT_OF_READERS if model.clones_voices else OF_STORED_VOICES
    refused |= OF_STORED_RESPONSES
    assert {target for target in operations if 200 not in statuses[target]} <= refused
    assert not [status for found in statuses.values() for status in found if status >= 500]
    guarded = [
        target for target in operations if "security" in document["paths"][target[1]][target[0].lower()]
    ]
    assert len(guarded) == (16 if keys else 0)
    # Without a key and with a wrong one.
    assert sum(found[401] for found in statuses.values()) >= 2 * len(guarded)
