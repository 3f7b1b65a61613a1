// The XLA handler of jaxquant.quantize.
#include "kernels.h"
#include "pages.h"
#include "parallel.h"
#include "record.h"
#include "xla/ffi/api/ffi.h"

namespace jaxquant {
namespace {

namespace ffi = xla::ffi;

// About 50 us of one core; smaller work is not worth another thread.
constexpr int64_t kRecordsPerTask = 512;
// Results that no cache would hold until they are read are written past the caches.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

ffi::Error quantize(ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> records, ffi::ThreadPool pool) {
  const Kernels& chosen = kernels();
  const auto* from = static_cast<const uint8_t*>(values.untyped_data());
  auto* to = static_cast<uint8_t*>(records->untyped_data());
  const int64_t count = static_cast<int64_t>(values.element_count()) / kBlock;
  const bool stream = count * q8k::kBytes >= kStreamBytes;
  if (stream) advise_large_pages(to, static_cast<size_t>(count) * q8k::kBytes);
  parallel_for(pool, count, kRecordsPerTask, [&](int64_t begin, int64_t end) {
    chosen.quantize(from + begin * kBlock * 4, to + begin * q8k::kBytes, end - begin, stream);
  });
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxquant_quantize_v1, quantize,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ctx<ffi::ThreadPool>());
#pragma GCC visibility pop

}  // namespace jaxquant
