"""The command line of scripts/bench_serving. Imports only the standard library, so that `--help` works
without any environment."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from omni_server.cli.command_line import Parser, count, positive_count, seconds_or_zero

_DESCRIPTION = """\
Load a server over HTTP with streamed requests, and measure what its callers would: time to first token (TTFT)
and to first audio (TTFA), gaps between arrivals of audio, seconds for which a player without a buffer would
have stalled (underrun), whether each answer plays without a stall from its first byte on (continuous
playback), real-time factor (RTF: end-to-end time by duration of the audio), audio and requests per second.

Every answer has an exact length, which is checked: a request fails if its status is not 200, if its stream
breaks, or if it has not as many text tokens or samples as it was asked for. Percentiles are of the requests
that did not fail.

With --workload images, the requests are for one image each: measured are the time to the first preview
(partial image), the time to the image, and images per second. A request fails if the answer is not one PNG of
the size that was asked for."""
_EPILOG = """\
workloads:
  W1  one sentence, about 60 prompt tokens; 64 text tokens and 250 codec tokens (5.0 s of speech) in answer
  W2  5.0 s of audio instead of the sentence, otherwise W1
  W3  2,500 prompt tokens; 900 text tokens and 3,500 codec tokens (70 s of speech) in answer
  tts  a text of 6 to 36 words; POST /v1/audio/speech answers with 25 to 150 frames of 1,920 samples, 7 s of
      speech on average (with --codec-tokens N, exactly N frames and --prompt-tokens words). Other servers end
      it by themselves: --sample-tolerance says how far from that
  images  a prompt of 20 words; an image of the model's default size, with one preview, in answer

examples:
  {program} --concurrency 1,4,16,64 --json w1.json
  {program} --workload W3 --concurrency 1,8,32
  {program} --request-rate 0.5,1,2 --num-requests 100
  {program} --server openai-text --base-url http://127.0.0.1:8000 --json plain.json
  {program} --workload tts --request-rate 10,20 --num-requests 600 --json tts.json
  {program} --workload images --size 1024x1024 --steps 20 --concurrency 1,4 --json images.json

Exit code: 0, 1 if a request failed, 2 for a wrong command line, 130 after Ctrl-C."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Exits with code 2 if the arguments are wrong or contradict each other."""
    parser = Parser(
        prog=sys.argv[0],
        description=_DESCRIPTION,
        epilog=_EPILOG.format(program=sys.argv[0]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        default="http://127.0.0.1:8091",
        help="URL of the server, with or without /v1 (default: %(default)s); the variable OMNI_SERVER_API_KEY "
        "may have its key",
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
    _add_number(server, "--timeout", "seconds that one request may take (default: %(default)s)", default=600)

    work = parser.add_argument_group("requests")
    work.add_argument(
        "--workload",
        choices=("W1", "W2", "W3", "tts", "images"),
        default="W1",
        help="workload, described below (default: W1)",
    )
    work.add_argument(
        "--modalities",
        choices=("text", "text,audio"),
        metavar="M",
        help="modalities of the answer: text, or text,audio (default)",
    )
    _add_number(work, "--prompt-tokens", "approximate number of text tokens in the prompt")
    work.add_argument(
        "--audio-seconds", metavar="S", type=seconds_or_zero, help="seconds of audio in the question"
    )
    _add_number(work, "--text-tokens", "exact number of text tokens to ask for")
    _add_number(
        work,
        "--codec-tokens",
        "exact number of codec tokens to ask for; one second of speech has 50 with Qwen2.5-Omni, and 12.5 "
        "frames with Qwen3-Omni",
    )
    _add_number(
        work,
        "--samples-per-codec-token",
        "samples of speech per codec token, at 24 kHz (default: 480, as with Qwen2.5-Omni; Qwen3-Omni: "
        "1920 per frame, with --sample-tolerance 555)",
    )
    _add_number(
        work,
        "--sample-tolerance",
        "samples by which the audio may be longer or shorter than asked for (default: 0)",
        count,
        0,
    )
    _add_number(
        work,
        "--seed",
        "seed of prompts and arrival times; a server may answer a repeated seed from its caches "
        "(default: random)",
        count,
    )

    images = parser.add_argument_group("requests of --workload images")
    images.add_argument(
        "--size", metavar="WxH", type=_size, help="size of the images in pixels (default: the model's)"
    )
    _add_number(images, "--steps", "denoising steps (default: the pipeline's)")
    _add_number(
        images, "--partial-images", "previews to ask for; 0 for models without previews (default: 1)", count
    )

    load = parser.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency",
        type=_list_of(positive_count),
        metavar="C,C,...",
        help="closed loop, one level per value: this many clients, each of which sends its next request "
        "when the last one is answered (default: 1,4)",
    )
    how.add_argument(
        "--request-rate",
        type=_list_of(_rate),
        metavar="R,R,...",
        help="open loop, one level per value: requests per second, arriving at random (Poisson)",
    )
    _add_number(
        load,
        "--requests-per-client",
        "requests of each client in a closed loop (default: %(default)s)",
        default=4,
    )
    _add_number(
        load, "--num-requests", "requests at each rate of an open loop (default: %(default)s)", default=40
    )
    _add_number(load, "--warmup", "requests before each level that are not measured (default: 1)", count, 1)

    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results, per request, as JSON")

    args = parser.parse_args(arguments)
    _check(parser, args)
    return args


def _check(parser: Parser, args: argparse.Namespace) -> None:
    """Fills in what depends on other flags."""
    of_images = ("size", "steps", "partial_images")
    of_chats = ("modalities", "audio_seconds", "text_tokens")
    others = {"images": (*of_chats, "codec_tokens"), "tts": (*of_chats, *of_images)}
    for name in others.get(args.workload, of_images):
        if getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is not for --workload {args.workload}")
    if args.workload == "tts":
        if args.server == "openai-text":
            parser.error("--workload tts needs a server that speaks")
        args.modalities = "audio"
    if args.workload == "images":
        if args.server != "omni-server":
            parser.error("--workload images needs --server omni-server")
        args.modalities = "image"
    if args.modalities is None:
        args.modalities = "text" if args.server == "openai-text" else "text,audio"
    if args.server == "openai-text" and args.modalities != "text":
        parser.error("--server openai-text answers with text only")
    if args.modalities == "text":
        if args.codec_tokens is not None:
            parser.error("--codec-tokens is about speech, which --modalities text does not ask for")
        args.codec_tokens = 0
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = [1, 4]
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"{args.json}: no such folder")


def _add_number(
    group: argparse._ArgumentGroup,
    flag: str,
    help_text: str,
    convert: Callable[[str], int] = positive_count,
    default: int | None = None,
) -> None:
    group.add_argument(flag, metavar="N", type=convert, default=default, help=help_text)


def _list_of(convert: Callable[[str], float]) -> Callable[[str], list[float]]:
    return lambda text: [convert(item) for item in text.split(",")]


def _rate(text: str) -> float:
    if re.fullmatch(r"\d+(\.\d+)?", text) is None or float(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of requests per second")
    return float(text)


def _size(text: str) -> str:
    if re.fullmatch(r"[1-9][0-9]*x[1-9][0-9]*", text) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not WIDTHxHEIGHT, as in 1024x1024")
    return text
