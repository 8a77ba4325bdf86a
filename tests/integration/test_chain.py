"""A text model and a Diffusers pipeline in one server: real engines, asked over HTTP."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import openai
import torch
import yaml
from diffusers import DiffusionPipeline
from PIL import Image

from stages.chain.image_prompt import image_prompt
from tests.chain_folder import make_chain_folder
from tests.integration.server_process import MODEL, ServerProcess, wait_until

URL = "/v1/chat/completions"
SIDE, NUM_STEPS, SEED = 64, 4, 7
STAGES = {
    "thinker": {
        "max_model_len": 1024,
        "dtype": "float32",
        "engine_args": {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 24},
    },
    "image": {"max_model_len": 64, "max_num_batched_tokens": 64, "dtype": "float32"},
}
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "A lighthouse"}],
    "modalities": ["text", "image"],
    "size": f"{SIDE}x{SIDE}",
    "seed": SEED,
    "num_inference_steps": NUM_STEPS,
    "temperature": 0,
    "max_tokens": 12,
    "ignore_eos": True,
}


def pixels(url: str) -> npt.NDArray[np.uint8]:
    data = base64.b64decode(url.removeprefix("data:image/png;base64,"), validate=True)
    return np.asarray(Image.open(io.BytesIO(data)))


def answered(response: httpx2.Response) -> tuple[str, npt.NDArray[np.uint8]]:
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    (image,) = message["images"]
    return message["content"], pixels(image["image_url"]["url"])


def drawn_by_the_pipeline(folder: Path, prompt: str) -> npt.NDArray[np.float32]:
    torch.set_num_threads(1)
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SEED)
    size = {"height": SIDE, "width": SIDE}
    result = pipe(prompt, num_inference_steps=NUM_STEPS, generator=generator, output_type="np", **size)
    return np.rint(255 * result.images[0]).astype(np.float32)


def active(client: httpx2.Client) -> list[str]:
    lines = client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("omni_active_requests{") and not line.endswith(" 0.0")]


def test_a_text_model_writes_what_a_pipeline_draws(tmp_path: Path) -> None:
    folder = make_chain_folder(tmp_path / "checkpoint")
    config = tmp_path / "stages.yaml"
    config.write_text(
        yaml.safe_dump({"model_family": "stages.chain:FAMILY", "platform": "cpu", "stages": STAGES})
    )
    with (
        ServerProcess(folder, tmp_path / "log.txt", "--stage-config", str(config), has_queue=False) as server,
        server.client() as client,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as official,
    ):
        card = client.get(f"/v1/models/{MODEL}").json()
        text, image = answered(client.post(URL, json=BODY))
        with ThreadPoolExecutor(4) as pool:
            crowd = list(pool.map(lambda _: answered(client.post(URL, json=BODY)), range(4)))
        streamed, images = "", []
        extensions = {
            name: BODY[name] for name in ("modalities", "size", "num_inference_steps", "ignore_eos")
        }
        for chunk in official.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "A lighthouse"}],
            temperature=0,
            max_tokens=12,
            seed=SEED,
            stream=True,
            extra_body=extensions,
        ):
            streamed += chunk.choices[0].delta.content or ""
            images += (chunk.choices[0].delta.model_extra or {}).get("images", [])
        written = client.post(URL, json=BODY | {"modalities": ["text"]}).json()["choices"][0]["message"]
        large = client.post(URL, json=BODY | {"size": "1024x1024"})
        generated = client.post(
            "/v1/images/generations",
            json={"prompt": "A lighthouse", "size": "64x64", "num_inference_steps": NUM_STEPS},
        )
        endless = BODY | {"stream": True, "num_inference_steps": 200}
        with client.stream("POST", URL, json=endless) as stream:
            wait_until(lambda: any('"image"' in line for line in active(client)), 30.0, lambda: server.log)
            next(stream.iter_lines())  # and then the client is gone
        wait_until(lambda: not active(client), 30.0, lambda: server.log)
    assert card["modalities"] == {"input": ["text"], "output": ["text", "image"]}
    assert text
    np.testing.assert_array_equal(image, drawn_by_the_pipeline(folder, image_prompt(text)))
    for other_text, other_image in crowd:
        assert other_text == text
        assert np.abs(other_image.astype(int) - image).max() <= 1  # joined passes differ in the last bits
    assert streamed == text
    (part,) = images
    np.testing.assert_array_equal(pixels(part["image_url"]["url"]), image)
    assert "images" not in written
    assert (large.status_code, large.json()["error"]["param"]) == (400, "size")
    assert generated.status_code == 200, generated.text
    assert generated.json()["data"][0]["revised_prompt"]
