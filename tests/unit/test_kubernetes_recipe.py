"""docs/recipes/kubernetes.md against the code."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from omni_server.api.config import ApiConfig
from omni_server.cli.ray.flags import deployment_of
from omni_server.cli.ray.options import pipeline_needs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes" / "kubernetes.md").read_text()
GATEWAY, RAY = (
    list(yaml.safe_load_all(block)) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
)
SERVICE, _, ROUTE, POLICY = GATEWAY
(RAY_SERVICE,) = RAY
CLUSTER: dict[str, Any] = RAY_SERVICE["spec"]["rayClusterConfig"]
SERVE: dict[str, Any] = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])
(WORKERS,) = CLUSTER["workerGroupSpecs"]


def test_the_gateway_leads_to_the_pods_of_the_operating_guide() -> None:
    guide = (ROOT / "docs" / "operating.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    template = yaml.safe_load(block)["spec"]["template"]
    (container,) = template["spec"]["containers"]

    assert SERVICE["spec"]["selector"] == template["metadata"]["labels"]
    assert [port["port"] for port in SERVICE["spec"]["ports"]] == [
        port["containerPort"] for port in container["ports"]
    ]
    (rule,) = ROUTE["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": SERVICE["metadata"]["name"], "port": ApiConfig().port}]
    (target,) = POLICY["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == (ROUTE["kind"], ROUTE["metadata"]["name"])


def test_each_ray_worker_has_what_one_pipeline_needs() -> None:
    (application,) = SERVE["applications"]
    options, ray_options, config = deployment_of(
        [
            word
            for word in application["args"]["arguments"]
            if word not in ("--api-key-file", "/run/keys/keys")
        ]
    )
    needs = pipeline_needs(config, options.api)
    (worker,) = WORKERS["template"]["spec"]["containers"]
    limits = worker["resources"]["limits"]

    assert (limits["nvidia.com/gpu"], limits["cpu"]) == (needs.num_gpus, needs.num_cpus)
    assert WORKERS["replicas"] == ray_options.pipelines
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] > needs.graceful_shutdown_timeout_s
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_application_is_one_that_exists() -> None:
    (application,) = SERVE["applications"]
    module, name = application["import_path"].split(":")
    source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()

    assert f"\ndef {name}(args: " in source


def test_all_places_name_the_ray_that_the_extra_pins() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pinned,) = extras["ray"]

    assert pinned == f"ray[serve]=={CLUSTER['rayVersion']}"
    assert f"pip install '{pinned}'" in PAGE


def test_every_volume_that_is_mounted_is_there() -> None:
    for group in (CLUSTER["headGroupSpec"], WORKERS):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
    ports = CLUSTER["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    assert SERVE["http_options"]["port"] in [port["containerPort"] for port in ports]
