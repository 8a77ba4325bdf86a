"""scripts/vllm_surface on small packages in the place of vLLM and of ours."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SURFACE = Path(__file__).parents[3] / "scripts" / "vllm_surface"

VLLM = {
    "__init__.py": "from vllm.params import Params\n__all__ = ['Params']\n",
    "params.py": "class Params:\n    temperature: float = 1.0\n    def clone(self): ...\n"
    "    def _check(self): ...\n",
    "engine/__init__.py": "from .core import *\n",
    "engine/core.py": """
from vllm.engine.output import Output
class Engine:
    def __init__(self, size: int) -> None:
        self.outputs: list[Output] = []
    def step(self, count: int) -> Output: ...
    def _prepare(self, batch: "list[int]") -> None: ...
""",
    "engine/output.py": """
from dataclasses import dataclass
@dataclass
class Stats:
    num_running: int = 0
@dataclass
class Output:
    tokens: list[int]
    stats: Stats | None = None
""",
    "worker.py": "class Worker:\n    def load(self, path: str) -> None: ...\n",
    "tools.py": "def round_up(value: int, to: int) -> int: ...\n",
}
OURS = {
    "engine.py": """
import logging
from vllm import Params
from vllm.engine import Engine
from vllm.engine.output import Output, Stats
from vllm.tools import round_up

class OurEngine(Engine):
    def step(self, count: int) -> Output:
        self._note(count)
        return super().step(round_up(count, 8))
    def _note(self, count: int) -> None:
        self._prepare([count])

def num_running(engine: Engine, params: Params) -> int:
    params.clone()
    params._check()
    logging.getLogger("vllm.engine.core")
    return sum(output.stats.num_running for output in engine.outputs if output.stats)

def made() -> Output:
    return Output(tokens=[1], stats=Stats(num_running=1))
""",
    "worker.py": """
from vllm.worker import Worker
def worker_class() -> type[Worker]: ...
class OurMixin:
    def load(self, path: str) -> None:
        super().load(path)
class OurWorker(OurMixin, worker_class()): ...
""",
}


STEP_WITH_BODY = """def step(self, count: int) -> Output:
        'Says what it does.'
        self.outputs.clear()
        return Output([count])"""


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def surface(
    tmp_path: Path,
    *replacements: tuple[str, str, str],
    more: dict[str, str] | None = None,
    ours: dict[str, str] = OURS,
    flags: tuple[str, ...] = (),
) -> tuple[int, list[str], str]:
    """Exit code, lines and standard error for a release whose files differ from `VLLM` by `replacements` and
    `more`."""
    base = written(tmp_path / "base" / "vllm", VLLM)
    release = VLLM | (more or {})
    for file, old, new in replacements:
        assert old in release[file]
        release[file] = release[file].replace(old, new)
    other = written(tmp_path / "other" / "vllm", release)
    command = [sys.executable, SURFACE, other, "--base", base, "--ours", written(tmp_path / "ours", ours)]
    finished = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    return finished.returncode, finished.stdout.split("\n"), finished.stderr


def test_a_release_that_changes_nothing_that_is_used_is_fine(tmp_path: Path) -> None:
    code, lines, errors = surface(
        tmp_path, ("params.py", "def clone(self)", "def copy(self): ...\n    def clone(self)")
    )
    assert (code, errors) == (0, "")
    assert lines[-2].startswith("nothing changed, of ")


@pytest.mark.parametrize(
    ("replacement", "row"),
    [
        (
            ("tools.py", "round_up", "ceil_to"),
            "vanished  vllm.tools.round_up  (imports; line 6)",
        ),
        (
            ("engine/core.py", "_prepare", "_make_ready"),
            "vanished  vllm.engine.core.Engine._prepare  (calls; line 13)",
        ),
        (
            ("engine/core.py", "step", "run"),
            "vanished  vllm.engine.core.Engine.step  (calls, overrides; line 9, 11)",
        ),
        (
            ("engine/core.py", "self.outputs", "self.results"),
            "vanished  vllm.engine.core.Engine.outputs  (reads; line 19)",
        ),
        (
            ("engine/output.py", "    num_running: int = 0", "    running: int = 0"),
            "vanished  vllm.engine.output.Stats.num_running  (constructs, reads; line 19, 22)",
        ),
        (
            ("params.py", "_check", "check"),
            "vanished  vllm.params.Params._check  (calls; line 17)",
        ),
        (
            ("worker.py", "def load", "def load_model"),
            "vanished  vllm.worker.Worker.load  (calls, overrides; line 5, 6)",
        ),
    ],
)
def test_what_has_vanished_is_told_with_its_lines(
    tmp_path: Path, replacement: tuple[str, str, str], row: str
) -> None:
    code, lines, errors = surface(tmp_path, replacement)
    assert (code, errors) == (1, "")
    assert f"  {row}" in lines


def test_what_is_defined_in_another_module_has_moved_and_is_looked_into_there(tmp_path: Path) -> None:
    code, lines, _ = surface(
        tmp_path,
        ("tools.py", "def round_up(value: int, to: int)", "def other()"),
        ("engine/core.py", "vllm.engine.output", "vllm.outputs"),
        ("engine/output.py", "class Output", "class Unused"),
        ("engine/output.py", "class Stats", "class Nothing"),
        more={
            "math_tools.py": "def round_up(value: int, to: int) -> int: ...\n",
            "outputs.py": VLLM["engine/output.py"].replace("num_running", "running"),
        },
    )
    assert code == 1
    assert lines[1:-3] == [
        "ours.engine",
        "  moved     vllm.engine.output.Output  (imports; line 5)",
        "            to vllm.outputs.Output",
        "  moved     vllm.engine.output.Stats  (imports; line 5)",
        "            to vllm.outputs.Stats",
        "  moved     vllm.tools.round_up  (imports; line 6)",
        "            to vllm.math_tools.round_up",
        "  vanished  vllm.engine.output.Stats.num_running  (constructs, reads; line 19, 22)",
    ]


def test_what_another_module_still_brings_has_not_moved(tmp_path: Path) -> None:
    code, _, _ = surface(
        tmp_path,
        ("tools.py", VLLM["tools.py"], "from vllm.math_tools import round_up\n"),
        more={"math_tools.py": VLLM["tools.py"]},
    )
    assert code == 0


@pytest.mark.parametrize(
    ("replacement", "name", "details"),
    [
        (
            ("tools.py", ", to: int", ", *, to: int = 8"),
            "vllm.tools.round_up",
            ["- to: int", "+ *", "+ to: int = 8"],
        ),
        (
            ("engine/core.py", "step(self, count: int) -> Output", "step(self, count: int) -> list[Output]"),
            "vllm.engine.core.Engine.step",
            ["- -> Output", "+ -> list[Output]"],
        ),
        (
            ("tools.py", "value: int, to: int", "to: int, value: int"),
            "vllm.tools.round_up",
            ["order: to: int, value: int, -> int"],
        ),
        (
            ("engine/output.py", "tokens: list[int]", "tokens: bytes\n    rank: int"),
            "vllm.engine.output.Output",
            ["+ rank is required"],
        ),
        (
            ("engine/output.py", "tokens: list[int]", "tokens: bytes"),
            "vllm.engine.output.Output.tokens",
            ["- tokens: list[int]", "+ tokens: bytes"],
        ),
    ],
)
def test_a_changed_signature_is_told_with_what_differs(
    tmp_path: Path, replacement: tuple[str, str, str], name: str, details: list[str]
) -> None:
    code, lines, _ = surface(tmp_path, replacement)
    assert code == 1
    [start] = [index for index, line in enumerate(lines) if line.startswith(f"  changed   {name}  (")]
    assert [line.strip() for line in lines[start + 1 : start + 1 + len(details)]] == details


def test_an_overridden_method_that_does_something_else_now_is_told(tmp_path: Path) -> None:
    code, lines, _ = surface(
        tmp_path, ("engine/core.py", "def step(self, count: int) -> Output: ...", STEP_WITH_BODY)
    )
    assert code == 1
    assert lines[1:-3] == [
        "ours.engine",
        "  rewritten vllm.engine.core.Engine.step  (overrides; line 9)",
        "            ours calls it; lines of its body: -1 +2",
    ]


def test_how_its_body_has_changed_is_printed_on_demand(tmp_path: Path) -> None:
    _, lines, _ = surface(
        tmp_path,
        ("engine/core.py", "def step(self, count: int) -> Output: ...", STEP_WITH_BODY),
        flags=("--diff",),
    )
    assert [line.strip() for line in lines[5:8]] == [
        "-...",
        "+self.outputs.clear()",
        "+return Output([count])",
    ]


def test_a_new_name_of_vllm_that_ours_would_override_is_told(tmp_path: Path) -> None:
    code, lines, _ = surface(
        tmp_path, ("engine/core.py", "    def _prepare", "    def _note(self): ...\n    def _prepare")
    )
    assert code == 1
    assert lines[1:-3] == [
        "ours.engine",
        "  clashes   ours.engine.OurEngine._note  (overrides; line 12)",
        "            with vllm.engine.core.Engine._note",
    ]


def test_without_a_release_everything_beyond_the_public_api_is_listed(tmp_path: Path) -> None:
    base, ours = written(tmp_path / "vllm", VLLM), written(tmp_path / "ours", OURS)
    command = [sys.executable, SURFACE, "--base", base, "--ours", ours]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = re.findall(r"\bvllm\.[\w.]+", "\n".join(listed))
    assert "vllm.params.Params._check" in names
    assert "vllm.worker.Worker.load" in names
    assert not {"vllm.Params", "vllm.params.Params.clone"} & set(names)
    assert listed[-1] == f"{len(set(names))} names of vLLM"


def test_a_mixin_that_is_combined_with_nothing_known_is_an_error(tmp_path: Path) -> None:
    code, lines, errors = surface(
        tmp_path, ours={"mixin.py": "class LonelyMixin:\n    def f(self): super().f()\n"}
    )
    assert (code, lines) == (2, [""])
    assert "ours.mixin.LonelyMixin" in errors


def test_a_folder_that_is_not_vllm_is_an_error(tmp_path: Path) -> None:
    base, ours = written(tmp_path / "vllm", VLLM), written(tmp_path / "ours", OURS)
    command = [sys.executable, SURFACE, tmp_path, "--base", base, "--ours", ours]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (
        2,
        f"vllm_surface: {tmp_path} is not the package `vllm`\n",
    )


def test_our_own_packages_are_read_whole() -> None:
    listed = subprocess.run([sys.executable, SURFACE], capture_output=True, text=True, check=True).stdout
    assert "vllm.v1.engine.async_llm.AsyncLLM" in listed
    assert int(listed.splitlines()[-1].partition(" ")[0]) > 100
