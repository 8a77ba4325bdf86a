"""What is printed once the server answers: where it is, what it serves, and an example that works as it stands."""

import json
import shlex

from omni_server.audio.formats import AUDIO_FORMATS
from omni_server.command_line import program
from omni_server.types import ModelInfo

_SAVE_AUDIO = (
    "import base64, json, sys; a = json.load(sys.stdin)['choices'][0]['message']['audio']; "
    "open('answer.wav', 'wb').write(base64.b64decode(a['data'])); print('answer.wav:', a['transcript'])"
)
_PRINT_TEXT = "import json, sys; print(json.load(sys.stdin)['choices'][0]['message']['content'])"


def ready_message(address: str, model: ModelInfo) -> str:
    """`address` is where the server is reached: a URL, or `unix:` and the path of a socket."""
    lines = [
        "",
        "Ready.",
        f"  URL      {address if _socket_path(address) else f'{address}/v1'}",
        f"  Model    {', '.join((model.name, *model.aliases))}",
    ]
    if _socket_path(address) is None:
        lines.insert(3, f"  Page     {address}/")
    if model.voices:
        lines.append(f"  Voices   {', '.join(_marked_default(model))}")
        lines.append(f"  Formats  {', '.join(AUDIO_FORMATS)}")
    else:
        lines.append("  Voices   none: this deployment answers in text only")
    lines += ["", "Try it:", "", curl_example(address, model), ""]
    if _socket_path(address) is None:
        lines += [f"Or talk to it: {program()} chat --url {address}", ""]
    return "\n".join(lines)


def curl_example(address: str, model: ModelInfo) -> str:
    """A shell command that asks the server one question and, where it speaks, writes answer.wav."""
    body: dict[str, object] = {"model": model.name}
    if model.voices:
        body |= {"modalities": ["text", "audio"], "audio": {"voice": model.default_voice, "format": "wav"}}
    body["messages"] = [{"role": "user", "content": "Hello, who are you?"}]
    path = _socket_path(address)
    reach = f"--unix-socket {shlex.quote(path)} http://localhost" if path else address
    program = _SAVE_AUDIO if model.voices else _PRINT_TEXT
    return (
        f"curl -sS {reach}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))} \\\n"
        f'  | python3 -c "{program}"'
    )


def _socket_path(address: str) -> str | None:
    """The path of a Unix socket, or None if `address` is a URL."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None


def _marked_default(model: ModelInfo) -> list[str]:
    return [f"{voice} (default)" if voice == model.default_voice else voice for voice in model.voices]
