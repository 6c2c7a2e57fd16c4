// Run a block's threads on machine code: a warp until it waits at a barrier, then the next one.
//
// Floats are rounded as the GPU does; MUFU's approximations are rounded from exact values. Threads of a warp that part
// wait on the warp's stack, as the code's SSY, PBK and CAL say.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>
#include <cstring>

#include "lanes.h"
#include "sass.h"

namespace sass {
namespace {

constexpr u32 kAll = 0xffffffffu;
constexpr u32 kLocalBytes = 16 << 10;
constexpr u64 kMostSteps = u64{1} << 33;  // warp instructions of a block

#define EACH _Pragma("clang loop vectorize(assume_safety)") for (int l = 0; l < 32; ++l)

u32 reverse_bits(u32 value) { return __builtin_bitreverse32(value); }

bool compare_floats(u32 mode, float a, float b) {
  bool unordered = std::isnan(a) || std::isnan(b);
  if (mode == 15) return true;
  if (mode == 7) return !unordered;
  if (mode == 8) return unordered;
  if (unordered) return mode > 8;
  return (mode & 1 && a < b) || (mode & 2 && a == b) || (mode & 4 && a > b);
}
bool compare_integers(u32 mode, bool is_signed, u32 a, u32 b) {
  bool less = is_signed ? static_cast<i32>(a) < static_cast<i32>(b) : a < b;
  return mode == 7 || (mode & 1 && less) || (mode & 2 && a == b) || (mode & 4 && !less && a != b);
}
u32 join(u32 logic, u32 a, u32 b) { return logic == 0 ? a & b : logic == 1 ? a | b : a ^ b; }

u32 read_constant(const Launch& launch, int bank, u32 offset) {
  u32 value = 0;
  auto found = launch.banks.find(bank);
  if (found != launch.banks.end() && u64{offset} + 4 <= found->second.size())
    std::memcpy(&value, &found->second[offset], 4);
  return value;
}

// An entry of a warp's stack: threads that wait, and where they go on.
struct Waiting {
  enum Kind { kParted, kSync, kBreak, kCall } kind;
  u32 mask;
  i32 at;
};

struct Warp {
  std::vector<u32> rows;
  u32 predicates[8] = {0, 0, 0, 0, 0, 0, 0, kAll};
  u32 carry = 0, sign = 0, zero = 0;        // condition codes
  u32 undecided[32] = {}, picked[32] = {};  // IMNMX of wider numbers: equal so far; the first operand's was taken
  u32 active = 0, ended = 0, broken = 0;
  i32 at = 0;
  std::vector<Waiting> stack;
  std::vector<u8> local;
  bool done = false;
  u32* row(u16 number) { return rows.data() + number * 32; }
};

class Block {
 public:
  Block(const Launch& launch, const u32 index[3], const Ranges& memory, bool proves, std::vector<Trace>* traces)
      : launch_(launch), kernel_(*launch.kernel), memory_(memory), proves_(proves), traces_(traces) {
    std::memcpy(index_, index, sizeof(index_));
    threads_ = launch.block[0] * launch.block[1] * launch.block[2];
    u32 bytes = (kernel_.shared_bytes + launch.dynamic_bytes + 255) / 256 * 256;
    shared_.resize(bytes);
    if (proves) words_.resize(bytes / 4);
  }

  Result run() {
    std::vector<Warp> warps((threads_ + 31) / 32);
    if (traces_) traces_->assign(warps.size(), Trace());
    for (size_t w = 0; w < warps.size(); ++w) begin(static_cast<u32>(w), &warps[w]);
    for (bool some = true; some && result_.fault == Fault::kNone;) {
      some = false;
      for (size_t w = 0; w < warps.size() && result_.fault == Fault::kNone; ++w) {
        if (warps[w].done) continue;
        first_ = static_cast<u32>(w) * 32;
        trace_ = traces_ ? &(*traces_)[w] : nullptr;
        run_warp(&warps[w]);
        some = some || !warps[w].done;
      }
      ++epoch_;
    }
    return result_;
  }

 private:
  struct Word {
    u32 wrote_at = 0, read_at = 0;  // the number of barriers before, and 1
    u32 writer = 0, reader = 0;     // threads
    bool shared_reads = false, written = false;
  };

  void begin(u32 number, Warp* warp) {
    // A vector's last registers may lie beyond those that code can name.
    warp->rows.assign((kFirstConstant + 3) * 32, 0);
    u32 left = threads_ - number * 32;
    warp->active = left >= 32 ? kAll : (1u << left) - 1;
    for (const Op& op : kernel_.ops) {
      if (op.code == Code::LDL || op.code == Code::STL) {
        warp->local.assign(32 * kLocalBytes, 0);
        break;
      }
    }
  }

  void fail(Fault fault, const Op& op, const char* what) {
    if (result_.fault != Fault::kNone) return;
    char text[256];
    std::snprintf(text, sizeof(text), "%s: %s %s (instruction %zu, block %u %u %u)", kernel_.name.c_str(),
                  name_of(op.code), what, static_cast<size_t>(&op - kernel_.ops.data()), index_[0], index_[1],
                  index_[2]);
    result_.fault = fault, result_.words = text;
  }

  void run_warp(Warp* warp);
  void leave(Warp* warp);
  void special(const Op& op, u32* out);
  void shuffle(const Op& op, Warp* warp, u32 act, const u32* a, const u32* b, const u32* c);
  void load_or_store(const Op& op, Warp* warp, u32 act);
  u8* find(const Op& op, u64 address);
  void prove(const Op& op, u64 address, u32 thread, bool writes);
  void record(const u64* addresses, u32 act, u32 width, bool is_global);

  const Launch& launch_;
  const Kernel& kernel_;
  const Ranges& memory_;
  bool proves_;
  std::vector<Trace>* traces_;
  Trace* trace_ = nullptr;
  u32 index_[3], threads_, first_ = 0, epoch_ = 1;
  std::vector<u8> shared_;
  std::vector<Word> words_;
  u64 known_begin_ = 1, known_end_ = 0;  // the range that was found last
  u64 stored_ = 0;                       // the range that was written last
  u64 steps_ = 0;
  Result result_;
};

// No thread is active: go on with those that wait longest above in the stack, or end.
void Block::leave(Warp* warp) {
  while (!warp->stack.empty()) {
    Waiting top = warp->stack.back();
    warp->stack.pop_back();
    if (top.kind == Waiting::kBreak) warp->broken &= ~top.mask;
    warp->active = top.mask & ~warp->ended & ~warp->broken;
    warp->at = top.at;
    if (warp->active) return;
  }
  warp->done = true;
}

#define PUT(expression)                                     \
  do {                                                      \
    if (act == kAll) {                                      \
      EACH out[l] = (expression);                           \
    } else {                                                \
      EACH out[l] = (act >> l & 1) ? (expression) : out[l]; \
    }                                                       \
  } while (0)
#define PUT_FLOAT(expression) PUT(as_bits(expression))
// A row of results first, where they decide flags too.
#define PUT_ROW(row) PUT((row)[l])

void Block::run_warp(Warp* warp) {
  const Op* ops = kernel_.ops.data();
  const i32 count = static_cast<i32>(kernel_.ops.size());
  u32 made[32], upper[32];
  for (;;) {
    if (warp->at >= count || warp->at < 0) {
      result_.fault = Fault::kInvalid, result_.words = kernel_.name + ": ran out of its code";
      return;
    }
    const Op& op = ops[warp->at];
    u32 guard = warp->predicates[op.guard];
    const u32 act = warp->active & (op.guard_not ? ~guard : guard);
    if (trace_) trace_->steps.push_back(static_cast<u32>(warp->at));
    if (++steps_ > kMostSteps) return fail(Fault::kEndless, op, "never ends");
    ++warp->at;
    auto source = [&](u16 number) -> const u32* {
      return number < kFirstConstant ? warp->row(number) : launch_.constants.data() + (number - kFirstConstant) * 32;
    };
    const u32 *a = source(op.a), *b = source(op.b), *c = source(op.c);
    u32* out = warp->row(op.dst);
    const u32 f = op.flags;
    auto test = [&](u8 number, bool inverted) {
      return inverted ? ~warp->predicates[number] : warp->predicates[number];
    };
    auto put_predicates = [&](u32 first, u32 other) {
      if (op.p0 != 7) warp->predicates[op.p0] = (first & act) | (warp->predicates[op.p0] & ~act);
      if (op.p1 != 7) warp->predicates[op.p1] = (other & act) | (warp->predicates[op.p1] & ~act);
    };
    auto put_codes = [&](const u32* row) {
      u32 sign = 0, zero = 0;
      for (int l = 0; l < 32; ++l) sign |= row[l] >> 31 << l, zero |= static_cast<u32>(row[l] == 0) << l;
      warp->sign = (sign & act) | (warp->sign & ~act);
      warp->zero = (zero & act) | (warp->zero & ~act);
    };
    // For each thread true or false as a word.
    auto put_truth = [&](u32 found) {
      for (int l = 0; l < 32; ++l) made[l] = found >> l & 1 ? (f & kFloat ? 0x3f800000u : kAll) : 0u;
      if (f & kCarryOut) put_codes(made);
      PUT_ROW(made);
    };
    // Sums of up to three words, with the carry of the lower word.
    auto add = [&](auto first, auto second, auto third) {
      if (!(f & (kCarryIn | kCarryOut))) {
        PUT(first(l) + second(l) + third(l));
        return;
      }
      u32 carried = 0;
      for (int l = 0; l < 32; ++l) {
        u64 sum = u64{first(l)} + second(l) + third(l) + (f & kCarryIn ? warp->carry >> l & 1 : 0);
        // A subtraction is the sum with the complement: zero's complement carries.
        if (f & kNegateB && !(f & kCarryIn) && second(l) == 0) sum += u64{1} << 32;
        if (f & kNegateA && !(f & kCarryIn) && first(l) == 0) sum += u64{1} << 32;
        made[l] = static_cast<u32>(sum);
        carried |= static_cast<u32>(sum >> 32 != 0) << l;
      }
      if (f & kCarryOut) {
        warp->carry = (carried & act) | (warp->carry & ~act);
        put_codes(made);
      }
      PUT_ROW(made);
    };
    auto negated = [&](const u32* row, u32 bit) {
      // With a carry from the lower word, -x is its complement: the carry is the one that is added.
      return [=](int l) { return f & bit ? (f & kCarryIn ? ~row[l] : 0u - row[l]) : row[l]; };
    };
    auto zero = [](int) { return 0u; };
    auto float_a = [&](int l) {
      float value = as_float(a[l]);
      if (f & kAbsoluteA) value = std::fabs(value);
      return f & kNegateA ? -value : value;
    };
    auto float_b = [&](int l) {
      float value = as_float(b[l]);
      if (f & kAbsoluteB) value = std::fabs(value);
      return f & kNegateB ? -value : value;
    };
    auto wide_shift = [&](int l) {
      u32 amount = b[l], most = f & kWide ? 63 : 32;
      return f & kWrapped ? amount & (f & kWide ? 63 : 31) : amount > most ? most : amount;
    };

    switch (op.code) {
      case Code::NOP:
      case Code::MEMBAR:
      case Code::DEPBAR: break;
      case Code::MOV: PUT(b[l]); break;
      case Code::FFMA:
        if (op.round) {
          rounded(op, a, b, c, made);
          PUT_ROW(made);
        } else if (f & kSaturate) {
          PUT_FLOAT(saturate(std::fmaf(f & kNegateB ? -as_float(a[l]) : as_float(a[l]), as_float(b[l]),
                                       f & kNegateC ? -as_float(c[l]) : as_float(c[l]))));
        } else if (f & (kNegateB | kNegateC)) {
          const u32 product = f & kNegateB ? 0x80000000u : 0, sum = f & kNegateC ? 0x80000000u : 0;
          PUT_FLOAT(std::fmaf(as_float(a[l] ^ product), as_float(b[l]), as_float(c[l] ^ sum)));
        } else {
          PUT_FLOAT(std::fmaf(as_float(a[l]), as_float(b[l]), as_float(c[l])));
        }
        break;
      case Code::FADD:
      case Code::FMUL:
        if (op.round || f & kSaturate || op.mode) {
          rounded(op, a, b, c, made);
          PUT_ROW(made);
        } else if (op.code == Code::FADD) {
          PUT_FLOAT(float_a(l) + float_b(l));
        } else {
          PUT_FLOAT(as_float(a[l]) * float_b(l));
        }
        break;
      case Code::FMNMX: {
        const u32 least = test(op.pc, op.pc_not);
        for (int l = 0; l < 32; ++l) {
          float x = float_a(l), y = float_b(l);
          made[l] = as_bits(least >> l & 1 ? std::fmin(x, y) : std::fmax(x, y));
        }
        PUT_ROW(made);
        break;
      }
      case Code::FSETP:
      case Code::FSET: {
        u32 found = 0, other = test(op.pc, op.pc_not);
        for (int l = 0; l < 32; ++l) found |= static_cast<u32>(compare_floats(op.mode, float_a(l), float_b(l))) << l;
        if (op.code == Code::FSETP) {
          put_predicates(join(op.logic, found, other), join(op.logic, ~found, other));
        } else {
          put_truth(join(op.logic, found, other));
        }
        break;
      }
      case Code::FCMP: PUT(compare_floats(op.mode, as_float(c[l]), 0.0f) ? a[l] : b[l]); break;
      case Code::FCHK: {
        u32 found = 0;
        for (int l = 0; l < 32; ++l) {
          int above = static_cast<int>(a[l] >> 23 & 255), below = static_cast<int>(b[l] >> 23 & 255);
          bool slow =
              above == 255 || below == 0 || below >= 253 || above - below >= 126 || above - below <= -125 || above < 25;
          found |= static_cast<u32>(slow) << l;
        }
        put_predicates(found, 0);
        break;
      }
      case Code::RRO: PUT_FLOAT(float_b(l)); break;
      case Code::MUFU:
        for (int l = 0; l < 32; ++l) {
          double x = float_a(l), y = 0;
          switch (op.mode) {
            case 0: y = std::cos(x); break;
            case 1: y = std::sin(x); break;
            case 2: y = std::exp2(x); break;
            case 3: y = std::log2(x); break;
            case 4: y = 1.0 / x; break;
            case 5: y = 1.0 / std::sqrt(x); break;
            default: y = std::sqrt(x); break;
          }
          float value = static_cast<float>(y);
          made[l] = as_bits(f & kSaturate ? saturate(value) : value);
        }
        PUT_ROW(made);
        break;
      case Code::F2F:
      case Code::F2I:
      case Code::I2F:
      case Code::I2I:
        convert(op, b, op.b < kZero ? warp->row(static_cast<u16>(op.b + 1)) : b, made, upper);
        if (op.code == Code::F2I && op.form_d == 3 && op.dst < kZero) {
          u32* first = out;
          out = warp->row(static_cast<u16>(op.dst + 1));
          PUT_ROW(upper);
          out = first;
        }
        if (f & kCarryOut) put_codes(made);
        PUT_ROW(made);
        break;
      case Code::IADD: add(negated(a, kNegateA), negated(b, kNegateB), zero); break;
      case Code::IADD3: {
        auto part = [](u8 form, u32 value) { return form == 1 ? value & 0xffff : form == 2 ? value >> 16 : value; };
        if (op.mode == 0) {
          add([&](int l) { return negated(a, kNegateA)(l); }, negated(b, kNegateB), negated(c, kNegateC));
        } else {
          for (int l = 0; l < 32; ++l) {
            u64 sum = u64{part(op.form_a, a[l])} + part(op.form_b, b[l]);
            if (f & kSigned) sum = static_cast<u64>(i64{static_cast<i32>(a[l])} + static_cast<i32>(b[l]));
            sum = op.mode == 1 ? static_cast<u64>(static_cast<i64>(sum) >> 16) : sum << 16;
            made[l] = static_cast<u32>(sum) + part(op.form_c, c[l]);
          }
          PUT_ROW(made);
        }
        break;
      }
      case Code::ISCADD:
      case Code::LEA:
        add([&](int l) { return (f & kNegateA ? 0u - a[l] : a[l]) << op.shift; }, negated(b, kNegateB), zero);
        break;
      case Code::LEA_HI:
        add(
            [&](int l) {
              u64 both = u64{c[l]} << 32 | a[l];
              return static_cast<u32>((f & kNegateA ? 0 - both : both) >> (32 - op.shift));
            },
            [&](int l) { return b[l]; }, zero);
        break;
      case Code::IMNMX: {
        const u32 least = test(op.pc, op.pc_not);
        for (int l = 0; l < 32; ++l) {
          bool less = f & kSigned ? static_cast<i32>(a[l]) < static_cast<i32>(b[l]) : a[l] < b[l];
          bool first = less == ((least >> l & 1) != 0) || a[l] == b[l];
          if (op.mode == 1 && !warp->undecided[l]) first = warp->picked[l];
          if (op.mode == 3 && act >> l & 1) warp->undecided[l] = a[l] == b[l], warp->picked[l] = first;
          made[l] = first ? a[l] : b[l];
        }
        PUT_ROW(made);
        break;
      }
      case Code::IMAD:
        for (int l = 0; l < 32; ++l) {
          i64 x = f & kSigned ? i64{static_cast<i32>(a[l])} : i64{a[l]},
              y = f & kSignedB ? i64{static_cast<i32>(b[l])} : i64{b[l]};
          u64 product = static_cast<u64>(x) * static_cast<u64>(y);
          made[l] = static_cast<u32>(f & kHigh ? product >> 32 : product) + c[l];
        }
        PUT_ROW(made);
        break;
      case Code::XMAD: {
        const bool sa = f & kSigned, sb = f & kSignedB, ha = f & kHighA, hb = f & kHighB;
        auto value = [&](int l) {
          u32 x = ha ? a[l] >> 16 : a[l] & 0xffff, y = hb ? b[l] >> 16 : b[l] & 0xffff;
          if (sa) x = static_cast<u32>(static_cast<i32>(x << 16) >> 16);
          if (sb) y = static_cast<u32>(static_cast<i32>(y << 16) >> 16);
          u32 product = f & kShifted ? x * y << 16 : x * y, sum = c[l];
          if (op.mode == 1) sum &= 0xffff;
          if (op.mode == 2) sum >>= 16;
          if (op.mode == 4) sum += b[l] << 16;
          u32 total = product + sum;
          return f & kMerged ? (total & 0xffff) | b[l] << 16 : total;
        };
        PUT(value(l));
        break;
      }
      case Code::SHL: PUT(f & kWrapped ? a[l] << (b[l] & 31) : b[l] > 31 ? 0 : a[l] << b[l]); break;
      case Code::SHR: {
        auto value = [&](int l) {
          u32 x = f & kReversed ? reverse_bits(a[l]) : a[l], amount = f & kWrapped ? b[l] & 31 : b[l] > 31 ? 32 : b[l];
          if (f & kSigned) return static_cast<u32>(static_cast<i32>(x) >> (amount > 31 ? 31 : amount));
          return amount > 31 ? 0 : x >> amount;
        };
        PUT(value(l));
        break;
      }
      case Code::SHF_L:
        PUT(static_cast<u32>((wide_shift(l) > 63 ? 0 : (u64{c[l]} << 32 | a[l]) << wide_shift(l)) >> 32));
        break;
      case Code::SHF_R: {
        auto value = [&](int l) {
          u64 both = u64{c[l]} << 32 | a[l];
          u32 amount = wide_shift(l);
          both = f & kSigned ? static_cast<u64>(static_cast<i64>(both) >> amount) : both >> amount;
          return static_cast<u32>(f & kHigh ? both >> 32 : both);
        };
        PUT(value(l));
        break;
      }
      case Code::BFE: {
        auto value = [&](int l) {
          u32 x = f & kReversed ? reverse_bits(a[l]) : a[l], from = b[l] & 255, bits = b[l] >> 8 & 255;
          if (bits == 0) return 0u;
          bool negative = f & kSigned && x >> (from + bits > 32 ? 31 : from + bits - 1) & 1;
          if (from > 31) return negative ? kAll : 0u;
          u32 found = x >> from;
          if (bits > 31) return f & kSigned ? static_cast<u32>(static_cast<i32>(x) >> from) : found;
          found &= (1u << bits) - 1;
          return negative ? found | ~((1u << bits) - 1) : found;
        };
        PUT(value(l));
        break;
      }
      case Code::BFI: {
        auto value = [&](int l) {
          u32 from = b[l] & 255, bits = b[l] >> 8 & 255;
          if (from > 31) return c[l];
          u32 mask = (bits > 31 ? kAll : (1u << bits) - 1) << from;
          return (c[l] & ~mask) | (a[l] << from & mask);
        };
        PUT(value(l));
        break;
      }
      case Code::LOP:
      case Code::LOP3: {
        if (op.code == Code::LOP) {
          const u32 ia = f & kInvertA ? kAll : 0, ib = f & kInvertB ? kAll : 0;
          for (int l = 0; l < 32; ++l) {
            u32 x = a[l] ^ ia, y = b[l] ^ ib;
            made[l] = op.mode == 0 ? x & y : op.mode == 1 ? x | y : op.mode == 2 ? x ^ y : y;
          }
        } else {
          for (int l = 0; l < 32; ++l) {
            u32 value = 0;
            for (int i = 0; i < 8; ++i) {
              if (op.mode >> i & 1) value |= (i & 4 ? a[l] : ~a[l]) & (i & 2 ? b[l] : ~b[l]) & (i & 1 ? c[l] : ~c[l]);
            }
            made[l] = value;
          }
        }
        if (op.logic) {
          u32 found = 0;
          for (int l = 0; l < 32; ++l)
            found |= static_cast<u32>(op.logic == 1 || (made[l] == 0) == (op.logic == 2)) << l;
          put_predicates(found, 0);
        }
        if (f & kCarryOut) put_codes(made);
        PUT_ROW(made);
        break;
      }
      case Code::PRMT: {
        auto value = [&](int l) {
          u64 both = u64{c[l]} << 32 | a[l];
          u32 found = 0;
          for (int i = 0; i < 4; ++i) {
            u32 pick = b[l] >> 4 * i & 15, byte = static_cast<u32>(both >> 8 * (pick & 7)) & 255;
            if (pick & 8) byte = byte & 128 ? 255 : 0;
            found |= byte << 8 * i;
          }
          return found;
        };
        PUT(value(l));
        break;
      }
      case Code::POPC: PUT(static_cast<u32>(__builtin_popcount(f & kInvertB ? ~b[l] : b[l]))); break;
      case Code::FLO: {
        auto value = [&](int l) {
          u32 x = f & kInvertB ? ~b[l] : b[l];
          if (f & kSigned && x >> 31) x = ~x;
          if (x == 0) return kAll;
          u32 zeros = static_cast<u32>(__builtin_clz(x));
          return f & kHigh ? zeros : 31 - zeros;
        };
        PUT(value(l));
        break;
      }
      case Code::ISETP:
      case Code::ISET: {
        u32 found = 0, other = test(op.pc, op.pc_not);
        for (int l = 0; l < 32; ++l) {
          bool right = compare_integers(op.mode, f & kSigned, a[l], b[l]);
          if (f & kCarryIn) {
            // The higher words of numbers whose lower words were subtracted before: the difference, with the borrow.
            i64 x = f & kSigned ? i64{static_cast<i32>(a[l])} : i64{a[l]},
                y = f & kSigned ? i64{static_cast<i32>(b[l])} : i64{b[l]};
            i64 difference = x - y - (warp->carry >> l & 1 ? 0 : 1);
            bool less = difference < 0, equal = difference == 0 && (warp->zero >> l & 1);
            right = (op.mode & 1 && less) || (op.mode & 2 && equal) || (op.mode & 4 && !less && !equal);
          }
          found |= static_cast<u32>(right) << l;
        }
        if (op.code == Code::ISETP) {
          put_predicates(join(op.logic, found, other), join(op.logic, ~found, other));
        } else {
          put_truth(join(op.logic, found, other));
        }
        break;
      }
      case Code::ICMP: PUT(compare_integers(op.mode, f & kSigned, c[l], 0) ? a[l] : b[l]); break;
      case Code::PSETP:
      case Code::PSET: {
        u32 first = test(op.pa, op.pa_not), second = test(op.pb, op.pb_not), third = test(op.pc, op.pc_not);
        u32 found = join(op.logic2, join(op.logic, first, second), third);
        if (op.code == Code::PSETP) {
          put_predicates(found, join(op.logic2, ~join(op.logic, first, second), third));
        } else {
          put_truth(found);
        }
        break;
      }
      case Code::CSETP: {
        u32 found = op.mode == 0x15 ? warp->sign : ~warp->sign, other = test(op.pc, op.pc_not);
        put_predicates(join(op.logic, found, other), join(op.logic, ~found, other));
        break;
      }
      case Code::SEL: {
        const u32 first = test(op.pc, op.pc_not);
        PUT(first >> l & 1 ? a[l] : b[l]);
        break;
      }
      case Code::VOTE: {
        u32 ballot = test(op.pc, op.pc_not) & act;
        bool all = ballot == act, any = ballot != 0;
        PUT(ballot);
        put_predicates((op.mode == 0 ? all : op.mode == 1 ? any : all || !any) ? kAll : 0, 0);
        break;
      }
      case Code::S2R:
        special(op, made);
        PUT_ROW(made);
        break;
      case Code::HADD2:
      case Code::HMUL2:
      case Code::HFMA2:
        std::memcpy(made, out, sizeof(made));
        half2(op, a, b, c, made);
        PUT_ROW(made);
        break;
      case Code::SHFL: shuffle(op, warp, act, a, b, c); break;
      case Code::LDS:
      case Code::STS:
      case Code::LDG:
      case Code::STG:
      case Code::LDL:
      case Code::STL:
      case Code::LDC:
        load_or_store(op, warp, act);
        if (result_.fault != Fault::kNone) return;
        break;
      case Code::BAR: return;
      case Code::SSY: warp->stack.push_back({Waiting::kSync, warp->active, op.target}); break;
      case Code::PBK: warp->stack.push_back({Waiting::kBreak, warp->active, op.target}); break;
      case Code::CAL:
        warp->stack.push_back({Waiting::kCall, warp->active, warp->at});
        warp->at = op.target;
        break;
      case Code::BRA: {
        u32 codes = (op.mode & 1 ? warp->sign : 0) | (op.mode & 2 ? warp->zero : 0) |
                    (op.mode & 4 ? ~warp->sign & ~warp->zero : 0);
        u32 taken = op.mode == 0xf ? act : act & codes;
        if (taken == 0) break;
        if (taken != warp->active) warp->stack.push_back({Waiting::kParted, warp->active & ~taken, warp->at});
        warp->active = taken, warp->at = op.target;
        break;
      }
      case Code::EXIT:
      case Code::SYNC:
      case Code::BRK:
      case Code::RET:
        if (op.code == Code::EXIT) warp->ended |= act;
        if (op.code == Code::BRK) warp->broken |= act;
        warp->active &= ~act;
        if (warp->active == 0) leave(warp);
        if (warp->done) return;
        break;
    }
    if (warp->stack.size() > 4096) return fail(Fault::kEndless, op, "nests too deep");
  }
}

void Block::special(const Op& op, u32* out) {
  for (u32 l = 0; l < 32; ++l) {
    u32 thread = first_ + l, x = launch_.block[0], y = launch_.block[1];
    switch (op.shift) {
      case 0x00: out[l] = l; break;
      case 0x20: out[l] = thread % x | thread / x % y << 16 | thread / (x * y) << 26; break;
      case 0x21: out[l] = thread % x; break;
      case 0x22: out[l] = thread / x % y; break;
      case 0x23: out[l] = thread / (x * y); break;
      case 0x25:
      case 0x26:
      case 0x27: out[l] = index_[op.shift - 0x25]; break;
      default:
        out[l] = 0;
        fail(Fault::kInvalid, op, "reads a register that is not known");
        return;
    }
  }
}

void Block::shuffle(const Op& op, Warp* warp, u32 act, const u32* a, const u32* b, const u32* c) {
  u32 found = 0, values[32];
  for (int l = 0; l < 32; ++l) {
    int segment = static_cast<int>(c[l] >> 8 & 31), clamp = static_cast<int>(c[l] & 31);
    int most = (l & segment) | (clamp & ~segment), least = l & segment, lane = static_cast<int>(b[l] & 31), from = 0;
    bool inside = false;
    switch (op.mode) {
      case 0: from = least | (lane & ~segment), inside = from <= most; break;
      case 1: from = l - lane, inside = from >= most; break;
      case 2: from = l + lane, inside = from <= most; break;
      default: from = l ^ lane, inside = from <= most; break;
    }
    if (!inside) from = l;
    values[l] = a[from & 31];
    found |= static_cast<u32>(inside) << l;
  }
  u32* out = warp->row(op.dst);
  PUT_ROW(values);
  if (op.p0 != 7) warp->predicates[op.p0] = (found & act) | (warp->predicates[op.p0] & ~act);
}

// The host's address of global memory; null where there is none.
u8* Block::find(const Op& op, u64 address) {
  if (address + op.width < address) return nullptr;
  if (address < known_begin_ || address + op.width > known_end_) {
    auto after = memory_.upper_bound(address);
    if (after == memory_.begin()) return nullptr;
    --after;
    if (address + op.width > after->second) return nullptr;
    known_begin_ = after->first, known_end_ = after->second;
  }
  if (op.code == Code::STG && stored_ != known_begin_) result_.stored.insert(stored_ = known_begin_);
  return reinterpret_cast<u8*>(address);
}

// Two threads at one word of shared memory without a barrier between, one of which writes; or a read of nothing.
void Block::prove(const Op& op, u64 address, u32 thread, bool writes) {
  for (u64 at = address / 4; at <= (address + op.width - 1) / 4; ++at) {
    Word& word = words_[at];
    bool other_wrote = word.wrote_at == epoch_ && word.writer != thread;
    bool other_read = word.read_at == epoch_ && (word.reader != thread || word.shared_reads);
    if (op.width >= 4 && (other_wrote || (writes && other_read)))
      return fail(Fault::kRace, op, "races with another thread");
    if (writes) {
      word.wrote_at = epoch_, word.writer = thread, word.written = true;
      continue;
    }
    if (!word.written && at * 4 < kernel_.shared_bytes + launch_.dynamic_bytes) {
      return fail(Fault::kUnwritten, op, "reads shared memory that nothing wrote");
    }
    word.shared_reads = word.read_at == epoch_ && (word.shared_reads || word.reader != thread);
    word.read_at = epoch_, word.reader = thread;
  }
}

void Block::load_or_store(const Op& op, Warp* warp, u32 act) {
  const bool loads = op.code == Code::LDS || op.code == Code::LDG || op.code == Code::LDL || op.code == Code::LDC;
  const bool is_global = op.code == Code::LDG || op.code == Code::STG;
  const bool is_shared = op.code == Code::LDS || op.code == Code::STS;
  const u32 *low = warp->row(op.a), *high = warp->row(op.a == kZero ? kZero : static_cast<u16>(op.a + 1));
  const int words = op.width < 4 ? 1 : op.width / 4;
  const u16 data = loads ? op.dst : op.b;
  u64 addresses[32];
  for (int l = 0; l < 32; ++l) {
    if (!(act >> l & 1)) continue;
    u64 address = is_global ? u64{low[l]} | u64{high[l]} << 32 : u64{low[l]};
    address += static_cast<u64>(i64{op.offset});
    if (!is_global) address &= 0xffffffffu;
    addresses[l] = address;
    if (address % op.width) return fail(Fault::kAlignment, op, "has an address that its size does not divide");
    u8* place = nullptr;
    u8 constant[16];
    if (is_global) {
      place = find(op, address);
    } else if (is_shared) {
      if (address + op.width <= shared_.size()) place = shared_.data() + address;
      if (place && proves_) prove(op, address, first_ + static_cast<u32>(l), !loads);
    } else if (op.code == Code::LDC) {
      for (int i = 0; i < words; ++i) {
        u32 value = read_constant(launch_, op.shift, static_cast<u32>(address) / 4 * 4 + 4 * static_cast<u32>(i));
        std::memcpy(constant + 4 * i, &value, 4);
      }
      place = constant + (op.width < 4 ? address % 4 : 0);
    } else if (address + op.width <= kLocalBytes) {
      place = warp->local.data() + static_cast<size_t>(l) * kLocalBytes + address;
    }
    if (place == nullptr) return fail(Fault::kAddress, op, "has an address out of memory");
    if (op.code == Code::STG && traces_) continue;
    if (op.width < 4) {
      u32 value = 0;
      if (loads) {
        std::memcpy(&value, place, op.width);
        if (op.flags & kSigned)
          value = static_cast<u32>(static_cast<i32>(value << (32 - 8 * op.width)) >> (32 - 8 * op.width));
        warp->row(data)[l] = value;
      } else {
        std::memcpy(place, &warp->row(data)[l], op.width);
      }
      continue;
    }
    for (int i = 0; i < words; ++i) {
      u16 number = data == kZero || data == kNowhere ? data : static_cast<u16>(data + i);
      if (loads)
        std::memcpy(&warp->row(number)[l], place + 4 * i, 4);
      else
        std::memcpy(place + 4 * i, &warp->row(number)[l], 4);
    }
  }
  if (trace_ && (is_global || is_shared)) record(addresses, act, op.width, is_global);
}

// Shared memory takes as many turns as one of its 32 banks has different words to give; global memory is read by
// sectors of 32 bytes, which lie in lines of 128.
void Block::record(const u64* addresses, u32 act, u32 width, bool is_global) {
  Access access{0, 0};
  const u32 unit = is_global ? 32 : 4;
  u64 seen[256];
  size_t count = 0;
  for (int l = 0; l < 32; ++l) {
    if (!(act >> l & 1)) continue;
    for (u64 at = addresses[l] / unit; at <= (addresses[l] + width - 1) / unit; ++at) {
      size_t i = count;
      while (i > 0 && seen[i - 1] != at) --i;
      if (i == 0 && count < 256) seen[count++] = at;
    }
  }
  if (is_global) {
    for (size_t i = 0; i < count; ++i) {
      bool first = true;
      for (size_t j = 0; j < i && first; ++j) first = seen[j] / 4 != seen[i] / 4;
      access.turns = static_cast<u16>(access.turns + first);
      trace_->sectors.push_back(seen[i]);
    }
    access.sectors = static_cast<u16>(count);
  } else {
    u16 banks[32] = {};
    for (size_t i = 0; i < count; ++i) {
      u16 turns = ++banks[seen[i] % 32];
      if (turns > access.turns) access.turns = turns;
    }
  }
  trace_->accesses.push_back(access);
}

}  // namespace

void bind(Launch* launch) {
  const Kernel& kernel = *launch->kernel;
  std::vector<u8> bank(kernel.parameters_at);
  const u32 known[] = {launch->block[0], launch->block[1], launch->block[2], launch->grid[0],
                       launch->grid[1],  launch->grid[2],  kLocalBytes};
  std::memcpy(bank.data() + 8, known, sizeof(known));
  bank.insert(bank.end(), launch->parameters.begin(), launch->parameters.end());
  launch->banks = kernel.banks;
  launch->banks[0] = bank;
  for (const Constant& each : kernel.constants) {
    u32 value = each.bank < 0 ? each.offset : read_constant(*launch, each.bank, each.offset);
    launch->constants.insert(launch->constants.end(), 32, value);
  }
}

Result run_block(const Launch& launch, const u32 index[3], const Ranges& memory, bool proves,
                 std::vector<Trace>* traces) {
  return Block(launch, index, memory, proves, traces).run();
}

}  // namespace sass
