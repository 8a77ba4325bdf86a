"""LoRA adapters by name: a request's image is that of Diffusers with its adapters, whatever else runs."""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, QwenImagePipeline, StableDiffusionPipeline
from msgspec import structs
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.orchestrator.image_requests import ImageRequests
from omni_server.protocol.images import ImageJob, decode_job
from omni_server.types import ChatMessage, TextPart
from omni_server.types.images import ImageOutput, ImageSize, Lora
from stages.diffusers import FAMILY
from stages.diffusers.family import DiffusersModel
from stages.diffusers.images import pipeline_arguments
from stages.diffusers.loading import load_pipeline
from stages.diffusers.loras import lora_file
from tests.unit.stages.diffusers.tiny import CPU, Tiny, config_with, difference, stage_options

# Diffusers' own loading of several adapters warns.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")

PAPER, INK = (Lora("paper"),), (Lora("ink", 0.5),)
MESSAGES = (ChatMessage("user", (TextPart("x"),)),)


def made(component: Any, seed: int) -> dict[str, torch.Tensor]:
    """Weights of an adapter of the component's attention, large enough to change the image."""
    config = LoraConfig(r=2, target_modules=["to_q", "to_v", "q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        component.add_adapter(config)
    weights: dict[str, torch.Tensor] = get_peft_model_state_dict(component)
    return weights


@pytest.fixture(scope="module")
def places(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of two adapters."""
    files = {}
    for seed, name in enumerate(("paper", "ink")):
        folder = tmp_path_factory.mktemp(name)
        pipe = DiffusionPipeline.from_pretrained(tiny_folder("qwen-image"))
        QwenImagePipeline.save_lora_weights(folder, transformer_lora_layers=made(pipe.transformer, seed))
        files[name] = str(folder / "pytorch_lora_weights.safetensors")
    return files


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path], places: dict[str, str]) -> Tiny:
    pipe = load_pipeline(tiny_folder("qwen-image"), stage_options(loras=places), "float32", CPU)
    return Tiny("qwen-image", pipe, 4, tiny("qwen-image").guidance)


@pytest.fixture(scope="module")
def expected(
    tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path], places: dict[str, str]
) -> Callable[[ImageJob], torch.Tensor]:
    """What Diffusers makes with adapters as it documents them."""

    def image(job: ImageJob) -> torch.Tensor:
        if not job.loras:
            return tiny("qwen-image").own_image(job)
        pipe = DiffusionPipeline.from_pretrained(tiny_folder("qwen-image"))
        for lora in job.loras:
            pipe.load_lora_weights(places[lora.name], adapter_name=lora.name)
        pipe.set_adapters([lora.name for lora in job.loras], [lora.scale for lora in job.loras])
        images: torch.Tensor = pipe(**pipeline_arguments(pipe, job)).images
        return images

    return image


def test_each_request_has_its_own_adapters_to_the_last_bit(
    model: Tiny, expected: Callable[[ImageJob], torch.Tensor]
) -> None:
    plain = model.job(0)
    chosen = [(), PAPER, INK, PAPER + INK]
    jobs = [structs.replace(plain, loras=loras) for loras in chosen]
    beside = model.run(list(enumerate(jobs)))  # each begins one step after the one before
    (after,) = model.run([(0, plain)])
    for job, run in zip([*jobs, plain], [*beside, after], strict=True):
        assert run.error is None
        assert torch.equal(run.result.images, expected(job))
    different = {run.result.images.numpy().tobytes() for run in beside}
    assert len(different) == 4


def test_requests_with_the_same_adapters_are_joined(
    model: Tiny, expected: Callable[[ImageJob], torch.Tensor]
) -> None:
    jobs = [structs.replace(model.job(index), loras=PAPER) for index in range(2)]
    passes = model.stepped.num_passes
    for run, job in zip(model.run([(0, jobs[0]), (0, jobs[1])]), jobs, strict=True):
        assert difference(run, expected(job)) < 1e-5
    assert model.stepped.num_passes - passes == 2 * model.num_steps  # with and without the prompt


def test_an_adapter_of_the_text_encoder_applies_to_its_requests(
    tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = DiffusionPipeline.from_pretrained(tiny_folder("sd15"))
    StableDiffusionPipeline.save_lora_weights(
        tmp_path, text_encoder_lora_layers=made(base.text_encoder, 0), unet_lora_layers=made(base.unet, 1)
    )
    place = tmp_path / "pytorch_lora_weights.safetensors"
    pipe = load_pipeline(tiny_folder("sd15"), stage_options(loras={"paper": str(place)}), "float32", CPU)
    model = Tiny("sd15", pipe, 4, tiny("sd15").guidance)
    job = model.job(0)
    plain, painted = model.run([(0, job), (1, structs.replace(job, loras=PAPER))])
    assert torch.equal(plain.result.images, tiny("sd15").own_image(job))
    reference = DiffusionPipeline.from_pretrained(tiny_folder("sd15"))
    reference.load_lora_weights(place)
    assert torch.equal(painted.result.images, reference(**pipeline_arguments(reference, job)).images)


def family_model(folder: Path) -> DiffusersModel:
    return FAMILY.open(folder)


def test_a_request_names_adapters_of_the_stage(
    tiny_folder: Callable[[str], Path], places: dict[str, str]
) -> None:
    requests = ImageRequests(family_model(tiny_folder("qwen-image")), stage_options(loras=places))
    assert requests.features.loras == ("paper", "ink")
    prompt, _ = requests.render(MESSAGES, ImageOutput(ImageSize(64, 64), loras=PAPER + INK))
    assert decode_job(prompt.payload).loras == PAPER + INK
    for name in ("chalk", places["paper"], "https://example.org/a.safetensors"):
        with pytest.raises(InvalidRequestError, match="this model has paper, ink") as caught:
            requests.render(MESSAGES, ImageOutput(ImageSize(64, 64), loras=(Lora(name),)))
        assert caught.value.param == "loras"
    with pytest.raises(InvalidRequestError, match="named twice"):
        requests.render(MESSAGES, ImageOutput(ImageSize(64, 64), loras=PAPER + PAPER))
    without = ImageRequests(family_model(tiny_folder("qwen-image")), stage_options())
    with pytest.raises(InvalidRequestError, match="no parameter 'loras'"):
        without.render(MESSAGES, ImageOutput(ImageSize(64, 64), loras=PAPER))


def test_what_is_no_adapter_of_the_pipeline_does_not_start(
    tiny_folder: Callable[[str], Path], places: dict[str, str], tmp_path: Path
) -> None:
    def refusal(name: str, place: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_pipeline(tiny_folder(name), stage_options(loras={"paper": str(place)}), "float32", CPU)
        return str(caught.value)

    assert "loras: there is no file" in refusal("qwen-image", tmp_path / "missing.safetensors")
    assert "for StableDiffusionPipeline" in refusal("sd15", Path(places["paper"]))
    pickled = tmp_path / "pickled.safetensors"
    pickled.write_bytes(pickle.dumps({"transformer.x.lora_A.weight": 1}))
    assert f"loras: {pickled} is no LoRA" in refusal("qwen-image", pickled)
    with pytest.raises(ValueError, match="should match pattern"):
        stage_options(loras={"paper": "paper.bin"})


def test_a_file_of_the_hub_is_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--someone--papers"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    file = repository / "snapshots" / ("0" * 40) / "v1" / "paper.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert lora_file("someone/papers/v1/paper.safetensors") == file
    with pytest.raises(ConfigError, match="cannot be downloaded from the hub"):
        lora_file("someone/papers/v2/paper.safetensors")


def test_a_pipeline_that_loads_none_is_refused_with_them(
    tiny_folder: Callable[[str], Path], places: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("sd15"), tmp_path / "pipeline"))
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "PixArtAlphaPipeline"}))
    with pytest.raises(ConfigError, match="loras: PixArtAlphaPipeline loads no LoRA; leave it out"):
        family_model(folder).image_features(stage_options(loras=places))


def test_adapters_count_as_weights(tiny_folder: Callable[[str], Path], places: dict[str, str]) -> None:
    config = config_with(loras=places | {"hub": "a/b/c.safetensors"})
    footprint = FAMILY.footprints(tiny_folder("qwen-image"), config)["image"]
    stored = 4 * sum(math.prod(shape) for shape in footprint.tensors.values())
    assert footprint.weight_bytes == stored + sum(Path(place).stat().st_size for place in places.values())
