#include <bit>
#include <cstring>

#include "core/error.h"
#include "core/safetensors.h"

namespace replayssm {
namespace {

template <class Stored, class Real, class Value>
void convert(const std::byte* data, std::size_t count, Real* __restrict out, Value value) {
  for (std::size_t i = 0; i < count; ++i) {
    Stored stored;
    std::memcpy(&stored, data + i * sizeof stored, sizeof stored);  // the format promises no alignment
    out[i] = static_cast<Real>(value(stored));
  }
}

constexpr auto bf16_value = [](std::uint16_t code) { return std::bit_cast<float>(std::uint32_t{code} << 16); };

constexpr auto f16_value = [](std::uint16_t code) {
  const std::uint32_t sign = (code & 0x8000u) << 16;
  const std::uint32_t rest = (code & 0x7fffu) << 13;
  // With its fields moved in place, the number is 2^-112 times too small; the product is exact, subnormals too.
  const float finite = std::bit_cast<float>(rest) * 0x1p112f;
  const std::uint32_t special = rest | 0x7f800000u;  // infinity or NaN
  return std::bit_cast<float>(sign | (rest >= 0x7c00u << 13 ? special : std::bit_cast<std::uint32_t>(finite)));
};

}  // namespace

template <class Real>
void widen(const TensorView& tensor, std::size_t begin, std::size_t count, Real* out) {
  const auto elements = static_cast<std::size_t>(tensor.elements());
  if (begin > elements || count > elements - begin) {
    fail(tensor.file, ": tensor ", in_quotes(tensor.name), ": elements ", begin, " to ", begin, " + ", count,
         " asked for, but it is ", tensor.describe(), " with ", elements);
  }
  const auto as = [&]<class Stored>(Stored, auto value) {
    convert<Stored>(tensor.data + begin * sizeof(Stored), count, out, value);
  };
  const auto itself = [](auto stored) { return stored; };
  switch (tensor.dtype) {
    case Dtype::boolean:
      return as(std::uint8_t{}, [](std::uint8_t stored) { return stored != 0; });
    case Dtype::u8:
      return as(std::uint8_t{}, itself);
    case Dtype::i8:
      return as(std::int8_t{}, itself);
    case Dtype::u16:
      return as(std::uint16_t{}, itself);
    case Dtype::i16:
      return as(std::int16_t{}, itself);
    case Dtype::u32:
      return as(std::uint32_t{}, itself);
    case Dtype::i32:
      return as(std::int32_t{}, itself);
    case Dtype::u64:
      return as(std::uint64_t{}, itself);
    case Dtype::i64:
      return as(std::int64_t{}, itself);
    case Dtype::f16:
      return as(std::uint16_t{}, f16_value);
    case Dtype::bf16:
      return as(std::uint16_t{}, bf16_value);
    case Dtype::f32:
      return as(float{}, itself);
    case Dtype::f64:
      return as(double{}, itself);
    default:
      fail(tensor.file, ": tensor ", in_quotes(tensor.name), ": cannot turn dtype ", dtype_name(tensor.dtype),
           " into numbers; expected BF16, F16, F32, F64, BOOL or an integer type");
  }
}

template void widen(const TensorView&, std::size_t, std::size_t, float*);
template void widen(const TensorView&, std::size_t, std::size_t, double*);

}  // namespace replayssm
