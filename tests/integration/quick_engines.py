"""What the servers and engines of a test run need not do each by itself, because the process that they are
forked from has imported this module. It was most of the processor time of their starts and ends, and changes
no answer."""

import gc
import importlib

from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING

for _imported_late in (
    "compressed_tensors.compressors",
    "fastapi_offline",
    "omni_server.cli.main",
    "omni_server.cli.pipeline",
    "omni_server.engine.launcher",
    "stages.runtime.ar_runner_v1",
    "tests.quiet_configs",
    "transformers.tokenization_mistral_common",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.v1.attention.backends.cpu_attn",
):
    importlib.import_module(_imported_late)

# To find the class of one processor, transformers imports those of all models.
NUM_VIDEO_PROCESSORS = len(list(VIDEO_PROCESSOR_MAPPING.items()))

# An engine that ends looks for garbage among the million objects of the imports, and so copies their pages.
gc.unfreeze = lambda: None
