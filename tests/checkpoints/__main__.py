"""Write a Qwen2.5-Omni, Qwen3-Omni or Qwen3-TTS checkpoint, a language model with a Qwen3-TTS checkpoint (in
OUT/llm and OUT/speech), or a Diffusers pipeline, with random weights, which answers any request with
nonsense; or one without weights, optionally of the genuine sizes, for `omni-server serve --load-format
dummy`."""

import argparse
import os
import shlex
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--family",
        default="qwen2_5_omni",
        help="qwen2_5_omni, qwen3_omni, qwen3_tts, spoken_llm or diffusers (default: qwen2_5_omni)",
    )
    parser.add_argument(
        "--size",
        default="tiny",
        help="tiny, wide (of qwen3_tts: tiny-0.6b), or a genuine size: 7b and 3b are Qwen2.5-Omni-7B and "
        "-3B, 30b is Qwen3-Omni-30B-A3B-Instruct, 1.7b and 0.6b are Qwen3-TTS, qwen-image is Qwen-Image "
        "(default: tiny)",
    )
    parser.add_argument(
        "--weights",
        choices=("random", "dummy"),
        default="random",
        help="random: write random weights (default); dummy: write none, the engines make random ones; "
        "genuine sizes: always dummy",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of all weights and voices (default: 0)")
    parser.add_argument(
        "--vocabulary",
        choices=("small", "full"),
        help="small: packed token ids (default); full: the genuine token ids, 14 times larger on disk "
        "(genuine sizes: always)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="precision of the language models (default: float32; genuine sizes: bfloat16)",
    )
    parser.add_argument(
        "--pipeline",
        help="of --family diffusers: qwen-image (default), qwen-image-edit, sd15, sd3 or flux; of qwen3_tts: "
        "custom_voice (default), voice_design or base; of spoken_llm: text (default) or vision",
    )
    args = parser.parse_args()

    # Nothing here comes from a hub; read when transformers is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    start = time.perf_counter()
    import torch
    import transformers

    from omni_server.cli.command_line import program
    from omni_server.errors import ConfigError
    from tests.checkpoints.write import FAMILIES, make_demo_checkpoint

    torch.set_num_threads(1)  # the matrices are small, and more threads would wait for each other
    # It warns of ids beyond the codec vocabulary; they are text ids and correct.
    transformers.logging.set_verbosity_error()
    try:
        out = make_demo_checkpoint(
            args.out,
            family=args.family,
            size=args.size,
            weights=args.weights,
            seed=args.seed,
            vocabulary=args.vocabulary,
            dtype=args.dtype,
            pipeline=args.pipeline,
        )
    except ConfigError as error:
        sys.exit(f"make_demo_checkpoint: {error}")
    parameters = FAMILIES[args.family].num_parameters(out)
    megabytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    seconds = time.perf_counter() - start
    print(f"{out}: {megabytes:.1f} MB, {parameters / 1e6:.2f} million parameters, in {seconds:.1f} s")
    if args.weights == "dummy":
        print(f"there are no weights in it: {program()} serve {shlex.quote(str(out))} --load-format dummy")


if __name__ == "__main__":
    main()
