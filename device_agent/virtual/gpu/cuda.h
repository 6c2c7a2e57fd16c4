// Asked for by the CUDA source that TVM writes; what it would bring is in cuda_on_host.h.
// SPDX-License-Identifier: Apache-2.0
