"""The reference implementation of Qwen3-Omni (`stages.qwen3_omni.reference`), and what its parts pass on."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stages.qwen3_omni.reference import Qwen3OmniReference
from tests.reference.case_reference import CaseReference, min_top2_gap
from tests.reference.cases import Case


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


class Qwen3Reference(CaseReference[Qwen3Result], Qwen3OmniReference):
    def repair(self) -> None:
        model = self.model
        write, generate = model.thinker.generate, model.talker.generate
        predict = model.talker.code_predictor.generate

        def traced_text(**kwargs: Any) -> Any:
            result = write(**kwargs, output_scores=True)
            self._trace.text_ids = tuple(result.sequences[0, kwargs["input_ids"].shape[1] :].tolist())
            self._trace.gaps.append(min_top2_gap(result.scores))
            return result

        def traced_codes(**kwargs: Any) -> Any:
            trace = self._trace
            trace.talker_prompt = kwargs["inputs_embeds"][0].clone()
            trace.reply_rows = kwargs["trailing_text_hidden"][0].clone()
            result = generate(**kwargs, output_scores=True)
            trace.first_codes = tuple(result.sequences[0].tolist())
            # Each step returns the whole frame of the step before it.
            trace.frames = [
                tuple(codes[0].tolist()) for _, codes in result.hidden_states if codes is not None
            ]
            # The code behind the last frame is of no consequence, unless it ends the speech.
            compared = result.scores if len(result.scores) < kwargs["max_new_tokens"] else result.scores[:-1]
            trace.gaps.append(min_top2_gap(compared))
            return result

        def traced_frame(**kwargs: Any) -> Any:
            result = predict(**kwargs, output_scores=True)
            self._trace.gaps.append(min_top2_gap(result.scores))
            return result

        def trace_positions(_module: Any, args: Any, kwargs: Any) -> None:
            if self._trace.talker_positions is None:
                # [4, 1, length]: the first axis is for text, and equals the number of cached tokens
                self._trace.talker_positions = kwargs["position_ids"][-3:, 0].float()

        model.thinker.generate, model.talker.generate = traced_text, traced_codes
        model.talker.code_predictor.generate = traced_frame
        model.talker.model.register_forward_pre_hook(trace_positions, with_kwargs=True)
        super().repair()

    def generated(self, case: Case, text: dict[str, object]) -> Qwen3Result:
        """At most `talker_max_tokens` frames."""
        self._trace = trace = _Trace()
        inputs = self.prompt(case.messages)
        # The last frame is completed in the step after it.
        talker: dict[str, object] = {"max_new_tokens": case.talker_max_tokens + 1, "do_sample": False}
        waveform = self.generate(inputs, case.messages, case.voice, text, talker)
        hidden = self.model.config.talker_config.text_config.hidden_size
        return Qwen3Result(
            prompt_ids=tuple(inputs["input_ids"][0].tolist()),
            text_ids=trace.text_ids,
            talker_prompt=torch.empty(0, hidden) if trace.talker_prompt is None else trace.talker_prompt,
            talker_positions=(
                torch.empty(3, 0) if trace.talker_positions is None else trace.talker_positions
            ),
            reply_rows=torch.empty(0, hidden) if trace.reply_rows is None else trace.reply_rows,
            frames=tuple(trace.frames),
            has_ended=len(trace.first_codes) <= case.talker_max_tokens and bool(trace.first_codes),
            waveform=waveform,
            min_top2_gap=min(trace.gaps),
        )
