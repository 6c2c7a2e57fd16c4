// Arithmetic of a warp's 32 lanes that is no plain operator, and the forms of floats.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "sass.h"

namespace sass {

inline float as_float(u32 bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline u32 as_bits(float value) {
  u32 bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline u32 half_to_float(u32 bits) {
  _Float16 half;
  u16 low = static_cast<u16>(bits);
  std::memcpy(&half, &low, 2);
  return as_bits(static_cast<float>(half));
}
inline u32 float_to_half(float value) {
  _Float16 half = static_cast<_Float16>(value);
  u16 low;
  std::memcpy(&low, &half, 2);
  return low;
}
inline float saturate(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }

// FADD, FMUL and FFMA with another rounding, saturation or scale.
void rounded(const Op& op, const u32* a, const u32* b, const u32* c, u32* out);

// F2F, F2I, I2F and I2I. `above` and `upper` are the upper words of 64 bits.
void convert(const Op& op, const u32* b, const u32* above, u32* out, u32* upper);

// HADD2, HMUL2 and HFMA2: two halves of 16 bits at once; each product and sum is rounded once. `out` holds the result's
// row before.
void half2(const Op& op, const u32* a, const u32* b, const u32* c, u32* out);

}  // namespace sass
