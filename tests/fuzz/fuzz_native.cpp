// Arbitrary bytes through quantize, quantized_dot and the block codecs: the instruction sets of this CPU against the portable
// kernels, operands between fences. The first bytes of an input choose the operation and the shape.
//
// With libFuzzer:     fuzz_native CORPUS -max_total_time=600
// Without (see below): fuzz_native CORPUS SECONDS
#include "ffi_call.h"

#include <algorithm>

namespace {

using ffi_call::Fenced;

XLA_FFI_ExecutionContext& pool() {
  static XLA_FFI_ExecutionContext made(1);
  return made;
}

// Operand bytes: those of the input, over and over; every other copy with its bits flipped.
void fill(const Fenced& memory, const uint8_t* data, size_t size) {
  for (size_t i = 0; i < memory.size(); ++i) {
    memory.data()[i] = size == 0 ? 0 : static_cast<uint8_t>(data[i % size] ^ (i / size % 2 ? 0x5A : 0));
  }
  memory.seal();
}

void fail(const std::string& what) {
  fprintf(stderr, "MISMATCH: %s\n", what.c_str());
  abort();
}

void quantize(const uint8_t* data, size_t size, int64_t records, Fenced::Side side) {
  const Fenced values(static_cast<size_t>(records) * 1024, side);
  fill(values, data, size);
  std::vector<uint8_t> want(static_cast<size_t>(records) * 292);
  jaxquant_force_isa("portable");
  ffi_call::quantize(pool(), values.data(), records, want.data());
  for (const std::string& isa : ffi_call::supported_isas()) {
    const Fenced out(want.size(), side);
    jaxquant_force_isa(isa.c_str());
    ffi_call::quantize(pool(), values.data(), records, out.data());
    if (!want.empty() && memcmp(out.data(), want.data(), want.size()) != 0) fail("quantize " + isa);
    if (!out.untouched_around()) fail("quantize " + isa + " wrote outside its result");
  }
}

void dot(const uint8_t* data, size_t size, int64_t rows, int64_t columns, int64_t records, Fenced::Side side) {
  const Fenced w(static_cast<size_t>(rows * records) * 144, side);
  const Fenced x(static_cast<size_t>(columns * records) * 292, side);
  fill(w, data, size);
  fill(x, data + size / 2, size - size / 2);
  const size_t count = static_cast<size_t>(rows * columns);
  std::vector<uint8_t> want(4 * count);
  jaxquant_force_isa("portable");
  ffi_call::matmul(pool(), w.data(), x.data(), rows, columns, records, want.data());
  for (const std::string& isa : ffi_call::supported_isas()) {
    const Fenced out(4 * count, side);
    jaxquant_force_isa(isa.c_str());
    ffi_call::matmul(pool(), w.data(), x.data(), rows, columns, records, out.data());
    if (!ffi_call::same_floats(out.data(), want.data(), count)) fail("dot " + isa);
    if (!out.untouched_around()) fail("dot " + isa + " wrote outside its result");
  }
}

void decode_blocks(const uint8_t* data, size_t size, uint64_t choice, Fenced::Side side) {
  const ffi_call::BlockShape p = ffi_call::block_shape(choice);
  const Fenced codes(static_cast<size_t>(p.code_bytes()), side), scales(static_cast<size_t>(p.scale_bytes()), side);
  const Fenced outer(4, side);
  fill(codes, data, size);
  fill(scales, data + size / 2, size - size / 2);
  fill(outer, data, size);
  std::vector<uint8_t> want(static_cast<size_t>(4 * p.values()));
  jaxquant_force_isa("portable");
  ffi_call::decode_blocks(pool(), p, codes.data(), scales.data(), outer.data(), want.data());
  for (const std::string& isa : ffi_call::supported_isas()) {
    const Fenced out(want.size(), side);
    jaxquant_force_isa(isa.c_str());
    ffi_call::decode_blocks(pool(), p, codes.data(), scales.data(), outer.data(), out.data());
    if (!ffi_call::same_floats(out.data(), want.data(), want.size() / 4)) fail("decoding " + p.element + " " + isa);
    if (!out.untouched_around()) fail("decoding " + p.element + " " + isa + " wrote outside its result");
  }
}

void encode_blocks(const uint8_t* data, size_t size, uint64_t choice, Fenced::Side side) {
  const ffi_call::BlockShape p = ffi_call::block_shape(choice);
  const Fenced values(static_cast<size_t>(4 * p.values()), side), outer(4, side);
  fill(values, data, size);
  // A tensor scale is positive and finite; the callers see to that.
  const uint32_t outer_bits = 1 + static_cast<uint32_t>(choice * 2654435761u) % 0x7F7FFFFFu;
  memcpy(outer.data(), &outer_bits, 4);
  std::vector<uint8_t> codes(static_cast<size_t>(p.code_bytes())), scales(static_cast<size_t>(p.scale_bytes()));
  const bool saturate = choice % 3 == 0;
  const int32_t up_from = 0x800000 + static_cast<int32_t>(choice * 40503u % 0x800001);
  const auto encode = [&](void* to, void* to_scales) {
    ffi_call::encode_blocks(pool(), p, saturate, up_from, static_cast<int32_t>(choice % 16), values.data(),
                            outer.data(), to, to_scales);
  };
  jaxquant_force_isa("portable");
  encode(codes.data(), scales.data());
  for (const std::string& isa : ffi_call::supported_isas()) {
    const Fenced out(codes.size(), side), out_scales(scales.size(), side);
    jaxquant_force_isa(isa.c_str());
    encode(out.data(), out_scales.data());
    if (memcmp(out.data(), codes.data(), codes.size()) != 0) fail("codes of " + p.element + " " + isa);
    if (memcmp(out_scales.data(), scales.data(), scales.size()) != 0) fail("scales of " + p.element + " " + isa);
    if (!out.untouched_around() || !out_scales.untouched_around()) fail("encoding wrote outside its results");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  const auto side = data[0] & 4 ? Fenced::Side::kStart : Fenced::Side::kEnd;
  const uint64_t choice = (data[1] | data[2] << 8 | data[3] << 16) * uint64_t{0x9E3779B9} >> 3;
  switch (data[0] & 3) {
    case 0: dot(data + 4, size - 4, 1 + data[1] % 40, 1 + data[2] % 12, data[3] % 70, side); break;
    case 1: quantize(data + 4, size - 4, data[1] % 40, side); break;
    case 2: decode_blocks(data + 4, size - 4, choice, side); break;
    default: encode_blocks(data + 4, size - 4, choice, side);
  }
  return 0;
}

#if !defined(JAXQUANT_LIBFUZZER)
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

// A mutator for any compiler: inputs of the corpus with bytes flipped, set to telling values, copied, cut.
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::vector<std::vector<uint8_t>> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) corpus.emplace_back(4 + 436, uint8_t{0});
  std::sort(corpus.begin(), corpus.end());
  const uint8_t telling[] = {0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x3F, 0xC0, 0x7C, 0x7E};
  std::mt19937_64 random(20);
  int64_t runs = 0, bytes = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  for (const auto& input : corpus) LLVMFuzzerTestOneInput(input.data(), input.size());
  while (elapsed() < atof(argv[2])) {
    std::vector<uint8_t> input = corpus[random() % corpus.size()];
    for (uint64_t i = random() % 16; i-- > 0 && !input.empty();) {
      uint8_t& byte = input[random() % input.size()];
      switch (random() % 4) {
        case 0: byte = static_cast<uint8_t>(byte ^ (1u << random() % 8)); break;
        case 1: byte = telling[random() % sizeof telling]; break;
        case 2: byte = input[random() % input.size()]; break;
        default: input.resize(random() % (2 * input.size()) + 4, static_cast<uint8_t>(random()));
      }
    }
    for (size_t i = 0; i < 4 && i < input.size(); ++i) {
      if (random() % 2) input[i] = static_cast<uint8_t>(random());
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs;
    bytes += static_cast<int64_t>(input.size());
  }
  printf("%ld inputs, %ld bytes, %.0f s, no mismatch\n", static_cast<long>(runs), static_cast<long>(bytes), elapsed());
  return 0;
}
#endif
