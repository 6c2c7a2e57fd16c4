// The CUDA driver as this plug-in uses it: its types, its entry points found at run time, its errors as exceptions.
//
// Names, numbers and signatures are those of NVIDIA's CUDA Driver API reference. Building needs nothing of
// NVIDIA's; running needs only the driver's library.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pthread.h>

#include <cstdint>

#include "abi.h"

namespace farm {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

constexpr CUresult kSuccess = 0, kDeinitialized = 4;

enum DeviceAttribute : int {  // CUdevice_attribute
  kMaxThreads = 1, kMaxBlockX, kMaxBlockY, kMaxBlockZ, kSharedMemory = 8, kWarp = 10, kRegisters = 12, kClock = 13,
  kProcessors = 16, kL2Cache = 38, kMajor = 75, kMinor = 76,
};

enum JitOption : int { kErrorLog = 5, kErrorLogBytes = 6 };  // CUjit_option
constexpr int kMaxDynamicShared = 8;                         // CUfunction_attribute
constexpr unsigned kStreamNonBlocking = 1;                   // CUstream_flags

// Every entry point that is used: its name in the library, its arguments. Those that changed their arguments in
// CUDA 3.2 and 4.0 carry the suffix that cuda.h gives them.
#define FARM_CUDA_ENTRIES(X) \
  X(cuInit, (unsigned)) X(cuDriverGetVersion, (int*)) X(cuGetErrorName, (CUresult, const char**)) \
  X(cuGetErrorString, (CUresult, const char**)) X(cuDeviceGetCount, (int*)) X(cuDeviceGet, (CUdevice*, int)) \
  X(cuDeviceGetName, (char*, int, CUdevice)) X(cuDeviceGetAttribute, (int*, int, CUdevice)) \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice)) X(cuCtxSetCurrent, (CUcontext)) \
  X(cuMemGetInfo_v2, (size_t*, size_t*)) X(cuMemAlloc_v2, (CUdeviceptr*, size_t)) X(cuMemFree_v2, (CUdeviceptr)) \
  X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void*, size_t, CUstream)) \
  X(cuMemcpyDtoHAsync_v2, (void*, CUdeviceptr, size_t, CUstream)) \
  X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) X(cuStreamCreate, (CUstream*, unsigned)) \
  X(cuStreamDestroy_v2, (CUstream)) X(cuStreamSynchronize, (CUstream)) \
  X(cuEventCreate, (CUevent*, unsigned)) \
  X(cuEventDestroy_v2, (CUevent)) X(cuEventRecord, (CUevent, CUstream)) X(cuEventSynchronize, (CUevent)) \
  X(cuEventElapsedTime, (float*, CUevent, CUevent)) \
  X(cuModuleLoadDataEx, (CUmodule*, const void*, unsigned, int*, void**)) \
  X(cuModuleGetFunction, (CUfunction*, CUmodule, const char*)) X(cuFuncSetAttribute, (CUfunction, int, int)) \
  X(cuLaunchKernel, \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**))

// The driver's entry points. One per process; `driver()` finds them on first use.
struct Driver {
#define FARM_DECLARE(name, arguments) CUresult(*name) arguments = nullptr;
  FARM_CUDA_ENTRIES(FARM_DECLARE)
#undef FARM_DECLARE
};

// Holds a mutex for a block.
class Locked {
 public:
  explicit Locked(pthread_mutex_t* mutex) : mutex_(mutex) { pthread_mutex_lock(mutex_); }
  ~Locked() { pthread_mutex_unlock(mutex_); }

 private:
  pthread_mutex_t* mutex_;
};

// The initialised driver. Throws if it is missing, refuses, or was initialised before this process was forked: it does
// not survive a fork.
const Driver& driver();

// Make the device's primary context the calling thread's. Throws.
void use_device(int device_id);

// The device that the calling thread used last.
int current_device();

// Number of devices; 0 where the driver cannot be loaded or initialised. Never throws.
int count_devices() noexcept;

// Throw if `result` is an error: "WHAT: NAME (words)". Errors that lose the context are recorded.
void check(CUresult result, const std::string& what);

// The driver's "NAME (words)".
std::string describe(CUresult result);

// Whether the context was lost to an error of a kernel (CUDA calls these sticky): only a new process helps.
bool is_context_lost() noexcept;

#define FARM_CUDA(name, ...) ::farm::check(::farm::driver().name(__VA_ARGS__), #name)

}  // namespace farm
