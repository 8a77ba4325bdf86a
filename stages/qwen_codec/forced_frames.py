"""A reference's talker and code predictor, forced along the frames of this server's answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import LogitsProcessorList

from omni_server.protocol.reference import Difference, ReferenceJob
from stages.qwen_omni.forced_reference import ForcedChoice, along, one_each


class ForcedFrames:
    def __init__(self, talker: Any, job: ReferenceJob) -> None:
        self._talker, self._job = talker, job
        self._num_books = num_books = talker.config.num_code_groups
        codes = job.codes
        self._frames = [codes[start : start + num_books] for start in range(0, len(codes), num_books)]
        # Behind a last frame at the limit, the code of the additional step does not matter.
        self._ends = (talker.config.codec_eos_token_id,)
        self._sampled = ForcedChoice([*one_each([frame[0] for frame in self._frames]), self._ends])
        self._predicted = [ForcedChoice(one_each(frame[1:])) for frame in self._frames]

    @contextmanager
    def along(self) -> Iterator[dict[str, object]]:
        """Forces the code predictor, and yields arguments for the talker's `generate`, which force it."""
        predictor = self._talker.code_predictor
        predict, choices = predictor.generate, iter(self._predicted)
        predictor.generate = lambda **kwargs: predict(
            **kwargs, logits_processor=LogitsProcessorList([next(choices)])
        )
        try:
            yield along(self._sampled, self._ends, self._job.repetition_penalties["talker"])
        finally:
            predictor.generate = predict

    @property
    def differences(self) -> tuple[Difference, ...]:
        """In the order of the answer's codes."""
        is_ended = len(self._frames) < self._job.max_codes
        differences = [
            *_at(self._sampled.differences, 0, self._num_books),
            *(
                difference
                for i, choice in enumerate(self._predicted)
                for difference in _at(choice.differences, i * self._num_books + 1, 1)
            ),
        ]
        compared = (d for d in differences if is_ended or d.index < len(self._job.codes))
        return tuple(sorted(compared, key=lambda difference: difference.index))


def _at(differences: list[Difference], first: int, stride: int) -> Iterator[Difference]:
    """Differences with the indices of the answer's codes."""
    for d in differences:
        yield Difference(first + d.index * stride, d.ours, d.reference, d.margin, d.largest)
