// Machine code of Maxwell and Pascal GPUs (sm_50 to sm_62): what is decoded from a cubin, and what plays it.
//
// decode.cc: words to `Op`; cubin.cc: a file to `Kernel`; emulate.cc and lanes.cc: threads of a block; play.cc: time.
// The encoding is from the tables of envytools (envydis/gm107.c) and maxas; control codes from maxas' wiki.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace sass {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

#define SASS_CODES(X)                                                                                                 \
  X(NOP)                                                                                                              \
  X(MOV)                                                                                                              \
  X(S2R) X(FADD) X(FMUL) X(FFMA) X(FMNMX) X(FSETP) X(FSET) X(FCMP) X(FCHK) X(RRO) X(MUFU) X(F2F) X(F2I) X(I2F) X(I2I) \
      X(IADD) X(IADD3) X(ISCADD) X(IMNMX) X(IMAD) X(XMAD) X(LEA) X(LEA_HI) X(SHL) X(SHR) X(SHF_L) X(SHF_R) X(BFE)     \
          X(BFI) X(LOP) X(LOP3) X(PRMT) X(POPC) X(FLO) X(ISETP) X(ISET) X(ICMP) X(PSETP) X(PSET) X(CSETP) X(SEL)      \
              X(VOTE) X(SHFL) X(HADD2) X(HMUL2) X(HFMA2) X(LDS) X(STS) X(LDG) X(STG) X(LDL) X(STL) X(LDC) X(BAR)      \
                  X(DEPBAR) X(MEMBAR) X(BRA) X(SSY) X(SYNC) X(PBK) X(BRK) X(CAL) X(RET) X(EXIT)

enum class Code : u8 {
#define SASS_NAME(name) name,
  SASS_CODES(SASS_NAME)
#undef SASS_NAME
};

const char* name_of(Code code);

// Flags of an `Op`; an instruction uses those that it has.
enum Flag : u32 {
  kNegateA = 1 << 0,
  kNegateB = 1 << 1,
  kNegateC = 1 << 2,
  kAbsoluteA = 1 << 3,
  kAbsoluteB = 1 << 4,
  kCarryIn = 1 << 5,
  kCarryOut = 1 << 6,
  kSaturate = 1 << 7,
  kSigned = 1 << 8,
  kSignedB = 1 << 9,
  kHighA = 1 << 10,
  kHighB = 1 << 11,
  kShifted = 1 << 12,   // XMAD: the product by 16 bits
  kMerged = 1 << 13,    // XMAD: the low half of b above the low half of the sum
  kHigh = 1 << 14,      // SHF: the upper word
  kWrapped = 1 << 15,   // shifts: by the amount modulo the width
  kReversed = 1 << 16,  // BFE, SHR: bits in reverse order first
  kFloat = 1 << 17,     // ISET, FSET, PSET: 1.0 in place of all ones
  kWide = 1 << 18,      // SHF: 64 bits
  kInvertA = 1 << 19,
  kInvertB = 1 << 20,
};

// Registers are rows of 32 lanes. Row 255 is zero; a result for it goes to row 256. Constants follow from row 257.
constexpr u16 kZero = 255, kNowhere = 256, kFirstConstant = 257;

struct Op {
  Code code = Code::NOP;
  u8 guard = 7, p0 = 7, p1 = 7, pa = 7, pb = 7, pc = 7;  // predicates: written, and read
  bool guard_not = false, pa_not = false, pb_not = false, pc_not = false;
  u16 dst = kNowhere, a = kZero, b = kZero, c = kZero;
  u32 flags = 0;
  u8 mode = 0, logic = 0, logic2 = 0, round = 0;      // comparison, truth table, rounding: by instruction
  u8 shift = 0, width = 4;                            // bytes of an access
  u8 form_a = 0, form_b = 0, form_c = 0, form_d = 0;  // halves of half2 operands; types of conversions
  i32 target = -1;                                    // index of an instruction
  i32 offset = 0;
  // The control code: cycles to the next instruction, scoreboards set, waited for; operands kept for the next one.
  u8 stall = 0, write = 7, read = 7, wait = 0, reuse = 0;
  bool dual = false;  // issued together with the next one
};

// A word of a constant bank, or a literal (bank -1).
struct Constant {
  int bank;
  u32 offset;  // or the literal
};

struct Kernel {
  std::string name;
  std::vector<Op> ops;
  std::vector<Constant> constants;
  std::map<int, std::vector<u8>> banks;  // those with contents in the file
  u32 registers = 0, shared_bytes = 0, parameter_bytes = 0, parameters_at = 0x140;
  std::vector<std::pair<u32, u32>> parameters;  // offset and size of each
};

// Decode machine code, groups of a control word and three instructions. Throws std::string that names what it lacks.
void decode(const u64* words, size_t count, Kernel* kernel);

// Read the kernels of a cubin by name. Throws std::string.
std::map<std::string, Kernel> read_cubin(const u8* data, size_t size);

// A kernel's launch: `parameters` are the bytes of constant bank 0 from `Kernel::parameters_at`.
struct Launch {
  const Kernel* kernel;
  u32 grid[3], block[3];
  u32 dynamic_bytes;
  std::vector<u8> parameters;
  // By `bind`, once all else is known: the constant banks, and rows of the kernel's constants.
  std::map<int, std::vector<u8>> banks = {};
  std::vector<u32> constants = {};
};

void bind(Launch* launch);

// One access to memory in a trace: turns of shared memory or lines of 128 bytes, and how many of `sectors` are its own.
struct Access {
  u16 turns, sectors;
};

// What a warp did: indices of instructions, and for those that access memory an entry of `accesses`, in order.
struct Trace {
  std::vector<u32> steps;
  std::vector<Access> accesses;
  std::vector<u64> sectors;  // addresses of global memory / 32
};

// Ranges of global memory that exist, by begin: end.
using Ranges = std::map<u64, u64>;

// What ended a block: nothing, an address out of memory, one that its size does not divide, a race between threads, a
// read of shared memory that nothing wrote, too many instructions.
enum class Fault { kNone, kAddress, kAlignment, kRace, kUnwritten, kEndless, kInvalid };

struct Result {
  Fault fault = Fault::kNone;
  std::string words;
  std::set<u64> stored;  // the ranges of global memory that it wrote
};

// Run one block. With `traces`, one for each warp is written, and nothing to global memory. With `proves`, races and
// reads of unwritten shared memory are faults too.
Result run_block(const Launch& launch, const u32 index[3], const Ranges& memory, bool proves,
                 std::vector<Trace>* traces);

// A GPU as far as time goes. Bytes and cycles are of the multiprocessors' clock.
struct Machine {
  u32 processors = 1;
  u32 registers = 65536, shared_bytes = 65536, warps = 64, blocks = 32;  // of a multiprocessor
  u32 l2_bytes = 262144;
  double dram_latency = 170;
  // Fitted: bytes a cycle from L2 to a multiprocessor, slots of a pair issued at once, turns of each word of a vector.
  double port_bytes = 16, pair_slots = 2, vector_turns = 1;
};

struct Time {
  double cycles = 0, dram_bytes = 0;
  std::string fault;  // in words
};

// Estimate a launch's time: its first waves of blocks are traced and played, the rest goes at the pace of the last
// ones. `warm` are ranges of global memory that the L2 cache had last.
Time play(const Launch& launch, const Ranges& memory, const Ranges& warm, const Machine& machine);

}  // namespace sass
