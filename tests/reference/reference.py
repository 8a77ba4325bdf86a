"""The reference implementation of Qwen2.5-Omni (`stages.qwen2_5_omni.reference`), and what its parts pass
on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stages.qwen2_5_omni.reference import Qwen25OmniReference
from tests.reference.case_reference import CaseReference, min_top2_gap
from tests.reference.cases import NOISE_SEED, Case


@dataclass(frozen=True)
class ReferenceResult:
    """P: prompt tokens; N: sampled text tokens; E: thinker's hidden size; T: codes."""

    prompt_ids: tuple[int, ...]  # P
    text_ids: tuple[int, ...]  # N, the stop token included
    talker_prompt_ids: tuple[int, ...]  # P + 2, what the repetition penalty sees; empty if N = 1
    rows: torch.Tensor
    """[P + N + 2, E], text part of the talker's inputs: prompt, voice, tokens 0..N-2, text end, text pad. [0,
    E] if N = 1."""
    positions: torch.Tensor  # [3, P + 2] int64, M-RoPE positions of the talker's prompt
    delta: int
    """Added to the number of cached tokens it gives the positions of what follows."""
    codes: tuple[int, ...]  # T, the stop code excluded
    stop_code: int | None
    """None after `talker_max_tokens` codes, and where the talker did not run."""
    mel: torch.Tensor  # [80, 2 T]
    waveform: npt.NDArray[np.float32]  # [480 T]
    min_top2_gap_thinker: float
    """Smallest distance of the best from the second best processed logit over all steps."""
    min_top2_gap_talker: float


@dataclass
class _Trace:
    """What the wrapped methods saw during one call of `generate`."""

    text_ids: tuple[int, ...] = ()
    gap_thinker: float = float("inf")
    talker_prompt_ids: tuple[int, ...] = ()
    rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    delta: int = 0
    codes: tuple[int, ...] = ()
    stop_code: int | None = None
    gap_talker: float = float("inf")
    mel: torch.Tensor | None = None


class Reference(CaseReference[ReferenceResult], Qwen25OmniReference):
    noise_seed = NOISE_SEED

    def repair(self) -> None:
        model, dit = self.model, self.model.token2wav.code2wav_dit_model
        write, generate, sample = model.thinker.generate, model.talker.generate, dit.sample

        def traced_text(**kwargs: Any) -> Any:
            result = write(**kwargs, output_scores=True)
            self._trace.text_ids = tuple(result.sequences[0, kwargs["input_ids"].shape[1] :].tolist())
            self._trace.gap_thinker = min_top2_gap(result.scores)
            return result

        def traced_codes(**kwargs: Any) -> Any:
            trace, prompt = self._trace, kwargs["input_ids"]
            # forward() adds the codec part to the prompt in place
            trace.rows = torch.cat([kwargs["inputs_embeds"][0].clone(), kwargs["thinker_reply_part"][0]])
            trace.talker_prompt_ids = tuple(prompt[0].tolist())
            result = generate(**kwargs, output_scores=True, return_dict_in_generate=True)
            codes = result.sequences[0, prompt.shape[1] :].tolist()
            trace.codes, trace.stop_code = until_stop(codes, self.codec_stop_ids)
            trace.gap_talker = min_top2_gap(result.scores)
            return result.sequences

        def traced_mel(*args: Any, **kwargs: Any) -> Any:
            mel = sample(*args, **kwargs)
            self._trace.mel = mel[0]
            return mel

        model.thinker.generate, model.talker.generate, dit.sample = traced_text, traced_codes, traced_mel
        super().repair()
        get_rope_index = model.talker.get_rope_index

        def traced_positions(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            positions, delta = get_rope_index(*args)
            self._trace.positions, self._trace.delta = positions[:, 0].long(), int(delta.flatten()[0])
            return positions, delta

        model.talker.get_rope_index = traced_positions

    def generated(self, case: Case, text: dict[str, object]) -> ReferenceResult:
        self._trace = trace = _Trace()
        inputs = self.prompt(case.messages)
        talker: dict[str, object] = {
            "max_new_tokens": case.talker_max_tokens,
            "eos_token_id": list(self.codec_stop_ids),
            "do_sample": False,
        }
        waveform = self.generate(inputs, case.messages, case.voice, text, talker)
        hidden = self.model.config.thinker_config.text_config.hidden_size
        return ReferenceResult(
            prompt_ids=tuple(inputs["input_ids"][0].tolist()),
            text_ids=trace.text_ids,
            talker_prompt_ids=trace.talker_prompt_ids,
            rows=torch.empty(0, hidden) if trace.rows is None else trace.rows,
            positions=torch.empty(3, 0, dtype=torch.long) if trace.positions is None else trace.positions,
            delta=trace.delta,
            codes=trace.codes,
            stop_code=trace.stop_code,
            mel=torch.empty(80, 0) if trace.mel is None else trace.mel,
            waveform=waveform,
            min_top2_gap_thinker=trace.gap_thinker,
            min_top2_gap_talker=trace.gap_talker,
        )


def until_stop(codes: list[int], stop_ids: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
    """The codes before the first stop code, and that code."""
    for i, code in enumerate(codes):
        if code in stop_ids:
            return tuple(codes[:i]), code
    return tuple(codes), None
