"""Level 2's public call, `chunk_kda`: its signature, and the validation that makes a `Problem`.

Every bad argument raises here, by name, before anything is launched.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch._subclasses.fake_tensor import is_fake

from . import autograd
from .api import INDEX_DTYPES, STATE_DTYPES, _capability
from .factors import HEAD_DIM
from .problem import Problem

BACKENDS = ("kernels", "reference")
CHUNK_SIZES = (32, 64)
_BF16 = (torch.bfloat16,)
_BF16_OR_FP32 = STATE_DTYPES


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str = "kernels",
    save_states: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over whole sequences, for training: FLA's call, on Hopper kernels.

    Per head, with decay exp(g) per key channel, step b per token and state S [K, V]:

        S <- diag(exp g) S;   S <- S + b k (v - S^T k)^T;   o = scale S^T q

    Inputs (B sequences of T tokens; packed ones lie one after another in B = 1):

    q, k, v        [B, T, H, 128] bf16. Read where they lie when the last stride is 1 and the others
                   are multiples of 16 bytes, as in a view of a fused projection; copied once
                   otherwise. As many value heads as key heads.
    g              [B, T, H, 128] bf16 or fp32, strides as for q: the natural logarithm of the
                   decay, any value <= 0; raw with `use_gate_in_kernel`.
    beta           [B, T, H] bf16 or fp32: b; logits with `use_beta_sigmoid_in_kernel`.
    scale          multiplies q; None is 128 ** -0.5.
    initial_state  [N, H, 128 (K), 128 (V)] fp32 or (unlike FLA) bf16, N the number of sequences;
                   None is 0.
    cu_seqlens     [N + 1] int32 or int64: offsets of packed sequences, from 0 to T, never
                   decreasing; an empty sequence passes its state on. On the GPU they are used
                   without a host synchronisation, so a CUDA graph may be replayed after they
                   changed, and offsets that are wrong give unspecified numbers but never leave the
                   tensors; rows past the last offset are unspecified too. On the host they are
                   checked, then copied, which waits for the stream. None: N = B.
    cu_seqlens_cpu the same on the host: checked, not needed.

    Options:

    output_final_state          also return the state after each sequence
    use_qk_l2norm_in_kernel     q and k / sqrt(sum of squares + 1e-6) first
    use_beta_sigmoid_in_kernel  b = sigmoid(beta); 2 sigmoid(beta) with `allow_neg_eigval`, which
                                needs it
    use_gate_in_kernel          with `lower_bound` (any number < 0), whatever `safe_gate` is:
                                g = lower_bound sigmoid(exp(A_log) (g + dt_bias)); without:
                                g = -exp(A_log) softplus(g + dt_bias)
    A_log, dt_bias              [H], and [H * 128] or [H, 128], fp32 or bf16; None is 0, but the
                                gate without `lower_bound` needs A_log. Read by
                                `use_gate_in_kernel` only
    safe_gate                   promises a bounded gate: asks for `lower_bound`, changes nothing.
                                Every gate is exact without it
    state_v_first               states are [N, H, 128 (V), 128 (K)]; `transpose_state_layout` is its
                                old name
    backend                     "kernels" needs a Hopper GPU (compute capability 9.0); "reference"
                                computes in float64 with torch, slowly, anywhere
    save_states                 keep every chunk's state and X for the backward (see below)
    chunk_size (32, 64), use_graph, disable_recompute   accepted, and change no result: chunks have
                                64 tokens, graphs always work

    `return_intermediate_states`, `cp_context` and `max_num_seqs` are not served.

    Returns (o, final_state): o [B, T, H, 128] bf16; final_state fp32 in the layout of the flag,
    None when not asked for. Freshly allocated and bitwise repeatable.

    Gradients, in the dtypes of the inputs, reach q, k, v, g, beta, A_log, dt_bias and
    initial_state; they can't be differentiated again. Saved for them are the inputs as they were
    passed (no copies), and by backend "kernels" 768 bytes per token and head in bf16: the state
    entering each chunk (512) and X, what that state lacks of v (256). With
    save_states=False these are 0 bytes, and the backward runs the forward's stages again; gradients
    have the same bits either way. Nothing is saved under no_grad. The backward has its own kernels,
    and works in CUDA graphs as the forward does.

    Raises TypeError (types, dtypes) or ValueError (shapes, devices, values, what isn't served)
    whose message starts with the argument's name, before any launch.
    """
    if return_intermediate_states or cp_context is not None or max_num_seqs is not None:
        _refuse(
            return_intermediate_states=return_intermediate_states or None,
            cp_context=cp_context,
            max_num_seqs=max_num_seqs,
        )
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size={chunk_size!r} is not one of {CHUNK_SIZES}")
    if disable_recompute and not save_states:
        raise ValueError("save_states=False contradicts disable_recompute=True")
    if transpose_state_layout is not None:
        if state_v_first:
            raise ValueError("transpose_state_layout is the old name of state_v_first: give one")
        warnings.warn(
            "transpose_state_layout is now called state_v_first", DeprecationWarning, stacklevel=2
        )
        state_v_first = transpose_state_layout
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel=True")

    shape = _tensor("q", q, (None, None, None, HEAD_DIM), _BF16)
    B, T, H, _ = shape
    device = _supported(q, backend)
    if not _agree(shape, device, k, v, g, beta):
        _tensor("k", k, shape, _BF16, device)
        _tensor("v", v, shape, _BF16, device)
        _tensor("g", g, shape, _BF16_OR_FP32, device)
        _tensor("beta", beta, shape[:3], _BF16_OR_FP32, device)
    gate, A_log, dt_bias = _gate(
        use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias, H, device
    )
    N = B
    if cu_seqlens is not None:
        N, cu_seqlens = _packed(cu_seqlens, cu_seqlens_cpu, B, T, device)
    elif cu_seqlens_cpu is not None:
        raise ValueError("cu_seqlens_cpu is given without cu_seqlens")
    if initial_state is not None:
        states = (N, H, HEAD_DIM, HEAD_DIM)
        _tensor("initial_state", initial_state, states, STATE_DTYPES, device)

    problem = Problem(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        HEAD_DIM**-0.5 if scale is None else _number("scale", scale),
        gate,
        float(lower_bound) if gate == "safe" else 0.0,
        bool(use_qk_l2norm_in_kernel),
        bool(use_beta_sigmoid_in_kernel),
        2.0 if allow_neg_eigval else 1.0,
        bool(state_v_first),
        bool(output_final_state),
        bool(save_states),
    )
    return autograd.chunk_kda(problem, backend)


def _refuse(**unserved):
    for name, value in unserved.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not served by kda_cute.chunk_kda")


def _gate(use_gate, safe_gate, lower_bound, A_log, dt_bias, H, device):
    """(kind of gates.GATES, A_log or None, dt_bias or None)."""
    if not use_gate:
        return "log", None, None
    if lower_bound is not None:
        if not -math.inf < _number("lower_bound", lower_bound) < 0:
            raise ValueError(f"lower_bound={lower_bound!r} must be negative and finite")
    elif safe_gate:
        raise ValueError("lower_bound is missing: safe_gate=True needs it")
    elif A_log is None:
        raise ValueError("A_log is missing: use_gate_in_kernel=True needs it without a lower_bound")
    if A_log is not None:
        _tensor("A_log", A_log, (H,), _BF16_OR_FP32, device)
    if dt_bias is not None:
        by_head = isinstance(dt_bias, torch.Tensor) and dt_bias.ndim == 2
        expected = (H, HEAD_DIM) if by_head else (H * HEAD_DIM,)
        _tensor("dt_bias", dt_bias, expected, _BF16_OR_FP32, device)
    return "softplus" if lower_bound is None else "safe", A_log, dt_bias


def _packed(cu_seqlens, cu_seqlens_cpu, B, T, device):
    """(N, cu_seqlens contiguous on `device`); values are checked where they are on the host."""
    entries = _tensor("cu_seqlens", cu_seqlens, (None,), INDEX_DTYPES)[0]
    if B != 1:
        raise ValueError(f"cu_seqlens packs sequences into a batch of 1, but q has {B}")
    if entries == 0:
        raise ValueError("cu_seqlens is empty; it holds one more entry than there are sequences")
    if entries == 1 and T > 0:
        raise ValueError(f"cu_seqlens holds no sequence, but q has {T} tokens")
    on_host = cu_seqlens.device.type == "cpu"
    if not on_host and cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, q is on {device}")
    if on_host:
        _check_offsets("cu_seqlens", cu_seqlens, T)
    if cu_seqlens_cpu is not None:
        _tensor("cu_seqlens_cpu", cu_seqlens_cpu, (entries,), INDEX_DTYPES, torch.device("cpu"))
        _check_offsets("cu_seqlens_cpu", cu_seqlens_cpu, T)
    if on_host and device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("cu_seqlens is on the host: put it on the GPU to capture a CUDA graph")
        cu_seqlens = cu_seqlens.to(device)
    return entries - 1, cu_seqlens.contiguous()


def _check_offsets(name, x, T):
    if torch.compiler.is_compiling() or is_fake(x):
        return
    offsets = x.tolist()
    if any(b < a for a, b in zip(offsets, offsets[1:], strict=False)):
        raise ValueError(f"{name} decreases: {offsets}")
    if offsets[0] != 0 or offsets[-1] != T:
        raise ValueError(
            f"{name} must run from 0 to the {T} tokens of q, not {offsets[0]} to {offsets[-1]}"
        )


def _tensor(name, x, shape, dtypes, device=None) -> torch.Size:
    """Check that x is a tensor of this shape (None: any size), dtype, device; returns its shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {' or '.join(map(str, dtypes))}")
    found = x.shape
    if found != shape and (
        len(found) != len(shape)
        or any(a is not None and a != b for a, b in zip(shape, found, strict=True))
    ):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {list(found)}; expected [{wanted}]")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, q is on {device}")
    return found


def _agree(shape, device, k, v, g, beta) -> bool:
    """Whether all four are as `_tensor` wants them, in a fraction of its time; False if it can't be
    told.
    """
    try:
        return (
            k.dtype is torch.bfloat16 is v.dtype
            and g.dtype in _BF16_OR_FP32
            and beta.dtype in _BF16_OR_FP32
            and k.shape == shape == v.shape
            and g.shape == shape
            and beta.shape == shape[:3]
            and k.device == device == v.device
            and g.device == device == beta.device
            and isinstance(k, torch.Tensor)
            and isinstance(v, torch.Tensor)
            and isinstance(g, torch.Tensor)
            and isinstance(beta, torch.Tensor)
        )
    except AttributeError:
        return False


def _number(name, x) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name} must be a number, not {type(x).__name__}")
    return float(x)


def _supported(q, backend) -> torch.device:
    """q's device, when the backend runs there."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {BACKENDS}")
    device = q.device
    if backend == "reference" or device.type == "meta":
        return device
    way_out = "backend='reference' runs anywhere, slowly"
    if device.type != "cuda":
        raise ValueError(f"q is on {device}; the kernels run on Hopper GPUs. {way_out}")
    if torch.compiler.is_compiling() or (not autograd.plain(q) and is_fake(q)):
        return device
    found = _capability(device.index)
    if found != (9, 0):
        raise ValueError(
            f"q is on a GPU of compute capability {found[0]}.{found[1]}; the kernels need 9.0"
            f" (Hopper). {way_out}"
        )
    return device
