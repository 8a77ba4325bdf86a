"""One training loop for all parts, and the parts. Schedules count steps; seeds are fixed."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniTextConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from scripts.speaking_demo import dit, talker, thinker, vocoder
from scripts.speaking_demo.codes import Codebook
from scripts.speaking_demo.items import Texts
from scripts.speaking_demo.rows import embeddings
from scripts.speaking_demo.snake import use_fast_activations
from scripts.speaking_demo.voice import HOP, SPEAKERS, mel_of, render

Report = Callable[[str], None]

_REPORT_EVERY_S = 15.0
_UTTERANCES, _UNITS_PER_UTTERANCE = 500, 10
REFERENCE_FRAMES = 48
"""Length of the mel spectrogram that gives the DiT a voice."""
_MEL_STEP = 24
"""The DiT's block: training clips begin at multiples of it."""

Clips = TypeVar("Clips", vocoder.Clips, dit.Clips)


@dataclass(frozen=True)
class Schedule:
    steps: int
    rate: float
    batch: int
    """Clips or chats per step; the talker's is codes."""
    warm_up: int = 100


SCHEDULES = {
    "talker": Schedule(9_000, 4e-3, 6_000),
    "thinker": Schedule(1_500, 3e-3, 32),
    "dit": Schedule(8_000, 2e-3, 8),
    "vocoder": Schedule(6_480, 4e-3, 8),
}


def fit(
    name: str,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    step_loss: Callable[[], torch.Tensor],
    report: Report,
    *,
    clip: float = 1.0,
) -> list[float]:
    """Trains with a warm-up and a cosine decay to a hundredth. Returns the loss of each step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    history: list[float] = []
    begin = last = time.monotonic()
    for step in range(schedule.steps):
        share = 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
        factor = min(1.0, (step + 1) / schedule.warm_up) * max(share, 0.01)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        loss = step_loss()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        history.append(float(loss.detach()))
        now = time.monotonic()
        if now - last > _REPORT_EVERY_S or step == schedule.steps - 1:
            last = now
            recent = history[-50:]
            report(
                f"{name}: step {step + 1} of {schedule.steps}, loss {sum(recent) / len(recent):.4f}, "
                f"{now - begin:.0f} s"
            )
    return history


def train_talker(
    codebook: Codebook,
    special: talker.SpecialTokens,
    answers: list[list[int]],
    vocab_size: int,
    schedule: Schedule,
    device: torch.device,
    report: Report,
) -> tuple[talker.Talker, list[float]]:
    torch.manual_seed(1)
    rng = random.Random(1)
    model = talker.Talker().to(device)
    table = embeddings(vocab_size)
    table[list(special.media)] = 0
    table = table.to(device)
    speech, texts = talker.Speech(codebook, special), Texts(special, answers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.rate, betas=(0.9, 0.98), weight_decay=0.01)

    def step_loss() -> torch.Tensor:
        items = texts.draw(rng, schedule.batch)
        return talker.losses(model, table, speech.batch(items, rng).to(device), talker.INPUT_NOISE).total()

    return model, fit("talker", optimizer, schedule, step_loss, report)


def train_thinker(
    config: Qwen2_5OmniTextConfig,
    tokenizer: Tokenizer,
    ids: thinker.TextIds,
    schedule: Schedule,
    device: torch.device,
    report: Report,
) -> tuple[thinker.Thinker, list[float]]:
    torch.manual_seed(2)
    model = thinker.Thinker(config).to(device)
    chats = thinker.Chats(tokenizer, ids, random.Random(2))

    def step_loss() -> torch.Tensor:
        return thinker.loss(model, [chats.draw() for _ in range(schedule.batch)], ids, device)

    return model, fit("thinker", model.optimizer(schedule.rate), schedule, step_loss, report)


@dataclass(frozen=True)
class Utterance:
    speaker: str
    sounds: torch.Tensor
    """Int64 [num_codes]."""
    wave: torch.Tensor
    mel: torch.Tensor
    is_voiced: torch.Tensor


def utterances(codebook: Codebook, count: int = _UTTERANCES) -> list[Utterance]:
    """Draws sequences of random units, each in every voice. No unit repeats before all occur."""
    rng = random.Random(3)
    order: list[str] = []
    found: list[Utterance] = []
    for seed in range(count):
        units: list[str] = []
        while len(units) < _UNITS_PER_UTTERANCE:
            order = order or rng.sample(list(codebook.units), len(codebook.units))
            units.append(order.pop())
        envelope = codebook.envelope(units)
        sounds = codebook.sounds(units)
        for name, speaker in SPEAKERS.items():
            wave = render(envelope, speaker, seed)
            is_voiced = (envelope.voiced()[:, 0] > 0).float()
            found.append(Utterance(name, sounds, wave, mel_of(wave), is_voiced))
    return found


def reference_mels(said: list[Utterance]) -> dict[str, torch.Tensor]:
    """Per voice, float32 [1, REFERENCE_FRAMES, NUM_MELS]."""
    return {
        name: next(u for u in said if u.speaker == name and len(u.mel) > REFERENCE_FRAMES).mel[
            None, :REFERENCE_FRAMES
        ]
        for name in SPEAKERS
    }


def train_vocoder(
    config: Qwen2_5OmniBigVGANConfig,
    said: list[Utterance],
    schedule: Schedule,
    device: torch.device,
    report: Report,
) -> tuple[Qwen2_5OmniToken2WavBigVGANModel, list[float]]:
    torch.manual_seed(4)
    rng = random.Random(4)
    model = vocoder.build(config).to(device)
    if device.type == "cpu":
        use_fast_activations(model)
    length = 28
    places = [(u, start) for u in said for start in range(0, len(u.mel) - length, 7)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.rate, betas=(0.8, 0.99), weight_decay=0.0)

    def step_loss() -> torch.Tensor:
        drawn = rng.choices(places, k=schedule.batch)
        clips = vocoder.Clips(
            torch.stack([u.mel[at : at + length] for u, at in drawn]),
            torch.stack([u.wave[at * HOP : (at + length) * HOP] for u, at in drawn]),
            torch.stack([u.is_voiced[at : at + length] for u, at in drawn]),
        )
        return vocoder.loss(model, _moved(clips, device))

    return model, fit("vocoder", optimizer, schedule, step_loss, report, clip=5.0)


def train_dit(
    config: Qwen2_5OmniDiTConfig,
    said: list[Utterance],
    schedule: Schedule,
    device: torch.device,
    report: Report,
) -> tuple[Qwen2_5OmniToken2WavDiTModel, list[float]]:
    torch.manual_seed(5)
    rng = random.Random(5)
    model = dit.build(config, torch.cat([u.mel for u in said]).mean(0)).to(device)
    references = reference_mels(said)
    length = 4 * _MEL_STEP
    places = [(u, start) for u in said for start in range(0, len(u.mel) - length, _MEL_STEP)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.rate, betas=(0.9, 0.98), weight_decay=0.0)

    def step_loss() -> torch.Tensor:
        drawn = rng.choices(places, k=schedule.batch)
        clips = dit.Clips(
            torch.stack([u.mel[at : at + length] for u, at in drawn]),
            torch.stack([u.sounds[at // 2 : (at + length) // 2] for u, at in drawn]),
            torch.cat([dit.speaker_vector(u.speaker) for u, _ in drawn]),
            torch.cat([references[u.speaker] for u, _ in drawn]),
        )
        return dit.loss(model, _moved(clips, device))

    return model, fit("dit", optimizer, schedule, step_loss, report, clip=5.0)


def _moved(clips: Clips, device: torch.device) -> Clips:
    return type(clips)(**{field.name: getattr(clips, field.name).to(device) for field in fields(clips)})
