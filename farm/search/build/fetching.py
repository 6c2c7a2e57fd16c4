"""Weights fetched ahead: while tiles that share a block of weights compute, the block that comes next is fetched.

A block is read from memory by the first tile that needs it, at the memory's pace, and from the second cache by all
others, during which the memory has nothing to do: a model's weights cost their whole transfer on top of the arithmetic.
A processor's own prefetcher cannot know; here, each tile asks for its share of the next block. Reads lowered functions
and adds `llvm.prefetch`; what they compute stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from farm.search.cores import core_of
from farm.search.families.expressions import evaluate, list_statements, read_value, walk
from farm.search.families.facts import bytes_of, size_of
from farm.search.families.loops import divisors
from tvm import tirx
import tvm_ffi

# Weights of fewer bytes are in the second cache soon enough.
_LEAST_BYTES = 64 << 10
_LINE_BYTES = 64
# A tile's share of up to so many lines is asked for before its sums begin; a longer one by and by, as they go on.
_MOST_AT_ONCE = 6
# Of what a step asks for, in elements, the bits that are a fraction.
_FRACTION_BITS = 14
# Arguments of LLVM's intrinsic: to be read, into the second cache, data.
_READ, _SECOND_CACHE, _DATA = 0, 2, 1
# Tried on x86 alone; the cores of boards have prefetchers that nobody here has timed.
_MACHINES = ("x86_64",)


def fetch_ahead(function: Any, target: Any, tile_bytes: int) -> Any:
    """A lowered function that asks for the next block of its weights, where it has tiles that share one.

    Sums of a tile are in buffers of its own of up to so many bytes, which are not in memory. Raises UsageError for an
    architecture without any core type.
    """
    if not str(target.export().get("mtriple", "")).startswith(_MACHINES):
        return function

    body = _Fetcher(tile_bytes, core_of(dict(target.export())).fetched_bytes).visit(function.body)
    if body.same_as(function.body):
        return function
    return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """A block of weights as it is read: `loop` goes through the last of its loops, `step` elements at a time.

    `first` is the place of a step's first element. `size` elements are a block; `tiles` of them share it, of which
    `tile` is the present one. `nest` is the loop around all that a tile does with the block. `names` are given in it.
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
        """Lines of the next block that one tile asks for."""
        return math.ceil(self.size * self.element_bytes / (_LINE_BYTES * self.tiles))


class _Fetcher:
    """One function's walk, with the loops, names and allocations around the statement that it looks at."""

    def __init__(self, tile_bytes: int, block_bytes: int) -> None:
        """`block_bytes`: the longest block for which there is room beside the one that tiles read."""
        self._tile_bytes, self._block_bytes = tile_bytes, block_bytes
        self._loops: list[Any] = []
        self._names: list[tuple[Any, Any]] = []
        # Buffers of its own, and in how many bytes each lies.
        self._own: list[tuple[Any, int]] = []
        # What is to stand before a loop, by the loop.
        self._before: list[tuple[Any, list[Any]]] = []

    def visit(self, statement: Any) -> Any:
        if isinstance(statement, tirx.SeqStmt):
            return self._visit_sequence(statement)
        if isinstance(statement, tirx.Bind):
            self._names.append((statement.var, statement.value))
        elif isinstance(statement, tirx.AllocBuffer):
            self._own.append((statement.buffer, size_of(statement.buffer)))
        elif isinstance(statement, tirx.DeclBuffer):
            # A part of another; TVM lets several tiles lie in one after the other.
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
        body = self.visit(loop.body) if _has_loops(loop.body) else self._fetch_in(loop)
        self._loops.pop()
        del self._names[named:]
        if body.same_as(loop.body):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)

    def _fetch_in(self, loop: Any) -> Any:
        """The body of an innermost loop, with what it asks for; or that is noted to stand before the tile's loops."""

        stream = self._find_stream(loop)
        if stream is None:
            return loop.body
        next_block = stream.first + stream.size
        if stream.share_lines <= _MOST_AT_ONCE:
            at = next(at for at, each in enumerate(self._loops) if each.same_as(stream.nest))
            start = _spell(next_block, stream.names, [each.loop_var for each in self._loops[at:]])
            start = start + tirx.floordiv(stream.tile * stream.size, stream.tiles)
            self._before.append((stream.nest, list(_ask(stream, start, stream.share_lines))))
            return loop.body
        lines = math.ceil(stream.step * stream.element_bytes / (_LINE_BYTES * stream.tiles))
        done = stream.tile * loop.extent + loop.loop_var
        start = tirx.Cast("int64", next_block - loop.loop_var * stream.step) + _share(done, stream)
        body = list_statements(loop.body)
        return tirx.SeqStmt([*body, *_ask(stream, start, lines)])

    def _find_stream(self, loop: Any) -> _Stream | None:
        """The weights that an innermost loop reads in the order in which they lie, if it only adds to a tile's sums."""

        names = [*self._names, *((s.var, s.value) for s in list_statements(loop.body) if isinstance(s, tirx.Bind))]
        stores = [s for s in list_statements(loop.body) if isinstance(s, tirx.BufferStore)]
        # In memory sums would be stored at each step: LLVM cannot tell that what is asked for is not there.
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
        """Look outwards from a loop for the tiles that share a block; None where none do."""

        size, tiles, tile, nest = step * int(loop.extent), 1, tirx.IntImm("int32", 0), loop
        origin = evaluate(first, None, 0, names)
        for outer in reversed(self._loops[:-1]):
            extent = int(outer.extent)
            # After how many steps the place moves first, and how far by then; where it does not, all of them.
            places = ((at, evaluate(first, outer.loop_var, at, names) - origin) for at in divisors(extent)[:-1])
            still, moved = next(((at, by) for at, by in places if by), (extent, 0))
            if still == 1 and tiles == 1 and moved == size:
                size, nest = size * extent, outer
                continue
            if still < extent and moved != size:
                return None
            # A loop that goes through several blocks has as many tiles as it stands still.
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
    """How many elements of the next block are asked for after so many steps of all tiles, or hardly fewer.

    A division of each step's own took nine instructions beside 27 multiply-adds, two thirds of them on their ports.
    """

    scale = tirx.IntImm("int64", (stream.step << _FRACTION_BITS) // stream.tiles)
    return (tirx.Cast("int64", steps) * scale) >> tirx.IntImm("int64", _FRACTION_BITS)


def _spell(expression: Any, names: list[tuple[Any, Any]], at_zero: list[Any]) -> Any:
    """An expression with names spelt out and some variables at zero."""

    def replace(variable: Any) -> Any:
        if any(variable.same_as(each) for each in at_zero):
            return tirx.IntImm(variable.ty.dtype, 0)
        value = next((value for name, value in names if name.same_as(variable)), None)
        return variable if value is None else _spell(value, names, at_zero)

    return tvm_ffi.structural_map(expression, [(tirx.Var, replace)])


def _ask(stream: _Stream, start: Any, lines: int) -> Iterator[Any]:
    """So many lines from an element on."""

    for line in range(lines):
        at = start + line * _LINE_BYTES // stream.element_bytes
        address = tirx.address_of(tirx.BufferLoad(stream.buffer, [at]))
        how = (tirx.IntImm("int32", each) for each in (_READ, _SECOND_CACHE, _DATA))
        yield tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch.p0", address, *how))


def _has_loops(statement: Any) -> bool:
    return any(isinstance(each, tirx.For) for each in walk(statement))


def _list_vector_loads(value: Any) -> list[Any]:
    """All loads of neighbouring elements in an expression."""

    loads, _ = read_value(value)
    return [
        each
        for each in loads
        if len(each.indices) == 1 and isinstance(each.indices[0], tirx.Ramp) and int(each.indices[0].stride) == 1
    ]


def _count_read(buffer: Any, stores: list[Any]) -> int:
    """Elements of a buffer that one step reads as vectors, each once."""

    found: list[Any] = []
    for load in (load for store in stores for load in _list_vector_loads(store.value)):
        if load.source.same_as(buffer) and not any(tvm_ffi.structural_equal(load, other) for other in found):
            found.append(load)
    return sum(int(load.indices[0].lanes) for load in found)
