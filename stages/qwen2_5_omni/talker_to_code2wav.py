"""The talker -> code2wav edge: codec tokens into windows, each with the voice and the seed of its noise."""

import uuid
from collections.abc import Sequence

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.edge import DecoderWindow, Frame
from omni_server.family import CodecLayout
from omni_server.protocol.codec_window import encode_codec_window
from stages.codec_chunking import CodecChunker, Window, check_chunk_plan


class TalkerToCode2Wav:
    """Implements `omni_server.edge.CodecEdge` for one utterance."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int) -> None:
        check_chunk_plan(plan, codes_per_block=layout.codes_per_block, frames_per_code=layout.frames_per_code)
        self._layout = layout
        self._voice = voice
        self._noise_seed = noise_seed
        self._chunker = CodecChunker(plan, layout.codes_per_block)
        # Not the request's id, which a client may use again while code2wav still has a window of the first
        # use.
        self._stream = uuid.uuid4().hex if plan.carries_state else None

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        self._chunker.use_ramp(new_blocks)

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        self._chunker.push(code for (code,) in frames)
        return self._ready()

    def finish(self) -> list[DecoderWindow]:
        self._chunker.finish()
        return self._ready()

    def _ready(self) -> list[DecoderWindow]:
        return [self._request(window) for window in self._chunker.ready()]

    def _request(self, window: Window) -> DecoderWindow:
        per_code = self._layout.samples_per_code
        emitted = window.codes[window.emit_start - window.first_code : window.emit_end - window.first_code]
        return DecoderWindow(
            token_ids=window.codes,
            payload=encode_codec_window(
                window.span(voice=self._voice, noise_seed=self._noise_seed, stream=self._stream)
            ),
            first_sample=window.emit_start * per_code,
            num_samples=(window.emit_end - window.emit_start) * per_code,
            num_computed=len(window.codes)
            - (0 if self._stream is None else window.emit_start - window.first_code),
            is_varied=len(set(emitted)) > 1,
        )
