"""The thinker as a vLLM model: vLLM's own, to which sound is given without minutes of silence behind it, and with
attention and rotary embedding in one operator."""

from collections.abc import Mapping

from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_5_omni_thinker import (
    Qwen2_5OmniThinkerDummyInputsBuilder,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2_5OmniThinkerMultiModalProcessor,
    Qwen2_5OmniThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing.processor import HFMultiModalInputs

from stages.qwen2_5_omni.rope_attention import use_rope_attention


class ThinkerProcessor(Qwen2_5OmniThinkerMultiModalProcessor[Qwen2_5OmniThinkerProcessingInfo]):
    """Computes the spectrogram of what was said, not of the 300 s that `Qwen2_5OmniProcessor` pads each sound to
    (`n_samples` of preprocessor_config.json), which takes a quarter of a second of a processor core.

    The features are the same, where it was measured to the last bit. Their mask leaves out every frame whose middle
    lies behind the sound. A frame is `n_fft` samples wide, so with twice as many zeros behind the sound all frames that
    have a part of it are there, for the loudest one of which the logarithm is clipped, and none is mirrored at the end
    (`WhisperFeatureExtractor._torch_extract_fbank_features`).
    """

    def _get_hf_mm_inputs(self, mm_items: MultiModalDataItems, hf_kwargs: Mapping[str, object]) -> HFMultiModalInputs:
        inputs = super()._get_hf_mm_inputs(mm_items, hf_kwargs)
        audios = inputs.hf_data.get("audio")
        if not isinstance(audios, list) or not audios:
            return inputs
        extractor = self.info.get_feature_extractor()
        num_samples = max(len(audio) for audio in audios) + 2 * extractor.n_fft
        if len(audios) == 1 and num_samples >= extractor.n_samples:  # without so much silence its end is mirrored
            return inputs
        return inputs._replace(hf_kwargs={**inputs.hf_kwargs, "audio_kwargs": {"max_length": num_samples}})


@MULTIMODAL_REGISTRY.register_processor(
    ThinkerProcessor, info=Qwen2_5OmniThinkerProcessingInfo, dummy_inputs=Qwen2_5OmniThinkerDummyInputsBuilder
)
class Qwen2_5OmniThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if isinstance(self.language_model, Qwen2ForCausalLM):  # else this engine runs the encoders only
            use_rope_attention(self.language_model.model.layers, vllm_config)
