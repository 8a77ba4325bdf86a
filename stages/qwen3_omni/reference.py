"""The reference: transformers' Qwen3-Omni, decoding greedily but forced along this server's answer.

`stages.forced_reference` explains the forcing, `reference_repairs` what is repaired in transformers. In
addition, `generate` takes the end of the text from a Python default instead of the checkpoint
(`thinker_eos_token_id`), so it is always given; and the code predictor runs at the beginning of the next step
(3302), so speech that ends at its limit needs one more step for the predicted codes of its last frame.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import (
    AutoProcessor,
    BatchFeature,
    LogitsProcessorList,
    Qwen3OmniMoeForConditionalGeneration,
)

from omni_server.reference import Difference, ReferenceAnswer, ReferenceJob
from stages.forced_reference import (
    ForcedChoice,
    along,
    forced_steps,
    hears_videos,
    moved,
    one_each,
    prefixed,
    processed,
)
from stages.qwen3_omni.reference_repairs import NothingToSpeakError, repair, repair_audio, repair_processor


class Qwen3OmniReference:
    """Implements `omni_server.reference.Reference`."""

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._processor = AutoProcessor.from_pretrained(folder)
        repair_processor(self._processor)
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self._model = model = model.eval().to(device)
        self._text_ends = (model.config.im_end_token_id,)
        repair_audio(model.thinker)
        if model.has_talker:
            model.code2wav.float()
            repair(model)
            self._predict = model.talker.code_predictor.generate

    @torch.inference_mode()
    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Raises what transformers raises."""
        inputs = moved(
            processed(self._processor, job.messages), self._model.device, self._model.thinker.dtype
        )
        given_ids = None
        if job.given_text is not None:
            tokenized = self._processor.tokenizer(job.given_text, add_special_tokens=False)
            given_ids = tuple(tokenized["input_ids"])
            # The thinker's last token is not spoken, so an end token follows the text.
            text = ForcedChoice([*one_each(given_ids), self._text_ends])
        else:
            text = ForcedChoice(forced_steps(job.text_ids, self._text_ends, job.max_text_tokens))
        codes, waveform = tuple[Difference, ...](), np.zeros(0, np.float32)
        if job.voice is None:
            thinker = along(text, job.repetition_penalties["thinker"])
            self._model.thinker.generate(
                **inputs,
                **thinker,
                eos_token_id=list(self._text_ends),
                use_audio_in_video=hears_videos(job.messages),
            )
        else:
            codes, waveform = self._speak(inputs, job, text)
        return ReferenceAnswer(
            prompt_tokens=inputs["input_ids"].shape[1],
            text=tuple(text.differences) if given_ids is None else (),
            given_ids=given_ids,
            codes=codes,
            waveform=waveform,
        )

    def _speak(
        self, inputs: BatchFeature, job: ReferenceJob, text: ForcedChoice
    ) -> tuple[tuple[Difference, ...], npt.NDArray[np.float32]]:
        talker = self._model.talker
        num_books = talker.config.num_code_groups
        frames = [job.codes[start : start + num_books] for start in range(0, len(job.codes), num_books)]
        # Behind a last frame at the limit, the code of the additional step does not matter.
        sampled = ForcedChoice(
            [*one_each([frame[0] for frame in frames]), (talker.config.codec_eos_token_id,)]
        )
        predicted = [ForcedChoice(one_each(frame[1:])) for frame in frames]
        waveform = np.zeros(0, np.float32)
        talker.code_predictor.generate = _Predictor(self._predict, predicted)
        try:
            _, sound = self._model.generate(
                **inputs,
                speaker=job.voice,
                use_audio_in_video=hears_videos(job.messages),
                thinker_eos_token_id=list(self._text_ends),
                **prefixed("thinker", along(text, job.repetition_penalties["thinker"])),
                **prefixed("talker", along(sampled, job.repetition_penalties["talker"])),
            )
            waveform = sound.flatten().cpu().numpy()
        except NothingToSpeakError:
            pass
        finally:
            talker.code_predictor.generate = self._predict
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
