// A stand-in for the CUDA driver: its entry points over this machine's memory and processor.
//
// It checks arguments, counts memory, can fail with any error at any call, and logs every call. Machine code (sass.h)
// is emulated synchronously; PTX is checked as the driver of the board's release would, and not run. The variable
// TVM_FARM_VIRTUAL_GPU configures it, as `key=value` pairs separated by semicolons; see `Settings`.
// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "sass.h"

// As in ../../native/abi.h: the process that loads this brings libstdc++, and libc++'s strings are made here.
template class std::basic_string<char>;
template std::string std::operator+
    <char, std::char_traits<char>, std::allocator<char>>(const char*, const std::string&);
namespace std {
bad_alloc::bad_alloc() noexcept {}
bad_array_new_length::bad_array_new_length() noexcept {}
}  // namespace std

namespace {

using CUresult = int;
using CUdeviceptr = unsigned long long;

struct Error {
  CUresult number;
  const char* name;
  const char* words;
};

// From the enumeration CUresult of the CUDA Driver API reference.
const Error kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {35, "CUDA_ERROR_INSUFFICIENT_DRIVER", "CUDA driver version is insufficient for CUDA runtime version"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE", "operation not supported on global/shared address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

// `fail=ENTRY:NUMBER` or `fail=ENTRY:NUMBER:CALLS` fails a call, after CALLS good ones. With -1 it never returns.
struct Failure {
  CUresult number;
  long good_calls;
};

struct Settings {
  std::string name = "virtual GPU";
  std::string log;         // a file: every call's name and arguments are appended
  long capability = 53;    // as in sm_53
  long processors = 1;     // streaming multiprocessors
  long driver = 10020;     // as cuDriverGetVersion says it: CUDA 10.2
  long ptx = 65;           // the newest .version taken: 6.5
  long memory = 1L << 30;  // bytes
  long registers = 32768;  // per block
  long shared = 49152;     // bytes per block
  long threads = 1024;     // per block
  long clock_khz = 921600;
  long l2 = 262144;       // bytes
  bool proves = false;    // `prove=1`: races and reads of what nothing wrote are faults
  bool estimates = true;  // `estimate=0`: launches have no time
  bool pretends = false;  // `run=pretend`: a launch of PTX does nothing, successfully
  bool computes = true;   // `run=estimate`: launches of machine code have a time and no result
  std::map<std::string, Failure> failures;
};

struct Event {
  timespec at;
};

struct Module {
  std::map<std::string, sass::Kernel> kernels;  // none: PTX
  std::string text;
};

struct Function {
  const sass::Kernel* kernel;  // null: PTX
  std::string name;
};

Settings settings;
bool initialised = false;
bool has_context = false, has_launched = false;
CUresult lost = 0;  // a kernel's error, which every later call returns
size_t allocated = 0;
std::map<CUdeviceptr, size_t> blocks;
void read_settings() {
  const char* text = std::getenv("TVM_FARM_VIRTUAL_GPU");
  std::string left = text ? text : "";
  const std::map<std::string, long*> numbers = {
      {"capability", &settings.capability}, {"processors", &settings.processors},
      {"driver", &settings.driver},         {"ptx", &settings.ptx},
      {"memory", &settings.memory},         {"registers", &settings.registers},
      {"shared", &settings.shared},         {"threads", &settings.threads},
      {"clock_khz", &settings.clock_khz},   {"l2", &settings.l2}};
  while (!left.empty()) {
    size_t end = left.find(';');
    std::string pair = left.substr(0, end), key = pair.substr(0, pair.find('=')), value;
    if (pair.find('=') != std::string::npos) value = pair.substr(pair.find('=') + 1);
    left = end == std::string::npos ? "" : left.substr(end + 1);
    if (auto found = numbers.find(key); found != numbers.end()) *found->second = std::atol(value.c_str());
    if (key == "name") settings.name = value;
    if (key == "log") settings.log = value;
    if (key == "prove") settings.proves = value == "1";
    if (key == "estimate") settings.estimates = value != "0";
    if (key == "run") settings.pretends = value == "pretend", settings.computes = value != "estimate";
    if (key == "fail") {
      char entry[64];
      Failure failure{0, 0};
      if (std::sscanf(value.c_str(), "%63[^:]:%d:%ld", entry, &failure.number, &failure.good_calls) >= 2) {
        settings.failures[entry] = failure;
      }
    }
  }
}

// The driver's own resources in a process: much reserved address space and a waiting thread, for a context and again
// for its first kernel.
CUresult take_for_itself(size_t reserved_bytes) {
  void* reserved = mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return 2;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 64 << 10);
  pthread_t thread;
  auto wait = [](void*) -> void* {
    for (;;) pause();
  };
  int failed = pthread_create(&thread, &small, wait, nullptr);
  pthread_attr_destroy(&small);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (failed) munmap(reserved, reserved_bytes);
  return failed ? 2 : 0;
}

bool is_sticky(CUresult result) {
  return result == 700 || result == 702 || result == 710 || (result >= 714 && result <= 719);
}

// Log the call; return its injected error, or 0.
CUresult enter(const char* entry, const char* format = "", ...) {
  if (!settings.log.empty()) {
    char line[512];
    std::va_list values;
    va_start(values, format);
    std::vsnprintf(line, sizeof(line), format, values);
    va_end(values);
    if (std::FILE* file = std::fopen(settings.log.c_str(), "a")) {
      std::fprintf(file, "%s %s\n", entry, line);
      std::fclose(file);
    }
  }
  if (!initialised) return 3;
  if (lost) return lost;
  auto found = settings.failures.find(entry);
  if (found == settings.failures.end() || found->second.good_calls-- > 0) return 0;
  while (found->second.number < 0) pause();
  if (is_sticky(found->second.number)) lost = found->second.number;
  return found->second.number;
}

#define FARM_ENTER(...) \
  if (CUresult failed = enter(__func__ __VA_OPT__(, ) __VA_ARGS__)) return failed

bool holds(CUdeviceptr pointer, size_t bytes) {
  auto after = blocks.upper_bound(pointer);
  if (after == blocks.begin()) return false;
  auto block = std::prev(after);
  return pointer + bytes <= block->first + block->second;
}

// The text after `word` in PTX, up to white space.
std::string find_directive(const std::string& text, const char* word) {
  size_t at = text.find(word);
  if (at == std::string::npos) return "";
  at = text.find_first_not_of(" \t", at + std::strlen(word));
  return text.substr(at, text.find_first_of(" \t\r\n,", at) - at);
}

// Check PTX's header as the driver's compiler would; `reason` is for the log.
CUresult judge_ptx(const std::string& text, std::string* reason) {
  std::string version = find_directive(text, ".version"), target = find_directive(text, ".target");
  int major = 0, minor = 0, capability = 0;
  if (std::sscanf(version.c_str(), "%d.%d", &major, &minor) != 2 ||
      std::sscanf(target.c_str(), "sm_%d", &capability) != 1) {
    *reason = "ptxas fatal   : Missing .version or .target directive";
    return 218;
  }
  if (major * 10 + minor > settings.ptx) {
    char text[128];
    std::snprintf(text, sizeof(text), "ptxas fatal   : Unsupported .version %s; current version is '%ld.%ld'",
                  version.c_str(), settings.ptx / 10, settings.ptx % 10);
    *reason = text;
    return 222;
  }
  if (capability > settings.capability) {
    *reason = "ptxas fatal   : SM version specified by .target is higher than default SM version assumed";
    return 209;
  }
  return 0;
}

// A cubin is stored as these bytes, its size and content.
constexpr char kMark[] = "FARMGPU2";

// What a launch wrote: the same launch on the same bytes writes the same, and is not emulated again. By the launch with
// its arguments and hashes of all memory that they point to.
struct Memo {
  std::map<CUdeviceptr, std::string> stored;
};
std::map<std::string, Memo> memos;
size_t memo_bytes = 0;
constexpr size_t kMostMemoBytes = size_t{256} << 20;
std::map<CUdeviceptr, uint64_t> hashes;  // of allocations that were not written since
// The estimates of launches, by what decides them, and a line for each launch since the last query.
std::map<std::string, std::string> estimates;
std::string launches;
constexpr size_t kMostLaunchBytes = 4 << 20;

void note_write(CUdeviceptr pointer) {
  auto after = blocks.upper_bound(pointer);
  if (after != blocks.begin()) hashes.erase(std::prev(after)->first);
}

uint64_t hash_of(CUdeviceptr pointer) {
  auto [found, is_new] = hashes.try_emplace(pointer, 0);
  if (!is_new) return found->second;
  size_t bytes = blocks[pointer], at = 0;
  const char* data = reinterpret_cast<const char*>(pointer);
  uint64_t lanes[4] = {1, 2, 3, bytes}, word = 0;
  for (; at + 32 <= bytes; at += 32) {
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&word, data + at + 8 * i, 8);
      lanes[i] = (lanes[i] ^ word) * 0x9e3779b97f4a7c15u;
      lanes[i] ^= lanes[i] >> 29;
    }
  }
  for (; at < bytes; ++at) lanes[0] = (lanes[0] ^ static_cast<unsigned char>(data[at])) * 0x9e3779b97f4a7c15u;
  for (int i = 1; i < 4; ++i) lanes[0] = ((lanes[0] ^ lanes[i]) * 0xff51afd7ed558ccdu) ^ lanes[0] >> 32;
  return found->second = lanes[0];
}

CUresult run_blocks(const sass::Launch& launch, const sass::Ranges& ranges, const sass::Ranges& used, std::string key) {
  for (const auto& [begin, end] : used) {
    char text[32];
    std::snprintf(text, sizeof(text), " %llx", static_cast<unsigned long long>(hash_of(begin)));
    key += text;
  }
  if (auto known = memos.find(key); known != memos.end()) {
    for (const auto& [pointer, bytes] : known->second.stored) {
      std::memcpy(reinterpret_cast<void*>(pointer), bytes.data(), bytes.size());
      note_write(pointer);
    }
    return 0;
  }
  std::set<CUdeviceptr> stored;
  for (unsigned z = 0; z < launch.grid[2]; ++z) {
    for (unsigned y = 0; y < launch.grid[1]; ++y) {
      for (unsigned x = 0; x < launch.grid[0]; ++x) {
        const unsigned index[] = {x, y, z};
        sass::Result result = sass::run_block(launch, index, ranges, settings.proves, nullptr);
        stored.insert(result.stored.begin(), result.stored.end());
        if (result.fault == sass::Fault::kNone) continue;
        std::fprintf(stderr, "%s\n", result.words.c_str());
        switch (result.fault) {
          case sass::Fault::kAddress: return lost = 700;
          case sass::Fault::kAlignment: return lost = 716;
          case sass::Fault::kEndless: return lost = 702;
          case sass::Fault::kInvalid: return lost = 715;
          default: return lost = 719;
        }
      }
    }
  }
  if (memo_bytes > kMostMemoBytes) memos.clear(), memo_bytes = 0;
  for (CUdeviceptr each : stored) {
    note_write(each);
    memos[key].stored[each] = std::string(reinterpret_cast<const char*>(each), blocks[each]);
    memo_bytes += blocks[each];
  }
  return 0;
}

// "KERNEL CYCLES BYTES" for a launch: cycles of the processors, and bytes from the memory.
std::string estimate(const sass::Launch& launch, const sass::Ranges& ranges, const sass::Ranges& used) {
  sass::Machine machine;
  machine.processors = static_cast<unsigned>(settings.processors);
  machine.l2_bytes = static_cast<unsigned>(settings.l2);
  machine.dram_latency = 180e-9 * static_cast<double>(settings.clock_khz) * 1e3;
  sass::Time time = sass::play(launch, ranges, used, machine);
  char line[512];
  std::snprintf(line, sizeof(line), "%s %.0f %.0f\n", launch.kernel->name.c_str(), time.cycles, time.dram_bytes);
  return line;
}

CUresult launch_kernel(const sass::Launch& launch) {
  sass::Ranges ranges, used;
  for (const auto& [begin, bytes] : blocks) ranges[begin] = begin + bytes;
  char text[160];
  std::snprintf(text, sizeof(text), "%p %u %u %u %u %u %u %u", static_cast<const void*>(launch.kernel), launch.grid[0],
                launch.grid[1], launch.grid[2], launch.block[0], launch.block[1], launch.block[2],
                launch.dynamic_bytes);
  std::string shape = text, key = text;
  for (auto [offset, size] : launch.kernel->parameters) {
    unsigned long long value = 0;
    std::memcpy(&value, &launch.parameters[offset], std::min<size_t>(size, sizeof(value)));
    std::snprintf(text, sizeof(text), " %llu", value);
    key += text;
    auto after = blocks.upper_bound(value);
    bool points = size == 8 && after != blocks.begin() && value < std::prev(after)->first + std::prev(after)->second;
    if (points) used[std::prev(after)->first] = std::prev(after)->first + std::prev(after)->second;
    std::snprintf(text, sizeof(text), " %llu",
                  points ? static_cast<unsigned long long>(std::prev(after)->second) : value);
    shape += text;
  }
  CUresult failed = settings.computes ? run_blocks(launch, ranges, used, key) : 0;
  if (failed) return failed;
  if (!settings.estimates) return 0;
  auto [found, is_new] = estimates.try_emplace(shape);
  if (is_new) found->second = estimate(launch, ranges, used);
  if (launches.size() < kMostLaunchBytes) launches += found->second;
  return 0;
}

}  // namespace

#define FARM_ENTRY extern "C" __attribute__((visibility("default"))) CUresult

FARM_ENTRY cuInit(unsigned) {
  read_settings();
  initialised = true;
  CUresult result = enter("cuInit");
  initialised = result == 0;
  return result;
}

FARM_ENTRY cuGetErrorName(CUresult number, const char** name) {
  for (const Error& error : kErrors) {
    if (error.number == number) return *name = error.name, 0;
  }
  return *name = nullptr, 1;
}

FARM_ENTRY cuGetErrorString(CUresult number, const char** words) {
  for (const Error& error : kErrors) {
    if (error.number == number) return *words = error.words, 0;
  }
  return *words = nullptr, 1;
}

FARM_ENTRY cuDriverGetVersion(int* version) {
  *version = static_cast<int>(settings.driver);
  return 0;
}

FARM_ENTRY cuDeviceGetCount(int* count) {
  FARM_ENTER();
  *count = 1;
  return 0;
}

FARM_ENTRY cuDeviceGet(int* device, int ordinal) {
  FARM_ENTER();
  *device = 0;
  return ordinal == 0 ? 0 : 101;
}

FARM_ENTRY cuDeviceGetName(char* name, int size, int) {
  FARM_ENTER();
  std::snprintf(name, static_cast<size_t>(size), "%s", settings.name.c_str());
  return 0;
}

FARM_ENTRY cuDeviceGetAttribute(int* value, int attribute, int) {
  FARM_ENTER();
  const std::map<int, long> values = {{1, settings.threads},          {2, settings.threads},
                                      {3, settings.threads},          {4, 64},
                                      {8, settings.shared},           {10, 32},
                                      {12, settings.registers},       {13, settings.clock_khz},
                                      {16, settings.processors},      {38, settings.l2},
                                      {75, settings.capability / 10}, {76, settings.capability % 10}};
  auto found = values.find(attribute);
  if (found == values.end()) return 1;
  *value = static_cast<int>(found->second);
  return 0;
}

FARM_ENTRY cuDevicePrimaryCtxRetain(void** context, int) {
  FARM_ENTER();
  if (!has_context) {
    if (CUresult failed = take_for_itself(size_t{16} << 30)) return failed;
    has_context = true;
  }
  *context = &settings;
  return 0;
}

FARM_ENTRY cuCtxSetCurrent(void*) {
  if (!initialised) return 3;
  return lost;
}

FARM_ENTRY cuMemGetInfo_v2(size_t* available, size_t* total) {
  FARM_ENTER();
  *total = static_cast<size_t>(settings.memory);
  *available = *total - allocated;
  return 0;
}

FARM_ENTRY cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  FARM_ENTER("%zu", bytes);
  if (bytes == 0) return 1;
  if (allocated + bytes > static_cast<size_t>(settings.memory)) return 2;
  void* block = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (block == nullptr) return 2;
  *pointer = reinterpret_cast<CUdeviceptr>(block);
  blocks[*pointer] = bytes;
  hashes.erase(*pointer);
  allocated += bytes;
  return 0;
}

FARM_ENTRY cuMemFree_v2(CUdeviceptr pointer) {
  FARM_ENTER();
  auto block = blocks.find(pointer);
  if (block == blocks.end()) return 1;
  allocated -= block->second;
  blocks.erase(block);
  std::free(reinterpret_cast<void*>(pointer));
  return 0;
}

FARM_ENTRY cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, void*) {
  FARM_ENTER("%zu", bytes);
  if (!holds(to, bytes)) return 1;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  note_write(to);
  return 0;
}

FARM_ENTRY cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void*) {
  FARM_ENTER("%zu", bytes);
  if (!holds(from, bytes)) return 1;
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}

FARM_ENTRY cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void*) {
  FARM_ENTER("%zu", bytes);
  if (!holds(from, bytes) || !holds(to, bytes)) return 1;
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  note_write(to);
  return 0;
}

FARM_ENTRY cuStreamCreate(void** stream, unsigned flags) {
  FARM_ENTER("%u", flags);
  *stream = std::malloc(1);
  return 0;
}

FARM_ENTRY cuStreamDestroy_v2(void* stream) {
  FARM_ENTER();
  std::free(stream);
  return 0;
}

FARM_ENTRY cuStreamSynchronize(void*) {
  FARM_ENTER();
  return 0;
}

FARM_ENTRY cuEventCreate(void** event, unsigned) {
  FARM_ENTER();
  *event = new Event{};
  return 0;
}

FARM_ENTRY cuEventDestroy_v2(void* event) {
  FARM_ENTER();
  delete static_cast<Event*>(event);
  return 0;
}

FARM_ENTRY cuEventRecord(void* event, void*) {
  FARM_ENTER();
  clock_gettime(CLOCK_MONOTONIC, &static_cast<Event*>(event)->at);
  return 0;
}

FARM_ENTRY cuEventSynchronize(void*) {
  FARM_ENTER();
  return 0;
}

FARM_ENTRY cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  FARM_ENTER();
  const timespec &from = static_cast<Event*>(begin)->at, &to = static_cast<Event*>(end)->at;
  *milliseconds = static_cast<float>(static_cast<double>(to.tv_sec - from.tv_sec) * 1e3 +
                                     static_cast<double>(to.tv_nsec - from.tv_nsec) * 1e-6);
  return 0;
}

FARM_ENTRY cuModuleLoadDataEx(void** module, const void* image, unsigned count, int* options, void** values) {
  FARM_ENTER();
  const char* text = static_cast<const char*>(image);
  auto loaded = new Module();
  std::string reason;
  CUresult result = 0;
  if (std::memcmp(text, kMark, 8) == 0) {
    uint64_t size = 0;
    std::memcpy(&size, text + 8, sizeof(size));
    try {
      loaded->kernels = sass::read_cubin(reinterpret_cast<const uint8_t*>(text) + 16, size);
    } catch (const std::string& words) { reason = words, result = 200; }
  } else if (std::strstr(text, ".version")) {
    loaded->text = text;
    result = judge_ptx(loaded->text, &reason);
  } else {
    result = 200;
  }
  if (result == 0) return *module = loaded, 0;
  delete loaded;
  char* log = nullptr;
  size_t size = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] == 5) log = static_cast<char*>(values[i]);
    if (options[i] == 6) size = reinterpret_cast<size_t>(values[i]);
  }
  if (log && size) std::snprintf(log, size, "%s", reason.c_str());
  return result;
}

FARM_ENTRY cuModuleGetFunction(void** function, void* module, const char* name) {
  FARM_ENTER("%s", name);
  auto loaded = static_cast<Module*>(module);
  const sass::Kernel* kernel = nullptr;
  if (!loaded->kernels.empty()) {
    auto found = loaded->kernels.find(name);
    if (found == loaded->kernels.end()) return 500;
    kernel = &found->second;
  } else if (loaded->text.find(std::string(".entry ") + name + "(") == std::string::npos) {
    return 500;
  }
  *function = new Function{kernel, name};
  return 0;
}

FARM_ENTRY cuFuncSetAttribute(void*, int attribute, int value) {
  FARM_ENTER("%d %d", attribute, value);
  return value <= settings.shared ? 0 : 1;
}

FARM_ENTRY cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void*, void** arguments, void**) {
  auto kernel = static_cast<Function*>(function);
  FARM_ENTER("%s grid %u %u %u block %u %u %u shared %u", kernel->name.c_str(), grid_x, grid_y, grid_z, block_x,
             block_y, block_z, shared_bytes);
  unsigned long threads = static_cast<unsigned long>(block_x) * block_y * block_z;
  if (threads == 0 || grid_x == 0 || grid_y == 0 || grid_z == 0) return 1;
  if (threads > static_cast<unsigned long>(settings.threads) || block_z > 64) return 1;
  if (grid_y > 65535 || grid_z > 65535 || shared_bytes > settings.shared) return 1;
  if (kernel->kernel == nullptr) return settings.pretends ? 0 : 801;
  if (!has_launched) {
    if (CUresult failed = take_for_itself(size_t{8} << 30)) return failed;
    has_launched = true;
  }
  sass::Launch launch{kernel->kernel, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, {}};
  launch.parameters.resize(kernel->kernel->parameter_bytes);
  for (size_t i = 0; i < kernel->kernel->parameters.size(); ++i) {
    auto [offset, size] = kernel->kernel->parameters[i];
    std::memcpy(&launch.parameters[offset], arguments[i], size);
  }
  sass::bind(&launch);
  return launch_kernel(launch);
}

// Beyond CUDA: a line for each launch since the last call; see `estimate`.
extern "C" __attribute__((visibility("default"))) const char* farm_gpu_launches() {
  static std::string answer;
  answer = launches;
  launches.clear();
  return answer.c_str();
}

// Beyond CUDA: estimate a kernel of a cubin on memory of its own. `sizes`: grid, block, bytes of dynamic shared memory.
// `arguments`: for each of `count` parameters the bytes that a pointer is for, or the value. `machine`: processors,
// bytes of L2, cycles of the memory's latency, and the three fitted constants. `found`: cycles, bytes from memory.
// Returns a message, empty where all went well.
extern "C" __attribute__((visibility("default"))) const char* farm_gpu_estimate(const unsigned char* cubin, size_t size,
                                                                                const char* name, const unsigned* sizes,
                                                                                unsigned count,
                                                                                const unsigned long long* arguments,
                                                                                const double* given, double* found) {
  static std::string message;
  message.clear();
  try {
    auto kernels = sass::read_cubin(cubin, size);
    auto kernel = kernels.find(name);
    if (kernel == kernels.end()) throw std::string("no such kernel");
    if (kernel->second.parameters.size() != count) throw std::string("another number of arguments");
    sass::Launch launch{&kernel->second, {sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, sizes[6], {}};
    launch.parameters.resize(kernel->second.parameter_bytes);
    sass::Ranges ranges;
    for (size_t i = 0; i < kernel->second.parameters.size(); ++i) {
      auto [offset, bytes] = kernel->second.parameters[i];
      unsigned long long value = arguments[i];
      if (bytes == 8) {
        void* memory = mmap(nullptr, value, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::string("no memory");
        value = reinterpret_cast<unsigned long long>(memory);
        ranges[value] = value + arguments[i];
      }
      std::memcpy(&launch.parameters[offset], &value, bytes);
    }
    sass::bind(&launch);
    sass::Machine machine;
    machine.processors = static_cast<unsigned>(given[0]), machine.l2_bytes = static_cast<unsigned>(given[1]);
    machine.dram_latency = given[2], machine.port_bytes = given[3], machine.pair_slots = given[4];
    machine.vector_turns = given[5];
    sass::Time time = sass::play(launch, ranges, ranges, machine);
    found[0] = time.cycles, found[1] = time.dram_bytes;
    message = time.fault;
    for (auto [begin, end] : ranges) munmap(reinterpret_cast<void*>(begin), end - begin);
  } catch (const std::string& words) { message = words; }
  return message.c_str();
}
