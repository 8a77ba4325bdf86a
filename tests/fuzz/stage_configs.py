"""YAML of stage configs: loaded, or refused with a `ConfigError` of bounded length."""

import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from omni_server.config.load import load_stage_config, shipped_configs
from omni_server.errors import ConfigError
from tests.fuzz.mutate import changed_bytes
from tests.fuzz.target import Run, Target

MAX_MESSAGE = 100_000

_LISTS = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 30))
_MERGES = "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 30))
INSERTS = tuple(
    text.encode("utf-8", "surrogatepass")
    for text in (
        f"l0: &l0 [x]\n{_LISTS}platform: *l29\n", f"m0: &m0 {{a: 1}}\n{_MERGES}", "&a [*a]", "&a {b: *a}", "*a",
        "<<: *a", "<<: 5", "!!python/object/apply:os.system ['id']", "!!python/name:os.system", "!!int ''", "!!int x",
        "!!float x", "!!bool x", "!!null x", "!!timestamp x", "!!binary a", "!!set {a, b}", "!!omap [a]",
        "!!pairs [1]", "!x y", "2020-13-99", "2020-01-01 25:61:61", "2020-01-01T00:00:00+99:99", "0b", "0x",
        "1:99999999999:3", "9" * 5_000, "-", "- - - -", ".nan", "-.inf", ".inf", "1e999", "~", "? ", "? [1]\n: 2",
        "[" * 2_000, "{" * 2_000, "{a: " * 200, "\t", "\0", "\ud800", "\ufeff", "\u2028", "\x85", "%YAML 9.9\n---\n",
        "---\n", "...\n", "|\n  a", ">9\n", "'", '"', '"\\ud800"', '"\\xzz"', "#", "&", "*", "!", "@", "`", ": ",
        "\n\n", "    ", "yes", "on", "engine_args: {a: 1}", "engine_args: &e {e: *e}", "devices: [0, 0]",
        "max_num_seqs: -1", "devices: [99999999999999999999]",
    )
)  # fmt: skip


@asynccontextmanager
async def _open() -> AsyncIterator[Run]:
    corpus = [path.read_bytes() for path in shipped_configs().values()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.yaml"

        async def run(rng: random.Random) -> str:
            path.write_bytes(changed_bytes(rng, rng.choice(corpus), INSERTS))
            try:
                load_stage_config(path)
            except ConfigError as error:
                num_chars = len(str(error))
            else:
                return "loaded"
            assert num_chars < MAX_MESSAGE, "an endless message"
            return "refused"

        yield run


STAGE_CONFIGS = Target(
    "stage configs", "the shipped stage configs", _open, frozenset({"loaded", "refused"}), rounds=150
)
