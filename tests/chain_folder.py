"""A tiny folder of the family `chain`: a pipeline and a language model, both with random weights."""

from pathlib import Path

from tests.checkpoints.write import make_demo_checkpoint
from tests.toy_families.toy import make_checkpoint

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_chain_folder(folder: Path, *, pipeline: str = "sd15") -> Path:
    make_demo_checkpoint(folder, family="diffusers", pipeline=pipeline)
    make_checkpoint(folder / "thinker", "Qwen2ForCausalLM")
    (folder / "thinker" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
