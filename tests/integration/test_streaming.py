"""Speech is streamed: while the reply is still being written, without gaps, and close to one pass over all of
it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.types import AudioDelta, CodecDelta, Finished, OmniEvent, SamplingConfig, TextDelta
from omni_server.verify.compare import signal_to_noise_db
from stages.codec_chunking import CodecChunker
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.pipeline import Code2WavPipeline, WindowJob
from stages.qwen2_5_omni.code2wav.voices import load_voices
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import codec_window
from tests.integration.live import LiveOmni, demo_config, spoken
from tests.integration.parity import expected, same_tokens
from tests.reference.cases import CASES
from tests.reference.reference import Reference
from tests.reference.token2wav import code2wav_stage

CHUNKED_SNR_DB = 50.0
"""Of streamed sound against one pass with the same noise, on the demo checkpoint's random weights; measured:
58.3 to 60.2 dB. A window sees one block behind what it emits, the reference all. Without carry, where it sees
no more than two blocks before, 57.5 to 59.1 dB."""
CARRY_SNR_DB = 95.0
"""Of a stream against the same windows in another process; measured: equal. Windows by themselves: 84 dB."""


VOICE = "Chelsie"
NOISE_SEED = 7
"""Of requests made by `spoken`."""


@pytest.fixture(scope="module")
def streaming(checkpoint: Path) -> Iterator[LiveOmni]:
    """The demo config as it is shipped."""
    live = LiveOmni(checkpoint, demo_config())
    yield live
    live.close()


@pytest.fixture(scope="module")
def long_reply(streaming: LiveOmni) -> list[OmniEvent]:
    """The thinker pauses until it is heard."""
    request = spoken(
        CASES["tell"].messages,
        thinker=SamplingConfig(temperature=0.0, max_tokens=480, min_tokens=480, ignore_eos=True),
        talker=SamplingConfig(temperature=0.0, max_tokens=300, min_tokens=300),
    )
    return streaming.events_with_a_pause(request, 100)


def test_the_first_audio_comes_before_the_last_text(long_reply: list[OmniEvent]) -> None:
    first_audio = next(i for i, event in enumerate(long_reply) if isinstance(event, AudioDelta))
    last_text = max(i for i, event in enumerate(long_reply) if isinstance(event, TextDelta))
    assert first_audio < last_text


def test_events_end_with_the_usage(long_reply: list[OmniEvent]) -> None:
    finished = long_reply[-1]
    assert isinstance(finished, Finished)
    assert (
        finished.usage.text_tokens
        == sum(len(e.token_ids) for e in long_reply if isinstance(e, TextDelta))
        == 480
    )
    assert (
        finished.usage.codec_tokens
        == sum(len(e.codes) for e in long_reply if isinstance(e, CodecDelta))
        == 300
    )


def test_codes_leave_the_talker_in_blocks(long_reply: list[OmniEvent]) -> None:
    """Windows end where blocks do, so that nothing waits for codes that are kept back."""
    ends = np.cumsum([len(event.codes) for event in long_reply if isinstance(event, CodecDelta)])
    assert len(ends) > 1
    assert not (ends % 12).any()


def test_the_end_tells_when_each_stage_was_passed(long_reply: list[OmniEvent]) -> None:
    finished = long_reply[-1]
    assert isinstance(finished, Finished)
    assert list(finished.times) == ["thinker", "talker", "code2wav"]
    _, talker, code2wav = finished.times.values()
    speech = [
        talker.submitted_s,
        talker.first_output_s,
        code2wav.submitted_s,
        code2wav.first_output_s,
        code2wav.last_output_s,
    ]
    known = [moment for moment in speech if moment is not None]
    assert len(known) == len(speech)
    assert sorted(known) == known
    assert len(code2wav.windows) == sum(isinstance(event, AudioDelta) for event in long_reply)


def test_audio_is_contiguous_and_covers_every_code(long_reply: list[OmniEvent]) -> None:
    position = 0
    for event in long_reply:
        if isinstance(event, AudioDelta):
            assert event.first_sample == position
            position += len(event.samples)
    assert position == 300 * 480


@pytest.mark.parametrize("name", ["hello", "count", "image", "two_turns_ethan", "long_reply"])
def test_streamed_sound_is_close_to_one_pass_over_the_utterance(
    name: str, streaming: LiveOmni, reference: Reference
) -> None:
    want = expected(reference, CASES[name])
    answer = streaming.answer(want.request)
    same_tokens(answer, want)
    snr = signal_to_noise_db(want.result.waveform, answer.audio)
    assert snr > CHUNKED_SNR_DB, f"{snr:.1f} dB over {len(answer.codes)} codes"


def test_the_server_carries_state_from_window_to_window(
    long_reply: list[OmniEvent], checkpoint: Path
) -> None:
    """Its sound is that of the pipeline with the windows of one stream, and not that of windows by
    themselves."""
    codes = [code for event in long_reply if isinstance(event, CodecDelta) for code in event.codes]
    sound = np.concatenate([event.samples for event in long_reply if isinstance(event, AudioDelta)])
    chunks = demo_config().edges[1].chunks
    assert chunks is not None
    carried = stream_sound(checkpoint, codes, chunks, stream="a")
    by_themselves = stream_sound(checkpoint, codes, chunks, stream=None)
    assert signal_to_noise_db(carried, sound) > CARRY_SNR_DB > signal_to_noise_db(by_themselves, sound)


def stream_sound(
    checkpoint: Path, codes: list[int], chunks: Code2WavChunks, *, stream: str | None
) -> npt.NDArray[np.float32]:
    """`codes` in windows through a pipeline of its own, with the voice and the noise of `spoken`."""
    torch.set_num_threads(1)
    token2wav = Qwen2_5OmniToken2WavModel(AutoConfig.from_pretrained(checkpoint).token2wav_config).eval()
    weights = load_file(checkpoint / "model.safetensors")
    own = {k.removeprefix("token2wav."): w for k, w in weights.items() if k.startswith("token2wav.")}
    token2wav.load_state_dict(own)
    voices = load_voices(checkpoint)
    runtime = DiffusionRuntimeConfig(
        stage=code2wav_stage(max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=2048),
        compute_dtype="float32",
        is_fast=False,
        num_streams=1,
    )
    with torch.inference_mode():
        pipeline = Code2WavPipeline(
            token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model, tuple(voices.values()), runtime
        )
    chunker = CodecChunker(chunks, 12)
    pieces = []
    for window in [*chunker.push(codes), *chunker.finish()]:
        span = codec_window(window, chunks, voice=VOICE, noise_seed=NOISE_SEED, stream=stream)
        noise = torch.from_numpy(noise_frames(NOISE_SEED, 2 * window.first_frame, 2 * len(window.frames), 80))
        job = WindowJob(span, torch.tensor(window.frames), noise, list(voices).index(VOICE))
        pieces += pipeline.run([job])
    return torch.cat(pieces).numpy()


def test_windows_do_not_click_where_they_meet(long_reply: list[OmniEvent]) -> None:
    """The step between the last sample of a window and the first of the next is no larger than steps
    elsewhere."""
    pieces = [event.samples for event in long_reply if isinstance(event, AudioDelta)]
    steps = np.abs(np.diff(np.concatenate(pieces)))
    seams = np.cumsum([len(piece) for piece in pieces])[:-1] - 1
    assert steps[seams].max() <= np.quantile(steps, 0.999)
