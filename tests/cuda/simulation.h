// A multiprocessor on a CPU, for kernels whose only ties to the machine are the functions of ffi/cuda/device.h.
//
// The threads of a block are fibers that run one at a time, in any order asked for, until they meet: at a
// barrier of the block, or where a warp works together. Every access is checked: global memory for bounds and
// alignment, shared memory also for races, that is for words that two threads touch, one of them writing,
// without a barrier in between. Asynchronous copies land as late as they may.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define JAXQUANT_DEVICE static inline
#define JAXQUANT_DEVICE_MEMBER inline

namespace simulation {

enum class Meeting { kNone, kShuffle, kSyncWarp, kMultiply32, kMultiply16, kMultiply16Signed, kBlock };

constexpr int kLanes = 32;
constexpr size_t kStack = 64 << 10;
constexpr int kNobody = -1;
constexpr int kSeveral = -2;

struct Exchange {
  uint32_t words[kLanes][6];
  bool multiplied;  // whether the first lane to go on has left the product
  int32_t product[16][8];
};

struct PendingCopy {
  uint8_t* to;
  const uint8_t* from;
  int bytes;
  int group;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Meeting waits_at = Meeting::kNone;
  bool done = false;
  int exchanges = 0;
  std::vector<PendingCopy> copies;
  int groups = 0;
};

// When and by whom a word of shared memory was touched last. A barrier of the block, or of the warp of both
// threads, in between makes a later access safe.
struct Access {
  int thread = kNobody;
  int warp = kNobody;
  int block_epoch = 0;
  int warp_epoch = 0;
};

struct Range {
  const uint8_t* begin = nullptr;
  int64_t bytes = 0;
};

class Machine {
 public:
  // Memory that kernels may read and write.
  std::vector<Range> readable;
  Range writable;
  std::vector<uint8_t> written;

  int64_t global_reads = 0;

  // Runs body(shared, thread) for every thread of a block.
  void run_block(int threads, int shared_bytes, unsigned seed, const std::function<void(uint8_t*, int)>& body) {
    shared_.assign(static_cast<size_t>(shared_bytes) / 16 + 1, Line{});
    std::memset(shared_.data(), 0xA5, shared_.size() * sizeof(Line));
    shared_bytes_ = shared_bytes;
    writers_.assign(static_cast<size_t>(shared_bytes) / 4, Access{});
    readers_.assign(static_cast<size_t>(shared_bytes) / 4, Access{});
    block_epoch_ = 1;
    warp_epochs_.assign(static_cast<size_t>(threads) / kLanes, 1);
    exchanges_.assign(2 * warp_epochs_.size(), Exchange{});
    if (threads_.size() < static_cast<size_t>(threads)) threads_.resize(static_cast<size_t>(threads));
    count_ = threads;
    body_ = &body;
    std::vector<int> order(static_cast<size_t>(threads));
    for (int i = 0; i < threads; ++i) order[i] = seed == 1 ? threads - 1 - i : i;
    std::mt19937 random(seed);
    for (int i = 0; i < threads; ++i) {
      Thread& thread = threads_[i];
      if (!thread.stack) thread.stack = std::make_unique<char[]>(kStack);
      thread.waits_at = Meeting::kNone;
      thread.done = false;
      thread.exchanges = thread.groups = 0;
      thread.copies.clear();
      begin(thread);
    }
    for (bool all_done = false; !all_done;) {
      if (seed > 1) std::shuffle(order.begin(), order.end(), random);
      bool ran = false;
      for (const int i : order) {
        if (threads_[i].done || threads_[i].waits_at != Meeting::kNone) continue;
        ran = true;
        current_ = i;
        swapcontext(&scheduler_, &threads_[i].context);
        if (!error_.empty()) throw std::runtime_error(error_);
      }
      if (!release() && !ran) throw std::runtime_error("threads wait for each other, and not all of them come");
      all_done = std::all_of(threads_.begin(), threads_.begin() + count_, [](const Thread& t) { return t.done; });
    }
  }

  int thread() const { return current_; }

  // Until all lanes of the warp are here; what each of them brought.
  Exchange& meet(Meeting what, const uint32_t* words, int count) {
    Thread& thread = threads_[current_];
    Exchange& exchange = exchanges_[2 * (current_ / kLanes) + thread.exchanges++ % 2];
    if (count > 0) std::memcpy(exchange.words[current_ % kLanes], words, static_cast<size_t>(count) * 4);
    exchange.multiplied = false;
    wait(what);
    return exchange;
  }

  void wait(Meeting what) {
    const int self = current_;
    threads_[self].waits_at = what;
    swapcontext(&threads_[self].context, &scheduler_);
  }

  void check_read(const uint8_t* p, int bytes) {
    ++global_reads;
    check_alignment(p, bytes);
    for (const Range& range : readable) {
      if (p >= range.begin && p + bytes <= range.begin + range.bytes) return;
    }
    fail("a read outside the operands");
  }

  void check_write(const uint8_t* p, int bytes) {
    check_alignment(p, bytes);
    if (p < writable.begin || p + bytes > writable.begin + writable.bytes) fail("a write outside the result");
    for (int i = 0; i < bytes; ++i) {
      if (written[p + i - writable.begin]++ != 0) fail("a result written twice");
    }
  }

  void touch_shared(const uint8_t* p, int bytes, bool writes) {
    check_alignment(p, bytes);
    const int64_t at = p - reinterpret_cast<const uint8_t*>(shared_.data());
    if (at < 0 || at + bytes > shared_bytes_) fail("an access outside the shared memory");
    if (bytes % 4 != 0) fail("an access to shared memory by less than words");
    for (int64_t i = at / 4; i < (at + bytes) / 4; ++i) {
      if (!is_safe(writers_[i])) fail("a race: shared memory touched that another thread just wrote");
      if (writes && !is_safe(readers_[i])) fail("a race: shared memory written that another thread just read");
      mark(writes ? writers_[i] : readers_[i], writes);
    }
  }

  void start_copy(uint8_t* to, const uint8_t* from, int bytes) {
    check_read(from, bytes);
    touch_shared(to, bytes, true);
    std::memset(to, 0xEE, static_cast<size_t>(bytes));
    threads_[current_].copies.push_back({to, from, bytes, threads_[current_].groups});
  }
  void commit_copies() { ++threads_[current_].groups; }
  void wait_for_copies(int pending) {
    Thread& thread = threads_[current_];
    const auto due = [&](const PendingCopy& copy) { return copy.group < thread.groups - pending; };
    for (const PendingCopy& copy : thread.copies) {
      if (!due(copy)) continue;
      touch_shared(copy.to, copy.bytes, true);
      std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    }
    thread.copies.erase(std::remove_if(thread.copies.begin(), thread.copies.end(), due), thread.copies.end());
  }

  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error(std::string(what) + ", by thread " + std::to_string(current_));
  }

 private:
  struct alignas(16) Line {
    uint8_t bytes[16];
  };

  static void enter();

  void begin(Thread& thread) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &scheduler_;
    makecontext(&thread.context, &Machine::enter, 0);
  }

  void check_alignment(const uint8_t* p, int bytes) const {
    if (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) != 0) fail("an access that is not aligned");
  }

  bool is_safe(const Access& before) const {
    if (before.thread == kNobody || before.thread == current_ || before.block_epoch < block_epoch_) return true;
    return before.warp == current_ / kLanes && before.warp_epoch < warp_epochs_[current_ / kLanes];
  }

  void mark(Access& access, bool writes) const {
    const int warp = current_ / kLanes;
    const Access now = {current_, warp, block_epoch_, warp_epochs_[warp]};
    const bool joins = !writes && access.thread != kNobody && access.block_epoch == now.block_epoch &&
                       (access.warp != warp || access.warp_epoch == now.warp_epoch);
    const Access before = access;
    access = now;
    if (joins && before.thread != current_) access.thread = kSeveral;
    if (joins && before.warp != warp) access.warp = kSeveral;
  }

  // Lets those go on that have all met.
  bool release() {
    bool any = false;
    const auto all_wait = [&](int begin, int end, Meeting what) {
      return std::all_of(threads_.begin() + begin, threads_.begin() + end,
                         [&](const Thread& t) { return !t.done && t.waits_at == what; });
    };
    for (int warp = 0; warp < count_ / kLanes; ++warp) {
      const Meeting what = threads_[warp * kLanes].waits_at;
      if (what == Meeting::kNone || what == Meeting::kBlock) continue;
      if (!all_wait(warp * kLanes, (warp + 1) * kLanes, what)) continue;
      for (int i = 0; i < kLanes; ++i) threads_[warp * kLanes + i].waits_at = Meeting::kNone;
      // A shuffle exchanges values, but orders no accesses to memory.
      if (what == Meeting::kSyncWarp) ++warp_epochs_[warp];
      any = true;
    }
    if (!any && all_wait(0, count_, Meeting::kBlock)) {
      for (int i = 0; i < count_; ++i) threads_[i].waits_at = Meeting::kNone;
      ++block_epoch_;
      any = true;
    }
    return any;
  }

  std::vector<Line> shared_;
  int shared_bytes_ = 0;
  std::vector<Access> writers_;
  std::vector<Access> readers_;
  int block_epoch_ = 0;
  std::vector<int> warp_epochs_;
  std::vector<Exchange> exchanges_;
  std::vector<Thread> threads_;
  int count_ = 0;
  int current_ = 0;
  ucontext_t scheduler_;
  const std::function<void(uint8_t*, int)>* body_ = nullptr;
  std::string error_;
};

inline Machine*& machine() {
  static Machine* current = nullptr;
  return current;
}

inline void Machine::enter() {
  Machine& self = *machine();
  const int thread = self.current_;
  try {
    (*self.body_)(reinterpret_cast<uint8_t*>(self.shared_.data()), thread);
  } catch (const std::exception& error) {
    self.error_ = error.what();
  }
  self.threads_[thread].done = true;
}

// The element of a matrix that byte `i` of a lane's registers holds: PTX ISA, "Matrix Fragments for mma", integers.
struct Element {
  int row;
  int column;
};
inline Element element_of_a(int k, int lane, int i) {
  const int group = lane >> 2;
  const int member = lane % 4;
  if (k == 16) return {i < 4 ? group : group + 8, member * 4 + (i & 3)};
  return {i < 4 || (8 <= i && i < 12) ? group : group + 8, member * 4 + (i & 3) + (i < 8 ? 0 : 16)};
}
inline Element element_of_b(int lane, int i) { return {lane % 4 * 4 + (i & 3) + (i < 4 ? 0 : 16), lane >> 2}; }
inline Element element_of_c(int lane, int i) { return {i < 2 ? lane >> 2 : (lane >> 2) + 8, lane % 4 * 2 + (i & 1)}; }

inline void multiply(Meeting what, int k, Exchange& all) {
  const int a_words = k / 8;
  int matrix_a[16][32] = {};
  int matrix_b[32][8] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    uint8_t bytes[24];
    std::memcpy(bytes, all.words[lane], sizeof bytes);
    for (int i = 0; i < 4 * a_words; ++i) {
      const Element at = element_of_a(k, lane, i);
      matrix_a[at.row][at.column] = what == Meeting::kMultiply32 ? static_cast<int8_t>(bytes[i]) : bytes[i];
    }
    for (int i = 0; i < k / 4; ++i) {
      const Element at = element_of_b(lane, i);
      const uint8_t byte = bytes[4 * a_words + i];
      matrix_b[at.row][at.column] = what == Meeting::kMultiply16 ? byte : static_cast<int8_t>(byte);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      int32_t sum = 0;
      for (int j = 0; j < k; ++j) sum += matrix_a[row][j] * matrix_b[j][column];
      all.product[row][column] = sum;
    }
  }
  all.multiplied = true;
}

inline void multiply(Meeting what, int k, int32_t (&c)[4], const uint32_t* a, const uint32_t* b) {
  uint32_t words[6];
  std::memcpy(words, a, static_cast<size_t>(k / 8) * 4);
  std::memcpy(words + k / 8, b, static_cast<size_t>(k / 16) * 4);
  Exchange& all = machine()->meet(what, words, k / 8 + k / 16);
  if (!all.multiplied) multiply(what, k, all);
  for (int i = 0; i < 4; ++i) {
    const Element at = element_of_c(machine()->thread() % kLanes, i);
    c[i] = all.product[at.row][at.column];
  }
}

}  // namespace simulation

namespace jaxquant {

JAXQUANT_DEVICE uint8_t read_byte(const uint8_t* p) {
  simulation::machine()->check_read(p, 1);
  return *p;
}
JAXQUANT_DEVICE uint32_t read_word(const uint8_t* p) {
  simulation::machine()->check_read(p, 4);
  return load<uint32_t>(p);
}
JAXQUANT_DEVICE Words4 read_words4(const uint8_t* p) {
  simulation::machine()->check_read(p, 16);
  return load<Words4>(p);
}
template <typename T>
JAXQUANT_DEVICE void write_global(T* p, T value) {
  simulation::machine()->check_write(reinterpret_cast<uint8_t*>(p), sizeof(T));
  *p = value;
}
template <typename T>
JAXQUANT_DEVICE T read_shared(const uint8_t* p) {
  simulation::machine()->touch_shared(p, sizeof(T), false);
  return load<T>(p);
}
template <typename T>
JAXQUANT_DEVICE void write_shared(uint8_t* p, T value) {
  simulation::machine()->touch_shared(p, sizeof(T), true);
  store(p, value);
}

JAXQUANT_DEVICE uint32_t shuffle(uint32_t value, int lane) {
  return simulation::machine()->meet(simulation::Meeting::kShuffle, &value, 1).words[lane % kWarp][0];
}
JAXQUANT_DEVICE uint32_t shuffle_xor(uint32_t value, int mask) {
  return shuffle(value, (simulation::machine()->thread() % kWarp) ^ mask);
}
JAXQUANT_DEVICE void sync_warp() { simulation::machine()->meet(simulation::Meeting::kSyncWarp, nullptr, 0); }
JAXQUANT_DEVICE void sync_block() { simulation::machine()->wait(simulation::Meeting::kBlock); }

JAXQUANT_DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
  return c;
}
JAXQUANT_DEVICE int64_t anew(int64_t value) { return value; }
JAXQUANT_DEVICE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= static_cast<uint32_t>((bytes >> (8 * ((selector >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  }
  return picked;
}
JAXQUANT_DEVICE int32_t round_to_int(float value) { return static_cast<int32_t>(std::nearbyintf(value)); }

template <int kBytes>
JAXQUANT_DEVICE void copy_async(uint8_t* to, const uint8_t* from) {
  simulation::machine()->start_copy(to, from, kBytes);
}
JAXQUANT_DEVICE void commit_copies() { simulation::machine()->commit_copies(); }
template <int kPending>
JAXQUANT_DEVICE void wait_for_copies() {
  simulation::machine()->wait_for_copies(kPending);
}

JAXQUANT_DEVICE void multiply_s8_k32(int32_t (&c)[4], const uint32_t (&a)[4], Words2 b) {
  simulation::multiply(simulation::Meeting::kMultiply32, 32, c, a, b.word);
}
JAXQUANT_DEVICE void multiply_u8_k16(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  simulation::multiply(simulation::Meeting::kMultiply16, 16, c, a, &b);
}
JAXQUANT_DEVICE void multiply_u8_s8_k16(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  simulation::multiply(simulation::Meeting::kMultiply16Signed, 16, c, a, &b);
}

}  // namespace jaxquant
