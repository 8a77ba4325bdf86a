"""The code predictor against Qwen3-Omni's reference, on tiny random weights; behind a projection as in
Qwen3-TTS, too."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

from omni_server.errors import ConfigError
from stages.qwen_codec.code_predictor import CodePredictor
from stages.runtime.checkpoint_weights import without_parts
from stages.runtime.code_sampling import Choose

WIDTH, VOCABULARY, NUM_PREDICTED, BATCH = 32, 60, 15, 3


def config() -> Qwen3OmniMoeTalkerCodePredictorConfig:
    return Qwen3OmniMoeTalkerCodePredictorConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_code_groups=NUM_PREDICTED + 1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


@pytest.fixture
def reference() -> Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration:
    torch.manual_seed(0)
    model = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration(config()).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5 if weight.dim() > 1 else 1.0)
    return model


def forced(codes: torch.Tensor, seen: list[torch.Tensor]) -> Choose:
    def choose(logits: torch.Tensor, codebook: int) -> torch.Tensor:
        seen.append(logits)
        return codes[:, codebook]

    return choose


@torch.no_grad()
@pytest.mark.parametrize("talker_width", [WIDTH, 40])
def test_all_logits_are_those_of_the_reference_whatever_was_chosen_before(
    reference: Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration, talker_width: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, VOCABULARY, (BATCH, NUM_PREDICTED), generator=generator)
    inputs = torch.randn(2, BATCH, talker_width, generator=generator)
    weights, project = reference.state_dict(), nn.Identity()
    if talker_width != WIDTH:
        project = nn.Linear(talker_width, WIDTH)
        weights |= {f"small_to_mtp_projection.{name}": weight for name, weight in project.named_parameters()}
    tables = {f"model.codec_embedding.{i}.weight": torch.randn(VOCABULARY, talker_width) for i in range(15)}
    weights |= tables
    predictor = CodePredictor(config(), talker_width, max_batch_size=BATCH)
    assert list(without_parts(predictor.checkpoint_parts(), weights.items(), "")) == []
    for table, weight in zip(reference.model.codec_embedding, tables.values(), strict=True):
        table.weight.copy_(project(weight))
    seen: list[torch.Tensor] = []
    assert torch.equal(predictor(*inputs, forced(codes, seen)), codes)
    step = reference(inputs_embeds=project(torch.stack(tuple(inputs), 1)), use_cache=True)
    for codebook in range(NUM_PREDICTED):
        torch.testing.assert_close(seen[codebook], step.logits[:, -1], atol=1e-4, rtol=1e-4)
        step = reference(
            input_ids=codes[:, codebook : codebook + 1],
            past_key_values=step.past_key_values,
            use_cache=True,
            generation_steps=min(codebook + 1, NUM_PREDICTED - 1),
        )
    assert len(seen) == NUM_PREDICTED
    summed = sum(table[code] for table, code in zip(tables.values(), codes.T, strict=True))
    torch.testing.assert_close(predictor.embed(codes), summed)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.0.self_attn.q_bias", (64,), "model.layers.0.self_attn.q_bias has no place"),
        ("lm_head.3.weight", (WIDTH,), r"lm_head.3.weight is \[\d+\], the config says \[\d+, \d+\]"),
        ("lm_head.3.weight", (1, WIDTH), r"is \[1, \d+\], the config says \[\d+, \d+\]"),
        ("model.layers.1.self_attn.q_norm.weight", (1,), r"is \[1\], the config says \[16\]"),
        ("model.layers.0.mlp.up_proj.weight", (1, 1), r"is \[1, 1\], the config says \[48, 32\]"),
    ],
)
def test_a_weight_of_another_name_or_shape_is_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    made = CodePredictor(config(), WIDTH, max_batch_size=BATCH)
    with pytest.raises(ConfigError, match=message):
        list(without_parts(made.checkpoint_parts(), [(name, torch.zeros(shape))], ""))
