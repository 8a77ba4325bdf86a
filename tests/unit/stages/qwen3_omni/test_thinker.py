"""What vLLM's thinker keeps from one step to the next."""

from types import SimpleNamespace

import torch
from torch import nn

from stages.qwen3_omni.thinker import Qwen3OmniThinker

IMAGE, TEXT = 9, 5
WIDTH = 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, WIDTH), requires_grad=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[input_ids]


def thinker_without_layers() -> Qwen3OmniThinker:
    """With the state for the features of one layer of the vision encoder."""
    thinker: Qwen3OmniThinker = Qwen3OmniThinker.__new__(Qwen3OmniThinker)
    nn.Module.__init__(thinker)
    thinker.config = SimpleNamespace(
        video_token_id=7,
        audio_token_id=8,
        image_token_id=IMAGE,
        text_config=SimpleNamespace(hidden_size=WIDTH),
    )
    thinker.visual = SimpleNamespace(deepstack_visual_indexes=[0])
    thinker.language_model = Embedding()
    thinker.deepstack_num_level = 1
    thinker.deepstack_input_embeds = [torch.zeros(16, WIDTH)]
    thinker.deepstack_input_embeds_num_tokens = 0
    return thinker


def test_features_of_an_image_are_not_added_to_the_tokens_of_the_next_step() -> None:
    """Also where `forward` does not run between them: a CUDA graph of the step replays its kernels alone."""
    thinker = thinker_without_layers()
    prompt = torch.tensor([TEXT, IMAGE, IMAGE, TEXT])
    features = torch.full((2, 2 * WIDTH), 3.0)  # of the last layer, and of one before

    thinker.embed_input_ids(prompt, [features], is_multimodal=prompt == IMAGE)
    added = thinker._get_deepstack_input_embeds(4)
    assert torch.equal(added["deepstack_input_embeds_0"][:, 0], torch.tensor([0.0, 3.0, 3.0, 0.0]))

    thinker.embed_input_ids(torch.tensor([TEXT] * 8), [], is_multimodal=torch.zeros(8, dtype=torch.bool))
    added = thinker._get_deepstack_input_embeds(8)
    assert torch.equal(added["deepstack_input_embeds_0"], torch.zeros(8, WIDTH))
