"""The engines' own folder for sockets and temporary files, and what is left of it when its server is killed."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.engine.temp_folder import PREFIX, TempFolder, sweep_dead_folders
from omni_server.errors import ConfigError

ROOT = Path(__file__).parents[3]
VARIABLES = ("TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR")


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of this test; not `tmp_path`, which is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)


def test_only_its_user_may_enter_it_and_it_is_removed_with_all_that_is_in_it(parent: Path) -> None:
    folder = TempFolder()
    assert folder.path.parent == parent
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "socket").touch()
    folder.remove()
    assert not list(parent.iterdir())
    folder.remove()


def test_engines_put_their_files_there_and_compiled_code_where_the_next_start_finds_it(parent: Path) -> None:
    folder = TempFolder()
    variables = folder.variables()
    assert variables["TMPDIR"] == variables["VLLM_RPC_BASE_PATH"] == str(folder.path)
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == parent
    assert not os.environ.keys() & set(VARIABLES)
    assert tempfile.gettempdir() == str(parent), "this process goes on as before"
    folder.remove()


def test_what_the_operator_has_set_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, f"/of/the/operator/{name}")
    folder = TempFolder()
    assert folder.variables() == {"TMPDIR": str(folder.path)}
    folder.remove()


def test_folder_of_a_killed_server_is_swept_with_what_its_engines_shared(parent: Path) -> None:
    program = (
        "import time\n"
        "from omni_server.engine.temp_folder import TempFolder\n"
        "print(TempFolder().path, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"TMPDIR": str(parent)}
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    name = f"vllm_dist_{uuid.uuid4().hex}"
    shared, of_another = Path(f"/dev/shm/{name}-tp:0-[0-1]-cpushm_0"), Path(f"/dev/shm/{name[:-1]}x-tp:0-cpushm_0")
    assert owner.stdout is not None
    try:
        path = Path(owner.stdout.readline().strip())
        (path / name).touch()
        shared.touch()
        of_another.touch()
        assert sweep_dead_folders() == []
        assert path.exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert path.exists(), "nobody could remove it"
        assert sweep_dead_folders() == [path]
        assert not path.exists()
        assert not shared.exists()
        assert of_another.exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        shared.unlink(missing_ok=True)
        of_another.unlink(missing_ok=True)


def test_a_link_of_that_name_is_not_followed(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    (parent / f"{PREFIX}link").symlink_to(tmp_path)
    assert sweep_dead_folders() == []
    assert (tmp_path / "kept").exists()


def test_a_folder_that_a_sweep_has_taken_meanwhile_is_made_again(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server's, which came between the folder and its lock."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def made_and_swept(**arguments: str) -> str:
        made.append(make(**arguments))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_swept)
    folder = TempFolder()
    assert [str(folder.path)] == made[1:]
    folder.remove()


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/1")  # nobody can make a folder there
    with pytest.raises(ConfigError, match=r"in /proc/1 .*set TMPDIR"):
        TempFolder()


def test_a_folder_without_room_is_named(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has filled up since it was made: before an engine is built. With room again, all is well."""
    folder = TempFolder()
    with monkeypatch.context() as full:

        def write(file: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(os, "write", write)
        with pytest.raises(ConfigError, match=rf"to {parent} \(No space left on device\): make room .*set TMPDIR"):
            folder.check_room()
    folder.check_room()
    assert not list(folder.path.iterdir())
    folder.remove()


def test_a_path_that_is_too_long_for_sockets_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = parent / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="too long for sockets"):
        TempFolder()
    assert not list(deep.iterdir())
