"""The reference: transformers' Qwen3-Omni, decoding greedily but forced along this server's answer.

`stages.qwen_omni.forced_reference` explains the forcing, `reference_repairs` what is repaired in
transformers. In addition, `generate` takes the end of the text from a Python default instead of the
checkpoint (`thinker_eos_token_id`), so it is always given; and the code predictor runs at the beginning of
the next step (3302), so speech that ends at its limit needs one more step for the predicted codes of its last
frame."""

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature, Qwen3OmniMoeForConditionalGeneration

from omni_server.protocol.reference import Difference, ReferenceJob
from stages.qwen3_omni.reference_repairs import repair, repair_audio, repair_processor
from stages.qwen_codec.forced_frames import ForcedFrames
from stages.qwen_omni.forced_reference import ForcedReference


class Qwen3OmniReference(ForcedReference):
    """Implements `omni_server.protocol.reference.Reference`."""

    model_class = Qwen3OmniMoeForConditionalGeneration

    def repair(self) -> None:
        model = self.model
        self.text_ends = (model.config.im_end_token_id,)
        repair_processor(self.processor)
        repair_audio(model.thinker)
        if model.has_talker:
            model.code2wav.float()
            repair(model)

    def speak(
        self, inputs: BatchFeature, job: ReferenceJob, text: dict[str, object]
    ) -> tuple[tuple[Difference, ...], npt.NDArray[np.float32]]:
        assert job.voice is not None
        frames = ForcedFrames(self.model.talker, job)
        with frames.along() as spoken:
            waveform = self.generate(inputs, job.messages, job.voice, text, spoken)
        return frames.differences, waveform
