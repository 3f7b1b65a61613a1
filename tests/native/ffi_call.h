// What XLA does around a handler, in a few lines: call frames, a thread pool, and operands between fences.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

extern "C" {
const char* jaxquant_isa();
const char* jaxquant_supported_isa(int i);
int jaxquant_force_isa(const char* isa);
XLA_FFI_Error* jaxquant_quantize_v1(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jaxquant_quantized_dot_v1(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jaxquant_decode_blocks_v1(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* jaxquant_encode_blocks_v1(XLA_FFI_CallFrame* frame);
}

struct XLA_FFI_Error {
  std::string message;
};

// A pool as XLA's: threads that run tasks; with `on_caller` the handler itself runs on one of them.
struct XLA_FFI_ExecutionContext {
  explicit XLA_FFI_ExecutionContext(int threads) : count(threads) {
    for (int i = 0; i < threads; ++i) workers.emplace_back([this] { work(); });
  }
  ~XLA_FFI_ExecutionContext() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ended = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      tasks.push_back(std::move(task));
    }
    wake.notify_one();
  }

  // Runs `task` on a thread of the pool and waits for it.
  void run(const std::function<void()>& task) {
    std::mutex done_mutex;
    std::condition_variable done_wake;
    bool done = false;
    schedule([&] {
      task();
      const std::lock_guard<std::mutex> lock(done_mutex);
      done = true;
      done_wake.notify_one();
    });
    std::unique_lock<std::mutex> lock(done_mutex);
    done_wake.wait(lock, [&] { return done; });
  }

  int count;

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      wake.wait(lock, [this] { return ended || !tasks.empty(); });
      if (tasks.empty()) return;
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> tasks;
  std::vector<std::thread> workers;
  bool ended = false;
};

namespace ffi_call {

inline const XLA_FFI_Api* api() {
  static const XLA_FFI_Api table = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
    made.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    made.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    made.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      args->ctx->schedule([task = args->task, data = args->data] { task(data); });
      return nullptr;
    };
    made.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = args->ctx->count;
      return nullptr;
    };
    return made;
  }();
  return &table;
}

struct Operand {
  XLA_FFI_DataType dtype;
  const void* data;
  std::vector<int64_t> shape;
};

struct Attribute {
  std::string name;
  std::variant<std::vector<int64_t>, std::string, bool, int32_t> value;
};

// Calls a handler as XLA would; the message of its error, or "".
inline std::string call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionContext& pool, std::vector<Operand> operands,
                        std::vector<Operand> results, std::vector<Attribute> attributes = {}) {
  const auto buffers = [](std::vector<Operand>& all) {
    std::vector<XLA_FFI_Buffer> made;
    for (Operand& each : all) {
      made.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, each.dtype, const_cast<void*>(each.data),
                      static_cast<int64_t>(each.shape.size()), each.shape.data()});
    }
    return made;
  };
  const auto pointers = [](std::vector<XLA_FFI_Buffer>& all) {
    std::vector<void*> made;
    for (XLA_FFI_Buffer& each : all) made.push_back(&each);
    return made;
  };
  std::vector<XLA_FFI_Buffer> in = buffers(operands), out = buffers(results);
  std::vector<void*> args = pointers(in), rets = pointers(out);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);

  // By name, as XLA sorts them.
  std::sort(attributes.begin(), attributes.end(),
            [](const Attribute& a, const Attribute& b) { return a.name < b.name; });
  const size_t count = attributes.size();
  std::vector<XLA_FFI_ByteSpan> spans(count), strings(count);
  std::vector<XLA_FFI_Array> arrays(count);
  std::vector<XLA_FFI_Scalar> scalars(count);
  std::vector<XLA_FFI_ByteSpan*> names;
  std::vector<void*> values;
  std::vector<XLA_FFI_AttrType> types;
  for (size_t i = 0; i < count; ++i) {
    spans[i] = {attributes[i].name.data(), attributes[i].name.size()};
    names.push_back(&spans[i]);
    auto& value = attributes[i].value;
    if (auto* array = std::get_if<std::vector<int64_t>>(&value)) {
      arrays[i] = {XLA_FFI_DataType_S64, array->size(), array->data()};
      types.push_back(XLA_FFI_AttrType_ARRAY);
      values.push_back(&arrays[i]);
    } else if (auto* text = std::get_if<std::string>(&value)) {
      strings[i] = {text->data(), text->size()};
      types.push_back(XLA_FFI_AttrType_STRING);
      values.push_back(&strings[i]);
    } else {
      auto* flag = std::get_if<bool>(&value);
      scalars[i] = flag ? XLA_FFI_Scalar{XLA_FFI_DataType_PRED, flag}
                        : XLA_FFI_Scalar{XLA_FFI_DataType_S32, std::get_if<int32_t>(&value)};
      types.push_back(XLA_FFI_AttrType_SCALAR);
      values.push_back(&scalars[i]);
    }
  }

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = api();
  frame.ctx = &pool;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), arg_types.data(), args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), ret_types.data(), rets.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(count),
                 types.data(),              names.data(), values.data()};
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return "";
  const std::string message = error->message;
  delete error;
  return message.empty() ? "an error without a message" : message;
}

inline std::string quantize(XLA_FFI_ExecutionContext& pool, const void* values, int64_t records, void* out) {
  return call(jaxquant_quantize_v1, pool, {{XLA_FFI_DataType_F32, values, {records, 256}}},
              {{XLA_FFI_DataType_U8, out, {records, 292}}});
}

// w [rows, records, 144] with x [columns, records, 292] to [rows, columns].
inline std::string matmul(XLA_FFI_ExecutionContext& pool, const void* w, const void* x, int64_t rows, int64_t columns,
                          int64_t records, void* out) {
  return call(jaxquant_quantized_dot_v1, pool,
              {{XLA_FFI_DataType_U8, w, {rows, records, 144}}, {XLA_FFI_DataType_U8, x, {columns, records, 292}}},
              {{XLA_FFI_DataType_F32, out, {rows, columns}}},
              {{"lhs_dims", std::vector<int64_t>{0, -1}}, {"rhs_dims", std::vector<int64_t>{1, -1}}});
}

// Elements of one kind under scales of one kind, as [blocks, block] or, `across`, [blocks, block, inner].
struct BlockShape {
  std::string element;
  std::string scale;  // "", "E8M0", or "E4M3" under one float32
  int bits;
  bool packed;
  bool across;
  int64_t blocks;
  int64_t block;
  int64_t inner;

  int64_t values() const { return blocks * block * inner; }
  int64_t code_bytes() const { return packed ? values() * bits / 8 : values(); }
  int64_t scale_bytes() const { return blocks * inner; }
  std::vector<int64_t> shape(int64_t extent) const {
    return across ? std::vector<int64_t>{blocks, extent, inner} : std::vector<int64_t>{blocks, extent};
  }
  std::vector<int64_t> scale_shape() const {
    return across ? std::vector<int64_t>{blocks, inner} : std::vector<int64_t>{blocks};
  }
  int64_t code_extent() const { return packed ? block * bits / 8 : block; }
};

inline std::string decode_blocks(XLA_FFI_ExecutionContext& pool, const BlockShape& p, const void* codes,
                                 const void* scales, const void* outer, void* values) {
  std::vector<Operand> operands = {{XLA_FFI_DataType_U8, codes, p.shape(p.code_extent())}};
  if (!p.scale.empty()) operands.push_back({XLA_FFI_DataType_U8, scales, p.scale_shape()});
  if (p.scale == "E4M3") operands.push_back({XLA_FFI_DataType_F32, outer, {1}});
  return call(jaxquant_decode_blocks_v1, pool, operands, {{XLA_FFI_DataType_F32, values, p.shape(p.block)}},
              {{"element", p.element}, {"scale", p.scale}, {"packed", p.packed}, {"across", p.across}});
}

inline std::string encode_blocks(XLA_FFI_ExecutionContext& pool, const BlockShape& p, bool saturate, int32_t up_from,
                                 int32_t lowered, const void* values, const void* outer, void* codes, void* scales) {
  std::vector<Operand> operands = {{XLA_FFI_DataType_F32, values, p.shape(p.block)}};
  if (p.scale == "E4M3") operands.push_back({XLA_FFI_DataType_F32, outer, {1}});
  return call(jaxquant_encode_blocks_v1, pool, operands,
              {{XLA_FFI_DataType_U8, codes, p.shape(p.code_extent())}, {XLA_FFI_DataType_U8, scales, p.scale_shape()}},
              {{"element", p.element},
               {"scale", p.scale},
               {"packed", p.packed},
               {"across", p.across},
               {"saturate", saturate},
               {"up_from", up_from},
               {"lowered", lowered}});
}

// One of all the kinds of blocks there are, chosen by a number.
inline BlockShape block_shape(uint64_t choice) {
  const struct {
    const char* name;
    int bits;
  } kElements[] = {{"E4M3", 8}, {"E5M2", 8}, {"E3M2", 6}, {"E2M3", 6}, {"E2M1", 4}, {"Int8", 8}};
  const auto draw = [&choice](uint64_t n) {
    const uint64_t drawn = choice % n;
    choice /= n;
    return static_cast<int64_t>(drawn);
  };
  const auto& element = kElements[draw(6)];
  BlockShape p{element.name, "E8M0", element.bits, false, false, 0, 0, 1};
  if (draw(4) == 0) {  // NVFP4
    p.element = "E2M1";
    p.bits = 4;
    p.scale = "E4M3";
  }
  p.packed = p.bits < 8 && draw(2) == 0;
  p.across = draw(2) == 0;
  p.block = 16 * (1 + draw(4));
  p.blocks = 1 + draw(19);
  if (p.across) p.inner = 2 + draw(260);
  return p;
}

// Memory that ends where, or starts where, nobody may touch: one byte too many is a fault.
class Fenced {
 public:
  enum class Side { kStart, kEnd };

  Fenced(size_t bytes, Side side) : bytes_(bytes), whole_((bytes + kPage - 1) / kPage * kPage + 2 * kPage) {
    void* all = mmap(nullptr, whole_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) fail();
    all_ = static_cast<uint8_t*>(all);
    const size_t inside = whole_ - 2 * kPage;
    if (inside != 0 && mprotect(all_ + kPage, inside, PROT_READ | PROT_WRITE) != 0) fail();
    data_ = all_ + kPage + (side == Side::kEnd ? inside - bytes : 0);
    // What shares the pages with the operand must keep this.
    if (inside != 0) memset(all_ + kPage, kUntouched, inside);
  }
  ~Fenced() { munmap(all_, whole_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }
  bool untouched_around() const {
    for (const uint8_t* p = all_ + kPage; p < data_; ++p) {
      if (*p != kUntouched) return false;
    }
    for (const uint8_t* p = data_ + bytes_; p < all_ + whole_ - kPage; ++p) {
      if (*p != kUntouched) return false;
    }
    return true;
  }
  void seal() const { (void)mprotect(all_ + kPage, whole_ - 2 * kPage, PROT_READ); }

 private:
  [[noreturn]] static void fail() {
    perror("mmap");
    exit(2);
  }

  static constexpr size_t kPage = 4096;
  static constexpr uint8_t kUntouched = 0xA5;
  size_t bytes_;
  size_t whole_;
  uint8_t* all_ = nullptr;
  uint8_t* data_ = nullptr;
};

inline std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  while (const char* name = jaxquant_supported_isa(static_cast<int>(names.size()))) names.emplace_back(name);
  return names;
}

// NaN counts as one value; everything else must be the same bits.
inline bool same_floats(const void* a, const void* b, size_t count) {
  const auto nan = [](uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; };
  for (size_t i = 0; i < count; ++i) {
    uint32_t x, y;
    memcpy(&x, static_cast<const uint8_t*>(a) + 4 * i, 4);
    memcpy(&y, static_cast<const uint8_t*>(b) + 4 * i, 4);
    if (x != y && !(nan(x) && nan(y))) return false;
  }
  return true;
}

}  // namespace ffi_call
