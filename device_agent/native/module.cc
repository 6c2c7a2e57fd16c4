// Modules of kind "cuda" as TVM exports them: read, load into the driver on first call, launch.
//
// The farm's host compiles to PTX, and the driver for the GPU. CUDA source is refused: a board has no compiler for it.
// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/module.h>

#include <map>
#include <vector>

#include "registry.h"

namespace farm {
namespace {

using tvm::ffi::Function;
using tvm::ffi::ModuleObj;
using tvm::ffi::ObjectPtr;
using tvm::ffi::Optional;
using tvm::ffi::String;

constexpr int kMostDevices = 32;
constexpr size_t kLogBytes = 8192;
// Above this size the driver requires an explicit limit on a kernel's dynamic shared memory.
constexpr int64_t kUsualShared = 48 << 10;

// A kernel's signature: its arguments, then those that TVM's host code appends.
struct Kernel {
  std::vector<DLDataType> arguments;
  std::vector<std::string> launch;
};

// TVM's own serialisation (support/serializer.h): numbers in little-endian order, sizes as 64 bits before contents.
class Reader {
 public:
  Reader(const char* data, size_t size) : at_(data), left_(size) {}

  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof(Number)), sizeof(Number));
    return value;
  }

  std::string string() {
    uint64_t size = number<uint64_t>();
    return std::string(take(size), size);
  }

 private:
  const char* take(uint64_t size) {
    if (size > left_) fail("the CUDA module is cut short");
    const char* begin = at_;
    at_ += size;
    left_ -= size;
    return begin;
  }

  const char* at_;
  size_t left_;
};

class CudaModule final : public ModuleObj {
 public:
  CudaModule(const char* data, size_t size) {
    Reader reader(data, size);
    format_ = reader.string();
    for (uint64_t left = reader.number<uint64_t>(); left > 0; --left) {
      Kernel& kernel = kernels_[reader.string()];
      reader.string();  // the name again
      for (uint64_t each = reader.number<uint64_t>(); each > 0; --each) {
        DLDataType type;
        type.code = reader.number<uint8_t>();
        type.bits = reader.number<uint8_t>();
        type.lanes = reader.number<uint16_t>();
        kernel.arguments.push_back(type);
      }
      for (uint64_t each = reader.number<uint64_t>(); each > 0; --each) kernel.launch.push_back(reader.string());
      for (uint64_t each = reader.number<uint64_t>(); each > 0; --each) {
        if (reader.number<int32_t>() != 0) fail("a kernel wants a tensor map, which these GPUs do not have");
      }
    }
    code_ = reader.string();
    // The driver of a virtual board reads as many bytes as the mark is followed by.
    if (code_.compare(0, 8, "FARMGPU2") == 0) {
      uint64_t bytes = 0;
      if (code_.size() >= 16) std::memcpy(&bytes, code_.data() + 8, sizeof(bytes));
      if (code_.size() < 16 || bytes > code_.size() - 16) fail("the module's machine code is cut short");
    }
    // TVM calls the form "cuda", also for a compiled binary.
    if (code_.find("__global__") != std::string::npos) fail("the module holds CUDA source, which no board compiles");
  }

  const char* kind() const final { return "cuda"; }
  int GetPropertyMask() const final { return tvm::ffi::Module::kRunnable; }
  Optional<Function> GetFunction(const String& name) final;

  // The kernel on a device; compiled by the driver on first use. Throws the driver's log on failure.
  CUfunction find(int device_id, const std::string& name) {
    Locked locked(&mutex_);
    if (loaded_[device_id] == nullptr) load(device_id);
    CUfunction function = nullptr;
    check(driver().cuModuleGetFunction(&function, loaded_[device_id], name.c_str()),
          "cuModuleGetFunction " + name);
    return function;
  }

 private:
  void load(int device_id) {
    std::string log(kLogBytes, '\0');
    int options[] = {kErrorLog, kErrorLogBytes};
    void* values[] = {log.data(), reinterpret_cast<void*>(kLogBytes)};
    CUresult result = driver().cuModuleLoadDataEx(&loaded_[device_id], code_.c_str(), 2, options, values);
    if (result == kSuccess) return;
    loaded_[device_id] = nullptr;
    log.resize(std::strlen(log.c_str()));
    check(result, "the driver refuses the module" + (log.empty() ? log : "; it says: " + log));
  }

  std::string format_, code_;
  std::map<std::string, Kernel> kernels_;
  CUmodule loaded_[kMostDevices] = {};  // never unloaded: the process that runs it ends soon
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

// One kernel, to be called with its arguments and the sizes of its grid and blocks.
class Launcher {
 public:
  Launcher(ObjectPtr<CudaModule> module, std::string name, const Kernel& kernel)
      : module_(std::move(module)), name_(std::move(name)), types_(kernel.arguments) {
    for (const DLDataType& type : types_) {
      bool wide = type.bits == 32 || type.bits == 64;
      bool known = type.code == kDLOpaqueHandle || (wide && (type.code == kDLInt || type.code == kDLFloat)) ||
                   (type.code == kDLUInt && type.bits == 32);
      if (type.lanes != 1 || !known) fail("the kernel " + name_ + " has an argument that cannot be passed");
    }
    for (const std::string& tag : kernel.launch) {
      static const char* const kTags[] = {"blockIdx.x",  "blockIdx.y",  "blockIdx.z", "threadIdx.x",
                                          "threadIdx.y", "threadIdx.z", "tirx.use_dyn_shared_memory"};
      int found = 0;
      while (found < 7 && tag != kTags[found]) ++found;
      if (found == 7) fail("the kernel " + name_ + " wants " + tag + ", which these GPUs do not have");
      places_.push_back(found);
    }
  }

  void launch(const TVMFFIAny* arguments, int count) {
    size_t passed = types_.size();
    if (static_cast<size_t>(count) != passed + places_.size()) {
      fail("the kernel " + name_ + " was called with " + text(count) + " arguments");
    }
    // A dimension of a dynamic shape may be zero; the driver requires at least one.
    int64_t sizes[7] = {1, 1, 1, 1, 1, 1, 0};
    for (size_t i = 0; i < places_.size(); ++i) {
      int64_t value = arguments[passed + i].v_int64;
      if (value > 0) sizes[places_[i]] = value;
    }
    int device_id = current_device();
    use_device(device_id);
    CUfunction& function = functions_[device_id];
    if (function == nullptr) function = module_->find(device_id, name_);
    if (sizes[6] >= kUsualShared && sizes[6] != shared_[device_id]) {
      check(driver().cuFuncSetAttribute(function, kMaxDynamicShared, static_cast<int>(sizes[6])),
            "dynamic shared memory of " + text(sizes[6]) + " bytes for " + name_);
      shared_[device_id] = sizes[6];
    }
    std::vector<uint32_t> words(passed);
    std::vector<void*> pointers(passed);
    for (size_t i = 0; i < passed; ++i) pointers[i] = place(types_[i], arguments[i], &words[i]);
    auto size = [&](int which) { return static_cast<unsigned>(sizes[which]); };
    CUresult result = driver().cuLaunchKernel(
        function, size(0), size(1), size(2), size(3), size(4), size(5), size(6),
        static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device_id)), pointers.data(), nullptr);
    if (result == kSuccess) return;
    std::string what = "launch of " + name_ + ", grid";
    for (int i = 0; i < 6; ++i) what += (i == 3 ? ", block " : " ") + text(sizes[i]);
    check(result, what);
  }

 private:
  // The argument's address: TVM passes every number as 64 bits, a kernel may take 32.
  static void* place(const DLDataType& type, const TVMFFIAny& value, uint32_t* word) {
    if (type.code == kDLOpaqueHandle || type.bits == 64) return const_cast<int64_t*>(&value.v_int64);
    if (type.code == kDLFloat) {
      float narrow = static_cast<float>(value.v_float64);
      std::memcpy(word, &narrow, sizeof(narrow));
    } else {
      *word = static_cast<uint32_t>(value.v_int64);
    }
    return word;
  }

  ObjectPtr<CudaModule> module_;
  std::string name_;
  std::vector<DLDataType> types_;
  std::vector<int> places_;  // for each size that is appended: which of grid, block and shared memory it is
  CUfunction functions_[kMostDevices] = {};
  int64_t shared_[kMostDevices] = {};
};

int call_launcher(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny*) {
  return guard([&] { static_cast<Launcher*>(self)->launch(arguments, count); });
}

void drop_launcher(void* self) { delete static_cast<Launcher*>(self); }

Optional<Function> CudaModule::GetFunction(const String& name) {
  auto found = kernels_.find(std::string(name.data(), name.size()));
  if (found == kernels_.end()) return std::nullopt;
  using Unsafe = tvm::ffi::details::ObjectUnsafe;
  auto* launcher = new Launcher(Unsafe::ObjectPtrFromUnowned<CudaModule>(this), found->first, found->second);
  TVMFFIObjectHandle handle = nullptr;
  if (TVMFFIFunctionCreate(launcher, call_launcher, drop_launcher, &handle) != 0) {
    delete launcher;
    fail("TVM takes no function for the kernel " + found->first);
  }
  return Unsafe::ObjectRefFromObjectPtr<Function>(
      Unsafe::ObjectPtrFromOwned<tvm::ffi::Object>(static_cast<TVMFFIObject*>(handle)));
}

// In: the bytes of a module in an exported library.
void load_from_bytes(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  auto bytes = count == 1 ? tvm::ffi::AnyView::CopyFromTVMFFIAny(arguments[0]).try_cast<tvm::ffi::Bytes>() : std::nullopt;
  if (!bytes) fail("a CUDA module is loaded from bytes");
  give(result, tvm::ffi::Module(tvm::ffi::make_object<CudaModule>(bytes->data(), bytes->size())));
}

const Registration registration({{"ffi.Module.load_from_bytes.cuda", load_from_bytes}});

}  // namespace
}  // namespace farm
