"""The command line of `omni-server bench` and scripts/bench_serving. Imports only the standard library, so
that `--help` works without any environment."""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from omni_server.client import DEFAULT_URL
from omni_server.command_line import Parser

_DESCRIPTION = """\
Load a server over HTTP with streamed requests, and measure what its callers would: time to first token (TTFT)
and to first audio (TTFA), gaps between arrivals of audio, seconds for which a player without a buffer would
have stalled (underrun), real-time factor (RTF: end-to-end time by duration of the audio), audio and requests
per second.

Every answer has an exact length, which is checked: a request fails if its status is not 200, if its stream
breaks, or if it has not as many text tokens or samples as it was asked for. Percentiles are of the requests
that did not fail.

With --workload images, the requests are for one image each: measured are the time to the first preview
(partial image), the time to the image, and images per second. A request fails if the answer is not one PNG of
the size that was asked for."""
_EPILOG = """\
workloads:
  W1  one sentence, about 60 prompt tokens; 64 text tokens and 250 codec tokens (5.0 s of speech) in answer
  W2  5.0 s of speech-like audio instead of the sentence, otherwise W1
  W3  2,500 prompt tokens; 900 text tokens and 3,500 codec tokens (70 s of speech) in answer
  images  a prompt of 20 words; an image of the model's default size, with one preview, in answer

examples:
  {program} --concurrency 1,4,16,64 --json w1.json
  {program} --concurrency 1,4 --plot w1.png --targets ttfa=0.25,0.30 --targets underrun=0,0
  {program} --workload W3 --concurrency 1,8,32
  {program} --request-rate 0.5,1,2 --num-requests 100
  {program} --server openai-text --base-url http://127.0.0.1:8000 --json plain.json
  {program} --modalities text --compare plain.json
  {program} --workload images --size 1024x1024 --steps 20 --concurrency 1,4 --json images.json

Exit code: 0, 1 if a request failed, 2 for a wrong command line, 130 after Ctrl-C."""


def fill(parser: argparse.ArgumentParser, program: str) -> None:
    """Adds the description, the examples (`program` is what to type), and all flags. Pass the parsed
    arguments to `check`."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG.format(program=program)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        default=DEFAULT_URL,
        help="URL of the server, with or without /v1 (default: %(default)s)",
    )
    server.add_argument(
        "--server",
        choices=("omni-server", "vllm-omni", "openai-text"),
        default="omni-server",
        help="kind of server, which decides how it is asked and how it streams: omni-server (also OpenAI's "
        "format; default), vllm-omni, openai-text (plain `vllm serve`, text only)",
    )
    server.add_argument(
        "--model", metavar="NAME", help="name of the model to ask (default: the first in /v1/models)"
    )
    server.add_argument(
        "--voice", metavar="NAME", help="voice of the speech (default: the first in /v1/models, else Chelsie)"
    )
    server.add_argument(
        "--speech-stage",
        metavar="NAME",
        default="talker",
        help="name of the stage of an omni-server that samples codec tokens (default: %(default)s)",
    )
    server.add_argument("--api-key", metavar="KEY", help="API key, sent as a bearer token")
    server.add_argument(
        "--timeout",
        metavar="S",
        type=_positive(float),
        default=600.0,
        help="seconds that one request may take (default: %(default)g)",
    )

    work = parser.add_argument_group("requests")
    work.add_argument(
        "--workload",
        choices=("W1", "W2", "W3", "images"),
        default="W1",
        help="workload, described below (default: W1)",
    )
    work.add_argument(
        "--modalities",
        choices=("text", "text,audio"),
        metavar="M",
        help="modalities of the answer: text, or text,audio (default)",
    )
    work.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=_positive(int),
        help="approximate number of text tokens in the prompt",
    )
    work.add_argument(
        "--audio-seconds", metavar="S", type=_not_negative(float), help="seconds of audio in the question"
    )
    work.add_argument(
        "--text-tokens", metavar="N", type=_positive(int), help="exact number of text tokens to ask for"
    )
    work.add_argument(
        "--codec-tokens",
        metavar="N",
        type=_positive(int),
        help="exact number of codec tokens to ask for; one second of speech has 50 with Qwen2.5-Omni, and 12.5 "
        "frames with Qwen3-Omni",
    )
    work.add_argument(
        "--samples-per-codec-token",
        metavar="N",
        type=_positive(int),
        help="samples of speech per codec token, at 24 kHz (default: 480, as with Qwen2.5-Omni; Qwen3-Omni: "
        "1920 per frame, with --sample-tolerance 555)",
    )
    work.add_argument(
        "--sample-tolerance",
        metavar="N",
        type=_not_negative(int),
        default=0,
        help="samples by which the audio may be longer or shorter than asked for (default: 0)",
    )
    work.add_argument(
        "--temperature",
        metavar="T",
        type=_not_negative(float),
        default=0.0,
        help="sampling temperature of the text (default: 0)",
    )
    work.add_argument(
        "--seed",
        metavar="N",
        type=_not_negative(int),
        help="seed of prompts and arrival times; a server may answer a repeated seed from its caches "
        "(default: random)",
    )

    images = parser.add_argument_group("requests of --workload images")
    images.add_argument(
        "--size", metavar="WxH", type=_size, help="size of the images in pixels (default: the model's)"
    )
    images.add_argument(
        "--steps", metavar="N", type=_positive(int), help="denoising steps (default: the pipeline's)"
    )
    images.add_argument(
        "--partial-images",
        metavar="N",
        type=_not_negative(int),
        help="previews to ask for; 0 for models without previews (default: 1)",
    )

    load = parser.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        type=_list_of(_positive(int)),
        metavar="C,C,...",
        help="closed loop, one level per value: this many clients, each of which sends its next request "
        "when the last one is answered (default: 1,4)",
    )
    how.add_argument(
        "--request-rate",
        type=_list_of(_positive(float)),
        metavar="R,R,...",
        help="open loop, one level per value: requests per second, arriving at random (Poisson)",
    )
    load.add_argument(
        "--requests-per-client",
        metavar="N",
        type=_positive(int),
        default=4,
        help="requests of each client in a closed loop (default: %(default)s)",
    )
    load.add_argument(
        "--num-requests",
        metavar="N",
        type=_positive(int),
        default=40,
        help="requests at each rate of an open loop (default: %(default)s)",
    )
    load.add_argument(
        "--warmup",
        metavar="N",
        type=_not_negative(int),
        default=1,
        help="requests before each level that are not measured (default: 1)",
    )

    output = parser.add_argument_group("results, in addition to the table")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all results, per request, as JSON")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw TTFA and underrun by load; needs the extra 'bench'",
    )
    output.add_argument(
        "--targets",
        type=_target,
        action="append",
        default=[],
        metavar="ttfa=S,S,...",
        help="targets to draw in the plot, one value per level; also underrun=S,S,...",
    )
    output.add_argument(
        "--compare", type=Path, metavar="FILE", help="print this run beside the JSON of an earlier one"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line of scripts/bench_serving. Exits with code 2 if the arguments are wrong or
    contradictory."""
    command = Parser(prog=sys.argv[0], allow_abbrev=False)
    fill(command, sys.argv[0])
    options, unknown = command.parse_known_args(arguments)
    if unknown:
        command.error(command.unrecognized(unknown))
    return check(command, options)


def check(command: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Fills in the derived values of `args`. Exits with code 2 if they contradict each other."""
    _check_images(command, args)
    if args.modalities is None:
        args.modalities = "text" if args.server == "openai-text" else "text,audio"
    if args.server == "openai-text" and args.modalities != "text":
        command.error("--server openai-text answers with text only")
    if args.modalities == "text":
        for name in ("codec_tokens", "plot"):
            if getattr(args, name):
                command.error(
                    f"--{name.replace('_', '-')} is about speech, which --modalities text does not ask for"
                )
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = [1, 4]
    levels = len(args.concurrency or args.request_rate)
    for name, values in args.targets:
        if len(values) != levels:
            command.error(f"--targets {name}: {len(values)} values for {levels} load levels")
    for file in (args.json, args.plot):
        if file is not None and not file.parent.is_dir():
            command.error(f"{file}: no such folder")
    return args


def _check_images(command: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Images have no flags of chats, and chats none of images."""
    of_chats = ("modalities", "audio_seconds", "text_tokens", "codec_tokens", "plot")
    of_images = ("size", "steps", "partial_images")
    is_images = args.workload == "images"
    for name in of_chats if is_images else of_images:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            command.error(f"{flag} is {'not ' if is_images else 'only '}for --workload images")
    if is_images:
        if args.server != "omni-server":
            command.error("--workload images needs --server omni-server")
        args.modalities = "image"


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    return _number(kind, "more than 0", lambda value: value > 0)


def _not_negative(kind: type[int] | type[float]) -> Callable[[str], float]:
    return _number(kind, "0 or more", lambda value: value >= 0)


def _number(
    kind: type[int] | type[float], bound: str, is_within: Callable[[float], bool]
) -> Callable[[str], float]:
    def convert(text: str) -> float:
        wanted = (
            f"expected {'an integer' if kind is int else 'a number'}, {bound}: {textwrap.shorten(text, 40)!r}"
        )
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(wanted) from error
        if not is_within(value) or value == float("inf"):
            raise argparse.ArgumentTypeError(wanted)
        return value

    return convert


def _list_of(convert: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [convert(item) for item in text.split(",")]


def _size(text: str) -> str:
    if re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", text) is None:
        raise argparse.ArgumentTypeError(
            f"expected WIDTHxHEIGHT, as in 1024x1024: {textwrap.shorten(text, 40)!r}"
        )
    return text


def _target(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    if name not in ("ttfa", "underrun"):
        raise argparse.ArgumentTypeError(
            f"expected ttfa=S,S,... or underrun=S,S,...: {textwrap.shorten(text, 40)!r}"
        )
    return name, _list_of(_not_negative(float))(values)
