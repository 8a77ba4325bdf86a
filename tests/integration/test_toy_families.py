"""Families that are not Qwen2.5-Omni, served over HTTP by real engines through the same orchestrator."""

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import openai
import soundfile
import torch
import yaml
from PIL import Image
from transformers import Qwen2ForCausalLM

from omni_server.audio.filters import Resampler
from tests.integration.server_process import MODEL, ServerProcess, wait_until
from tests.toy_families import branched, image_only, speech_only, text_only
from tests.toy_families.decoding import SAMPLE_RATE_HZ, render, waveform
from tests.toy_families.image_only import SLOW_S
from tests.toy_families.toy import END, FIRST_CODE, make_checkpoint

CPU_ARGS: dict[str, Any] = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 24}


@contextmanager
def served(
    folder: Path, architecture: str, family: str, stages: dict[str, Any]
) -> Iterator[tuple[httpx2.Client, ServerProcess]]:
    """A server of the toy family `family`, ended cleanly."""
    checkpoint = make_checkpoint(folder / "checkpoint", architecture)
    config = folder / "stages.yaml"
    document = {"model_family": f"tests.toy_families.{family}:FAMILY", "platform": "cpu"}
    for stage in stages.values():
        stage |= {"engine_args": CPU_ARGS, "dtype": "float32"}
    config.write_text(yaml.safe_dump(document | {"stages": stages}))
    has_queue = family == "branched"
    flags = ("--stage-config", str(config))
    with (
        ServerProcess(checkpoint, folder / "log.txt", *flags, has_queue=has_queue) as server,
        server.client() as client,
    ):
        yield client, server


def greedy_ids(checkpoint: Path, prompt: str, num_tokens: int, *, first: int = 0) -> list[int]:
    """What transformers generates greedily, of the ids from `first` on."""
    model = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = ids_of(prompt)
    generated: list[int] = []
    with torch.inference_mode():
        while len(generated) < num_tokens:
            logits = model(torch.tensor([ids + generated])).logits[0, -1]
            generated.append(first + int(logits[first:].argmax()))
    return generated


def ids_of(prompt: str) -> list[int]:
    order = {byte: number for number, byte in enumerate(_byte_order())}
    return [order[byte] for byte in prompt.encode()]


def check_sound(samples: npt.NDArray[np.float32], codes: npt.NDArray[np.int64]) -> None:
    """They are what the voice "High" sounds like, at 24 kHz and in 16 bits."""
    resampler = Resampler(SAMPLE_RATE_HZ, 24_000)
    wanted = np.concatenate([resampler.push(waveform(codes, 0, "High")), resampler.flush()])
    assert samples.shape == wanted.shape
    assert np.abs(samples - wanted).max() < 1e-4


def _byte_order() -> list[int]:
    """The bytes by the ids of the tokenizer, which are in the order of the letters that stand for them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return sorted(letters, key=letters.__getitem__)


def test_text_only_model_answers_under_a_stage_name_of_its_own(tmp_path: Path) -> None:
    stages = {"brain": {"model_stage": "writer", "max_model_len": 512}}
    with served(tmp_path, text_only.ARCHITECTURE, "text_only", stages) as (client, server):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "abc"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = client.post("/v1/chat/completions", json=body | {"logprobs": True})
        assert answer.status_code == 200, answer.text
        spoken = client.post(
            "/v1/chat/completions",
            json=body | {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
        )
        card = client.get(f"/v1/models/{MODEL}").json()
    (choice,) = answer.json()["choices"]
    told = [bytes(token["bytes"]) for token in choice["logprobs"]["content"]]
    wanted = greedy_ids(tmp_path / "checkpoint", "abc", 12)
    assert END not in wanted
    order = _byte_order()
    assert told == [
        bytes([order[number]]) if number < END else b"<code %d>" % (number - FIRST_CODE) for number in wanted
    ]
    assert spoken.status_code == 400
    assert "brain_s=" in server.log
    assert card["modalities"] == {"input": ["text"], "output": ["text"]}


def test_speech_only_model_speaks_frames_of_four_codebooks_at_its_own_rate(tmp_path: Path) -> None:
    num_frames = 14
    stages = {
        "speaker": {"max_model_len": 512, "default_sampling": {"temperature": 0, "max_tokens": 400}},
        "vocoder": {"max_model_len": 64},
    }
    with served(tmp_path, speech_only.SPEAKER, "speech_only", stages) as (client, _):
        body: dict[str, Any] = {
            "model": MODEL,
            "input": "Read this.",
            "voice": "High",
            "response_format": "wav",
        }
        # The last frame is cut, and not spoken.
        body["stage_sampling"] = {"speaker": {"max_tokens": 4 * num_frames + 2, "ignore_eos": True}}
        whole = client.post("/v1/audio/speech", json=body)
        assert whole.status_code == 200, whole.text
        streamed = client.post("/v1/audio/speech", json=body | {"response_format": "pcm"}).content
        chat = client.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        )
        transcript = client.post(
            "/v1/audio/transcriptions", data={"model": MODEL}, files={"file": ("a.wav", whole.content)}
        )
        after = client.post("/v1/audio/speech", json=body).content
    samples, rate = soundfile.read(io.BytesIO(whole.content), dtype="float32")
    assert rate == 24_000
    codes = np.array(greedy_ids(tmp_path / "checkpoint", "Read this.", 4 * num_frames, first=FIRST_CODE))
    check_sound(samples, codes.reshape(num_frames, 4) - FIRST_CODE)
    written, _ = soundfile.read(io.BytesIO(whole.content), dtype="int16")
    assert np.array_equal(np.frombuffer(streamed, "<i2"), written)
    assert after == whole.content
    assert chat.status_code == 400
    assert "does not answer chats" in chat.json()["error"]["message"]
    assert transcript.status_code == 400


def busy(client: httpx2.Client, num_gauges: int) -> list[str]:
    """The gauges of requests in a stage, and of slots of the queue, that are not 0."""
    names = ("omni_shared_memory_slots_in_use{", "omni_requests_in_flight ", "omni_active_requests{")
    lines = client.get("/metrics").text.splitlines()
    gauges = [line for line in lines if line.startswith(names)]
    assert len(gauges) == num_gauges
    return [line for line in gauges if not line.endswith(" 0.0")]


def images_of(answer: httpx2.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(image["b64_json"]) for image in answer.json()["data"]]


def test_one_diffusion_stage_answers_with_images(tmp_path: Path) -> None:
    url = "/v1/images/generations"
    body: dict[str, Any] = {"model": MODEL, "prompt": "A lighthouse", "size": "48x32", "seed": 7}
    stages = {"artist": {"model_stage": "painter", "max_model_len": 64, "max_num_seqs": 4}}
    with served(tmp_path, image_only.PAINTER, "image_only", stages) as (client, server):
        official = openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0)

        def image(prompt: str, seed: int) -> bytes:
            return images_of(client.post(url, json=body | {"prompt": prompt, "seed": seed}))[0]

        card = client.get(f"/v1/models/{MODEL}").json()
        listed = official.images.generate(prompt="A lighthouse", n=3, extra_body={"seed": 7})
        together = images_of(client.post(url, json=body | {"n": 3}))
        with ThreadPoolExecutor(8) as pool:
            crowd = list(pool.map(image, ["A lighthouse", "A boat"] * 4, [7, 8, 9, 7] * 2))
        alone = [image("A lighthouse", seed) for seed in (7, 8, 9)]
        drawn = [images_of(client.post(url, json=body | {"seed": None}))[0] for _ in range(2)]
        chat = client.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "A lighthouse"}],
                "seed": 7,
                "size": "48x32",
            },
        )
        speech = client.post("/v1/audio/speech", json={"model": MODEL, "input": "Hello."})
        broken = [client.post(url, json=body | {"prompt": name}) for name in ("NaN", "dazzling", "cropped")]

        with suppress(httpx2.ReadTimeout):  # the client leaves
            client.post(url, json=body | {"prompt": "slow", "n": 6}, timeout=SLOW_S / 3)
        # The step that has begun runs to its end, and no other one begins.
        wait_until(lambda: not busy(client, 2), 60.0, lambda: server.log)
        after_abort = image("A lighthouse", 7)

        (engine,) = server.engine_pids()
        os.kill(engine, signal.SIGSTOP)  # or it might answer before it is killed
        with ThreadPoolExecutor(1) as thread:
            hit = thread.submit(client.post, url, json=body)
            wait_until(lambda: len(busy(client, 2)) == 2, 30.0, lambda: server.log)
            os.kill(engine, signal.SIGKILL)
        wait_until(lambda: client.get("/ready").status_code == 200, 120.0, lambda: server.log)
        after_kill = image("A lighthouse", 7)
        assert server.engine_pids() != [engine]

    def reference(prompt: str, seed: int, width: int = 48) -> npt.NDArray[np.float32]:
        return np.rint(255 * render(prompt, width, 32, seed))

    def pixels(file: bytes) -> npt.NDArray[np.uint8]:
        return np.asarray(Image.open(io.BytesIO(file)))

    assert card["modalities"] == {"input": ["text"], "output": ["image"]}
    for seed, file in zip((7, 8, 9), together, strict=True):
        assert np.array_equal(pixels(file), reference("A lighthouse", seed))
    assert listed.data is not None
    for seed, item in zip((7, 8, 9), listed.data, strict=True):
        assert item.b64_json is not None
        assert np.array_equal(
            pixels(base64.b64decode(item.b64_json)), reference("A lighthouse", seed, width=32)
        )
    assert alone == together
    assert [crowd[0], crowd[2], crowd[4]] == [alone[0], alone[2], alone[0]]
    assert np.array_equal(pixels(crowd[1]), reference("A boat", 8))
    assert len({*drawn, *alone}) == 5
    _, _, answered = chat.json()["choices"][0]["message"]["images"][0]["image_url"]["url"].partition(",")
    assert base64.b64decode(answered) == alone[0]
    assert "images only" in speech.json()["error"]["message"]
    for answer in broken:
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "corrupt_data"), answer.text
    assert after_abort == after_kill == alone[0]
    assert hit.result().status_code == 503
    assert hit.result().json()["error"]["code"] == "engine_dead"


def branched_reference(
    checkpoint: Path, prompt: str, num_text: int, num_codes: int
) -> tuple[list[int], list[int]]:
    """Text and codec tokens, greedy, of the voice "High"."""
    model = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    text = greedy_ids(checkpoint, prompt, num_text)
    ids = ids_of(prompt)
    with torch.inference_mode():
        embed = model.get_input_embeddings()
        rows = model.model(torch.tensor([ids + text[:-1]])).last_hidden_state[0]
        spoken = [*rows[len(ids) :], *[embed(torch.tensor(END))] * num_codes]
        inputs = [*rows[: len(ids)], embed(torch.tensor(ord("H"))) + embed(torch.tensor(branched.BEGIN[0]))]
        inputs.append(spoken[0] + embed(torch.tensor(branched.BEGIN[1])))
        codes: list[int] = []
        while len(codes) < num_codes:
            logits = model(inputs_embeds=torch.stack(inputs)[None]).logits[0, -1]
            codes.append(FIRST_CODE + int(logits[FIRST_CODE:].argmax()))
            inputs.append(embed(torch.tensor(codes[-1])) + spoken[len(codes)])
    return text, codes


def test_stages_with_a_branch_answer_in_text_and_speech(tmp_path: Path) -> None:
    num_text, num_frames = 9, 12
    greedy = {"temperature": 0, "ignore_eos": True}
    stages = {
        "writer": {"max_model_len": 512},
        "speaker": {"max_model_len": 512, "default_sampling": {"temperature": 0, "max_tokens": 400}},
        "vocoder": {"max_model_len": 64},
    }
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say this."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "High", "format": "wav"},
        "max_tokens": num_text,
        "stage_sampling": {"speaker": greedy | {"max_tokens": 4 * num_frames}},
    } | greedy
    with served(tmp_path, branched.WRITER, "branched", stages) as (client, server):
        alone = client.post("/v1/chat/completions", json=body)
        assert alone.status_code == 200, alone.text
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda _: client.post("/v1/chat/completions", json=body), range(6)))
        text_only = {name: value for name, value in body.items() if name not in ("modalities", "audio")}
        written = client.post(
            "/v1/chat/completions", json=text_only | {"stage_sampling": None, "logprobs": True}
        )
        endless = {"speaker": greedy | {"max_tokens": 400}}
        with client.stream(
            "POST",
            "/v1/chat/completions",
            json=body
            | {
                "stream": True,
                "max_tokens": 400,
                "stage_sampling": endless,
                "audio": {"voice": "Low", "format": "pcm16"},
            },
        ) as stream:
            next(stream.iter_lines())  # and then the client is gone
        # Three stages, a queue, all requests.
        wait_until(lambda: not busy(client, 5), 60.0, lambda: server.log)
        again = client.post("/v1/chat/completions", json=body)
    for stage in stages:
        assert f" {stage}_s=" in server.log
    text, codes = branched_reference(tmp_path / "checkpoint", "Say this.", num_text, 4 * num_frames)
    told = [bytes(token["bytes"]) for token in written.json()["choices"][0]["logprobs"]["content"]]
    order = _byte_order()
    assert told == [
        bytes([order[number]]) if number < END else b"<code %d>" % (number - FIRST_CODE) for number in text
    ]
    for answer in (alone, *together, again):
        assert answer.status_code == 200, answer.text
        wav = base64.b64decode(answer.json()["choices"][0]["message"]["audio"]["data"])
        samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
        assert rate == 24_000
        check_sound(samples, np.array(codes).reshape(num_frames, 4) - FIRST_CODE)
