"""Reference KDA in torch: the token-by-token oracle, the chunk form, the reverse recurrence.

Per head, with a state S [V, K] (value channel first everywhere in level 1), a decay alpha = exp(g)
per key channel and a step b per token:

    S <- S diag(alpha);   S <- S + b (v - S k) k^T;   o = scale S q

Tokens are packed, [T, H, 128]: one sequence, `num_seqs` equal ones, or those that cu_seqlens
bounds; a length may be 0. The functions run on any device, in the dtype of their inputs or the one
asked for; pass dtype=torch.float64 for an oracle. `token_recurrence` and `chunk_forward` take any
head dimensions and are differentiable by autograd; so is `scan_forward`, the fast one.
`chunk_kda` is the whole of level 2, batched and with its dtypes and state layouts, on top of it.

The stages around the recurrence, `prepare` and `finish`, are in prepare.py, the gates in gates.py;
all are re-exported here.
"""

from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from .gates import gate, l2norm
from .prepare import Gradients, Prepared, finish, prepare
from .problem import Problem
from .varlen import from_tiles, sequence_lengths, tile_map, to_tiles
from .workspace import CHUNK, RecurrenceGrads, Workspace

__all__ = [
    "Gradients",
    "Prepared",
    "RecurrenceGrads",
    "Workspace",
    "bwd_recurrence",
    "chunk_forward",
    "chunk_kda",
    "finish",
    "gate",
    "prepare",
    "scan_forward",
    "token_recurrence",
]

_gate = gate  # `gate` is also the name of an argument below


class _Activated(NamedTuple):
    """Per-token operands after activation: q (scaled), k, g (log space) [T, H, K]; v [T, H, V];
    b [T, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    b: torch.Tensor


def token_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: one token after another, nothing rearranged.

    q, k, g [T, H, K]; v [T, H, V]; beta [T, H]. Options, all by keyword:

    scale=None            multiplies q; None is K ** -0.5
    initial_state=None    [N, H, V, K], None is 0
    use_qk_l2norm=True    q, k / sqrt(sum of squares + 1e-6) first
    use_beta_sigmoid=True beta holds logits
    beta_scale=1.0        multiplies b, after the sigmoid if any
    gate="log", A_log=None [H], dt_bias=None [H, K], lower_bound=-5.0   see gates.gate
    cu_seqlens=None [N+1], num_seqs=None   see varlen.sequence_lengths
    dtype=None            working dtype; None is that of the inputs

    Returns o [T, H, V] and the final state [N, H, V, K], both in the working dtype.
    Raises ValueError or TypeError for a cu_seqlens, num_seqs or gate that does not fit.
    """

    def run(x: _Activated, state):
        outs = [x.v[:, :0]]
        for q_t, k_t, v_t, g_t, b_t in zip(*(t.unbind(1) for t in x), strict=True):
            state = state * g_t.exp()[..., None, :]
            u = b_t[..., None] * (v_t - (state @ k_t[..., None])[..., 0])
            state = state + u[..., None] * k_t[..., None, :]
            outs.append((state @ q_t[..., None])[..., 0][:, None])
        return torch.cat(outs, 1), state

    return _each_sequence(run, q, k, v, g, beta, **options)


def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    chunk_size: int = CHUNK,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_recurrence` through the chunk form, chunk_size tokens at a time; exact for any gate.

    With gc the running sum of g inside a chunk, every pair i >= j is weighted by exp(gc_i - gc_j),
    taken from the difference itself, so no exponent is ever positive (gates are <= 0). Temporaries
    of [H, chunk_size, chunk_size, K] per sequence.
    Options, results and errors as `token_recurrence`; ValueError for chunk_size < 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: at least 1 expected, got {chunk_size}")

    def run(x: _Activated, state):
        outs = [x.v[:, :0]]
        for start in range(0, x.q.shape[1], chunk_size):
            chunk = (t[:, start : start + chunk_size].transpose(1, 2) for t in x)
            o, state = _chunk_step(*chunk, state)
            outs.append(o.transpose(1, 2))
        return torch.cat(outs, 1), state

    return _each_sequence(run, q, k, v, g, beta, **options)


def _each_sequence(
    run,
    q,
    k,
    v,
    g,
    beta,
    *,
    scale=None,
    initial_state=None,
    use_qk_l2norm=True,
    use_beta_sigmoid=True,
    beta_scale=1.0,
    gate="log",
    A_log=None,
    dt_bias=None,
    lower_bound=-5.0,
    cu_seqlens=None,
    num_seqs=None,
    dtype=None,
):
    """Activate, then apply run(activated [n, L, H, ..], state [n, H, V, K]) -> (o, state) to every
    sequence: equal lengths in one call, others one by one. Returns o [T, H, V] and the states.
    """
    lengths = sequence_lengths(cu_seqlens, num_seqs, q.shape[0])
    q, k, v, g, beta, A_log, dt_bias = (
        x if x is None or dtype is None else x.to(dtype) for x in (q, k, v, g, beta, A_log, dt_bias)
    )
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    b = beta_scale * (torch.sigmoid(beta) if use_beta_sigmoid else beta)
    x = _Activated(q, k, v, _gate(g, A_log, dt_bias, lower_bound, gate), b)

    if initial_state is None:
        state = v.new_zeros(len(lengths), v.shape[1], v.shape[2], k.shape[2])
    else:
        state = initial_state.to(v.dtype)
    if q.shape[0] == 0:
        return v, state
    if len(set(lengths)) == 1:
        o, state = run(_Activated(*(t.unflatten(0, (len(lengths), -1)) for t in x)), state)
        return o.flatten(0, 1), state
    parts = zip(*(t.split(lengths) for t in x), state, strict=True)
    outs = [run(_Activated(*(t[None] for t in p[:-1])), p[-1][None]) for p in parts]
    return torch.cat([o[0] for o, _ in outs]), torch.cat([s for _, s in outs])


def _chunk_step(q, k, v, g, b, state):
    """One chunk of c tokens: q, k, g [n, H, c, K], v [n, H, c, V], b [n, H, c],
    state [n, H, V, K]."""
    c = q.shape[2]
    gc = g.cumsum(2)
    future = torch.ones(c, c, dtype=torch.bool, device=q.device).triu(1)
    exponent = gc[..., :, None, :] - gc[..., None, :, :]
    decayed_k = exponent.masked_fill(future[..., None], float("-inf")).exp() * k[..., None, :, :]
    kk = (k[..., :, None, :] * decayed_k).sum(-1)  # exp(gc_i - gc_j) k_i . k_j, j <= i
    qk = (q[..., :, None, :] * decayed_k).sum(-1)
    from_start = gc.exp()
    vc = b[..., None] * (v - (k * from_start) @ state.mT)
    L = b[..., None] * kk.tril(-1)
    U = torch.linalg.solve_triangular(L, vc, upper=False, unitriangular=True)  # (I + L)^-1 vc
    o = (q * from_start) @ state.mT + qk @ U
    to_end = (gc[..., -1:, :] - gc).exp()
    state = state * from_start[..., -1:, :] + U.mT @ (k * to_end)
    return o, state


# ---------------------------------------------------------------- all sequences together
SCAN_CHUNK = 64
_GROUP_ROWS = 1 << 17  # token-heads in flight: 128 MiB for each [rows, 128] float64 temporary


def scan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    use_beta_sigmoid: bool = True,
    beta_scale: float = 1.0,
    gate: str = "log",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    cu_seqlens: torch.Tensor | None = None,
    num_seqs: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_recurrence` for long or many sequences: chunks of 64, all sequences step together.

    Pairs inside a chunk are weighted by products of two exponentials that are both <= 1, so it is
    exact for any gate.  Only a group of chunks is held at a time, also by autograd, which keeps the
    state between groups and computes the rest again.
    Options, results and errors as `token_recurrence`.
    """
    T, H, K = k.shape
    V, dtype = v.shape[-1], dtype or v.dtype
    lengths = sequence_lengths(cu_seqlens, num_seqs, T)
    tiles = tile_map(lengths, SCAN_CHUNK, q.device)
    scale = K**-0.5 if scale is None else scale
    A_log, dt_bias = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))

    def group(valid, state, active, *raw):
        """Chunks [n, 64, H, ..] of several steps, active[i] sequences in step i; longest first."""
        mask = valid[..., None]
        q, k, v, g = (torch.where(mask[..., None], x, 0.0).to(dtype) for x in raw[:-1])
        beta = torch.where(mask, raw[-1], 0.0).to(dtype)
        if use_qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        g = torch.where(mask[..., None], _gate(g, A_log, dt_bias, lower_bound, gate), 0.0)
        b = beta_scale * (torch.sigmoid(beta) if use_beta_sigmoid else beta)
        x = (t.transpose(1, 2) for t in (q * scale, k, v, g, b))
        return _scan_chunks(_Activated(*x), state, active)

    counts = [end - start for start, end in zip(tiles.offsets, tiles.offsets[1:], strict=False)]
    order = sorted(range(len(lengths)), key=counts.__getitem__, reverse=True)
    seqs = torch.tensor(order, dtype=torch.int64, device=q.device)
    active = [sum(c > step for c in counts) for step in range(max(counts, default=0))]
    rows = torch.cat([seqs[:0], *(tiles.first_tile[seqs[:n]] + i for i, n in enumerate(active))])

    if initial_state is None:
        state = v.new_zeros(len(lengths), H, V, K, dtype=dtype)
    else:
        state = initial_state.to(dtype)[seqs]
    groups = _groups(active, _GROUP_ROWS // (SCAN_CHUNK * max(H, 1)))
    sizes = [sum(steps) for steps in groups]
    outs = [v.new_zeros(0, SCAN_CHUNK, H, V, dtype=dtype)]
    chunks = (tiles.valid[rows], *(x[tiles.token[rows]] for x in (q, k, v, g, beta)))
    for steps, valid, *raw in zip(groups, *(x.split(sizes) for x in chunks), strict=True):
        o, state = checkpoint(
            group, valid, state, steps, *raw, use_reentrant=False, preserve_rng_state=False
        )
        outs.append(o)
    o = torch.cat(outs)[rows.argsort()].flatten(0, 1)[tiles.slot]
    return o, state[seqs.argsort()]


def _groups(active: list[int], limit: int) -> list[list[int]]:
    """Cut `active` into runs that sum to at most `limit`, or are one entry."""
    groups: list[list[int]] = []
    for n in active:
        if groups and sum(groups[-1]) + n <= limit:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups


def _scan_chunks(x: _Activated, state, active: list[int]):
    """Consecutive steps: x [n, H, c, ..] with active[i] chunks in step i, state [N, H, V, K].

    Sequence j has its chunk at place j of every step that it takes part in. Returns
    o [n, c, H, V] and the state after the last step.
    """
    q, k, v, g, b = x
    g_next = torch.cat([g[:, :, 1:], torch.zeros_like(g[:, :, :1])], 2)  # of the token after
    from_start, to_end = g.cumsum(2).exp(), _cumsum_from_end(g_next).exp()
    L = b[..., None] * _decayed_products(k, k, g, g_next).tril(-1)
    wu = b[..., None] * torch.cat([k * from_start, v], -1)
    wu = torch.linalg.solve_triangular(L, wu, upper=False, unitriangular=True)  # (I + L)^-1
    w, u = wu.split([k.shape[-1], v.shape[-1]], -1)

    states, Us, done = [], [], []
    steps = (t.split(active) for t in (w, u, k * to_end, from_start[:, :, -1:]))
    for w_t, u_t, kr, eg in zip(*steps, strict=True):
        state, ended = state.split([len(w_t), len(state) - len(w_t)])
        done.append(ended)
        U = u_t - w_t @ state.mT
        states.append(state)
        Us.append(U)
        state = state * eg + U.mT @ kr
    o = (q * from_start) @ torch.cat(states).mT + _decayed_products(q, k, g, g_next) @ torch.cat(Us)
    return o.transpose(1, 2), torch.cat([state, *reversed(done)])


def _decayed_products(x, k, g, g_next):
    """sum_d x_i k_j exp(g_{j+1} + .. + g_i) for j <= i, 0 above; [..., c, K] to [..., c, c], c a
    power of 2.

    Blocks double from single tokens, where the exponent is 0. Between the halves of a block it is
    cut at the upper half's first token; both parts are sums of gates, never a difference of sums.
    """
    out = (x * k).sum(-1)[..., None, None]
    for s in (2**n for n in range(k.shape[-2].bit_length() - 1)):

        def half(t, upper, size=s):
            return t.unflatten(-2, (-1, 2, size))[..., upper, :, :]

        after_anchor = torch.cat(
            [torch.zeros_like(half(g, 1)[..., :1, :]), half(g, 1)[..., 1:, :]], -2
        )
        left = half(x, 1) * after_anchor.cumsum(-2).exp()
        right = half(k, 0) * _cumsum_from_end(half(g_next, 0)).exp()
        lower, upper = out.unflatten(-3, (-1, 2)).unbind(-3)
        top = torch.cat([lower, torch.zeros_like(lower)], -1)
        out = torch.cat([top, torch.cat([left @ right.mT, upper], -1)], -2)
    return out[..., 0, :, :]


def _cumsum_from_end(x):
    return x.flip(-2).cumsum(-2).flip(-2)


def chunk_kda(p: Problem, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Level 2 by `scan_forward`: o [B, T, H, V] and the final state in p's layout, both in `dtype`.

    Differentiable with respect to every tensor of p; reads cu_seqlens on the host.
    """
    state = p.initial_state
    if state is not None and not p.state_v_first:
        state = state.mT
    o, state = scan_forward(
        *(x.flatten(0, 1) for x in (p.q, p.k, p.v, p.g, p.beta)),
        scale=p.scale,
        initial_state=state,
        use_qk_l2norm=p.l2norm,
        use_beta_sigmoid=p.beta_sigmoid,
        beta_scale=p.beta_scale,
        gate=p.gate,
        A_log=p.A_log,
        dt_bias=None if p.dt_bias is None else p.dt_bias.reshape(p.q.shape[2:]),
        lower_bound=p.lower_bound,
        cu_seqlens=p.cu_seqlens,
        num_seqs=p.num_seqs,
        dtype=dtype,
    )
    return o.view(p.v.shape), state if p.state_v_first else state.mT


@torch.no_grad()
def bwd_recurrence(
    do: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    workspace: Workspace,
    dfinal_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_seqs: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> RecurrenceGrads:
    """Reverse recurrence over a prepared workspace, what the level-1 kernel computes, in `dtype`.

    do, v [T, H, 128]; beta [T, H] logits; workspace as in workspace.Workspace, of any float dtypes;
    dfinal_state [N, H, V, K] or None for 0. Chunks are walked from last to first with dS, the
    gradient of the state that leaves the chunk; sequences step together, each while it has chunks
    left. Rows past a sequence's end are read as 0, even where they hold NaN, and written as 0; an
    empty sequence returns its dfinal_state.
    Returns RecurrenceGrads with every tensor in `dtype`. ValueError or TypeError if the tile count
    or cu_seqlens does not fit.
    """
    T, H = do.shape[:2]
    tiles = tile_map(sequence_lengths(cu_seqlens, num_seqs, T), CHUNK, do.device)
    if workspace.kd.shape[:2] != (H, tiles.offsets[-1]):
        raise ValueError(
            f"workspace: [H, tiles] = {list(workspace.kd.shape[:2])}, but the sequences need"
            f" {[H, tiles.offsets[-1]]}"
        )
    K, V = workspace.kd.shape[-1], v.shape[-1]
    N = len(tiles.lengths)
    do_t, v_t = to_tiles(do, tiles, dtype), to_tiles(v, tiles, dtype)
    b_t = torch.where(tiles.valid, to_tiles(beta, tiles, dtype).sigmoid(), 0.0)

    out = RecurrenceGrads(
        *(
            torch.zeros(H, tiles.offsets[-1], CHUNK, K, dtype=dtype, device=do.device)
            for _ in range(4)
        ),
        dgT=torch.zeros(H, tiles.offsets[-1], K, dtype=dtype, device=do.device),
        dv=torch.zeros_like(v_t),
        dbeta=torch.zeros_like(b_t),
        dinitial_state=torch.zeros(N, H, V, K, dtype=dtype, device=do.device),
    )
    if dfinal_state is not None:
        out.dinitial_state.copy_(dfinal_state)

    counts = [end - start for start, end in zip(tiles.offsets, tiles.offsets[1:], strict=False)]
    order = sorted(range(N), key=counts.__getitem__, reverse=True)
    seqs = torch.tensor(order, dtype=torch.int64, device=do.device)
    active = 0
    for step in reversed(range(max(counts, default=0))):
        while active < N and counts[order[active]] > step:
            active += 1
        rows = tiles.first_tile[seqs[:active]] + step
        dS = out.dinitial_state[seqs[:active]].transpose(0, 1)
        chunk = _backward_chunk(
            do_t[:, rows], v_t[:, rows], b_t[:, rows], workspace, rows, tiles.valid[rows], dS
        )
        for name, value in chunk._asdict().items():
            if name == "dinitial_state":
                out.dinitial_state[seqs[:active]] = value.transpose(0, 1)
            else:
                getattr(out, name)[:, rows] = value
    return out._replace(dv=from_tiles(out.dv, tiles))


def _backward_chunk(do, v, b, workspace: Workspace, rows, valid, dS) -> RecurrenceGrads:
    """One chunk of several sequences, tiles `rows`: every tensor [H, n, ...], dS [H, n, V, K].

    dv comes back as tiles and dinitial_state as the gradient of the state on entering the chunk.
    """

    def load(x, masked=True):
        x = x[:, rows].to(do.dtype)
        return torch.where(valid[..., None], x, 0.0) if masked else x

    kd, qd, kr, ki, inv, mqk = (
        load(getattr(workspace, n)) for n in ("kd", "qd", "kr", "ki", "inv", "mqk")
    )
    exp_gT, S = load(workspace.g_total, masked=False), load(workspace.states, masked=False)
    b = b[..., None]

    kk = (kd @ ki.mT).tril(-1)  # tril(kd ki^T, -1)
    v_minus = v - kd @ S.mT  # v - kd S
    U = inv @ (b * v_minus)  # INV vc
    dU = mqk.mT @ do + kr @ dS.mT  # Mqk^T do + kr dS
    dvc = inv.mT @ dU  # INV^T dU
    dv = b * dvc
    dM = (do @ U.mT).tril()  # tril(do U^T)
    dL = -(dvc @ U.mT).tril(-1)  # -tril(dvc U^T, -1)
    dLb = dL * b
    dkr = U @ dS  # U dS^T
    return RecurrenceGrads(
        dkd=-dv @ S + dLb @ ki,  # -(b dvc) S^T + dLb ki
        dqd=do @ S + dM @ ki,  # do S^T + dM ki
        dki=dM.mT @ qd + dLb.mT @ kd,  # dM^T qd + dLb^T kd
        dkr=dkr,
        dgT=exp_gT * (dS * S).sum(-2) + (dkr * kr).sum(-2),
        dv=dv,
        dbeta=(dvc * v_minus).sum(-1) + (dL * kk).sum(-1),
        # exp(gT) dS + qd^T do - kd^T (b dvc)
        dinitial_state=exp_gT[..., None, :] * dS + do.mT @ qd - dv.mT @ kd,
    )
