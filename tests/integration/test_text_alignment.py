"""When words are reported as spoken, compared with where they are heard in speech that says one token a
frame."""

import asyncio
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm, silu

from omni_server.api.speech_socket import Words
from omni_server.check.default_config import load_for
from omni_server.config.load import find_shipped_config
from omni_server.omni import AsyncOmni
from omni_server.orchestrator.text_source import in_one_piece
from omni_server.types import CodecDelta, OmniRequest, SamplingConfig, SpeechOutput, TextAlignment
from stages.qwen3_tts.tokens import TextTokenizer
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import LiveOmni
from tests.spoken_texts import TEXTS

MS_PER_FRAME = 80
SAMPLES_PER_MS = 24
NUM_CONTROL_IDS = 1024


class SpellingTalker:
    """A checkpoint whose talker forgets everything but the text row of its position, so that each frame says
    the token that the talker was given with it."""

    def __init__(self, folder: Path) -> None:
        make_demo_checkpoint(folder, family="qwen3_tts")
        self.folder = folder
        config = json.loads((folder / "config.json").read_text())
        (path,) = folder.glob("*.safetensors")
        weights = load_file(path)
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")) or "codec_embedding" in name:
                weight.zero_()
        weights["talker.codec_head.weight"][config["talker_config"]["codec_eos_token_id"]] = 0
        save_file(weights, path, {"format": "pt"})
        rows = weights["talker.model.text_embedding.weight"].float()
        for layer in ("linear_fc1", "linear_fc2"):
            rows = linear(
                rows if layer == "linear_fc1" else silu(rows),
                weights[f"talker.text_projection.{layer}.weight"].float(),
                weights[f"talker.text_projection.{layer}.bias"].float(),
            )
        norm = weights["talker.model.norm.weight"].float()
        hidden = rms_norm(rows, norm.shape, norm, config["talker_config"]["rms_norm_eps"])
        logits = linear(hidden, weights["talker.codec_head.weight"].float())[:, :-NUM_CONTROL_IDS]
        self.codes = cast(torch.Tensor, logits).argmax(1).numpy()
        """What each token sounds like."""
        self.end, self.pad = (int(self.codes[config[f"tts_{name}_token_id"]]) for name in ("eos", "pad"))


def forced_alignment(frames: npt.NDArray[np.int64], sounds: list[int]) -> list[int]:
    """The last frame of each sound, of those alignments in which the fewest frames sound otherwise."""
    costs = (frames[:, None] != np.array(sounds)[None]).astype(float)
    best = np.full_like(costs, np.inf)
    best[0, 0] = costs[0, 0]
    for frame in range(1, len(frames)):
        advanced = np.concatenate(([np.inf], best[frame - 1, :-1]))
        best[frame] = costs[frame] + np.minimum(best[frame - 1], advanced)
    ends, sound = [len(frames) - 1] * len(sounds), len(sounds) - 1
    for frame in range(len(frames) - 1, 0, -1):
        if sound and best[frame - 1, sound - 1] <= best[frame - 1, sound]:
            sound -= 1
            ends[sound] = frame - 1
    return ends


async def spoken(omni: AsyncOmni, text: str, num_frames: int) -> tuple[list[int], list[Any]]:
    """The first code of each frame, and the words as the API reports them."""
    sampling = SamplingConfig(temperature=0.0, repetition_penalty=1.0, max_tokens=num_frames, ignore_eos=True)
    speech = SpeechOutput(pieces=in_one_piece(text), is_aligned=True)
    codes, words, reported = list[int](), Words(), list[Any]()
    async for event in omni.events(OmniRequest(text, (), speech, {"talker": sampling})):
        if isinstance(event, TextAlignment):
            reported += words.push(event.text, round(event.end_sample / SAMPLES_PER_MS))
        elif isinstance(event, CodecDelta):
            codes += event.codes[::16]
    return codes, [*reported, *words.finish()]


def test_of_all_words_95_percent_end_within_160_ms_of_where_they_are_heard(tmp_path: Path) -> None:
    talker = SpellingTalker(tmp_path / "checkpoint")
    tokenizer = TextTokenizer(talker.folder)
    tokens = {text: tokenizer.plain_tokens(tokenizer.normalized(text)) for text in TEXTS[::3]}
    live = LiveOmni(talker.folder, load_for(find_shipped_config("qwen3_tts.demo-cpu"), {"audio"}))

    async def all_spoken() -> list[tuple[list[int], list[Any]]]:
        return await asyncio.gather(*(spoken(live.omni, text, len(tokens[text]) + 4) for text in tokens))

    try:
        answers = live.run(all_spoken())
    finally:
        live.close()
    differences = []
    for said, (codes, words) in zip(tokens.values(), answers, strict=True):
        sounds = [int(talker.codes[token.id]) for token in said]
        heard = forced_alignment(np.array(codes), [*sounds, talker.end, talker.pad])
        ends = list(accumulate(len(token.text) for token in said))
        text, position = "".join(token.text for token in said), 0
        for word in words:
            position = text.index(word["word"], position) + len(word["word"])
            frame = heard[next(number for number, end in enumerate(ends) if end >= position)]
            differences.append(abs(word["end_ms"] - MS_PER_FRAME * (frame + 1)))
    assert len(differences) > 60
    assert np.quantile(differences, 0.95) <= 160
