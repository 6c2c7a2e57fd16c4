"""Prefetch weights into L2: tiles that share a block of weights prefetch the next block while they compute.

The first tile that needs a block reads it from memory; the others hit in L2 while the memory idles. Without prefetching
a model's weights cost their whole transfer on top of the arithmetic, since hardware prefetchers do not cross blocks.
Each tile prefetches its part of the next block. The pass adds `llvm.prefetch` to lowered functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import tvm_ffi
from tvm import tirx

from farm.search.cores import core_of
from farm.search.families.expressions import evaluate, list_statements, read_value, walk
from farm.search.families.facts import bytes_of, size_of
from farm.search.families.loops import divisors

# Smaller weights gain nothing measurable.
_LEAST_BYTES = 64 << 10
_LINE_BYTES = 64
# Up to this many lines are prefetched before a tile's reduction; more are spread over its steps.
_MOST_AT_ONCE = 6
# Fraction bits of the fixed-point number of elements per step.
_FRACTION_BITS = 14
# Arguments of the LLVM intrinsic: read access, locality L2, data.
_READ, _L2, _DATA = 0, 2, 1
# Measured on x86 only.
_MACHINES = ("x86_64",)


def prefetch_weights(function: Any, target: Any, tile_bytes: int) -> Any:
    """Make the tiles of a lowered function prefetch the next block of the weights that they share.

    Accumulators are in local buffers of up to `tile_bytes`, which are not in memory. Raises UsageError for an
    architecture without a core type.
    """
    if not str(target.export().get("mtriple", "")).startswith(_MACHINES):
        return function
    body = _Prefetcher(tile_bytes, core_of(dict(target.export())).prefetched_bytes).visit(function.body)
    if body.same_as(function.body):
        return function
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """A block of weights: `loop` is its innermost loop and reads `step` elements per iteration.

    `first` is the index of a step's first element. A block has `size` elements and serves `tiles` tiles, of which
    `tile` is the current one. `nest` is the loop around all of a tile's work on the block. `names` are bound in it.
    """

    buffer: Any
    loop: Any
    first: Any
    step: int
    size: int
    tiles: int
    tile: Any
    nest: Any
    names: list[tuple[Any, Any]]

    @property
    def element_bytes(self) -> int:
        return bytes_of(self.buffer.dtype)

    @property
    def share_lines(self) -> int:
        """Cache lines of the next block that one tile prefetches."""
        return math.ceil(self.size * self.element_bytes / (_LINE_BYTES * self.tiles))


class _Prefetcher:
    """Walk over one function, with the enclosing loops, names and allocations."""

    def __init__(self, tile_bytes: int, block_bytes: int) -> None:
        """`block_bytes` is the longest block that fits in L2 beside the one in use."""
        self._tile_bytes, self._block_bytes = tile_bytes, block_bytes
        self._loops: list[Any] = []
        self._names: list[tuple[Any, Any]] = []
        # Local buffers and the size of the allocation that each lies in.
        self._own: list[tuple[Any, int]] = []
        # Statements to insert before a loop.
        self._before: list[tuple[Any, list[Any]]] = []

    def visit(self, statement: Any) -> Any:
        if isinstance(statement, tirx.SeqStmt):
            return self._visit_sequence(statement)
        if isinstance(statement, tirx.Bind):
            self._names.append((statement.var, statement.value))
        elif isinstance(statement, tirx.AllocBuffer):
            self._own.append((statement.buffer, size_of(statement.buffer)))
        elif isinstance(statement, tirx.DeclBuffer):
            # An alias of another buffer; TVM lets several tiles reuse one allocation.
            whole = next(iter(getattr(statement.data, "args", None) or ()), None)
            self._own += [(statement.buffer, size) for own, size in self._own if own.same_as(whole)]
        elif isinstance(statement, tirx.AttrStmt):
            body = self.visit(statement.body)
            if not body.same_as(statement.body):
                return tirx.AttrStmt(statement.node, statement.attr_key, statement.value, body)
        elif isinstance(statement, tirx.For):
            return self._visit_loop(statement)
        return statement

    def _visit_sequence(self, sequence: Any) -> Any:
        named, parts, changed = len(self._names), [], False
        for each in sequence.seq:
            part = self.visit(each)
            before = [statement for loop, found in self._before if loop.same_as(each) for statement in found]
            changed |= bool(before) or not part.same_as(each)
            parts += [*before, part]
        del self._names[named:]
        return tirx.SeqStmt(parts) if changed else sequence

    def _visit_loop(self, loop: Any) -> Any:
        named = len(self._names)
        self._loops.append(loop)
        has_loops = any(isinstance(each, tirx.For) for each in walk(loop.body))
        body = self.visit(loop.body) if has_loops else self._visit_innermost(loop)
        self._loops.pop()
        del self._names[named:]
        if body.same_as(loop.body):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)

    def _visit_innermost(self, loop: Any) -> Any:
        """Return the body of an innermost loop with its prefetches, or note those that precede the tile's loops."""
        stream = self._find_stream(loop)
        if stream is None:
            return loop.body
        next_block = stream.first + stream.size
        if stream.share_lines <= _MOST_AT_ONCE:
            at = next(at for at, each in enumerate(self._loops) if each.same_as(stream.nest))
            start = _spell(next_block, stream.names, [each.loop_var for each in self._loops[at:]])
            start = start + tirx.floordiv(stream.tile * stream.size, stream.tiles)
            self._before.append((stream.nest, list(_emit_prefetches(stream, start, stream.share_lines))))
            return loop.body
        lines = math.ceil(stream.step * stream.element_bytes / (_LINE_BYTES * stream.tiles))
        done = stream.tile * loop.extent + loop.loop_var
        start = tirx.Cast("int64", next_block - loop.loop_var * stream.step) + _share(done, stream)
        return tirx.SeqStmt([*list_statements(loop.body), *_emit_prefetches(stream, start, lines)])

    def _find_stream(self, loop: Any) -> _Stream | None:
        """Find the weights that an innermost loop reads contiguously, if it only updates accumulators."""
        names = [*self._names, *((s.var, s.value) for s in list_statements(loop.body) if isinstance(s, tirx.Bind))]
        stores = [s for s in list_statements(loop.body) if isinstance(s, tirx.BufferStore)]
        # Accumulators in memory would be stored at each step: LLVM assumes that a prefetch may alias them.
        if int(loop.kind) != 0 or not stores or not all(self._is_tile(store.buffer) for store in stores):
            return None
        for load in (load for store in stores for load in _list_vector_loads(store.value)):
            buffer, base = load.source, load.indices[0].base
            if any(buffer.same_as(own) for own, _ in self._own) or size_of(buffer) < _LEAST_BYTES:
                continue
            step = evaluate(base, loop.loop_var, 1, names) - evaluate(base, None, 0, names)
            if step and step == _count_read(buffer, stores):
                return self._follow(loop, buffer, base, step, names)
        return None

    def _follow(self, loop: Any, buffer: Any, first: Any, step: int, names: list[Any]) -> _Stream | None:
        """Find the enclosing loops whose tiles share the block; None where there are none."""
        size, tiles, tile, nest = step * int(loop.extent), 1, tirx.IntImm("int32", 0), loop
        origin = evaluate(first, None, 0, names)
        for outer in reversed(self._loops[:-1]):
            extent = int(outer.extent)
            # The number of steps after which the index first moves, and by how much; all of them where it does not.
            places = ((at, evaluate(first, outer.loop_var, at, names) - origin) for at in divisors(extent)[:-1])
            still, moved = next(((at, by) for at, by in places if by), (extent, 0))
            if still == 1 and tiles == 1 and moved == size:
                size, nest = size * extent, outer
                continue
            if still < extent and moved != size:
                return None
            # A loop over several blocks has as many tiles per block as steps without a move.
            tile = (outer.loop_var if still == extent else tirx.floormod(outer.loop_var, still)) * tiles + tile
            tiles *= still
            if still < extent:
                break
        else:
            return None
        fits = size * bytes_of(buffer.dtype) <= self._block_bytes
        return _Stream(buffer, loop, first, step, size, tiles, tile, nest, names) if tiles > 1 and fits else None

    def _is_tile(self, buffer: Any) -> bool:
        return any(buffer.same_as(own) and size <= self._tile_bytes for own, size in self._own)


def _share(steps: Any, stream: _Stream) -> Any:
    """Return how many elements of the next block are prefetched after `steps` steps of all tiles.

    Fixed point: a division per step took nine instructions beside 27 FMAs, two thirds of them on the same ports.
    """
    scale = tirx.IntImm("int64", (stream.step << _FRACTION_BITS) // stream.tiles)
    return (tirx.Cast("int64", steps) * scale) >> tirx.IntImm("int64", _FRACTION_BITS)


def _spell(expression: Any, names: list[tuple[Any, Any]], at_zero: list[Any]) -> Any:
    """Expand names in an expression and set some variables to zero."""

    def replace(variable: Any) -> Any:
        if any(variable.same_as(each) for each in at_zero):
            return tirx.IntImm(variable.ty.dtype, 0)
        value = next((value for name, value in names if name.same_as(variable)), None)
        return variable if value is None else _spell(value, names, at_zero)

    return tvm_ffi.structural_map(expression, [(tirx.Var, replace)])


def _emit_prefetches(stream: _Stream, start: Any, lines: int) -> Iterator[Any]:
    """Yield prefetches of `lines` cache lines from the element `start`."""
    for line in range(lines):
        at = start + line * _LINE_BYTES // stream.element_bytes
        address = tirx.address_of(tirx.BufferLoad(stream.buffer, [at]))
        how = (tirx.IntImm("int32", each) for each in (_READ, _L2, _DATA))
        yield tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch.p0", address, *how))


def _list_vector_loads(value: Any) -> list[Any]:
    """List all loads of contiguous elements in an expression."""
    loads, _ = read_value(value)
    return [
        each
        for each in loads
        if len(each.indices) == 1 and isinstance(each.indices[0], tirx.Ramp) and int(each.indices[0].stride) == 1
    ]


def _count_read(buffer: Any, stores: list[Any]) -> int:
    """Count the elements of a buffer that one step reads as vectors, each once."""
    found: list[Any] = []
    for load in (load for store in stores for load in _list_vector_loads(store.value)):
        if load.source.same_as(buffer) and not any(tvm_ffi.structural_equal(load, other) for other in found):
            found.append(load)
    return sum(int(load.indices[0].lanes) for load in found)
