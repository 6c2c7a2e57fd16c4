"""The agent on a board: serves TVM RPC, runs candidates in worker processes, and reports evidence.

Nothing here imports `farm`, ray or a database: a board installs this package alone.
"""

import os

# Where torch is installed, `import tvm_ffi` imports it and asks it for a GPU, which initialises CUDA. A process that is
# forked later cannot use the GPU then.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")

__version__ = "0.2.0"
