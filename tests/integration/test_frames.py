"""The talker and its code predictor in vLLM's engine give the frames of transformers: all 16 codes, in every
batch, and again after a preemption. tests/integration/test_qwen3_parity.py has the same with a whole
pipeline."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from tests.integration.engines import CPU_ENVIRONMENT
from tests.integration.utterances import Engine, Run, Speaking, Utterance

ROOT = Path(__file__).resolve().parents[2]
V2_ON_CPU = Path(__file__).with_name("v2_on_cpu")

NAMES = ("short", "plain", "image", "long", "again", "more")
"""More than the engine runs at once: all slots of the history are taken while requests are preempted."""
NUM_CODES = 24
NUM_CONTROL_IDS = 1024  # at the end of the talker's vocabulary; the reference suppresses them


class TalkerReference:
    """The talker of transformers, in float32."""

    def __init__(self, model_dir: Path) -> None:
        self._model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
        self._model.eval()
        self._talker = self._model.talker
        self._config = self._talker.config
        vocabulary = self._config.text_config.vocab_size
        self._suppressed = [
            token
            for token in range(vocabulary - NUM_CONTROL_IDS, vocabulary)
            if token != self._config.codec_eos_token_id
        ]

    @torch.no_grad()
    def utterance(self, seed: int, *, num_user: int, num_text: int, has_image: bool) -> Utterance:
        """Random text, with an image of 2 x 2 tokens if asked for, and between whole positions behind it, as
        behind a video."""
        config, generator = self._config, torch.Generator().manual_seed(seed)
        table = self._model.thinker.get_input_embeddings().weight
        text = torch.randint(0, 500, (num_user + 9 + num_text,), generator=generator)
        rows = self._talker.text_projection(table[text])
        tail = torch.tensor([self._model.config.tts_eos_token_id, self._model.config.tts_pad_token_id])
        ids = torch.arange(num_user + 9).expand(3, -1)
        if has_image:
            source = torch.full((1, num_user + 9), 1)
            source[0, 2] = config.vision_start_token_id
            source[0, 3:7] = config.image_token_id
            ids = self._talker.get_rope_index(
                source, torch.tensor([[1, 4, 4]]), attention_mask=torch.ones_like(source)
            )[0][:, 0]
            ids = ids + 0.37 * (torch.arange(num_user + 9) > 6)
        return Utterance(
            prompt_ids=(
                *[config.codec_pad_id] * (num_user + 3),
                config.codec_nothink_id,
                config.codec_think_bos_id,
                config.codec_think_eos_id,
                next(iter(config.speaker_id.values())),
                config.codec_pad_id,
                config.codec_bos_id,
            ),
            num_replaced=num_user + 3,
            rows=rows.contiguous(),
            tail=self._talker.text_projection(table[tail]),
            positions=ids.float().contiguous(),
        )

    def _embedded_prompt(self, utterance: Utterance) -> torch.Tensor:
        length, added = len(utterance.prompt_ids), utterance.num_replaced
        embeds = utterance.rows[:length].clone()
        embeds[added:] += self._talker.get_input_embeddings()(torch.tensor(utterance.prompt_ids[added:]))
        return embeds

    @torch.no_grad()
    def frames(self, utterance: Utterance, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        """Greedily; one frame less than `NUM_CODES`, because the reference predicts a frame's codes in the
        next step."""
        length = len(utterance.prompt_ids)
        positions = utterance.positions[:, None]
        delta = torch.tensor([[utterance.position_delta]])

        def index(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return positions, delta

        monkeypatch.setattr(self._talker, "get_rope_index", index)
        self._talker.rope_deltas = None
        result = self._talker.generate(
            inputs_embeds=self._embedded_prompt(utterance)[None],
            trailing_text_hidden=torch.cat((utterance.rows[length:], utterance.tail[:1]))[None],
            tts_pad_embed=utterance.tail[1:][None],
            talker_input_ids=torch.zeros(1, length, dtype=torch.long),
            image_grid_thw=torch.tensor([[1, 4, 4]]),
            do_sample=False,
            repetition_penalty=1.05,
            suppress_tokens=self._suppressed,
            eos_token_id=-1,  # no id: the end code does not end an utterance here, as with `ignore_eos`
            max_new_tokens=NUM_CODES,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        return [states[-1][0].tolist() for states in result.hidden_states if states[-1] is not None]

    @torch.no_grad()
    def logprobs(self, utterance: Utterance, frames: list[list[int]]) -> torch.Tensor:
        """Of the first codes of `frames`, each given the frames before it: `[len(frames)]`."""
        prompt = self._embedded_prompt(utterance)
        predicted = self._talker.code_predictor.get_input_embeddings()
        first = self._talker.get_input_embeddings()
        inputs = [prompt]
        for index, (token, *codes) in enumerate(frames[:-1]):
            embedded = [first(torch.tensor([token]))]
            embedded += [table(torch.tensor([code])) for table, code in zip(predicted, codes, strict=True)]
            inputs.append(torch.stack(embedded).sum(0) + utterance.row(len(prompt) + index))
        behind = torch.arange(len(prompt), len(prompt) + len(frames) - 1) + utterance.position_delta
        positions = torch.cat((utterance.positions, behind.expand(3, -1)), 1)
        hidden = self._talker.model(
            inputs_embeds=torch.cat(inputs)[None], position_ids=positions[:, None], use_cache=False
        ).last_hidden_state[0, len(prompt) - 1 :]
        scores = self._talker.codec_head(hidden)
        scores[:, self._suppressed] = -torch.inf
        return scores.log_softmax(-1).gather(1, torch.tensor([[frame[0]] for frame in frames]))[:, 0]


@dataclass(frozen=True)
class Material:
    utterances: dict[str, Utterance]
    frames: dict[str, list[list[int]]]
    """Of the reference."""
    reference: TalkerReference


@pytest.fixture(scope="module")
def material(qwen3_checkpoint: Path) -> Material:
    reference = TalkerReference(qwen3_checkpoint)
    utterances = {
        name: reference.utterance(
            seed, num_user=10 + 7 * seed, num_text=5 + 4 * (seed % 3), has_image=name == "image"
        )
        for seed, name in enumerate(NAMES)
    }
    with pytest.MonkeyPatch.context() as patch:
        frames = {name: reference.frames(utterance, patch) for name, utterance in utterances.items()}
    assert all(len(made) == NUM_CODES - 1 for made in frames.values())
    assert len({frame[0] for made in frames.values() for frame in made}) > NUM_CODES, "codes must vary"
    return Material(utterances, frames, reference)


def spoken(
    checkpoint: Path,
    material: Material,
    folder: Path,
    runs: dict[str, tuple[Engine, Speaking]],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Run]:
    files = [folder / name for name in ("utterances", "runs", "results")]
    torch.save(material.utterances, files[0])
    torch.save(list(runs.values()), files[1])
    command = [sys.executable, "-m", "tests.integration.talker_engine", str(checkpoint)]
    subprocess.run(
        [*command, *map(str, files)],
        env={**os.environ, **CPU_ENVIRONMENT, **environment},
        cwd=ROOT,
        check=True,
    )
    results: list[Run] = torch.load(files[2], weights_only=False)
    return dict(zip(runs, results, strict=True))


SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7}
CRAMPED, ASYNC = Engine(is_cramped=True), Engine(is_async=True)
CRAMPED_ASYNC = Engine(is_cramped=True, is_async=True)
V1_RUNS = {
    "in blocks": (Engine(), Speaking(NAMES, is_together=True, tokens_per_output=(8,))),
    "preempted": (CRAMPED, Speaking(NAMES, is_together=True)),
    "unseeded preempted": (CRAMPED, Speaking(NAMES, is_together=True, temperature=0.9, has_logprobs=True)),
    "asynchronous": (CRAMPED_ASYNC, Speaking(NAMES, is_together=True)),
}


@pytest.fixture(scope="module")
def v1(
    qwen3_checkpoint: Path, material: Material, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    return spoken(qwen3_checkpoint, material, tmp_path_factory.mktemp("v1"), V1_RUNS)


V2_NAMES = ("image", "more")
V2_RUNS = {
    "together": (ASYNC, Speaking(V2_NAMES, is_together=True, num_codes=8, tokens_per_output=(1, 4))),
    "preempted": (CRAMPED_ASYNC, Speaking(("again", "more"), is_together=True, num_codes=20)),
    "seeded alone": (ASYNC, Speaking(("again", "more"), num_codes=20, **SEEDED)),
    "seeded preempted": (
        CRAMPED_ASYNC,
        Speaking(("again", "more"), is_together=True, num_codes=20, **SEEDED),
    ),
    "unseeded preempted": (
        CRAMPED_ASYNC,
        # Short prompts: the pieces in which they are computed again end between generated tokens.
        Speaking(
            ("short", "plain", "image"), is_together=True, num_codes=16, temperature=0.9, has_logprobs=True
        ),
    ),
}


@pytest.fixture(scope="module")
def v2(
    qwen3_checkpoint: Path, material: Material, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Where Triton's interpreter runs its kernels, with asynchronous scheduling."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(V2_ON_CPU)]),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_COMPUTE_NANS_IN_LOGITS": "0",  # vLLM's kernel for it calls the GPU's library
    }
    folder = tmp_path_factory.mktemp("v2")
    return spoken(qwen3_checkpoint, material, folder, V2_RUNS, environment)


def frames_of(run: Run) -> dict[str, list[list[int]]]:
    return {name: made.frames for name, made in run.spoken.items()}


def assert_frames_of_the_reference(run: Run, material: Material) -> None:
    """All codes of the frames that the reference gives, which may be one less."""
    num_codes = run.speaking.num_codes
    for name, made in run.spoken.items():
        assert len(made.frames) == num_codes
        assert made.frames[: NUM_CODES - 1] == material.frames[name][:num_codes], name
    assert run.num_left == 0


def assert_logprobs_of_the_reference(run: Run, material: Material) -> None:
    for name, made in run.spoken.items():
        expected = material.reference.logprobs(material.utterances[name], made.frames)
        torch.testing.assert_close(torch.tensor(made.logprobs), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("run", ["in blocks", "preempted"])
def test_all_codes_are_those_of_transformers(v1: dict[str, Run], material: Material, run: str) -> None:
    assert (v1[run].generation, v1[run].is_asynchronous) == (1, False)
    assert_frames_of_the_reference(v1[run], material)


def test_a_block_of_tokens_comes_with_its_codes(v1: dict[str, Run]) -> None:
    assert {made.num_outputs for made in v1["in blocks"].spoken.values()} == {NUM_CODES // 8}


@pytest.mark.parametrize("run", ["preempted", "unseeded preempted"])
def test_requests_were_preempted(v1: dict[str, Run], v2: dict[str, Run], run: str) -> None:
    assert v1[run].num_resumed > 0
    assert v2[run].num_resumed > 0


def test_samples_that_are_thrown_away_leave_the_codes_of_kept_ones_in_place(
    v1: dict[str, Run], material: Material
) -> None:
    """Without a seed, what is sampled in the middle of a recomputation differs from what was sampled there
    first, and each token's log-probability depends on all codes before it."""
    assert_logprobs_of_the_reference(v1["unseeded preempted"], material)


def test_asynchronous_scheduling_gives_the_same_codes(v1: dict[str, Run], material: Material) -> None:
    run = v1["asynchronous"]
    assert (run.generation, run.is_asynchronous) == (1, True)
    assert_frames_of_the_reference(run, material)


@pytest.mark.parametrize("run", ["together", "preempted"])
def test_the_v2_runner_with_asynchronous_scheduling_gives_the_same_codes(
    v2: dict[str, Run], material: Material, run: str
) -> None:
    assert (v2[run].generation, v2[run].is_asynchronous) == (2, True)
    assert_frames_of_the_reference(v2[run], material)


def test_the_v2_runner_samples_the_same_codes_with_a_seed_after_a_preemption(v2: dict[str, Run]) -> None:
    assert frames_of(v2["seeded alone"]) == frames_of(v2["seeded preempted"])


def test_the_v2_runner_leaves_the_codes_of_kept_samples_in_place(
    v2: dict[str, Run], material: Material
) -> None:
    assert_logprobs_of_the_reference(v2["unseeded preempted"], material)
