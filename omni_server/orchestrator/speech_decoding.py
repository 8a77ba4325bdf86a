"""How the frames of one stage become audio, for all requests."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import TokenFrames
from omni_server.config.stage_config import Edge, StageConfig
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel
from omni_server.family.codec import CodecEdge, CodecEdgeFactory, CodecLayout
from omni_server.orchestrator.codec_edge import load_edge_function
from omni_server.orchestrator.speech_scheduler import PendingStreams, SpeechScheduler
from omni_server.types import SpeechOutput


@dataclass(frozen=True)
class SpeechDecoding:
    """Everything that the requests share."""

    decoder: Stage[DiffusionHandle]
    factory: CodecEdgeFactory
    chunks: ChunkPlan
    layout: CodecLayout
    frames: TokenFrames
    schedulers: Mapping[str, SpeechScheduler]
    """Of the streams on each replica of the decoder, by its name."""
    pending: PendingStreams
    """Streams that no replica decodes yet."""

    def new_edge(self, speech: SpeechOutput, voice: str) -> CodecEdge:
        """For one stream."""
        seed = random.getrandbits(63) if speech.seed is None else speech.seed
        codes = np.frombuffer(b"" if speech.clone is None else speech.clone.frames, np.int16)
        past = [tuple(frame) for frame in codes.reshape(-1, self.frames.num_codebooks).tolist()]
        return self.factory(self.chunks, self.layout, voice=voice, noise_seed=seed % 2**64, past=past)


def speech_decoding(
    family: FamilyModel,
    config: StageConfig,
    edge: Edge,
    frames: TokenFrames,
    decoder: Stage[DiffusionHandle],
) -> SpeechDecoding:
    """Describes an edge with `frames` to `decoder`.

    Raises `ConfigError` if its windows do not fit the model, or if the model has no voices or no codec.
    """
    layout = family.codec
    if layout is None or not family.voices:
        missing = "describes no codec" if layout is None else "has no voices"
        raise ConfigError(
            f"{config.model_family} {missing}; the edge {edge.source} -> {edge.target} needs it"
        )
    assert edge.chunks is not None
    factory = load_edge_function(config.spec_of(edge).function)
    # Rejects a plan that does not fit the model here rather than at the first request.
    factory(edge.chunks, layout, voice=family.voices[0], noise_seed=0)
    replicas = decoder.handles
    pending = PendingStreams(num_decoders=len(replicas))
    schedulers = {handle.name: SpeechScheduler(edge.chunks, layout, pending) for handle in replicas}
    return SpeechDecoding(decoder, factory, edge.chunks, layout, frames, schedulers, pending)
