// Holds the kernels of one instruction set to expected results, bit for bit:
//
//     check_kernels ISA CASES
//
// Exit status: 0 all equal, 1 mismatches, 2 unreadable cases, 77 this CPU lacks the instruction set.
// An access outside an operand ends it with SIGSEGV. check_kernels.py builds this and writes CASES.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/float_environment.h"
#include "cpu/kernels.h"
#include "record.h"

// The kernels' calls of these come here (check_kernels.py links them so).
int64_t allocations = 0;
extern "C" void* __real_malloc(size_t size);
extern "C" void* __real_aligned_alloc(size_t alignment, size_t size);
extern "C" void* __wrap_malloc(size_t size) {
  ++allocations;
  return __real_malloc(size);
}
extern "C" void* __wrap_aligned_alloc(size_t alignment, size_t size) {
  ++allocations;
  return __real_aligned_alloc(alignment, size);
}
void* operator new(size_t size) {
  ++allocations;
  return __real_malloc(size);
}
void operator delete(void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }

extern "C" const char* jaxquant_isa();
extern "C" int jaxquant_force_isa(const char* isa);

namespace jaxquant {
namespace {

// What CASES holds, back to back. A case without rows quantizes: float32 [records, 256], then the
// expected q8_k records. Others multiply: w [rows, records, 144], x [columns, records, 292], then the
// expected float32 [rows, columns].
struct Header {
  char label[40];
  int64_t rows;
  int64_t columns;
  int64_t records;
};

struct Case {
  Header shape;
  const uint8_t* data;

  int64_t w_bytes() const { return shape.rows * shape.records * q4k::kBytes; }
  int64_t x_bytes() const { return shape.columns * shape.records * q8k::kBytes; }
  int64_t value_bytes() const { return shape.records * kBlock * 4; }
  int64_t record_bytes() const { return shape.records * q8k::kBytes; }
  int64_t bytes() const {
    if (shape.rows == 0) return value_bytes() + record_bytes();
    return w_bytes() + x_bytes() + shape.rows * shape.columns * 4;
  }
};

struct Tally {
  std::string label;
  int64_t cases = 0;
  int64_t records = 0;  // blocks quantized, or pairs multiplied
  int64_t results = 0;
  int64_t nans = 0;
  int64_t mismatches = 0;
};

constexpr int64_t kPage = 4096;
constexpr int64_t kMargin = 64;
constexpr uint8_t kUntouched = 0xA5;

// Memory between two pages that nobody may touch.
class Fenced {
 public:
  explicit Fenced(int64_t bytes) : bytes_((bytes + 2 * kMargin + kPage - 1) / kPage * kPage) {
    void* all = mmap(nullptr, static_cast<size_t>(bytes_ + 2 * kPage), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    start_ = static_cast<uint8_t*>(all) + kPage;
    if (all == MAP_FAILED || mprotect(start_, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE) != 0) {
      perror("check_kernels: mmap");
      exit(2);
    }
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  uint8_t* at_start() const { return start_; }
  uint8_t* at_end(int64_t bytes) const { return start_ + bytes_ - bytes; }

  // The bytes of [p, p + bytes) and what lies around it in here get a known value.
  void mark(uint8_t* p, int64_t bytes) const {
    memset(before(p), kUntouched, static_cast<size_t>(after(p, bytes) - before(p)));
  }
  bool untouched_around(uint8_t* p, int64_t bytes) const {
    const auto touched = [](uint8_t byte) { return byte != kUntouched; };
    return std::none_of(before(p), p, touched) && std::none_of(p + bytes, after(p, bytes), touched);
  }

 private:
  uint8_t* before(uint8_t* p) const { return std::max(start_, p - kMargin); }
  uint8_t* after(uint8_t* p, int64_t bytes) const { return std::min(start_ + bytes_, p + bytes + kMargin); }

  int64_t bytes_;
  uint8_t* start_;
};

uint8_t* copy(const uint8_t* from, int64_t bytes, uint8_t* to) {
  memcpy(to, from, static_cast<size_t>(bytes));
  return to;
}

// [outer, inner] elements of `size` bytes to [inner, outer].
uint8_t* copy_transposed(const uint8_t* from, int64_t outer, int64_t inner, int64_t size, uint8_t* to) {
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) copy(from + (i * inner + j) * size, size, to + (j * outer + i) * size);
  }
  return to;
}

bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

class Checker {
 public:
  Checker(const Kernels& kernels, const std::vector<Case>& cases)
      : kernels_(kernels),
        w_(greatest(cases, [](const Case& c) { return std::max(c.w_bytes(), c.value_bytes()); })),
        x_(greatest(cases, [](const Case& c) { return c.x_bytes(); })),
        out_(greatest(cases, [](const Case& c) {
          return std::max((c.shape.rows + 1) * c.shape.columns * 4, c.record_bytes());
        })) {
    for (const Case& each : cases) check(each);
  }

  // Whether all was as expected.
  bool report() const {
    // One thread's scratch memory, whatever the number and the sizes of the products.
    bool good = !tallies_.empty() && allocations_ <= 1;
    printf("%lld heap allocations of all kernels\n", static_cast<long long>(allocations_));
    for (const Tally& t : tallies_) {
      printf("%s: %lld cases, %lld records, %lld results, %lld of them NaN, %lld mismatches\n", t.label.c_str(),
             static_cast<long long>(t.cases), static_cast<long long>(t.records), static_cast<long long>(t.results),
             static_cast<long long>(t.nans), static_cast<long long>(t.mismatches));
      good = good && t.mismatches == 0;
    }
    return good;
  }

 private:
  template <typename Bytes>
  static int64_t greatest(const std::vector<Case>& cases, Bytes bytes) {
    int64_t most = 0;
    for (const Case& each : cases) most = std::max(most, bytes(each));
    return most;
  }

  void check(const Case& each) {
    if (tallies_.empty() || tallies_.back().label != each.shape.label) tallies_.push_back({each.shape.label});
    Tally& tally = tallies_.back();
    ++tally.cases;
    if (each.shape.rows == 0) {
      tally.records += each.shape.records;
      quantize(each);
    } else {
      tally.records += each.shape.rows * each.shape.columns * each.shape.records;
      multiply_row_major(each);
      multiply_column_major(each);
      multiply_column_by_column(each);
    }
  }

  void mismatch(const Case& each, const char* how, int64_t row, int64_t column, unsigned got, unsigned wanted) {
    ++tallies_.back().mismatches;
    if (++mismatches_ > 10) return;
    printf("MISMATCH %s, case %lld of %lld rows, %lld columns, %lld records, %s, at [%lld, %lld]: %#x, wanted %#x\n",
           each.shape.label, static_cast<long long>(tallies_.back().cases), static_cast<long long>(each.shape.rows),
           static_cast<long long>(each.shape.columns), static_cast<long long>(each.shape.records), how,
           static_cast<long long>(row), static_cast<long long>(column), got, wanted);
  }

  void touched(const Case& each, const char* how) { mismatch(each, how, -1, -1, 0, kUntouched); }

  // In one call, up against the end; past the caches, on a cache line; then in calls of 1 to 9 blocks, at odd
  // addresses.
  void quantize(const Case& each) {
    const int64_t count = each.shape.records;
    const int64_t bytes = each.record_bytes();
    uint8_t* values = copy(each.data, each.value_bytes(), w_.at_end(each.value_bytes()));
    uint8_t* out = out_.at_end(bytes);
    out_.mark(out, bytes);
    counted([&] { kernels_.quantize(values, out, count, false); });
    compare_records(each, "at once", out);

    out = out_.at_start();
    out_.mark(out, bytes);
    counted([&] { kernels_.quantize(values, out, count, true); });
    compare_records(each, "past the caches", out);

    values = copy(each.data, each.value_bytes(), w_.at_start() + 1);
    out = out_.at_start() + 1;
    out_.mark(out, bytes);
    int64_t step = 1;
    for (int64_t first = 0; first < count; first += step, step = step % 9 + 1) {
      step = std::min(step, count - first);
      counted([&] { kernels_.quantize(values + first * kBlock * 4, out + first * q8k::kBytes, step, step % 2 == 0); });
    }
    compare_records(each, "in pieces", out);
  }

  void compare_records(const Case& each, const char* how, uint8_t* out) {
    const uint8_t* expected = each.data + each.value_bytes();
    for (int64_t r = 0; r < each.shape.records; ++r) {
      const uint8_t* got = out + r * q8k::kBytes;
      const uint8_t* wanted = expected + r * q8k::kBytes;
      if (memcmp(got, wanted, q8k::kBytes) != 0) {
        const int64_t at = std::mismatch(got, got + q8k::kBytes, wanted).first - got;
        mismatch(each, how, r, at, got[at], wanted[at]);
      }
      tallies_.back().nans += is_nan(load<uint32_t>(wanted));
    }
    tallies_.back().results += each.shape.records;
    if (!out_.untouched_around(out, each.record_bytes())) touched(each, how);
  }

  // Operands as they come, up against the end.
  void multiply_row_major(const Case& each) {
    const Header& n = each.shape;
    const int64_t bytes = n.rows * n.columns * 4;
    uint8_t* out = out_.at_end(bytes);
    MatMul problem = {};
    problem.w = copy(each.data, each.w_bytes(), w_.at_end(each.w_bytes()));
    problem.w_row = n.records * q4k::kBytes;
    problem.w_record = q4k::kBytes;
    problem.x = copy(each.data + each.w_bytes(), each.x_bytes(), x_.at_end(each.x_bytes()));
    problem.x_column = n.records * q8k::kBytes;
    problem.x_record = q8k::kBytes;
    problem.out_row = n.columns;
    problem.out_column = 1;
    multiply(each, "row-major", problem, out, bytes);
  }

  // Every stride the other way round, and a gap after each column.
  void multiply_column_major(const Case& each) {
    const Header& n = each.shape;
    const int64_t bytes = (n.rows + 1) * n.columns * 4;
    uint8_t* out = out_.at_start();
    MatMul problem = {};
    problem.w = copy_transposed(each.data, n.rows, n.records, q4k::kBytes, w_.at_start());
    problem.w_row = q4k::kBytes;
    problem.w_record = n.rows * q4k::kBytes;
    problem.x = copy_transposed(each.data + each.w_bytes(), n.columns, n.records, q8k::kBytes, x_.at_start());
    problem.x_column = q8k::kBytes;
    problem.x_record = n.columns * q8k::kBytes;
    problem.out_row = 1;
    problem.out_column = n.rows + 1;
    multiply(each, "column-major", problem, out, bytes);
    for (int64_t c = 0; c < n.columns; ++c) {
      if (load<uint32_t>(out + 4 * (c * (n.rows + 1) + n.rows)) != kUntouched * 0x01010101u) {
        touched(each, "in the gaps");
      }
    }
  }

  // One call per column, as for a matrix times a vector; operands at odd addresses.
  void multiply_column_by_column(const Case& each) {
    const Header& n = each.shape;
    const int64_t bytes = n.rows * n.columns * 4;
    uint8_t* out = out_.at_start() + 4;
    MatMul problem = {};
    problem.w = copy(each.data, each.w_bytes(), w_.at_start() + 1);
    problem.w_row = n.records * q4k::kBytes;
    problem.w_record = q4k::kBytes;
    problem.x = copy(each.data + each.w_bytes(), each.x_bytes(), x_.at_start() + 1);
    problem.x_column = n.records * q8k::kBytes;
    problem.x_record = q8k::kBytes;
    problem.out_row = 1;
    problem.out_column = n.rows;
    multiply(each, "column by column", problem, out, bytes, 1);
  }

  template <typename Call>
  void counted(Call call) {
    const int64_t before = allocations;
    call();
    allocations_ += allocations - before;
  }

  void multiply(const Case& each, const char* how, MatMul problem, uint8_t* out, int64_t bytes, int64_t step = 0) {
    const Header& n = each.shape;
    if (step == 0) step = n.columns;
    out_.mark(out, bytes);
    problem.rows = n.rows;
    problem.columns = step;
    problem.records = n.records;
    for (int64_t c = 0; c < n.columns; c += step) {
      MatMul part = problem;
      part.x += c * part.x_column;
      part.out = reinterpret_cast<float*>(out) + c * part.out_column;
      counted([&] { kernels_.matmul(part); });
    }

    const uint8_t* expected = each.data + each.w_bytes() + each.x_bytes();
    for (int64_t r = 0; r < n.rows; ++r) {
      for (int64_t c = 0; c < n.columns; ++c) {
        const uint32_t got = load<uint32_t>(out + 4 * (r * problem.out_row + c * problem.out_column));
        const uint32_t wanted = load<uint32_t>(expected + 4 * (r * n.columns + c));
        if (got != wanted && !(is_nan(got) && is_nan(wanted))) mismatch(each, how, r, c, got, wanted);
        tallies_.back().nans += is_nan(wanted);
      }
    }
    tallies_.back().results += n.rows * n.columns;
    if (!out_.untouched_around(out, bytes)) touched(each, how);
  }

  const Kernels& kernels_;
  Fenced w_;  // also the values to quantize
  Fenced x_;
  Fenced out_;
  std::vector<Tally> tallies_;
  int64_t mismatches_ = 0;
  int64_t allocations_ = 0;
};

std::vector<Case> read_cases(const char* path) {
  const int file = open(path, O_RDONLY);
  struct stat status = {};
  if (file < 0 || fstat(file, &status) != 0) {
    perror(path);
    exit(2);
  }
  void* mapped = mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file, 0);
  if (mapped == MAP_FAILED) {
    perror(path);
    exit(2);
  }
  const auto* data = static_cast<const uint8_t*>(mapped);
  std::vector<Case> cases;
  for (int64_t at = 0; at < status.st_size;) {
    Case next = {};
    if (status.st_size - at >= static_cast<int64_t>(sizeof(Header))) {
      next.shape = load<Header>(data + at);
      next.data = data + at + sizeof(Header);
      at += static_cast<int64_t>(sizeof(Header)) + next.bytes();
    }
    if (next.data == nullptr || at > status.st_size) {
      fprintf(stderr, "%s: ends within a case\n", path);
      exit(2);
    }
    cases.push_back(next);
  }
  return cases;
}

int check(const char* isa, const char* path) {
  const std::string best = jaxquant_isa();
  if (jaxquant_force_isa(isa) != 0) {
    fprintf(stderr, "check_kernels: no %s here; the best is %s\n", isa, best.c_str());
    return 77;
  }
  const std::vector<Case> cases = read_cases(path);
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero both ways, as XLA's threads do
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));
#endif
  const FloatEnvironment environment;
  const Checker checker(kernels(), cases);
  const bool good = checker.report();
  printf("%s %s, the best here is %s\n", jaxquant_isa(), good ? "agrees" : "DIFFERS", best.c_str());
  return good ? 0 : 1;
}

}  // namespace
}  // namespace jaxquant

int main(int argc, char** argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: check_kernels ISA CASES\n");
    return 2;
  }
  return jaxquant::check(argv[1], argv[2]);
}
