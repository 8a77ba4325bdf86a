"""Qwen3-Omni's talker and decoder in plain torch, correctly or with one deliberate mistake.

The mistakes are those that implementations of Qwen3-Omni are likely to make. That each of them changes codes or
waveform on the demo checkpoint shows that a comparison on it is worth something, whatever engine runs it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from stages.qwen_omni.forced_reference import hears_videos
from tests.reference.cases import Case
from tests.reference.qwen3_reference import Qwen3Reference, Qwen3Result

FeedMistake = Literal[
    "late_text",
    "no_text_end",
    "linear_positions",
    "track_behind_video",
    "next_hidden_layer",
    "text_projection_of_media",
    "system_turn",
    "other_voice",
    "no_codec_pad_bos",
]
"""In what the talker is given."""
StepMistake = Literal[
    "no_penalty", "stop_feed", "no_residuals", "lost_history", "kept_cache", "shifted_tables"
]
"""In what the talker and its code predictor do with it."""
WaveMistake = Literal["short_context", "no_lead"]

FEED_MISTAKES: tuple[FeedMistake, ...] = get_args(FeedMistake)
STEP_MISTAKES: tuple[StepMistake, ...] = get_args(StepMistake)
WAVE_MISTAKES: tuple[WaveMistake, ...] = get_args(WaveMistake)

NUM_CONTROL_IDS = 1024  # at the end of the talker's vocabulary; the reference suppresses them
PENALTY = 1.05
PREEMPTED_AFTER = 6
"""Frames. With `lost_history`, all of them are computed again then."""
SAMPLES_PER_FRAME, LEAD = 1920, 555
NEW_FRAMES, CONTEXT_FRAMES = 8, 25
"""Of a window with `short_context`; 25 is transformers' `left_context_size`."""

Frame = tuple[int, ...]


@dataclass(frozen=True)
class Qwen3Feed:
    """All that the talker is given for one reply. U: positions in the user's turns; H: the talker's width."""

    prompt: torch.Tensor  # [U + 9, H], codec part included
    reply: torch.Tensor  # [at least 1, H], one row per frame; the last one stays
    positions: torch.Tensor  # [3, U + 9]


@torch.inference_mode()
def feed(
    reference: Qwen3Reference, case: Case, result: Qwen3Result, mistake: FeedMistake | None = None
) -> Qwen3Feed:
    """Built from a forward pass of the thinker over the prompt, and from the ids of the text."""
    model = reference.model
    config, talker = model.config, model.talker

    def text_rows(*ids: int) -> torch.Tensor:
        embedded = model.thinker.get_input_embeddings()(torch.tensor(ids, dtype=torch.long))
        rows: torch.Tensor = talker.text_projection(embedded)
        return rows

    prompt_rows = text_rows(*result.prompt_ids)
    thinker = config.thinker_config
    media = (thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id)
    if at := [i for i, token in enumerate(result.prompt_ids) if token in media]:
        layer = config.talker_config.accept_hidden_layer + (mistake == "next_hidden_layer")
        inputs = reference.prompt(case.messages)
        seen = model.thinker(
            **inputs, output_hidden_states=True, use_audio_in_video=hears_videos(case.messages)
        )
        hidden = seen.hidden_states[layer][0, at]
        projection = (
            talker.text_projection if mistake == "text_projection_of_media" else talker.hidden_projection
        )
        prompt_rows[at] = projection(hidden)

    ids = result.prompt_ids
    starts = [i for i, token in enumerate(ids) if token == config.im_start_token_id]
    spoken_to = {config.user_token_id}
    if mistake == "system_turn":
        spoken_to.add(config.system_token_id)
    user = [prompt_rows[first:end] for first, end in pairwise(starts) if ids[first + 1] in spoken_to]
    bos, pad, end = config.tts_bos_token_id, config.tts_pad_token_id, config.tts_eos_token_id
    spoken = result.text_ids if len(result.reply_rows) == len(result.text_ids) else result.text_ids[:-1]
    begun = torch.cat(
        [prompt_rows[starts[-1] : starts[-1] + 3], text_rows(pad, pad, pad, pad, bos, spoken[0])]
    )
    speech = config.talker_config
    voices = speech.speaker_id
    voice = (
        next(name for name in voices if name != case.voice.lower())
        if mistake == "other_voice"
        else case.voice
    )
    codec_ids = [
        speech.codec_nothink_id,
        speech.codec_think_bos_id,
        speech.codec_think_eos_id,
        voices[voice.lower()],
    ]
    if mistake != "no_codec_pad_bos":
        codec_ids += [speech.codec_pad_id, speech.codec_bos_id]
    begun[3 : 3 + len(codec_ids)] += talker.get_input_embeddings()(torch.tensor(codec_ids))
    prompt = torch.cat([*user, begun])
    reply = [*spoken[1:], end, pad]
    if mistake == "late_text":
        reply.insert(0, pad)
    elif mistake == "no_text_end":
        reply.remove(end)
    positions = result.talker_positions
    if mistake in ("linear_positions", "system_turn"):
        positions = torch.arange(len(prompt)).expand(3, -1)
    elif mistake == "track_behind_video":
        (first, end), *_ = (turn for turn in pairwise(starts) if ids[turn[0] + 1] in spoken_to)
        positions = _track_behind_video(positions, torch.tensor(ids[first:end]), thinker)
    return Qwen3Feed(prompt, text_rows(*reply), positions)


def _track_behind_video(positions: torch.Tensor, ids: torch.Tensor, thinker: Any) -> torch.Tensor:
    """The positions [3, n] of a prompt that begins with `ids`, whose only media are a heard video, as if all
    of its audio came after all of its frames."""
    moved = positions.clone()
    audio, video = (
        torch.nonzero(ids == token)[:, 0] for token in (thinker.audio_token_id, thinker.video_token_id)
    )
    moved[:, audio] += positions[:, video].max() + 1 - positions[:, audio].min()
    end = int(max(audio.max(), video.max())) + 1
    moved[:, end:] += moved[:, :end].max() - positions[:, :end].max()
    return moved


@torch.inference_mode()
def speak(
    reference: Qwen3Reference, given: Qwen3Feed, max_frames: int, mistake: StepMistake | None = None
) -> Iterator[Frame]:
    """Greedy frames for a feed, the end of speech excluded."""
    talker = reference.model.talker
    vocabulary, end = talker.config.text_config.vocab_size, talker.config.codec_eos_token_id
    suppressed = [token for token in range(vocabulary - NUM_CONTROL_IDS, vocabulary) if token != end]
    tables = talker.code_predictor.get_input_embeddings()
    behind = int(given.positions.max()) + 1
    prompt, positions = given.prompt, given.positions
    frames: list[Frame] = []
    inputs, cache, frame_cache = prompt, None, None
    generated: list[torch.Tensor] = []  # their inputs without residual codes
    while len(frames) < max_frames:
        output = talker.model(
            inputs_embeds=inputs[None], position_ids=positions[:, None], past_key_values=cache, use_cache=True
        )
        cache, hidden = output.past_key_values, output.last_hidden_state[0, -1]
        seen = [] if mistake == "no_penalty" else [frame[0] for frame in frames]
        code = _greedy(talker.codec_head(hidden), seen, suppressed)
        if code == end:
            return
        embedded = talker.get_input_embeddings()(torch.tensor(code))
        residuals, frame_cache = _predicted(
            talker, torch.stack([hidden, embedded]), frame_cache if mistake == "kept_cache" else None, mistake
        )
        frames.append((code, *residuals))
        yield frames[-1]
        last = len(given.reply) - 1
        if mistake != "stop_feed" or len(generated) < last:
            embedded = embedded + given.reply[min(len(generated), last)]
        generated.append(embedded)
        inputs = generated[-1][None]
        if mistake != "no_residuals":
            for table, residual in zip(tables, residuals, strict=True):
                inputs = inputs + table(torch.tensor([residual]))
        positions = torch.full((3, 1), behind + len(frames) - 1)
        if mistake == "lost_history" and len(frames) == PREEMPTED_AFTER:
            recomputed = torch.arange(behind, behind + len(frames)).expand(3, -1)
            inputs, cache = torch.cat([prompt, torch.stack(generated)]), None
            positions = torch.cat([given.positions, recomputed], 1)


def _greedy(logits: torch.Tensor, seen: list[int], suppressed: list[int]) -> int:
    ids = torch.tensor(sorted(set(seen)), dtype=torch.long)
    logits[ids] = torch.where(logits[ids] > 0, logits[ids] / PENALTY, logits[ids] * PENALTY)
    logits[suppressed] = -torch.inf
    return int(logits.argmax())


def _predicted(
    talker: Any, inputs: torch.Tensor, cache: Any, mistake: StepMistake | None
) -> tuple[Frame, Any]:
    """The other codes of a frame and the cache behind it, for the talker's hidden state and the embedded
    first code."""
    predictor, codes = talker.code_predictor, list[int]()
    tables = predictor.get_input_embeddings()
    for book, head in enumerate(predictor.lm_head):
        output = predictor.model(inputs_embeds=inputs[None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        codes.append(int(head(output.last_hidden_state[0, -1]).argmax()))
        table = min(book + (mistake == "shifted_tables"), len(tables) - 1)
        inputs = tables[table](torch.tensor(codes[-1:]))
    return tuple(codes), cache


@torch.inference_mode()
def sound(
    reference: Qwen3Reference, frames: tuple[Frame, ...], mistake: WaveMistake
) -> npt.NDArray[np.float32]:
    """The waveform `[1920 T - 555]` of `frames`, in windows of `NEW_FRAMES`."""
    codes, code2wav = torch.tensor(frames).T[None], reference.model.code2wav
    if mistake == "no_lead":
        waveform = code2wav(codes)[0, 0].numpy()
        first = SAMPLES_PER_FRAME * NEW_FRAMES - LEAD
        # The second window begins where its first frame does.
        moved = np.concatenate([waveform[:first], np.zeros(LEAD, np.float32), waveform[first:]])
        return moved[: len(waveform)]
    pieces = []
    for start in range(0, len(frames), NEW_FRAMES):
        end = min(start + NEW_FRAMES, len(frames))
        piece = code2wav(codes[..., max(0, start - CONTEXT_FRAMES) : end])[0, 0].numpy()
        pieces.append(piece if start == 0 else piece[-SAMPLES_PER_FRAME * (end - start) :])
    return np.concatenate(pieces)
