"""Tiny pipelines of Diffusers behind the HTTP API: server processes, asked by OpenAI's client."""

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.server_process import MODEL, ROOT, ServerProcess, wait_until
from tests.unit.api.clients import data_url, error_of, media
from tests.unit.api.sse_validator import read_image_stream

PROMPT = "a red cube on a table"
SMALL: dict[str, Any] = {"prompt": PROMPT, "size": "64x64"}
TEXT: Any = [{"role": "user", "content": PROMPT}]
STEPS = {"num_inference_steps": 8}
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen-Image."""
    return make_demo_checkpoint(tmp_path_factory.mktemp("images") / "checkpoint", family="diffusers")


@pytest.fixture(scope="module")
def generator(checkpoint: Path) -> Iterator[ServerProcess]:
    """Finds its stage config, as users start it."""
    log = checkpoint.parent / "log.txt"
    with ServerProcess(checkpoint, log, "--cpu", has_queue=False, stage_config=None) as server:
        yield server


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Image to image with the components of another pipeline. Unlike those of other pipelines, its input has
    the size of the result."""
    folder = tmp_path_factory.mktemp("img2img")
    checkpoint = make_demo_checkpoint(folder / "checkpoint", family="diffusers", pipeline="sd3")
    index = checkpoint / "model_index.json"
    index.write_text(
        json.dumps(json.loads(index.read_text()) | {"_class_name": "StableDiffusion3Img2ImgPipeline"})
    )
    log, config = folder / "log.txt", "diffusers.demo-cpu"
    with ServerProcess(checkpoint, log, has_queue=False, stage_config=config) as server:
        yield server


@contextmanager
def client_of(server: ServerProcess) -> Iterator[tuple[openai.OpenAI, httpx2.Client]]:
    """The official client, and another for what that one hides."""
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as official,
        server.client() as client,
    ):
        yield official, client


def file_of(data: list[Any] | None) -> bytes:
    assert data is not None
    (image,) = data
    return base64.b64decode(image.b64_json, validate=True)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def has_released_an_aborted_one(client: httpx2.Client) -> bool:
    lines = client.get("/metrics").text.splitlines()
    counts = [
        line for line in lines if line.startswith(('omni_requests_total{outcome="aborted"', "omni_active_"))
    ]
    return [float(line.rpartition(" ")[2]) for line in sorted(counts)] == [0, 1]


def test_a_pipeline_generates_streams_and_refuses(generator: ServerProcess) -> None:
    with client_of(generator) as (official, client):

        def generate(seed: int) -> openai.types.ImagesResponse:
            return official.images.generate(**SMALL, extra_body=STEPS | {"seed": seed})

        first = generate(7)
        file = file_of(first.data)
        assert Image.open(io.BytesIO(file)).size == (64, 64)
        assert first.usage is not None
        assert (first.usage.input_tokens, first.usage.output_tokens) == (0, 16)
        assert file_of(generate(7).data) == file
        assert file_of(generate(8).data) != file

        body = SMALL | STEPS | {"seed": 7, "stream": True, "partial_images": 3}
        stream = read_image_stream(client.post(GENERATIONS, json=body).text, "image_generation")
        assert 1 <= len(stream.partial) <= 3
        assert {event["size"] for event in stream.events} == {"64x64"}
        assert len({event["b64_json"] for event in stream.events}) == len(stream.events)
        assert base64.b64decode(stream.completed["b64_json"]) == file

        body = SMALL | STEPS | {"size": "96x32", "include_parameters": True}
        wide = client.post(GENERATIONS, json=body).json()["data"]
        image = Image.open(io.BytesIO(base64.b64decode(wide[0]["b64_json"])))
        assert image.size == (96, 32)
        body = json.loads(image.info["parameters"]) | {"include_parameters": True}
        assert client.post(GENERATIONS, json=body).json()["data"] == wide

        for fields, param in (
            ({"size": "63x64"}, "size"),
            ({"size": "4096x1024"}, "size"),
            ({"size": "1024x16"}, "size"),
            ({"num_inference_steps": 10**6}, "num_inference_steps"),
            ({"guidance_scale": -1}, "guidance_scale"),
            # The pipeline's scheduler refuses it: its schedule would divide by zero.
            ({"num_inference_steps": 1}, None),
        ):
            error = error_of(client.post(GENERATIONS, json=SMALL | fields))
            assert error["param"] == param
        assert "FlowMatchEulerDiscreteScheduler has no schedule of 1 steps" in error["message"]
        edit = client.post(EDITS, data={"prompt": PROMPT}, files={"image": media("shapes.png")})
        assert error_of(edit)["param"] == "model"
        assert not re.search(r"^omni_corrupt_data_total.* [1-9]", client.get("/metrics").text, re.MULTILINE)

        body = SMALL | {"size": "256x256", "num_inference_steps": 200, "stream": True}
        with client.stream("POST", GENERATIONS, json=body) as long:
            next(long.iter_raw())
        wait_until(lambda: has_released_an_aborted_one(client), 60.0, lambda: generator.log)
        chat = official.chat.completions.create(
            model=MODEL, messages=TEXT, seed=7, extra_body=STEPS | {"size": SMALL["size"]}
        )
        assert chat.choices[0].message.model_extra is not None
        (part,) = chat.choices[0].message.model_extra["images"]
        assert part["image_url"]["url"] == data_url(file, "image/png")
        assert chat.usage is not None
        assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (0, 16)
        card = client.get(f"/v1/models/{MODEL}").json()
        assert card["images"]["free_sizes"]["multiple"] == 16
        assert "num_inference_steps" in card["images"]["parameters"]
        assert file_of(generate(7).data) == file


def test_the_example_of_the_page_saves_previews_and_the_image(
    generator: ServerProcess, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    program = program.replace("http://127.0.0.1:8091", generator.url)
    program = program.replace('"num_inference_steps": 30', '"num_inference_steps": 4')
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"lighthouse.png", "preview0.png"} <= names <= {"lighthouse.png", "preview0.png", "preview1.png"}
    sizes = {Image.open(io.BytesIO((tmp_path / name).read_bytes())).size for name in names}
    assert sizes == {(256, 256)}


def test_a_pipeline_edits_and_says_where_it_does(editor: ServerProcess) -> None:
    picture = media("shapes.png")
    fields: dict[str, Any] = {
        "prompt": PROMPT,
        "size": "64x64",
        "extra_body": {"seed": 7, "num_inference_steps": 8},
    }
    with client_of(editor) as (official, client):

        def edit(image: bytes) -> openai.types.ImagesResponse:
            return official.images.edit(image=image, **fields)

        edited = edit(picture)
        file = file_of(edited.data)
        assert Image.open(io.BytesIO(file)).size == (64, 64)
        assert edited.usage is not None
        assert edited.usage.input_tokens > edited.usage.output_tokens == 16
        inverted = io.BytesIO()
        Image.fromarray(255 - np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))).save(
            inverted, "PNG"
        )
        assert file_of(edit(inverted.getvalue()).data) != file

        events = list(official.images.edit(image=picture, stream=True, partial_images=1, **fields))
        assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
        assert base64.b64decode(events[-1].b64_json) == file

        parts = [
            {"type": "text", "text": PROMPT},
            {"type": "image_url", "image_url": {"url": data_url(picture, "image/png")}},
        ]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "size": "64x64"}
        answer = client.post("/v1/chat/completions", json=chat | fields["extra_body"]).json()
        (part,) = answer["choices"][0]["message"]["images"]
        assert part["image_url"]["url"] == data_url(file, "image/png")
        assert answer["usage"]["prompt_tokens"] == edited.usage.input_tokens
        assert (
            error_of(client.post("/v1/chat/completions", json=chat | {"messages": TEXT}))["param"]
            == "messages"
        )

        with pytest.raises(openai.BadRequestError, match="Expected 1 at most"):
            official.images.edit(image=[picture] * 2, **fields)
        assert "/v1/images/edits" in error_of(client.post(GENERATIONS, json=SMALL))["message"]
        assert file_of(edit(picture).data) == file


GREY = Image.fromarray(np.add.outer(np.arange(48), np.arange(64)).astype(np.uint8) * 2)
"""Every format below keeps its pixels."""
PHOTO = GREY.convert("RGB")
OTHER_FRAME = Image.new("RGB", PHOTO.size, "red")
ORIENTATION = 0x0112
TURNED = Image.Exif()
TURNED[ORIENTATION] = 6  # to be shown turned clockwise


@pytest.mark.parametrize(
    ("file", "same"),
    [
        (saved(PHOTO, save_all=True, append_images=[OTHER_FRAME]), PHOTO),
        (saved(Image.fromarray(np.asarray(GREY).astype(np.uint16) << 8)), PHOTO),
        (saved(PHOTO.transpose(Image.Transpose.ROTATE_90), exif=TURNED), PHOTO),
    ],
    ids=["APNG", "16 bit", "EXIF"],
)
def test_an_edit_sees_what_a_viewer_of_the_file_shows(
    editor: ServerProcess, file: bytes, same: Image.Image
) -> None:
    form = {"prompt": PROMPT, "size": "64x64", "num_inference_steps": "2", "seed": "7"}
    with editor.client() as client:
        answers = [client.post(EDITS, data=form, files={"image": data}) for data in (file, saved(same))]
    images = [answer.json()["data"] for answer in answers]
    assert images[0] == images[1]


def test_every_server_gives_the_image_that_the_pipeline_gives(
    generator: ServerProcess, checkpoint: Path
) -> None:
    with client_of(generator) as (official, _):
        response = official.images.generate(**SMALL, extra_body=STEPS | {"seed": 7})
    pipe = DiffusionPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(7)
    image = pipe(PROMPT, height=64, width=64, **STEPS, generator=noise, output_type="np").images[0]
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(file_of(response.data)))), np.rint(255 * image).astype(np.uint8)
    )
