"""Kernels compile for the GPU they are made for, also where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("compile_kernels.py")

KERNELS = {
    "route_plan_kernel",
    "routed_attention_hopper_kernel",
    "routed_attention_hopper_query_kernel",
    "routed_attention_hopper_key_kernel",
    "routed_attention_fwd_kernel",
    "routed_attention_bwd_query_kernel",
    "routed_attention_bwd_key_kernel",
    "linear_attention_hopper_sum_kernel",
    "linear_attention_hopper_fwd_kernel",
    "linear_attention_hopper_bwd_query_kernel",
    "linear_attention_sum_kernel",
    "linear_attention_scan_kernel",
    "linear_attention_fwd_kernel",
    "linear_attention_bwd_query_kernel",
    "linear_attention_bwd_sum_kernel",
    "linear_attention_bwd_key_kernel",
    "linear_attention_bwd_decay_kernel",
    "linear_attention_hopper_key_kernel",
    "split_weights_kernel",
    "controller_logits_kernel",
    "route_tokens_kernel",
    "rotate_kernel",
    "route_merge_fwd_kernel",
    "routed_decode_kernel",
    "depth_add_kernel",
    "depth_attend_fwd_kernel",
    "depth_attend_bwd_kernel",
    "depth_join_fwd_kernel",
    "depth_join_bwd_kernel",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are run there")
def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # the compiler of Triton 3.9 asks for it
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert set(run.stdout.split()) == KERNELS
