"""Deadlines, Ctrl-C and SIGTERM; of a server that cannot write its caches."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from omni_server.engine.process_files import PREFIX
from tests.faults.full_disk import full
from tests.faults.supervised_server import ANSWER_TIMEOUT_S, Listening, SupervisedServer, samples, stopped
from tests.faults.test_client_gone import check_same, heard_in
from tests.integration.server_process import wait_until
from tests.integration.test_server import ENDLESS, STREAM, answer_to, outcome, spoken, written
from tests.unit.api.clients import URL, error_of
from tests.unit.api.schema import check_error

ENDLESS_SPEECH = spoken(**ENDLESS, **STREAM) | {"stage_sampling": {"talker": ENDLESS}}
END_TIMEOUT_S = 120.0


def engine_folders(temporary: Path) -> list[Path]:
    return list(temporary.glob(f"{PREFIX}*"))


@pytest.fixture(scope="module")
def client(patient: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=patient.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


def test_caches_that_cannot_be_written_cost_no_answer(
    patient: SupervisedServer, client: httpx2.Client, temporary: Path, full_caches: dict[str, Path]
) -> None:
    """Compiled code, models, settings: on a full disk, and in folders that cannot be made. The log tells it
    once."""
    assert outcome(answer_to(client, spoken())) == outcome(answer_to(client, spoken()))
    assert len(engine_folders(temporary)) == 2, "the engines', and the fork server's"
    start = patient.log.partition("runs in process")[0]
    (warning,) = [line for line in start.splitlines() if "No space left" in line]
    assert (
        f"vLLM's cache {full_caches['VLLM_CACHE_ROOT']} cannot be written (No space left on device)"
        in warning
    )
    assert "Traceback" not in start
    assert not [path for folder in full_caches.values() for path in folder.rglob("*") if path.is_file()]


def test_stage_that_has_no_room_for_temporary_files_is_back_when_there_is_some(
    patient: SupervisedServer, client: httpx2.Client, temporary: Path
) -> None:
    """The disk was filled while the server ran; nobody notices before a stage is to be started again."""
    before = outcome(answer_to(client, spoken())), outcome(answer_to(client, written()))
    patient.wait_until_idle()
    baseline = patient.baseline(client)
    log_length = len(patient.log)
    with full(temporary):
        assert outcome(answer_to(client, spoken())) == before[0]
        patient.signal("code2wav", signal.SIGKILL)
        patient.wait_until_down(client, "code2wav")
        told = f"a restart has failed: an engine's temporary files cannot be written to {temporary} (No space left on"
        wait_until(lambda: told in patient.log, ANSWER_TIMEOUT_S, lambda: patient.log[log_length:])
        assert outcome(answer_to(client, written())) == before[1]
    patient.wait_until_up(client)
    assert (outcome(answer_to(client, spoken())), outcome(answer_to(client, written()))) == before
    patient.wait_for_baseline(client, baseline)
    assert "Traceback" not in patient.log[log_length:]


def test_deadline_releases_a_request_wherever_it_is(patient: SupervisedServer, client: httpx2.Client) -> None:
    """One that is being spoken, one whose talker has not begun, one in the thinker's queue. All engines are
    stopped."""
    before = outcome(answer_to(client, spoken())), outcome(answer_to(client, written()))
    patient.wait_until_idle()
    baseline = patient.baseline(client)
    with patient.client() as other, patient.client() as third, ThreadPoolExecutor(1) as thread:
        spoken_stream = Listening(client, ENDLESS_SPEECH)
        spoken_stream.until('"data":')
        with stopped(patient, "code2wav", "talker"):
            unspoken_stream = Listening(other, ENDLESS_SPEECH)
            unspoken_stream.until("transcript")
            with stopped(patient, "thinker"):
                text = thread.submit(third.post, URL, json=written())
                for stream in (spoken_stream, unspoken_stream):
                    last = stream.rest()
                    check_error(last)
                    assert last["error"]["code"] == "request_timeout"
                assert error_of(text.result(), 504)["code"] == "request_timeout"
                wait_until(lambda: samples(client)["omni_requests_running"] == 0, 30)
    assert (outcome(answer_to(client, spoken())), outcome(answer_to(client, written()))) == before
    patient.wait_for_baseline(client, baseline)


def test_sigterm_to_all_processes_drains_what_runs_and_leaves_nothing(
    patient: SupervisedServer, client: httpx2.Client, temporary: Path
) -> None:
    """As systemd stops a service. The second signal, Ctrl-C, ends what is left. The last test of this
    server."""
    before = answer_to(client, spoken())
    with patient.client() as other, patient.client() as third, ThreadPoolExecutor(1) as thread:
        endless = Listening(client, ENDLESS_SPEECH)
        endless.until('"data":')
        told_before = len(patient.log)
        with stopped(patient, "talker"):  # so that this one is under way when the signals come
            finite = thread.submit(answer_to, other, spoken())
            wait_until(lambda: samples(third)["omni_requests_running"] == 2, 30)
            for pid in patient.process_tree():
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: patient.ready_code(third) == "server_shutting_down", 30)
        refused = third.post(URL, json=written())
        assert error_of(refused, 503)["code"] == "server_shutting_down"
        check_same(heard_in(finite.result()), heard_in(before))
        patient.process.send_signal(signal.SIGINT)
        last = endless.rest()
    check_error(last)
    assert last["error"]["code"] == "server_shutting_down"
    assert patient.process.wait(END_TIMEOUT_S) == 0, patient.log
    patient.wait_until_nothing_is_left()
    wait_until(lambda: engine_folders(temporary) == [], END_TIMEOUT_S)  # the fork server ends last
    told = patient.log[told_before:]
    assert "shutting down" in told
    for trouble in ("is down", "Traceback", "leaked"):
        assert trouble not in told
