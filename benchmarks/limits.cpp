// What this machine can do at most, for records.py: compiled at run time for the CPU at hand.
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef std::uint64_t Line __attribute__((vector_size(64)));

std::uint64_t read_part(const unsigned char* data, std::size_t lines, std::size_t ahead) {
  Line sums[4] = {};
  const unsigned char* const end = data + lines / 4 * 256;
  for (; data != end; data += 256) {
    for (int i = 0; i < 4; ++i) {
      if (ahead) __builtin_prefetch(data + ahead + 64 * i);
      sums[i] += *reinterpret_cast<const Line*>(data + 64 * i);
    }
  }
  const Line sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  std::uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += sum[i];
  return total;
}

#if defined(__AVX2__)
// Running sums of int16 products, as a product of 8-bit matrices has them: multiply-add pairs, then add. In
// assembly, since compilers make such a product once or keep the sums in memory.
template <typename Vector>
void chain(std::size_t steps) {
  Vector a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{};
  const Vector factor{};
  const auto step = [&factor](Vector& sum) __attribute__((always_inline)) {
    Vector product;
    asm volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(sum), "=&v"(product) : "v"(factor));
  };
  for (; steps > 0; --steps) {
    step(a), step(b), step(c), step(d), step(e), step(f), step(g), step(h);
  }
}
#endif

using Chain = void (*)(std::size_t);

Chain chain_of(int bits) {
#if defined(__AVX512BW__)
  if (bits == 512) return chain<__m512i>;
#endif
#if defined(__AVX2__)
  if (bits == 256) return chain<__m256i>;
#endif
  (void)bits;
  return nullptr;
}

}  // namespace

// Eight vector multiply-adds of 8-bit integers in registers, `steps` times on each thread: 2 * bits operations
// a step, a product and its addition counted as two. False if this CPU does not have such vectors.
extern "C" bool multiply_add(std::size_t steps, int threads, int bits) {
  const Chain run = chain_of(bits);
  if (run == nullptr) return false;
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(run, steps);
  run(steps);
  for (std::thread& helper : helpers) helper.join();
  return true;
}

// Reads `bytes` (a multiple of 256 * threads) at `data` (64-byte aligned) once, in equal parts per thread,
// each line asked for `ahead` bytes before it is needed (0: never); the sum keeps the compiler honest.
extern "C" std::uint64_t read_bytes(const unsigned char* data, std::size_t bytes, int threads, std::size_t ahead) {
  const std::size_t part = bytes / threads;
  std::vector<std::uint64_t> sums(threads);
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) {
    helpers.emplace_back([=, &sums] { sums[i] = read_part(data + i * part, part / 64, ahead); });
  }
  sums[0] = read_part(data, part / 64, ahead);
  for (std::thread& helper : helpers) helper.join();
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}
