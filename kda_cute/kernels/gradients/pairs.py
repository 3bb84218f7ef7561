"""Gradients of the products of pairs of tokens inside a chunk, exact for any gate: the dyadic scheme.

Of a pair i > j, let s be the highest bit in which i and j differ, and a the multiple of s between
them (j < a <= i).  With the factors f_t = exp(-|gc_t - gc_a|), all at most 1, kf = k f and qf = q f,

    left,  bit s of i set     a_i = sum_j M_ij kf_j     y_i = sum_j L_ij kf_j
    right, bit s of j clear   y_j = sum_i M_ij qf_i + L_ij kf_i

    dq += f a     dk += f y     dgc += qf a + kf y (left), - kf y (right)

where M and L hold the norms' factors, so that k and q are the inputs as they are, and dq and dk the
gradients over the norm.  The operands of the products and the multipliers of dgc are the same
rounded numbers: what a pair adds to i it takes from j, exactly.

A warp owns 16 channels of 32 tokens.  Its products have channels as rows, and tokens as columns and
as k: then a lane owns the same (channel, token) positions in operands A and in accumulators, and
they are those of its accumulators of the products with states.  Lane l with r = l // 4 and c = l % 4
owns channels r + 8 half and tokens 2c + i + 8 s + 16 block; lists of values have index
i + 2 half + 4 s + 8 block, those of packed pairs of tokens half + 2 s + 4 block.  So an operand A is
four neighbouring words, and two of them are one of 8 tokens.

    level    tokens                    operands
    32       of the warp's other half  its words come from the warp that owns them
    16, 8    of the warp               left and right are different registers
    4, 2     of its 8                  left and right are different lanes
    1        of the lane's two         in fp32, without products
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cutlass_dsl import dsl_user_op

from ...device.math import exp2
from ...device.matrix_rows import LaneRows, MatrixRows
from ...device.registers import again
from ...device.sync import meet
from ...device.warp_mma import multiply_bf16x2, packed_bf16, select, unpack_word
from .schedule import BLOCK, C, NamedBar, Row

COUNT = 16  # values of a lane
WORDS = COUNT // 2


class Place:
    """A lane's channels and tokens."""

    def __init__(self, warp, lane):
        self.warp, self.lane = warp, lane
        self.r, self.c = lane // 4, lane % 4
        self.half = warp // 8  # of the tokens
        self.channels = warp % 8  # block of 16

    def view(self, tile, shift=0):
        """[i, half, s, block] of a tile [token, channel]; shift: 1 for i + 1 instead of i."""
        layout = tile.layout
        token = 32 * self.half + 2 * self.c + shift
        offset = again(cute.crd2idx((token, BLOCK * self.channels + self.r), layout))
        steps = [cute.crd2idx(x, layout) for x in ((1, 0), (0, 8), (8, 0), (16, 0))]
        return cute.make_tensor(
            tile.iterator + offset, cute.make_layout((2, 2, 2, 2), stride=tuple(steps))
        )

    def tokens(self, line):
        """[i, s, block] of a row of one value a token."""
        offset = cute.assume(32 * self.half + 2 * self.c, divby=2)
        return cute.make_tensor(
            line.iterator + offset, cute.make_layout((2, 2, 2), stride=(1, 8, 16))
        )

    def rows(self, tile, base):
        """Where the lane's words of a bf16 tile [token, channel] come from."""
        row, chunk = LaneRows(self.lane).columns_first()
        return MatrixRows(tile, base, 0, 32 * self.half + row, 2 * self.channels + chunk)


class Lane:
    """What a lane has of its positions: the decay in each word, and the sums; words of k and q are
    loaded when needed.
    """

    def __init__(self, rows_k, rows_q):
        self.rows_k, self.rows_q = rows_k, rows_q
        self.step = [None] * WORDS
        self.dq, self.dk, self.dgc = (cute.make_rmem_tensor((COUNT,), Float32) for _ in range(3))

    def words(self, block):
        """(k, q) of a block: tokens of a word are neighbours."""
        return self.words_k(block), self.words_q(block)

    def words_k(self, block):
        return load_words(self.rows_k, again(Int32(0)) + BLOCK * block, 0, transpose=True)

    def words_q(self, block):
        return load_words(self.rows_q, again(Int32(0)) + BLOCK * block, 0, transpose=True)

    # ------------------------------------------------------------ factors
    def left(self, w, gc, anchor):
        """Factors of the pair w, on the left; gc: a `Place.view`."""
        x = exp2(at_word(gc, w) - anchor)
        return [x, x * self.step[w]]

    def right(self, w, gc, anchor):
        """The same on the right; the view is shifted by 1."""
        x = exp2(anchor - at_word(gc, w))
        return [x * self.step[w], x]

    def either(self, w, gc, anchor, is_left):
        """The same, shifted by 1 where not is_left."""
        x = exp2(-cute.math.absf(at_word(gc, w) - anchor))
        y = x * self.step[w]
        return [select(is_left, x, y), select(is_left, y, x)]

    # ------------------------------------------------------------ results
    def settle(self, side):
        """Keeps the sums' last additions where they are: taken out of both branches of an `if`, they
        would need registers for what is added.
        """
        for sums in (self.dq, self.dk, self.dgc):
            for e in range(COUNT):
                sums[e] = same(sums[e], side)

    def add_left(self, w, f, kf, qf, a, y):
        """a, y: the pair's results; kf, qf: its words."""
        k, q = unpack_word(kf), unpack_word(qf)
        for i in range(2):
            e = 2 * w + i
            self.dq[e] = self.dq[e] + f[i] * a[i]
            self.dk[e] = self.dk[e] + f[i] * y[i]
            self.dgc[e] = self.dgc[e] + q[i] * a[i] + k[i] * y[i]

    def add_right(self, w, f, kf, y):
        k = unpack_word(kf)
        for i in range(2):
            e = 2 * w + i
            self.dk[e] = self.dk[e] + f[i] * y[i]
            self.dgc[e] = self.dgc[e] - k[i] * y[i]


class Pairs:
    """Code of all warps."""

    def __init__(self, config, plan):
        self.config, self.plan = config, plan

    def run(self, base, place, lane):
        """Everything that pairs add to dq, dk, dgc."""
        row, chunk = LaneRows(place.lane).columns_first()
        M, L = (
            MatrixRows(self.plan[name], base, 0, 32 * place.half + row, 4 * place.half + chunk)
            for name in ("M", "L")
        )
        gc = self.plan["gc"].view(base)
        self.other_half(base, place, lane, gc, M, L)
        cute.arch.sync_warp()
        self.other_block(place, lane, gc, M, L)
        if (
            self.config.gate == "log" and self.config.g == "bf16"
        ):  # one value too many would be kept
            place = Place(place.warp, again(place.lane))
        for block in range(2):
            k, q = lane.words(block)
            mw, lw = (load_words(x, BLOCK * block, 2 * block) for x in (M, L))
            cute.arch.sync_warp()
            self.other_eight(place, lane, gc, block, k, q, mw, lw)
            for s in (4, 2):
                cute.arch.sync_warp()
                self.inside_eight(place, lane, gc, block, s, k, q, mw, lw)

    def anchor(self, gc, place, token):
        """gc of a token in the lane's two channels."""
        return [gc[token, BLOCK * place.channels + place.r + 8 * half] for half in range(2)]

    # ------------------------------------------------------------ without products
    def same_token(self, base, place, lane, block, k, q):
        """dq += M_tt k, dk += M_tt q."""
        diagonal = place.tokens(self.plan["rows"].view(base)[Row.DIAGONAL, None])
        for w in range(4):
            two = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(diagonal[None, w // 2, block], two)
            for i, (x, y) in enumerate(zip(unpack_word(k[w]), unpack_word(q[w]), strict=True)):
                e = 8 * block + 2 * w + i
                lane.dq[e] = lane.dq[e] + two[i] * x
                lane.dk[e] = lane.dk[e] + two[i] * y

    def neighbours(self, base, place, lane, block, k, q):
        """Level 1; the left factor is 1."""
        line = self.plan["rows"].view(base)[Row.PAIRS, None]
        for w in range(4):
            pair = C // 4 * place.half + 8 * block + 4 * (w // 2) + place.c
            m_ij, l_ij = line[pair], line[C // 2 + pair]
            x, y = unpack_word(k[w]), unpack_word(q[w])
            even, odd = 8 * block + 2 * w, 8 * block + 2 * w + 1
            f = lane.step[4 * block + w]
            kf = x[0] * f
            dkf = m_ij * y[1] + l_ij * x[1]
            lane.dq[odd] = lane.dq[odd] + m_ij * kf
            lane.dk[odd] = lane.dk[odd] + l_ij * kf
            lane.dk[even] = lane.dk[even] + f * dkf
            moved = kf * dkf
            lane.dgc[odd] = lane.dgc[odd] + moved
            lane.dgc[even] = lane.dgc[even] - moved

    # ------------------------------------------------------------ level 32
    @cute.jit
    def other_half(self, base, place: cutlass.Constexpr, lane: cutlass.Constexpr, gc, M, L):
        if place.half == 0:
            self.half_right(base, place, lane, gc, M, L)
        else:
            self.half_left(base, place, lane, gc, M, L)

    def half_right(self, base, place, lane, gc, M, L):
        anchor, sums = self.anchor(gc, place, 32), place.view(gc, 1)
        for block in range(2):
            k = lane.words_k(block)
            kf = [scaled(k[w], lane.right(4 * block + w, sums, anchor[w % 2])) for w in range(4)]
            self.give(base, place, block, kf)
        self.meet(place)
        sums = place.view(gc, 1)
        for block in range(2):
            y = accumulators()
            for other in range(2):
                mw, lw = (load_words(x, BLOCK * block, 4 + 2 * other) for x in (M, L))
                k, q = (
                    self.take(base, place.warp ^ 8, place, 2 * name + other) for name in range(2)
                )
                for n in range(2):
                    step(y[n], q, mw[2 * n : 2 * n + 2])
                    step(y[n], k, lw[2 * n : 2 * n + 2])
            kf = self.take(base, place.warp, place, block)
            for i in range(4):
                w = 4 * block + i
                lane.add_right(w, lane.right(w, sums, anchor[w % 2]), kf[i], result(y, i))
        lane.settle("right")

    def half_left(self, base, place, lane, gc, M, L):
        anchor, sums = self.anchor(gc, place, 32), place.view(gc)
        for block in range(2):
            factors = [lane.left(4 * block + w, sums, anchor[w % 2]) for w in range(4)]
            for first, x in zip((0, 2), lane.words(block), strict=True):
                words = [scaled(x[w], factors[w]) for w in range(4)]
                self.give(base, place, first + block, words)
        self.meet(place)
        sums = place.view(gc)
        for block in range(2):
            a, y = accumulators(), accumulators()
            for other in range(2):
                mw, lw = (load_words(x, BLOCK * block, 4 + 2 * other) for x in (M, L))
                k = self.take(base, place.warp ^ 8, place, other)
                for n in range(2):
                    step(a[n], k, mw[2 * n : 2 * n + 2])
                    step(y[n], k, lw[2 * n : 2 * n + 2])
            kf, qf = (self.take(base, place.warp, place, first + block) for first in (0, 2))
            for i in range(4):
                w = 4 * block + i
                f = lane.left(w, sums, anchor[w % 2])
                lane.add_left(w, f, kf[i], qf[i], result(a, i), result(y, i))
        lane.settle("left")

    def slot(self, base, place, warp, index):
        """The lane's four words, number `index` of four, of a warp's part of the tile `exchange`."""
        tile = self.plan["exchange"]
        pointer = cute.recast_ptr(tile.pointer(base), dtype=Int32)
        offset = cute.assume(((4 * warp + index) * 32 + place.lane) * 4, divby=4)
        return cute.make_tensor(pointer + offset, cute.make_layout(4))

    def give(self, base, place, index, words):
        four = cute.make_rmem_tensor((4,), Int32)
        for w in range(4):
            four[w] = words[w]
        cute.autovec_copy(four, self.slot(base, place, place.warp, index))

    def take(self, base, warp, place, index):
        four = cute.make_rmem_tensor((4,), Int32)
        cute.autovec_copy(self.slot(base, place, warp, index), four)
        return [four[w] for w in range(4)]

    def meet(self, place):
        meet(self.config, NamedBar.HALVES + place.channels, 64)

    # ------------------------------------------------------------ levels 16 and 8
    def other_block(self, place, lane, gc, M, L):
        """Block 1 of the warp is left, block 0 right."""
        anchor = self.anchor(gc, place, 32 * place.half + 16)
        sums = place.view(gc, 1)
        k = lane.words_k(0)
        right_kf = [scaled(k[w], lane.right(w, sums, anchor[w % 2])) for w in range(4)]
        mw, lw = (load_words(x, BLOCK, 0) for x in (M, L))
        sums, kf, qf = place.view(gc), [], []
        k, q = lane.words(1)
        for n in range(2):
            a, y = accumulators(), accumulators()
            step(a[0], right_kf, mw[2 * n : 2 * n + 2])
            step(y[0], right_kf, lw[2 * n : 2 * n + 2])
            for half in range(2):
                w = half + 2 * n
                f = lane.left(4 + w, sums, anchor[half])
                kf.append(scaled(k[w], f))
                qf.append(scaled(q[w], f))
                lane.add_left(4 + w, f, kf[w], qf[w], result(a, half), result(y, half))
        cute.arch.sync_warp()
        mw, lw = (load_words(x, 0, 2) for x in (M, L))
        sums = place.view(gc, 1)
        for n in range(2):
            y = accumulators()
            step(y[0], qf, mw[2 * n : 2 * n + 2])
            step(y[0], kf, lw[2 * n : 2 * n + 2])
            for half in range(2):
                w = half + 2 * n
                f = lane.right(w, sums, anchor[half])
                lane.add_right(w, f, right_kf[w], result(y, half))

    def other_eight(self, place, lane, gc, block, k, q, mw, lw):
        """Tokens 8 to 15 of a block are left, 0 to 7 right; mw, lw: words of the diagonal block, two
        for each of its 8 rows.
        """
        anchor = self.anchor(gc, place, 32 * place.half + 16 * block + 8)
        w0, sums = 4 * block, [place.view(gc, shift) for shift in range(2)]
        f = [lane.right(w0 + w, sums[1], anchor[w]) for w in range(2)]
        f += [lane.left(w0 + 2 + w, sums[0], anchor[w]) for w in range(2)]
        kf = [scaled(k[w], f[w]) for w in range(4)]
        qf = [scaled(q[2 + w], f[2 + w]) for w in range(2)]
        a, y = accumulators(), accumulators()
        step(a[1], kf[:2], mw[2:3])
        step(y[1], kf[:2], lw[2:3])
        step(y[0], qf + kf[2:], [mw[1], lw[1]])
        for w in range(2):
            lane.add_right(w0 + w, f[w], kf[w], result(y, w))
            lane.add_left(
                w0 + 2 + w, f[2 + w], kf[2 + w], qf[w], result(a, 2 + w), result(y, 2 + w)
            )

    # ------------------------------------------------------------ levels 4 and 2
    def inside_eight(self, place, lane, gc, block, s, k, q, mw, lw):
        """Lanes with bit s of their tokens set are left.  The words of a product count where the
        tokens' highest differing bit is s; those of left lanes are 0 where they would meet their own
        kind.
        """
        r, c = place.r, place.c
        differ = (2 * c) ^ r  # of the tokens of a word of M or L, but for bit 0
        mask = select((differ & 6) // s == 1, Int32(-1), Int32(0))
        is_left = ((2 * c) & s) != 0
        start = 32 * place.half + 16 * block + ((2 * c) & (8 - 2 * s)) + s
        sums = place.view(gc, select(is_left, Int32(0), Int32(1)))
        sign = select(is_left, Int32(0), Int32(-2147450880))  # both sign bits
        for eight in range(2):
            cute.arch.sync_warp()
            anchor = self.anchor(gc, place, start + 8 * eight)
            two = range(2 * eight, 2 * eight + 2)
            f = [lane.either(4 * block + w, sums, anchor[w % 2], is_left) for w in two]
            kf = [scaled(k[w], f[w % 2]) for w in two]
            qf = [select(is_left, scaled(q[w], f[w % 2]), Int32(0)) for w in two]
            right_kf = [select(is_left, Int32(0), x) for x in kf]
            m0, l0 = (x[3 * eight] & mask for x in (mw, lw))
            a, y = accumulators(), accumulators()
            step(a[0], right_kf, [m0])
            step(y[0], qf + kf, [m0, l0])
            for w in range(2):
                at = 4 * block + 2 * eight + w
                lane.add_left(at, f[w], kf[w] ^ sign, qf[w], result(a, w), result(y, w))


# ---------------------------------------------------------------- words
def at_word(view, w):
    """The first value of word w in a `Place.view`."""
    return view[0, w % 2, w // 2 % 2, w // 4]


@dsl_user_op
def same(x, note, *, loc=None, ip=None):
    """The Float32, as if new."""
    out = llvm.inline_asm(
        Float32.mlir_type,
        [Float32(x).ir_value(loc=loc, ip=ip)],
        f"mov.b32 $0, $1; // {note}",
        "=f,f",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return Float32(out)


def scaled(word, factors):
    """A word's two values times two factors, each rounded."""
    return multiply_bf16x2(word, cute.recast_tensor(packed_bf16(factors), Int32)[0])


def load_words(rows, row_step, chunk_step, transpose=False):
    """The words of a 16 x 16 block of M or L: rows 0-7 and k 0-7, k 8-15, rows 8-15 likewise.  A
    chunk_step of 4 leads to the other half of the tokens, from either.
    """
    loaded = cute.recast_tensor(rows.load(row_step, chunk_step, transpose=transpose), Int32)
    return [loaded[w] for w in range(4)]


# ---------------------------------------------------------------- products
def accumulators():
    """Zeroed accumulators of 16 channels by two times 8 tokens."""
    out = []
    for _ in range(2):
        acc = cute.make_rmem_tensor(((2, 2), 1, 1), Float32)
        acc.fill(0.0)
        out.append(acc)
    return out


def result(acc, w):
    """The two values at the positions of word w of a block."""
    return [acc[w // 2][2 * (w % 2) + i] for i in range(2)]


def step(acc, a, b):
    """acc += A B of 8 tokens (two words of A, one of B) or of 16."""
    k = 8 * len(b)
    op = warp_ops.MmaF16BF16Op(BFloat16, Float32, (16, 8, k))
    shape = ((2, 2, 2), 1, 1) if k == 16 else ((2, 2), 1, 1)
    cute.gemm(cute.make_mma_atom(op), acc, operand(a, shape), operand(b, (shape[0][1:], 1, 1)), acc)


def operand(words, shape):
    """Words of two bf16 each, in the order of the hardware's registers, as an operand of this shape."""
    fragment = cute.make_rmem_tensor((len(words),), Int32)
    for i in range(len(words)):
        fragment[i] = words[i]
    pointer = cute.recast_tensor(fragment, BFloat16).iterator
    return cute.make_tensor(pointer, cute.make_layout(shape))
