// The XLA handlers: they start a kernel on XLA's stream and return. They allocate nothing, wait for nothing,
// and depend on nothing but their operands, so that XLA may record them into a command buffer.
#include "launch.h"
#include "record.h"
#include "xla/ffi/api/ffi.h"

namespace jaxquant {
namespace {

namespace ffi = xla::ffi;

ffi::Error as_error(cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jaxquant: ") + cudaGetErrorString(error));
}

ffi::Error quantize(cudaStream_t stream, ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> records) {
  auto* out = static_cast<uint8_t*>(records->untyped_data());
  if (reinterpret_cast<uintptr_t>(out) % 4 != 0) {
    return ffi::Error::InvalidArgument("quantize: the result is not aligned to 4 bytes");
  }
  return as_error(launch_quantize(static_cast<const uint8_t*>(values.untyped_data()), out,
                                  static_cast<int64_t>(values.element_count()) / kBlock, stream));
}

Shape shape_of(ffi::AnyBuffer::Dimensions extents) { return {extents.begin(), extents.size()}; }

ffi::Error quantized_dot(cudaStream_t stream, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                         ffi::Result<ffi::AnyBuffer> result, ffi::Span<const int64_t> lhs_dims,
                         ffi::Span<const int64_t> rhs_dims) {
  if (result->dimensions().size() > kMaxAxes) {
    return ffi::Error::InvalidArgument("quantized_dot: more than 64 axes in the result");
  }
  if (result->element_count() == 0) return ffi::Error::Success();
  const Contraction all = contraction(shape_of(result->dimensions()), shape_of(lhs.dimensions()), lhs_dims.begin(),
                                      shape_of(rhs.dimensions()), rhs_dims.begin());
  return as_error(launch_quantized_dot(all, static_cast<const uint8_t*>(lhs.untyped_data()),
                                       static_cast<const uint8_t*>(rhs.untyped_data()),
                                       static_cast<float*>(result->untyped_data()), stream));
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxquant_quantize_v1, quantize,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxquant_quantized_dot_v1, quantized_dot,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<ffi::Span<const int64_t>>("lhs_dims")
                                  .Attr<ffi::Span<const int64_t>>("rhs_dims"),
                              {ffi::Traits::kCmdBufferCompatible});
#pragma GCC visibility pop

}  // namespace jaxquant
