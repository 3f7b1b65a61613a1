"""The mutants: each one small mistake that the suite must notice by a wrong value or a missing refusal.

A mutant replaces text that occurs exactly once in a file. ``tests`` names the quick tests most likely to see
it (`QUICK`); one that outlives them meets all tests of its area (`AREAS`). To add one, add a line.
"""

from __future__ import annotations

from typing import NamedTuple

# Arguments of pytest, from tests/.
QUICK: dict[str, list[str]] = {
    "dot": [
        "test_quantized_dot.py",
        "-k",
        "contract_dot or golden_dots or equals_the_reference or sums_beyond or lone or empty or bit_pattern",
    ],
    "dot-refusals": ["test_quantized_dot.py", "test_quantize.py", "-k", "refuse or foreign or wrong"],
    "quantize": [
        "test_quantize.py",
        "-k",
        "contract_table or equal_the_reference or domain or number_of_records or golden or beyond_the_caches",
    ],
    "checkify": ["test_quantize.py", "-k", "checkify"],
    "environment": ["test_float_environment.py"],
    "fences": ["test_emulated.py", "-k", "this_cpu"],
    "isa": ["test_native.py", "-k", "isa"],
    "vmap": ["test_vmap.py", "-k", "any_in_axes or moves_no_bytes or quantize or attention or many"],
    "threads": ["test_native.py", "-k", "threads_agree or keeps_its_float"],
    "records": ["test_records.py"],
    "float32": ["test_float32.py"],
    "casts": ["test_casts.py", "-k", "edges or e8m0_ends or infinities or nan_has or away_from_zero"],
    "decode": ["test_casts.py", "-k", "TestDecode or comes_back"],
    "stochastic": ["test_casts.py", "-k", "random_word or exact_values"],
    "narrow": ["test_narrow.py", "-k", "little_endian or any_axis or upper_bits or golden or contract_s"],
    "narrow-values": ["test_narrow.py"],
    "swizzle": [
        "test_swizzled.py",
        "-k",
        "golden or w01 or w05 or w07 or byte_formula or statistics or refuse",
    ],
    "blocks": [
        "test_quantize_blocks.py",
        "-k",
        "golden or poisons or zeros_keep or saturate or leaves_only or cotangent or cases",
    ],
    "block-kernels": [
        "test_quantize_blocks.py",
        "-k",
        "golden or poisons or saturate or every_code or rational or zeros or axis",
    ],
    "block-vmap": ["test_quantize_blocks.py", "test_block_scaled.py", "-k", "vmap"],
    "blocks-exact": ["test_quantize_blocks.py", "-k", "rational"],
    "arrays": [
        "test_block_scaled.py",
        "-k",
        "rational_product or value_type or transpose or slice or indexing",
    ],
    "arrays-refusals": ["test_block_scaled.py", "-k", "refuse or remainder or W or check"],
    "decoding": ["test_quantize_blocks.py", "-k", "every_code_under or rounds_once or half_precision"],
    "block_dot": ["test_block_dot.py"],
    "gguf": ["test_gguf.py", "-k", "refused or array_is or records_are or claims"],
}

_NATIVE = ["test_quantized_dot.py", "test_quantize.py", "test_cases.py", "test_vmap.py", "test_emulated.py"]
AREAS: dict[str, list[str]] = {
    "ffi/blocks.h": ["test_quantize_blocks.py", "test_block_scaled.py"],
    "ffi/cpu/blocks.cpp": ["test_quantize_blocks.py", "test_block_scaled.py"],
    "ffi/cpu/simd_blocks.h": ["test_quantize_blocks.py", "test_block_scaled.py"],
    "jaxquant/ops/blocks.py": ["test_quantize_blocks.py", "test_block_scaled.py"],
    "jaxquant/ops/bit_stream.py": ["test_narrow.py", "test_quantize_blocks.py"],
    "ffi/": [*_NATIVE, "test_native.py", "test_float_environment.py"],
    "jaxquant/ops/": ["test_float32.py", *_NATIVE[:4], "test_records.py", "test_jit.py"],
    "jaxquant/records.py": ["test_records.py", "test_cases.py"],
    "jaxquant/casts.py": ["test_casts.py", "test_cases.py", "test_narrow.py"],
    "jaxquant/arrays/narrow.py": ["test_narrow.py", "test_state_machine.py"],
    "jaxquant/arrays/swizzled.py": ["test_swizzled.py", "test_state_machine.py"],
    "jaxquant/arrays/": ["test_quantize_blocks.py", "test_block_scaled.py", "test_block_dot.py"],
    "jaxquant/gguf.py": ["test_gguf.py", "test_hostile.py"],
}


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str
    why: str


_RECORD, _PORTABLE, _AVX2 = "ffi/record.h", "ffi/cpu/portable.cpp", "ffi/cpu/avx2.h"
_MATMUL, _SIMD_QUANTIZE = "ffi/cpu/simd_matmul.h", "ffi/cpu/simd_quantize.h"
_ENVIRONMENT, _PARALLEL = "ffi/cpu/float_environment.h", "ffi/cpu/parallel.h"
_FLOAT32, _FALLBACK, _RECORDS = "jaxquant/ops/float32.py", "jaxquant/ops/fallback.py", "jaxquant/records.py"
_OPERANDS, _DOT, _QUANTIZE = (
    "jaxquant/ops/operands.py",
    "jaxquant/ops/quantized_dot.py",
    "jaxquant/ops/quantize.py",
)
_CASTS, _NARROW, _SWIZZLED = "jaxquant/casts.py", "jaxquant/arrays/narrow.py", "jaxquant/arrays/swizzled.py"
_BLOCKS, _BLOCK_OPS = "jaxquant/arrays/quantize_blocks.py", "jaxquant/ops/blocks.py"
_STREAM, _CODES = "jaxquant/ops/bit_stream.py", "ffi/blocks.h"
_SIMD_BLOCKS, _GEMV = "ffi/cpu/simd_blocks.h", "ffi/cpu/simd_gemv.h"
_SCALED, _BLOCK_DOT, _GGUF = (
    "jaxquant/arrays/block_scaled.py",
    "jaxquant/arrays/block_dot.py",
    "jaxquant/gguf.py",
)

# fmt: off
MUTANTS = [Mutant(*line) for line in [
    # The byte tables and the float steps.
    (_RECORD, "uint32_t field = 113;", "uint32_t field = 112;", "dot", "float16 subnormals halved"),
    (_RECORD, "(exponent + 112) << 23", "(exponent + 111) << 23", "dot", "float16 exponents off by one"),
    (_RECORD, "if (exponent == 31) return", "if (exponent == 32) return", "dot", "float16 infinity and NaN as numbers"),
    (_RECORD, "((a >> 2) & 0x30303030u)", "((b >> 2) & 0x30303030u)", "dot", "high bits of sc from m"),
    (_RECORD, "((c >> 4) & 0x0F0F0F0Fu)", "(c & 0x0F0F0F0Fu)", "dot", "low bits of m from sc"),
    (_RECORD, "(a & 0x3F3F3F3Fu)", "(a & 0x1F1F1F1Fu)", "dot", "sc of 5 bits"),
    (_RECORD, "multiply(ds, subtract(p, n))", "subtract(multiply(ds, p), multiply(ds, n))", "dot", "ds applied first"),
    (_RECORD, "return multiply(ds, subtract(p, n));", "(void)p; return multiply(ds, __builtin_fmaf(d, to_float(s), -n));", "dot", "fused multiply"),
    (_RECORD, "divide(-127.0f, extreme)", "divide(-128.0f, extreme)", "quantize", "inverse of 128"),
    (_RECORD, "divide(1.0f, inverse)", "divide(extreme, -127.0f)", "quantize", "ds from the extreme, not the inverse"),
    (_RECORD, "kInfinityKey = 0xFF000000u", "kInfinityKey = 0xFF000002u", "quantize", "infinity is in domain"),
    (_RECORD, "kLeastKey = 0x02FE0001u", "kLeastKey = 0x02FE0000u", "quantize", "one extreme too small is in domain"),
    (_RECORD, "kLeastKey = 0x02FE0001u", "kLeastKey = 0x02FE0002u", "quantize", "the least extreme is refused"),
    (_RECORD, "const bool zero = key <= 1;", "const bool zero = key == 0;", "quantize", "blocks of -0 are poison"),
    (_RECORD, "kPoison = 0x7FC00000u", "kPoison = 0x7F800000u", "quantize", "poison is an infinity"),
    (_RECORD, "memset(out, 0, q8k::kBytes)", "memset(out, 0, q8k::kBytes - 2)", "quantize", "last bsum of a zero record unwritten"),
    (_RECORD, "constexpr int kDmin = 2;", "constexpr int kDmin = 0;", "dot", "dmin read from d"),
    # The portable kernels.
    (_PORTABLE, "if (candidate > key) key = candidate;", "if ((candidate | 1u) > (key | 1u)) key = candidate;", "quantize", "the first of a tie instead of the minimum"),
    (_PORTABLE, "std::nearbyintf(", "std::roundf(", "quantize", "ties away from zero"),
    (_PORTABLE, "std::nearbyintf(", "std::truncf(", "quantize", "truncation"),
    (_PORTABLE, "multiply(load<float>(values + 4 * i), scale.inverse)", "divide(load<float>(values + 4 * i), scale.ds)", "quantize", "divided by ds"),
    (_PORTABLE, "sum += q;", "sum += i % 16 == 15 ? 0 : q;", "quantize", "bsum of fifteen"),
    (_PORTABLE, "4 * (b % 2)", "4 * (1 - b % 2)", "dot", "the wrong nibble"),
    (_PORTABLE, "load<int8_t>(x + q8k::kQ + kSubBlock * b + i)", "load<uint8_t>(x + q8k::kQ + kSubBlock * b + i)", "dot", "activations without a sign"),
    (_PORTABLE, "load<int16_t>(bsum) + load<int16_t>(bsum + 2)", "load<int16_t>(bsum)", "dot", "half of the bsums dropped"),
    (_PORTABLE, "(load<int16_t>(bsum) + load<int16_t>(bsum + 2))", "static_cast<int16_t>(load<int16_t>(bsum) + load<int16_t>(bsum + 2))", "dot", "pairs of bsum added in 16 bits"),
    (_PORTABLE, "int32_t sum = 0;", "int16_t sum = 0;", "dot", "products summed in 16 bits"),
    (_PORTABLE, "problem.records == 0 ? 0.0f : -0.0f", "0.0f", "dot", "an initial +0 joins the fold"),
    (_PORTABLE, "problem.records == 0 ? 0.0f : -0.0f", "-0.0f", "dot", "the dot of nothing is -0"),
    (_PORTABLE, "dot_record(w + g * problem.w_record, x + g * problem.x_record)", "dot_record(w + (problem.records - 1 - g) * problem.w_record, x + (problem.records - 1 - g) * problem.x_record)", "dot", "the fold runs backwards"),
    # The vector kernels.
    (_AVX2, "_mm256_set1_epi16(static_cast<short>(0x8001 + 2 * c))", "_mm256_set1_epi16(static_cast<short>(0x8000 + 2 * c))", "dot", "the odd sub-block takes the even scale"),
    (_AVX2, "_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)", "_mm256_setr_epi32(0, 1, 4, 5, 2, 6, 3, 7)", "quantize", "quads of codes swapped"),
    (_AVX2, "_mm256_cvtps_epi32(", "_mm256_cvttps_epi32(", "quantize", "truncation"),
    (_AVX2, "_mm_unpackhi_epi16(even, odd)", "_mm_unpackhi_epi16(odd, even)", "quantize", "bsums swapped"),
    (_AVX2, "_mm256_or_si256(_mm256_add_epi32(bits, bits), _mm256_srli_epi32(bits, 31))", "_mm256_add_epi32(bits, bits)", "quantize", "the sign of the extreme lost"),
    (_MATMUL, "r + 1 < rows ? p.w_row : 0", "p.w_row", "fences", "reads a row past the last"),
    (_MATMUL, "_mm256_setr_epi8(8, -1, 8, -1, 9,", "_mm256_setr_epi8(8, -1, 9, -1, 9,", "dot", "the second bsum takes the next minimum"),
    (_MATMUL, "if (row == 0 || p.records > kParkedRecords)", "if (row == 0)", "dot", "ds of the first parked records used again"),
    (_MATMUL, "first == 0 || r >= rows", "r >= rows", "dot", "the fold begins with old bytes"),
    (_MATMUL, "group + r < rows ? group + r : rows - 1", "group + r < rows + 8 ? group + r : rows - 1", "fences", "packs rows past the last"),
    (_SIMD_QUANTIZE, "quantize_few<V>(values + (r + kTogether) * (kBlock * 4), lines + kTogether * q8k::kBytes, kTogether);", "quantize_few<V>(values + r * (kBlock * 4), lines + kTogether * q8k::kBytes, kTogether);", "quantize", "streamed records doubled"),
    (_SIMD_QUANTIZE, "_mm256_set1_ps(-127.0f)", "_mm256_set1_ps(-128.0f)", "quantize", "inverse of 128"),
    (_GEMV, "_mm256_shuffle_epi8(scales.m, picker(2, 3))", "_mm256_shuffle_epi8(scales.m, picker(2, 2))", "dot", "the last minimum dropped"),
    (_GEMV, "_mm256_cmpeq_epi32(again, sums)) == -1", "_mm256_cmpeq_epi32(again, sums)) != 0", "dot", "bsums beyond int16 not noticed"),
    (_GEMV, "_mm_sub_ps(_mm256_castps256_ps128(products), _mm256_extractf128_ps(products, 1))", "_mm_sub_ps(_mm256_extractf128_ps(products, 1), _mm256_castps256_ps128(products))", "dot", "n - p"),
    # Blocks of narrow elements.
    (_CODES, "kSmallestNormal = (128 - kBias) << 23", "kSmallestNormal = (127 - kBias) << 23", "block-kernels", "the smallest normal taken for a subnormal"),
    (_CODES, "const I normal = placed + ((127 - kBias) << 23);", "const I normal = placed + ((126 - kBias) << 23);", "block-kernels", "elements halved"),
    (_CODES, "if (infinity) bits = magnitude == largest + 1", "if (infinity) bits = magnitude == largest + 2", "block-kernels", "NaN for infinity in E5M2"),
    (_CODES, "const I odd = (magnitude >> kDropped) & 1;", "const I odd = (magnitude >> kDropped) & 0;", "block-kernels", "ties toward zero"),
    (_CODES, "const I saturated = rounded < largest ? rounded : (rounded & 0) | largest;", "const I saturated = rounded;", "block-kernels", "elements do not saturate"),
    (_CODES, "const I saturated = rounded < 127 ? rounded : (rounded & 0) | 127;", "const I saturated = rounded < 128 ? rounded : (rounded & 0) | 128;", "block-kernels", "MXINT8 encodes -128"),
    (_CODES, "static constexpr int kUnit = 6;", "static constexpr int kUnit = 7;", "block-kernels", "MXINT8 counts in 2**-7"),
    (_CODES, "if (byte == 255) return bit_cast<float>(kNan);", "", "block-kernels", "the NaN scale is a number"),
    (_CODES, "0x00800000 >> (1 - field)", "0x00800000 >> (2 - field)", "block-kernels", "subnormal scales halved"),
    (_CODES, "(significand >= up_from ? 1 : 0)", "(significand > up_from ? 1 : 0)", "block-kernels", "scale rules off by one significand"),
    (_CODES, "byte > 254 ? 254 : byte", "byte > 255 ? 255 : byte", "block-kernels", "an E8M0 scale of 255"),
    (_CODES, "for (field = 1; significand < 0x800000; --field)", "for (field = 0; significand < 0x800000; --field)", "block-kernels", "scales of subnormal blocks halved"),
    (_SIMD_BLOCKS, "const Ints shifts = {0, 4, 8, 12, 16, 20, 24, 28};", "const Ints shifts = {4, 0, 12, 8, 20, 16, 28, 24};", "block-kernels", "nibbles swapped"),
    (_SIMD_BLOCKS, "const Ints shifts = {0, 6, 12, 18, 0, 6, 12, 18};", "const Ints shifts = {0, 6, 12, 18, 0, 6, 12, 12};", "block-kernels", "the eighth 6-bit code lost"),
    (_SIMD_BLOCKS, "? 0xFF : 0x7F;", "? 0xFE : 0x7E;", "block-kernels", "poison is a number"),
    (_SIMD_BLOCKS, "const Ints down_at_tie = {-1, 0, -1, 0,", "const Ints down_at_tie = {0, -1, -1, 0,", "block-kernels", "NVFP4 ties to odd"),
    (_SIMD_BLOCKS, "return byte == 0 ? splat(INT32_MAX) : least;", "return least;", "block-kernels", "codes under a scale of zero"),
    (_SIMD_BLOCKS, "(6.0 * outer)", "(6.0f * static_cast<float>(outer))", "block-kernels", "an intermediate rounded to float32"),
    (_SIMD_BLOCKS, "const int down = 8 * byte - bits * first;", "const int down = 0;", "block-kernels", "packed across: the high bits lost"),
    (_SIMD_BLOCKS, "kept[j] = finite ? -1 : 0;", "kept[j] = -1;", "block-kernels", "poisoned columns keep their codes"),
    ("ffi/cpu/blocks.cpp", "outer_count ? blocks / outer_count : 1", "1", "block-vmap", "outer scales of the wrong blocks"),
    # Threads, handlers, the table of kernels.
    (_PARALLEL, "std::min(items, (i + 1) * chunk)", "std::min(items, (i + 1) * chunk - (i == 1))", "threads", "a chunk loses its last item"),
    (_ENVIRONMENT, "_mm_setcsr(0x1F80);", "_mm_setcsr(saved_);", "quantize", "subnormals flushed"),
    (_ENVIRONMENT, "_mm_setcsr(0x1F80);", "_mm_setcsr(saved_ & 0x7FBFu);", "environment", "the caller's rounding mode used"),
    (_ENVIRONMENT, "~FloatEnvironment() { _mm_setcsr(saved_); }", "~FloatEnvironment() { (void)saved_; }", "environment", "the caller's environment not restored"),
    ("ffi/cpu/quantize.cpp", "from + begin * kBlock * 4", "from + begin * kBlock * 2", "threads", "later chunks read the wrong blocks"),
    ("ffi/cpu/quantized_dot.cpp", "part.out += row * rows.out + column * columns.out;", "part.out += row * rows.out;", "threads", "column blocks write over each other"),
    ("ffi/cpu/quantized_dot.cpp", "part.x += at * axes.axis[i].x;", "", "vmap", "batches share the first activations"),
    ("ffi/cpu/dispatch.cpp", "jaxquant::current().store(candidate, std::memory_order_relaxed);", "", "isa", "forcing an instruction set does nothing"),
    # The fallback.
    (_FLOAT32, "(guard > np.uint32(0x80)) |", "(guard >= np.uint32(0x80)) |", "float32", "ties away from zero"),
    (_FLOAT32, "return (x >> count) | _u32(lost != _ZERO)", "return x >> count", "float32", "no sticky bit"),
    (_FLOAT32, "jnp.where(unlike & (total == _ZERO), _ZERO, SIGN)", "SIGN", "float32", "x - x is -0"),
    (_FLOAT32, "(np.uint32(113) - up)", "(np.uint32(112) - up)", "float32", "float16 subnormals halved"),
    (_FLOAT32, "significand = quotient | _u32(remainder != _ZERO)", "significand = quotient", "float32", "a quotient without its remainder"),
    (_FLOAT32, "value = jnp.clip(value, -128, 127)", "value = jnp.clip(value, -127, 127)", "float32", "int8 without -128"),
    (_FLOAT32, "_pack(sign, np.int32(31) - leading, significand)", "_pack(sign, np.int32(30) - leading, significand)", "float32", "integers halved"),
    (_FLOAT32, "(zero & infinite), NAN, result)", "(zero & ~zero), NAN, result)", "float32", "0 * infinity is no NaN"),
    (_FALLBACK, "jnp.full(shape, _SIGN)", "jnp.zeros(shape, jnp.uint32)", "dot", "an initial +0 joins the fold"),
    (_FALLBACK, "jnp.repeat(sc, 32, axis=-1)", "jnp.roll(jnp.repeat(sc, 32, axis=-1), 1, axis=-1)", "dot", "scales shifted by an element"),
    (_FALLBACK, "q = jnp.where(zero | poison, np.int32(0), q)", "q = jnp.where(zero, np.int32(0), q)", "quantize", "poison keeps its codes"),
    (_FALLBACK, "_MINUS_127 = np.uint32(0xC2FE0000)", "_MINUS_127 = np.uint32(0xC3000000)", "quantize", "inverse of 128"),
    # Records.
    (_RECORDS, "[low & 63, (top & 15)", "[low & 31, (top & 15)", "records", "sc of 5 bits"),
    (_RECORDS, "(top >> 4) | (high >> 6 << 4)", "(top >> 4) | (low >> 6 << 4)", "records", "high bits of m from sc"),
    (_RECORDS, "xp.stack([packed & 15, packed >> 4], axis=-2)", "xp.stack([packed >> 4, packed & 15], axis=-2)", "records", "nibbles swapped"),
    (_RECORDS, "high = m[..., :4] | (m[..., 4:] >> 4 << 6)", "high = m[..., :4] | (m[..., 4:] >> 5 << 6)", "records", "a high bit of m lost in packing"),
    (_RECORDS, "bad = np.flatnonzero((fields.bsum != sums).any(axis=-1))", "bad = np.flatnonzero((fields.bsum != sums)[..., :15].any(axis=-1))", "records", "the last bsum not checked"),
    (_RECORDS, "bad = np.flatnonzero(~np.isfinite(values))", "bad = np.flatnonzero(np.isnan(values))", "records", "infinite scales accepted"),
    (_RECORDS, "return Statistics(S, T, p, n, b.ds * (p - n))", "return Statistics(S, T, p, n, b.ds * p - b.ds * n)", "records", "ds applied first"),
    (_RECORDS, "S = (sc * (wq * xq)", "S = (m * (wq * xq)", "records", "S with the minimums"),
    # What operations refuse.
    (_OPERANDS, '"; map further axes with jax.vmap" if value.ndim > 2', '"; map further axes with jax.vmap" if value.ndim > 3', "dot-refusals", "no hint at vmap"),
    (_OPERANDS, "if value is not wanted:", "if value is None:", "dot-refusals", "formats in the wrong place accepted"),
    (_DOT, "if acc_dtype is None or dtype != np.float32:", "if acc_dtype is None or dtype.kind != 'f':", "dot-refusals", "any float accumulates"),
    (_DOT, "return operand, (*shifted[:axis], 0, *shifted[axis:])", "return operand, (0, *shifted)", "vmap", "every mapped axis taken for the first"),
    (_QUANTIZE, "records[..., 2] == np.uint8(0xC0)", "records[..., 2] == np.uint8(0xC1)", "checkify", "poison not reported"),
    # Casts.
    (_CASTS, "((lost == _HALF) & ((kept & _ONE) == _ONE))", "((lost == _HALF) & ((kept & _ONE) == _ZERO))", "casts", "ties to odd"),
    (_CASTS, "return lost >= _HALF", "return lost > _HALF", "casts", "nearest_away drops ties"),
    (_CASTS, "return random < lost", "return random <= lost", "stochastic", "exact values move"),
    (_CASTS, "return inexact & ~negative", "return inexact", "casts", "up rounds away"),
    (_CASTS, "largest, overflowed, nan = ones, None, 0", "largest, overflowed, nan = ones, None, ones", "casts", "NaN is the largest number"),
    (_CASTS, "tie = (kept == np.uint32(254))", "tie = (kept == np.uint32(253))", "casts", "the last tie of E8M0"),
    (_CASTS, "(negative & (magnitude != _ZERO))", "negative", "casts", "-0 has no E8M0 code"),
    (_CASTS, "bottom = np.uint32(1 << (fmt.bits - 1) if fmt.signed else 0)", "bottom = np.uint32((1 << (fmt.bits - 1)) - 1 if fmt.signed else 0)", "casts", "the least integer is unreachable"),
    (_CASTS, "- np.uint32(25))", "- np.uint32(24))", "casts", "float16 doubled"),
    (_CASTS, "np.uint32(10), np.uint32(9))", "np.uint32(9), np.uint32(9))", "casts", "float32 subnormals of E8M0"),
    (_CASTS, 'facts.overflow_policy == "saturate",', 'facts.overflow_policy == "overflow",', "casts", "the default policies swapped"),
    (_CASTS, "np.uint32(254 if saturate else 255)", "np.uint32(254)", "casts", "E8M0 never overflows"),
    (_CASTS, "bits = xp.where(code == np.uint32(255), NAN, bits)", "bits = xp.where(code == np.uint32(254), NAN, bits)", "decode", "the wrong E8M0 code is NaN"),
    (_CASTS, "sign = ((code >> np.uint32(fmt.bits - 1)) & _ONE) << np.uint32(31)", "sign = xp.where(magnitude == _ZERO, _ZERO, ((code >> np.uint32(fmt.bits - 1)) & _ONE) << np.uint32(31))", "decode", "the sign of zero lost"),
    # Narrow arrays.
    (_STREAM, "codes = codes & np.uint8((1 << width) - 1)", "codes = codes | np.uint8(0)", "narrow", "stray upper bits packed"),
    (_STREAM, "made.append(code & np.uint8((1 << width) - 1))", "made.append(code)", "narrow", "neighbours' bits unpacked"),
    (_STREAM, "made[byte + 1] = piece >> np.uint8(8 - start)", "made[byte + 1] = piece >> np.uint8(9 - start)", "narrow", "a bit lost across bytes"),
    (_NARROW, "xp.minimum(xp.maximum(wide, low), high)", "xp.maximum(wide, low)", "narrow-values", "integers wrap above"),
    (_NARROW, "if shape[axis] % values:", "if shape[axis] % values > 99:", "narrow-values", "a partial byte accepted"),
    (_NARROW, "return values[(Ellipsis, along,", "return values[(Ellipsis, slice(None),", "narrow-values", "an index is ignored"),
    # Swizzles.
    (_SWIZZLED, '(k0 k1) -> ... m0 k0 m1 m2 k1"),', '(k0 k1) -> ... m0 k0 m2 m1 k1"),', "swizzle", "rows of a tile in order"),
    (_SWIZZLED, 'MappingProxyType({"m1": 8, "k1": 4})', 'MappingProxyType({"m1": 4, "k1": 4})', "swizzle", "tiles of 4 rows"),
    (_SWIZZLED, "if _float_bits(x.dtype) >= 8:", "if _float_bits(x.dtype) >= 16:", "swizzle", "narrow floats moved as floats"),
    (_SWIZZLED, 'return cast("Array", dense[logical])', 'return cast("Array", dense)', "swizzle", "padding shows"),
    (_SWIZZLED, "sizes[unknown] = -(-extent // tile)", "sizes[unknown] = extent // tile + 1", "swizzle", "a tile too many"),
    (_SWIZZLED, "if extent != padded and not pad:", "if extent != padded and pad is None:", "swizzle", "pad=False pads"),
    # Quantization to blocks.
    (_BLOCK_OPS, "np.int32(127 - exponent_of_max), np.int32(0)", "np.int32(128 - exponent_of_max), np.int32(0)", "blocks", "scales doubled"),
    (_BLOCK_OPS, '"ceil": 1,', '"ceil": 2,', "blocks", "ceil misses the least fraction"),
    (_BLOCK_OPS, '"rceil": fraction_of_max + 1,', '"rceil": fraction_of_max,', "blocks", "rceil rounds the maximum itself up"),
    (_BLOCK_OPS, "(1 << (22 - significand_bits))", "(1 << (23 - significand_bits))", "blocks", "even rounds up too early"),
    (_BLOCK_OPS, "exponent_of_max), np.int32(0), np.int32(254))", "exponent_of_max), np.int32(0), np.int32(255))", "blocks-exact", "an E8M0 scale of 255"),
    (_BLOCK_OPS, "return codes, xp.where(poisoned, np.int32(255), byte)", "return codes, xp.where(poisoned, np.int32(254), byte)", "blocks", "poison is a number"),
    (_BLOCK_OPS, "codes = xp.where(codes == np.uint8(0x80), np.uint8(0x81), codes)", "codes = codes | np.uint8(0)", "blocks-exact", "MXINT8 encodes -128"),
    (_BLOCK_OPS, "np.int32(127 + 6 if", "np.int32(127 + 7 if", "blocks", "MXINT8 counts in 2**-7"),
    (_BLOCK_OPS, "largest = np.float32(2688)", "largest = np.float32(2687)", "blocks", "the tensor scale of NVFP4"),
    (_BLOCK_OPS, "xp.maximum(quotient, np.uint32(1))", "xp.maximum(quotient, np.uint32(0))", "blocks-exact", "a tensor scale of zero"),
    (_BLOCK_OPS, "unit, np.bool_(i % 2 == 1))", "unit, np.bool_(i % 2 == 0))", "blocks", "NVFP4 ties to odd"),
    (_BLOCK_OPS, "odd_below = np.arange(126) % 2 == 1", "odd_below = np.arange(126) % 2 == 0", "blocks-exact", "NVFP4 scales tie to odd"),
    (_BLOCK_OPS, "poisoned | (scales == np.uint8(0))", "poisoned | (scales == np.uint8(0xFF))", "blocks", "codes under a scale of zero"),
    (_BLOCK_OPS, "magnitude == float32.INFINITY, _LARGEST", "magnitude >= float32.INFINITY, _LARGEST", "blocks", "saturate hides NaN"),
    (_BLOCK_OPS, "xp.where(poisoned, np.uint8(0x7F), scales)", "xp.where(poisoned, np.uint8(0x7E), scales)", "blocks", "NVFP4 poison is a number"),
    (_BLOCKS, "    return cotangent, None", "    return cotangent * 0, None", "blocks", "no straight-through gradient"),
    # Decoding and moving blocks.
    (_FLOAT32, "exponent + byte - np.int32(127)", "exponent + byte - np.int32(126)", "decoding", "E8M0 scales doubled"),
    (_FLOAT32, "is_nan(bits) | (byte == np.int32(255))", "is_nan(bits)", "decoding", "the NaN scale is a number"),
    (_FLOAT32, "np.uint32(0x7FFF) +", "np.uint32(0x8000) +", "decoding", "bfloat16 ties"),
    (_FLOAT32, "np.int32(-14) - exponent", "np.int32(-15) - exponent", "decoding", "float16 subnormals"),
    (_BLOCK_OPS, "bits - np.uint32(6 << 23)", "bits - np.uint32(7 << 23)", "decoding", "MXINT8 counts in 2**-7"),
    (_SCALED, "if extent != 1 and (scaled % extent if extent else scaled):", "if extent > scaled:", "arrays-refusals", "remainder blocks accepted"),
    (_SCALED, "fits = extent == 1 if", "fits = True if", "arrays-refusals", "Whole accepted with many scales"),
    (_SCALED, "__array_ufunc__ = None", "_array_ufunc = None", "block_dot", "NumPy operators decode silently"),
    (_SCALED, "tuple(_transposed(_dense(level), order) for level in self.levels)", "tuple(_dense(level) for level in self.levels)", "arrays", "scales stay where the elements move"),
    (_SCALED, "elif start % block or stop % block:", "elif start % block:", "arrays", "a slice ends within a block"),
    (_BLOCK_DOT, "and b.block_size == (16 if nvfp4 else 32, 1)", "and b.block_size == (32, 1)", "block_dot", "NVFP4 never meets its hardware"),
    (_BLOCK_DOT, "int(version[0]) >= 10", "int(version[0]) >= 9", "block_dot", "hardware without block scales chosen"),
    # Files.
    (_GGUF, "if before.offset + before.nbytes > after.offset:", "if before.offset > after.offset:", "gguf", "overlapping tensors accepted"),
    (_GGUF, "if offset % alignment:", "if offset % 2:", "gguf", "unaligned tensors accepted"),
    (_GGUF, "if count > room:", "if count > room + (1 << 40):", "gguf", "counts beyond the file believed"),
    (_GGUF, "if info.name in relative:", "if info.name is None:", "gguf", "duplicate names accepted"),
]]
# fmt: on
