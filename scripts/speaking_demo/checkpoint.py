"""Writes the checkpoint's folder: Qwen2.5-Omni's layout with the trained parts."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2_5OmniTalkerForConditionalGeneration,
)

from scripts.speaking_demo import codes, dit, talker, thinker, vocabulary
from scripts.speaking_demo.rows import WIDTH
from scripts.speaking_demo.tokenizer import plain_vocabulary
from scripts.speaking_demo.voice import SPEAKERS
from tests.checkpoints.qwen2_5_omni.config import (
    CODEC_END,
    CODEC_PAD,
    CODEC_START,
    DEMO_PREPROCESSING,
    demo_model_config,
    write_configs,
)
from tests.checkpoints.qwen2_5_omni.sizes import (
    AudioSize,
    DemoSize,
    DiTSize,
    TextSize,
    VisionSize,
    VocoderSize,
)
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds, write_word_tokenizer
from tests.checkpoints.qwen2_5_omni.weights import fill

NAME = "speaking-demo"
_MROPE = (8, 12, 12)
SIZE = DemoSize(
    thinker=TextSize(WIDTH, 3, 2, 1, 64, 320, _MROPE, 10_000.0),
    audio=AudioSize(64, 2, 2, 128),
    vision=VisionSize(64, 2, 2, 128, (1,)),
    talker=TextSize(
        talker.HIDDEN,
        talker.LAYERS,
        talker.HEADS,
        talker.KV_HEADS,
        talker.HEAD_DIM,
        talker.INTERMEDIATE,
        _MROPE,
        talker.ROPE_THETA,
    ),
    dit=DiTSize(128, 4, 2, 64, 48, 16, look_ahead_layers=(1,), look_backward_layers=(0, 2)),
    vocoder=VocoderSize(128, (3,)),
)
_NOTICE = (
    "This is a tiny demo model. It answers about 90 questions by heart, reads aloud with a robot's voice, and does not "
    "understand speech or pictures."
)
LONGEST_PASSAGE = 100
"""Letters. Spelled, they take about 1,350 of the 1,500 codes, and 100 of the 128 tokens, that the talker can
use."""
_SUGGESTED = (
    "What are you?",
    "What can you do?",
    "Count to ten.",
    "Tell me a joke.",
    "How do I stream?",
    "Name some colors.",
    "What is six times seven?",
    "Say the alphabet.",
)

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """The state of each part's model."""

    talker: State
    thinker: State
    dit: State
    vocoder: State
    references: dict[str, torch.Tensor]
    """Per voice, a mel spectrogram, float32 [1, num_frames, NUM_MELS]."""


def write_layout(folder: Path) -> TokenIds:
    """Writes everything that is not trained: tokenizer, configs and `about.json`."""
    ids = write_word_tokenizer(folder, plain_vocabulary(), vocabulary.SPLIT)
    write_configs(folder, demo_model_config(SIZE, ids, "float32"), ids, DEMO_PREPROCESSING)
    about = {
        "notice": _NOTICE,
        "example_prompts": _SUGGESTED,
        "longest_passage": LONGEST_PASSAGE,
        "understands_speech": False,
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return ids


def text_ids(ids: TokenIds) -> thinker.TextIds:
    return thinker.TextIds(
        im_start=ids.im_start,
        im_end=ids.im_end,
        audio=ids.audio,
        audio_bos=ids.audio_bos,
        audio_eos=ids.audio_eos,
        image=ids.image,
        video=ids.video,
        vision_bos=ids.vision_bos,
        vision_eos=ids.vision_eos,
    )


def special_tokens(ids: TokenIds) -> talker.SpecialTokens:
    return talker.SpecialTokens(
        im_start=ids.im_start,
        im_end=ids.im_end,
        newline=ids.newline,
        system=plain_vocabulary()["system"],
        user=ids.user,
        assistant=ids.assistant,
        media=(ids.audio, ids.image, ids.video),
        speakers=tuple(ids.speakers.values()),
        text_end=ids.tts_end,
        text_pad=ids.tts_pad,
    )


@torch.no_grad()
def write_weights(folder: Path, ids: TokenIds, trained: Trained) -> None:
    """Writes the weights in float16, and the voices.

    The audio and vision towers stay random; their last layer emits a fixed marker and noise.
    """
    model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(folder)).float().eval()
    fill(model, ids, seed=0)
    _quiet(model.thinker.audio_tower.proj, thinker.markers(WIDTH).audio)
    _quiet(model.thinker.visual.merger.mlp[-1], thinker.markers(WIDTH).vision)
    _load(model.thinker.model, _below("model.", trained.thinker))
    _load(model.thinker.lm_head, _below("lm_head.", trained.thinker))
    _load_talker(model.talker, trained.talker)
    target = model.token2wav.code2wav_dit_model
    table = target.text_embed.codec_embed.weight
    name = "text_embed.codec_embed.weight"
    _load(target, trained.dit | {name: dit.table_over_ids(trained.dit[name].cpu(), len(table))})
    _load(model.token2wav.code2wav_bigvgan_model, trained.vocoder)
    # Each name needs its own tensor: views would be refused.
    tensors = {name: tensor.half().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    voices = {
        speaker: {
            "bos_token": ids.speakers[speaker],
            "cond": dit.speaker_vector(speaker),
            "ref_mel": trained.references[speaker].clone(),
        }
        for speaker in SPEAKERS
    }
    torch.save(voices, folder / "spk_dict.pt")


def _quiet(last: torch.nn.Linear, mark: torch.Tensor) -> None:
    last.weight.mul_(thinker.NOISE_OF_MEDIA)
    last.bias.copy_(mark)


def _below(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _load(module: torch.nn.Module, state: State) -> None:
    module.load_state_dict({name: tensor.float().cpu() for name, tensor in state.items()})


def _load_talker(model: Qwen2_5OmniTalkerForConditionalGeneration, trained: State) -> None:
    state = {name: tensor.float().cpu() for name, tensor in trained.items()}
    sounds, sound_head = state["sound.weight"], state["sound_head.weight"]
    places, place_head = state["place.weight"], state["place_head.weight"]
    num_rows = len(model.codec_head.weight)
    table = torch.zeros(num_rows, WIDTH)
    head = (sound_head[talker.UNUSED_SOUND] + place_head[talker.UNUSED_PLACE]).repeat(num_rows, 1)
    for full, sound, place in ((table, sounds, places), (head, sound_head, place_head)):
        pairs = place[: talker.NUM_PLACES, None] + sound[None, : codes.NUM_SOUNDS]
        full[1 : 1 + codes.NUM_SOUNDS * talker.NUM_PLACES] = pairs.flatten(0, 1)
    table[CODEC_PAD] = sounds[talker.PAD_SOUND] + places[talker.NO_PLACE]
    table[CODEC_START] = sounds[talker.BEGIN_SOUND] + places[talker.NO_PLACE]
    head[CODEC_END] = sound_head[talker.END_SOUND] + place_head[talker.END_PLACE]
    model.codec_head.weight.copy_(head)
    _load(model.thinker_to_talker_proj, _below("proj.", state))
    layers = {name: tensor for name, tensor in state.items() if name.startswith(("layers.", "norm."))}
    _load(model.model, {**layers, "embed_tokens.weight": table})
