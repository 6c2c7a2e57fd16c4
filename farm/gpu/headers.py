"""The headers that TVM's CUDA source includes, reduced to what it uses: `include/`.

NVRTC's wheel has no `cuda_fp16.h`, and its libcu++ is slow to read.
"""

from __future__ import annotations

from pathlib import Path

_FILES = {
    "cuda/std/cstdint": "cuda/std/cstdint.h",
    "cuda/std/type_traits": "cuda/std/type_traits.h",
    "cuda_fp16.h": "cuda_fp16.h",
}
# By the name that a source includes.
HEADERS = {name: (Path(__file__).parent / "include" / file).read_text("utf-8") for name, file in _FILES.items()}
