"""A client that is gone, at every phase of its request: nothing of it is left, and the others notice nothing.

Engines are stopped (SIGSTOP) to hold a request in its phase. What must be gone, must be gone while they are
stopped, as far as it is the server's; the engines' part when they go on.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.faults.callers import Caller, Leave, caller, close, form
from tests.faults.supervised_server import (
    ANSWER_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    SupervisedServer,
    samples,
    stopped,
    write_config,
)
from tests.faults.task_count import num_tasks
from tests.integration.server_process import MODEL, command_line, wait_until
from tests.integration.test_server import (
    ENDLESS,
    HELLO,
    IMAGE_PART,
    STREAM,
    VIDEO_PART,
    answer_to,
    samples_of,
    spoken,
    text_of,
    usage_of,
)
from tests.omni_families import QWEN3_OMNI, QWEN3_TTS, OmniFamily
from tests.unit.api.clients import URL, media

SPEECH_URL = "/v1/audio/speech"
TRANSCRIPTION_URL = "/v1/audio/transcriptions"
ENDLESS_TALKER: dict[str, Any] = {"stage_sampling": {"talker": ENDLESS}}
WHOLE = spoken(**ENDLESS) | ENDLESS_TALKER
STREAMED = WHOLE | STREAM
# With rows from the thinker, whatever it does with text.
OF_A_PICTURE = spoken([{"type": "text", "text": HELLO}, IMAGE_PART], **ENDLESS) | ENDLESS_TALKER | STREAM
READ_ALOUD = {"model": MODEL, "voice": "alloy", "input": HELLO, "response_format": "pcm"}
UPLOAD = form({"model": MODEL}, media("speech_hello.wav"))
RELEASE_TIMEOUT_S = 15.0
"""Less than the server's deadline for requests, which would release them, too."""


@dataclass(frozen=True)
class Heard:
    text: str
    usage: dict[str, Any]
    samples: npt.NDArray[np.int16]


@dataclass(frozen=True)
class Before:
    """The idle server, and what it answers."""

    answer: Heard
    baseline: dict[str, float]
    num_tasks: int


@pytest.fixture(scope="module")
def server(
    family: OmniFamily, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedServer]:
    """Of Qwen3-Omni, the one that other files use, too."""
    if family is QWEN3_OMNI:
        yield request.getfixturevalue("patient")
        return
    folder = tmp_path_factory.mktemp("reader")
    config = write_config(folder / "stages.yaml", failing=True, family=family, hang_timeout_s=None)
    flags = ["--stage-config", str(config), "--request-timeout", str(REQUEST_TIMEOUT_S)]
    checkpoint = request.getfixturevalue("checkpoints")[family]
    process = SupervisedServer(checkpoint, folder / "log.txt", *flags, has_queue=False)
    try:
        yield process
        with caller(process.url, "RST") as listener:
            listener.post(SPEECH_URL, READ_ALOUD)
            listener.until(b"\r\n\r\n")
            process.kill()  # no engine outlives it
    finally:
        process.process.kill()
        process.process.wait()


@pytest.fixture(scope="module")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def before(orders: Path, family: OmniFamily, server: SupervisedServer, client: httpx2.Client) -> Before:
    """Every kind of request once: some threads and files are made with the first."""
    answer = heard(client, family)
    if family.chats:
        answer_to(client, spoken([VIDEO_PART]))
        answer_to(client, spoken([IMAGE_PART]))
        body, content_type = UPLOAD
        headers = {"Content-Type": content_type}
        client.post(TRANSCRIPTION_URL, content=body, headers=headers).raise_for_status()
    read_aloud(client)
    with session(server) as socket:
        begin_response(socket)
        until(socket, "response.output_audio.delta", "response.done")
    server.wait_until_idle()
    return Before(answer, server.baseline(client), num_tasks(orders, server.process.pid))


def read_aloud(client: httpx2.Client) -> bytes:
    talker = {"temperature": 0, "min_tokens": 30, "max_tokens": 30}
    response = client.post(SPEECH_URL, json=READ_ALOUD | {"seed": 7, "stage_sampling": {"talker": talker}})
    assert response.status_code == 200, response.text
    return response.content


def heard(client: httpx2.Client, family: OmniFamily) -> Heard:
    """The same whenever it is asked for."""
    if not family.chats:
        return Heard("", {}, np.frombuffer(read_aloud(client), "<i2"))
    return heard_in(answer_to(client, spoken()))


def heard_in(completion: dict[str, Any]) -> Heard:
    return Heard(text_of(completion), usage_of(completion), samples_of(completion))


@contextmanager
def nobody_is_harmed(
    family: OmniFamily, server: SupervisedServer, client: httpx2.Client, before: Before, orders: Path
) -> Iterator[None]:
    """Somebody else is answered meanwhile; afterwards the server is as it was, and answers as it did."""
    with server.client() as other, ThreadPoolExecutor(1) as thread:
        beside = thread.submit(heard, other, family)
        yield
        check_same(beside.result(), before.answer)
    server.wait_for_baseline(client, before.baseline)
    pid = server.process.pid
    wait_until(
        lambda: num_tasks(orders, pid) == before.num_tasks, 30, lambda: f"{num_tasks(orders, pid)} tasks"
    )
    check_same(heard(client, family), before.answer)


def check_same(answer: Heard, wanted: Heard) -> None:
    """Convolutions over a batch round differently in the last bit of a float, hence of a 16-bit sample now
    and then."""
    assert (answer.text, answer.usage) == (wanted.text, wanted.usage)
    assert np.abs(answer.samples.astype(np.int32) - wanted.samples).max() <= 1


@dataclass(frozen=True)
class Scene:
    """Where a client is to go, and how."""

    family: OmniFamily
    server: SupervisedServer
    client: httpx2.Client
    how: Leave
    num_others: int
    """Requests of others that may run meanwhile."""

    @property
    def endless_talker(self) -> dict[str, Any]:
        """Whose speech, if it is all that is asked for, still fits the context."""
        talker = ENDLESS if self.family.chats else ENDLESS | {"max_tokens": 1900}
        return {"stage_sampling": {"talker": talker}}

    @property
    def whole(self) -> tuple[str, Any]:
        """Where endless speech in one piece is asked for, and how."""
        if self.family.chats:
            return URL, WHOLE
        return SPEECH_URL, READ_ALOUD | self.endless_talker | {"stream": False}

    @property
    def streamed(self) -> tuple[str, Any]:
        """The same as events."""
        if self.family.chats:
            return URL, STREAMED
        return SPEECH_URL, READ_ALOUD | self.endless_talker | {"stream_format": "sse"}

    def caller(self) -> AbstractContextManager[Caller]:
        return caller(self.server.url, self.how)

    def wait_for(self, metric: str, least: float) -> None:
        wait_until(
            lambda: samples(self.client)[metric] >= least, 30, lambda: str(samples(self.client)[metric])
        )

    def wait_until_released(self) -> None:
        """In the server; engines may be stopped, and learn of it later."""

        def is_released() -> bool:
            now = samples(self.client)
            return max(now["omni_requests_in_flight"], now["omni_requests_running"]) <= self.num_others

        wait_until(is_released, RELEASE_TIMEOUT_S, lambda: str(samples(self.client)))


Place = Callable[[Scene], None]
"""Brings a request to its phase and leaves."""


def with_half_a_header(scene: Scene) -> None:
    with scene.caller() as one:
        one.send_half_a_header(URL)


def with_half_a_body(scene: Scene) -> None:
    with scene.caller() as one:
        one.send(URL, json.dumps(STREAMED).encode(), part=0.5)
        scene.wait_for("omni_requests_in_flight", 1)


def with_half_an_upload(scene: Scene) -> None:
    body, content_type = UPLOAD
    with scene.caller() as one:
        one.send(TRANSCRIPTION_URL, body, content_type, part=0.5)
        scene.wait_for("omni_requests_in_flight", 1)


def while_a_video_is_decoded(scene: Scene) -> None:
    """In a process of its own, which is there before the request and ends with it."""
    (program,) = (pid for pid in children_of(scene.server.process.pid) if "read_video" in command_line(pid))
    (waiting,) = children_of(program)
    os.kill(waiting, signal.SIGSTOP)
    with scene.caller() as one:
        one.post(URL, spoken([VIDEO_PART], **ENDLESS))
        wait_until(lambda: children_of(program)[1:] != [], 30)  # one for the next file
    wait_until(lambda: waiting not in children_of(program), RELEASE_TIMEOUT_S)


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            children += map(int, (task / "children").read_text().split())
    return children


def in_the_thinkers_prompt(scene: Scene) -> None:
    with stopped(scene.server, "thinker"):
        with scene.caller() as one, scene.caller() as other, scene.caller() as third:
            one.post(URL, OF_A_PICTURE)
            other.post(URL, WHOLE)
            body, content_type = UPLOAD
            third.send(TRANSCRIPTION_URL, body, content_type)
            scene.wait_for("omni_requests_running", 3)
        scene.wait_until_released()


def in_the_talkers_prompt(scene: Scene) -> None:
    with stopped(scene.server, "talker"):
        with scene.caller() as one, scene.caller() as other:
            one.post(*scene.streamed)
            other.post(*scene.whole)
            scene.wait_for("omni_requests_running", 2)
        scene.wait_until_released()


def in_the_talkers_queue(scene: Scene) -> None:
    """More than it runs at once."""
    with ExitStack() as callers:
        for _ in range(10):
            callers.enter_context(scene.caller()).post(*scene.streamed)
        scene.wait_for(f"vllm:num_requests_waiting 0 {MODEL} talker", 1)
    scene.wait_until_released()


def before_any_sound(scene: Scene) -> None:
    """The thinker writes, the talker has rows and has not begun."""
    with stopped(scene.server, "talker"):
        with scene.caller() as one:
            one.post(URL, OF_A_PICTURE)
            one.until(b"transcript")
            scene.wait_for("omni_shared_memory_slots_in_use thinker talker", 1)
        scene.wait_until_released()


def with_codes_and_no_sound(scene: Scene) -> None:
    """A window waits in code2wav; of the answer in one piece as well."""
    with stopped(scene.server, "code2wav"):
        with scene.caller() as one, scene.caller() as other:
            one.post(*scene.streamed)
            other.post(*scene.whole)
            scene.wait_for("omni_active_requests code2wav", 2)
        scene.wait_until_released()


def in_the_middle_of_the_sound(scene: Scene) -> None:
    with scene.caller() as one, scene.caller() as other:
        one.post(*scene.streamed)
        other.post(SPEECH_URL, READ_ALOUD | scene.endless_talker)
        one.until(b'"data":' if scene.family.chats else b'"audio":')
        other.until(b"\r\n\r\n")  # the header comes with the first sound


def after_the_last_event(scene: Scene) -> None:
    with scene.caller() as one:
        one.post(URL, spoken(**STREAM))
        one.until(b"[DONE]")


# -- realtime


@contextmanager
def session(server: SupervisedServer) -> Iterator[ClientConnection]:
    with connect(server.url.replace("http", "ws") + f"/v1/realtime?model={MODEL}", max_size=None) as socket:
        until(socket, "session.created")
        yield socket


def until(socket: ClientConnection, *kinds: str) -> None:
    while json.loads(socket.recv(ANSWER_TIMEOUT_S))["type"] not in kinds:
        pass


def begin_response(socket: ClientConnection) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]}
    socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
    socket.send(json.dumps({"type": "response.create"}))


def gone(socket: ClientConnection, how: Leave) -> None:
    """Without WebSocket's own goodbye."""
    close(socket.socket, how)


def in_sessions_of_all_states(scene: Scene) -> None:
    """Silent, with half of an utterance, with a response in the thinker, and with one that is spoken."""
    with (
        session(scene.server) as silent,
        session(scene.server) as listening,
        session(scene.server) as waiting,
        session(scene.server) as heard,
    ):
        sound = "AAAA" * 1000
        listening.send(json.dumps({"type": "input_audio_buffer.append", "audio": sound}))
        begin_response(heard)
        until(heard, "response.output_audio_transcript.delta", "response.output_audio.delta")
        with stopped(scene.server, scene.family.stages[0]):
            begin_response(waiting)
            until(waiting, "response.created")
            for socket in (silent, listening, waiting, heard):
                gone(socket, scene.how)
            wait_until(lambda: samples(scene.client)["omni_websocket_sessions"] == 0, 30)
            scene.wait_until_released()


PLACES: tuple[Place, ...] = (
    with_half_a_header,
    with_half_a_body,
    with_half_an_upload,
    while_a_video_is_decoded,
    in_the_thinkers_prompt,
    before_any_sound,
    with_codes_and_no_sound,
    in_the_middle_of_the_sound,
    after_the_last_event,
    in_sessions_of_all_states,
)


READERS_PLACES: tuple[Place, ...] = (
    in_the_talkers_prompt,
    in_the_talkers_queue,
    with_codes_and_no_sound,
    in_the_middle_of_the_sound,
    in_sessions_of_all_states,
)


@pytest.mark.parametrize(
    ("family", "place"),
    [(QWEN3_OMNI, place) for place in PLACES] + [(QWEN3_TTS, place) for place in READERS_PLACES],
    ids=[place.__name__ for place in PLACES] + [f"{QWEN3_TTS.name}-{p.__name__}" for p in READERS_PLACES],
    indirect=["family"],
    scope="module",
)
def test_client_that_is_gone_leaves_nothing_behind(
    family: OmniFamily,
    place: Place,
    server: SupervisedServer,
    client: httpx2.Client,
    before: Before,
    orders: Path,
) -> None:
    place(Scene(family, server, client, "FIN", num_others=0))
    server.wait_for_baseline(client, before.baseline)
    with nobody_is_harmed(family, server, client, before, orders):
        place(Scene(family, server, client, "RST", num_others=1))
