"""How tool calls are written in a model's text: the "hermes" format, which Qwen's models are trained on.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Several calls follow each other, after any prose.
"""

import json

CALL_BEGIN = "<tool_call>"
CALL_END = "</tool_call>"


def call_head(name: str) -> str:
    """Returns a call up to its arguments."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


CALL_TAIL = f"}}\n{CALL_END}"
"""The rest of a call after its arguments."""
