"""Public signatures and their validation: every bad argument raises here, by name, before anything
is launched.
"""

from __future__ import annotations

import functools

import torch

from . import ops
from .layouts import variants
from .workspace import CHUNK, HEAD_DIM, RecurrenceGrads, Workspace

STATE_DTYPES = (torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def bwd_recurrence(
    do: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    workspace: Workspace,
    dfinal_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_seqs: int | None = None,
    *,
    precision: str = "tf32",
    layout: str = "default",
) -> RecurrenceGrads:
    """Gradients of the chunked KDA recurrence, by one fused reverse walk over a prepared workspace
    (chunks of 16 tokens).

    do, v         [T, H, 128] bf16: upstream gradient of the output, values.  Copied once when not contiguous.
    beta          [T, H] bf16 or fp32: logits; the sigmoid is applied inside.
    workspace     what `kda_cute.prepare` makes; shapes in `Workspace`; rows past a sequence's end read as 0.
    dfinal_state  [N, H, 128 (V), 128 (K)] bf16 or fp32: gradient of the final state; None is 0.
    cu_seqlens    [N + 1] int32 or int64: offsets of packed sequences, 0 .. T, not decreasing.  On the GPU its values are
                  used without a host synchronisation, and offsets that contradict `workspace` give unspecified numbers
                  but never leave the tensors.  On the host it is checked, then copied, which waits for the stream.  None: `num_seqs` (default 1)
                  sequences of equal length.
    precision     "tf32" (operands keep 10 mantissa bits) or "bf16" (7; faster).  Accumulation and dS are fp32.
    layout        name of a shared-memory plan, see `kda_cute.layouts.variants`.

    Returns `RecurrenceGrads`, freshly allocated: dkd, dqd, dki, dkr, dgT, dbeta in fp32 (dgT in
    natural log, dbeta with respect to sigmoid(beta)), dv in bf16, dinitial_state in the dtype of
    dfinal_state or fp32.  Bitwise repeatable.

    Domain: |gT| <= 80 in a chunk (`prepare` checks it).  Needs a Hopper GPU;
    `kda_cute.reference.bwd_recurrence` is the same function in torch.  Raises TypeError (types,
    dtypes) or ValueError (shapes, devices, values), naming the argument.
    """
    sequences, cu_seqlens = _validate(
        do, v, beta, workspace, dfinal_state, cu_seqlens, num_seqs, precision, layout
    )
    out = torch.ops.kda_cute.bwd_recurrence(
        do, v, beta, *workspace, dfinal_state, cu_seqlens, sequences, precision, layout
    )
    return RecurrenceGrads(*out)


def _validate(do, v, beta, workspace, dfinal_state, cu_seqlens, num_seqs, precision, layout):
    """Raise on the first bad argument; returns the number of sequences and cu_seqlens on do's
    device.
    """
    tokens = _tensor("do", do, (None, None, HEAD_DIM), (torch.bfloat16,))
    T, H = do.shape[:2]
    device = _supported("do", do)
    _tensor("v", v, tokens, (torch.bfloat16,), device)
    _tensor("beta", beta, (T, H), (torch.bfloat16, torch.float32), device)
    _aligned("do", do)
    _aligned("v", v)
    tiles = _validate_workspace(workspace, H, device)
    if precision not in variants.precisions("bwd_recurrence"):
        raise ValueError(
            f"precision={precision!r} is not one of {variants.precisions('bwd_recurrence')}"
        )
    if layout not in variants.names("bwd_recurrence"):
        raise ValueError(f"layout={layout!r} is not one of {variants.names('bwd_recurrence')}")
    if num_seqs is not None and (
        isinstance(num_seqs, bool) or not isinstance(num_seqs, int | torch.SymInt)
    ):
        raise TypeError(f"num_seqs must be an int, not {type(num_seqs).__name__}")
    if cu_seqlens is None:
        N, expected = _equal_sequences(num_seqs, T)
        if tiles != expected:
            raise ValueError(
                f"workspace holds {tiles} tiles, but {N} sequences of {T // max(N, 1)} tokens are {expected}"
            )
    else:
        N, cu_seqlens = _packed_sequences(cu_seqlens, num_seqs, T, tiles, device)
    if dfinal_state is not None:
        _tensor("dfinal_state", dfinal_state, (N, H, HEAD_DIM, HEAD_DIM), STATE_DTYPES, device)
        _aligned("dfinal_state", dfinal_state)
    return N, cu_seqlens


def _validate_workspace(workspace, H, device) -> int:
    if not isinstance(workspace, Workspace):
        raise TypeError(f"workspace must be a kda_cute.Workspace, not {type(workspace).__name__}")
    wide = _tensor(
        "workspace.kd", workspace.kd, (H, None, CHUNK, HEAD_DIM), (torch.float32,), device
    )
    tiles = wide[1]
    for name in ("qd", "kr", "ki"):
        _tensor(f"workspace.{name}", getattr(workspace, name), wide, (torch.float32,), device)
    _tensor("workspace.g_total", workspace.g_total, (H, tiles, HEAD_DIM), (torch.float32,), device)
    for name in ("inv", "mqk"):
        _tensor(
            f"workspace.{name}",
            getattr(workspace, name),
            (H, tiles, CHUNK, CHUNK),
            (torch.bfloat16,),
            device,
        )
    _tensor(
        "workspace.states",
        workspace.states,
        (H, tiles, HEAD_DIM, HEAD_DIM),
        (torch.bfloat16,),
        device,
    )
    for name, tensor in zip(Workspace._fields, workspace, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(
                f"workspace.{name} must be contiguous; its strides are {tensor.stride()}"
            )
        _aligned(f"workspace.{name}", tensor)
    return tiles


def _equal_sequences(num_seqs, T) -> tuple[int, int]:
    """(N, tiles) of num_seqs equal sequences of T tokens together."""
    N = 1 if num_seqs is None else num_seqs
    if N < 0:
        raise ValueError(f"num_seqs={N} is negative")
    if (N == 0 and T != 0) or (N > 0 and T % N != 0):
        raise ValueError(f"num_seqs={N} equal sequences can't hold the {T} tokens of do")
    return N, N * -(-(T // max(N, 1)) // CHUNK)


def _packed_sequences(cu_seqlens, num_seqs, T, tiles, device):
    """(N, cu_seqlens on device); checks values only where they are on the host."""
    entries = _tensor("cu_seqlens", cu_seqlens, (None,), INDEX_DTYPES)[0]
    if entries == 0:
        raise ValueError("cu_seqlens is empty; it holds one more entry than there are sequences")
    N = entries - 1
    if num_seqs is not None and num_seqs != N:
        raise ValueError(f"num_seqs={num_seqs} contradicts cu_seqlens, which has {N} sequences")
    if cu_seqlens.device.type == "cpu":
        offsets = cu_seqlens.tolist()
        lengths = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
        if any(n < 0 for n in lengths):
            raise ValueError(f"cu_seqlens decreases: {offsets}")
        if offsets[0] != 0 or offsets[-1] != T:
            raise ValueError(
                f"cu_seqlens must run from 0 to the {T} tokens of do, not {offsets[0]} to {offsets[-1]}"
            )
        expected = sum(-(-n // CHUNK) for n in lengths)
        if tiles != expected:
            raise ValueError(f"workspace holds {tiles} tiles, but cu_seqlens describes {expected}")
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError("cu_seqlens is on the host: put it on the GPU to capture a CUDA graph")
        return N, cu_seqlens.to(device)
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, do is on {device}")
    if not -(-T // CHUNK) <= tiles <= (T + (CHUNK - 1) * min(N, T)) // CHUNK:
        raise ValueError(
            f"workspace holds {tiles} tiles, which {N} sequences of {T} tokens together can't have"
        )
    return N, cu_seqlens


def _tensor(name, x, shape, dtypes, device=None) -> tuple[int, ...]:
    """Check that x is a tensor of this shape (None: any size), dtype and device; returns its shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {' or '.join(map(str, dtypes))}")
    found = tuple(x.shape)
    if len(found) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name} has shape {list(found)}; expected [{wanted}]")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, do is on {device}")
    return found


def _aligned(name, x):
    """Check that x starts at a multiple of 16 bytes, as the copy engine needs."""
    if not isinstance(x, torch._subclasses.FakeTensor) and x.device.type != "meta":
        if x.data_ptr() % 16:
            raise ValueError(f"{name} starts at an address that is not a multiple of 16 bytes")


def _supported(name, x) -> torch.device:
    """x's device, when the kernels can run there."""
    if x.device.type == "meta" or isinstance(x, torch._subclasses.FakeTensor):
        return x.device
    if x.device.type != "cuda":
        raise ValueError(
            f"{name} is on {x.device}; the kernels run on CUDA devices. kda_cute.reference.bwd_recurrence runs anywhere"
        )
    found = _capability(x.device.index)
    if found != (9, 0):
        raise ValueError(
            f"{name} is on a GPU of compute capability {found[0]}.{found[1]}; the kernels need 9.0 (Hopper)"
        )
    return x.device


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


assert ops  # registers torch.ops.kda_cute
