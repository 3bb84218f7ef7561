"""The stages around level 1: `prepare` builds the workspace, `finish` the inputs' gradients.

Per head, gc the running sum of the log-space gate inside a chunk of 16 tokens, gT its last value:

    kd = kn exp(gc)   qd = scale qn exp(gc)   ki = kn exp(-gc)   kr = kn exp(gT - gc)
    INV = (I + diag(b) tril(kd ki^T, -1))^-1                     Mqk = tril(qd ki^T)
    U = INV diag(b) (v - kd S)                                   S' = diag(exp gT) S + kr^T U

ki needs exp(-gc) in fp32, so a chunk's gates may sum to no less than -80.
"""

from typing import NamedTuple

import torch

from .gates import gate as gate_forward
from .gates import gate_backward, l2norm, l2norm_backward
from .varlen import TileMap, from_tiles, sequence_lengths, tile_map, to_tiles
from .workspace import CHUNK, RecurrenceGrads, Workspace

MAX_CHUNK_GATE = 80.0
_GATE_SLACK = 1e-3  # rounding of a sum of 16 gates that reaches the bound exactly


class Prepared(NamedTuple):
    """A workspace, the final state [N, H, V, K], and what `finish` needs: inputs and options."""

    workspace: Workspace
    final_state: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    scale: float
    use_qk_l2norm: bool
    gate: str
    lower_bound: float
    tiles: TileMap

    def gate_sums(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """gc [H, tiles, 16, K] from the raw gates; past a sequence's end it stays at gT."""
        params = (None if x is None else x.to(dtype) for x in (self.A_log, self.dt_bias))
        g = gate_forward(self.g.to(dtype), *params, self.lower_bound, self.gate)
        return to_tiles(g, self.tiles).cumsum(2)


class Gradients(NamedTuple):
    """Gradients of the inputs of `prepare`, and what a test needs to judge the sums among them.

    dq, dk, dg [T, H, K] (dg with respect to the gate as given), dv [T, H, V], dbeta [T, H] (logit),
    dA_log [H] and ddt_bias [H, K] (None for an argument that was not given), dinitial_state [N, H,
    V, K]. db [T, H] is the gradient with respect to b = sigmoid(beta); dA_log_terms [H] and
    ddt_bias_terms [H, K] are the 2-norms of the terms that dA_log and ddt_bias sum.
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dA_log: torch.Tensor | None
    ddt_bias: torch.Tensor | None
    dinitial_state: torch.Tensor
    db: torch.Tensor
    dA_log_terms: torch.Tensor | None
    ddt_bias_terms: torch.Tensor | None


@torch.no_grad()
def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    gate: str = "log",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    num_seqs: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Prepared:
    """Forward pass to the workspace that the reverse recurrence needs; any device, any dtypes.

    q, k, g [T, H, K]; v [T, H, V]; beta [T, H], always logits; initial_state [N, H, V, K] or None;
    the gate arguments as `gates.gate` takes them. scale None is K ** -0.5.
    dtype float32 computes in fp32 and stores the workspace's own dtypes (inv, mqk and states
    rounded to bf16, the state carried in fp32; torch's matmul precision must be left at "highest");
    float64 keeps everything unrounded. Tile rows past a sequence's end are 0.
    Raises ValueError naming g when the gates of some chunk sum to less than -80 (or are NaN), and
    what varlen.sequence_lengths raises. Waits for the device once, to check g.
    """
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype: float32 or float64 expected, got {dtype}")
    T, H, K = k.shape
    tiles = tile_map(sequence_lengths(cu_seqlens, num_seqs, T), CHUNK, q.device)
    scale = K**-0.5 if scale is None else scale
    small = dtype if dtype == torch.float64 else torch.bfloat16

    params = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))
    gc = to_tiles(gate_forward(g.to(dtype), *params, lower_bound, gate), tiles).cumsum(2)
    gT = gc[:, :, -1:]
    in_domain = (gT.abs() <= MAX_CHUNK_GATE + _GATE_SLACK).all()
    if not in_domain:
        raise ValueError(
            f"g: the gates of a chunk of {CHUNK} tokens sum to {gT.min().item():.6g};"
            f" level 1 takes sums within +-{MAX_CHUNK_GATE:g} only"
        )

    kn = to_tiles(k, tiles, dtype)
    kn = l2norm(kn) if use_qk_l2norm else kn
    ki, kr = kn * (-gc).exp(), kn * (gT - gc).exp()
    exp_gc = gc.exp_()
    kd = kn.mul_(exp_gc)
    qn = to_tiles(q, tiles, dtype)
    qd = (l2norm(qn) if use_qk_l2norm else qn).mul_(scale).mul_(exp_gc)
    g_total = exp_gc[:, :, -1].clone()
    del gc, gT, exp_gc, kn, qn

    b = torch.where(tiles.valid, to_tiles(beta, tiles, dtype).sigmoid(), 0.0)
    L = (kd @ ki.mT).tril(-1) * b[..., None]
    eye = torch.eye(CHUNK, dtype=dtype, device=q.device).expand_as(L)
    inv = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)  # (I + L)^-1
    inv = torch.where(tiles.valid[..., None], inv, 0.0)
    mqk = (qd @ ki.mT).tril()

    w = inv @ (b[..., None] * kd)
    u = inv @ (b[..., None] * to_tiles(v, tiles, dtype))
    states, final_state = _scan_states(kr, w, u, g_total, initial_state, tiles, small)
    fields = (kd, qd, kr, ki, g_total, inv.to(small), mqk.to(small), states)
    # The triangular solver's result is column-major on a GPU.
    workspace = Workspace(*(x.contiguous() for x in fields))
    return Prepared(
        workspace,
        final_state,
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        scale,
        use_qk_l2norm,
        gate,
        lower_bound,
        tiles,
    )


def _scan_states(kr, w, u, g_total, initial_state, tiles: TileMap, states_dtype):
    """States on entering each chunk [H, tiles, V, K] and after the last [N, H, V, K].

    w = INV diag(b) kd and u = INV diag(b) v [H, tiles, 16, 128], so U = u - w S. Sequences step
    together, longest first, so that those still running are a prefix.
    """
    H, count, _, K = kr.shape
    V, N = u.shape[-1], len(tiles.lengths)
    counts = [end - start for start, end in zip(tiles.offsets, tiles.offsets[1:], strict=False)]
    order = sorted(range(N), key=counts.__getitem__, reverse=True)
    seqs = torch.tensor(order, dtype=torch.int64, device=kr.device)
    S = kr.new_zeros(H, N, V, K)
    if initial_state is not None:
        S.copy_(initial_state[seqs].transpose(0, 1))
    states = torch.empty(H, count, V, K, dtype=states_dtype, device=kr.device)
    first_tile, active = tiles.first_tile[seqs], N
    for step in range(max(counts, default=0)):
        while counts[order[active - 1]] <= step:
            active -= 1
        rows = first_tile[:active] + step
        S_in = S[:, :active]
        states[:, rows] = S_in.to(states_dtype)
        U = u[:, rows] - w[:, rows] @ S_in.mT
        S[:, :active] = g_total[:, rows][..., None, :] * S_in + U.mT @ kr[:, rows]
    final_state = torch.empty(N, H, V, K, dtype=kr.dtype, device=kr.device)
    final_state[seqs] = S.transpose(0, 1)
    return states, final_state


@torch.no_grad()
def finish(
    grads: RecurrenceGrads, prepared: Prepared, dtype: torch.dtype = torch.float64
) -> Gradients:
    """Gradients of the inputs of `prepare` from those of its workspace: the stage after level 1.

    The gate's gradient multiplies each tile's gradient by the very tile that the recurrence read:
    the terms of a pair of tokens then cancel where the gate does not matter to it. gc comes from
    the inputs again. Computes and returns in `dtype`, shapes as in Gradients. Rows past a
    sequence's end don't count.
    """
    p, tiles = prepared, prepared.tiles

    def params():
        return (None if x is None else x.to(dtype) for x in (p.A_log, p.dt_bias))

    gc = p.gate_sums(dtype)
    dkd, dqd, dki, dkr, dgT = (x.to(dtype) for x in grads[:5])
    kd, qd, kr, ki = (x.to(dtype) for x in p.workspace[:4])
    dgc = kd * dkd + qd * dqd - ki * dki - kr * dkr
    dgc = torch.where(tiles.valid[..., None], dgc, 0.0)
    dg = from_tiles(dgc.flip(2).cumsum(2).flip(2) + dgT[:, :, None], tiles)
    del kd, qd, kr, ki, dgc

    dq = from_tiles(p.scale * gc.exp() * dqd, tiles)
    dk = gc.exp() * dkd + (-gc).exp() * dki + (gc[:, :, -1:] - gc).exp() * dkr
    dk = from_tiles(dk, tiles)
    if p.use_qk_l2norm:
        dq, dk = l2norm_backward(dq, p.q.to(dtype)), l2norm_backward(dk, p.k.to(dtype))

    dg, dA_terms = gate_backward(dg, p.g.to(dtype), *params(), p.lower_bound, p.gate)
    has_A = p.A_log is not None and dA_terms is not None
    has_dt = p.dt_bias is not None and dA_terms is not None
    db = from_tiles(grads.dbeta.to(dtype), tiles)
    b = p.beta.to(dtype).sigmoid()
    return Gradients(
        dq=dq,
        dk=dk,
        dv=grads.dv.to(dtype),
        dg=dg,
        dbeta=db * b * (1 - b),
        dA_log=dA_terms.sum((0, 2)) if has_A else None,
        ddt_bias=dg.sum(0) if has_dt else None,
        dinitial_state=grads.dinitial_state.to(dtype),
        db=db,
        dA_log_terms=dA_terms.square().sum((0, 2)).sqrt() if has_A else None,
        ddt_bias_terms=dg.square().sum(0).sqrt() if has_dt else None,
    )
