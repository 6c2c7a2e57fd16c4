"""What start-up and linking cost: TVM's imports, LLD against zig's C driver, and filling zig's cache.

Every import is made in a fresh process. Default budget: about 4 minutes on two cores, most of it stock imports.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import _machine

LIMIT_S = 600.0
# Each prints how long what it is named for took, TVM itself being loaded before.
IMPORTS = {
    "tvm_s": "import time; t = time.perf_counter(); import tvm; import tvm.s_tir; print(time.perf_counter() - t)",
    "stock_tensor_intrin_s": "import time, tvm, tvm.s_tir; t = time.perf_counter()\n"
    "import tvm.s_tir.tensor_intrin; print(time.perf_counter() - t)",
    "ours_tensor_intrin_s": "import time, tvm, tvm.s_tir; from farm.search import tvm_env; t = time.perf_counter()\n"
    "tvm_env.load(); print(time.perf_counter() - t)",
}
SLOW_IMPORTS = ("stock_tensor_intrin_s",)


def main() -> None:
    parser = _machine.parser(__doc__)
    parser.add_argument("--imports", type=int, default=5, help="of each kind; stock's: two fewer (default: 5)")
    parser.add_argument("--links", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--warmups", type=int, default=2, help="of each kind, each from an empty cache (default: 2)")
    options = parser.parse_args()
    if options.quick:
        options.imports, options.links, options.warmups = 1, 5, 1
    with _machine.only_json() as emit, _machine.scratch():
        quiet = _machine.wait_until_quiet(options.quick)
        figures = {
            "import": measure_imports(options.imports),
            "link": measure_links(options.links),
            "zig_cache_warm_up": measure_warm_ups(options.warmups),
        }
        emit("toolchain", vars(options), {"machine_quiet": quiet} | figures)


def measure_imports(count: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, code in IMPORTS.items():
        times = []
        for _ in range(max(1, count - 2) if name in SLOW_IMPORTS else count):
            done = subprocess.run(
                [sys.executable, "-c", code],
                cwd=_machine.ROOT,
                stdout=subprocess.PIPE,
                text=True,
                timeout=LIMIT_S,
                check=True,
            )
            times.append(float(done.stdout.split()[-1]))
        figures[name] = _machine.spread(times, digits=3)
        _machine.say(f"import {name}: {figures[name]['median']}")
    figures["ratio"] = _machine.round_to(
        figures["stock_tensor_intrin_s"]["median"] / figures["ours_tensor_intrin_s"]["median"], 3
    )
    return figures


def measure_links(count: int) -> dict[str, Any]:
    """Link one real candidate again and again, in turns, the caches being warm."""
    from farm import linker
    from farm.search import target, tvm_env

    tvm = tvm_env.load()
    built = tvm.tirx.build(
        tvm.ir.load_json(_probe_module()), target=target.make_target(target.host_target(_machine.cores()))
    )
    times: dict[str, list[float]] = {"lld": [], "zig_cc": [], "python_m_ziglang_cc": []}
    module = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fno-sanitize=undefined"]
    cache = os.environ["FARM_ZIG_CACHE"]
    os.environ |= {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        linker.warm(folder, None)

        def link(output: str, objects: Any, options: Any = None, **_: Any) -> None:
            files = [pathlib.Path(file) for file in ([objects] if isinstance(objects, str) else objects)]
            for index in range(count):
                # Zig remembers links by content, and no two candidates are equal. The linkers ignore what is appended.
                with files[0].open("ab") as file:
                    file.write(index.to_bytes(8, "little"))
                began = time.perf_counter()
                linker.link_candidate(pathlib.Path(output), files)
                times["lld"].append(time.perf_counter() - began)
                began = time.perf_counter()
                linker.link_artifact(output, [str(file) for file in files])
                times["zig_cc"].append(time.perf_counter() - began)
                began = time.perf_counter()
                subprocess.run([*module, "-o", output, *map(str, files)], timeout=LIMIT_S, check=True)
                times["python_m_ziglang_cc"].append(time.perf_counter() - began)

        built.export_library(str(folder / "probe.so"), fcompile=link)
    return {f"{kind}_ms": _machine.spread(values, 1e3, digits=3) for kind, values in times.items()}


def measure_warm_ups(count: int) -> dict[str, Any]:
    """Link an empty library with zig's C driver, its cache being empty."""
    import ziglang

    zig = str(pathlib.Path(str(ziglang.__file__)).with_name("zig"))
    times: dict[str, list[float]] = {"without_checks": [], "with_checks": []}
    for _ in range(count):
        for kind, flags in (("without_checks", ["-fno-sanitize=undefined"]), ("with_checks", [])):
            with tempfile.TemporaryDirectory() as name:
                folder = pathlib.Path(name)
                (folder / "warm.c").write_text("int farm_warm(void) { return 0; }\n")
                cache = str(folder / "cache")
                began = time.perf_counter()
                subprocess.run(
                    [zig, "cc", "-shared", *flags, "-o", str(folder / "warm.so"), str(folder / "warm.c"), "-lm"],
                    env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
                    timeout=LIMIT_S,
                    check=True,
                )
                times[kind].append(time.perf_counter() - began)
        _machine.say(
            f"warm-up: {times['without_checks'][-1]:.1f} s without checks, {times['with_checks'][-1]:.1f} s with"
        )
    return {f"{kind}_s": _machine.spread(values, digits=3) for kind, values in times.items()}


def _probe_module() -> str:
    """A matrix product, not scheduled, as `main(a, b, product)` in TVM's JSON."""
    from farm.search import tvm_env

    tvm = tvm_env.load()
    from tvm import te

    size = 64
    a = te.placeholder((size, size), "float32", name="a")
    b = te.placeholder((size, size), "float32", name="b")
    k = te.reduce_axis((0, size), name="k")
    product = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="product")
    function = te.create_prim_func([a, b, product]).with_attr("global_symbol", "main")
    return str(tvm.ir.save_json(tvm.IRModule({"main": function})))


if __name__ == "__main__":
    main()
