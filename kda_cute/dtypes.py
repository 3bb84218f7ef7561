"""Dtypes, and None for a tensor that isn't there, as the configurations of kernels name them."""

import torch

NAMES = {torch.bfloat16: "bf16", torch.float32: "f32", None: "none"}
