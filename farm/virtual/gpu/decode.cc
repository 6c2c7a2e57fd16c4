// Decode 64-bit instructions of Maxwell and Pascal. What is not known is refused by name or word, never guessed.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstring>

#include "sass.h"

namespace sass {
namespace {

// Where the second and third operand are: registers; a constant as b or as c; an immediate integer or float; all 32
// bits.
enum Form { R, C, RC, I, F, L };

struct Pattern {
  u16 match, mask;
  Code code;
  Form form;
};

#define ALU(low, code, immediate)                                                     \
  {0x5c00 | (low), 0xfff8, Code::code, R}, {0x4c00 | (low), 0xfff8, Code::code, C}, { \
    0x3800 | (low), 0xfef8, Code::code, immediate                                     \
  }
#define ALU2(low, code, immediate)                                                    \
  {0x5b00 | (low), 0xfff0, Code::code, R}, {0x4b00 | (low), 0xfff0, Code::code, C}, { \
    0x3600 | (low), 0xfef0, Code::code, immediate                                     \
  }

const Pattern kPatterns[] = {
    ALU(0x00, BFE, I),
    ALU(0x08, POPC, I),
    ALU(0x10, IADD, I),
    ALU(0x18, ISCADD, I),
    ALU(0x20, IMNMX, I),
    ALU(0x28, SHR, I),
    ALU(0x30, FLO, I),
    ALU(0x40, LOP, I),
    ALU(0x48, SHL, I),
    ALU(0x58, FADD, F),
    ALU(0x60, FMNMX, F),
    ALU(0x68, FMUL, F),
    ALU(0x88, FCHK, F),
    ALU(0x90, RRO, F),
    ALU(0x98, MOV, I),
    ALU(0xa0, SEL, I),
    ALU(0xa8, F2F, F),
    ALU(0xb0, F2I, F),
    ALU(0xb8, I2F, I),
    ALU(0xe0, I2I, I),
    {0x5cc0, 0xfff0, Code::IADD3, R},
    {0x4cc0, 0xfff0, Code::IADD3, C},
    {0x38c0, 0xfef0, Code::IADD3, I},
    {0x5cf8, 0xfff8, Code::SHF_R, R},
    {0x38f8, 0xfef8, Code::SHF_R, I},
    {0x5bf8, 0xfff8, Code::SHF_L, R},
    {0x36f8, 0xfef8, Code::SHF_L, I},
    {0x5bf0, 0xfff8, Code::BFI, R},
    {0x4bf0, 0xfff8, Code::BFI, C},
    {0x36f0, 0xfef8, Code::BFI, I},
    {0x53f0, 0xfff8, Code::BFI, RC},
    {0x5be0, 0xfff8, Code::LOP3, R},
    {0x0200, 0xfe00, Code::LOP3, C},
    {0x3c00, 0xfc00, Code::LOP3, I},
    {0x5bd8, 0xfff8, Code::LEA_HI, R},
    {0x1800, 0xfc00, Code::LEA_HI, C},
    {0x5bd0, 0xfff8, Code::LEA, R},
    {0x4bd0, 0xfff0, Code::LEA, C},
    {0x36d0, 0xfef8, Code::LEA, I},
    ALU2(0xc0, PRMT, I),
    {0x53c0, 0xfff0, Code::PRMT, RC},
    ALU2(0xb0, FSETP, F),
    ALU2(0xa0, FCMP, F),
    {0x53a0, 0xfff0, Code::FCMP, RC},
    ALU2(0x60, ISETP, I),
    ALU2(0x50, ISET, I),
    ALU2(0x40, ICMP, I),
    {0x5340, 0xfff0, Code::ICMP, RC},
    {0x5b00, 0xffc0, Code::XMAD, R},
    {0x4e00, 0xfe00, Code::XMAD, C},
    {0x5100, 0xff80, Code::XMAD, RC},
    {0x3600, 0xfec0, Code::XMAD, I},
    {0x5a00, 0xff80, Code::IMAD, R},
    {0x4a00, 0xff80, Code::IMAD, C},
    {0x5200, 0xff80, Code::IMAD, RC},
    {0x3400, 0xfe80, Code::IMAD, I},
    {0x5980, 0xff80, Code::FFMA, R},
    {0x4980, 0xff80, Code::FFMA, C},
    {0x5180, 0xff80, Code::FFMA, RC},
    {0x3280, 0xfe80, Code::FFMA, F},
    {0x5800, 0xff00, Code::FSET, R},
    {0x4800, 0xfe00, Code::FSET, C},
    {0x3000, 0xfe00, Code::FSET, F},
    {0x0100, 0xfff0, Code::MOV, L},
    {0x0400, 0xfc00, Code::LOP, L},
    {0x0800, 0xfc00, Code::FADD, L},
    {0x0c00, 0xfc00, Code::FFMA, L},
    {0x1400, 0xfc00, Code::ISCADD, L},
    {0x1c00, 0xfe80, Code::IADD, L},
    {0x1e00, 0xff00, Code::FMUL, L},
    {0x5d10, 0xfff8, Code::HADD2, R},
    {0x7a80, 0xfe80, Code::HADD2, C},
    {0x7a00, 0xfe80, Code::HADD2, I},
    {0x5d08, 0xfff8, Code::HMUL2, R},
    {0x7880, 0xfe80, Code::HMUL2, C},
    {0x7800, 0xfe80, Code::HMUL2, I},
    {0x5d00, 0xfff8, Code::HFMA2, R},
    {0x7080, 0xf880, Code::HFMA2, C},
    {0x7000, 0xf880, Code::HFMA2, I},
    {0x6080, 0xf880, Code::HFMA2, RC},
    {0x5080, 0xfff8, Code::MUFU, R},
    {0x5088, 0xfff8, Code::PSET, R},
    {0x5090, 0xfff8, Code::PSETP, R},
    {0x50a0, 0xfff8, Code::CSETP, R},
    {0x50b0, 0xfff8, Code::NOP, R},
    {0x50d8, 0xfff8, Code::VOTE, R},
    {0xf0c8, 0xfff8, Code::S2R, R},
    {0xef10, 0xfff8, Code::SHFL, R},
    {0xef48, 0xfff8, Code::LDS, R},
    {0xef58, 0xfff8, Code::STS, R},
    {0xef40, 0xfff8, Code::LDL, R},
    {0xef50, 0xfff8, Code::STL, R},
    {0xef90, 0xfff8, Code::LDC, R},
    {0xeed0, 0xfff8, Code::LDG, R},
    {0xeed8, 0xfff8, Code::STG, R},
    {0xef98, 0xfff8, Code::MEMBAR, R},
    {0xf0a8, 0xfff8, Code::BAR, R},
    {0xf0f0, 0xfff8, Code::DEPBAR, R},
    {0xf0f8, 0xfff8, Code::SYNC, R},
    {0xe240, 0xfff0, Code::BRA, R},
    {0xe260, 0xfff0, Code::CAL, R},
    {0xe290, 0xfff0, Code::SSY, R},
    {0xe2a0, 0xfff0, Code::PBK, R},
    {0xe300, 0xfff0, Code::EXIT, R},
    {0xe320, 0xfff0, Code::RET, R},
    {0xe340, 0xfff0, Code::BRK, R},
};

class Reader {
 public:
  Reader(u64 word, size_t pc, Kernel* kernel) : word_(word), pc_(pc), kernel_(kernel) {}

  Op read() {
    const Pattern* found = find();
    if (found == nullptr) fail("is not known");
    op_.code = found->code;
    form_ = found->form;
    op_.guard = static_cast<u8>(get(16, 3));
    op_.guard_not = has(19);
    read_rest();
    return op_;
  }

 private:
  const Pattern* find() const {
    for (const Pattern& each : kPatterns) {
      if ((word_ >> 48 & each.mask) == each.match) return &each;
    }
    return nullptr;
  }

  u32 get(int at, int count) const { return static_cast<u32>(word_ >> at & ((u64{1} << count) - 1)); }
  bool has(int at) const { return word_ >> at & 1; }
  i32 get_signed(int at, int count) const { return static_cast<i32>(get(at, count) << (32 - count)) >> (32 - count); }
  void flag(int at, u32 value) {
    if (has(at)) op_.flags |= value;
  }
  [[noreturn]] void fail(const char* what) const {
    char text[160];
    const Pattern* found = find();
    std::snprintf(text, sizeof(text), "the instruction %s (%016llx at %zx) %s", found ? name_of(found->code) : "",
                  static_cast<unsigned long long>(word_), pc_, what);
    throw std::string(text);
  }
  void require(bool right, const char* what) const {
    if (!right) fail(what);
  }

  u16 constant(int bank, u32 value) {
    auto& known = kernel_->constants;
    for (size_t i = 0; i < known.size(); ++i) {
      if (known[i].bank == bank && known[i].offset == value) return static_cast<u16>(kFirstConstant + i);
    }
    known.push_back({bank, value});
    return static_cast<u16>(kFirstConstant + known.size() - 1);
  }
  u16 literal(u32 value) { return constant(-1, value); }
  u16 reg(int at) const { return static_cast<u16>(get(at, 8)); }
  u16 result(int at = 0) const { return reg(at) == kZero ? kNowhere : reg(at); }

  u32 immediate() const {
    u32 value = get(20, 19) | static_cast<u32>(has(56)) << 19;
    if (form_ == F) return value << 12;
    return static_cast<u32>(static_cast<i32>(value << 12) >> 12);
  }

  // The operand that form decides; `other` is the one in bits 39 to 46.
  void operands(bool three) {
    op_.dst = result();
    op_.a = reg(8);
    u16 other = three ? reg(39) : kZero;
    switch (form_) {
      case R: op_.b = reg(20), op_.c = other; break;
      case C: op_.b = constant(static_cast<int>(get(34, 5)), get(20, 14) * 4), op_.c = other; break;
      case RC: op_.b = reg(39), op_.c = constant(static_cast<int>(get(34, 5)), get(20, 14) * 4); break;
      case I:
      case F: op_.b = literal(immediate()), op_.c = other; break;
      case L: op_.b = literal(get(20, 32)), op_.c = kZero; break;
    }
  }
  void predicate_operand() { op_.pc = static_cast<u8>(get(39, 3)), op_.pc_not = has(42); }
  void predicate_results() { op_.p0 = static_cast<u8>(get(3, 3)), op_.p1 = static_cast<u8>(get(0, 3)); }
  void size(int at) {
    static const u8 kBytes[] = {1, 1, 2, 2, 4, 8, 16, 16};
    u32 kind = get(at, 3);
    op_.width = kBytes[kind];
    if (kind == 1 || kind == 3) op_.flags |= kSigned;
  }
  void branch() {
    require(!has(5), "jumps to an address in a constant");
    op_.target = static_cast<i32>(pc_) + 8 + get_signed(20, 24);
  }
  void condition() { require(get(0, 5) == 0xf, "depends on condition codes"); }

  // The halves that half2 operands take, as the field says: both, one float32, twice the low, twice the high.
  void halves() {
    op_.form_a = static_cast<u8>(get(47, 2));
    op_.form_d = static_cast<u8>(get(49, 2));
    bool multiplies_and_adds = op_.code == Code::HFMA2;
    if (form_ == R) {
      operands(multiplies_and_adds);
      op_.form_b = static_cast<u8>(get(28, 2));
      op_.form_c = static_cast<u8>(multiplies_and_adds ? get(35, 2) : 0);
      flag(31, kNegateB);
      flag(32, kSaturate);
      if (multiplies_and_adds)
        flag(30, kNegateC);
      else
        flag(30, kAbsoluteB);
    } else {
      Form form = form_;
      if (form == I) form_ = R;
      operands(multiplies_and_adds);
      form_ = form;
      if (form == I) {
        u32 low = get(20, 9) << 6 | static_cast<u32>(has(29)) << 15, high = get(30, 9) << 6 | static_cast<u32>(has(56))
                                                                                                  << 15;
        op_.b = literal(high << 16 | low);
      } else if (form == C) {
        op_.form_b = 1;  // constants are float32
        flag(56, kNegateB);
      } else {
        op_.form_c = 1;
        op_.form_b = static_cast<u8>(get(53, 2));
        flag(56, kNegateB);
      }
      if (multiplies_and_adds) {
        if (form != RC) op_.form_c = static_cast<u8>(get(53, 2));
        flag(51, kNegateC);
      }
      flag(52, kSaturate);
    }
    if (!multiplies_and_adds) flag(44, kAbsoluteA), flag(43, op_.code == Code::HADD2 ? kNegateA : 0);
  }

  void read_rest();

  u64 word_;
  size_t pc_;
  Kernel* kernel_;
  Form form_ = R;
  Op op_;
};

void Reader::read_rest() {
  bool wide = form_ == L;
  switch (op_.code) {
    case Code::NOP:
    case Code::MEMBAR: break;
    case Code::MOV:
      operands(false);
      require(get(wide ? 12 : 39, 4) == 15, "moves some bytes");
      break;
    case Code::S2R: op_.dst = result(), op_.shift = static_cast<u8>(get(20, 8)); break;
    case Code::FADD:
      operands(false);
      flag(wide ? 56 : 48, kNegateA), flag(wide ? 54 : 46, kAbsoluteA);
      flag(wide ? 53 : 45, kNegateB), flag(wide ? 57 : 49, kAbsoluteB);
      if (!wide) flag(50, kSaturate), op_.round = static_cast<u8>(get(39, 2));
      break;
    case Code::FMUL:
      operands(false);
      if (wide) {
        flag(55, kSaturate);
      } else {
        flag(48, kNegateB), flag(50, kSaturate), op_.round = static_cast<u8>(get(39, 2));
        op_.mode = static_cast<u8>(get(41, 3));
      }
      break;
    case Code::FFMA:
      operands(true);
      if (wide) op_.c = reg(0);
      flag(wide ? 56 : 48, kNegateB), flag(wide ? 57 : 49, kNegateC), flag(wide ? 55 : 50, kSaturate);
      if (!wide) op_.round = static_cast<u8>(get(51, 2));
      break;
    case Code::FMNMX:
      operands(false), predicate_operand();
      flag(48, kNegateA), flag(46, kAbsoluteA), flag(45, kNegateB), flag(49, kAbsoluteB);
      break;
    case Code::FSETP:
      operands(false), predicate_operand(), predicate_results();
      op_.dst = kNowhere, op_.mode = static_cast<u8>(get(48, 4)), op_.logic = static_cast<u8>(get(45, 2));
      flag(43, kNegateA), flag(7, kAbsoluteA), flag(6, kNegateB), flag(44, kAbsoluteB);
      break;
    case Code::FSET:
      operands(false), predicate_operand();
      op_.mode = static_cast<u8>(get(48, 4)), op_.logic = static_cast<u8>(get(45, 2));
      flag(43, kNegateA), flag(54, kAbsoluteA), flag(53, kNegateB), flag(44, kAbsoluteB), flag(52, kFloat),
          flag(47, kCarryOut);
      break;
    case Code::FCMP: operands(true), op_.mode = static_cast<u8>(get(48, 4)); break;
    case Code::FCHK:
      operands(false), op_.dst = kNowhere, op_.p0 = static_cast<u8>(get(3, 3));
      require(get(39, 6) == 0, "checks something else than a division");
      break;
    case Code::RRO:
      operands(false), flag(45, kNegateB), flag(49, kAbsoluteB), op_.mode = static_cast<u8>(get(39, 1));
      break;
    case Code::MUFU:
      op_.dst = result(), op_.a = reg(8), op_.mode = static_cast<u8>(get(20, 4));
      flag(48, kNegateA), flag(46, kAbsoluteA), flag(50, kSaturate);
      require(op_.mode < 6 || op_.mode == 8, "computes a function of doubles");
      break;
    case Code::F2F:
    case Code::F2I:
    case Code::I2F:
    case Code::I2I:
      operands(false);
      op_.form_d = static_cast<u8>(get(8, 2)), op_.form_a = static_cast<u8>(get(10, 2));
      if (has(12)) op_.flags |= kSigned;
      if (has(13)) op_.flags |= kSignedB;
      op_.round = static_cast<u8>(get(39, 2) | (op_.code == Code::F2F ? get(42, 1) << 2 : 0));
      op_.shift = static_cast<u8>(op_.code == Code::F2F ? get(41, 1) : op_.code == Code::F2I ? 0 : get(41, 2));
      flag(45, kNegateB), flag(49, kAbsoluteB), flag(50, kSaturate), flag(47, kCarryOut);
      require(op_.form_a != 3 || op_.code == Code::I2F, "converts from 64 bits");
      require(op_.form_d != 3 || op_.code == Code::F2I, "converts to 64 bits");
      require(op_.form_a != 3 || form_ == R, "converts a constant of 64 bits");
      break;
    case Code::IADD:
      operands(false);
      flag(wide ? 56 : 49, kNegateA), flag(wide ? 53 : 43, kCarryIn), flag(wide ? 52 : 47, kCarryOut);
      if (!wide) flag(48, kNegateB);
      require(!has(wide ? 54 : 50), "saturates");
      break;
    case Code::IADD3:
      operands(true);
      flag(51, kNegateA), flag(50, kNegateB), flag(49, kNegateC), flag(48, kCarryIn), flag(47, kCarryOut);
      if (form_ == R) {
        op_.mode = static_cast<u8>(get(37, 2));
        op_.form_a = static_cast<u8>(get(35, 2)), op_.form_b = static_cast<u8>(get(33, 2));
        op_.form_c = static_cast<u8>(get(31, 2));
      }
      break;
    case Code::ISCADD:
      operands(false);
      op_.shift = static_cast<u8>(get(wide ? 53 : 39, 5)), flag(wide ? 52 : 47, kCarryOut);
      if (!wide) flag(49, kNegateA), flag(48, kNegateB);
      break;
    case Code::LEA:
      operands(false), op_.shift = static_cast<u8>(get(39, 5));
      flag(45, kNegateA), flag(46, kCarryIn), flag(47, kCarryOut);
      break;
    case Code::LEA_HI:
      operands(true), op_.shift = static_cast<u8>(get(form_ == R ? 28 : 51, 5));
      flag(form_ == R ? 37 : 56, kNegateA), flag(form_ == R ? 38 : 57, kCarryIn), flag(47, kCarryOut);
      break;
    case Code::IMNMX:
      operands(false), predicate_operand(), flag(48, kSigned), op_.mode = static_cast<u8>(get(43, 2));
      require(op_.mode != 2, "compares the middle of wider numbers");
      break;
    case Code::IMAD:
      operands(true), flag(48, kSigned), flag(53, kSignedB), flag(54, kHigh), flag(49, kCarryIn), flag(47, kCarryOut);
      break;
    case Code::XMAD: {
      operands(true);
      bool immediate = form_ == I, plain = form_ == R || immediate;
      if (immediate) op_.b = literal(get(20, 16));
      flag(48, kSigned), flag(49, kSignedB), flag(53, kHighA), flag(47, kCarryOut);
      op_.mode = static_cast<u8>(get(50, plain ? 3 : 2));
      if (form_ == R) flag(35, kHighB);
      if (!plain) flag(52, kHighB);
      if (form_ != RC) flag(plain ? 36 : 55, kShifted), flag(plain ? 37 : 56, kMerged);
      flag(plain ? 38 : 54, kCarryIn);
      break;
    }
    case Code::SHL: operands(false), flag(39, kWrapped), require(!has(43), "shifts in a carry"); break;
    case Code::SHR:
      operands(false), flag(48, kSigned), flag(39, kWrapped), flag(40, kReversed);
      require(!has(44), "shifts in a carry");
      break;
    case Code::SHF_L:
    case Code::SHF_R:
      operands(true);
      if (form_ == I) op_.b = literal(get(20, 6));
      if (get(37, 2) >= 2) op_.flags |= kWide;
      if (get(37, 2) == 3) op_.flags |= kSigned;
      flag(50, kWrapped), flag(48, kHigh);
      require(!has(49), "shifts in a carry");
      break;
    case Code::BFE: operands(false), flag(48, kSigned), flag(40, kReversed); break;
    case Code::BFI: operands(true); break;
    case Code::LOP:
      operands(false), op_.mode = static_cast<u8>(get(wide ? 53 : 41, 2));
      flag(wide ? 55 : 39, kInvertA), flag(wide ? 56 : 40, kInvertB), flag(wide ? 52 : 47, kCarryOut);
      require(!has(wide ? 57 : 43), "takes a carry");
      if (!wide) op_.logic = static_cast<u8>(get(44, 2)), op_.p0 = static_cast<u8>(op_.logic ? get(48, 3) : 7);
      break;
    case Code::LOP3:
      operands(true);
      op_.mode = static_cast<u8>(get(form_ == R ? 28 : 48, 8));
      if (form_ == R) op_.logic = static_cast<u8>(get(36, 2)), op_.p0 = static_cast<u8>(op_.logic ? get(48, 3) : 7);
      break;
    case Code::PRMT:
      operands(true), op_.mode = static_cast<u8>(get(48, 4)), require(op_.mode == 0, "has a mode");
      break;
    case Code::POPC: operands(false), flag(40, kInvertB); break;
    case Code::FLO: operands(false), flag(48, kSigned), flag(40, kInvertB), flag(41, kHigh); break;
    case Code::ISETP:
      operands(false), predicate_operand(), predicate_results();
      op_.dst = kNowhere, op_.mode = static_cast<u8>(get(49, 3)), op_.logic = static_cast<u8>(get(45, 2));
      flag(48, kSigned), flag(43, kCarryIn);
      break;
    case Code::ISET:
      operands(false), predicate_operand();
      op_.mode = static_cast<u8>(get(49, 3)), op_.logic = static_cast<u8>(get(45, 2));
      flag(48, kSigned), flag(44, kFloat), flag(47, kCarryOut), require(!has(43), "takes a carry");
      break;
    case Code::ICMP: operands(true), op_.mode = static_cast<u8>(get(49, 3)), flag(48, kSigned); break;
    case Code::PSETP:
    case Code::PSET:
      op_.pa = static_cast<u8>(get(12, 3)), op_.pa_not = has(15), op_.pb = static_cast<u8>(get(29, 3)),
      op_.pb_not = has(32);
      predicate_operand();
      op_.logic = static_cast<u8>(get(24, 2)), op_.logic2 = static_cast<u8>(get(45, 2));
      if (op_.code == Code::PSETP)
        predicate_results();
      else
        op_.dst = result(), flag(44, kFloat);
      break;
    case Code::CSETP:
      predicate_operand(), predicate_results(), op_.mode = static_cast<u8>(get(8, 5)),
                                                op_.logic = static_cast<u8>(get(45, 2));
      require(op_.mode == 0x12 || op_.mode == 0x15, "tests another flag than the sign");
      break;
    case Code::SEL: operands(false), predicate_operand(); break;
    case Code::VOTE:
      op_.dst = result(), op_.mode = static_cast<u8>(get(48, 2)), op_.p0 = static_cast<u8>(get(45, 3)),
      predicate_operand();
      break;
    case Code::SHFL:
      op_.dst = result(), op_.a = reg(8), op_.mode = static_cast<u8>(get(30, 2)), op_.p0 = static_cast<u8>(get(48, 3));
      op_.b = has(28) ? literal(get(20, 5)) : reg(20), op_.c = has(29) ? literal(get(34, 13)) : reg(39);
      break;
    case Code::HADD2:
    case Code::HMUL2:
    case Code::HFMA2: halves(); break;
    case Code::LDS:
    case Code::LDL:
    case Code::LDG:
      op_.dst = result(), op_.a = reg(8), op_.offset = get_signed(20, 24), size(48);
      if (op_.code == Code::LDG) require(has(45), "has addresses of 32 bits"), op_.mode = static_cast<u8>(get(46, 2));
      break;
    case Code::STS:
    case Code::STL:
    case Code::STG:
      op_.b = reg(0), op_.a = reg(8), op_.offset = get_signed(20, 24), size(48);
      if (op_.code == Code::STG) require(has(45), "has addresses of 32 bits");
      break;
    case Code::LDC:
      op_.dst = result(), op_.a = reg(8), op_.offset = get_signed(20, 16), size(48);
      op_.shift = static_cast<u8>(get(36, 5)), require(get(44, 2) == 0, "has a mode");
      break;
    case Code::BAR: require((word_ >> 32 & 0x9b) == 0x80, "is no plain barrier"); break;
    case Code::DEPBAR:
      op_.shift = static_cast<u8>(get(26, 3)), op_.mode = static_cast<u8>(get(20, 6)), op_.logic = has(29);
      break;
    case Code::BRA:
      op_.mode = static_cast<u8>(get(0, 5)), branch();
      // 8: "or unordered", which results that are integers never are.
      require(op_.mode == 0xf || (op_.mode & 7) % 7 != 0, "depends on a condition code that is not known");
      break;
    case Code::SSY:
    case Code::PBK:
    case Code::CAL: branch(), op_.guard = 7, op_.guard_not = false; break;
    case Code::SYNC:
    case Code::BRK:
    case Code::RET:
    case Code::EXIT: condition(); break;
  }
}

}  // namespace

const char* name_of(Code code) {
  static const char* const kNames[] = {
#define SASS_NAME(name) #name,
      SASS_CODES(SASS_NAME)
#undef SASS_NAME
  };
  return kNames[static_cast<int>(code)];
}

void decode(const u64* words, size_t count, Kernel* kernel) {
  std::map<i32, i32> index;  // of an address
  for (size_t at = 0; at < count; ++at) {
    if (at % 4 == 0) continue;
    Op op = Reader(words[at], at * 8, kernel).read();
    u32 control = static_cast<u32>(words[at / 4 * 4] >> (21 * (at % 4 - 1)) & 0x1fffff);
    op.stall = control & 15, op.write = control >> 5 & 7, op.read = control >> 8 & 7;
    op.wait = control >> 11 & 63, op.reuse = control >> 17 & 15;
    // A stall of 0 without yielding: issued together with the next instruction.
    op.dual = op.stall == 0 && op.code != Code::NOP;
    index[static_cast<i32>(at * 8)] = static_cast<i32>(kernel->ops.size());
    kernel->ops.push_back(op);
  }
  // A high product of signed numbers adds partial products as signed numbers of 33 bits. CSFU would correct for adding
  // them as unsigned ones; its correction is not documented, and here the sum that takes its result is signed instead.
  std::map<u16, const Op*> corrected;
  for (Op& op : kernel->ops) {
    if (op.code == Code::IADD3 && op.mode == 1 && corrected[op.c]) op.flags |= kSigned;
    const Op*& before = corrected[op.dst];
    // The opposite predicate writes other threads' registers.
    if (before && before->guard == op.guard && before->guard_not != op.guard_not) continue;
    before = op.code == Code::XMAD && op.mode == 3 ? &op : nullptr;
  }
  for (Op& op : kernel->ops) {
    if (op.target < 0) continue;
    i32 address = op.target % 32 == 0 ? op.target + 8 : op.target;  // a control word is no place to go to
    auto found = index.find(address);
    if (found == index.end()) throw std::string("a jump out of the code");
    op.target = found->second;
  }
}

}  // namespace sass
