"""Text to speech as in `speech_only`, but the speaker samples the first code of a frame and predicts the others:
one step per frame."""

from dataclasses import replace

from omni_server.config.pipeline import Pipeline, TokenFrames
from tests.toy_families.speech_only import NUM_CODEBOOKS, VOCODER, SpeechFamily

SPEAKER = "ToyPredictingSpeaker"
NUM_PREDICTED = NUM_CODEBOOKS - 1


class PredictingFamily(SpeechFamily):
    pipeline = Pipeline(
        SpeechFamily.pipeline.stages,
        tuple(
            replace(edge, payload=TokenFrames(NUM_CODEBOOKS, NUM_PREDICTED))
            for edge in SpeechFamily.pipeline.edges
        ),
    )
    architectures = (SPEAKER,)

    def register(self) -> None:
        from vllm import ModelRegistry

        from tests.toy_families.models import ToyPredictingSpeaker, ToyVocoder

        ModelRegistry.register_model(SPEAKER, ToyPredictingSpeaker)
        ModelRegistry.register_model(VOCODER, ToyVocoder)


FAMILY = PredictingFamily()
