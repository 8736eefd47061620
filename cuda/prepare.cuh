#pragma once

// What the heads of a run of tiles share, worked out once by one warp while others work on the tiles before.

#include "cuda/triangle.cuh"

namespace replayssm::cuda {

/// Normalises q and k, forms the decays and the products of the token's vectors with the records' w, and appends the
/// token's w and gates to the ring.
///
/// Vectors left in the brief: Mamba-2 C, B; Gated DeltaNet q, k and, where the state is split, k as the ring will hold
/// it, all normalised. KDA the same times e^G, then q, e^G, k and the token's log decay as they are.
template <class TileType>
class Prepare : public Triangle<TileType> {
  using T = TileType;
  using T::at_, T::brief_, T::flush_, T::geometry_, T::group, T::heads, T::records, T::head_, T::held_, T::lane_,
      T::step_;
  using typename T::RawGates;
  static constexpr int N = T::N, kVectors = T::kVectors, kEach = N / 32;
  static constexpr bool kDelta = T::kDelta, kColumns = T::kColumns, kSplit = T::Split;
  /// Records whose products are summed over the lanes at once.
  static constexpr int kAtOnce = 4;

 public:
  __device__ explicit Prepare(const T& tile) : Triangle<TileType>(tile) {}

  /// Prepares every kPreparers-th run, from number `first` on, until there are no more.
  __device__ void run(int first) {
    std::uint32_t brief = first == 0 ? 0 : this->after(0, geometry_.briefs);  // twice the number, and the phase
    static_assert(kPreparers == 2);
    for (;;) {
      this->forget();
      const auto number = static_cast<int>(brief / 2);
      barrier_wait(this->told(number), brief & 1);
      const Assignment& run = this->of_brief(number);
      if (run.held < 0) return;
      this->assign(run);
      this->in_brief(number);
      barrier_wait(this->raw(number), brief & 1);
      if constexpr (kColumns) {
        current_vectors();
        columns();
      } else {
        scalars();
        this->launder();
        current_vectors();
        if (needs_products()) multiply_records();
        this->launder();
        weigh_records();
        if (flush_ && this->matrices()) {
          this->launder();
          this->order_records();
          if constexpr (kDelta && kSplit) {
            this->launder();
            this->make_triangles();
          }
        }
      }
      __syncwarp();
      arrive(this->ready(number));
      brief = this->after(this->after(brief, geometry_.briefs), geometry_.briefs);
    }
  }

 private:
  // ---- the token's vectors ------------------------------------------------------------------------------------------

  __device__ float* gram() const { return this->template in_brief<float>(geometry_.gram); }
  __device__ void put(int m, const float (&x)[kEach]) const {
    store_run(Scalar::fp32, this->vector(m), lane_ * kEach, x);
  }
  /// Vector m in the parts that states are multiplied with. Of fp16, which has few exponents, after division by a power
  /// of two that brings the largest element to 2^14: elements down to 2^-16 of it keep 22 bits, and of others no more
  /// than 2^-39 of the largest finite one is lost.
  __device__ void put_parts(int m, const float (&x)[kEach]) const {
    constexpr Storage S = T::Read;
    float factor = 1, inverse = 1;
    if constexpr (kParts<S> == 2) {
      std::uint32_t largest = 0;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (isfinite(x[e])) largest = max(largest, __float_as_uint(fabsf(x[e])));
      }
      largest = __reduce_max_sync(~0u, largest);
      if (largest > 0) {
        const int exponent = min(max(static_cast<int>(largest >> 23) - 127 - 14, -120), 120);
        factor = __uint_as_float(static_cast<std::uint32_t>(127 + exponent) << 23);
        inverse = __uint_as_float(static_cast<std::uint32_t>(127 - exponent) << 23);
      }
      if (lane_ == 0) this->part_factors()[m] = factor;
    }
    float rest[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) rest[e] = x[e] * inverse;
#pragma unroll
    for (int i = 0; i < kParts<S>; ++i) {
      constexpr Scalar type = S == Storage::bf16 ? Scalar::bf16 : Scalar::fp16;
      std::uint16_t bits[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float part = round_to(type, rest[e]);
        store(type, bits, e, part);
        rest[e] = isfinite(part) ? rest[e] - part : 0.0f;
      }
      auto* to = reinterpret_cast<std::uint16_t*>(this->parts(m * kParts<S> + i)) + lane_ * kEach;
      if constexpr (kEach % 2 == 0) {
#pragma unroll
        for (int e = 0; e < kEach; e += 2) {
          reinterpret_cast<std::uint32_t*>(to)[e / 2] = bits[e] | std::uint32_t{bits[e + 1]} << 16;
        }
      } else {
#pragma unroll
        for (int e = 0; e < kEach; ++e) to[e] = bits[e];
      }
    }
  }
  __device__ float* gate_ring(const RingField& field, int head, int width) const {
    return reinterpret_cast<float*>(at_.records(field, head, width)) + held_ * width;
  }

  /// c and w in fp32, normalised in the delta rule, a run of N / 32 elements a lane; appends w.
  __device__ void current_vectors() {
    const std::byte* raw = this->template in_brief<std::byte>(geometry_.raw);
    const Scalar type = this->c_input().type;
    load_run(type, raw, lane_ * kEach, vector_[0]);
    load_run(this->w_input().type, raw + N * bytes(type), lane_ * kEach, vector_[1]);
    if constexpr (kDelta) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < kEach; ++e) sum = fmaf(vector_[m][e], vector_[m][e], sum);
        const float norm = sqrtf(lane_sum<32>(sum) + 1e-6f),
                    factor = m == 0 ? __frsqrt_rn(static_cast<float>(N)) : 1.0f;
        // 1e-3 to 2^64, or infinite where the sum is, or NaN.
        const Divider by_norm(norm);
        const auto quotient = [&](float x) { return by_norm.quick ? by_norm.quick_quotient(x) : x * by_norm.r; };
#pragma unroll
        for (int e = 0; e < kEach; ++e) vector_[m][e] = quotient(vector_[m][e]) * factor;
        norm_[m] = quotient(factor);
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) vector_[2][e] = round_to(step_.ring.w.type, vector_[1][e]);
    }
    if constexpr (!kColumns) {
      if (kParts<T::Read> == 0 || flush_) {
#pragma unroll
        for (int m = 0; m < (kDelta ? kVectors : 2); ++m) put(m, vector_[m]);
      } else {
#pragma unroll
        for (int m = 0; m < kVectors; ++m) put_parts(m, vector_[m]);
      }
    }
    // The first run of the group appends it.
    if (!flush_ && this->p0_ == 0 && group() * geometry_.by_group.d == head_) {
      store_run(step_.ring.w.type, at_.records(step_.ring.w, group(), N), held_ * N + lane_ * kEach, vector_[1]);
    }
  }

  /// The lane's part of a record's w, the token's own at place `held`; 0 behind it.
  __device__ void record_w(int j, float (&w)[kEach]) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) w[e] = j == held_ ? vector_[1][e] : 0.0f;
    if (j < held_) load_run(step_.ring.w.type, this->ring_w(j), lane_ * kEach, w);
  }

  // ---- one decay a head ---------------------------------------------------------------------------------------------

  /// The gates of head h, by lane h.
  __device__ void scalars() const {
    float gain = 0, log_decay = 0, rate = 0;
    if (lane_ < heads()) {
      const int head = head_ + lane_;
      const RawGates& raw = this->raw_gates(lane_);
      rate = -expf(raw.A_log);
      float* gates = this->gates(lane_);
      if constexpr (kDelta) {
        gain = step_.beta_scale * sigmoid(from_bits(step_.beta.type, raw.gain));
        log_decay = rate * softplus(from_bits(step_.gate.type, raw.gate) + raw.bias);
        gates[2] = 0;
      } else {
        gain = softplus(from_bits(step_.dt.type, raw.gate) + raw.bias);
        if (gain < step_.dt_min) gain = step_.dt_min;
        if (gain > step_.dt_max) gain = step_.dt_max;
        log_decay = rate * gain;
        gates[2] = raw.skip;
      }
      gates[1] = gain;
      // The run with a head's first row appends what is the head's.
      if (!flush_ && this->p0_ == 0) {
        if constexpr (kDelta) *gate_ring(step_.ring.log_decay, head, 1) = log_decay;
        if constexpr (!kDelta || kSplit) *gate_ring(step_.ring.gain, head, 1) = gain;
      }
    }
    if (lane_ < heads()) sum_decays(rate, log_decay);
    __syncwarp();
  }

  /// A flush uses those with the token's key in the delta rule, none in Mamba-2.
  __device__ bool needs_products() const { return !flush_ || (kDelta && held_ > 0); }
  /// The products of the records' w with the vectors, the token's own w as the last record.
  __device__ void multiply_records() const {
    // Norms are taken out of sums, but for those of vectors so long that the sums would overflow.
    const bool moderate = !kDelta || norm_[0] * norm_[1] >= 0x1p-100f;
    if (step_.ring.w.type == Scalar::bf16 && this->c_input().type == Scalar::bf16 &&
        this->w_input().type == Scalar::bf16 && moderate) {
      matrix_products();
    } else {
      products();
    }
    __syncwarp();
  }

  /// The same where all is in bf16, as matrix products of 16 records and 8 columns: c and w as they came, and the
  /// token's w as the ring will hold it.
  __device__ void matrix_products() const {
    const int g = lane_ / 4, t = lane_ % 4;
    const auto* ring = this->template in_brief<std::byte>(geometry_.ring_w) + t * 16;
    constexpr int kPitch = 2 * N + kRowGap;
    const auto* raw = this->template in_brief<std::byte>(geometry_.raw) + t * 16;
    const auto* stored = reinterpret_cast<const std::byte*>(gram() + kVectors * geometry_.slots);
    if constexpr (kVectors == 3) {
      store_run(Scalar::bf16, const_cast<std::byte*>(stored), lane_ * kEach, vector_[2]);
      __syncwarp();
    }
    const std::byte* column = g < 2 ? raw + g * 2 * N : g < kVectors ? stored + t * 16 : nullptr;
    for (int base = 0; base <= held_; base += 16) {
      const auto row = [&](int j) { return j < held_ ? ring + j * kPitch : j == held_ ? raw + 2 * N : nullptr; };
      const std::byte *near = row(base + g), *far = row(base + g + 8);
      float d[4] = {};
#pragma unroll
      for (int q = 0; q < N / 32; ++q) {
        const auto part = [&](const std::byte* from) { return from ? load_words<16>(from + q * 64) : Words<16>{}; };
        const Words<16> a = part(near), b = part(far), c = part(column);
        multiply_add(d[0], d[1], d[2], d[3], make_uint4(a.w[0], b.w[0], a.w[1], b.w[1]), c.w[0], c.w[1]);
        multiply_add(d[0], d[1], d[2], d[3], make_uint4(a.w[2], b.w[2], a.w[3], b.w[3]), c.w[2], c.w[3]);
      }
      // Lane t has columns 2 t and 2 t + 1 of records g and g + 8.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = 2 * t + i % 2, j = base + g + i / 2 * 8;
        if (m >= kVectors || j > held_) continue;
        float x = d[i];
        if constexpr (kDelta) x *= (m == 0 ? norm_[0] : m == 1 ? norm_[1] : 1.0f) * (j == held_ ? norm_[1] : 1.0f);
        gram()[m * geometry_.slots + j] = x;
      }
    }
    __syncwarp();
  }

  /// The products of the records' w with the vectors, the token's own w as the last record.
  __device__ void products() const {
    for (int base = 0; base <= held_; base += kAtOnce) {
      float sum[kVectors][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float w[kEach];
        record_w(base + i, w);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) {
          sum[m][i] = 0;
#pragma unroll
          for (int e = 0; e < kEach; ++e) sum[m][i] = fmaf(w[e], vector_[m][e], sum[m][i]);
        }
      }
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        const float total = lane_sums<32>(sum[m], lane_);
        const int j = base + lane_ / (32 / kAtOnce);
        if (lane_ % (32 / kAtOnce) == 0 && j <= held_) gram()[m * geometry_.slots + j] = total;
      }
    }
    __syncwarp();
  }

  /// By the lane of a head: e^G, and in the place of each record's decay its logarithm so far. Suffix sums, newest
  /// first; differences of prefix sums would cancel.
  __device__ void sum_decays(float rate, float current) const {
    const float* ring = this->template in_brief<float>(kDelta ? geometry_.ring_log : geometry_.ring_gain);
    float* out = this->gates(lane_);
    float sum = 0;
    out[4 + held_] = sum;
    sum += current;
#pragma unroll 4
    for (int j = held_ - 1; j >= 0; --j) {
      out[4 + j] = sum;
      const float record = ring[lane_ * records() + j];
      sum += kDelta ? record : rate * record;
    }
    out[0] = expf(sum);
  }

  /// The decays of all heads' records, and what that makes of the products; a lane a record.
  __device__ void weigh_records() const {
    const int slots = geometry_.slots;
    for (int base = 0; base <= held_; base += 16) {
#pragma unroll 2
      for (int i = lane_; i < 16 * heads(); i += 32) {
        const int h = i / 16, j = base + i % 16;
        if (j > held_) continue;
        float* out = this->gates(h);
        float a = expf(out[4 + j]);
        if constexpr (!kDelta) {
          a *= j == held_ ? out[1] : this->template in_brief<float>(geometry_.ring_gain)[h * records() + j];
        }
        out[4 + j] = a;
        if (needs_products()) {
#pragma unroll
          for (int m = 0; m < kVectors; ++m) out[4 + (1 + m) * slots + j] = a * gram()[m * slots + j];
        }
      }
    }
  }

  // ---- one decay a channel ------------------------------------------------------------------------------------------

  /// Takes the records newest first, with the suffix sum of each of the lane's channels.
  __device__ void columns() const {
    const RawGates& raw = this->raw_gates(0);
    const float rate = -expf(raw.A_log);
    const float gain = step_.beta_scale * sigmoid(from_bits(step_.beta.type, raw.gain));
    float log_decay[kEach], sum[kEach] = {};
    load_run(step_.gate.type, brief_ + geometry_.raw_decays, lane_ * kEach, log_decay);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      log_decay[e] = rate * softplus(log_decay[e] + step_.dt_bias[head_ * N + lane_ * kEach + e]);
    }
    float* out = this->gates(0);
    for (int base = held_; base >= 0; base -= kAtOnce) {
      float dot[kVectors][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = base - i;
        float w[kEach], g[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) g[e] = j == held_ ? log_decay[e] : 0.0f;
        if (j >= 0) record_w(j, w);
        if (j >= 0 && j < held_) {
          load_run(Scalar::fp32, this->template in_brief<float>(geometry_.ring_log), j * N + lane_ * kEach, g);
        }
#pragma unroll
        for (int m = 0; m < kVectors; ++m) dot[m][i] = 0;
        if (j < 0) continue;
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float decayed = expf(sum[e]) * w[e];
          sum[e] += g[e];
#pragma unroll
          for (int m = 0; m < kVectors; ++m) dot[m][i] = fmaf(decayed, vector_[m][e], dot[m][i]);
        }
      }
      const int j = base - lane_ / (32 / kAtOnce);
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        const float total = lane_sums<32>(dot[m], lane_);
        if (lane_ % (32 / kAtOnce) == 0 && j >= 0) out[4 + (1 + m) * geometry_.slots + j] = total;
      }
      if (lane_ % (32 / kAtOnce) == 0 && j >= 0) out[4 + j] = 1.0f;
    }
    float total[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) total[e] = expf(sum[e]);
#pragma unroll
    for (int m = 0; m < kVectors; ++m) {
      float decayed[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) decayed[e] = total[e] * vector_[m][e];
      if (kParts<T::Read> == 0 || flush_) {
        put(m, decayed);
      } else {
        put_parts(m, decayed);
      }
    }
    put(kVectors, vector_[0]);
    put(kVectors + 1, total);
    put(kVectors + 2, vector_[1]);
    put(kVectors + 3, log_decay);
    if (lane_ == 0) out[0] = 1.0f, out[1] = gain, out[2] = 0;
    if (!flush_ && this->p0_ == 0) {
      float* to = gate_ring(step_.ring.log_decay, head_, N);
#pragma unroll
      for (int e = 0; e < kEach; ++e) to[lane_ * kEach + e] = log_decay[e];
      if (kSplit && lane_ == 0) *gate_ring(step_.ring.gain, head_, 1) = gain;
    }
  }

  float norm_[2];           // what normalisation multiplies q and k with
  float vector_[3][kEach];  // c, w, w as the ring will hold it
};

}  // namespace replayssm::cuda
