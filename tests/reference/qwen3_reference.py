"""The reference implementation of Qwen3-Omni: transformers, float32, greedy, with its known defects repaired
(`stages.qwen3_omni.reference_repairs`)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoProcessor, BatchFeature, Qwen3OmniMoeForConditionalGeneration

from omni_server.types import ChatMessage
from stages.forced_reference import hears_videos, processed
from stages.qwen3_omni.reference_repairs import NothingToSpeakError, repair, repair_audio, repair_processor
from tests.reference.shared_answers import SharedAnswers


@dataclass(frozen=True)
class Qwen3Result:
    """P: prompt tokens; U: those in user turns; N: sampled text tokens; T: frames; H: the talker's width."""

    prompt_ids: tuple[int, ...]  # P
    text_ids: tuple[int, ...]  # N, the stop token included
    talker_prompt: torch.Tensor  # [U + 9, H], codec part included; [0, H] if there is no text
    talker_positions: torch.Tensor  # [3, U + 9] float32, M-RoPE positions of the talker's prompt
    reply_rows: torch.Tensor
    """[N - 1, H], text part of the generated positions, text end included; [N, H] if the text reached its
    limit: then its last token is spoken, too."""
    frames: tuple[tuple[int, ...], ...]  # T frames of 16 codes, the end code excluded
    has_ended: bool
    """Whether the end code follows the frames."""
    waveform: npt.NDArray[np.float32]  # [1920 T - 555]
    min_top2_gap: float
    """Smallest distance of the best from the second best processed logit, over all steps of thinker, talker
    and code predictor."""

    @property
    def codes(self) -> tuple[int, ...]:
        """[16 T], in the order of the frames."""
        return tuple(code for frame in self.frames for code in frame)


@dataclass
class _Trace:
    """What the wrapped methods saw during one call of `generate`."""

    text_ids: tuple[int, ...] = ()
    talker_prompt: torch.Tensor | None = None
    talker_positions: torch.Tensor | None = None
    reply_rows: torch.Tensor | None = None
    first_codes: tuple[int, ...] = ()
    frames: list[tuple[int, ...]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Qwen3Reference:
    """One loaded checkpoint. Sets torch to one thread: these models are too small for more."""

    def __init__(self, model_dir: Path, answer_folder: Path | None = None) -> None:
        """`answer_folder`: see `SharedAnswers`."""
        torch.set_num_threads(1)
        self.answers = SharedAnswers(model_dir, answer_folder)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.processor = AutoProcessor.from_pretrained(model_dir)
        repair_processor(self.processor)
        self.model = model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            model_dir, dtype=torch.float32
        ).eval()
        self._trace = _Trace()
        self._thinker_generate = model.thinker.generate
        self._talker_generate = model.talker.generate
        self._predict = model.talker.code_predictor.generate
        model.thinker.generate = self._traced_thinker
        model.talker.generate = self._traced_talker
        model.talker.code_predictor.generate = self._traced_predictor
        model.talker.model.register_forward_pre_hook(self._trace_positions, with_kwargs=True)
        repair_audio(model.thinker)
        repair(model)

    def prompt(self, messages: tuple[ChatMessage, ...]) -> BatchFeature:
        return processed(self.processor, messages)

    def run(
        self,
        messages: tuple[ChatMessage, ...],
        voice: str = "Ethan",
        thinker_max_tokens: int = 1024,
        talker_max_tokens: int = 4096,
        thinker_stop_ids: tuple[int, ...] | None = None,
        ignore_eos: bool = False,
    ) -> Qwen3Result:
        """Greedy, with the reference's own repetition penalty of 1.05 in the talker. At most
        `talker_max_tokens` frames.

        `thinker_stop_ids` end the text in addition to the model's end token, which `ignore_eos` makes an
        ordinary one.
        """
        config = self.model.config
        inputs = self.prompt(messages)
        stop_ids = list(thinker_stop_ids or ())
        if not ignore_eos:
            stop_ids.append(config.im_end_token_id)
        self._trace = trace = _Trace()
        waveform = np.zeros(0, dtype=np.float32)
        try:
            _, sound = self.model.generate(
                **inputs,
                speaker=voice,
                use_audio_in_video=hears_videos(messages),
                thinker_max_new_tokens=thinker_max_tokens,
                thinker_eos_token_id=stop_ids or [-1],  # an empty list is refused; -1 is no token
                thinker_do_sample=False,
                talker_max_new_tokens=talker_max_tokens
                + 1,  # the last frame is completed in the step after it
                talker_do_sample=False,
            )
            waveform = sound.flatten().numpy()
        except NothingToSpeakError:
            pass
        hidden = config.talker_config.text_config.hidden_size
        return Qwen3Result(
            prompt_ids=tuple(inputs["input_ids"][0].tolist()),
            text_ids=trace.text_ids,
            talker_prompt=torch.empty(0, hidden) if trace.talker_prompt is None else trace.talker_prompt,
            talker_positions=(
                torch.empty(3, 0) if trace.talker_positions is None else trace.talker_positions
            ),
            reply_rows=torch.empty(0, hidden) if trace.reply_rows is None else trace.reply_rows,
            frames=tuple(trace.frames),
            has_ended=len(trace.first_codes) <= talker_max_tokens and bool(trace.first_codes),
            waveform=waveform,
            min_top2_gap=min(trace.gaps),
        )

    def _traced_thinker(self, **kwargs: Any) -> Any:
        result = self._thinker_generate(**kwargs, output_scores=True)
        self._trace.text_ids = tuple(result.sequences[0, kwargs["input_ids"].shape[1] :].tolist())
        self._trace.gaps.append(_min_top2_gap(result.scores))
        return result

    def _traced_talker(self, **kwargs: Any) -> Any:
        trace = self._trace
        trace.talker_prompt = kwargs["inputs_embeds"][0].clone()
        trace.reply_rows = kwargs["trailing_text_hidden"][0].clone()
        result = self._talker_generate(**kwargs, output_scores=True)
        trace.first_codes = tuple(result.sequences[0].tolist())
        # Each step returns the whole frame of the step before it.
        trace.frames = [tuple(codes[0].tolist()) for _, codes in result.hidden_states if codes is not None]
        # The code behind the last frame is of no consequence, unless it ends the speech.
        compared = result.scores if len(result.scores) < kwargs["max_new_tokens"] else result.scores[:-1]
        trace.gaps.append(_min_top2_gap(compared))
        return result

    def _traced_predictor(self, **kwargs: Any) -> Any:
        result = self._predict(**kwargs, output_scores=True)
        self._trace.gaps.append(_min_top2_gap(result.scores))
        return result

    def _trace_positions(self, _module: Any, args: Any, kwargs: Any) -> None:
        trace = self._trace
        if trace.talker_positions is None:
            # [4, 1, length]: the first axis is for text, and equals the number of cached tokens
            trace.talker_positions = kwargs["position_ids"][-3:, 0].float()


def _min_top2_gap(scores: tuple[torch.Tensor, ...]) -> float:
    return min(float(-cast(torch.Tensor, score[0].topk(2).values).diff()) for score in scores)
