"""The talker fed in plain torch, correctly or with one deliberate mistake.

The mistakes are those that implementations of Qwen2.5-Omni made or nearly made. That each of them changes the
codes on the demo checkpoint shows that a comparison of codes on it is worth something, whatever engine runs
it.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from stages.qwen_omni.forced_reference import hears_videos
from tests.reference.cases import Case
from tests.reference.reference import Reference, ReferenceResult

Mistake = Literal[
    "no_embedding",
    "no_hidden",
    "keep_placeholder_embeddings",
    "no_codec_pad_bos",
    "no_penalty",
    "pad_ids_in_prompt",
    "stop_feed",
    "no_eos_row",
    "linear_positions",
    "one_speaker",
]
MISTAKES: tuple[Mistake, ...] = get_args(Mistake)


@dataclass(frozen=True)
class TalkerFeed:
    """All that the talker is given for one reply. P: thinker's prompt tokens; E: thinker's hidden size."""

    prompt_ids: tuple[int, ...]  # P + 2
    prompt: torch.Tensor  # [P + 2, E], codec part included
    reply: torch.Tensor  # [at least 1, E], one row per decode step; the last one stays
    positions: torch.Tensor  # [3, P + 2]
    delta: int
    penalty: float


@torch.inference_mode()
def feed(
    reference: Reference, case: Case, result: ReferenceResult, mistake: Mistake | None = None
) -> TalkerFeed:
    """Builds the feed from a forward pass of the thinker over prompt and reply; N >= 2."""
    model = reference.model
    talker, config = model.talker, model.config.thinker_config
    prompt_length = len(result.prompt_ids)
    embeddings, hidden = _thinker_rows(reference, case, result)
    if mistake != "keep_placeholder_embeddings":
        placeholders = (config.audio_token_index, config.image_token_index, config.video_token_index)
        embeddings[[i for i, token in enumerate(result.prompt_ids) if token in placeholders]] = 0
    rows = (
        hidden if mistake == "no_embedding" else embeddings if mistake == "no_hidden" else hidden + embeddings
    )

    text_embedding = model.thinker.get_input_embeddings()
    voice = "Chelsie" if mistake == "one_speaker" else case.voice
    voice_row, end, pad = text_embedding(
        torch.tensor([model.speaker_map[voice]["bos_token"], talker.text_eos_token, talker.text_pad_token])
    )
    prompt = torch.cat([rows[:prompt_length], voice_row[None], rows[prompt_length : prompt_length + 1]])
    if mistake != "no_codec_pad_bos":
        prompt[-2:] += talker.get_input_embeddings()(
            torch.tensor([talker.codec_pad_token, talker.codec_bos_token])
        )
    tail = torch.stack([end, pad])
    if mistake == "stop_feed":
        tail = torch.zeros_like(tail)
    elif mistake == "no_eos_row":
        tail = pad[None]

    right = TalkerFeed(
        prompt_ids=(talker.codec_mask_token,) * prompt_length
        + (talker.codec_pad_token, talker.codec_bos_token),
        prompt=prompt,
        reply=torch.cat([rows[prompt_length + 1 :], tail]),
        positions=result.positions,
        delta=result.delta,
        penalty=1.05,
    )
    if mistake == "pad_ids_in_prompt":
        return replace(right, prompt_ids=(talker.codec_pad_token,) * prompt_length + right.prompt_ids[-2:])
    if mistake == "linear_positions":
        return replace(right, positions=torch.arange(prompt_length + 2).expand(3, -1), delta=0)
    if mistake == "no_penalty":
        return replace(right, penalty=1.0)
    return right


@torch.inference_mode()
def speak(reference: Reference, given: TalkerFeed, max_codes: int) -> tuple[int, ...]:
    """Greedy codes for a feed, the stop code excluded."""
    talker = reference.model.talker
    inputs, positions = given.prompt, given.positions
    seen, codes, cache = set(given.prompt_ids), list[int](), None
    while len(codes) < max_codes:
        output = talker.model(
            inputs_embeds=talker.thinker_to_talker_proj(inputs)[None],
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logits = talker.codec_head(output.last_hidden_state[0, -1])
        ids = torch.tensor(sorted(seen))
        logits[ids] = torch.where(logits[ids] > 0, logits[ids] / given.penalty, logits[ids] * given.penalty)
        logits[talker.codec_bos_token] = -torch.inf
        code = int(logits.argmax())
        if code in reference.codec_stop_ids:
            break
        row = given.reply[min(len(codes), len(given.reply) - 1)]
        inputs = (talker.get_input_embeddings()(torch.tensor(code)) + row)[None]
        positions = torch.full((3, 1), len(given.prompt) + len(codes) + given.delta)
        codes.append(code)
        seen.add(code)
    return tuple(codes)


def _thinker_rows(
    reference: Reference, case: Case, result: ReferenceResult
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer-0 inputs and final hidden states of prompt and reply, [P + N - 1, E] each, of one forward
    pass."""
    inputs = reference.prompt(case.messages)
    inputs["input_ids"] = torch.tensor([result.prompt_ids + result.text_ids[:-1]])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    states = reference.model.thinker(
        **inputs, output_hidden_states=True, use_audio_in_video=hears_videos(case.messages)
    ).hidden_states
    return states[0][0].clone(), states[-1][0]
