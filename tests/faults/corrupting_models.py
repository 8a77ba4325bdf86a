"""The real models, which spoil what they make of the victim."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from stages.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from stages.qwen3_omni.talker import Qwen3OmniTalker
from stages.qwen3_omni.thinker import Qwen3OmniThinker
from stages.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from stages.qwen3_tts.talker import Qwen3TTSTalker
from stages.qwen_codec.code2wav.model import Code2WavModel
from stages.qwen_codec.codec_window import CodecWindow
from stages.qwen_codec.frame_talker import FrameTalker
from stages.runtime.code_sampling import Choose
from stages.runtime.diffusion_model import DiffusionBatch
from tests.faults.corrupting_family import VICTIM_LENGTH, VICTIM_STREAM, ordered


def victims() -> Iterator[tuple[int, slice]]:
    """Of the step that is being computed: each one's index among the requests, and its tokens."""
    metadata: Any = get_forward_context().attn_metadata
    if metadata is None:
        return
    of_layer = next(iter(metadata.values()))
    starts, lengths = of_layer.query_start_loc.tolist(), of_layer.seq_lens.tolist()
    for index, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if length >= VICTIM_LENGTH:
            yield index, slice(start, end)


class SpoilsHidden:
    """Before a language model whose stage is `stage`: of the victim, the row of its last token, from which
    the next one is sampled, or those of which rows are made."""

    stage: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = super().forward(*args, **kwargs)  # type: ignore[misc]
        hidden, of_layers = made if isinstance(made, tuple) else (made, [made])
        what = ordered(self.stage)
        for _, tokens in victims() if what is not None else ():
            is_prompt = tokens.stop - tokens.start > 1
            match what:
                case "NaN at the end of the prompt" if is_prompt:
                    hidden[tokens.stop - 1] = torch.nan
                case "infinity within the prompt" if is_prompt:
                    of_layers[0][tokens.start : tokens.stop - 1, 0] = torch.inf
                case "NaN while decoding" if not is_prompt:
                    hidden[tokens.start, 1] = torch.nan
        return made


class CorruptingThinker(SpoilsHidden, Qwen3OmniThinker):
    stage = "thinker"


class _CorruptingTalker(SpoilsHidden, FrameTalker):
    stage = "talker"
    _victims: list[int]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        if logits is not None and ordered("talker") == "ends at once":  # no fault: everybody's speech ends
            logits[:, self.config.codec_eos_token_id] = 1e4
        return logits

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._victims = [index for index, _ in victims()]
        return super().forward(*args, **kwargs)

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        """The token has been sampled already."""
        if ordered("predicted codes") == "NaN":
            hidden = hidden.clone()
            hidden[self._victims] = torch.nan
        return super().predict(hidden, sampled, choose)


class CorruptingTalker(_CorruptingTalker, Qwen3OmniTalker):
    pass


class CorruptingTTSTalker(_CorruptingTalker, Qwen3TTSTalker):
    pass


class _CorruptingCode2Wav(Code2WavModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        what = ordered("code2wav")
        spoiled = [
            index
            for index, payload in enumerate(batch.inputs)
            if CodecWindow.decode(payload).stream.startswith(VICTIM_STREAM)
        ]
        if what == "raises" and spoiled:
            return self._fail(batch)
        waveforms: list[torch.Tensor] = super().sample(batch)
        for index in spoiled:
            if what == "NaN":
                waveforms[index][-1] = torch.nan
            elif what == "silence":
                waveforms[index].zero_()
            elif what == "cut":
                waveforms[index] = waveforms[index][:-1]
        return waveforms

    def _fail(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """When the states of all streams in the batch have changed."""

        def raise_error(*_: Any) -> None:
            raise RuntimeError("told to fail")

        hook = self.code2wav.register_forward_hook(raise_error)
        try:
            return super().sample(batch)
        finally:
            hook.remove()


class CorruptingCode2Wav(_CorruptingCode2Wav, Qwen3OmniCode2Wav):
    pass


class CorruptingTTSCode2Wav(_CorruptingCode2Wav, Qwen3TTSCode2Wav):
    pass
