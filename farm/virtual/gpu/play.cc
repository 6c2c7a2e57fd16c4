// Play the traces of all resident blocks on multiprocessors, cycle by cycle, and tell the time.
//
// Each of four schedulers issues one instruction a cycle of a warp that is ready: the last one again, else the oldest.
// A warp is ready when the stall of its last instruction is over and the scoreboards that it waits for are down: ptxas
// wrote both into the code. Constants: throughput from NVIDIA's CUDA C++ Programming Guide ("Arithmetic Instructions");
// latencies and register banks from maxas; the L2 port's width, pairs and vector loads are fitted to kernels measured
// on a Jetson TX2 (benchmarks/gpu_estimates.py); the rest is assumed and hardly matters.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>

#include "sass.h"

namespace sass {
namespace {

constexpr int kSchedulers = 4, kPipes = 2, kScoreboards = 6;
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kWaves = 6;           // that are played
constexpr double kSharedLatency = 22;  // and a cycle for each turn
constexpr double kHitLatency = 80, kL2Latency = 200, kVariableLatency = 18, kOperandCycles = 16;
constexpr double kBarrierCycles = 20, kBlockStart = 100;
constexpr u32 kL1Bytes = 24 << 10;                               // of each of the two pipes for global loads
constexpr double kL2BytesPerCycle = 64, kL2BytesOfSlice = 8192;  // a card's L2 gives more bytes, by its size; assumed
constexpr u32 kSector = 32, kLine = 128;

// Lines of 128 bytes with four sectors each; the least recently used one goes.
class Cache {
 public:
  Cache(u32 bytes, u32 ways) : ways_(ways), sets_(std::max(1u, bytes / kLine / ways)), lines_(size_t{ways} * sets_) {}

  // When the sector is there: a time in the past for one that was read before, or kNever. Its line is kept or made.
  double* find(u64 sector) {
    u64 tag = sector / 4 + 1;
    Line* set = &lines_[(tag ^ tag >> 7) % sets_ * ways_];
    Line* oldest = set;
    for (u32 i = 0; i < ways_; ++i) {
      if (set[i].tag == tag) {
        set[i].used = ++clock_;
        return &set[i].ready[sector % 4];
      }
      if (set[i].used < oldest->used) oldest = &set[i];
    }
    *oldest = Line();
    oldest->tag = tag, oldest->used = ++clock_;
    return &oldest->ready[sector % 4];
  }

 private:
  struct Line {
    u64 tag = 0, used = 0;
    double ready[4] = {kNever, kNever, kNever, kNever};
  };
  u32 ways_, sets_;
  std::vector<Line> lines_;
  u64 clock_ = 0;
};

// How an instruction is issued: on all lanes at once, or on a half or quarter of them.
u32 slots_of(const Op& op) {
  switch (op.code) {
    case Code::SHL:
    case Code::SHR:
    case Code::SHF_L:
    case Code::SHF_R:
    case Code::ISCADD:
    case Code::LEA:
    case Code::LEA_HI:
    case Code::ISETP:
    case Code::ISET:
    case Code::ICMP:
    case Code::IMNMX:
    case Code::FMNMX:
    case Code::FSETP:
    case Code::FSET:
    case Code::FCMP:
    case Code::BFE:
    case Code::BFI:
    case Code::SEL:
    case Code::PRMT: return 2;
    case Code::MUFU:
    case Code::S2R:
    case Code::F2F:
    case Code::F2I:
    case Code::I2F:
    case Code::I2I:
    case Code::POPC:
    case Code::FLO:
    case Code::IMAD:
    case Code::RRO: return 4;
    default: return 1;
  }
}

// Sources that share one of four register banks take a cycle more each, unless an operand is kept from before.
u32 conflicts_of(const Op& op, u32 kept) {
  u32 found = 0, seen[4] = {}, count = 0;
  u16 unique[3];
  const u16 sources[] = {op.a, op.b, op.c};
  for (u32 i = 0; i < 3; ++i) {
    if (sources[i] >= kZero || kept >> i & 1) continue;
    if (std::find(unique, unique + count, sources[i]) == unique + count) unique[count++] = sources[i];
  }
  for (u32 i = 0; i < count; ++i) found = std::max(found, ++seen[unique[i] % 4]);
  return found > 1 ? found - 1 : 0;
}

struct Step {
  u32 slots, conflicts;
};

struct Playing {
  std::vector<Trace> traces;
  u32 waiting = 0, left = 0;
};

struct Warp {
  Playing* block = nullptr;
  const Trace* trace = nullptr;
  size_t step = 0, access = 0, sector = 0;
  double ready = 0;
  bool at_barrier = false;
  // When what was counted up on a scoreboard comes back, in order, and how much had come before.
  std::vector<double> pending[kScoreboards];
};

struct Scheduler {
  std::vector<Warp*> warps;  // the oldest first
  Warp* last = nullptr;
  double free = 0, half_free = 0;
};

struct Processor {
  Scheduler schedulers[kSchedulers];
  double shared_free = 0, pipe_free[kPipes] = {}, port_free = 0;
  std::unique_ptr<Cache> l1[kPipes];
};

class Play {
 public:
  Play(const Launch& launch, const Ranges& memory, const Ranges& warm, const Machine& machine)
      : launch_(launch), kernel_(*launch.kernel), memory_(memory), machine_(machine), l2_(machine.l2_bytes, 16) {
    u32 kept = 0;
    for (const Op& op : kernel_.ops) {
      steps_.push_back({slots_of(op), conflicts_of(op, kept)});
      kept = op.reuse;
    }
    place();
    std::vector<std::pair<u64, u64>> order(warm.begin(), warm.end());
    std::sort(order.begin(), order.end(), [this](const auto& one, const auto& other) {
      return to_place(one.first / kSector) < to_place(other.first / kSector);
    });
    for (const auto& [begin, end] : order) {
      u64 from = end - begin > machine.l2_bytes ? end - machine.l2_bytes : begin;
      for (u64 sector = from / kSector; sector < end / kSector; ++sector) *l2_.find(to_place(sector)) = -1;
    }
    threads_ = launch.block[0] * launch.block[1] * launch.block[2];
    blocks_ = u64{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    processors_.resize(machine.processors);
    for (Processor& each : processors_) {
      for (auto& cache : each.l1) cache = std::make_unique<Cache>(kL1Bytes, 4);
    }
  }

  Time run() {
    u64 own = (blocks_ + machine_.processors - 1) / machine_.processors;
    u64 resident = std::min<u64>(own, count_resident()), wave = resident * machine_.processors;
    u64 most = std::min<u64>(blocks_, static_cast<u64>(kWaves * static_cast<double>(wave)) + wave);
    if (blocks_ > most) most = static_cast<u64>(kWaves) * wave;
    last_ = most;
    for (u64 i = 0; i < wave && next_ < last_; ++i) start(&processors_[i % machine_.processors], 0);
    double now = 0;
    while (running_ > 0 && time_.fault.empty()) {
      double soonest = kNever;
      for (Processor& each : processors_) soonest = std::min(soonest, advance(&each, now));
      if (soonest == kNever && running_ > 0) {
        time_.fault = kernel_.name + ": some warps never reach a barrier";
        break;
      }
      now = std::max(now + 1, soonest);
    }
    double scale = static_cast<double>(blocks_) / static_cast<double>(last_);
    time_.cycles = end_;
    if (blocks_ > last_) {
      // The pace of the last two waves, at whose ends as many blocks are under way.
      u64 from = last_ - 2 * wave;
      double pace = (finished_[last_ - wave - 1] - finished_[from - wave - 1 < last_ ? from - wave - 1 : 0]) /
                    static_cast<double>(2 * wave);
      time_.cycles += pace * static_cast<double>(blocks_ - last_);
    }
    time_.dram_bytes *= scale;
    return time_;
  }

 private:
  // Give what the parameters point to addresses in their order: where this machine has it must not decide the time.
  void place() {
    u64 next = u64{1} << 30;
    for (auto [offset, size] : kernel_.parameters) {
      u64 value = 0;
      if (size == 8 && offset + size <= launch_.parameters.size()) {
        std::memcpy(&value, &launch_.parameters[offset], sizeof(value));
      }
      auto after = memory_.upper_bound(value);
      if (after == memory_.begin() || value >= std::prev(after)->second) continue;
      auto [begin, end] = *std::prev(after);
      if (placed_.try_emplace(begin, next).second) next += (end - begin + kLine - 1) / kLine * kLine + kLine;
    }
  }
  u64 to_place(u64 sector) const {
    auto after = placed_.upper_bound(sector * kSector + kSector - 1);
    if (after == placed_.begin()) return sector;
    auto [begin, to] = *std::prev(after);
    return sector - begin / kSector + to / kSector;
  }

  u32 count_resident() const {
    u32 warps = (threads_ + 31) / 32, registers = (kernel_.registers * 32 + 255) / 256 * 256;
    u32 fits = registers ? machine_.registers / kSchedulers / registers * kSchedulers / warps : machine_.blocks;
    u32 shared = (kernel_.shared_bytes + launch_.dynamic_bytes + 255) / 256 * 256;
    if (shared) fits = std::min(fits, machine_.shared_bytes / shared);
    return std::max(1u, std::min({fits, machine_.warps / warps, machine_.blocks}));
  }

  void start(Processor* processor, double now) {
    u64 number = next_++;
    auto block = std::make_unique<Playing>();
    u32 x = launch_.grid[0], y = launch_.grid[1];
    const u32 index[] = {static_cast<u32>(number % x), static_cast<u32>(number / x % y),
                         static_cast<u32>(number / x / y)};
    Result done = run_block(launch_, index, memory_, false, &block->traces);
    if (done.fault != Fault::kNone) time_.fault = done.words;
    for (Trace& trace : block->traces) {
      auto warp = std::make_unique<Warp>();
      warp->block = block.get(), warp->trace = &trace, warp->ready = now + kBlockStart;
      Scheduler* least = &processor->schedulers[0];
      for (Scheduler& each : processor->schedulers) {
        if (each.warps.size() < least->warps.size()) least = &each;
      }
      least->warps.push_back(warp.get());
      warps_.push_back(std::move(warp));
    }
    block->left = static_cast<u32>(block->traces.size());
    playing_.push_back(std::move(block));
    ++running_;
  }

  const Op& op_of(const Warp& warp) const { return kernel_.ops[warp.trace->steps[warp.step]]; }

  // When what is out on a scoreboard is at most `left`.
  static double down(const Warp& warp, u32 scoreboard, size_t left) {
    const auto& pending = warp.pending[scoreboard];
    return pending.size() <= left ? 0 : pending[pending.size() - 1 - left];
  }
  static void raise(Warp* warp, u32 scoreboard, double until, double now) {
    if (scoreboard >= kScoreboards) return;
    auto& pending = warp->pending[scoreboard];
    pending.erase(pending.begin(), std::find_if(pending.begin(), pending.end(), [now](double t) { return t > now; }));
    pending.push_back(pending.empty() ? until : std::max(until, pending.back()));
  }

  double ready_of(const Warp& warp) const {
    if (warp.at_barrier) return kNever;
    const Op& op = op_of(warp);
    double ready = warp.ready;
    for (u32 i = 0; i < kScoreboards; ++i) {
      if (op.wait >> i & 1) ready = std::max(ready, down(warp, i, 0));
    }
    if (op.code == Code::DEPBAR && op.shift < kScoreboards) {
      ready = std::max(ready, down(warp, op.shift, op.logic ? op.mode : 0));
    }
    return ready;
  }

  // Let every scheduler issue at `now`; return when the next one can.
  double advance(Processor* processor, double now) {
    double soonest = kNever;
    for (int i = 0; i < kSchedulers; ++i) {
      Scheduler& scheduler = processor->schedulers[i];
      if (scheduler.free <= now) {
        Warp* chosen = nullptr;
        if (scheduler.last && can_issue(scheduler, *scheduler.last, now)) chosen = scheduler.last;
        for (size_t w = 0; w < scheduler.warps.size() && !chosen; ++w) {
          if (can_issue(scheduler, *scheduler.warps[w], now)) chosen = scheduler.warps[w];
        }
        bool pairs = chosen && machine_.pair_slots < 2 && op_of(*chosen).dual;
        if (chosen && !issue(processor, i, chosen, now) && pairs && ready_of(*chosen) <= now + 1) {
          issue(processor, i, chosen, now);
        }
      }
      for (const Warp* warp : scheduler.warps) {
        double ready = std::max(ready_of(*warp), scheduler.free);
        if (ready < kNever && is_slow(*warp)) ready = std::max(ready, scheduler.half_free);
        soonest = std::min(soonest, std::max(ready, now + 1));
      }
    }
    return soonest;
  }

  bool is_slow(const Warp& warp) const { return steps_[warp.trace->steps[warp.step]].slots > 1; }
  bool can_issue(const Scheduler& scheduler, const Warp& warp, double now) const {
    return ready_of(warp) <= now && (!is_slow(warp) || scheduler.half_free <= now);
  }

  // Returns whether the warp has ended.
  bool issue(Processor* processor, int number, Warp* warp, double now) {
    Scheduler& scheduler = processor->schedulers[number];
    const Op& op = op_of(*warp);
    const Step& step = steps_[warp->trace->steps[warp->step]];
    double slots = 1 + step.conflicts;
    scheduler.free = now + slots;
    if (step.slots > 1) scheduler.half_free = now + step.slots;
    warp->ready = now + std::max<double>(op.dual ? 1 : op.stall, slots);
    scheduler.last = warp;
    double arrives = now + kVariableLatency, reads = now + kOperandCycles;
    switch (op.code) {
      case Code::LDS:
      case Code::STS:
      case Code::SHFL: {
        double turns = 1;
        if (op.code != Code::SHFL) {
          const Access& access = warp->trace->accesses[warp->access++];
          turns = std::max<double>(access.turns, machine_.vector_turns * op.width / 4.0);
          if (access.turns == 0) turns = 1;
        }
        double from = std::max(now, processor->shared_free);
        processor->shared_free = from + turns;
        arrives = from + kSharedLatency + turns, reads = from + turns + kOperandCycles;
        break;
      }
      case Code::LDG:
      case Code::STG: global(processor, number / 2, warp, op, now, &arrives, &reads); break;
      case Code::BAR: meet(warp, now); break;
      default: break;
    }
    raise(warp, op.write, arrives, now);
    raise(warp, op.read, reads, now);
    if (++warp->step < warp->trace->steps.size()) return false;
    finish(processor, &scheduler, warp, now);
    return true;
  }

  void global(Processor* processor, int pipe, Warp* warp, const Op& op, double now, double* arrives, double* reads) {
    const Access& access = warp->trace->accesses[warp->access++];
    double from = std::max(now, processor->pipe_free[pipe]);
    processor->pipe_free[pipe] = from + std::max<double>(4, access.turns);
    *reads = processor->pipe_free[pipe] + kOperandCycles;
    *arrives = from + kHitLatency;
    for (u32 i = 0; i < access.sectors; ++i) {
      u64 sector = to_place(warp->trace->sectors[warp->sector++]);
      bool loads = op.code == Code::LDG;
      double* here = loads && op.mode == 2 ? processor->l1[pipe]->find(sector) : nullptr;
      if (here && *here != kNever) {
        *arrives = std::max(*arrives, std::max(*here, from + kHitLatency));
        continue;
      }
      double sent = std::max(from, processor->port_free);
      processor->port_free = sent + kSector / machine_.port_bytes;
      double served = std::max(processor->port_free, l2_free_);
      l2_free_ = served + kSector / std::max(kL2BytesPerCycle, machine_.l2_bytes / kL2BytesOfSlice);
      double* there = l2_.find(sector);
      if (*there == kNever) {
        time_.dram_bytes += kSector;
        *there = loads ? served + machine_.dram_latency : served;
      }
      double back = std::max(served, *there) + kL2Latency;
      if (here) *here = back;
      if (loads) *arrives = std::max(*arrives, back);
    }
  }

  void meet(Warp* warp, double now) {
    Playing* block = warp->block;
    warp->at_barrier = true;
    if (++block->waiting < block->left) return;
    block->waiting = 0;
    for (auto& each : warps_) {
      if (each && each->block == block && each->at_barrier) {
        each->at_barrier = false, each->ready = std::max(each->ready, now + kBarrierCycles);
      }
    }
  }

  void finish(Processor* processor, Scheduler* scheduler, Warp* warp, double now) {
    Playing* block = warp->block;
    auto& own = scheduler->warps;
    own.erase(std::find(own.begin(), own.end(), warp));
    if (scheduler->last == warp) scheduler->last = nullptr;
    auto gone = std::find_if(warps_.begin(), warps_.end(), [warp](const auto& each) { return each.get() == warp; });
    std::swap(*gone, warps_.back());
    warps_.pop_back();
    if (--block->left > 0) return;
    end_ = std::max(end_, now + 1);
    finished_.push_back(now);
    playing_.erase(
        std::find_if(playing_.begin(), playing_.end(), [block](const auto& each) { return each.get() == block; }));
    --running_;
    if (next_ < last_) start(processor, now);
  }

  const Launch& launch_;
  const Kernel& kernel_;
  const Ranges& memory_;
  const Machine& machine_;
  Cache l2_;
  std::vector<Step> steps_;
  std::map<u64, u64> placed_;  // by begin of a range: its address here
  u32 threads_ = 0;
  u64 blocks_ = 0, next_ = 0, last_ = 0, running_ = 0;
  double l2_free_ = 0, end_ = 0;
  std::vector<Processor> processors_;
  std::vector<std::unique_ptr<Playing>> playing_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<double> finished_;
  Time time_;
};

}  // namespace

Time play(const Launch& launch, const Ranges& memory, const Ranges& warm, const Machine& machine) {
  return Play(launch, memory, warm, machine).run();
}

}  // namespace sass
