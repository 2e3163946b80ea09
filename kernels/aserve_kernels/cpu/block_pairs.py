"""A tile of three rows times two packed blocks of outputs, for the registers of AVX2.

A sum takes a product every four cycles, and there are two units for products: a tile of three rows
by one block has too few sums to keep them busy. With two blocks it has twelve, as many as one of
six rows has (tiles.py).

PERF: GFLOP/s of tiles in the cache, one thread of an EPYC with AVX2 whose limit is 101, weights of
bfloat16: 3 rows of two blocks 95, and 4, 5, 6 rows of one block 90, 101, 102. So 8 rows are 5 and
3, and 13 are 5, 5 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from aserve_kernels.cpu.bf16 import Float32s, Floats
from aserve_kernels.cpu.processor import HAS_AVX512
from aserve_kernels.cpu.simd import FLOATS, INDEX, LANES, WORDS, Intrinsic, emit_splat
from aserve_kernels.cpu.tiles import OUTPUTS, TileEmitter, multiply_tile

THREE = 3  # rows
PER_BLOCK = LANES // FLOATS.count  # vectors of a step


def multiply_pair(
    x: Floats, blocks: tuple[Floats, Floats], bias: Float32s, out: Floats, stride: int
) -> None:
    """Does what `tiles.multiply_tile` does, for three rows and two blocks that follow each other.

    bias and each row of `out` have 2 * OUTPUTS values, and x has at least three rows.
    """
    pair, following = blocks
    half = len(pair) // 2
    for number in range(2):
        block, first = pair[number * half : (number + 1) * half], number * OUTPUTS
        own_bias, target = bias[first : first + OUTPUTS], out[first:]
        multiply_tile(x, (block, following), own_bias, target, stride, THREE)


class _PairEmitter(TileEmitter):
    """Emits the tile in vectors of one register: of AVX2's, twelve have sums, and three a value of
    each row."""

    __slots__ = ("_mask",)

    def __init__(self, builder: Any, *, is_mixed: bool) -> None:
        super().__init__(builder, is_mixed, is_mixed=is_mixed)
        bits = ir.Constant(WORDS, [0xFFFF0000] * WORDS.count)
        self._mask = cgutils.global_constant(builder, "high_halves", bits)
        self.vector = WORDS if is_mixed else FLOATS

    def add_step(
        self, sums: list[list[Any]], sources: list[Any], blocks: list[Any], step: Any
    ) -> None:
        """Adds one input, or pair of inputs, of each row times the weights of both blocks."""
        builder = self._builder
        first = builder.mul(step, INDEX(PER_BLOCK))
        num_halves = 2 if self._is_mixed else 1
        for half in range(num_halves):
            at = builder.add(builder.mul(step, INDEX(num_halves)), INDEX(half))
            values = [builder.load(builder.gep(row, [at]), align=4) for row in sources]
            factors = [emit_splat(builder, value, FLOATS.count) for value in values]
            for place, variables in enumerate(zip(*sums, strict=True)):
                block, own = divmod(place, PER_BLOCK)
                address = builder.gep(blocks[block], [builder.add(first, INDEX(own))])
                # PERF: LLVM would load all of them first. It must not know what they are.
                loaded = builder.load(self._opaque(address), align=2)
                self._add_products(list(variables), factors, self._floats(loaded, half))

    def _floats(self, loaded: Any, half: int) -> Any:
        if not self._is_mixed:
            return loaded
        return self._high(loaded) if half else self._low(loaded)

    def _high(self, pairs: Any) -> Any:
        """PERF: the mask is read from memory, because no register is left to keep it in."""
        mask = self._builder.load(self._opaque(self._mask))
        return self._builder.bitcast(self._builder.and_(pairs, mask), FLOATS)


@intrinsic
def _multiply_pair(typing: Any, x: Any, blocks: Any, bias: Any, out: Any, stride: Any) -> Intrinsic:
    pair, next_ = blocks.types
    is_mixed = x.dtype != pair.dtype

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # PERF: within the code of a whole step LLVM would spill sums. 8 rows of Qwen3-0.6B's shape,
        # two threads, tokens/s: 83 with this tile inline, 121 without, and 117 with two of 4 rows.
        builder.function.attributes.add("noinline")

        def data(kind: Any, value: Any, vector: ir.Type) -> Any:
            pointer = context.make_array(kind)(context, builder, value).data
            return builder.bitcast(pointer, vector.as_pointer())

        weights, following = (builder.extract_value(args[1], number) for number in range(2))
        per_block = builder.udiv(
            context.make_array(pair)(context, builder, weights).nitems, INDEX(2)
        )
        num_in = builder.udiv(per_block, INDEX(OUTPUTS))
        num_steps = builder.udiv(num_in, INDEX(2 if is_mixed else 1))
        tile = _PairEmitter(builder, is_mixed=is_mixed)
        first = data(x, args[0], ir.FloatType())
        sources = [builder.gep(first, [builder.mul(num_in, INDEX(row))]) for row in range(THREE)]
        biases = data(bias, args[2], FLOATS)
        own = [builder.load(builder.gep(biases, [INDEX(i)]), align=4) for i in range(2 * PER_BLOCK)]
        sums = [[cgutils.alloca_once_value(builder, value) for value in own] for _ in sources]
        vectors = data(pair, weights, tile.vector)
        second = builder.mul(num_steps, INDEX(PER_BLOCK))
        both = [vectors, builder.gep(vectors, [second])]
        paced = tile.paced(context.make_array(next_)(context, builder, following), num_steps)
        with cgutils.for_range(builder, num_steps, intp=INDEX) as loop:
            tile.add_step(sums, sources, both, loop.index)
            tile.prefetch(paced, loop.index)
        outputs = data(out, args[3], ir.FloatType())
        for row, row_sums in enumerate(sums):
            target = builder.gep(outputs, [builder.mul(args[4], INDEX(row))])
            targets = builder.bitcast(target, FLOATS.as_pointer())
            for number, variable in enumerate(row_sums):
                address = builder.gep(targets, [INDEX(number)])
                builder.store(builder.load(variable), address, align=4)
        return context.get_dummy_value()

    return types.void(x, blocks, bias, out, types.intp), emit


@overload(multiply_pair, strict=False)
def _overload_multiply_pair(
    x: Any, blocks: Any, bias: Any, out: Any, stride: Any
) -> Callable[..., None]:
    if not HAS_AVX512 and x.dtype == out.dtype == types.float32:
        return lambda x, blocks, bias, out, stride: _multiply_pair(x, blocks, bias, out, stride)
    return multiply_pair
