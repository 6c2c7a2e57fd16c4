// TVM's device "cuda" over the CUDA driver: memory, copies, streams, workspaces, and a timer of events.
// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/runtime/device_api.h>


#include "registry.h"

namespace tvm::runtime {

// As in tvm/runtime/timer.h, which cannot be included: it needs headers that TVM's wheel lacks.
class TimerNode : public ffi::Object {
 public:
  virtual void Start() = 0;
  virtual void Stop() = 0;
  virtual int64_t SyncAndGetElapsedNanos() = 0;
  virtual ~TimerNode() {}
  static constexpr const bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO("runtime.TimerNode", TimerNode, ffi::Object);
};

}  // namespace tvm::runtime

namespace farm {
namespace {

using tvm::Device;
using tvm::runtime::DeviceAttrKind;

CUstream as_stream(TVMStreamHandle stream) { return static_cast<CUstream>(stream); }
CUdeviceptr as_device(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }
bool is_on_host(Device device) { return device.device_type == kDLCPU; }

// Memory that this process holds on the GPU, and how much more it may take. No limit of the system counts it.
class Budget {
 public:
  void allow(size_t more) {
    Locked locked(&mutex_);
    allowed_ = held_ + more < more ? SIZE_MAX : held_ + more;
  }

  CUdeviceptr take(size_t bytes) {
    Locked locked(&mutex_);
    bool over = bytes > allowed_ || held_ > allowed_ - bytes;
    CUdeviceptr pointer = 0;
    // CUDA_ERROR_OUT_OF_MEMORY
    CUresult result = over ? static_cast<CUresult>(2) : driver().cuMemAlloc_v2(&pointer, bytes);
    check(result, "cuMemAlloc of " + text(bytes) + " bytes" + (over ? " beyond the limit" : ""));
    first_ = new Piece{pointer, bytes, first_};
    held_ += bytes;
    return pointer;
  }

  void give_back(CUdeviceptr pointer) {
    Locked locked(&mutex_);
    Piece** at = &first_;
    while (*at != nullptr && (*at)->pointer != pointer) at = &(*at)->next;
    if (*at == nullptr) return;
    Piece* found = *at;
    held_ -= found->bytes;
    *at = found->next;
    delete found;
  }

 private:
  struct Piece {
    CUdeviceptr pointer;
    size_t bytes;
    Piece* next;
  };
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  Piece* first_ = nullptr;
  size_t held_ = 0;
  size_t allowed_ = SIZE_MAX;
};

Budget budget;

// Temporary memory of one thread, cached: kernels request the same sizes repeatedly.
class Workspaces {
 public:
  // The smallest free block that is large enough, but no more than twice as large.
  void* take(int device, size_t bytes) {
    Block* found = nullptr;
    for (Block* each = first_; each; each = each->next) {
      bool fits = !each->taken && each->device == device && each->bytes >= bytes && each->bytes / 2 <= bytes;
      if (fits && (found == nullptr || each->bytes < found->bytes)) found = each;
    }
    if (found == nullptr) {
      use_device(device);
      CUdeviceptr pointer = budget.take(bytes);
      found = first_ = new Block{reinterpret_cast<void*>(pointer), bytes, device, false, first_};
    }
    found->taken = true;
    return found->pointer;
  }

  void give_back(void* pointer) {
    for (Block* each = first_; each; each = each->next) {
      if (each->pointer == pointer) each->taken = false;
    }
  }

 private:
  struct Block {
    void* pointer;
    size_t bytes;
    int device;
    bool taken;
    Block* next;
  };
  Block* first_ = nullptr;  // never freed: the driver may be gone when a thread ends, and a worker ends soon
};

thread_local Workspaces workspaces;

class CudaDevice final : public tvm::runtime::DeviceAPI {
 public:
  void SetDevice(Device device) final { use_device(device.device_id); }

  // `kExist` never fails and never needs a driver; the others throw without one. An unknown attribute stays None.
  void GetAttr(Device device, DeviceAttrKind kind, tvm::ffi::Any* value) final {
    using namespace tvm::runtime;
    static const int kNumbers[][2] = {
        {kMaxThreadsPerBlock, kMaxThreads},    {kWarpSize, kWarp},      {kMaxSharedMemoryPerBlock, kSharedMemory},
        {kMaxRegistersPerBlock, kRegisters},   {kMaxClockRate, kClock}, {kMultiProcessorCount, kProcessors},
        {kL2CacheSizeBytes, kL2Cache},
    };
    for (const auto& each : kNumbers) {
      if (each[0] == kind) *value = read(device, each[1]);
    }
    if (kind == kExist) *value = device.device_id < count_devices() ? 1 : 0;
    if (kind == kComputeVersion) set(value, text(read(device, kMajor)) + "." + text(read(device, kMinor)));
    if (kind == kMaxThreadDimensions) {
      set(value, "[" + text(read(device, kMaxBlockX)) + ", " + text(read(device, kMaxBlockY)) + ", " +
                     text(read(device, kMaxBlockZ)) + "]");
    }
    if (kind == kDeviceName) {
      char name[256] = {};
      FARM_CUDA(cuDeviceGetName, name, sizeof(name) - 1, handle(device));
      set(value, name);
    }
    if (kind == kApiVersion) {
      int version = 0;
      FARM_CUDA(cuDriverGetVersion, &version);
      *value = version;
    }
    if (kind == kTotalGlobalMemory || kind == kAvailableGlobalMemory) {
      size_t available = 0, total = 0;
      use_device(device.device_id);
      FARM_CUDA(cuMemGetInfo_v2, &available, &total);
      *value = static_cast<int64_t>(kind == kTotalGlobalMemory ? total : available);
    }
  }

  // The driver aligns to 256 bytes, more than TVM ever asks for.
  void* AllocDataSpace(Device device, size_t bytes, size_t, DLDataType) final {
    use_device(device.device_id);
    return reinterpret_cast<void*>(budget.take(bytes ? bytes : 1));
  }

  // Frees nothing once the context is lost: the driver has the memory back, and tensors are freed while the kernel's
  // error propagates.
  void FreeDataSpace(Device device, void* pointer) final {
    if (is_context_lost()) return;
    use_device(device.device_id);
    FARM_CUDA(cuMemFree_v2, as_device(pointer));
    budget.give_back(as_device(pointer));
  }

  TVMStreamHandle CreateStream(Device device) final {
    use_device(device.device_id);
    CUstream stream = nullptr;
    FARM_CUDA(cuStreamCreate, &stream, kStreamNonBlocking);
    return stream;
  }

  void FreeStream(Device device, TVMStreamHandle stream) final {
    use_device(device.device_id);
    FARM_CUDA(cuStreamDestroy_v2, as_stream(stream));
  }

  void StreamSync(Device device, TVMStreamHandle stream) final {
    use_device(device.device_id);
    FARM_CUDA(cuStreamSynchronize, as_stream(stream));
  }

  void* AllocWorkspace(Device device, size_t bytes, DLDataType) final {
    return workspaces.take(device.device_id, bytes ? bytes : 1);
  }

  void FreeWorkspace(Device, void* pointer) final { workspaces.give_back(pointer); }

  bool SupportsDevicePointerArithmeticsOnHost() final { return true; }

 protected:
  // Queued on the stream; StreamSync completes it. Copies between GPUs are unsupported: no board has two.
  void CopyDataFromTo(const void* from, size_t from_offset, void* to, size_t to_offset, size_t bytes, Device source,
                      Device destination, DLDataType, TVMStreamHandle stream) final {
    const char* begin = static_cast<const char*>(from) + from_offset;
    char* end = static_cast<char*>(to) + to_offset;
    use_device(is_on_host(destination) ? source.device_id : destination.device_id);
    if (is_on_host(source)) {
      FARM_CUDA(cuMemcpyHtoDAsync_v2, as_device(end), begin, bytes, as_stream(stream));
    } else if (is_on_host(destination)) {
      FARM_CUDA(cuMemcpyDtoHAsync_v2, end, as_device(begin), bytes, as_stream(stream));
    } else if (source.device_id == destination.device_id) {
      FARM_CUDA(cuMemcpyDtoDAsync_v2, as_device(end), as_device(begin), bytes, as_stream(stream));
    } else {
      fail("copies between two GPUs are not offered");
    }
  }

 private:
  static CUdevice handle(Device device) {
    CUdevice found = 0;
    FARM_CUDA(cuDeviceGet, &found, device.device_id);
    return found;
  }

  static int read(Device device, int attribute) {
    int value = 0;
    FARM_CUDA(cuDeviceGetAttribute, &value, attribute, handle(device));
    return value;
  }

  static void set(tvm::ffi::Any* value, const std::string& text) {
    *value = tvm::ffi::String(text.data(), text.size());
  }
};

// The GPU's own time between two events on the stream that was current at `Start`.
class EventTimer final : public tvm::runtime::TimerNode {
 public:
  EventTimer() {
    FARM_CUDA(cuEventCreate, &begin_, 0);
    FARM_CUDA(cuEventCreate, &end_, 0);
  }

  ~EventTimer() {
    if (is_context_lost()) return;
    driver().cuEventDestroy_v2(begin_);
    driver().cuEventDestroy_v2(end_);
  }

  void Start() final {
    stream_ = as_stream(TVMFFIEnvGetStream(kDLCUDA, current_device()));
    FARM_CUDA(cuEventRecord, begin_, stream_);
  }

  void Stop() final { FARM_CUDA(cuEventRecord, end_, stream_); }

  int64_t SyncAndGetElapsedNanos() final {
    FARM_CUDA(cuEventSynchronize, end_);
    float milliseconds = 0;
    FARM_CUDA(cuEventElapsedTime, &milliseconds, begin_, end_);
    return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("farm.cuda.EventTimer", EventTimer, tvm::runtime::TimerNode);

 private:
  CUevent begin_ = nullptr, end_ = nullptr;
  CUstream stream_ = nullptr;
};

// TVM looks the device up by name; the object lives as long as the process.
void get_device_api(const TVMFFIAny*, int, TVMFFIAny* result) {
  static auto* device = new CudaDevice();
  result->type_index = kTVMFFIOpaquePtr;
  result->v_ptr = static_cast<tvm::runtime::DeviceAPI*>(device);
}

// In: the device, from TVM's time evaluator.
void make_timer(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  if (count > 0 && arguments[0].type_index == kTVMFFIDevice) use_device(arguments[0].v_device.device_id);
  give(result, tvm::ffi::ObjectRef(tvm::ffi::make_object<EventTimer>()));
}

const Registration registration({{"device_api.cuda", get_device_api}, {"runtime.timer.cuda", make_timer}});

}  // namespace
}  // namespace farm

// For the agent: let this process take so many more bytes of the GPU's memory.
extern "C" __attribute__((visibility("default"))) void tvm_farm_allow_memory(size_t more) { farm::budget.allow(more); }
