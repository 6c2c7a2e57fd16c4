// A stand-in for the CUDA driver: its entry points over this machine's memory and processor.
//
// It checks arguments, counts memory, can fail with any error at any call, and logs every call. Kernels compiled for
// this machine (cuda_on_host.h) run synchronously; PTX is checked as the driver of the board's release would, and not
// run. The variable TVM_FARM_VIRTUAL_GPU configures it, as `key=value` pairs separated by semicolons; see `Settings`.
// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

// As in ../../native/abi.h: the process that loads this brings libstdc++, and libc++'s strings are made here.
template class std::basic_string<char>;
template std::string std::operator+ <char, std::char_traits<char>, std::allocator<char>>(const char*, const std::string&);
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
  std::string log;          // a file: every call's name and arguments are appended
  long capability = 53;     // as in sm_53
  long processors = 1;      // streaming multiprocessors
  long driver = 10020;      // as cuDriverGetVersion says it: CUDA 10.2
  long ptx = 65;            // the newest .version taken: 6.5
  long memory = 1L << 30;   // bytes
  long registers = 32768;   // per block
  long shared = 49152;      // bytes per block
  long threads = 1024;      // per block
  long clock_khz = 921600;
  long l2 = 262144;         // bytes
  bool pretends = false;    // `run=pretend`: a launch of PTX does nothing, successfully
  std::map<std::string, Failure> failures;
};

struct Event {
  timespec at;
};

using Kernel = void (*)(void** arguments, const unsigned* sizes, unsigned shared_bytes);

struct Module {
  void* library = nullptr;  // null: PTX
  std::string text;
  size_t number = 0;  // of its source
};

struct Function {
  Kernel run;  // null: PTX
  std::string name;
  size_t source;
  unsigned pointers;  // bit i: its argument i is one
};

Settings settings;
bool initialised = false;
bool has_context = false, has_launched = false;
CUresult lost = 0;  // a kernel's error, which every later call returns
size_t allocated = 0;
std::map<CUdeviceptr, size_t> blocks;
// Launches since the last query, and their CUDA source by module: the board's model estimates their time.
std::string launches;
std::map<size_t, std::string> sources;
constexpr size_t kMostLaunchBytes = 4 << 20;

void read_settings() {
  const char* text = std::getenv("TVM_FARM_VIRTUAL_GPU");
  std::string left = text ? text : "";
  const std::map<std::string, long*> numbers = {
      {"capability", &settings.capability}, {"processors", &settings.processors}, {"driver", &settings.driver},
      {"ptx", &settings.ptx},               {"memory", &settings.memory},         {"registers", &settings.registers},
      {"shared", &settings.shared},         {"threads", &settings.threads},       {"clock_khz", &settings.clock_khz},
      {"l2", &settings.l2}};
  while (!left.empty()) {
    size_t end = left.find(';');
    std::string pair = left.substr(0, end), key = pair.substr(0, pair.find('=')), value;
    if (pair.find('=') != std::string::npos) value = pair.substr(pair.find('=') + 1);
    left = end == std::string::npos ? "" : left.substr(end + 1);
    if (auto found = numbers.find(key); found != numbers.end()) *found->second = std::atol(value.c_str());
    if (key == "name") settings.name = value;
    if (key == "log") settings.log = value;
    if (key == "run") settings.pretends = value == "pretend";
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

size_t size_of(CUdeviceptr pointer) {
  auto after = blocks.upper_bound(pointer);
  return after == blocks.begin() ? 0 : std::prev(after)->second;
}

// A library for this machine is stored as these bytes, its size and content, then likewise its CUDA source.
constexpr char kMark[] = "FARMGPU1";

void* open_library(const char* image) {
  uint64_t size = 0;
  std::memcpy(&size, image + 8, sizeof(size));
  int file = memfd_create("kernels", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  for (uint64_t done = 0; done < size;) {
    ssize_t written = write(file, image + 16 + done, size - done);
    if (written <= 0) break;
    done += static_cast<uint64_t>(written);
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
  // The file stays open: the loader would take another file with the same number for the first.
  return dlopen(path, RTLD_NOW | RTLD_LOCAL);
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
  const std::map<int, long> values = {{1, settings.threads},    {2, settings.threads},         {3, settings.threads},
                                      {4, 64},                  {8, settings.shared},          {10, 32},
                                      {12, settings.registers}, {13, settings.clock_khz},      {16, settings.processors},
                                      {38, settings.l2},        {75, settings.capability / 10}, {76, settings.capability % 10}};
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
    loaded->library = open_library(text);
    if (loaded->library == nullptr) {
      reason = dlerror(), result = 200;
    } else {
      uint64_t size = 0, length = 0;
      std::memcpy(&size, text + 8, sizeof(size));
      std::memcpy(&length, text + 16 + size, sizeof(length));
      sources[loaded->number = sources.size()] = std::string(text + 24 + size, length);
    }
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
  Kernel kernel = nullptr;
  unsigned pointers = 0;
  if (loaded->library) {
    kernel = reinterpret_cast<Kernel>(dlsym(loaded->library, (std::string("farm_gpu_") + name).c_str()));
    if (kernel == nullptr) return 500;
    void* known = dlsym(loaded->library, (std::string("farm_pointers_") + name).c_str());
    if (known != nullptr) pointers = *static_cast<unsigned*>(known);
  } else if (loaded->text.find(std::string(".entry ") + name + "(") == std::string::npos) {
    return 500;
  }
  *function = new Function{kernel, name, loaded->number, pointers};
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
  if (kernel->run == nullptr) return settings.pretends ? 0 : 801;
  if (!has_launched) {
    if (CUresult failed = take_for_itself(size_t{8} << 30)) return failed;
    has_launched = true;
  }
  const unsigned sizes[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
  kernel->run(arguments, sizes, shared_bytes);
  if (launches.size() < kMostLaunchBytes) {
    char line[512];
    int length = std::snprintf(line, sizeof(line), "%zu %s %u %u %u %u %u %u %u", kernel->source, kernel->name.c_str(),
                               grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes);
    launches.append(line, static_cast<size_t>(length) < sizeof(line) ? static_cast<size_t>(length) : 0);
    for (unsigned i = 0; kernel->pointers >> i; ++i) {
      bool is_pointer = kernel->pointers >> i & 1;
      std::snprintf(line, sizeof(line), " %zu", is_pointer ? size_of(*static_cast<CUdeviceptr*>(arguments[i])) : 0);
      launches.append(line);
    }
    launches.append("\n");
  }
  return 0;
}

// Beyond CUDA: the launches since the last call, a line each: source number, kernel, grid, block, bytes of dynamic
// shared memory, and the size of each pointer argument's allocation.
extern "C" __attribute__((visibility("default"))) const char* farm_gpu_launches() {
  static std::string answer;
  answer = launches;
  launches.clear();
  return answer.c_str();
}

// Beyond CUDA: the CUDA source of that number.
extern "C" __attribute__((visibility("default"))) const char* farm_gpu_source(size_t number) {
  auto found = sources.find(number);
  return found == sources.end() ? "" : found->second.c_str();
}
