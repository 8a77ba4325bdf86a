"""The model class of the stage, without an engine."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from omni_server.audio.waveform_check import waveform_fault
from omni_server.errors import ConfigError
from omni_server.protocol.corruption import Corruption
from omni_server.protocol.diffusion_config import ComputeDtype, DiffusionRuntimeConfig
from stages.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from stages.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from stages.qwen3_tts.hf_config import Qwen3TTSDecoderConfig
from stages.qwen_codec.code2wav.model import Code2WavModel
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.state import Step
from stages.qwen_codec.options import Code2WavStage
from stages.runtime.diffusion_model import DiffusionBatch, RejectedRequestsError
from tests.reference.qwen3_code2wav import random_code2wav, small_config
from tests.unit.stages.diffusion import new_request, outcomes, runner_for, step
from tests.unit.stages.qwen_codec.code2wav.speech import Stream
from tests.unit.stages.qwen_codec.code2wav.tape import TapeRecorder
from tests.unit.stages.qwen_codec.code2wav.tts_reference import (
    TTSReference,
    quantizer_weights,
    small_tts_config,
)

torch.set_num_threads(1)

Weights = dict[str, torch.Tensor]


@dataclass
class ModelConfig:
    hf_config: PreTrainedConfig


@dataclass
class EngineConfig:
    """What the model reads of vLLM's config."""

    model_config: ModelConfig
    additional_config: DiffusionRuntimeConfig


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeCode2Wav:
    return random_code2wav(small_config())


@pytest.fixture(scope="module")
def weights(reference: Qwen3OmniMoeCode2Wav) -> Weights:
    own = {f"code2wav.{name}": weight for name, weight in reference.state_dict().items()}
    return {"thinker.lm_head.weight": torch.zeros(2, 2), "talker.codec_head.weight": torch.zeros(2, 2)} | own


def model_with(
    config: PreTrainedConfig,
    *,
    num_streams: int = 4,
    compute_dtype: ComputeDtype = "float32",
    is_fast: bool = False,
) -> Code2WavModel:
    stage = Code2WavStage(
        model_stage="code2wav",
        engine="diffusion",
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        max_model_len=1024,
    )
    runtime = DiffusionRuntimeConfig(stage, compute_dtype, is_fast=is_fast, num_streams=num_streams)
    kind = Qwen3TTSCode2Wav if isinstance(config, Qwen3TTSDecoderConfig) else Qwen3OmniCode2Wav
    return kind(vllm_config=EngineConfig(ModelConfig(config), runtime))  # type: ignore[arg-type]


@pytest.fixture
def model(reference: Qwen3OmniMoeCode2Wav, weights: Weights) -> Iterator[Code2WavModel]:
    model = model_with(reference.config)
    model.load_weights(weights.items())
    model.prepare()
    with torch.inference_mode():
        yield model


def batch(*requests: tuple[list[int], bytes]) -> DiffusionBatch:
    return DiffusionBatch(
        tuple(f"r{i}" for i in range(len(requests))),
        tuple(torch.tensor(codes, dtype=torch.int64) for codes, _ in requests),
        tuple(payload for _, payload in requests),
    )


def request(stream: Stream, num_frames: int) -> tuple[list[int], bytes]:
    codes = stream.codes[stream.done : stream.done + num_frames].flatten().tolist()
    return codes, stream.window(num_frames).encode()


# -- weights


def test_loads_its_part_of_the_checkpoint(reference: Qwen3OmniMoeCode2Wav, weights: Weights) -> None:
    model = model_with(reference.config)
    loaded = model.load_weights(weights.items())
    assert loaded == {f"code2wav.{name}" for name in reference.state_dict()}
    assert loaded == set(dict(model.named_parameters()))
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_the_residual_quantizers_of_qwen3_tts_become_one_table() -> None:
    torch.manual_seed(0)
    reference = TTSReference(small_tts_config())
    quantizers, vectors = quantizer_weights(reference.config)
    with torch.no_grad():
        reference.code_embedding.weight.copy_(vectors)
    weights = {f"decoder.{name}": weight for name, weight in (reference.state_dict() | quantizers).items()}
    del weights["decoder.code_embedding.weight"]
    model = model_with(reference.config)
    assert model.is_unused_checkpoint_weight("encoder.layers.0.weight")
    loaded = model.load_weights((weights | {"encoder.layers.0.weight": torch.zeros(2)}).items())
    assert loaded == set(dict(model.named_parameters()))
    model.prepare()
    stream = Stream(reference, 10)
    [waveform] = model.sample(batch(request(stream, 10)))
    assert waveform.std() > 0.01
    torch.testing.assert_close(waveform, stream.single_pass, atol=1e-4, rtol=0)
    missing = "decoder.quantizer.rvq_rest.vq.layers.14._codebook.embedding_sum"
    with pytest.raises(ConfigError, match=f"lacks the weight {missing}"):
        model_with(reference.config).load_weights(
            (name, weights[name]) for name in weights.keys() - {missing}
        )


def test_weights_have_the_type_of_the_stage(reference: Qwen3OmniMoeCode2Wav, weights: Weights) -> None:
    model = model_with(reference.config, compute_dtype="bfloat16")
    model.load_weights((name, weight.bfloat16()) for name, weight in weights.items())
    model.prepare()
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    stream = Stream(reference, 10)
    [waveform] = model.sample(batch(request(stream, 10)))
    assert waveform.dtype == torch.float32
    error = (waveform - stream.single_pass).square().mean() / stream.single_pass.square().mean()
    assert error < 0.05


@pytest.mark.parametrize("family", ["qwen3_omni", "qwen3_tts"])
def test_a_model_without_weights_makes_samples_that_pass_for_audio(family: str) -> None:
    config = small_config(hidden_size=256, num_hidden_layers=8, decoder_dim=384, codebook_size=64)
    if family == "qwen3_tts":
        sizes = {"latent_dim": 256, "codebook_dim": 128, "hidden_size": 128, "head_dim": 64}
        config = Qwen3TTSDecoderConfig(**(config.to_dict() | sizes))
    model = model_with(config, compute_dtype="bfloat16")
    for weight in model.parameters():
        initialize_single_dummy_weight(weight.data)
    model.randomize_weights()
    model.prepare()
    stream = Stream(random_code2wav(small_config(codebook_size=64)), 8)
    model.sample(batch(request(stream, 4)))
    stream.done = 4  # the beginning varies in any case: nothing precedes it
    [waveform] = model.sample(batch(request(stream, 4)))
    samples = waveform.detach().numpy()
    assert waveform_fault(samples, num_samples=4 * 1920, is_varied=True) is None


# -- windows


def test_graphs_are_recorded_before_the_first_request(
    reference: Qwen3OmniMoeCode2Wav, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fast path, and without it never."""
    recorder = TapeRecorder()
    monkeypatch.setattr("stages.qwen_codec.code2wav.model.CudaGraphRecorder", lambda: recorder)
    plain, fast = (model_with(reference.config, is_fast=is_fast) for is_fast in (False, True))
    plain.load_weights(weights.items())
    plain.prepare()
    assert recorder.num_recorded == 0
    fast.load_weights(weights.items())
    fast.prepare()
    assert recorder.num_recorded == 8  # 1, 2, 4 and 8 frames of one and two streams
    with torch.inference_mode():
        for model in (plain, fast):
            streams = [Stream(reference, 12, "a"), Stream(reference, 11, "b")]
            for sizes in ((3, 8), (9, 3)):
                parts = list(zip(streams, sizes, strict=True))
                waveforms = model.sample(batch(*(request(*part) for part in parts)))
                for (stream, size), waveform in zip(parts, waveforms, strict=True):
                    stream.samples.append(waveform)
                    stream.done += size
            assert max(stream.error() for stream in streams) < 1e-5
    assert recorder.num_recorded == 8
    assert recorder.replayed


def test_every_invalid_request_is_named_before_anything_runs(
    model: Code2WavModel, reference: Qwen3OmniMoeCode2Wav
) -> None:
    stream = Stream(reference, 10)
    codes, payload = request(stream, 2)
    stream.done = 2
    window = stream.window(2)
    later = window.encode()
    replace = msgspec.structs.replace
    with pytest.raises(RejectedRequestsError) as caught:
        model.sample(
            batch(
                (codes, payload),
                (codes[:-1], payload),
                ([], payload),
                ([*codes[:-1], 2048], payload),
                ([*codes[:-1], -1], payload),
                (codes, b"junk"),
                (codes, replace(window, past=window.past[:-2]).encode()),
                (codes, replace(window, past=b"\x00\x08" + window.past[2:]).encode()),
                (codes, replace(window, first_frame=-1).encode()),
                (codes, later),
            )
        )
    reasons = caught.value.reasons
    assert str(reasons.pop("r5")).startswith("not a codec window: ")
    assert reasons == {
        "r1": "the window holds 31 codec tokens; it must be a positive multiple of 16, the codes of a frame",
        "r2": "the window holds 0 codec tokens; it must be a positive multiple of 16, the codes of a frame",
        "r3": Corruption("codes", "codec token 2048 is outside the codebooks of 2048 codes"),
        "r4": Corruption("codes", "codec token -1 is outside the codebooks of 2048 codes"),
        "r6": "past has 62 bytes; before frame 2 there must be 64",
        "r7": Corruption("codes", "codec token 2048 is outside the codebooks of 2048 codes"),
        "r8": "past has 64 bytes; before frame -1 there must be -32",
        "r9": Corruption(
            "window_sequence", "another window of its stream is in the same step: send one after the other"
        ),
    }


@pytest.mark.parametrize("start", [0, 3, 5, 9])
def test_a_window_that_does_not_continue_its_stream_is_rejected(
    model: Code2WavModel, reference: Qwen3OmniMoeCode2Wav, start: int
) -> None:
    stream = Stream(reference, 20)
    model.sample(batch(request(stream, 4)))
    stream.done = start
    with pytest.raises(RejectedRequestsError) as caught:
        model.sample(batch(request(stream, 2)))
    assert caught.value.reasons == {
        "r0": Corruption("window_sequence", f"a window from frame {start} on, where 4 is the next one")
    }
    stream.done = 4
    assert len(model.sample(batch(request(stream, 2)))) == 1


def test_streams_whose_step_failed_go_on_as_if_nothing_had_happened(
    model: Code2WavModel, reference: Qwen3OmniMoeCode2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner repeats a failed step with each request alone."""
    runner, streams = runner_for(model), [Stream(reference, 12, "a"), Stream(reference, 12, "b")]
    forward = Code2WavNetwork.forward

    def fails_together(self: Code2WavNetwork, codes: torch.Tensor, now: Step) -> torch.Tensor:
        samples = forward(self, codes, now)
        if len(codes) > 1 and int(now.positions.max()) == 4:
            raise RuntimeError("out of memory")
        return samples

    monkeypatch.setattr(Code2WavNetwork, "forward", fails_together)
    for number in range(3):
        windows = [new_request(f"{s.name}{number}", *request(s, 4)) for s in streams]
        found = outcomes(runner.execute_model(step(*windows)))
        for stream in streams:
            stream.samples.append(torch.tensor(found[f"{stream.name}{number}"]))
            stream.done += 4
    assert max(stream.error() for stream in streams) < 1e-5


# -- the config
