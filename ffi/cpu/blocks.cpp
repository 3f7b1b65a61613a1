// The XLA handlers of blocks of narrow elements under shared scales.
#include <string_view>

#include "kernels.h"
#include "pages.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxquant {
namespace {

namespace ffi = xla::ffi;

// About 50 us of one core; smaller work is not worth another thread.
constexpr int64_t kElementsPerTask = int64_t{1} << 16;
// Results that no cache would hold until they are read are written past the caches.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

bool find_element(std::string_view name, Element* element) {
  constexpr std::string_view kNames[] = {"E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "Int8"};
  for (int i = 0; i < 6; ++i) {
    if (name == kNames[i]) {
      *element = static_cast<Element>(i);
      return true;
    }
  }
  return false;
}

bool find_scale(std::string_view name, Scale* scale) {
  constexpr std::string_view kNames[] = {"", "E8M0", "E4M3"};
  for (int i = 0; i < 3; ++i) {
    if (name == kNames[i]) {
      *scale = static_cast<Scale>(i);
      return true;
    }
  }
  return false;
}

// What both directions share; `values` is [*batch, block] or, `across`, [*batch, block, inner].
ffi::Error describe(const ffi::AnyBuffer& values, std::string_view element, std::string_view scale, bool packed,
                    bool across, int64_t outer_count, Blocks* p) {
  const auto dimensions = values.dimensions();
  const size_t batch = dimensions.size() - (across ? 2 : 1);
  if (batch > dimensions.size()) return ffi::Error::InvalidArgument("values must have the axes of a block");
  if (!find_element(element, &p->element) || !find_scale(scale, &p->scale)) {
    return ffi::Error::InvalidArgument("no such elements or scales");
  }
  p->packed = packed;
  p->block = dimensions[batch];
  p->inner = across ? dimensions[batch + 1] : 1;
  if (p->block % Blocks::kUnit) return ffi::Error::InvalidArgument("blocks must hold multiples of 16 elements");
  int64_t blocks = 1;
  for (size_t i = 0; i < batch; ++i) blocks *= dimensions[i];
  p->blocks_per_outer = outer_count ? blocks / outer_count : 1;
  return ffi::Error::Success();
}

template <typename Problem>
void run(ffi::ThreadPool& pool, const Problem& p, int64_t elements, void (*kernel)(const Problem&, int64_t, int64_t)) {
  if (elements == 0) return;
  const int64_t pieces = elements / (p.block * p.inner) * (p.inner == 1 ? 1 : p.tiles());
  const int64_t size = p.block * std::min(p.inner, Blocks::kTile);
  parallel_for(pool, pieces, std::max<int64_t>(1, kElementsPerTask / size),
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

ffi::Error decode_blocks(ffi::AnyBuffer codes, ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> values,
                         std::string_view element, std::string_view scale, bool packed, bool across,
                         ffi::ThreadPool pool) {
  DecodeBlocks p{};
  const auto levels = [&scales](size_t i) -> ffi::AnyBuffer { return scales.get<ffi::AnyBuffer>(i).value(); };
  const int64_t outer_count = scales.size() > 1 ? static_cast<int64_t>(levels(1).element_count()) : 0;
  if (auto error = describe(*values, element, scale, packed, across, outer_count, &p); error.failure()) return error;
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  if (scales.size() > 0) p.scales = static_cast<const uint8_t*>(levels(0).untyped_data());
  if (scales.size() > 1) p.outer = static_cast<const float*>(levels(1).untyped_data());
  p.values = static_cast<float*>(values->untyped_data());
  const int64_t bytes = static_cast<int64_t>(values->size_bytes());
  p.stream = bytes >= kStreamBytes && reinterpret_cast<uintptr_t>(p.values) % 32 == 0;
  if (bytes >= kStreamBytes) advise_large_pages(p.values, static_cast<size_t>(bytes));
  run(pool, p, static_cast<int64_t>(values->element_count()), kernels().decode_blocks);
  return ffi::Error::Success();
}

ffi::Error encode_blocks(ffi::AnyBuffer values, ffi::RemainingArgs outer, ffi::Result<ffi::AnyBuffer> codes,
                         ffi::Result<ffi::AnyBuffer> scales, std::string_view element, std::string_view scale,
                         bool packed, bool across, bool saturate, int32_t up_from, int32_t lowered,
                         ffi::ThreadPool pool) {
  EncodeBlocks p{};
  const int64_t outer_count =
      outer.size() ? static_cast<int64_t>(outer.get<ffi::AnyBuffer>(0).value().element_count()) : 0;
  if (auto error = describe(values, element, scale, packed, across, outer_count, &p); error.failure()) return error;
  if (outer.size()) p.outer = static_cast<const float*>(outer.get<ffi::AnyBuffer>(0).value().untyped_data());
  p.values = static_cast<const float*>(values.untyped_data());
  p.codes = static_cast<uint8_t*>(codes->untyped_data());
  p.scales = static_cast<uint8_t*>(scales->untyped_data());
  p.saturate = saturate;
  p.up_from = up_from;
  p.lowered = lowered;
  const int64_t bytes = static_cast<int64_t>(codes->size_bytes());
  if (bytes >= kStreamBytes) advise_large_pages(p.codes, static_cast<size_t>(bytes));
  run(pool, p, static_cast<int64_t>(values.element_count()), kernels().encode_blocks);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxquant_decode_blocks_v1, decode_blocks,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("element")
                                  .Attr<std::string_view>("scale")
                                  .Attr<bool>("packed")
                                  .Attr<bool>("across")
                                  .Ctx<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxquant_encode_blocks_v1, encode_blocks,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("element")
                                  .Attr<std::string_view>("scale")
                                  .Attr<bool>("packed")
                                  .Attr<bool>("across")
                                  .Attr<bool>("saturate")
                                  .Attr<int32_t>("up_from")
                                  .Attr<int32_t>("lowered")
                                  .Ctx<ffi::ThreadPool>());
#pragma GCC visibility pop

}  // namespace jaxquant
