"""Text to speech as in `speech_only`, but the speaker samples the first code of a frame and predicts the
others: one step per frame. For tests without engines: Qwen3-Omni's talker is such a stage."""

from dataclasses import replace

from omni_server.config.pipeline import Pipeline, TokenFrames
from tests.toy_families.speech_only import NUM_CODEBOOKS, SpeechFamily

NUM_PREDICTED = NUM_CODEBOOKS - 1


class PredictingFamily(SpeechFamily):
    pipeline = Pipeline(
        SpeechFamily.pipeline.stages,
        tuple(
            replace(edge, payload=TokenFrames(NUM_CODEBOOKS, NUM_PREDICTED))
            for edge in SpeechFamily.pipeline.edges
        ),
    )


FAMILY = PredictingFamily()
