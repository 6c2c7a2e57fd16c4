"""AutoTVM's schedules of direct and depthwise convolutions as CUDA C, and TopHub's latencies of them on boards.

Written after TVM v0.6 to v0.10: topi's CUDA schedules, and the passes that unroll loops and copy virtual threads. They
decide a kernel's registers and instructions. Names: f, y, x are a result's filter, row and column; c, r, s an FMA's
channel, row and column of the window.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import _machine

RECORDS = _machine.ROOT / "benchmarks" / "data" / "gpu_records.csv"
KERNEL = "convolve"

# TVM copies a statement for each of fewer virtual threads; of more it makes a loop.
_COPIED = 16
# Since then, TVM's analysis of ranges computes quotients that are the same for all threads.
_ANALYSED = "2019-03"

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Record:
    """A convolution of one image, the knobs of its best schedule, and the latency on a board."""

    board: str
    operator: str
    date: str
    channels: int
    image: Pair
    filters: int
    window: Pair
    stride: Pair
    padding: Pair
    result: Pair
    knobs: Mapping[str, tuple[int, ...]]
    seconds: float

    @property
    def group(self) -> str:
        return f"{self.board} {self.operator}"

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.result) * self._weights

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of data, weights and result."""
        floats = self.channels * math.prod(self.image), self._weights, self.filters * math.prod(self.result)
        return 4 * floats[0], 4 * floats[1], 4 * floats[2]

    @property
    def _weights(self) -> int:
        return self.filters * math.prod(self.window) * (1 if self.operator == "depthwise" else self.channels)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Source of the function `convolve(data, weights, result)`; grid and block as x, y, z."""

    source: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


def read_records() -> list[Record]:
    with RECORDS.open(encoding="utf-8") as lines:
        return [_parse(row) for row in csv.DictReader(line for line in lines if not line.startswith("#"))]


def _parse(row: Mapping[str, str]) -> Record:
    numbers = {name: tuple(map(int, text.split("/"))) for name, text in row.items() if text.replace("/", "").isdigit()}
    return Record(
        board=row["board"],
        operator=row["operator"],
        date=row["date"],
        channels=numbers["channels"][0],
        image=(numbers["rows"][0], numbers["columns"][0]),
        filters=numbers["filters"][0],
        knobs={name: numbers[name] for name in numbers if name.startswith(("tile", "auto", "unroll"))},
        seconds=float(row["seconds"]),
        **{name: numbers[name] for name in ("window", "stride", "padding", "result")},
    )


def make_kernel(record: Record) -> Kernel:
    """CUDA C of a record's schedule."""
    return _Depthwise(record).make() if record.operator == "depthwise" else _Direct(record).make()


@dataclasses.dataclass(frozen=True)
class _Store:
    """A statement that writes one value."""

    text: str


@dataclasses.dataclass(frozen=True)
class _Loop:
    name: str
    count: int
    body: _Node


# A list is a sequence; text is written as it is.
_Node = _Store | _Loop | list | str


def _write(node: _Node, limit: int) -> tuple[list[str], int, bool]:
    """Lines, stores after unrolling, and whether a loop is left.

    TVM unrolls from the inside, while a loop holds no other one and its stores do not exceed `limit`.
    """
    if isinstance(node, str):
        return [node], 0, False
    if isinstance(node, _Store):
        return [node.text], 1, False
    if isinstance(node, list):
        parts = [_write(each, limit) for each in node]
        return [line for part in parts for line in part[0]], sum(p[1] for p in parts), any(p[2] for p in parts)
    lines, stores, looped = _write(node.body, limit)
    if node.count == 1:
        return [f"{{ const int {node.name} = 0;", *lines, "}"], stores, looped
    head = f"for (int {node.name} = 0; {node.name} < {node.count}; ++{node.name}) {{"
    if looped or node.count * stores > limit:
        return [head, *lines, "}"], stores, True
    return ["#pragma unroll", head, *lines, "}"], node.count * stores, False


def _nest(loops: Sequence[tuple[str, int]], body: _Node) -> _Node:
    for name, count in reversed(loops):
        body = _Loop(name, count, body)
    return body


def _copy(threads: Sequence[tuple[str, int]], make: Callable[..., str], **chosen: int | str) -> _Node:
    """Repeat a store for all virtual threads; `make` receives their indices by name."""
    if not threads:
        return _Store(make(**chosen))
    (name, count), *rest = threads
    if count < _COPIED:
        return [_copy(rest, make, **chosen, **{name: index}) for index in range(count)]
    return _Loop(name, count, _copy(rest, make, **chosen, **{name: name}))


def _index(*places: tuple[object, int]) -> str:
    """A row-major index of subscripts, each with its extent."""
    (first, _), *others = places
    text = str(first)
    for subscript, extent in others:
        text = f"({text}) * {extent} + {subscript}"
    return text


@dataclasses.dataclass(frozen=True)
class _Split:
    """A dimension of the result: blocks, virtual threads, threads, results of one thread."""

    blocks: int
    virtual: int
    threads: int
    inner: int

    @property
    def span(self) -> int:
        """Results of a block."""
        return self.virtual * self.threads * self.inner

    def place(self, virtual: int | str, thread: str, inner: object) -> str:
        """A result's place in its block."""
        return _index((virtual, self.virtual), (thread, self.threads), (inner, self.inner))


class _Schedule:
    """What both schedules share: blocks copy tiles to shared memory, threads sum up in registers."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.limit = record.knobs["auto_unroll_max_step"][0]
        self.f, self.y, self.x = (_Split(*record.knobs[f"tile_{axis}"]) for axis in "fyx")
        self.threads = self.f.threads, self.y.threads, self.x.threads
        self.virtual = [("vx", self.x.virtual), ("vy", self.y.virtual), ("vf", self.f.virtual)]
        self.inner = [("f", self.f.inner), ("y", self.y.inner), ("x", self.x.inner)]

    def local(self, name: str, vf: object, vy: object, vx: object, *inner: tuple[object, int]) -> str:
        """An element of an array that each virtual thread has a part of."""
        return f"{name}[{_index((vf, 0), (vy, self.y.virtual), (vx, self.x.virtual), *inner)}]"

    def sum(self, vf: object, vy: object, vx: object) -> str:
        return self.local("sums", vf, vy, vx, *self.inner)

    def clear(self, vf: object, vy: object, vx: object) -> str:
        return f"{self.sum(vf, vy, vx)} = 0.0f;"

    def store(self, vf: object, vy: object, vx: object) -> str:
        at = _index(
            (f"bz * {self.f.span} + {self.f.place(vf, 'tz', 'f')}", 0),
            (f"by * {self.y.span} + {self.y.place(vy, 'ty', 'y')}", self.record.result[0]),
            (f"bx * {self.x.span} + {self.x.place(vx, 'tx', 'x')}", self.record.result[1]),
        )
        return f"result[{at}] = {self.sum(vf, vy, vx)};"

    def read(self, channel: str, row: str, column: str) -> str:
        """Read the image, padded: zero outside, where any tile reaches it."""
        record, where = self.record, []
        for name, begin, size, results, stride, window in zip(
            ("row", "column"), record.padding, record.image, record.result, record.stride, record.window, strict=True
        ):
            where += [f"{name} >= 0"] if begin else []
            where += [f"{name} < {size}"] if (results - 1) * stride + window > begin + size else []
        value = f"data[{_index((channel, 0), ('row', record.image[0]), ('column', record.image[1]))}]"
        text = f"const int row = {row} - {record.padding[0]}, column = {column} - {record.padding[1]}; "
        return text + "image[e] = " + (f"({' && '.join(where)}) ? {value} : 0.0f;" if where else f"{value};")

    def finish(self, local: Mapping[str, int], shared: Mapping[str, int], body: _Node) -> Kernel:
        arguments = ", ".join(f"float* __restrict__ {name}" for name in ("data", "weights", "result"))
        lines = [
            f'extern "C" __global__ void {KERNEL}({arguments}) {{',
            "const int tx = threadIdx.x, ty = threadIdx.y, tz = threadIdx.z;",
            "const int bx = blockIdx.x, by = blockIdx.y, bz = blockIdx.z;",
            *(f"float {name}[{count}];" for name, count in local.items()),
            *(f"__shared__ float {name}[{count}];" for name, count in shared.items()),
            *_write(body, self.limit)[0],
            "}",
        ]
        grid = self.x.blocks, self.y.blocks, self.f.blocks
        return Kernel("\n".join(lines), grid, self.threads[::-1], 4 * sum(shared.values()))


class _Direct(_Schedule):
    """A convolution over all channels, some of them at a time in shared memory."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        (self.c_out, self.c), (self.r_out, self.r), (self.s_out, self.s) = (
            record.knobs[f"tile_r{axis}"] for axis in "cyx"
        )
        self.rows = (self.y.span - 1) * record.stride[0] + self.r
        self.columns = (self.x.span - 1) * record.stride[1] + self.s

    def make(self) -> Kernel:
        images = self.c * self.rows * self.columns
        weights = self.f.span * self.c * self.r * self.s
        step = [
            "__syncthreads();",
            self.share(images, self.fetch_image()),
            self.share(weights, self.fetch_weights()),
            "__syncthreads();",
            _nest([("c", self.c), ("r", self.r), ("s", self.s), *self.inner], _copy(self.virtual, self.add)),
        ]
        body = [
            _nest(self.inner, _copy(self.virtual, self.clear)),
            _nest([("c_out", self.c_out), ("r_out", self.r_out), ("s_out", self.s_out)], step),
            _nest(self.inner, _copy(self.virtual, self.store)),
        ]
        sums = math.prod(count for _, count in (*self.virtual, *self.inner))
        return self.finish({"sums": sums}, {"image": images, "taps": weights}, body)

    def share(self, total: int, fetch: str) -> _Node:
        """Copy `total` values; each thread copies neighbours."""
        sizes = [total]
        for threads in self.threads:
            sizes.append(-(-sizes[-1] // threads))
        terms = [f"{name} * {size}" for name, size in zip(("tz", "ty", "tx"), sizes[1:], strict=True)] + ["i"]
        guards = [
            f"{' + '.join(terms[at:])} < {sizes[at]}"
            for at, threads in enumerate(self.threads)
            if sizes[at + 1] * threads != sizes[at]
        ]
        guard = f"if ({' && '.join(guards)}) " if guards else ""
        return _Loop("i", sizes[-1], _Store(f"{{ const int e = {' + '.join(terms)}; {guard}{{ {fetch} }} }}"))

    def fetch_image(self) -> str:
        down, right = self.record.stride
        return self.read(
            f"(c_out * {self.c} + e / {self.rows * self.columns})",
            f"by * {self.y.span * down} + r_out * {self.r} + e / {self.columns} % {self.rows}",
            f"bx * {self.x.span * right} + s_out * {self.s} + e % {self.columns}",
        )

    def fetch_weights(self) -> str:
        at = _index(
            (f"bz * {self.f.span} + e / {self.c * self.r * self.s}", 0),
            (f"c_out * {self.c} + e / {self.r * self.s} % {self.c}", self.record.channels),
            (f"r_out * {self.r} + e / {self.s} % {self.r}", self.record.window[0]),
            (f"s_out * {self.s} + e % {self.s}", self.record.window[1]),
        )
        return f"taps[e] = weights[{at}];"

    def add(self, vf: object, vy: object, vx: object) -> str:
        down, right = self.record.stride
        image = _index(
            ("c", 0),
            (f"({self.y.place(vy, 'ty', 'y')}) * {down} + r", self.rows),
            (f"({self.x.place(vx, 'tx', 'x')}) * {right} + s", self.columns),
        )
        tap = _index((self.f.place(vf, "tz", "f"), 0), ("c", self.c), ("r", self.r), ("s", self.s))
        return f"{self.sum(vf, vy, vx)} += image[{image}] * taps[{tap}];"


class _Depthwise(_Schedule):
    """A convolution of each channel by itself; a thread's values go from shared memory to registers first."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        (height, width), (down, right) = record.window, record.stride
        self.rows, self.columns = (self.y.span - 1) * down + height, (self.x.span - 1) * right + width
        # What a virtual thread reads.
        self.patch = [("r", (self.y.inner - 1) * down + height), ("s", (self.x.inner - 1) * right + width)]
        self.taps = height * width

    def make(self) -> Kernel:
        images, weights = self.f.span * self.rows * self.columns, self.f.span * self.taps
        body = [
            self.share(images, self.fetch_image),
            self.share(weights, self.fetch_weights),
            "__syncthreads();",
            _nest([self.inner[0], *self.patch], _copy(self.virtual, self.take_image)),
            _nest([self.inner[0], ("q", self.taps)], _copy(self.virtual[2:], self.take_weights)),
            _nest(self.inner, [_copy(self.virtual, self.clear), self.add_all()]),
            _nest(self.inner, _copy(self.virtual, self.store)),
        ]
        virtual, filters = math.prod(count for _, count in self.virtual), self.f.inner
        local = {
            "sums": virtual * math.prod(count for _, count in self.inner),
            "patch": virtual * filters * math.prod(count for _, count in self.patch),
            "own": self.f.virtual * filters * self.taps,
        }
        return self.finish(local, {"image": images, "taps": weights}, body)

    def share(self, total: int, fetch: Callable[[range], str]) -> _Node:
        """Copy `total` values in rounds; neighbouring threads copy neighbours."""
        size = math.prod(self.threads)
        rounds = -(-total // size)
        thread = _index(*zip(("tz", "ty", "tx"), self.threads, strict=True))

        def share(begin: str, end: int, span: range) -> _Store:
            guard = f"if (e < {total}) " if end > total else ""
            return _Store(f"{{ const int e = {begin} + {thread}; {guard}{{ {fetch(span)} }} }}")

        if self.record.date >= _ANALYSED and self.record.knobs["unroll_explicit"][0] and rounds <= self.limit:
            begins = range(0, total, size)
            return [share(str(at), at + size, range(at, min(at + size, total))) for at in begins]
        return _Loop("i", rounds, share(f"i * {size}", rounds * size, range(total)))

    def fetch_image(self, span: range) -> str:
        (down, right), (line, column) = self.record.stride, _divide(span, self.columns)
        return self.read(
            f"(bz * {self.f.span} + {_divide(span, self.rows * self.columns)[0]})",
            f"by * {self.y.span * down} + {line} % {self.rows}",
            f"bx * {self.x.span * right} + {column}",
        )

    def fetch_weights(self, _: range) -> str:
        return f"taps[e] = weights[bz * {self.f.span * self.taps} + e];"

    def take_image(self, vf: object, vy: object, vx: object) -> str:
        down, right = self.record.stride
        at = _index(
            (self.f.place(vf, "tz", "f"), 0),
            (f"({_index((vy, 0), ('ty', self.y.threads))}) * {self.y.inner * down} + r", self.rows),
            (f"({_index((vx, 0), ('tx', self.x.threads))}) * {self.x.inner * right} + s", self.columns),
        )
        return f"{self.local('patch', vf, vy, vx, self.inner[0], *self.patch)} = image[{at}];"

    def take_weights(self, vf: object) -> str:
        own = _index((vf, 0), self.inner[0], ("q", self.taps))
        return f"own[{own}] = taps[{_index((self.f.place(vf, 'tz', 'f'), 0), ('q', self.taps))}];"

    def add_all(self) -> _Node:
        height, width = self.record.window
        return _nest([("r", height), ("s", width)], _copy(self.virtual, self.add))

    def add(self, vf: object, vy: object, vx: object) -> str:
        down, right = self.record.stride
        at = (f"(y * {down} + r)", self.patch[0][1]), (f"(x * {right} + s)", self.patch[1][1])
        value = self.local("patch", vf, vy, vx, self.inner[0], *at)
        own = _index((vf, 0), self.inner[0], ("r", self.record.window[0]), ("s", self.record.window[1]))
        return f"{self.sum(vf, vy, vx)} += {value} * own[{own}];"


def _divide(span: range, divisor: int) -> tuple[str, str]:
    """Quotient and remainder of `e`, which is in a range, as TVM's analysis knows them."""
    first, last = span.start // divisor, (span.stop - 1) // divisor
    return (str(first), f"(e - {first * divisor})") if first == last else (f"e / {divisor}", f"e % {divisor}")
