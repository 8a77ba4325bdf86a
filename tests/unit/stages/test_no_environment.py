"""What a stage computes is decided by its config, never by an environment variable."""

import ast
from pathlib import Path

import pytest

STAGES = Path(__file__).resolve().parents[3] / "stages"
ENVIRONMENT_OF_OS = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
ENVIRONMENT_MODULES = {"vllm.envs"}


def uses_of_the_environment(source: str) -> list[str]:
    """Where it is read, by whatever name it was imported. A variable may be set: that is how CUDA takes
    settings."""
    found = []
    tree = ast.parse(source)
    set_here = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in ENVIRONMENT_OF_OS and id(node) not in set_here:
                found.append(f"line {node.lineno}: .{name}")
            case ast.ImportFrom(module="os", names=names):
                found += [
                    f"line {node.lineno}: from os {n.name}" for n in names if n.name in ENVIRONMENT_OF_OS
                ]
            case ast.ImportFrom(module=str(module), names=names):
                full = {f"{module}.{n.name}" for n in names} | {module}
                found += [f"line {node.lineno}: {name}" for name in sorted(full & ENVIRONMENT_MODULES)]
            case ast.Import(names=names):
                found += [f"line {node.lineno}: {n.name}" for n in names if n.name in ENVIRONMENT_MODULES]
    return found


def test_no_module_of_the_stages_reads_the_environment() -> None:
    found = {
        str(path.relative_to(STAGES)): uses_of_the_environment(path.read_text())
        for path in STAGES.rglob("*.py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert len(found) > 50


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os\nos.getenv('A')",
        "import os as system\nsystem.environ.get('A')",
        "from os import environ",
        "from os import getenv as get",
        "from vllm import envs",
        "import vllm.envs as envs",
        "from vllm.envs import VLLM_USE_V1",
    ],
)
def test_every_way_to_read_it_is_seen(source: str) -> None:
    assert len(uses_of_the_environment(source)) == 1


def test_a_variable_may_be_set() -> None:
    assert uses_of_the_environment("import os\nos.environ['A'] = 'b'") == []
