"""The tensors that travel between the stages of level 1, as NamedTuples.

A sequence of n tokens is cut into ceil(n / CHUNK) tiles of CHUNK rows. Tiles of all sequences lie
one after another: tile t of sequence s is number tile_base[s] + t, `tiles` of them in all. T counts
tokens of all sequences.
"""

from typing import NamedTuple

import torch

CHUNK = 16
HEAD_DIM = 128


class Workspace(NamedTuple):
    """What a forward pass leaves for the reverse recurrence; exp is of natural-log gates.

    With gc the running sum of the gate inside a chunk, gT its value at the chunk's last valid row,
    kn and qn the (normalised) keys and queries:

    kd       [H, tiles, 16, 128] fp32   kn * exp(gc)
    qd       [H, tiles, 16, 128] fp32   scale * qn * exp(gc)
    kr       [H, tiles, 16, 128] fp32   kn * exp(gT - gc)
    ki       [H, tiles, 16, 128] fp32   kn * exp(-gc)
    g_total  [H, tiles, 128]     fp32   exp(gT)
    inv      [H, tiles, 16, 16]  bf16   (I + diag(b) tril(kd ki^T, -1))^-1
    mqk      [H, tiles, 16, 16]  bf16   tril(qd ki^T)
    states   [H, tiles, 128 (V), 128 (K)] bf16   state on entering the chunk, V first

    Rows past a sequence's end in its last tile are read as 0, whatever they hold.
    """

    kd: torch.Tensor
    qd: torch.Tensor
    kr: torch.Tensor
    ki: torch.Tensor
    g_total: torch.Tensor
    inv: torch.Tensor
    mqk: torch.Tensor
    states: torch.Tensor


class RecurrenceGrads(NamedTuple):
    """What the reverse recurrence returns; the reference returns every tensor in its working dtype.

    dkd, dqd, dki, dkr  [H, tiles, 16, 128] fp32  0 in rows past a sequence's end
    dgT                 [H, tiles, 128]     fp32  with respect to gT in natural log
    dv                  [T, H, 128]         bf16
    dbeta               [H, tiles, 16]      fp32  with respect to b = sigmoid(beta), not the logit
    dinitial_state      [N, H, 128 (V), 128 (K)]  dtype of dfinal_state, fp32 without one
    """

    dkd: torch.Tensor
    dqd: torch.Tensor
    dki: torch.Tensor
    dkr: torch.Tensor
    dgT: torch.Tensor
    dv: torch.Tensor
    dbeta: torch.Tensor
    dinitial_state: torch.Tensor
