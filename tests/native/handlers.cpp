// The XLA handlers without XLA: every instruction set of this CPU on odd shapes between fences, from many
// threads at once, in any float environment. Values are compared with the portable kernels on one thread,
// which the Python tests hold to the exact reference.
//
//     handlers [SECONDS]     random shapes for so long (2); exit status 0 if nothing differed
#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>

#include "ffi_call.h"

namespace {

using ffi_call::Fenced;
using Random = std::mt19937_64;
using Side = Fenced::Side;

std::atomic<int64_t> failures{0};
std::atomic<int64_t> compared{0};

void check(bool good, const std::string& what) {
  ++compared;
  if (!good && ++failures < 20) fprintf(stderr, "FAILED %s\n", what.c_str());
}

void fill(Random& random, const Fenced& memory) {
  for (size_t i = 0; i < memory.size(); ++i) memory.data()[i] = static_cast<uint8_t>(random());
}

// Floats of every kind: ordinary blocks, zeros, subnormals, rarely NaN and infinities.
void fill_values(Random& random, const Fenced& memory) {
  std::normal_distribution<float> normal;
  for (size_t block = 0; block * 1024 < memory.size(); ++block) {
    const uint64_t kind = random() % 8;
    const float scale = kind == 0 ? 1e-36f : kind == 1 ? 1e38f : 1.0f;
    for (size_t i = 0; i < 256; ++i) {
      float value = kind == 2 ? 0.0f : normal(random) * scale;
      uint32_t bits = static_cast<uint32_t>(random());
      if (kind == 3) memcpy(&value, &bits, 4);
      memcpy(memory.data() + block * 1024 + 4 * i, &value, 4);
    }
  }
}

// Weights and activations whose scales are mostly finite: NaN would hide what else is wrong.
void tame(Random& random, const Fenced& w, const Fenced& x) {
  for (size_t at = 0; at < w.size(); at += 144) {
    if (random() % 8 != 0) {
      w.data()[at + 1] &= 0xBF;
      w.data()[at + 3] &= 0xBF;
    }
  }
  for (size_t at = 0; at < x.size(); at += 292) {
    if (random() % 8 != 0) x.data()[at + 3] &= 0xBF;
  }
}

struct Pools {
  XLA_FFI_ExecutionContext one{1};
  XLA_FFI_ExecutionContext many{3};
};

void quantize_once(Random& random, Pools& pools, const std::vector<std::string>& isas, int64_t records) {
  const Side side = random() % 2 ? Side::kStart : Side::kEnd;
  const Fenced values(static_cast<size_t>(records) * 1024, side);
  fill_values(random, values);
  values.seal();
  std::vector<uint8_t> want(static_cast<size_t>(records) * 292);
  jaxquant_force_isa("portable");
  check(ffi_call::quantize(pools.one, values.data(), records, want.data()).empty(), "quantize reports an error");
  for (const std::string& isa : isas) {
    jaxquant_force_isa(isa.c_str());
    for (XLA_FFI_ExecutionContext* pool : {&pools.one, &pools.many}) {
      const Fenced out(want.size(), side);
      check(ffi_call::quantize(*pool, values.data(), records, out.data()).empty(), "quantize reports an error");
      const std::string what = "quantize " + isa + " of " + std::to_string(records);
      check(want.empty() || memcmp(out.data(), want.data(), want.size()) == 0, what);
      check(out.untouched_around(), what + " wrote outside its result");
    }
  }
}

void matmul_once(Random& random, Pools& pools, const std::vector<std::string>& isas, int64_t rows, int64_t columns,
                 int64_t records) {
  const Side side = random() % 2 ? Side::kStart : Side::kEnd;
  const Fenced w(static_cast<size_t>(rows * records) * 144, side);
  const Fenced x(static_cast<size_t>(columns * records) * 292, side);
  fill(random, w);
  fill(random, x);
  tame(random, w, x);
  w.seal();
  x.seal();
  const size_t count = static_cast<size_t>(rows * columns);
  std::vector<uint8_t> want(4 * count);
  const auto run = [&](XLA_FFI_ExecutionContext& pool, void* out) {
    check(ffi_call::matmul(pool, w.data(), x.data(), rows, columns, records, out).empty(), "dot reports an error");
  };
  jaxquant_force_isa("portable");
  run(pools.one, want.data());
  for (const std::string& isa : isas) {
    jaxquant_force_isa(isa.c_str());
    for (XLA_FFI_ExecutionContext* pool : {&pools.one, &pools.many}) {
      const Fenced out(4 * count, side);
      run(*pool, out.data());
      const std::string what = "dot " + isa + " of " + std::to_string(rows) + " x " + std::to_string(columns) + " x " +
                               std::to_string(records);
      check(ffi_call::same_floats(out.data(), want.data(), count), what);
      check(out.untouched_around(), what + " wrote outside its result");
    }
  }
}

// Results as the batched and transposed programs of vmap ask for them: w [b, m, g], x [b, n, g] to [b, n, m].
void batched_once(Random& random, Pools& pools, const std::vector<std::string>& isas, int64_t b, int64_t m, int64_t n,
                  int64_t g) {
  const Fenced w(static_cast<size_t>(b * m * g) * 144, Side::kEnd);
  const Fenced x(static_cast<size_t>(b * n * g) * 292, Side::kEnd);
  fill(random, w);
  fill(random, x);
  tame(random, w, x);
  w.seal();
  x.seal();
  jaxquant_force_isa("portable");
  std::vector<uint8_t> want(static_cast<size_t>(4 * b * m * n));
  std::vector<uint8_t> product(static_cast<size_t>(4 * m * n));
  for (int64_t i = 0; i < b; ++i) {
    check(ffi_call::matmul(pools.one, w.data() + i * m * g * 144, x.data() + i * n * g * 292, m, n, g, product.data())
              .empty(),
          "dot reports an error");
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < n; ++c) memcpy(&want[4 * ((i * n + c) * m + r)], &product[4 * (r * n + c)], 4);
    }
  }
  for (const std::string& isa : isas) {
    jaxquant_force_isa(isa.c_str());
    const Fenced out(want.size(), Side::kEnd);
    const std::string error = ffi_call::call(
        jaxquant_quantized_dot_v1, pools.many,
        {{XLA_FFI_DataType_U8, w.data(), {b, m, g, 144}}, {XLA_FFI_DataType_U8, x.data(), {b, n, g, 292}}},
        {{XLA_FFI_DataType_F32, out.data(), {b, n, m}}},
        {{"lhs_dims", std::vector<int64_t>{0, 2, -1}}, {"rhs_dims", std::vector<int64_t>{0, 1, -1}}});
    check(error.empty(), "dot reports an error");
    check(ffi_call::same_floats(out.data(), want.data(), want.size() / 4), "batched dot " + isa);
    check(out.untouched_around(), "batched dot " + isa + " wrote outside its result");
  }
}

// Blocks of narrow elements: any codes under any scales decoded, any floats encoded.
void blocks_once(Random& random, Pools& pools, const std::vector<std::string>& isas) {
  const ffi_call::BlockShape p = ffi_call::block_shape(random());
  const auto bytes = [](int64_t n) { return static_cast<size_t>(n); };
  const Side side = random() % 2 ? Side::kStart : Side::kEnd;
  const Fenced codes(bytes(p.code_bytes()), side), scales(bytes(p.scale_bytes()), side), outer(4, side);
  const Fenced values(bytes(4 * p.values()), side);
  fill(random, codes);
  fill(random, scales);
  const bool ordinary = random() % 2;
  for (size_t at = 0; at < values.size(); at += 4) {
    uint32_t bits = static_cast<uint32_t>(random());
    // Within 2**16 of each other, and seldom not finite.
    if (ordinary && random() % 256 != 0) bits = (bits & 0x87FFFFFFu) | 0x38000000u;
    memcpy(values.data() + at, &bits, 4);
  }
  const float tensor_scale = std::ldexp(1.0f + static_cast<float>(random() % 1024) / 1024, static_cast<int>(random() % 60) - 40);
  memcpy(outer.data(), &tensor_scale, 4);
  for (const Fenced* each : {&codes, &scales, &outer, &values}) each->seal();
  const int32_t up_from = 0x800000 + static_cast<int32_t>(random() % 0x800001);
  const int32_t lowered = static_cast<int32_t>(random() % 16);
  const bool saturate = random() % 2;
  jaxquant_force_isa("portable");
  std::vector<uint8_t> want(values.size()), want_codes(codes.size()), want_scales(scales.size());
  const auto decode = [&](XLA_FFI_ExecutionContext& pool, void* to) {
    const std::string error = ffi_call::decode_blocks(pool, p, codes.data(), scales.data(), outer.data(), to);
    check(error.empty(), "decoding reports " + error);
  };
  const auto encode = [&](XLA_FFI_ExecutionContext& pool, void* to, void* to_scales) {
    const std::string error = ffi_call::encode_blocks(pool, p, saturate, up_from, lowered, values.data(), outer.data(), to, to_scales);
    check(error.empty(), "encoding reports " + error);
  };
  decode(pools.one, want.data());
  encode(pools.one, want_codes.data(), want_scales.data());
  for (const std::string& isa : isas) {
    jaxquant_force_isa(isa.c_str());
    for (XLA_FFI_ExecutionContext* pool : {&pools.one, &pools.many}) {
      const std::string what = " " + p.element + " under " + p.scale + " " + isa;
      const Fenced out(want.size(), side), out_codes(want_codes.size(), side), out_scales(want_scales.size(), side);
      decode(*pool, out.data());
      encode(*pool, out_codes.data(), out_scales.data());
      check(ffi_call::same_floats(out.data(), want.data(), want.size() / 4), "decoding" + what);
      check(memcmp(out_codes.data(), want_codes.data(), want_codes.size()) == 0, "codes of" + what);
      check(memcmp(out_scales.data(), want_scales.data(), want_scales.size()) == 0, "scales of" + what);
      check(out.untouched_around() && out_codes.untouched_around() && out_scales.untouched_around(),
            what + " wrote outside its results");
    }
  }
}

void odd_shapes(Random& random, Pools& pools, const std::vector<std::string>& isas) {
  for (const int64_t records : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 511, 513, 1025}) {
    quantize_once(random, pools, isas, records);
  }
  const int64_t rows[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 65};
  const int64_t columns[] = {1, 2, 3, 4, 5, 8, 9, 17, 64, 65};
  const int64_t records[] = {0, 1, 2, 3, 4, 5, 8, 15, 17, 64, 65, 66};
  int i = 0;
  for (const int64_t m : rows) {
    for (const int64_t n : columns) matmul_once(random, pools, isas, m, n, records[(i += 5) % 12]);
  }
  for (int each = 0; each < 60; ++each) blocks_once(random, pools, isas);
  for (const int64_t g : {0, 1, 5}) batched_once(random, pools, isas, 3, 9, 5, g);
  // Beyond what the caches hold, where records are written past them.
  quantize_once(random, pools, isas, (int64_t{16} << 20) / 292 + 3);
}

// Callers in any rounding mode, flushing or not, get the same bits and their register back.
void float_environments(Random& random, const std::vector<std::string>& isas) {
#if defined(__x86_64__)
  const int64_t records = 1100;
  const Fenced values(records * 1024, Side::kEnd);
  fill_values(random, values);
  const Fenced w(40 * 9 * 144, Side::kEnd), x(5 * 9 * 292, Side::kEnd);
  fill(random, w);
  fill(random, x);
  tame(random, w, x);
  for (const std::string& isa : isas) {
    jaxquant_force_isa(isa.c_str());
    std::vector<uint8_t> want(records * 292), want_dots(40 * 5 * 4), got(want.size()), dots(want_dots.size());
    XLA_FFI_ExecutionContext ordinary(1);
    ffi_call::quantize(ordinary, values.data(), records, want.data());
    ffi_call::matmul(ordinary, w.data(), x.data(), 40, 5, 9, want_dots.data());
    for (const unsigned mode : {0x1F80u, 0x3F80u, 0x5F80u, 0x7F80u, 0x9FC0u, 0xFFC0u, 0xDFC0u, 0x0040u}) {
      const unsigned before = _mm_getcsr();
      _mm_setcsr(mode);
      {
        XLA_FFI_ExecutionContext inheriting(3);  // whose threads start in this mode
        ffi_call::quantize(inheriting, values.data(), records, got.data());
        const unsigned after_quantize = _mm_getcsr();
        ffi_call::matmul(inheriting, w.data(), x.data(), 40, 5, 9, dots.data());
        const unsigned after_dot = _mm_getcsr();
        std::vector<unsigned> of_threads(3);
        inheriting.run([&] { of_threads[0] = _mm_getcsr(); });
        _mm_setcsr(before);
        const std::string what = " " + isa + " in MXCSR " + std::to_string(mode);
        check(got == want, "quantize" + what);
        check(ffi_call::same_floats(dots.data(), want_dots.data(), 200), "dot" + what);
        check(after_quantize == mode && after_dot == mode, "MXCSR of the caller" + what);
        check(of_threads[0] == mode, "MXCSR of a thread of the pool" + what);
      }
    }
  }
#endif
}

// Calls on shared operands from many threads, some of which are the pool's own: what XLA does when its
// handlers run on the pool, where waiting for tasks that never get a thread would hang.
void concurrency(Random& random, int rounds) {
  const int64_t rows = 130, columns = 9, records = 17, blocks = 1300;
  const Fenced w(rows * records * 144, Side::kEnd), x(columns * records * 292, Side::kEnd);
  const Fenced values(blocks * 1024, Side::kEnd);
  fill(random, w);
  fill(random, x);
  tame(random, w, x);
  fill_values(random, values);
  std::vector<uint8_t> want(rows * columns * 4), want_records(blocks * 292);
  for (const int threads : {1, 2, 4}) {
    XLA_FFI_ExecutionContext pool(threads);
    ffi_call::matmul(pool, w.data(), x.data(), rows, columns, records, want.data());
    ffi_call::quantize(pool, values.data(), blocks, want_records.data());
    const auto work = [&] {
      std::vector<uint8_t> out(want.size()), out_records(want_records.size());
      for (int i = 0; i < rounds; ++i) {
        ffi_call::matmul(pool, w.data(), x.data(), rows, columns, records, out.data());
        check(ffi_call::same_floats(out.data(), want.data(), out.size() / 4), "dot from many threads");
        ffi_call::quantize(pool, values.data(), blocks, out_records.data());
        check(out_records == want_records, "quantize from many threads");
      }
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i) callers.emplace_back(work);
    for (int i = 0; i < 4; ++i) callers.emplace_back([&] { pool.run(work); });
    for (std::thread& caller : callers) caller.join();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 2;
  const std::vector<std::string> isas = ffi_call::supported_isas();
  Random random(20);
  {
    Pools pools;
    odd_shapes(random, pools, isas);
    const auto start = std::chrono::steady_clock::now();
    const auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
      quantize_once(random, pools, isas, below(40));
      matmul_once(random, pools, isas, 1 + below(70), 1 + below(20), below(70));
      batched_once(random, pools, isas, 1 + below(4), 1 + below(20), 1 + below(9), below(9));
      blocks_once(random, pools, isas);
    }
  }
  float_environments(random, isas);
  jaxquant_force_isa(isas[0].c_str());
  concurrency(random, 10);
  printf("%zu instruction sets, %ld comparisons, %ld failures\n", isas.size(), static_cast<long>(compared),
         static_cast<long>(failures));
  return failures == 0 ? 0 : 1;
}
