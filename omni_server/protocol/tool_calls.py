"""How tool calls are written in the text of a model: the "hermes" way, which Qwen's models are trained on.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Several calls follow each other; what the model has to say comes before them.
"""

import json

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"


def call_head(name: str) -> str:
    """All of a call up to its arguments."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


CALL_TAIL = f"}}\n{CALL_END}"
"""All of a call behind its arguments."""
