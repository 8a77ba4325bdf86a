"""With matplotlib the picture; without it, which is as well an environment of users, the advice."""

import importlib.util
from pathlib import Path

import pytest

from omni_server.bench.plot import plot, require_matplotlib
from omni_server.errors import ConfigError
from tests.unit.bench.rows import level, row, run


def test_a_picture_is_written_or_the_extra_is_named_that_draws_it(tmp_path: Path) -> None:
    file = tmp_path / "plot.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match=r"omni-server\[bench\]"):
            require_matplotlib()
        return

    require_matplotlib()
    plot(run(level(1, [row()]), level(4, [row(underrun_s=0.2)])), {"ttfa": [0.25, 0.3]}, file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
