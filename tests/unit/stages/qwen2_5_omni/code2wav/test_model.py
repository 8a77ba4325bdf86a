"""The model class of the stage, without an engine."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_server.errors import ConfigError
from omni_server.protocol.corruption import Corruption
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from stages.qwen2_5_omni.code2wav.model import Qwen2_5OmniCode2Wav
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import SolverConfig
from stages.runtime.diffusion_model import DiffusionBatch, RejectedRequestsError
from tests.reference.token2wav import code2wav_stage

Weights = dict[str, torch.Tensor]

RUNTIME_CONFIG = DiffusionRuntimeConfig(
    stage=code2wav_stage(
        solver=SolverConfig(num_steps=3), max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=2048
    ),
    compute_dtype="float32",
    is_fast=False,
    num_streams=4,
)


@dataclass
class ModelConfig:
    hf_config: PreTrainedConfig
    model: str


@dataclass
class EngineConfig:
    """What the model reads of vLLM's config."""

    model_config: ModelConfig
    additional_config: DiffusionRuntimeConfig = RUNTIME_CONFIG


@pytest.fixture
def engine_config(
    tmp_path: Path, token2wav: Qwen2_5OmniToken2WavModel, voices: tuple[Voice, Voice]
) -> EngineConfig:
    file = {
        v.name: {"bos_token": v.bos_token, "cond": v.conditioning, "ref_mel": v.reference_mel} for v in voices
    }
    torch.save(file, tmp_path / "spk_dict.pt")
    return EngineConfig(ModelConfig(token2wav.config, str(tmp_path)))


@pytest.fixture
def weights(token2wav: Qwen2_5OmniToken2WavModel) -> Weights:
    own = {f"token2wav.{name}": weight.clone() for name, weight in token2wav.state_dict().items()}
    return {"thinker.lm_head.weight": torch.zeros(2, 2), "talker.codec_head.weight": torch.zeros(2, 2)} | own


@pytest.fixture
def model(engine_config: EngineConfig, weights: Weights) -> Iterator[Qwen2_5OmniCode2Wav]:
    model = Qwen2_5OmniCode2Wav(vllm_config=engine_config)  # type: ignore[arg-type]
    model.load_weights(weights.items())
    model.prepare()
    with torch.inference_mode():
        yield model


def test_loads_its_part_of_the_checkpoint(
    engine_config: EngineConfig, weights: Weights, token2wav: Qwen2_5OmniToken2WavModel
) -> None:
    model = Qwen2_5OmniCode2Wav(vllm_config=engine_config)  # type: ignore[arg-type]
    loaded = model.load_weights((name, weight.bfloat16()) for name, weight in weights.items())
    assert loaded == set(token2wav.state_dict()) == set(dict(model.named_parameters()))
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, token2wav.state_dict()[name].bfloat16().float())


def test_knows_the_weights_of_other_stages() -> None:
    assert Qwen2_5OmniCode2Wav.is_unused_checkpoint_weight("thinker.lm_head.weight")
    assert not Qwen2_5OmniCode2Wav.is_unused_checkpoint_weight("token2wav.code2wav_dit_model.proj_out.bias")


def test_weights_that_do_not_fit_are_named(engine_config: EngineConfig, weights: Weights) -> None:
    name = "token2wav.code2wav_dit_model.proj_out.bias"
    model = Qwen2_5OmniCode2Wav(vllm_config=engine_config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"lacks 1 weights of the model, among them {name}"):
        model.load_weights((k, w) for k, w in weights.items() if k != name)
    with pytest.raises(ConfigError, match=r"token2wav\.surprise has no place"):
        model.load_weights((weights | {"token2wav.surprise": torch.zeros(1)}).items())
    with pytest.raises(ConfigError, match=rf"{name} is \[3\], the config says \[80\]"):
        model.load_weights((weights | {name: torch.zeros(3)}).items())


def test_voices_of_another_model_are_refused(engine_config: EngineConfig) -> None:
    folder = Path(engine_config.model_config.model)
    voice = {"bos_token": 1, "cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 60, 80)}
    torch.save({"Ethan": voice}, folder / "spk_dict.pt")
    with pytest.raises(
        ConfigError, match=r"voice 'Ethan' has widths \(192, 80\), the model's are \(24, 80\)"
    ):
        Qwen2_5OmniCode2Wav(vllm_config=engine_config)  # type: ignore[arg-type]


WINDOW = CodecWindow("Ethan", 1, 0, 0, 24, 20, True)


def batch(*requests: tuple[list[int], bytes]) -> DiffusionBatch:
    return DiffusionBatch(
        tuple(f"r{i}" for i in range(len(requests))),
        tuple(torch.tensor(codes, dtype=torch.int64) for codes, _ in requests),
        tuple(payload for _, payload in requests),
    )


@pytest.mark.parametrize(
    ("emit_start", "emit_end"), [(0, 12), (24, 36)], ids=["come twice", "behind a missing one"]
)
def test_a_window_out_of_order_is_rejected_and_leaves_its_stream_and_the_others_as_they_are(
    model: Qwen2_5OmniCode2Wav, emit_start: int, emit_end: int
) -> None:
    codes = list(range(48))
    window = msgspec.structs.replace(WINDOW, emit_end=12, is_last=False, stream="a")
    following = msgspec.structs.replace(window, emit_start=12, emit_end=24)
    wrong = msgspec.structs.replace(window, emit_start=emit_start, emit_end=emit_end)
    other = msgspec.structs.replace(window, stream="b")
    (_, expected) = [model.sample(batch((codes, w.encode())))[0] for w in (window, following)]
    model.sample(batch((codes, msgspec.structs.replace(window, stream="c").encode())))
    wrong_of_c = msgspec.structs.replace(wrong, stream="c")
    with pytest.raises(RejectedRequestsError) as caught:
        model.sample(batch((codes, other.encode()), (codes, wrong_of_c.encode())))
    detail = f"a window from code {emit_start} on, where 12 is the next one"
    assert caught.value.reasons == {"r1": Corruption("window_sequence", detail)}
    (goes_on,) = model.sample(batch((codes, msgspec.structs.replace(following, stream="c").encode())))
    assert torch.equal(goes_on, expected)
