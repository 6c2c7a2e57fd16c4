// Included by the CUDA source that TVM writes; its content is in cuda_on_host.h.
// SPDX-License-Identifier: Apache-2.0
