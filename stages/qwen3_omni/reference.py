"""The reference: transformers' Qwen3-Omni, decoding greedily but forced along this server's answer.

`stages.qwen_omni.forced_reference` explains the forcing, `reference_repairs` what is repaired in transformers. In
addition, `generate` takes the end of the text from a Python default instead of the checkpoint
(`thinker_eos_token_id`), so it is always given; and the code predictor runs at the beginning of the next step
(3302), so speech that ends at its limit needs one more step for the predicted codes of its last frame.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BatchFeature, LogitsProcessorList, Qwen3OmniMoeForConditionalGeneration

from omni_server.protocol.reference import Difference, ReferenceJob
from stages.qwen3_omni.reference_repairs import repair, repair_audio, repair_processor
from stages.qwen_omni.forced_reference import ForcedChoice, ForcedReference, along, one_each


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
        talker = self.model.talker
        num_books = talker.config.num_code_groups
        frames = [job.codes[start : start + num_books] for start in range(0, len(job.codes), num_books)]
        # Behind a last frame at the limit, the code of the additional step does not matter.
        ends = (talker.config.codec_eos_token_id,)
        sampled = ForcedChoice([*one_each([frame[0] for frame in frames]), ends])
        predicted = [ForcedChoice(one_each(frame[1:])) for frame in frames]
        spoken = along(sampled, ends, job.repetition_penalties["talker"])
        predict = talker.code_predictor.generate
        talker.code_predictor.generate = _Predictor(predict, predicted)
        try:
            waveform = self.generate(inputs, job.messages, job.voice, text, spoken)
        finally:
            talker.code_predictor.generate = predict
        is_ended = len(frames) < job.max_codes
        differences = [
            *_at(sampled.differences, 0, num_books),
            *(d for i, choice in enumerate(predicted) for d in _at(choice.differences, i * num_books + 1, 1)),
        ]
        compared = (d for d in differences if is_ended or d.index < len(job.codes))
        return tuple(sorted(compared, key=lambda difference: difference.index)), waveform


class _Predictor:
    """The code predictor's `generate`, forced along one frame after the other."""

    def __init__(self, generate: Any, frames: list[ForcedChoice]) -> None:
        self._generate = generate
        self._frames = iter(frames)

    def __call__(self, **kwargs: Any) -> Any:
        return self._generate(**kwargs, logits_processor=LogitsProcessorList([next(self._frames)]))


def _at(differences: list[Difference], first: int, stride: int) -> Iterator[Difference]:
    """Differences with the indices of the answer's codes, which are in the order of its frames."""
    for d in differences:
        yield Difference(first + d.index * stride, d.ours, d.reference, d.margin, d.largest)
