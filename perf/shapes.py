"""The named shapes of the benchmarks, and what a perfect kernel must move and multiply on them.

Level 1 is `bwd_recurrence`, with tiles of 16 tokens; level 2 is `chunk_kda`, with chunks of 64.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kda_cute.factors import CHUNK as LONG_CHUNK
from kda_cute.factors import HEAD_DIM, ROW_BYTES, record_rows
from kda_cute.workspace import CHUNK

SMS = 132  # of an H200: more CTAs than that take turns
# Bytes per second, read + written, that a device-to-device copy reaches on an H200: floors are stated against it.
COPY_RATE = 4.26e12
# Floating-point operations per second that large matrix products reach there, by operands.
MATRIX_RATE = {"bf16": 800e12, "tf32": 440e12}
# Calls of fewer tokens times heads are short, and noisy: they are repeated more often.
FULL_WORK, MOST_REPEATS = 1 << 19, 8


@dataclass(frozen=True)
class Shape:
    """A batch: sequence lengths and heads.  Equal lengths are passed as num_seqs, others as
    cu_seqlens.
    """

    name: str
    lengths: tuple[int, ...]
    H: int

    @property
    def T(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def N(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows, tails included."""
        return sum(-(-length // CHUNK) for length in self.lengths)

    @property
    def chunks(self) -> int:
        """Chunks of 64 rows, tails included."""
        return sum(-(-length // LONG_CHUNK) for length in self.lengths)

    @property
    def varlen(self) -> bool:
        """Whether the lengths differ."""
        return len(set(self.lengths)) > 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """cu_seqlens: where each sequence starts, and T."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("T8192_H96", (8192,), 96),
        Shape("T8192_H64", (8192,), 64),
        Shape("B4_T4096_H32", (4096,) * 4, 32),
        Shape("T8192_H16", (8192,), 16),
        Shape("T2048_H12", (2048,), 12),
        Shape("T32768_H32", (32768,), 32),
        Shape("var6_H64", (1300, 547, 2048, 963, 271, 3063), 64),
    )
}


# How time grows with one dimension, the other fixed; SHAPES has further points of both series.
SCALING = {
    shape.name: shape
    for shape in (
        *(Shape(f"T{T}_H32", (T,), 32) for T in (1024, 2048, 4096, 8192, 16384)),
        *(Shape(f"T8192_H{H}", (8192,), H) for H in (4, 8, 48)),
    )
}
GROUPS = {"all": SHAPES, "scaling": SCALING}


def find_shape(name: str) -> Shape:
    """The shape of that name; ValueError names those that exist."""
    known = {**SCALING, **SHAPES}
    if name not in known:
        raise ValueError(f"shape {name!r} is not one of {', '.join((*SHAPES, *SCALING))}")
    return known[name]


def find_shapes(names: Iterable[str]) -> list[Shape]:
    """The shapes of those names, a group's name standing for its shapes; each once."""
    each = [n for name in names for n in GROUPS.get(name, (name,))]
    if not each:
        raise ValueError(f"no shape; known are {', '.join((*GROUPS, *SHAPES, *SCALING))}")
    return [find_shape(name) for name in dict.fromkeys(each)]


def repeats_of(shape: Shape, rounds: int) -> int:
    """How often a call is timed so that a short one has no more noise than others."""
    return rounds * min(MOST_REPEATS, max(1, -(-FULL_WORK // (shape.T * shape.H))))


def bwd_recurrence_bytes(
    shape: Shape, *, beta_bytes: int = 4, dfinal_bytes: int = 0, dinitial_bytes: int = 4
) -> int:
    """Bytes that level 1 must read and write once: every argument and every result.

    A full chunk of a head reads 75,328 B (fp32 beta) and writes 37,440 B; dfinal_bytes and
    dinitial_bytes are the sizes of one element of the states, 0 where there is none.
    """
    row, matrix = CHUNK * HEAD_DIM, CHUNK * CHUNK
    per_token = 2 * HEAD_DIM * 2 + beta_bytes  # do, v, beta
    per_token += HEAD_DIM * 2  # dv
    per_tile = 4 * row * 4 + HEAD_DIM * 4 + 2 * matrix * 2 + HEAD_DIM * HEAD_DIM * 2  # workspace
    per_tile += 4 * row * 4 + HEAD_DIM * 4 + CHUNK * 4  # dkd dqd dki dkr, dgT, dbeta
    per_sequence = HEAD_DIM * HEAD_DIM * (dfinal_bytes + dinitial_bytes)
    return shape.H * (shape.T * per_token + shape.tiles * per_tile + shape.N * per_sequence)


def bwd_recurrence_flops(shape: Shape) -> int:
    """Floating-point operations of level 1's matrix products, as m16n8k16 MMAs on whole tiles.

    Per tile: seven [16,128] x [128,128]-sized products (kd S, kr dS, U dS^T, do S^T, dvc S^T, qd^T
    do, kd^T dvc) of 128 MMAs, seven [16,16] x [16,128] of 16 and three [16,128] x [128,16] of 16:
    1056.
    """
    mmas = 7 * 128 + 7 * 16 + 3 * 16
    return shape.H * shape.tiles * mmas * 2 * 16 * 8 * 16


def floor_us(moved: int) -> float:
    """Microseconds that moving so many bytes takes at COPY_RATE."""
    return moved / COPY_RATE * 1e6


# ---------------------------------------------------------------- level 2
# Bytes of one element of g and of beta, by the form in which a caller passes them (perf.forms).
GATE_BYTES = {"A": 4, "B": 2, "prepared": 4}
# Of each of level 2's kernels per chunk and head, in products of [64,128] with [128,64]:
# L and mqk, z in two words, p, which counts half; then kd S and z^T X, which count twice, qd S
# likewise, and p X.
FORWARD_HALF_UNITS = {"transition": 4.5, "scan": 7}
# The same; dS z^T, do^T qd and dv^T kd, and do^T p; INV X, do S, dv S, U dS, do U^T, dv U^T, and pairs.
BACKWARD_HALF_UNITS = {"transition": 4.5, "scan": 7, "gradients": 1 + 3 * 2 + 2 + 3}
_HALF_UNIT_FLOPS = 2 * LONG_CHUNK * LONG_CHUNK * HEAD_DIM
# Per chunk and head: state and X, the state's gradient; what the transition leaves for the scan.
_SAVED_BYTES = ROW_BYTES * record_rows("chunk")
_DSTATE_BYTES = ROW_BYTES * record_rows("dchunk")
_FACTOR_BYTES = ROW_BYTES * record_rows("factors")
_BACKWARD_FACTOR_BYTES = ROW_BYTES * record_rows("backward factors")


def _input_bytes(form: str) -> int:
    """q, k, v, g, beta of one token and head."""
    return 3 * 2 * HEAD_DIM + GATE_BYTES[form] * (HEAD_DIM + 1)


def chunk_kda_bytes(op: str, shape: Shape, form: str, *, states: bool) -> int:
    """Bytes that a call must read and write once: its arguments and results; and, with `states`,
    the bf16 state and X of every chunk that the forward keeps for the backward.

    op: chunk_kda_fwd reads q k v g beta and writes o; chunk_kda_bwd reads do as well and writes
    five gradients.
    """
    per_token = {
        "chunk_kda_fwd": _input_bytes(form) + 2 * HEAD_DIM,
        "chunk_kda_bwd": 2 * _input_bytes(form) + 2 * HEAD_DIM,
    }[op]
    return shape.H * (shape.T * per_token + states * shape.chunks * _SAVED_BYTES)


def chunk_kda_flops(op: str, shape: Shape) -> int:
    """Floating-point operations of the matrix products of the chunk form, inverses left out."""
    half_units = {
        "chunk_kda_fwd": sum(FORWARD_HALF_UNITS.values()),
        "chunk_kda_bwd": sum(BACKWARD_HALF_UNITS.values()),
    }[op]
    return int(shape.H * shape.chunks * half_units * _HALF_UNIT_FLOPS)


def forward_stages(shape: Shape, form: str, *, states: bool) -> dict[str, tuple[int, int]]:
    """Kernel of level 2's forward -> (bytes that it must read and write, flops)."""
    factors, values = shape.chunks * _FACTOR_BYTES, shape.T * 2 * HEAD_DIM
    moved = {
        "transition": shape.T * _input_bytes(form) - values + factors,
        "scan": factors + 2 * values + states * shape.chunks * _SAVED_BYTES,
    }
    flops = {n: int(shape.chunks * k * _HALF_UNIT_FLOPS) for n, k in FORWARD_HALF_UNITS.items()}
    return {name: (shape.H * moved[name], shape.H * flops[name]) for name in moved}


def backward_stages(shape: Shape, form: str) -> dict[str, tuple[int, int]]:
    """Kernel of level 2's backward, states and X given -> (bytes that it must read and write, flops)."""
    token, inverse = 2 * HEAD_DIM, LONG_CHUNK * LONG_CHUNK * 2
    inputs = _input_bytes(form) - token  # without v
    per_token = {
        "transition": inputs,
        "scan": 2 * token,  # do, dv
        "gradients": 2 * inputs + 2 * token,  # do, dv; dq, dk, dg, dbeta
    }
    per_chunk = {
        "transition": _BACKWARD_FACTOR_BYTES,
        "scan": _BACKWARD_FACTOR_BYTES - inverse + _DSTATE_BYTES,
        "gradients": _SAVED_BYTES
        + _DSTATE_BYTES
        + inverse
        + (4 * (HEAD_DIM + 1) if form == "B" else 0),
    }
    flops = {n: int(shape.chunks * k * _HALF_UNIT_FLOPS) for n, k in BACKWARD_HALF_UNITS.items()}
    return {
        name: (
            shape.H * (shape.T * per_token[name] + shape.chunks * per_chunk[name]),
            shape.H * flops[name],
        )
        for name in flops
    }
