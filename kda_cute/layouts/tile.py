"""Shared-memory layouts of one 2-D tile, and the tile itself.

A layout maps (row, col) to a byte offset inside the tile. It is evaluated in two places:

* on the host, in plain Python, by `byte_offset`: offsets, bank conflicts, pictures. No DSL is
  imported for that.
* in a kernel, by `Tile.cute_layout` and `Tile.view`, which build the same map from CuTe objects
  while tracing.

`cutlass` is imported inside the methods of the second kind, so this module loads without the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

ITEMSIZE = {"f32": 4, "bf16": 2, "i64": 8}  # bytes per element
SWIZZLE_ROW_BYTES = 128
SWIZZLE_ROWS = 8
SWIZZLE_CHUNK_BYTES = 16

Shape = tuple[int, int]


class LayoutError(ValueError):
    """A layout, tile or plan that cannot work; the message names what is at fault."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


class Layout(Protocol):
    """What every tile layout offers. Shapes are (rows, cols) in elements, itemsize is in bytes."""

    alignment: ClassVar[int]  # bytes: of the tile's first byte, and of every stage

    def validate(self, shape: Shape, itemsize: int) -> None:
        """Raise LayoutError when a tile of this shape cannot have this layout."""

    def byte_offset(self, row: int, col: int, shape: Shape, itemsize: int) -> int:
        """Byte offset of element (row, col) from the start of the tile."""

    def nbytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes from the start of the tile to the end of its last element."""

    def row_offsets(self, shape: Shape, itemsize: int) -> tuple[int, ...]:
        """Byte offset of element (row, 0), for every row."""

    def make_cute(self, shape: Shape, itemsize: int):
        """The CuTe layout in elements, affine or composed with a swizzle. Call while tracing."""


class _AffineRows:
    """Rows of contiguous elements; a subclass says where (in elements) each row starts."""

    alignment: ClassVar[int] = 128

    def row_start(self, row: int, shape: Shape) -> int:
        """Element offset of (row, 0) from the start of the tile."""
        raise NotImplementedError

    def byte_offset(self, row: int, col: int, shape: Shape, itemsize: int) -> int:
        """Byte offset of element (row, col) from the start of the tile."""
        return (self.row_start(row, shape) + col) * itemsize

    def nbytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes from the start of the tile to the end of its last element."""
        return (self.row_start(shape[0] - 1, shape) + shape[1]) * itemsize

    def row_offsets(self, shape: Shape, itemsize: int) -> tuple[int, ...]:
        """Byte offset of element (row, 0), for every row."""
        return tuple(self.row_start(row, shape) * itemsize for row in range(shape[0]))


@dataclass(frozen=True)
class Dense(_AffineRows):
    """Row-major without padding."""

    def validate(self, shape: Shape, itemsize: int) -> None:
        """Every shape is fine."""

    def row_start(self, row: int, shape: Shape) -> int:
        """Element offset of (row, 0) from the start of the tile."""
        return row * shape[1]

    def make_cute(self, shape: Shape, itemsize: int):
        """(rows, cols):(cols, 1)."""
        import cutlass.cute as cute

        return cute.make_layout(shape, stride=(shape[1], 1))

    def __str__(self) -> str:
        return "dense"


@dataclass(frozen=True)
class RowPadded(_AffineRows):
    """Row-major; a row starts every `stride` elements."""

    stride: int

    def validate(self, shape: Shape, itemsize: int) -> None:
        """Rows must not overlap."""
        if self.stride < shape[1]:
            raise LayoutError(f"row stride {self.stride} is less than the {shape[1]} columns")

    def row_start(self, row: int, shape: Shape) -> int:
        """Element offset of (row, 0) from the start of the tile."""
        return row * self.stride

    def make_cute(self, shape: Shape, itemsize: int):
        """(rows, cols):(stride, 1)."""
        import cutlass.cute as cute

        return cute.make_layout(shape, stride=(self.stride, 1))

    def __str__(self) -> str:
        return f"rows/{self.stride}"


@dataclass(frozen=True)
class GroupPadded(_AffineRows):
    """Row-major in groups of `group` rows: rows every `stride` elements, groups every
    `group_stride` elements.

    Two paddings serve two access directions. With 4, 136, 552 in fp32 (8 and 8 modulo the 32
    banks) both fragments of mma.sync m16n8k8 are free of conflicts: rows l//4 with columns 2(l%4),
    and rows 2(l%4) with columns l//4.
    """

    group: int = 4
    stride: int = 136
    group_stride: int = 552

    def validate(self, shape: Shape, itemsize: int) -> None:
        """Rows must not overlap, and rows are whole groups (or fewer than one)."""
        if self.stride < shape[1]:
            raise LayoutError(f"row stride {self.stride} is less than the {shape[1]} columns")
        if self.group_stride < (self.group - 1) * self.stride + shape[1]:
            raise LayoutError(
                f"group stride {self.group_stride} is less than {self.group} rows "
                f"of stride {self.stride}"
            )
        if shape[0] > self.group and shape[0] % self.group:
            raise LayoutError(f"{shape[0]} rows are not whole groups of {self.group}")

    def row_start(self, row: int, shape: Shape) -> int:
        """Element offset of (row, 0) from the start of the tile."""
        return row // self.group * self.group_stride + row % self.group * self.stride

    def make_cute(self, shape: Shape, itemsize: int):
        """((group, rows/group), cols):((stride, group_stride), 1)."""
        import cutlass.cute as cute

        rows, cols = shape
        if rows <= self.group:
            return cute.make_layout(shape, stride=(self.stride, 1))
        return cute.make_layout(
            ((self.group, rows // self.group), cols),
            stride=((self.stride, self.group_stride), 1),
        )

    def __str__(self) -> str:
        return f"groups {self.group}x{self.stride}/{self.group_stride}"


@dataclass(frozen=True)
class Swizzle128:
    """TMA's and wgmma's 128-byte swizzle, K-major.

    The tile is cut in column blocks of 128 bytes, each block rows x 128 contiguous bytes; inside,
    the index of a 16-byte chunk is XORed with row % 8. Same bytes as CuTe's
    tile_to_shape(make_smem_layout_atom(K_SW128, dtype), (rows, cols), order=(0, 1)).
    """

    alignment: ClassVar[int] = SWIZZLE_ROWS * SWIZZLE_ROW_BYTES

    def validate(self, shape: Shape, itemsize: int) -> None:
        """Whole swizzle atoms only: 8 rows of 128 bytes."""
        if shape[0] % SWIZZLE_ROWS:
            raise LayoutError(f"the 128-byte swizzle needs a multiple of 8 rows, not {shape[0]}")
        if shape[1] * itemsize % SWIZZLE_ROW_BYTES:
            raise LayoutError(
                "the 128-byte swizzle needs rows of a multiple of 128 bytes, "
                f"not {shape[1] * itemsize}"
            )

    def byte_offset(self, row: int, col: int, shape: Shape, itemsize: int) -> int:
        """Byte offset of element (row, col) from the start of the tile."""
        block, byte = divmod(col * itemsize, SWIZZLE_ROW_BYTES)
        chunk, rest = divmod(byte, SWIZZLE_CHUNK_BYTES)
        chunk ^= row % SWIZZLE_ROWS
        return (block * shape[0] + row) * SWIZZLE_ROW_BYTES + chunk * SWIZZLE_CHUNK_BYTES + rest

    def nbytes(self, shape: Shape, itemsize: int) -> int:
        """Bytes of the tile: the swizzle adds none."""
        return shape[0] * shape[1] * itemsize

    def row_offsets(self, shape: Shape, itemsize: int) -> tuple[int, ...]:
        """Byte offset of element (row, 0), for every row; the rest of a row is elsewhere."""
        return tuple(self.byte_offset(row, 0, shape, itemsize) for row in range(shape[0]))

    def make_cute(self, shape: Shape, itemsize: int):
        """ComposedLayout: `.inner` the swizzle (of byte addresses), `.outer` affine in elements."""
        import cutlass.cute as cute
        from cutlass.cute.nvgpu import warpgroup

        dtype = next(name for name, size in ITEMSIZE.items() if size == itemsize)
        atom = warpgroup.make_smem_layout_atom(
            warpgroup.SmemLayoutAtomKind.K_SW128, cute_dtype(dtype)
        )
        return cute.tile_to_shape(atom, shape, order=(0, 1))

    def __str__(self) -> str:
        return "swizzle 128B"


def cute_dtype(dtype: str):
    """The DSL's numeric type of a tile dtype."""
    import cutlass

    return {"f32": cutlass.Float32, "bf16": cutlass.BFloat16, "i64": cutlass.Int64}[dtype]


@dataclass(frozen=True)
class Tile:
    """A named shared-memory tile of `stages` equal buffers.

    `first` and `last` name the steps of its plan between which (inclusive) its bytes hold live
    data; empty means the plan's first and last step. `offset` is the byte offset in the plan's
    scratch stack: a plan sets it, and an unplaced tile starts at 0.
    """

    name: str
    shape: Shape
    dtype: str
    layout: Layout
    stages: int = 1
    first: str = ""
    last: str = ""
    offset: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise LayoutError(
                f"tile {self.name}: dtype {self.dtype!r} is not one of {sorted(ITEMSIZE)}"
            )
        if len(self.shape) != 2 or min(self.shape) < 1 or self.stages < 1:
            raise LayoutError(f"tile {self.name}: bad shape {self.shape} or stages {self.stages}")
        if self.offset < 0 or self.offset % self.alignment:
            raise LayoutError(
                f"tile {self.name}: offset {self.offset} is not a multiple "
                f"of {self.alignment} bytes"
            )
        try:
            self.layout.validate(self.shape, self.itemsize)
        except LayoutError as error:
            raise LayoutError(f"tile {self.name}: {error}") from None

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def alignment(self) -> int:
        """Bytes: alignment of the tile and of each stage."""
        return self.layout.alignment

    @property
    def stage_bytes(self) -> int:
        """Bytes from one stage to the next: the layout's bytes rounded up to its alignment."""
        return round_up(self.layout.nbytes(self.shape, self.itemsize), self.alignment)

    @property
    def nbytes(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.stage_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of data in one stage, without padding: what a copy into it adds to an mbarrier."""
        return self.shape[0] * self.shape[1] * self.itemsize

    def byte_offset(self, row: int, col: int, stage: int = 0) -> int:
        """Byte offset of an element from the start of the scratch stack."""
        inside = self.layout.byte_offset(row, col, self.shape, self.itemsize)
        return self.offset + stage * self.stage_bytes + inside

    # ---- in a kernel, while tracing

    def cute_dtype(self):
        """The DSL's numeric type of the elements."""
        return cute_dtype(self.dtype)

    def cute_layout(self):
        """CuTe layout (rows, cols) of one stage in elements; a ComposedLayout when swizzled."""
        return self.layout.make_cute(self.shape, self.itemsize)

    def pointer(self, base, stage=0):
        """Int8 pointer to a stage, with the tile's alignment.

        `base` points to the whole scratch stack and is aligned to 1024 bytes; `stage` is a Python
        int or a runtime integer.
        """
        import cutlass.cute as cute

        if isinstance(stage, int):
            if not 0 <= stage < self.stages:
                raise LayoutError(f"tile {self.name}: stage {stage} of {self.stages}")
            return base + (self.offset + stage * self.stage_bytes)
        # A runtime offset alone drops the pointer's alignment to 1, and wide accesses with it.
        step = cute.assume(stage * self.stage_bytes, divby=self.alignment)
        return (base + self.offset + step).align(self.alignment)

    def view(self, base, stage=0, *, transposed: bool = False):
        """Tensor (rows, cols) of one stage; (cols, rows) of the same bytes when `transposed`."""
        return self._tensor(self.pointer(base, stage), staged=False, transposed=transposed)

    def rows_view(self, base, first: int, rows: int, stage=0):
        """Tensor (rows, cols) of the rows from `first` on; multiples of 8 of a swizzled tile."""
        import cutlass.cute as cute

        layout = self.cute_layout()
        inner, outer = layout.inner, layout.outer
        part = cute.make_layout(
            ((SWIZZLE_ROWS, rows // SWIZZLE_ROWS), outer.shape[1]), stride=outer.stride
        )
        pointer = self.pointer(base, stage) + first * SWIZZLE_ROW_BYTES
        return cute.make_tensor(cute.recast_ptr(pointer, inner, dtype=self.cute_dtype()), part)

    def staged_view(self, base, *, transposed: bool = False):
        """Tensor (rows, cols, stages), for TMA partitions; (cols, rows, stages) if `transposed`."""
        return self._tensor(self.pointer(base), staged=True, transposed=transposed)

    def _tensor(self, pointer, *, staged: bool, transposed: bool):
        import cutlass.cute as cute

        layout = self.cute_layout()
        swizzle = None
        if isinstance(
            layout, cute.ComposedLayout
        ):  # on the pointer, so that the tensor stays affine
            swizzle, layout = layout.inner, layout.outer
        if transposed:
            layout = cute.select(layout, mode=[1, 0])
        if staged:
            layout = cute.append(
                layout, cute.make_layout(self.stages, stride=self.stage_bytes // self.itemsize)
            )
        return cute.make_tensor(cute.recast_ptr(pointer, swizzle, dtype=self.cute_dtype()), layout)
