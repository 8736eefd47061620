// Stored rows against core's encode_rows() and decode_rows(), bit for bit.

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/cuda/layer.h"

namespace replayssm::cuda::tests {
namespace {

constexpr Storage kStorages[] = {Storage::fp32, Storage::fp16, Storage::bf16, Storage::e4m3_row, Storage::int8_row};

float Float(std::uint32_t bits) { return std::bit_cast<float>(bits); }

/// Rows of n: every magnitude, signs, ties, specials.
std::vector<float> Rows(std::size_t n) {
  std::mt19937 random(4);
  std::vector<float> x;
  const auto row = [&](auto&& value) {
    for (std::size_t i = 0; i < n; ++i) x.push_back(value(i));
  };
  const auto normal = [&] { return std::normal_distribution<float>()(random); };
  for (int e = -149; e <= 127; ++e) row([&](std::size_t) { return std::ldexp(normal() / 4, e); });
  for (int i = 0; i < 200; ++i) row([&](std::size_t) { return Float(static_cast<std::uint32_t>(random())); });
  // Codes of fp16 and bf16, their midpoints and the neighbours of these.
  for (const int cut : {13, 16}) {
    for (int i = 0; i < 60; ++i) {
      row([&](std::size_t k) {
        const auto code = static_cast<std::uint32_t>(random()) >> cut << cut;
        return Float(code + (1u << (cut - 1)) * static_cast<std::uint32_t>(k % 3) + static_cast<std::uint32_t>(k % 5) -
                     2);
      });
    }
  }
  // Ties of the codes of a row: quotients k / 16 where the scale is a power of two.
  for (const float largest : {127.0F, 448.0F}) {
    for (int e = -130; e < 100; e += 23) {
      row([&](std::size_t i) {
        return std::ldexp(i == 0 ? largest : static_cast<float>(static_cast<int>(random() % 4000) - 2000) / 16, e);
      });
    }
  }
  const float specials[] = {Float(0x7FC00000),
                            Float(0xFFC12345),
                            Float(0x7F800001),
                            Float(0x7FFF8C22),
                            INFINITY,
                            -INFINITY,
                            0.0F,
                            -0.0F,
                            Float(1),
                            Float(0x807FFFFF),
                            3.4028235e38F,
                            -1e-40F};
  for (const float special : specials) {
    row([&](std::size_t i) { return i == n / 2 ? special : normal(); });
    row([&](std::size_t) { return special; });
    row([&](std::size_t i) { return i == 1 ? special : 0.0F; });
    row([&](std::size_t i) { return i == 1 ? special : 1e38F; });
  }
  return x;
}

class Convert : public OnMachine {};
INSTANTIATE_TEST_SUITE_P(, Convert, testing::ValuesIn(machine_names()));

TEST_P(Convert, RowsAsCoreDoes) {
  for (const Storage storage : kStorages) {
    for (const std::int64_t n : {7, 64, 128}) {
      SCOPED_TRACE(name_of(storage));
      const Format format = format_of(storage);
      const std::vector<float> x = Rows(static_cast<std::size_t>(n));
      const auto rows = static_cast<std::int64_t>(x.size()) / n;
      std::vector<std::byte> codes(static_cast<std::size_t>(rows * format.code_bytes(n)));
      std::vector<float> scales(static_cast<std::size_t>(rows)), values(x.size());
      replayssm::encode_rows(format, x.data(), rows, n, codes.data(), scales.data());
      replayssm::decode_rows(format, codes.data(), scales.data(), rows, n, values.data());

      Array<float> data(on()), there(on());
      Array<std::uint8_t> out(on());
      data.write(x);
      out.write(std::vector<std::uint8_t>(codes.size(), 0xA5));
      there.write(std::vector<float>(scales.size(), 0));
      on().encode_rows(storage, data.there(), rows, n, out.there(), there.there());
      int wrong = 0;
      out.read();
      for (std::size_t i = 0; i < codes.size(); ++i) wrong += out.here[i] != std::to_integer<std::uint8_t>(codes[i]);
      EXPECT_EQ(wrong, 0) << "bytes of codes, of " << codes.size();
      if (format.scale == Scale::row) {
        wrong = 0;
        there.read();
        for (std::size_t i = 0; i < scales.size(); ++i) {
          wrong += std::memcmp(&there.here[i], &scales[i], sizeof(float)) != 0;
        }
        EXPECT_EQ(wrong, 0) << "scales, of " << scales.size();
      }
      on().decode_rows(storage, out.there(), there.there(), rows, n, data.there());
      data.read();
      wrong = 0;
      for (std::size_t i = 0; i < values.size(); ++i) {  // a product with a NaN may have any payload
        wrong += std::memcmp(&data.here[i], &values[i], sizeof(float)) != 0 &&
                 !(std::isnan(data.here[i]) && std::isnan(values[i]) && format.scale == Scale::row);
      }
      EXPECT_EQ(wrong, 0) << "values, of " << values.size();
    }
  }
}

TEST_P(Convert, EveryCodeOfTwoBytesThereAndBack) {
  for (const Storage storage : {Storage::fp16, Storage::bf16}) {
    std::vector<std::uint8_t> codes;
    for (int code = 0; code < 65536; ++code) {
      codes.push_back(static_cast<std::uint8_t>(code));
      codes.push_back(static_cast<std::uint8_t>(code >> 8));
    }
    Array<std::uint8_t> there(on()), back(on());
    Array<float> values(on());
    there.write(codes);
    back.write(std::vector<std::uint8_t>(codes.size(), 0));
    values.write(std::vector<float>(65536, 0));
    on().decode_rows(storage, there.there(), nullptr, 256, 256, values.there());
    on().encode_rows(storage, values.there(), 256, 256, back.there(), nullptr);
    EXPECT_EQ(back.read(), codes) << name_of(storage);
  }
}

}  // namespace
}  // namespace replayssm::cuda::tests
