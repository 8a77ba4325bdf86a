"""Nothing that comes from outside is executed: no pickle, no eval, no shell, no code of a checkpoint."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from omni_server.config.load import shipped_configs
from omni_server.config.stages import RESERVED_ENGINE_ARGS

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for package in ("omni_server", "stages") for file in (ROOT / package).rglob("*.py"))
SERIALIZERS = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
EXECUTORS = frozenset({"eval", "exec", "compile", "__import__"})


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str, ast.expr], ast.Call]]:
    """Each call: the function as it is written, the arguments given by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}, node


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    found: list[str] = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        found += [f"imports {name}" for name in names if name.partition(".")[0] in SERIALIZERS]
    for function, named, call in calls(tree):
        if function in EXECUTORS or function in ("os.system", "os.popen"):
            found.append(f"calls {function}")
        if function == "torch.load" and ast.unparse(named.get("weights_only", ast.Constant(None))) != "True":
            found.append("torch.load without weights_only=True")
        if function in ("np.load", "numpy.load") and "allow_pickle" in named:
            found.append("np.load that may unpickle")
        if function in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load") and ast.unparse(
            named.get("Loader", ast.Constant(None))
        ) not in ("yaml.SafeLoader", "_StrictLoader"):
            found.append(f"calls {function} without a safe loader")
        if "trust_remote_code" in named and ast.unparse(named["trust_remote_code"]) != "False":
            found.append("trusts the code of a checkpoint")
        if ast.unparse(named.get("shell", ast.Constant(False))) != "False":
            found.append(f"{function} with a shell")
        if any(isinstance(given, ast.Constant) and given.value == "trust_remote_code" for given in call.args):
            found.append("trusts the code of a checkpoint")
    return found


def test_no_module_executes_what_it_loads() -> None:
    found = {str(file.relative_to(ROOT)): faults(file.read_text()) for file in SOURCES}
    assert {file: lines for file, lines in found.items() if lines} == {}
    assert len(found) > 300


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import os; os.system('x')",
        "eval('1')",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
        "subprocess.run('x', shell=True)",
    ],
)
def test_what_would_is_found(source: str) -> None:
    assert faults(source) != []


def test_no_stage_config_can_trust_the_code_of_a_checkpoint() -> None:
    assert "trust_remote_code" in RESERVED_ENGINE_ARGS
    for path in shipped_configs().values():
        assert "trust_remote_code" not in str(yaml.safe_load(path.read_text()))
