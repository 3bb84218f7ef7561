"""Float64 oracles of the stages of `chunk_kda` (level 2): the equations of `factors`, each from the
tensors that the stage is given, and no rounding in between.
"""

from typing import NamedTuple

import torch

from .factors import CHUNK, HEAD_DIM, Factors


class Scanned(NamedTuple):
    """o [B, T, H, 128 (V)], final [N, H, 128 (V), 128 (K)], and the state on entering each chunk,
    states [slots, H, 128 (V), 128 (K)]; all float64, NaN where nothing is to be written.
    """

    o: torch.Tensor
    final: torch.Tensor
    states: torch.Tensor


def scan(
    factors: Factors,
    B: int,
    T: int,
    initial: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Scanned:
    """The scan of B sequences of T tokens, or of the packed ones of cu_seqlens [N + 1] (B = 1; they
    may leave tokens over).  initial: [N, H, 128 (V), 128 (K)].
    """
    f = Factors(*(x.double() for x in factors))
    slots, H = f.w.shape[:2]
    if cu_seqlens is None:
        chunks = -(-T // CHUNK)
        walks = [(n, 0, T, n * chunks) for n in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        walks = [
            (0, first, last, first // CHUNK + n)
            for n, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
    o = f.w.new_full((B, T, H, HEAD_DIM), torch.nan)
    states = f.w.new_full((slots, H, HEAD_DIM, HEAD_DIM), torch.nan)
    final = f.w.new_zeros((len(walks), H, HEAD_DIM, HEAD_DIM))
    if initial is not None:
        final.copy_(initial)
    for n, (batch, first, last, slot) in enumerate(walks):
        S = final[n]  # [H, V, K]
        for token in range(first, last, CHUNK):
            rows = min(CHUNK, last - token)
            states[slot] = S
            St = S.transpose(1, 2)
            U = f.u[slot] - f.w[slot] @ St
            out = f.qd[slot] @ St + f.mqk[slot] @ U + f.qk[slot][..., None] * U
            o[batch, token : token + rows] = out[:, :rows].transpose(0, 1)
            S.mul_(f.eg[slot][:, None, :]).add_(U.transpose(1, 2) @ f.kr[slot])
            slot += 1
    return Scanned(o, final, states)


class Reversed(NamedTuple):
    """dinitial [N, H, 128 (V), 128 (K)], the gradient of the state on leaving each chunk, dstates
    [slots, H, 128 (V), 128 (K)], and dU [slots, H, 64, 128], 0 in rows past a sequence's end; all
    float64, NaN in slots that no chunk owns.
    """

    dinitial: torch.Tensor
    dstates: torch.Tensor
    dU: torch.Tensor


def reverse_scan(
    factors: Factors,
    do: torch.Tensor,
    dfinal: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Reversed:
    """The gradients that `scan` passes on: do [B, T, H, 128 (V)] of its o, dfinal of its final.  Rows
    of do that no sequence has may hold anything.
    """
    f, do = Factors(*(x.double() for x in factors)), do.double()
    slots, H = f.w.shape[:2]
    walks = _walks(*do.shape[:2], cu_seqlens)
    dstates = f.w.new_full((slots, H, HEAD_DIM, HEAD_DIM), torch.nan)
    dU = f.w.new_full((slots, H, CHUNK, HEAD_DIM), torch.nan)
    dinitial = f.w.new_zeros((len(walks), H, HEAD_DIM, HEAD_DIM))
    if dfinal is not None:
        dinitial.copy_(dfinal)
    for n, (batch, first, last, slot) in enumerate(walks):
        dS = dinitial[n]  # [H, V, K]
        for c in reversed(range(-(-(last - first) // CHUNK))):
            token, at = first + CHUNK * c, slot + c
            rows = do[batch, token : min(token + CHUNK, last)].transpose(0, 1)
            rows = torch.nn.functional.pad(rows, (0, 0, 0, CHUNK - rows.shape[1]))
            dstates[at] = dS
            dU[at] = f.mqk[at].mT @ rows + f.qk[at][..., None] * rows + f.kr[at] @ dS.mT
            dS.mul_(f.eg[at][:, None, :]).add_(rows.mT @ f.qd[at] - dU[at].mT @ f.w[at])
    return Reversed(dinitial, dstates, dU)


def _walks(B: int, T: int, cu_seqlens: torch.Tensor | None) -> list[tuple[int, int, int, int]]:
    """(batch row, first token, end, first slot) of each sequence."""
    if cu_seqlens is None:
        chunks = -(-T // CHUNK)
        return [(n, 0, T, n * chunks) for n in range(B)]
    bounds = cu_seqlens.tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    return [(0, first, last, first // CHUNK + n) for n, (first, last) in enumerate(pairs)]
