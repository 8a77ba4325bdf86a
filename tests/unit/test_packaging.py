"""What the wheel holds and what the distribution announces."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from omni_server.config.load import shipped_configs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Files of a wheel that is built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("omni_server", "stages", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    program = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=copy, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(copy / "dist" / built.stdout.splitlines()[-1]) as wheel:
        return set(wheel.namelist())


def test_the_wheel_holds_every_module_and_what_lies_beside_them(wheel_names: set[str]) -> None:
    files = {
        str(file.relative_to(ROOT))
        for name in ("omni_server", "stages")
        for file in (ROOT / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }

    assert files <= wheel_names


def test_the_wheel_holds_every_stage_config(wheel_names: set[str]) -> None:
    assert {f"omni_server/configs/{file.name}" for file in shipped_configs().values()} <= wheel_names


def test_the_wheel_holds_the_web_page(wheel_names: set[str]) -> None:
    static = "omni_server/api/web/static"

    assert {f"{static}/{name}" for name in ("index.html", "style.css", "app.js", "icon.svg")} <= wheel_names


def test_the_wheel_holds_neither_tests_nor_scripts(wheel_names: set[str]) -> None:
    assert {name.partition("/")[0].partition("-")[0] for name in wheel_names} == {"omni_server", "stages"}


def test_every_entry_point_exists() -> None:
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}

    for group, entry_points in groups.items():
        for target in entry_points.values():
            module, _, name = target.partition(":")
            found = vars(importlib.import_module(module))[name]
            assert callable(found) or group == "omni_server.families", f"{group}: {target}"


def test_scripts_are_executable_and_explain_themselves() -> None:
    for script in sorted(file for file in (ROOT / "scripts").iterdir() if file.is_file()):
        assert os.access(script, os.X_OK), script
        finished = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.lower().startswith("usage: "), script


def test_ci_runs_exactly_the_test_script() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[1:] == ["exec scripts/test"]
