"""Speech streams of random codes, and their windows."""

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stages.qwen3_tts.codec_layout import decoder_layout
from stages.qwen3_tts.codec_network import Qwen3TTSNetwork
from stages.qwen3_tts.hf_config import Qwen3TTSDecoderConfig
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.passes import Passes
from stages.qwen_codec.code2wav.stream_decoder import StreamDecoder, WindowJob
from stages.qwen_codec.codec_layout import Code2WavLayout, code2wav_layout
from stages.qwen_codec.codec_window import CodecWindow, encode_frame
from tests.unit.stages.qwen_codec.code2wav.tts_reference import TTSReference

Reference = Qwen3OmniMoeCode2Wav | TTSReference


def layout_of(config: Qwen3OmniMoeCode2WavConfig) -> Code2WavLayout:
    is_tts = isinstance(config, Qwen3TTSDecoderConfig)
    return (decoder_layout if is_tts else code2wav_layout)(config.to_dict())


class Stream:
    """One stream: its codes, what has been decoded up to now, and the single pass of the reference."""

    def __init__(self, reference: Reference, num_frames: int, name: str = "a") -> None:
        config = reference.config
        self.name = name
        self.codes = torch.randint(
            config.codebook_size,
            (num_frames, config.num_quantizers),
            generator=torch.Generator().manual_seed(num_frames),
        )
        self.single_pass = single_pass(reference, self.codes)
        self.done = 0  # frames
        self.samples: list[torch.Tensor] = []
        self._context_frames = layout_of(config).context_frames

    @property
    def num_left(self) -> int:
        return len(self.codes) - self.done

    @property
    def streamed(self) -> torch.Tensor:
        return torch.cat(self.samples)

    def window(self, num_frames: int) -> CodecWindow:
        past = self.codes[max(0, self.done - self._context_frames) : self.done].tolist()
        is_last = num_frames >= self.num_left
        past_bytes = b"".join(map(encode_frame, past))
        return CodecWindow(self.name, self.done, is_last, past_bytes, is_first=not self.samples)

    def job(self, num_frames: int) -> WindowJob:
        window = self.window(num_frames)
        past = torch.from_numpy(window.past_codes()).view(-1, self.codes.shape[1])
        return WindowJob(window, self.codes[self.done : self.done + num_frames], past)

    def error(self) -> float:
        """Largest deviation from the single pass."""
        assert self.streamed.shape == self.single_pass.shape
        return float((self.streamed - self.single_pass).abs().max())


def single_pass(reference: Reference, codes: torch.Tensor) -> torch.Tensor:
    """codes: [num_frames, codebooks]."""
    with torch.inference_mode():
        return reference(codes.T[None].to(reference.device))[0, 0].cpu()


def network_like(reference: Reference) -> Code2WavNetwork:
    config = reference.config
    made: Code2WavNetwork = (
        Qwen3TTSNetwork(config) if isinstance(config, Qwen3TTSDecoderConfig) else Code2WavNetwork(config)
    )
    network = made.to(reference.device, reference.dtype)
    network.load_state_dict(reference.state_dict())
    return network


def decoder_like(
    reference: Reference, *, num_slots: int = 4, max_frames_per_pass: int = 256
) -> StreamDecoder:
    """Computes eagerly."""
    passes = Passes(network_like(reference), num_slots=num_slots, max_frames=max_frames_per_pass)
    return StreamDecoder(passes, layout_of(reference.config))


def advance(decoder: StreamDecoder, *parts: tuple[Stream, int]) -> None:
    """One step with a window of so many frames for each stream."""
    jobs = [stream.job(min(num_frames, stream.num_left)) for stream, num_frames in parts]
    for (stream, _), job, samples in zip(parts, jobs, decoder.run(jobs), strict=True):
        stream.samples.append(samples)
        stream.done += len(job.codes)


def decode(decoder: StreamDecoder, stream: Stream, ramp: tuple[int, ...]) -> None:
    """The rest of the stream; the last number of the ramp is used until the end."""
    for number in ramp:
        if stream.num_left:
            advance(decoder, (stream, number))
    while stream.num_left:
        advance(decoder, (stream, ramp[-1]))
