"""Warp-level products on mma.sync, in tf32 or bf16, over one order of fragments.

A step is D[16,8] += A[16,16] B[16,8], k = 16 wide: one m16n8k16 in bf16, two m16n8k8 in tf32.  Lane
l has r = l // 4 and c = l % 4.  Whatever the precision, a lane owns the same elements, in the same
order:

    A: row r + 8 half, k = 2c + i + 8 s     at index i + 2 half + 4 s
    B: column r,       k = 2c + i + 8 s     at index i + 2 s
    D: row r + 8 half, column 2c + i        at index i + 2 half

For bf16 that is the hardware's order.  For tf32 it renumbers k inside a step, alike in A and B, so
that a lane's two k are neighbours in memory (one 8-byte load), and two D tiles side by side are an
A operand without moving data.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, TFloat32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import dsl_user_op


class WarpMma:
    """Operands and products of one warp.  precision: "tf32" or "bf16"."""

    def __init__(self, precision: str):
        self.tf32 = precision == "tf32"
        self.op = (
            warp.MmaTF32Op((16, 8, 8))
            if self.tf32
            else warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
        )

    # ------------------------------------------------------------ operands
    def operand_a(self, values):
        """A operand from 8 fp32 values in the order above, rounded to nearest."""
        if self.tf32:
            order = [(0, 2, 1, 3), (4, 6, 5, 7)]  # the atom wants half before k
            return [self._tf32([_rounded(values[i]) for i in step], ((2, 2), 1)) for step in order]
        return self._bf16(values, ((2, 2, 2), 1))

    def operand_b(self, values):
        """B operand from 4 fp32 values in the order above, rounded to nearest."""
        if self.tf32:
            return [
                self._tf32([_rounded(values[2 * s + i]) for i in range(2)], (2, 1))
                for s in range(2)
            ]
        return self._bf16(values, ((2, 2), 1))

    def operand_b_parts(self, values):
        """B operands whose sum is the 4 values to at least 11 bits: one in tf32; in bf16 the
        rounded values and the rest.
        """
        whole = self.operand_b(values)
        if self.tf32:
            return [whole]
        rest = [x - y for x, y in zip(values, unpack_bf16(whole), strict=True)]
        return [whole, self.operand_b(rest)]

    def exact_a(self, values):
        """A operand from 8 fp32 values that are already representable in the operand format."""
        if self.tf32:
            order = [(0, 2, 1, 3), (4, 6, 5, 7)]
            return [self._tf32([bits(values[i]) for i in step], ((2, 2), 1)) for step in order]
        return self._bf16(values, ((2, 2, 2), 1))

    def exact_b(self, values):
        """B operand from 4 fp32 values that are already representable in the operand format."""
        if self.tf32:
            return [
                self._tf32([bits(values[2 * s + i]) for i in range(2)], (2, 1)) for s in range(2)
            ]
        return self._bf16(values, ((2, 2), 1))

    def values_a(self, operand):
        """The 8 values of a tf32 A operand, in the order above."""
        first, second = (cute.recast_tensor(step, Float32) for step in operand)
        return [step[i] for step in (first, second) for i in (0, 2, 1, 3)]

    def a_from_ldmatrix(self, packed):
        """A operand from the registers of an ldmatrix over the 16 x 16 block (bf16, exact in either
        precision).
        """
        if self.tf32:
            return self.exact_a(unpack_bf16(packed))
        return cute.make_tensor(packed.iterator, cute.make_layout(((2, 2, 2), 1)))

    def b_pair_from_ldmatrix(self, packed):
        """Two B operands (columns 0-7, 8-15) from the registers of an ldmatrix, order (s, column
        half).
        """
        if self.tf32:
            values = unpack_bf16(packed)
            return [self.exact_b(values[:4]), self.exact_b(values[4:])]
        return [
            cute.make_tensor(packed.iterator + 4 * n, cute.make_layout(((2, 2), 1)))
            for n in range(2)
        ]

    def b_halves(self, packed):
        """B operands from rows 0-7 and from rows 8-15 of the registers of an ldmatrix over a 16 x 16
        block, stored [n, k] (bf16).
        """
        halves = []
        for n in range(2):
            two = cute.make_rmem_tensor((2,), Int32)
            two[0], two[1] = words(packed)[n], words(packed)[n + 2]
            halves.append(
                cute.make_tensor(
                    cute.recast_ptr(two.iterator, dtype=BFloat16), cute.make_layout(((2, 2), 1))
                )
            )
        return halves

    @staticmethod
    def _tf32(words, shape):
        fragment = cute.make_rmem_tensor(shape, Int32)
        for i in range(len(words)):
            fragment[i] = words[i]
        return cute.recast_tensor(fragment, TFloat32)

    @staticmethod
    def _bf16(values, shape):
        fragment = cute.make_rmem_tensor(shape, BFloat16)
        pack_bf16(values, fragment)
        return fragment

    # ------------------------------------------------------------ products
    def accumulators(self, m: int, n: int):
        """Zeroed fp32 accumulators of a [16 m, 8 n] product: shape ((2, 2), m, n), index (i, half)."""
        acc = cute.make_rmem_tensor(((2, 2), m, n), Float32)
        acc.fill(0.0)
        return acc

    def step(self, acc, m, n, a, b, parts=(0, 1)):
        """acc[m, n] += a b; in tf32 a step is the sum of two parts of k = 8, and may leave one out."""
        atom, d = cute.make_mma_atom(self.op), acc[None, m, n]
        d = cute.make_tensor(d.iterator, cute.make_layout(((2, 2), 1, 1)))
        if self.tf32:
            for s in parts:
                cute.gemm(atom, d, a[s], b[s], d)
        else:
            cute.gemm(atom, d, a, b, d)


# ---------------------------------------------------------------- registers
@cute.jit
def select(condition, yes, no):
    """yes where the condition holds, else no; for code that is not rewritten while tracing."""
    return yes if condition else no


def bits(x):
    """The 32 bits of a Float32."""
    word = cute.make_rmem_tensor((1,), Float32)
    word[0] = Float32(x)
    return cute.recast_tensor(word, Int32)[0]


def from_bits(word):
    """The Float32 with these 32 bits."""
    x = cute.make_rmem_tensor((1,), Int32)
    x[0] = Int32(word)
    return cute.recast_tensor(x, Float32)[0]


@dsl_user_op
def round_tf32(x, *, loc=None, ip=None):
    """Bits of x rounded to tf32, to nearest even (the MMA itself truncates).

    One instruction, where the DSL's cvt_f32_tf32 (ties away from zero) takes two.
    """
    source = Float32(x).ir_value(loc=loc, ip=ip)
    word = llvm.inline_asm(
        Int32.mlir_type,
        [source],
        "cvt.rn.tf32.f32 $0, $1;",
        "=r,f",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return Int32(word)


@dsl_user_op
def multiply_bf16x2(a, b, *, loc=None, ip=None):
    """Products of two bf16 in each of two words, rounded to nearest."""
    word = llvm.inline_asm(
        Int32.mlir_type,
        [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)],
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r",
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return Int32(word)


def _rounded(x):
    """Bits of x rounded to tf32; of a number of Python's, which is exact, as they are."""
    return bits(x) if isinstance(x, (int, float)) else round_tf32(x)


def rounded_tf32(x):
    """x rounded to tf32."""
    return from_bits(round_tf32(x))


def pack_bf16(values, fragment):
    """Round fp32 values to bf16 and store them, two a register, into a register tensor of bf16."""
    wide = cute.make_rmem_tensor((len(values),), Float32)
    for i in range(len(values)):
        wide[i] = values[i]
    cute.make_tensor(fragment.iterator, cute.make_layout(len(values))).store(
        wide.load().to(BFloat16)
    )


def packed_bf16(values):
    """A register tensor of bf16 from fp32 values."""
    fragment = cute.make_rmem_tensor((len(values),), BFloat16)
    pack_bf16(values, fragment)
    return fragment


def words(fragment):
    """The words of a register tensor of bf16, two elements each, as a list."""
    flat = cute.recast_tensor(
        cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment))), Int32
    )
    return [flat[i] for i in range(cute.size(flat))]


def unpack_word(word):
    """The fp32 values of two bf16 in a word."""
    return [from_bits(word << 16), from_bits(word & Int32(-65536))]


def unpack_bf16(fragment):
    """The fp32 values of a register tensor of bf16, as a list."""
    return [x for word in words(fragment) for x in unpack_word(word)]


def tile_values(acc, m, n):
    """The 4 fp32 values of accumulator tile (m, n)."""
    return [acc[(i, half), m, n] for half in range(2) for i in range(2)]


def block_values(acc, m, n):
    """The 8 fp32 values of tiles (m, n) and (m, n + 1): an A operand's order."""
    return tile_values(acc, m, n) + tile_values(acc, m, n + 1)


# ---------------------------------------------------------------- shared memory
def pairs_along_columns(tile, lane):
    """View of an fp32 tile for this lane: [i, row block, column block] is (r + 8 row block, 2c + i
    + 8 column block).
    """
    return _lane_view(tile, lane // 4, 2 * (lane % 4), (0, 1))


def pairs_along_rows(tile, lane):
    """View of an fp32 tile for this lane: [i, row block, column block] is (2c + i + 8 row block, r
    + 8 column block).
    """
    return _lane_view(tile, 2 * (lane % 4), lane // 4, (1, 0))


def _lane_view(tile, row, col, step):
    rows, cols = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    offset = cute.crd2idx((row, col), tile.layout)
    if step == (0, 1):
        offset = cute.assume(offset, divby=2)  # keeps the pointer 8-byte aligned
    row_block = cute.crd2idx((8, 0), tile.layout) if rows > 8 else 0
    strides = (cute.crd2idx(step, tile.layout), row_block, 8)
    layout = cute.make_layout((2, max(rows // 8, 1), cols // 8), stride=strides)
    return cute.make_tensor(tile.iterator + offset, layout)


def load_pair(view, row_block, col_block):
    """The two fp32 values [0..1, row block, column block] of a lane view (one 8-byte load where
    they are neighbours).
    """
    pair = cute.make_rmem_tensor((2,), Float32)
    cute.autovec_copy(view[None, row_block, col_block], pair)
    return [pair[0], pair[1]]


def store_pair(view, row_block, col_block, values):
    """Store two fp32 values at [0..1, row block, column block] of a lane view."""
    pair = cute.make_rmem_tensor((2,), Float32)
    pair[0] = values[0]
    pair[1] = values[1]
    cute.autovec_copy(pair, view[None, row_block, col_block])


def block_a(view, row_block, col_block):
    """A operand's 8 values of the 16 x 16 block that starts at these 8-row and 8-column blocks; k
    along columns.
    """
    out = []
    for s in range(2):
        for half in range(2):
            out += load_pair(view, row_block + half, col_block + s)
    return out


def block_b(view, n_block, k_block, k_rows: bool):
    """B operand's 4 values; k_rows: the tile is [k, n] (strided pairs), else [n, k]."""
    out = []
    for s in range(2):
        out += (
            load_pair(view, k_block + s, n_block)
            if k_rows
            else load_pair(view, n_block, k_block + s)
        )
    return out


def transposed_a(view):
    """A operand's 8 values of a 16 x 16 tile stored [k, m], seen by pairs along rows."""
    out = []
    for s in range(2):
        for half in range(2):
            out += load_pair(view, s, half)
    return out


# ---------------------------------------------------------------- reductions over lanes
def summed_column(lane):
    """The column, of 16, whose sum `column_sums` and `gather_columns` leave in this lane (and in
    lane ^ 4).
    """
    return 8 * (lane // 16) + 2 * (lane % 4) + lane // 8 % 2


@cute.jit
def gather_columns(even: Float32, odd: Float32, lane: Int32):
    """From values of column r of two tiles, equal in a quad, the value of `summed_column`."""
    source = 4 * (2 * (lane % 4) + lane // 8 % 2)
    low = cute.arch.shuffle_sync(even, offset=source)
    high = cute.arch.shuffle_sync(odd, offset=source)
    return high if (lane & 16) != 0 else low


@cute.jit
def store_column_sums(line: cute.Tensor, total: Float32, row: Int32, col: Int32, lane: Int32):
    """Store the 16 sums of a block's columns at line[row, col ..]."""
    if (lane & 4) == 0:
        line[row, col + summed_column(lane)] = total


def quad_sum(x):
    """Sum over the 4 lanes that share r."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@cute.jit
def column_sums(a0: Float32, a1: Float32, b0: Float32, b1: Float32, lane: Int32):
    """Sum each of 4 values over the 8 lanes that share c; the lane keeps a or b by bit 4 of its
    index, 0 or 1 by bit 3.
    """
    upper, odd = (lane & 16) != 0, (lane & 8) != 0
    keep0 = b0 if upper else a0
    keep1 = b1 if upper else a1
    give0 = a0 if upper else b0
    give1 = a1 if upper else b1
    even_sum = keep0 + cute.arch.shuffle_sync_bfly(give0, offset=16)
    odd_sum = keep1 + cute.arch.shuffle_sync_bfly(give1, offset=16)
    keep = odd_sum if odd else even_sum
    give = even_sum if odd else odd_sum
    total = keep + cute.arch.shuffle_sync_bfly(give, offset=8)
    return total + cute.arch.shuffle_sync_bfly(total, offset=4)
