"""Each engine process killed, stopped and made to raise: idle, in the first step of a request, and
mid-stream; and a decoder that loses its state.

After each fault: what the clients get, what goes on meanwhile, that the stage comes back by itself, that the
same request has the same answer as before, and that nothing is left behind.
"""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from tests.faults.orders import (
    let_go,
    starts_held,
    tell_to_fail,
    tell_to_forget,
    tell_to_hold,
    wait_until_held,
    withdraw,
)
from tests.faults.supervised_server import (
    ANSWER_TIMEOUT_S,
    HANG_TIMEOUT_S,
    RECOVERY_TIMEOUT_S,
    STAGES,
    Listening,
    SupervisedServer,
    samples,
    stopped,
    write_config,
)
from tests.integration.server_process import MODEL, wait_until
from tests.integration.test_server import (
    ENDLESS,
    HELLO,
    IMAGE_PART,
    SPEECH_PART,
    STREAM,
    VIDEO_PART,
    answer_to,
    arguments,
    outcome,
    spoken,
    written,
)
from tests.integration.test_server_audio import SPEECH_URL
from tests.omni_families import QWEN3_OMNI, QWEN3_TTS, OmniFamily, for_families
from tests.unit.api.clients import URL, error_of
from tests.unit.api.schema import check_error

ENDLESS_SPEECH = spoken(**ENDLESS, **STREAM) | {"stage_sampling": {"talker": ENDLESS}}
# With rows from the thinker, whatever it does with text.
ENDLESS_SPEECH_OF_A_PICTURE = spoken([IMAGE_PART], **ENDLESS, **STREAM) | {
    "stage_sampling": {"talker": ENDLESS}
}
ENDLESS_TEXT = written(**ENDLESS)
# Of a model that only reads aloud, which is not asked for longer speech than fits its context.
READ_ALOUD = {"model": MODEL, "input": HELLO, "response_format": "pcm", "seed": 7} | {
    "stage_sampling": {"talker": {"temperature": 0, "min_tokens": 24, "max_tokens": 24}}
}
ENDLESS_READING = READ_ALOUD | {"stage_sampling": {"talker": ENDLESS | {"max_tokens": 1900}}}
NUM_CODES = 16 * 24_000 // QWEN3_OMNI.samples_per_code
"""Of 16 s."""


@dataclass(frozen=True)
class Before:
    """The server as it was before the first fault."""

    speech: tuple[str, bytes]
    text: tuple[str, bytes] | None
    """None of a model that only reads aloud."""
    baseline: dict[str, float]


def of_each_stage(*stages_of_tts: str) -> pytest.MarkDecorator:
    """Runs a test for all stages of Qwen3-Omni, and for these of Qwen3-TTS."""
    stages = [(QWEN3_OMNI, stage) for stage in STAGES]
    stages += [(QWEN3_TTS, stage) for stage in stages_of_tts]
    ids = [stage if family is QWEN3_OMNI else f"{family.name}-{stage}" for family, stage in stages]
    return pytest.mark.parametrize(("family", "stage"), stages, ids=ids, indirect=["family"], scope="module")


of_omni = for_families(QWEN3_OMNI)


@pytest.fixture(scope="module")
def server(
    family: OmniFamily,
    checkpoints: dict[OmniFamily, Path],
    orders: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SupervisedServer]:
    folder = tmp_path_factory.mktemp("server")
    config = write_config(
        folder / "stages.yaml",
        failing=True,
        family=family,
        hang_timeout_s=HANG_TIMEOUT_S,
        max_restarts=100,
        max_backoff_s=0,
    )
    flags = ["--stage-config", str(config)]
    checkpoint, log = checkpoints[family], folder / "log.txt"
    server = SupervisedServer(checkpoint, log, *flags, has_queue=family.chats)
    try:
        yield server
        end_while_a_stage_restarts(server)
    finally:
        server.process.kill()
        server.process.wait()


def end_while_a_stage_restarts(server: SupervisedServer) -> None:
    """SIGTERM must end it as cleanly as if nothing had happened."""
    files = server.shared_files().keys()
    server.signal("talker", signal.SIGKILL)
    # The next one has made a semaphore, which it will not be able to remove.
    wait_until(
        lambda: any(name.startswith("sem.mp-") for name in server.shared_files().keys() - files),
        RECOVERY_TIMEOUT_S,
    )
    exit_code = server.terminate()
    assert exit_code == 0, server.log
    server.wait_until_nothing_is_left()
    assert "resource_tracker" not in server.log, "semaphores or shared memory of a dead engine were left"


@pytest.fixture(scope="module")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def before(family: OmniFamily, server: SupervisedServer, client: httpx2.Client) -> Before:
    speech, text = spoken_answer(client, family), None
    if family.chats:
        text = outcome(answer_to(client, written()))
        answer_to(client, spoken([IMAGE_PART]))  # some threads and files are made with the first
    server.wait_until_idle()
    return Before(speech, text, server.baseline(client))


def spoken_answer(client: httpx2.Client, family: OmniFamily) -> tuple[str, bytes]:
    """The same whenever it is asked for."""
    if family.chats:
        return outcome(answer_to(client, spoken()))
    response = client.post(SPEECH_URL, json=READ_ALOUD)
    assert response.status_code == 200, response.text
    return "", response.content


def endless(family: OmniFamily) -> tuple[str, Any]:
    """Where such speech is asked for, and how."""
    if family.chats:
        return URL, spoken(**ENDLESS) | {"stage_sampling": {"talker": ENDLESS}}
    return SPEECH_URL, ENDLESS_READING | {"stream": False}


def listening(client: httpx2.Client, family: OmniFamily) -> Listening:
    """To endless speech, of which some has come."""
    if family.chats:
        speech = Listening(client, ENDLESS_SPEECH)
    else:
        speech = Listening(client, ENDLESS_READING | {"stream_format": "sse"}, SPEECH_URL)
    speech.until('"data":' if family.chats else '"audio":')
    return speech


@contextmanager
def one_restart_of(
    stage: str,
    server: SupervisedServer,
    client: httpx2.Client,
    before: Before,
    family: OmniFamily = QWEN3_OMNI,
) -> Iterator[None]:
    """The block makes the stage go down, and it stays down there. Behind it everything is as it was, but for
    the stage's process."""
    pids = {name: server.pid_of(name) for name in family.stages}
    restarts = samples(client)
    with starts_held():
        yield
    server.wait_until_up(client)
    assert spoken_answer(client, family) == before.speech
    if before.text is not None:
        assert outcome(answer_to(client, written())) == before.text
    server.wait_for_baseline(client, before.baseline)
    assert {name for name in family.stages if server.pid_of(name) != pids[name]} == {stage}
    now = samples(client)
    for name in family.stages:
        counter = f"omni_stage_restarts_total {name}"
        assert now[counter] - restarts[counter] == (name == stage)


def check_while_down(
    stage: str, client: httpx2.Client, before: Before, family: OmniFamily = QWEN3_OMNI
) -> None:
    """The stage stays down."""
    ready = client.get("/ready")
    assert error_of(ready, 503)["code"] == f"{stage}_down"
    assert stage in error_of(ready, 503)["message"]
    assert client.get("/health").status_code == 200
    path, body = endless(family)
    refused = client.post(path, json=body)
    assert error_of(refused, 503)["code"] == f"{stage}_down"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert samples(client)[f"omni_stage_up {stage}"] == 0
    if stage != "thinker" and before.text is not None:
        assert outcome(answer_to(client, written())) == before.text
    elif before.text is not None:
        assert error_of(client.post(URL, json=written()), 503)["code"] == f"{stage}_down"


def check_failed(stage: str, last: dict[str, Any]) -> None:
    """The last event of a stream whose stage has died."""
    check_error(last)
    assert last["error"]["code"] == "engine_dead"
    assert f"stage '{stage}'" in last["error"]["message"]


def failure_of_official_client(server: SupervisedServer, family: OmniFamily) -> Exception:
    """What the official client raises in the middle of a stream."""
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as official,
        pytest.raises((openai.APIError, httpx2.RemoteProtocolError)) as failure,
    ):
        hear_out(official, family)
    return failure.value


def hear_out(official: openai.OpenAI, family: OmniFamily) -> None:
    """Endless speech."""
    if family.chats:
        for _ in official.chat.completions.create(**arguments(ENDLESS_SPEECH)):
            pass
        return
    body = {"stage_sampling": ENDLESS_READING["stage_sampling"]}
    create = official.audio.speech.with_streaming_response.create
    with create(model=MODEL, voice="alloy", input=HELLO, response_format="pcm", extra_body=body) as file:
        for _ in file.iter_bytes():
            pass


@contextmanager
def posted(server: SupervisedServer, body: Any, path: str = URL) -> Iterator[Future[httpx2.Response]]:
    """A request that is on its way in a thread."""
    with server.client() as other, ThreadPoolExecutor(1) as thread:
        yield thread.submit(other.post, path, json=body)


def check_answered_with_failure(stage: str, response: httpx2.Response) -> None:
    error = error_of(response, 503)
    assert error["code"] == "engine_dead"
    assert f"stage '{stage}'" in error["message"]
    assert not re.search(r"Traceback|\.py\b|/", error["message"])
    assert 1 <= int(response.headers["retry-after"]) <= 60


@of_each_stage(*QWEN3_TTS.stages)
def test_killed_in_the_middle_of_a_stream(
    family: OmniFamily, stage: str, server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """All that runs there is told: a stream, an answer in one piece, and a stream of the official client,
    whose connection is closed where it is one of a sound file."""
    path, body = endless(family)
    with (
        one_restart_of(stage, server, client, before, family),
        posted(server, body, path) as whole,
        ThreadPoolExecutor(1) as thread,
    ):
        raised = thread.submit(failure_of_official_client, server, family)
        speech = listening(client, family)
        wait_until(lambda: client.get("/load").json() == {"server_load": 3}, 30)
        server.signal(stage, signal.SIGKILL)
        check_failed(stage, speech.rest())
        check_answered_with_failure(stage, whole.result())
        error = raised.result()
        if isinstance(error, openai.APIError):
            assert error.code == "engine_dead"
            assert f"stage '{stage}'" in error.message
        else:
            assert not family.chats
        server.wait_until_down(client, stage)
        check_while_down(stage, client, before, family)


@of_omni
@pytest.mark.parametrize("stage", STAGES)
def test_raises_in_the_middle_of_a_stream(
    stage: str, server: SupervisedServer, client: httpx2.Client, before: Before, orders: Path
) -> None:
    with one_restart_of(stage, server, client, before):
        speech = Listening(client, ENDLESS_SPEECH)
        speech.until('"data":')
        tell_to_fail(orders, stage)
        check_failed(stage, speech.rest())
        server.wait_until_down(client, stage)


@of_each_stage("talker")
def test_stopped_in_the_middle_of_a_stream(
    family: OmniFamily, stage: str, server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """A request that comes before that is noticed is told as well, unless it is for text and the thinker
    runs. Where the talker is stopped, the thinker fills the queue, whose reader is not there any more, and is
    held back."""
    path, body = endless(family)
    with one_restart_of(stage, server, client, before, family):
        speech = listening(client, family)
        server.signal(stage, signal.SIGSTOP)
        with posted(server, body, path) as late, posted(server, written()) as text:
            check_failed(stage, speech.rest())
            check_answered_with_failure(stage, late.result())
            if stage == "thinker":
                check_answered_with_failure(stage, text.result())
            elif family.chats:
                assert text.result().status_code == 200
                assert outcome(text.result().json()) == before.text
        server.wait_until_down(client, stage)


@of_omni
def test_talker_killed_with_rows_that_it_has_not_read(
    server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """Its part of the prompt is under way: nothing of it is in the stream."""
    with one_restart_of("talker", server, client, before):
        server.signal("talker", signal.SIGSTOP)
        speech = Listening(client, ENDLESS_SPEECH_OF_A_PICTURE)
        for _ in range(10):
            speech.until("transcript")
        assert samples(client)["omni_shared_memory_slots_in_use thinker talker"] > 0
        server.signal("talker", signal.SIGKILL)
        check_failed("talker", speech.rest())


@contextmanager
def told_before_any_sound(
    stage: str, server: SupervisedServer, client: httpx2.Client, family: OmniFamily
) -> Iterator[None]:
    """The stage fails in the block, in the first step of a request: of one for text where it is the thinker,
    else of a spoken one, of which there is text already if there is any."""
    if stage == "thinker" or not family.chats:
        path, body = (URL, ENDLESS_TEXT) if family.chats else (SPEECH_URL, ENDLESS_READING)
        with posted(server, body, path) as whole:
            yield
            check_answered_with_failure(stage, whole.result())
    else:
        speech = Listening(client, ENDLESS_SPEECH)
        yield
        check_failed(stage, speech.rest())
        assert any(re.search(r'"transcript":"[^"]', event) for event in speech.received)
        assert not any('"data":' in event for event in speech.received)


@of_each_stage("talker")
def test_killed_in_the_first_step(
    family: OmniFamily,
    stage: str,
    server: SupervisedServer,
    client: httpx2.Client,
    before: Before,
    orders: Path,
) -> None:
    """The process is within the model's forward then, and would go on if it could."""
    with one_restart_of(stage, server, client, before, family):
        tell_to_hold(orders, stage)
        with told_before_any_sound(stage, server, client, family):
            wait_until_held(orders, stage)
            server.signal(stage, signal.SIGKILL)
            let_go(orders, stage)
            server.wait_until_down(client, stage)


@of_omni
@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_stopped_while_nobody_needs_it(
    stage: str, server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """The call that it has to answer finds it."""
    with one_restart_of(stage, server, client, before):
        server.signal(stage, signal.SIGSTOP)
        server.wait_until_down(client, stage)
        check_while_down(stage, client, before)


@of_omni
def test_thinker_killed_while_nobody_needs_it(
    server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """The other two are, below."""
    with one_restart_of("thinker", server, client, before):
        server.signal("thinker", signal.SIGKILL)
        server.wait_until_down(client, "thinker")
        check_while_down("thinker", client, before)


@of_omni
def test_thinker_killed_while_its_last_text_is_being_spoken(
    server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """The answer needs it no more, and is complete."""
    talker = {"temperature": 0, "max_tokens": NUM_CODES, "ignore_eos": True}
    with one_restart_of("thinker", server, client, before):
        body = spoken(**STREAM) | {"stage_sampling": {"talker": talker}}
        speech = Listening(client, body)
        speech.until('"data":')
        with stopped(server, "talker"):  # all may have been spoken by then otherwise
            wait_until(lambda: samples(client)["omni_active_requests thinker"] == 0, 30)
            server.signal("thinker", signal.SIGKILL)
            server.wait_until_down(client, "thinker")
            load = client.get("/load").json()
        last = speech.rest()
        assert "error" not in last
        assert load == {"server_load": 1}
        assert last["usage"]["completion_tokens_details"]["audio_tokens"] == NUM_CODES


@for_families(QWEN3_OMNI, QWEN3_TTS)
def test_speech_whose_decoder_has_lost_its_state_is_the_same(
    family: OmniFamily, server: SupervisedServer, client: httpx2.Client, before: Before, orders: Path
) -> None:
    """It is computed again from the codes that come with each window."""
    order = tell_to_forget(orders, "code2wav")
    try:
        transcript, data = spoken_answer(client, family)
        assert order.stat().st_size > 3, "it lost its state before few windows"
    finally:
        withdraw(orders)
    text, sound = before.speech
    assert transcript == text
    heard, wanted = (np.frombuffer(pcm, np.int16).astype(np.int32) for pcm in (data, sound))
    assert heard.shape == wanted.shape
    # Convolutions over longer pieces round differently in the last bit of a float.
    assert np.abs(heard - wanted).max() <= 1
    server.wait_for_baseline(client, before.baseline)
    assert spoken_answer(client, family) == before.speech


@of_omni
def test_two_stages_killed_at_once(server: SupervisedServer, client: httpx2.Client, before: Before) -> None:
    stages = ("talker", "code2wav")
    pids = [server.pid_of(stage) for stage in stages]
    restarts = samples(client)
    for stage in stages:
        server.signal(stage, signal.SIGKILL)
    assert outcome(answer_to(client, written())) == before.text
    # They may be up again before anybody has seen them down.
    for stage in stages:
        counter = f"omni_stage_restarts_total {stage}"
        wait_until(
            lambda counter=counter: samples(client)[counter] > restarts[counter], 60.0, lambda: server.log
        )
    server.wait_until_up(client)
    assert outcome(answer_to(client, spoken())) == before.speech
    server.wait_for_baseline(client, before.baseline)
    assert not {server.pid_of(stage) for stage in ("talker", "code2wav")} & set(pids)


@of_omni
def test_requests_take_no_shared_memory_that_is_not_reserved_at_the_start(
    server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    """So a /dev/shm that others have filled meanwhile concerns none."""
    files = server.shared_files()
    assert any(name.startswith("omni-server-") for name in files)
    assert not any(files.values()), files
    with server.client() as other:
        speech = Listening(other, ENDLESS_SPEECH)
        speech.until('"data":')
        for part in (SPEECH_PART, IMAGE_PART, VIDEO_PART):
            answer_to(client, spoken([part]))
            assert server.shared_files() == files
        speech.leave()
    assert outcome(answer_to(client, spoken())) == before.speech
    assert server.shared_files() == files
