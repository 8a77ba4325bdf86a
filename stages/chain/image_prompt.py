"""The prompt of the pipeline, of what the text model has written."""

END_OF_THINKING = "</think>"
"""As Qwen's and DeepSeek's models write it. What precedes it is not meant for the reader."""


def image_prompt(text: str) -> str:
    """Implements `omni_server.edge.ImagePromptFunction`: the text behind the model's reasoning."""
    return text.rpartition(END_OF_THINKING)[2].strip()
