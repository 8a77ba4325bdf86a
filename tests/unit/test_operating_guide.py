"""docs/operating.md against the code: metrics, flags, the example files."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.cli.main import main
from omni_server.metrics.stage_metrics import ArStageMetrics, QueueLevel, StageLevel, pipeline_text
from tests.unit.api.clients import http_client
from tests.unit.api.fake_generator import FakeGenerator

GUIDE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
METRICS = GUIDE[GUIDE.index("## Metrics") : GUIDE.index("What it costs")]


async def test_guide_lists_every_metric_and_no_other() -> None:
    generator = FakeGenerator()
    generator.metrics = pipeline_text(
        "omni",
        {"thinker": ArStageMetrics()},
        {"thinker": 0},
        {("thinker", "talker"): QueueLevel(1, 0, 0)},
        {"thinker": StageLevel(is_up=True, has_failed=False, num_restarts=0)},
    )
    async with http_client(create_app(ServerState(generator), ApiConfig())) as client:
        text = (await client.get("/metrics")).text
    served = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.startswith("process_")
    }
    rows = [line for line in METRICS.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert told - {"process_*"} == served


def test_flags_in_the_guide_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    help_text = capsys.readouterr().out
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE))
    assert all(re.search(rf"{flag}(?![\w-])", help_text) for flag in flags)


def test_the_time_for_running_requests_is_the_default() -> None:
    """The defaults of limits are in docs/security.md (test_security_guide.py)."""
    assert f"`--shutdown-timeout` seconds ({ApiConfig().shutdown_timeout_s:g})" in GUIDE


def test_deployment_probes_what_is_served() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    pod = yaml.safe_load(block)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert [probe["path"] for probe in probes] == ["/health", "/health", "/ready"]
    assert {probe["port"] for probe in probes} == {ApiConfig().port}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/dev/shm", "/home/omni/.cache"} <= mounted
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert pod["terminationGracePeriodSeconds"] > ApiConfig().shutdown_timeout_s
