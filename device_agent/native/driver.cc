// Find the CUDA driver, and turn its results into exceptions.
// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

namespace farm {
namespace {

// Set by tests and virtual boards, to replace the driver.
constexpr const char* kLibraryVariable = "TVM_FARM_CUDA_DRIVER";
// The usual name; L4T keeps it in /usr/lib/aarch64-linux-gnu/tegra, which its ld.so.conf names.
constexpr const char* kLibrary = "libcuda.so.1";
constexpr int kMostDevices = 32;

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
Driver table;
pid_t owner = 0;  // the process that initialised the driver; 0: none
CUcontext contexts[kMostDevices] = {};
bool context_lost = false;
thread_local int device_in_use = 0;

// Why the driver cannot be used; empty on success. Hold `mutex`.
std::string start() {
  if (owner == getpid()) return "";
  if (owner != 0) return "CUDA was initialised before this process was forked; start a new process for the GPU";
  const char* chosen = std::getenv(kLibraryVariable);
  const char* path = chosen && *chosen ? chosen : kLibrary;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::string("no CUDA driver: ") + dlerror();
#define FARM_FIND(name, arguments)                                                                    \
  table.name = reinterpret_cast<CUresult(*) arguments>(dlsym(library, #name));                        \
  if (table.name == nullptr) return std::string("the CUDA driver ") + path + " is too old: it lacks " #name;
  FARM_CUDA_ENTRIES(FARM_FIND)
#undef FARM_FIND
  if (CUresult result = table.cuInit(0)) return "cuInit: " + describe(result);
  owner = getpid();
  return "";
}

// Errors that a kernel left behind and that every later call returns: 700 illegal address, 702 launch time-out,
// 710 assert, 714 to 719 hardware stack, illegal instruction, misaligned address, invalid address space or program
// counter, launch failure.
bool is_sticky(CUresult result) {
  return result == 700 || result == 702 || result == 710 || (result >= 714 && result <= 719);
}

}  // namespace

const Driver& driver() {
  if (owner == getpid()) return table;
  std::string reason;
  {
    Locked locked(&mutex);
    reason = start();
  }
  if (!reason.empty()) fail(reason);
  return table;
}

int count_devices() noexcept {
  Locked locked(&mutex);
  int count = 0;
  if (!start().empty() || table.cuDeviceGetCount(&count) != kSuccess) return 0;
  return count < kMostDevices ? count : kMostDevices;
}

void use_device(int device_id) {
  const Driver& cuda = driver();
  if (device_id < 0 || device_id >= kMostDevices) fail("there is no GPU " + text(device_id));
  CUresult result = kSuccess;
  {
    Locked locked(&mutex);
    if (contexts[device_id] == nullptr) {
      CUdevice device = 0;
      result = cuda.cuDeviceGet(&device, device_id);
      if (result == kSuccess) result = cuda.cuDevicePrimaryCtxRetain(&contexts[device_id], device);
    }
  }
  check(result, "cuDevicePrimaryCtxRetain");
  FARM_CUDA(cuCtxSetCurrent, contexts[device_id]);
  device_in_use = device_id;
}

int current_device() { return device_in_use; }

std::string describe(CUresult result) {
  const char *name = nullptr, *words = nullptr;
  if (table.cuGetErrorName == nullptr || table.cuGetErrorName(result, &name) != kSuccess || name == nullptr) {
    return "CUDA error " + text(result);
  }
  std::string text = name;
  if (table.cuGetErrorString(result, &words) == kSuccess && words != nullptr) text += std::string(" (") + words + ")";
  return text;
}

void check(CUresult result, const std::string& what) {
  if (result == kSuccess || result == kDeinitialized) return;
  if (is_sticky(result)) context_lost = true;
  fail(what + ": " + describe(result));
}

bool is_context_lost() noexcept { return context_lost; }

}  // namespace farm
