"""Nothing that comes from outside is executed: no pickle, no eval, no shell, no code of a checkpoint. And
stages take their settings from the stage config, never from environment variables.

Ruff's rules S and TID251, as pyproject.toml sets them, cover most of it. What they cannot express is looked
for in the syntax trees here.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from omni_server.config.load import shipped_configs
from omni_server.config.stages import RESERVED_ENGINE_ARGS

ROOT = Path(__file__).parents[2]
ENVIRONMENT_OF_OS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

BANNED_BY_RUFF = """\
import pickle
from joblib import load
os.system("x")
eval("1")
exec("1")
torch.load(path)
numpy.load(path, allow_pickle=True)
yaml.load(text, Loader=yaml.Loader)
yaml.load(text)
yaml.load_all(text)
yaml.full_load(text)
yaml.unsafe_load(text)
subprocess.run("x", shell=True)
"""
BANNED_HERE = """\
compile("1", "", "eval")
__import__("x")
torch.load(path)
yaml.load(text, Loader=yaml.Loader)
subprocess.run("x", shell=flag)
AutoConfig.from_pretrained(path, trust_remote_code=True)
AutoConfig.from_pretrained(path, trust_remote_code=flag)
config("trust_remote_code")
os.environ["A"]
os.getenv("A")
system.environ.get("A")
from os import environ
from os import getenv as get
from vllm import envs
import vllm.envs as envs
from vllm.envs import VLLM_USE_V1
"""


def ruff(*arguments: str, source: str | None = None) -> list[str]:
    """What its security rules find, one per line."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--ignore-noqa",
        "--output-format",
        "concise",
        "--quiet",
    ]
    finished = subprocess.run(
        [*command, *arguments], input=source, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode in (0, 1), finished.stderr
    return [line for line in finished.stdout.splitlines() if re.search(r": (S\d+|TID251) ", line)]


def banned(source: str, *, is_stage: bool) -> Iterator[tuple[int, str]]:
    """Lines of what ruff does not find."""
    nodes = list(ast.walk(ast.parse(source)))
    # A variable may be set: that is how CUDA takes settings.
    subscripts = [node for node in nodes if isinstance(node, ast.Subscript)]
    being_set = {id(node.value) for node in subscripts if isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Call):
            named = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
            function = ast.unparse(node.func)
            if function in ("compile", "__import__"):
                yield node.lineno, function
            if function == "torch.load" and named.get("weights_only") != "True":
                yield node.lineno, "torch.load without weights_only=True"
            if function == "yaml.load" and named.get("Loader") not in ("yaml.SafeLoader", "_StrictLoader"):
                yield node.lineno, "yaml.load without a safe loader"
            if named.get("shell", "False") != "False":
                yield node.lineno, "a shell"
            if named.get("trust_remote_code", "False") != "False" or any(
                isinstance(given, ast.Constant) and given.value == "trust_remote_code" for given in node.args
            ):
                yield node.lineno, "trusts the code of a checkpoint"
        elif is_stage and id(node) not in being_set and reads_environment(node):
            yield node.lineno, "reads the environment"  # type: ignore[attr-defined]


def reads_environment(node: ast.AST) -> bool:
    """By whatever name it was imported."""
    match node:
        case ast.Attribute(attr=name):
            return name in ENVIRONMENT_OF_OS
        case ast.ImportFrom(module="os", names=names):
            return any(name.name in ENVIRONMENT_OF_OS for name in names)
        case ast.ImportFrom(module=str(module), names=names):
            return "vllm.envs" in {module, *(f"{module}.{name.name}" for name in names)}
        case ast.Import(names=names):
            return any(name.name == "vllm.envs" for name in names)
    return False


def test_nothing_that_is_banned_is_in_any_module() -> None:
    files = [file for package in ("omni_server", "stages") for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    found = {
        str(file.relative_to(ROOT)): list(
            banned(file.read_text(), is_stage=file.is_relative_to(ROOT / "stages"))
        )
        for file in files
    }
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert ruff("omni_server", "stages") == []


def test_what_is_banned_is_found() -> None:
    source = f"import numpy, os, subprocess, torch, yaml\n{BANNED_BY_RUFF}"
    lines = ruff("--stdin-filename", "omni_server/made_up.py", "-", source=source)
    assert {int(line.split(":")[1]) for line in lines} == set(range(2, 2 + len(BANNED_BY_RUFF.splitlines())))
    here = {line for line, _ in banned(BANNED_HERE, is_stage=True)}
    assert here == set(range(1, 1 + len(BANNED_HERE.splitlines())))
    assert list(banned('os.environ["A"] = "b"', is_stage=True)) == []


def test_no_stage_config_can_trust_the_code_of_a_checkpoint() -> None:
    assert "trust_remote_code" in RESERVED_ENGINE_ARGS
    for path in shipped_configs().values():
        assert "trust_remote_code" not in str(yaml.safe_load(path.read_text()))
