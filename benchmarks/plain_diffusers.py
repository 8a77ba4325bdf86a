#!/usr/bin/env python3
"""Measure a pipeline in Diffusers itself, without a server, as scripts/measure_images does: loaded as a stage
config says, images one by one and in batches. Writes a JSON file."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.serving.workload import WORKLOADS, make_turn
from omni_server.config.load import load_stage_config
from stages.diffusers.loading import load_pipeline
from stages.diffusers.options import DiffusersStage


def main() -> None:
    args = _parsed()
    config = load_stage_config(args.stage_config)
    stage = config.stages["image"]
    assert isinstance(stage, DiffusersStage)
    device = torch.device("cuda", 0) if config.platform == "cuda" else torch.device("cpu")
    began = time.monotonic()
    pipe = load_pipeline(
        args.model, stage, stage.compute_dtype(config.platform), device, random_weights=args.dummy
    )
    pipe.set_progress_bar_config(disable=True)
    print(f"loaded after {time.monotonic() - began:.1f} s", flush=True)
    results = []
    for size in args.sizes:
        for batch in args.batches:
            result = {"size": size, "batch": batch} | _measured(pipe, device, size, batch, args)
            print(result, flush=True)
            results.append(result)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of the pipeline")
    parser.add_argument("out", metavar="OUT", type=Path, help="JSON file to write")
    parser.add_argument("--stage-config", type=Path, required=True, help="its file")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--sizes", type=lambda text: text.split(","), required=True, metavar="WxH,...")
    parser.add_argument(
        "--batches",
        type=lambda text: [int(number) for number in text.split(",")],
        required=True,
        metavar="N,...",
        help="images per call",
    )
    parser.add_argument("--steps", type=int, required=True, help="denoising steps")
    parser.add_argument("--calls", type=int, default=3, help="calls that count, for each (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    return parser.parse_args()


def _measured(
    pipe: Any, device: torch.device, size: str, batch: int, args: argparse.Namespace
) -> dict[str, float | str]:
    """Returns seconds per image and per step, both medians."""
    width, height = map(int, size.split("x"))
    image_s, step_s = [], []
    try:
        for call in range(args.calls + 1):
            prompts = [_prompt(args.seed, call * batch + index) for index in range(batch)]
            ends: list[float] = []
            began = _now(device)
            pipe(
                prompts,
                width=width,
                height=height,
                num_inference_steps=args.steps,
                generator=[torch.Generator().manual_seed(index) for index in range(batch)],
                output_type="pil",
                callback_on_step_end=_note_ends(ends, device),
            )
            if call == 0:
                continue  # kernels are chosen, and compiled, in the first one
            image_s.append((_now(device) - began) / batch)
            step_s.extend(np.diff(ends))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"failure": "out of memory"}
    return {"image_s": float(np.median(image_s)), "step_s": float(np.median(step_s))}


def _prompt(seed: int, index: int) -> str:
    """As `scripts/bench_serving --workload images` makes them."""
    return make_turn(WORKLOADS["images"], np.random.default_rng([seed, 0, index])).text


def _note_ends(ends: list[float], device: torch.device) -> Any:
    def note(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        ends.append(_now(device))
        return tensors

    return note


def _now(device: torch.device) -> float:
    """When all that was computed so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


if __name__ == "__main__":
    main()
