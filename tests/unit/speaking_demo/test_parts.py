"""A few steps of each part's training, and what becomes of the parts in a checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, Qwen2_5OmniForConditionalGeneration

from scripts.speaking_demo import checkpoint, codes, dit, talker, thinker, training, vocabulary
from scripts.speaking_demo.codes import Codebook
from scripts.speaking_demo.rows import embeddings
from scripts.speaking_demo.training import Schedule, Utterance
from tests.checkpoints.qwen2_5_omni.config import CODEC_END, CODES
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds

Layout = tuple[Path, TokenIds]
Trained = tuple[nn.Module, list[float]]
Train = Callable[[str, int], Trained]

SCHEDULES = {
    "talker": Schedule(30, 4e-3, 400, warm_up=5),
    "thinker": Schedule(30, 3e-3, 3, warm_up=5),
    "dit": Schedule(40, 2e-3, 2, warm_up=5),
    "vocoder": Schedule(30, 4e-3, 2, warm_up=5),
}


def no_report(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def said(codebook: Codebook) -> list[Utterance]:
    return training.utterances(codebook, count=3)


@pytest.fixture(scope="module")
def train(codebook: Codebook, layout: Layout, tokenizer: Tokenizer, said: list[Utterance]) -> Train:
    """Trains a part for so many steps."""
    folder, ids = layout
    config = AutoConfig.from_pretrained(folder)
    cpu = torch.device("cpu")

    def trained(part: str, num_steps: int) -> Trained:
        schedule = dataclasses.replace(SCHEDULES[part], steps=num_steps)
        match part:
            case "talker":
                answers = [tokenizer.encode(answer.text).ids for answer in vocabulary.answers()]
                special = checkpoint.special_tokens(ids)
                return training.train_talker(
                    codebook, special, answers, ids.vocab_size, schedule, cpu, no_report
                )
            case "thinker":
                text_config = config.thinker_config.text_config
                text_ids = checkpoint.text_ids(ids)
                return training.train_thinker(text_config, tokenizer, text_ids, schedule, cpu, no_report)
            case "dit":
                dit_config = config.token2wav_config.dit_config
                dit_config.num_embeds = codes.NUM_SOUNDS
                return training.train_dit(dit_config, said, schedule, cpu, no_report)
            case _:
                return training.train_vocoder(
                    config.token2wav_config.bigvgan_config, said, schedule, cpu, no_report
                )

    return trained


@pytest.fixture(scope="module")
def parts(train: Train) -> dict[str, Trained]:
    """All of them after `SCHEDULES`."""
    return {part: train(part, schedule.steps) for part, schedule in SCHEDULES.items()}


@pytest.fixture(scope="module")
def exported(
    parts: dict[str, Trained], layout: Layout, said: list[Utterance]
) -> Qwen2_5OmniForConditionalGeneration:
    """The checkpoint of `parts`, as transformers loads it. `parts` themselves are rounded as the file is."""
    folder, ids = layout
    for model, _ in parts.values():
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
    states = {part: model.state_dict() for part, (model, _) in parts.items()}
    references = training.reference_mels(said)
    checkpoint.write_weights(folder, ids, checkpoint.Trained(**states, references=references))
    return Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("part", SCHEDULES)
def test_training_lowers_the_loss(parts: dict[str, Trained], part: str) -> None:
    history = parts[part][1]
    first, last = history[:5], history[-5:]
    assert sum(last) < 0.9 * sum(first)


@pytest.mark.parametrize("part", SCHEDULES)
def test_same_seed_trains_the_same_weights(train: Train, part: str) -> None:
    first, again = (train(part, 2)[0].state_dict() for _ in range(2))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


@torch.no_grad()
def test_exported_talker_is_the_trained_one(
    parts: dict[str, Trained], exported: Qwen2_5OmniForConditionalGeneration, layout: Layout
) -> None:
    """Rows of text and codec ids in, logits of all codec ids out: those of a code are sums over its sound and
    place, and ids that are no code never win."""
    trained = parts["talker"][0]
    assert isinstance(trained, talker.Talker)
    torch.manual_seed(0)
    rows = embeddings(layout[1].vocab_size)[torch.randint(0, 256, (40,))]
    ids = torch.randint(1, CODES, (40,))
    sound, place = codes.sounds_of(ids), (ids - 1) // codes.NUM_SOUNDS
    state, _, _ = trained((rows + trained.sound(sound) + trained.place(place))[None])
    of_sound, of_place = trained.sound_head(state[0]), trained.place_head(state[0])

    model = exported.talker
    inputs = model.thinker_to_talker_proj((rows + model.get_input_embeddings()(ids))[None])
    logits = model.codec_head(model.model(inputs_embeds=inputs).last_hidden_state)[0]

    expected = of_place[:, : talker.NUM_PLACES, None] + of_sound[:, None, : codes.NUM_SOUNDS]
    scale = {"rtol": 0.0, "atol": 0.02 * float(expected.std())}  # sums are rounded once more
    torch.testing.assert_close(logits[:, 1:CODES], expected.flatten(1), **scale)
    end = of_sound[:, talker.END_SOUND] + of_place[:, talker.END_PLACE]
    torch.testing.assert_close(logits[:, CODEC_END], end, **scale)
    is_code = torch.zeros(logits.shape[1], dtype=torch.bool)
    is_code[1:CODES] = is_code[CODEC_END] = True
    assert (logits[:, ~is_code].max(1).values < logits[:, is_code].max(1).values).all()


@torch.no_grad()
def test_exported_thinker_is_the_trained_one(
    parts: dict[str, Trained],
    exported: Qwen2_5OmniForConditionalGeneration,
    layout: Layout,
    tokenizer: Tokenizer,
) -> None:
    trained = parts["thinker"][0]
    assert isinstance(trained, thinker.Thinker)
    ids = torch.tensor([tokenizer.encode("What can you do? I am a tiny demo model.").ids])
    media = thinker.media_of(ids, checkpoint.text_ids(layout[1]))
    logits = trained.lm_head(trained(ids, media))
    torch.testing.assert_close(exported.thinker(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_exported_dit_has_the_sound_of_each_id_in_its_table(
    parts: dict[str, Trained], exported: Qwen2_5OmniForConditionalGeneration
) -> None:
    table = exported.token2wav.code2wav_dit_model.text_embed.codec_embed.weight
    trained = parts["dit"][0].state_dict()["text_embed.codec_embed.weight"]
    ids = torch.arange(1, CODES)
    sounds = codes.sounds_of(ids)
    is_silent = sounds < codes.BLOCKS
    assert torch.equal(table[ids[~is_silent]], trained[1 + sounds[~is_silent]])
    assert (table[ids[is_silent]] == trained[1]).all(), (
        "training utterances are too short for most blocks' silences"
    )
    assert torch.equal(table[0], trained[0]), "of no code at all"


def test_voices_of_the_checkpoint_are_told_apart(exported: object, layout: Layout) -> None:
    voices = torch.load(layout[0] / "spk_dict.pt", weights_only=True)
    assert set(voices) == {"Chelsie", "Ethan"}
    for name, voice in voices.items():
        assert voice["bos_token"] == layout[1].speakers[name]
        assert torch.equal(voice["cond"], dit.speaker_vector(name))
        assert voice["ref_mel"].shape == (1, training.REFERENCE_FRAMES, 80)
    assert not torch.equal(voices["Ethan"]["cond"], voices["Chelsie"]["cond"])
