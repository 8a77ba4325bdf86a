"""The reference implementation of Qwen2.5-Omni: transformers, float32, greedy, with its known defects
repaired.

Repairs (transformers 5.19):
- `generate()` drops an attention mask of ones, and without one the talker neither adds the codec pad and start
  embeddings to the end of its prompt nor computes M-RoPE positions. A padded batch does both; so does this.
- `talker.generate` is handed `pixel_values` and `pixel_values_videos` and refuses them.
- Behind its prompt, the talker continues from the greatest position of all; the thinker, and text in any
  prompt, from the last. They differ behind a heard video of more columns than positions in time.
- A reply of one token (nothing is left to speak) or of no codes fails on an empty tensor; here it is silence.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from torch.overrides import TorchFunctionMode
from transformers import AutoProcessor, BatchFeature, Qwen2_5OmniForConditionalGeneration

from omni_server.types import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from tests.reference.shared_answers import SharedAnswers

Noise = Callable[[int], torch.Tensor]
"""Number of mel frames -> initial noise of the flow, float32 [frames, 80]."""


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


class _NothingToSpeakError(Exception):
    """Leaves `generate` where transformers would fail on an empty tensor."""


class _InjectedNoise(TorchFunctionMode):
    """Answers `torch.randn` of [1, frames, 80] with the given noise, within a `with` statement and this
    thread only."""

    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            _, frames, _ = args[0]
            return self._noise(frames)[None]
        return func(*args, **(kwargs or {}))


class Reference:
    """One loaded checkpoint. Sets torch to one thread: these models are too small for more."""

    def __init__(self, model_dir: Path, answer_folder: Path | None = None) -> None:
        """`answer_folder`: see `SharedAnswers`."""
        torch.set_num_threads(1)
        self.answers = SharedAnswers(model_dir, answer_folder)
        transformers.logging.set_verbosity_error()
        self.processor = AutoProcessor.from_pretrained(model_dir)
        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            model_dir, dtype=torch.float32
        ).eval()
        talker = self.model.talker
        self.codec_stop_ids = (talker.codec_pad_token, talker.codec_eos_token)
        self._restore_mask = True
        self._trace = _Trace()
        self._noise: Noise | None = None
        talker.register_forward_pre_hook(self._with_attention_mask, with_kwargs=True)
        self._thinker_generate = self.model.thinker.generate
        self._talker_generate = talker.generate
        self._get_rope_index = talker.get_rope_index
        self._sample_mel = self.model.token2wav.code2wav_dit_model.sample
        self.model.thinker.generate = self._traced_thinker_generate
        talker.generate = self._traced_talker_generate
        talker.get_rope_index = self._traced_get_rope_index
        self.model.token2wav.code2wav_dit_model.sample = self._traced_sample_mel

    def prompt(self, messages: tuple[ChatMessage, ...]) -> BatchFeature:
        """Chat template and processor, as the model's documentation has it.

        A video's frames are passed as they are, with `do_sample_frames=False` and their `fps`: transformers
        then takes every frame and derives seconds per grid (2 / fps) from the given rate.
        """
        return self._processed([messages])

    def run(
        self,
        messages: tuple[ChatMessage, ...],
        voice: str = "Chelsie",
        thinker_max_tokens: int = 1024,
        talker_max_tokens: int = 4096,
        thinker_stop_ids: tuple[int, ...] | None = None,
        ignore_eos: bool = False,
        noise: Noise | None = None,
    ) -> ReferenceResult:
        """Greedy, with the reference's own repetition penalty of 1.05 in the talker.

        `thinker_stop_ids` end the text in addition to the model's end token, which `ignore_eos` makes an
        ordinary one. Without `noise` the flow starts from torch's global generator.
        """
        inputs = self.prompt(messages)
        prompt_ids = tuple(inputs["input_ids"][0].tolist())
        stop_ids = list(thinker_stop_ids or ())
        if not ignore_eos:
            stop_ids.append(self.model.thinker.generation_config.eos_token_id)
        self._trace, self._noise = _Trace(), noise
        waveform = np.zeros(0, dtype=np.float32)
        try:
            _, wave = self.model.generate(
                **inputs,
                speaker=voice,
                use_audio_in_video=_hears_videos(messages),
                thinker_max_new_tokens=thinker_max_tokens,
                thinker_eos_token_id=stop_ids or [-1],  # an empty list is refused; -1 is no token
                thinker_do_sample=False,
                talker_max_new_tokens=talker_max_tokens,
                talker_do_sample=False,
                talker_eos_token_id=list(self.codec_stop_ids),
            )
            waveform = wave.numpy()
        except _NothingToSpeakError:
            pass
        trace, hidden = self._trace, self.model.config.thinker_config.text_config.hidden_size
        return ReferenceResult(
            prompt_ids=prompt_ids,
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

    def batch_codes(
        self,
        conversations: list[tuple[ChatMessage, ...]],
        thinker_max_tokens: int,
        talker_max_tokens: int,
    ) -> list[tuple[int, ...]]:
        """Codes of several text conversations in one padded batch, without the repair of the mask: padding
        keeps it."""
        inputs = self._processed(conversations)
        if bool(inputs["attention_mask"].all()):
            raise ValueError("prompts of one length are not padded")
        codes: list[tuple[int, ...]] = []

        def generate(*args: Any, **kwargs: Any) -> torch.Tensor:
            sequences: torch.Tensor = self._talker_generate(*args, **kwargs)
            codes.extend(
                self._until_stop(row)[0] for row in sequences[:, kwargs["input_ids"].shape[1] :].tolist()
            )
            return sequences

        with self.unrepaired():
            self.model.talker.generate, self.model.thinker.generate = generate, self._thinker_generate
            try:
                self.model.generate(
                    **inputs,
                    thinker_max_new_tokens=thinker_max_tokens,
                    thinker_do_sample=False,
                    talker_max_new_tokens=talker_max_tokens,
                    talker_do_sample=False,
                    talker_eos_token_id=list(self.codec_stop_ids),
                )
            finally:
                self.model.talker.generate = self._traced_talker_generate
                self.model.thinker.generate = self._traced_thinker_generate
        return codes

    @contextmanager
    def unrepaired(self) -> Iterator[None]:
        """Within it the attention mask is lost, as transformers does by itself."""
        self._restore_mask = False
        try:
            yield
        finally:
            self._restore_mask = True

    def _processed(self, conversations: list[tuple[ChatMessage, ...]]) -> BatchFeature:
        prompts = [
            self.processor.apply_chat_template(
                [{"role": m.role, "content": [_template_item(part) for part in m.content]} for m in messages],
                add_generation_prompt=True,
                tokenize=False,
            )
            for messages in conversations
        ]
        parts = [part for messages in conversations for message in messages for part in message.content]
        media: dict[str, Any] = {}
        heard = [part.audio if isinstance(part, VideoPart) else part for part in parts]
        if sounds := [part for part in heard if isinstance(part, AudioPart)]:
            if any(sound.sample_rate_hz != 16_000 for sound in sounds):
                raise ValueError("the reference takes sounds at 16 kHz")
            media["audio"] = [sound.samples for sound in sounds]
        if pictures := [part for part in parts if isinstance(part, ImagePart)]:
            media["images"] = [Image.fromarray(picture.pixels) for picture in pictures]
        if videos := [part for part in parts if isinstance(part, VideoPart)]:
            if len({video.fps for video in videos}) != 1:
                raise ValueError("transformers takes one frame rate for all videos of a call")
            media["videos"] = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos]
            media["videos_kwargs"] = {
                "fps": videos[0].fps,
                "do_sample_frames": False,
                "use_audio_in_video": any(map(_hears_videos, conversations)),
            }
        return cast(
            BatchFeature, self.processor(text=prompts, return_tensors="pt", padding=len(prompts) > 1, **media)
        )

    def _with_attention_mask(self, _module: Any, args: Any, kwargs: Any) -> Any:
        if self._restore_mask and kwargs.get("attention_mask") is None:
            embeddings, cache = kwargs.get("inputs_embeds"), kwargs.get("past_key_values")
            given = kwargs["input_ids"] if embeddings is None else embeddings
            cached = 0 if cache is None else cache.get_seq_length()
            kwargs["attention_mask"] = torch.ones(given.shape[0], cached + given.shape[1], dtype=torch.long)
        return args, kwargs

    def _traced_thinker_generate(self, **kwargs: Any) -> Any:
        result = self._thinker_generate(**kwargs, output_scores=True)
        self._trace.text_ids = tuple(result.sequences[0, kwargs["input_ids"].shape[1] :].tolist())
        self._trace.gap_thinker = _min_top2_gap(result.scores)
        if len(self._trace.text_ids) == 1:
            raise _NothingToSpeakError
        return result

    def _traced_talker_generate(
        self, *, pixel_values: Any = None, pixel_values_videos: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        del pixel_values, pixel_values_videos
        trace, prompt = self._trace, kwargs["input_ids"]
        # forward() adds the codec part to the prompt in place
        trace.rows = torch.cat([kwargs["inputs_embeds"][0].clone(), kwargs["thinker_reply_part"][0]])
        trace.talker_prompt_ids = tuple(prompt[0].tolist())
        result = self._talker_generate(**kwargs, output_scores=True, return_dict_in_generate=True)
        trace.codes, trace.stop_code = self._until_stop(result.sequences[0, prompt.shape[1] :].tolist())
        trace.gap_talker = _min_top2_gap(result.scores)
        if not trace.codes:
            raise _NothingToSpeakError
        return cast(torch.Tensor, result.sequences)

    def _traced_get_rope_index(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        positions, _ = self._get_rope_index(*args, **kwargs)
        attention_mask = args[3]
        delta = positions[0, :, -1:] + 1 - attention_mask.sum(-1, keepdim=True)
        self._trace.positions, self._trace.delta = positions[:, 0].long(), int(delta.flatten()[0])
        return positions, delta

    def _traced_sample_mel(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._noise is None:
            mel = self._sample_mel(*args, **kwargs)
        else:
            with _InjectedNoise(self._noise):
                mel = self._sample_mel(*args, **kwargs)
        self._trace.mel = mel[0]
        return cast(torch.Tensor, mel)

    def _until_stop(self, codes: list[int]) -> tuple[tuple[int, ...], int | None]:
        for i, code in enumerate(codes):
            if code in self.codec_stop_ids:
                return tuple(codes[:i]), code
        return tuple(codes), None


def _hears_videos(messages: tuple[ChatMessage, ...]) -> bool:
    """transformers hears all videos of a call or none."""
    videos = [part for message in messages for part in message.content if isinstance(part, VideoPart)]
    if len({video.audio is None for video in videos}) > 1:
        raise ValueError("some videos have an audio track and others have none")
    return any(video.audio is not None for video in videos)


def _template_item(part: TextPart | AudioPart | ImagePart | VideoPart) -> dict[str, str]:
    """What the chat template looks at; the media themselves go to the processor."""
    match part:
        case TextPart(text):
            return {"type": "text", "text": text}
        case AudioPart():
            return {"type": "audio"}
        case ImagePart():
            return {"type": "image"}
        case VideoPart():
            return {"type": "video"}


def _min_top2_gap(scores: tuple[torch.Tensor, ...]) -> float:
    return min(float(-score[0].topk(2).values.diff()) for score in scores)
