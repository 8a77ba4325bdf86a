"""A stage that dies again and again: the server ends, says so, and leaves nothing behind."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.orders import starts_held
from tests.faults.supervised_server import Listening, SupervisedServer, write_config
from tests.integration.server_process import wait_until
from tests.integration.test_server import ENDLESS, STREAM, answer_to, spoken, text_of, written
from tests.omni_families import QWEN3_OMNI
from tests.unit.api.schema import check_error

END_TIMEOUT_S = 120.0


@pytest.fixture
def config(orders: Path, tmp_path: Path) -> Path:
    path = tmp_path / "stages.yaml"
    return write_config(path, failing=True, family=QWEN3_OMNI, max_restarts=1, restart_window_s=3600)


def test_stage_that_dies_too_often_ends_the_server_with_a_message(
    qwen3_checkpoint: Path, config: Path, tmp_path: Path
) -> None:
    """Its standard output is on a full disk, which changes nothing."""
    flags = ["--stage-config", str(config)]
    doomed = SupervisedServer(qwen3_checkpoint, tmp_path / "log.txt", *flags, stdout=Path("/dev/full"))
    try:
        with doomed.client() as client:
            with starts_held():
                doomed.signal("code2wav", signal.SIGKILL)
                doomed.wait_until_down(client, "code2wav")
            doomed.wait_until_up(client)
            body = spoken(**ENDLESS, **STREAM) | {"stage_sampling": {"talker": ENDLESS}}
            speech = Listening(client, body)
            speech.until('"data":')
            doomed.signal("code2wav", signal.SIGKILL)
            last = speech.rest()
        check_error(last)
        assert last["error"]["code"] == "engine_dead"
        assert "stage 'code2wav'" in last["error"]["message"]
        wait_until(lambda: doomed.process.poll() is not None, END_TIMEOUT_S, lambda: doomed.log[-3000:])
        assert doomed.process.returncode == 1
    finally:
        doomed.process.kill()
        doomed.process.wait()
    assert "stage 'code2wav' has died 2 times within 3600 s, and supervision.max_restarts is 1" in doomed.log
    assert "stage 'code2wav' has died for good; the server stops" in doomed.log
    assert doomed.log.count("standard output cannot be written (No space left on device)") == 1
    assert "Traceback" not in doomed.log
    doomed.wait_until_nothing_is_left()


def test_checkpoint_that_is_damaged_meanwhile_ends_the_server_with_a_message(
    qwen3_checkpoint: Path, config: Path, tmp_path: Path
) -> None:
    """A stage cannot be started again from it; those that run go on until there have been attempts enough."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(qwen3_checkpoint, folder)
    doomed = SupervisedServer(folder, tmp_path / "log.txt", "--stage-config", str(config))
    try:
        with doomed.client() as client:
            weights = folder / "model.safetensors"
            # Another file under the name: the engines that run have mapped the old one.
            half = tmp_path / "half"
            half.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
            half.replace(weights)
            with starts_held():
                doomed.signal("talker", signal.SIGKILL)
                doomed.wait_until_down(client, "talker")
                assert text_of(answer_to(client, written()))
        wait_until(lambda: doomed.process.poll() is not None, END_TIMEOUT_S, lambda: doomed.log[-3000:])
        assert doomed.process.returncode == 1
    finally:
        doomed.process.kill()
        doomed.process.wait()
    assert "a restart has failed: stage 'talker' did not start" in doomed.log
    assert "stage 'talker' has died for good; the server stops" in doomed.log
    doomed.wait_until_nothing_is_left()
