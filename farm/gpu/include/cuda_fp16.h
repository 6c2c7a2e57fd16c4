// PTX without `.rn` lets ptxas contract products and sums, as it does for float32.
#pragma once
#include <cuda/std/type_traits>
struct __half {
  unsigned short bits;
  __half() = default;
  // A template is no copy constructor: vectors of halves are copied as words only if copies are trivial.
  template <class T, class = typename cuda::std::enable_if<cuda::std::is_same<T, __half>::value>::type>
  __half(const volatile T& v) : bits(v.bits) {}
  template <class T> void operator=(const T& v) volatile { bits = v.bits; }
  explicit __half(float v) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v)); }
  template <class T> explicit __half(T v) : __half((float)v) {}
  operator float() const { float v; asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits)); return v; }
};
typedef __half half;
struct __align__(4) __half2 {
  half x, y;
  __half2() = default;
  __half2(half x, half y) : x(x), y(y) {}
};
typedef __half2 half2;
inline half2 make_half2(half x, half y) { return half2(x, y); }
inline half __float2half(float v) { return half(v); }
inline half __float2half_rn(float v) { return half(v); }
inline float __half2float(half v) { return v; }
#define FARM_BINARY(SIGN, WORD) inline half operator SIGN(half a, half b) { \
  asm(WORD ".f16 %0, %0, %1;" : "+h"(a.bits) : "h"(b.bits)); return a; }
FARM_BINARY(+, "add") FARM_BINARY(-, "sub") FARM_BINARY(*, "mul")
inline half operator/(half a, half b) { return half((float)a / (float)b); }
inline half operator-(half a) { a.bits ^= 0x8000; return a; }
#define FARM_COMPARISON(SIGN) inline bool operator SIGN(half a, half b) { return (float)a SIGN (float)b; }
FARM_COMPARISON(<) FARM_COMPARISON(>) FARM_COMPARISON(<=) FARM_COMPARISON(>=) FARM_COMPARISON(==) FARM_COMPARISON(!=)
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
#define FARM_UNARY(NAME, OF) inline half NAME(half v) { return half(OF((float)v)); }
FARM_UNARY(hexp, expf) FARM_UNARY(hexp2, exp2f) FARM_UNARY(hexp10, exp10f) FARM_UNARY(hlog, logf)
FARM_UNARY(hlog2, log2f) FARM_UNARY(hlog10, log10f) FARM_UNARY(hsqrt, sqrtf) FARM_UNARY(hrsqrt, rsqrtf)
FARM_UNARY(hsin, sinf) FARM_UNARY(hcos, cosf) FARM_UNARY(htanh, tanhf) FARM_UNARY(hfloor, floorf)
FARM_UNARY(hceil, ceilf) FARM_UNARY(htrunc, truncf) FARM_UNARY(hrint, rintf) FARM_UNARY(__habs, fabsf)
FARM_UNARY(fabsf16, fabsf) FARM_UNARY(hround, roundf)
// TVM calls the second before Volta.
#define FARM_SHUFFLE(NAME, TYPE) \
inline half NAME##_sync(unsigned mask, half v, TYPE to, int width) { \
  v.bits = NAME##_sync(mask, (int)v.bits, to, width); return v; } \
inline half NAME(half v, TYPE to, int width) { return NAME##_sync(~0u, v, to, width); }
FARM_SHUFFLE(__shfl, int) FARM_SHUFFLE(__shfl_up, unsigned) FARM_SHUFFLE(__shfl_down, unsigned)
