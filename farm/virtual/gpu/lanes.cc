// Rounding modes, conversions between types and half precision, lane by lane.
// SPDX-License-Identifier: Apache-2.0
#include "lanes.h"

#include <cfenv>
#include <cmath>

namespace sass {

__attribute__((noinline)) void rounded(const Op& op, const u32* a, const u32* b, const u32* c, u32* out) {
  static const int kModes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
  static const float kScales[] = {1.0f, 0.5f, 0.25f, 0.125f, 8.0f, 4.0f, 2.0f, 1.0f};
  std::fesetround(kModes[op.round]);
  for (int l = 0; l < 32; ++l) {
    volatile float x = as_float(a[l]), y = as_float(b[l]), z = as_float(c[l]);
    if (op.flags & kAbsoluteA) x = std::fabs(x);
    if (op.flags & kAbsoluteB) y = std::fabs(y);
    if (op.flags & kNegateA) x = -x;
    if (op.flags & kNegateB) y = -y;
    if (op.flags & kNegateC) z = -z;
    volatile float value = op.code == Code::FADD   ? x + y
                           : op.code == Code::FMUL ? x * kScales[op.mode] * y
                                                   : std::fmaf(x, y, z);
    out[l] = as_bits(op.flags & kSaturate ? saturate(value) : value);
  }
  std::fesetround(FE_TONEAREST);
}

void convert(const Op& op, const u32* b, const u32* above, u32* out, u32* upper) {
  const u32 f = op.flags;
  for (int l = 0; l < 32; ++l) {
    if (op.code == Code::F2F || op.code == Code::F2I) {
      float x = op.form_a == 1 ? as_float(half_to_float(op.shift ? b[l] >> 16 : b[l])) : as_float(b[l]);
      if (f & kAbsoluteB) x = std::fabs(x);
      if (f & kNegateB) x = -x;
      if (op.code == Code::F2F) {
        // Of rounding modes only those to whole numbers differ between equal types.
        if (op.round & 4)
          x = (op.round & 3) == 0   ? std::nearbyintf(x)
              : (op.round & 3) == 1 ? std::floor(x)
              : (op.round & 3) == 2 ? std::ceil(x)
                                    : std::trunc(x);
        if (f & kSaturate) x = saturate(x);
        out[l] = op.form_d == 1 ? float_to_half(x) : as_bits(x);
      } else {
        double whole = op.round == 0   ? std::nearbyint(double{x})
                       : op.round == 1 ? std::floor(double{x})
                       : op.round == 2 ? std::ceil(double{x})
                                       : std::trunc(double{x});
        int bits = 8 << op.form_d;
        double low = f & kSigned ? -std::ldexp(1.0, bits - 1) : 0.0,
               high = std::ldexp(1.0, f & kSigned ? bits - 1 : bits) - 1;
        whole = std::isnan(x) ? 0.0 : whole < low ? low : whole > high ? high : whole;
        // The greatest number of 64 bits is no double.
        u64 bits_of = bits < 64     ? static_cast<u64>(static_cast<i64>(whole))
                      : f & kSigned ? (whole >= 9.2e18 ? ~u64{0} >> 1 : static_cast<u64>(static_cast<i64>(whole)))
                                    : (whole >= 1.8e19 ? ~u64{0} : static_cast<u64>(whole));
        out[l] = static_cast<u32>(bits_of), upper[l] = static_cast<u32>(bits_of >> 32);
      }
      continue;
    }
    int bits = 8 << op.form_a;
    if (bits == 64) {
      u64 both = u64{above[l]} << 32 | b[l];
      std::fesetround(op.round == 1   ? FE_DOWNWARD
                      : op.round == 2 ? FE_UPWARD
                      : op.round == 3 ? FE_TOWARDZERO
                                      : FE_TONEAREST);
      volatile i64 given = static_cast<i64>(both);
      volatile u64 given_unsigned = both;
      float value = f & kSignedB ? static_cast<float>(given) : static_cast<float>(given_unsigned);
      std::fesetround(FE_TONEAREST);
      if (f & kAbsoluteB) value = std::fabs(value);
      out[l] = as_bits(f & kNegateB ? -value : value);
      continue;
    }
    u32 raw = bits == 32 ? b[l] : b[l] >> (8 * op.shift) & ((1u << bits) - 1);
    i64 value =
        f & kSignedB ? static_cast<i64>(static_cast<i32>(raw << (32 - bits)) >> (32 - bits)) : static_cast<i64>(raw);
    if (f & kAbsoluteB) value = value < 0 ? -value : value;
    if (f & kNegateB) value = -value;
    if (op.code == Code::I2F && op.round) {
      static const int kModes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
      std::fesetround(kModes[op.round]);
      volatile i64 given = value;
      volatile float result = static_cast<float>(given);
      std::fesetround(FE_TONEAREST);
      out[l] = as_bits(result);
      continue;
    }
    if (op.code == Code::I2F) {
      out[l] = op.form_d == 1 ? float_to_half(static_cast<float>(value)) : as_bits(static_cast<float>(value));
      continue;
    }
    int wanted = 8 << op.form_d;
    if (f & kSaturate) {
      i64 low = f & kSigned ? -(i64{1} << (wanted - 1)) : 0, high = (i64{1} << (f & kSigned ? wanted - 1 : wanted)) - 1;
      value = value < low ? low : value > high ? high : value;
    }
    u32 result = static_cast<u32>(value);
    if (wanted < 32) {
      result &= (1u << wanted) - 1;
      if (f & kSigned) result = static_cast<u32>(static_cast<i32>(result << (32 - wanted)) >> (32 - wanted));
    }
    out[l] = result;
  }
}

void half2(const Op& op, const u32* a, const u32* b, const u32* c, u32* out) {
  auto part = [](u8 form, u32 word, int half) {
    if (form == 1) return as_float(word);
    return as_float(half_to_float(form == 2 ? word : form == 3 ? word >> 16 : half ? word >> 16 : word));
  };
  for (int l = 0; l < 32; ++l) {
    float found[2];
    for (int half = 0; half < 2; ++half) {
      float x = part(op.form_a, a[l], half), y = part(op.form_b, b[l], half), z = part(op.form_c, c[l], half);
      if (op.flags & kAbsoluteA) x = std::fabs(x);
      if (op.flags & kAbsoluteB) y = std::fabs(y);
      if (op.flags & kNegateA) x = -x;
      if (op.flags & kNegateB) y = -y;
      if (op.flags & kNegateC) z = -z;
      // Double holds products of halves exactly, and their sums but for bits that rounding to half does not see.
      double value = op.code == Code::HADD2   ? double{x} + y
                     : op.code == Code::HMUL2 ? double{x} * y
                                              : double{x} * y + z;
      found[half] = static_cast<float>(value);
      if (op.form_d != 1)
        found[half] = as_float(half_to_float([&] {
          _Float16 rounded = static_cast<_Float16>(value);
          u16 bits;
          std::memcpy(&bits, &rounded, 2);
          return static_cast<u32>(bits);
        }()));
      if (op.flags & kSaturate) found[half] = saturate(found[half]);
    }
    u32 low = float_to_half(found[0]), high = float_to_half(found[1]);
    switch (op.form_d) {
      case 0: out[l] = high << 16 | low; break;
      case 1: out[l] = as_bits(found[0]); break;
      case 2: out[l] = (out[l] & 0xffff0000u) | low; break;
      default: out[l] = (out[l] & 0xffffu) | high << 16; break;
    }
  }
}

}  // namespace sass
