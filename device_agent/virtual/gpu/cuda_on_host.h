// The CUDA C that TVM writes, for this machine's C++ compiler: the threads of a block run in turns.
//
// Blocks run in sequence, so a block's shared memory is a static variable. A thread is a fiber with its own stack: it
// runs until it waits for others (__syncthreads, a shuffle) or ends, then the next one runs. Every second block runs
// its threads in descending order: code that lacks a barrier depends on the order, and computes wrong values in one of
// them. Kernels without barriers need no fibers. Times here say nothing about a GPU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

using uint = unsigned int;
using uchar = unsigned char;
using ushort = unsigned short;

// Vectors have the alignment of their elements: TVM casts pointers into arrays that this compiler aligns no further.
#define FARM_VECTORS(type, name)                                                                    \
  struct name##1 { type x; };                                                                       \
  struct name##2 { type x, y; };                                                                    \
  struct name##3 { type x, y, z; };                                                                 \
  struct name##4 { type x, y, z, w; };                                                              \
  inline name##1 make_##name##1(type x) { return {x}; }                                             \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                  \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                       \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
FARM_VECTORS(float, float)
FARM_VECTORS(double, double)
FARM_VECTORS(int, int)
FARM_VECTORS(unsigned, uint)
FARM_VECTORS(short, short)
FARM_VECTORS(unsigned short, ushort)
FARM_VECTORS(signed char, char)
FARM_VECTORS(unsigned char, uchar)
FARM_VECTORS(long long, longlong)
FARM_VECTORS(unsigned long long, ulonglong)

// A thread's built-in variables.
inline uint3 threadIdx, blockIdx, blockDim, gridDim;

#define FARM_LEAST(type)                                          \
  inline type max(type a, type b) { return a > b ? a : b; }       \
  inline type min(type a, type b) { return a < b ? a : b; }
FARM_LEAST(int)
FARM_LEAST(unsigned)
FARM_LEAST(long)
FARM_LEAST(long long)
FARM_LEAST(unsigned long)
inline long max(long a, int b) { return max(a, static_cast<long>(b)); }
inline long min(long a, int b) { return min(a, static_cast<long>(b)); }
inline long max(int a, long b) { return max(b, a); }
inline long min(int a, long b) { return min(b, a); }
// As on the GPU: of a number and a NaN, the number.
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
template <typename T>
inline T __ldg(const T* pointer) {
  return *pointer;
}

#if defined(__x86_64__)
// Callee-saved registers of the System V ABI (rbx, rbp, r12 to r15).
asm(R"(
.text
.hidden farm_switch
.globl farm_switch
.type farm_switch, @function
farm_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr int kSavedWords = 6;
#elif defined(__aarch64__)
// Callee-saved registers of AAPCS64 (x19 to x30, d8 to d15); x30 is the return address.
asm(R"(
.text
.hidden farm_switch
.globl farm_switch
.type farm_switch, %function
farm_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr int kSavedWords = 11;  // the eleventh and twelfth words are x29 and x30
#else
#error "no fibers for this processor"
#endif
extern "C" void farm_switch(void** save, void* load);

namespace farm_host {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = 64 << 10;
constexpr unsigned kWarp = 32;

// Threads of a block that wait for each other.
struct Group {
  unsigned members, arrived, round;
};

// The threads of a warp under one mask; each mask waits separately.
struct Lanes {
  unsigned mask, arrived, round;
};

struct State {
  void* stacks[kMostThreads];
  void* scheduler;
  char* memory;
  unsigned threads, current;
  bool ended[kMostThreads];
  Group block;
  Lanes lanes[kMostThreads / kWarp][kWarp];
  uint64_t slots[kMostThreads];  // each thread's value for its warp
  void (*body)(void*);
  void* context;
};
inline State state;

inline void yield() { farm_switch(&state.stacks[state.current], state.scheduler); }

// Wait until `expected` threads have arrived.
inline void meet(Group& group, unsigned expected) {
  if (++group.arrived >= expected) {
    group.arrived = 0;
    ++group.round;
    return;
  }
  for (unsigned round = group.round; group.round == round;) yield();
}

inline unsigned count_there(unsigned first, unsigned mask) {
  unsigned there = 0;
  for (unsigned i = 0; i < kWarp && first + i < state.threads; ++i) there += mask >> i & 1 && !state.ended[first + i];
  return there;
}

// Wait until the threads of the caller's warp under `mask` have arrived.
inline void meet_lanes(unsigned mask) {
  unsigned first = state.current / kWarp * kWarp;
  Lanes* found = nullptr;
  for (Lanes& each : state.lanes[first / kWarp]) {
    if (each.mask == mask) found = &each;
  }
  for (Lanes& each : state.lanes[first / kWarp]) {
    if (found == nullptr && each.arrived == 0) found = &each;
  }
  if (found == nullptr) std::abort();  // there are at most as many masks as lanes
  found->mask = mask;
  if (++found->arrived >= count_there(first, mask)) {
    found->arrived = 0;
    ++found->round;
    return;
  }
  for (unsigned round = found->round; found->round == round;) yield();
}

inline void leave_lanes(unsigned first) {
  for (Lanes& each : state.lanes[first / kWarp]) {
    if (each.arrived > 0 && each.arrived >= count_there(first, each.mask)) {
      each.arrived = 0;
      ++each.round;
    }
  }
}

inline void leave(Group& group) {
  if (--group.members > 0 && group.arrived >= group.members) {
    group.arrived = 0;
    ++group.round;
  }
}

inline void place(unsigned thread) {
  state.current = thread;
  threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

inline void run_fiber() {
  state.body(state.context);
  state.ended[state.current] = true;
  leave(state.block);
  leave_lanes(state.current / kWarp * kWarp);
  yield();
  std::abort();  // unreachable: no thread switches to one that has ended
}

inline void run_block() {
  if (state.memory == nullptr) {
    void* memory = mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    state.memory = static_cast<char*>(memory);
  }
  state.block = {state.threads, 0, 0};
  std::memset(state.lanes, 0, sizeof(state.lanes));
  for (unsigned thread = 0; thread < state.threads; ++thread) {
    state.ended[thread] = false;
    // The layout that `farm_switch` saves: registers, then the return address; the stack as after a call.
    void** top = reinterpret_cast<void**>(state.memory + (thread + 1) * kStackBytes);
#if defined(__x86_64__)
    void** stack = top - 2 - kSavedWords;
    stack[kSavedWords] = reinterpret_cast<void*>(run_fiber);
#else
    void** stack = top - 20;
    stack[kSavedWords] = reinterpret_cast<void*>(run_fiber);
#endif
    state.stacks[thread] = stack;
  }
  const bool descending = (blockIdx.x + blockIdx.y + blockIdx.z) % 2 != 0;
  for (unsigned left = state.threads; left > 0;) {
    for (unsigned turn = 0; turn < state.threads; ++turn) {
      const unsigned thread = descending ? state.threads - 1 - turn : turn;
      if (state.ended[thread]) continue;
      place(thread);
      farm_switch(&state.scheduler, state.stacks[thread]);
      if (state.ended[thread]) --left;
    }
  }
}

// Run a kernel block by block, threads as fibers if they synchronise, else in sequence.
template <typename... Arguments, size_t... kIndex>
void run(void (*kernel)(Arguments...), void** arguments, const unsigned* sizes, bool meets,
         std::index_sequence<kIndex...>) {
  auto body = [&] { kernel(*static_cast<std::remove_reference_t<Arguments>*>(arguments[kIndex])...); };
  gridDim = {sizes[0], sizes[1], sizes[2]};
  blockDim = {sizes[3], sizes[4], sizes[5]};
  state.threads = sizes[3] * sizes[4] * sizes[5];
  state.context = &body;
  state.body = [](void* context) { (*static_cast<decltype(body)*>(context))(); };
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        if (meets) {
          run_block();
          continue;
        }
        for (unsigned thread = 0; thread < state.threads; ++thread) {
          place(thread);
          body();
        }
      }
    }
  }
}

template <typename... Arguments>
void run(void (*kernel)(Arguments...), void** arguments, const unsigned* sizes, bool meets) {
  run(kernel, arguments, sizes, meets, std::index_sequence_for<Arguments...>());
}

// Bit i is set where a kernel's argument i is a pointer.
template <typename... Arguments>
constexpr unsigned pointers(void (*)(Arguments...)) {
  unsigned bits = 0, bit = 1;
  ((bits |= std::is_pointer_v<Arguments> ? bit : 0, bit <<= 1), ...);
  return bits;
}

// The value of thread `lane` in the caller's warp, exchanged among those of `mask`.
template <typename T>
T shuffle(unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  unsigned first = state.current / kWarp * kWarp;
  std::memcpy(&state.slots[state.current], &value, sizeof(T));
  meet_lanes(mask);
  if (first + lane < state.threads) std::memcpy(&value, &state.slots[first + lane], sizeof(T));
  meet_lanes(mask);
  return value;
}

inline unsigned lane() { return state.current % kWarp; }

}  // namespace farm_host

inline void __syncthreads() { farm_host::meet(farm_host::state.block, farm_host::state.block.members); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { farm_host::shuffle(mask, 0, farm_host::lane()); }
inline unsigned __activemask() { return 0xffffffffu; }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  unsigned self = farm_host::lane();
  return farm_host::shuffle(mask, value, (self & ~(width - 1u)) + (static_cast<unsigned>(source) & (width - 1u)));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned self = farm_host::lane();
  return farm_host::shuffle(mask, value, (self & (width - 1u)) < delta ? self : self - delta);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  unsigned self = farm_host::lane();
  return farm_host::shuffle(mask, value, (self & (width - 1u)) + delta >= static_cast<unsigned>(width) ? self : self + delta);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int = 32) {
  return farm_host::shuffle(mask, value, farm_host::lane() ^ static_cast<unsigned>(lanes));
}
