"""scripts/measure_images: what it plans and what it makes of results; what it measures takes a GPU."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from tests.unit.scripts.test_load_scripts import SCRIPTS, script
from tests.unit.scripts.test_measure import RESULTS


def test_a_dry_run_names_the_commands_and_writes_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPTS / "measure_images", "out", "--dry-run", "--forms", "compiled"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    assert (
        lines[0] == "scripts/make_demo_checkpoint MODEL --family diffusers --size qwen-image --weights dummy"
    )
    assert lines[1] == "# compiled: diffusers with {'compile': True}, as OUT/compiled.yaml"
    assert [line.split()[0] for line in lines[2:]] == [
        "omni-server",
        *["scripts/bench_serving"] * 4,
        "benchmarks/plain_diffusers.py",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_page_compares_the_server_with_diffusers(tmp_path: Path) -> None:
    run = json.loads((RESULTS / "w1.json").read_text())
    rate = {level["load"]: f"{level['requests_per_s']:.3g}" for level in run["levels"]}
    (tmp_path / "plain-512x512.json").write_text(json.dumps(run))
    run["levels"] = run["levels"][:1]
    run["levels"][0]["end_to_end_s"]["p50"] -= 0.36
    (tmp_path / "plain-512x512-few.json").write_text(json.dumps(run))
    alone, together = {"size": "512x512", "batch": 1}, {"size": "512x512", "batch": 4}
    plain = [alone | {"image_s": 0.5, "step_s": 0.021}, together | {"failure": "out of memory"}]
    (tmp_path / "plain-diffusers.json").write_text(json.dumps(plain))
    args = Namespace(steps=20, callers=[1, 4, 16], sizes=["512x512", "1024x1024"])
    measure_images = script("measure_images")
    page = measure_images._page(args, ["GPU: some"], measure_images._read(args, tmp_path, "plain"))
    assert page.startswith("- GPU: some\n")
    assert (
        f"| plain | 512x512 | 20.0 / 21.0 | {rate[1]} / 2 | {rate[4]} / out of memory | {rate[16]} / - |"
        in page
    )
    assert "| plain | 1024x1024 | - / - | - / - | - / - | - / - |" in page
