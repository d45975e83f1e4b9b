"""Where the time of routed attention goes: GPU time of each kernel, forward and backward.

    python benchmarks/profile_routed.py --length 16384 --batch 2 --mix 25/25/50 --json profile.json

Forward and backward are profiled apart. Times are sums over kernels, so gaps between launches are
not in them.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from meta_attention.bench.data import Mix, OpShape, make_heads
from meta_attention.bench.machine import describe_machine
from meta_attention.bench.op_bench import routed_rows

WARM_UP, RUNS = 3, 10


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel in one call, the longest first."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    # torch 2.11 warns of cycles, of which there is but one, unless all events are kept
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(RUNS):
            call()
        torch.cuda.synchronize()
    times = {
        event.key: event.device_time_total / RUNS
        for event in recorded.key_averages()
        if event.device_time_total > 0
    }
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--mix", default="25/25/50", help="percent full/local/linear")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a profile needs a GPU that torch can see")

    device = torch.device("cuda", torch.cuda.current_device())
    mix = Mix(*(int(percent) for percent in options.mix.split("/")))
    shape = OpShape(options.batch, options.length)
    data = make_heads(shape, dtype=torch.bfloat16, device=device, seed=0)
    weights = mix.weights(mix.draw(shape.B, shape.T, seed=0, device=device))

    def forward() -> torch.Tensor:
        return routed_rows(*data.heads, weights, shape.window)

    with torch.no_grad():
        forward_us = kernel_times(forward)
    rows = forward()
    backward_us = kernel_times(
        lambda: torch.autograd.grad(rows, data.heads, data.upstream, retain_graph=True)
    )
    for name, times in (("forward", forward_us), ("backward", backward_us)):
        print(f"{name}, {mix}, {shape.to_dict()}: {sum(times.values()):.0f} us")
        for kernel, microseconds in times.items():
            print(f"  {microseconds:8.0f}  {kernel[:90]}")
    if options.json:
        result = {
            "machine": describe_machine(device, commit=None),
            "shape": shape.to_dict(),
            "mix": str(mix),
            "forward_us": forward_us,
            "backward_us": backward_us,
        }
        options.json.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
