#pragma once

// The first of the two fast kernels: what the heads of a group share, worked out once. It normalises q and k, forms the
// decays and the products of the token's vectors with the records' w, appends the token's w and gates to the ring, and
// leaves the rest in the workspace. decode_kernel() reads states meanwhile.

#include "cuda/places.cuh"

namespace replayssm::cuda {

/// Threads of a block: 16 for each head, so that their decays are worked out side by side.
constexpr int prepare_threads(int heads_in_group, bool column_decay, bool products) {
  return column_decay ? 64 : std::clamp(heads_in_group * 16 / 32 * 32, products ? 128 : 64, 128);
}

/// A block for each group (KDA: head) of each row, and one that orders the rows.
///
/// Vectors left behind: Mamba-2 C, B; Gated DeltaNet q, k and, where the state is split, k as the ring will hold it,
/// all normalised. KDA the same times e^G, then q, e^G and k as they are.
template <Recurrence recurrence, int N, bool Split>
class Prepare {
 public:
  static constexpr bool kDelta = is_delta_rule(recurrence), kColumns = has_column_decay(recurrence);
  using StepType = std::conditional_t<kDelta, DeltaStep, Mamba2Step>;
  static constexpr int kVectors = output_vectors(kDelta, Split), kEach = N / 32;

  __device__ Prepare(const Arguments<StepType>& arguments, std::byte* shared)
      : step_(arguments.step),
        at_{arguments.step, arguments.workspace, 0, 0},
        shared_(shared),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warps_(static_cast<int>(blockDim.x) / 32) {}

  __device__ void run() {
    let_dependents_start();
    const auto units = static_cast<unsigned>(kColumns ? step_.shape.heads : step_.shape.groups);
    unit_ = static_cast<int>(blockIdx.x % units);
    at_.row = blockIdx.x / units;
    if (at_.row == step_.rows) {
      order_rows();
      return;
    }
    const int slot = step_.slot[at_.row];
    held_ = held_of(step_, at_.row, slot);
    if (held_ < 0) return;
    at_.slot = slot;
    const auto in_group = static_cast<int>(step_.shape.heads / step_.shape.groups);
    group_ = kColumns ? unit_ / in_group : unit_;
    flush_ = held_ == step_.length - 1;
    ring_w_ = at_.records(step_.ring.w, group_, N);
    if constexpr (kColumns) {
      current_vectors();
      columns();
    } else {
      scalars(in_group);
    }
  }

 private:
  /// The last block: rows that flush first, because they take longest, then the others; and no tile handed out yet.
  __device__ void order_rows() const {
    int* order = at_.order();
    auto* counts = reinterpret_cast<int*>(shared_);  // of a warp: rows that flush
    auto front = 0, back = static_cast<int>(step_.rows) - 1;
    for (int base = 0; base < step_.rows; base += static_cast<int>(blockDim.x)) {
      const int row = base + static_cast<int>(threadIdx.x);
      const bool real = row < step_.rows;
      const bool flush = real && held_of(step_, row, step_.slot[row]) == step_.length - 1;
      const unsigned flushing = __ballot_sync(~0u, flush), others = __ballot_sync(~0u, real && !flush);
      if (lane_ == 0) counts[2 * warp_] = __popc(flushing), counts[2 * warp_ + 1] = __popc(others);
      __syncthreads();
      int before[2] = {}, all[2] = {};
      for (int w = 0; w < warps_; ++w) {
        for (int i = 0; i < 2; ++i) {
          if (w < warp_) before[i] += counts[2 * w + i];
          all[i] += counts[2 * w + i];
        }
      }
      const unsigned earlier = (1u << lane_) - 1;
      if (flush) order[front + before[0] + __popc(flushing & earlier)] = row;
      if (real && !flush) order[back - before[1] - __popc(others & earlier)] = row;
      front += all[0];
      back -= all[1];
      __syncthreads();
    }
    if (threadIdx.x == 0) *at_.counter() = 0;
  }

  static constexpr int kGram = 0;  // of shared memory, in floats: [vectors, slots], then what products() needs

  __device__ int slots() const { return at_.layout.slots; }
  __device__ float* shared() const { return reinterpret_cast<float*>(shared_); }

  /// c and w in fp32, normalised in the delta rule, a run of N / 32 elements a lane; appends w.
  __device__ void current_vectors() {
    const Activations* from[2];
    if constexpr (kDelta) {
      from[0] = &step_.q, from[1] = &step_.k;
    } else {
      from[0] = &step_.C, from[1] = &step_.B;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      load_run(from[m]->type, from[m]->data, at_.row * from[m]->stride + group_ * N + lane_ * kEach, vector_[m]);
    }
    if constexpr (kDelta) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum = fmaf(vector_[m][i], vector_[m][i], sum);
        const float norm = sqrtf(lane_sum<32>(sum) + 1e-6f),
                    factor = m == 0 ? __frsqrt_rn(static_cast<float>(N)) : 1.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) vector_[m][i] = __fdiv_rn(vector_[m][i], norm) * factor;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) vector_[2][i] = round_to(step_.ring.w.type, vector_[1][i]);
    }
    const auto in_group = static_cast<int>(step_.shape.heads / step_.shape.groups);
    if (warp_ == 1 && !flush_ && (!kColumns || unit_ % in_group == 0)) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) store(step_.ring.w.type, ring_w_, held_ * N + lane_ * kEach + i, vector_[1][i]);
    }
    if constexpr (!kColumns) {
      float* out = at_.vectors(group_, static_cast<int>(step_.shape.groups));
#pragma unroll
      for (int m = 0; m < (kDelta ? kVectors : 2); ++m) {
        if (m % 2 != warp_) continue;
#pragma unroll
        for (int i = 0; i < kEach; ++i) out[m * N + lane_ * kEach + i] = vector_[m][i];
      }
    }
  }

  // ---- one decay a head ---------------------------------------------------------------------------------------------

  __device__ void scalars(int in_group) {
    // What the ring holds of the first heads and records is on its way before anything is waited for.
    constexpr int kAtOnce = 4, kAhead = 2;
    const int h0 = static_cast<int>(threadIdx.x) / 16, heads_at_once = static_cast<int>(blockDim.x) / 16;
    float ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = record_gate(group_ * in_group + min(h0 + i * heads_at_once, in_group - 1), held_ - lane_ % 16);
    }
    float w[kAtOnce][kEach];
    load_records(warp_ * kAtOnce, w);
    for (int h = static_cast<int>(threadIdx.x); h < in_group; h += static_cast<int>(blockDim.x)) {
      current_gates(group_ * in_group + h, h);
    }
    current_vectors();
    float* gram = shared();
    for (int base = warp_ * kAtOnce; base <= held_; base += warps_ * kAtOnce) {
      if (base >= warps_ * kAtOnce) load_records(base, w);
      float sum[kVectors][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i == held_) {
#pragma unroll
          for (int e = 0; e < kEach; ++e) w[i][e] = vector_[1][e];
        }
#pragma unroll
        for (int m = 0; m < kVectors; ++m) {
          sum[m][i] = 0;
#pragma unroll
          for (int e = 0; e < kEach; ++e) sum[m][i] = fmaf(w[i][e], vector_[m][e], sum[m][i]);
        }
      }
#pragma unroll
      for (int m = 0; m < kVectors; ++m) {
        const float total = lane_sums<32>(sum[m], lane_);
        const int j = base + lane_ / (32 / kAtOnce);
        if (lane_ % (32 / kAtOnce) == 0 && j <= held_) gram[m * slots() + j] = total;
      }
    }
    __syncthreads();
    // The lanes of a warp go round together: its two heads, or one and a repetition that writes nothing.
    for (int i = 0; h0 / 2 * 2 + i * heads_at_once < in_group; ++i) {
      const int h = h0 + i * heads_at_once, mine = min(h, in_group - 1);
      float record = i == 0 ? ahead[0] : ahead[1];
      if (i >= kAhead) record = record_gate(group_ * in_group + mine, held_ - lane_ % 16);
      decays(group_ * in_group + mine, mine, record, h == mine);
    }
    if constexpr (kDelta && Split) {
      if (flush_) {
        __syncthreads();
        products(in_group);
      }
    }
  }
  /// The lane's part of live records base .. base + Count.
  template <int Count>
  __device__ void load_records(int base, float (&w)[Count][kEach]) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) w[i][e] = 0;
      if (base + i < held_) load_run(step_.ring.w.type, ring_w_, (base + i) * N + lane_ * kEach, w[i]);
    }
  }

  /// What the ring holds of a head's decay, dt or its logarithm, of a live record; 0 for others.
  __device__ float record_gate(int head, int j) const {
    if (j < 0 || j >= held_) return 0;
    return reinterpret_cast<const float*>(at_.records(kDelta ? step_.ring.log_decay : step_.ring.gain, head, 1))[j];
  }

  /// Of head h: rate -e^A_log, dt or beta, and the log decay of the token at hand.
  __device__ float* current(int h) const { return shared() + kVectors * slots() + 3 * h; }

  __device__ void current_gates(int head, int h) const {
    const float rate = -expf(step_.A_log[head]), bias = step_.dt_bias[head];
    float gain, log_decay;
    if constexpr (kDelta) {
      gain = step_.beta_scale * sigmoid(load(step_.beta.type, step_.beta.data, at_.row * step_.beta.stride + head));
      log_decay = rate * softplus(load(step_.gate.type, step_.gate.data, at_.row * step_.gate.stride + head) + bias);
    } else {
      gain = softplus(load(step_.dt.type, step_.dt.data, at_.row * step_.dt.stride + head) + bias);
      if (gain < step_.dt_min) gain = step_.dt_min;
      if (gain > step_.dt_max) gain = step_.dt_max;
      log_decay = rate * gain;
    }
    float* out = current(h);
    out[0] = rate, out[1] = gain, out[2] = log_decay;
    float* gates = at_.gates(head);
    gates[1] = gain, gates[2] = skip(head), gates[3] = 0;
    if (!flush_) {
      if constexpr (kDelta) reinterpret_cast<float*>(at_.records(step_.ring.log_decay, head, 1))[held_] = log_decay;
      if constexpr (!kDelta || Split) reinterpret_cast<float*>(at_.records(step_.ring.gain, head, 1))[held_] = gain;
    }
  }

  /// Suffix sums, newest first, 16 records at a time; differences of prefix sums would cancel. Half a warp a head.
  __device__ void decays(int head, int h, float record, bool write) {
    float* out = at_.gates(head);
    const float rate = current(h)[0], current_gain = current(h)[1], current_log = current(h)[2];
    const int lane = lane_ % 16;
    float newer = 0;  // sum over the records that are newer than these 16
    for (int base = held_; base >= 0; base -= 16) {
      const int j = base - lane;  // lane 0 is the newest
      if (base < held_) record = record_gate(head, j);
      const float gain = j == held_ ? current_gain : record;
      float own = j == held_ ? current_log : kDelta ? record : rate * record;
      if constexpr (kDelta && Split) {
        if (flush_ && j >= 0 && write) shared()[product_gates() + h * slots() + j] = own;
      }
      float sum = own;
#pragma unroll
      for (int d = 1; d < 16; d *= 2) {
        const float other = __shfl_up_sync(~0u, sum, d, 16);
        if (lane >= d) sum += other;
      }
      float before = __shfl_up_sync(~0u, sum, 1, 16);
      if (lane == 0) before = 0;
      if (j >= 0 && write) {
        float a = expf(newer + before);
        if constexpr (!kDelta) a *= gain;
        out[4 + j] = a;
#pragma unroll
        for (int m = 0; m < kVectors; ++m) out[4 + (1 + m) * slots() + j] = a * shared()[m * slots() + j];
      }
      newer += __shfl_sync(~0u, sum, 15, 16);
    }
    if (lane == 0 && write) out[0] = expf(newer);
  }

  __device__ float skip(int head) const {
    if constexpr (!kDelta) {
      if (step_.D) return step_.D[head];
    }
    return 0;
  }

  static constexpr int kPitch = N + 4;  // of the keys in shared memory: rows four banks apart
  /// Behind the products of vectors and the current gates of the group's heads.
  __device__ int product_gates() const {
    const auto in_group = static_cast<int>(step_.shape.heads / step_.shape.groups);
    return kVectors * slots() + (3 * in_group + 3) / 4 * 4;
  }
  __device__ int product_keys(int in_group) const { return product_gates() + in_group * slots(); }

  /// What feeds the records' u into each other: e^{g_{j+1} + ... + g_i} w_j . w_i for j < i; e^{g_0 + ... + g_i};
  /// beta_i.
  __device__ void products(int in_group) {
    const auto L = static_cast<int>(step_.length);
    float* keys = shared() + product_keys(in_group);
    for (int j = warp_; j <= held_; j += warps_) {
      float w[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) w[e] = vector_[1][e];
      if (j < held_) load_run(step_.ring.w.type, ring_w_, j * N + lane_ * kEach, w);
#pragma unroll
      for (int e = 0; e < kEach; ++e) keys[j * kPitch + lane_ * kEach + e] = w[e];
    }
    __syncthreads();
    const int n = held_ + 1;
    float* dots = keys + n * kPitch;
    for (int t = static_cast<int>(threadIdx.x); t < n * n; t += static_cast<int>(blockDim.x)) {
      const int i = t / n, j = t % n;
      if (j >= i) continue;
      float dot = 0;
#pragma unroll 4
      for (int e = 0; e < N; e += 4) {
        const float4 a = *reinterpret_cast<const float4*>(keys + i * kPitch + e);
        const float4 b = *reinterpret_cast<const float4*>(keys + j * kPitch + e);
        dot = fmaf(a.x, b.x, dot), dot = fmaf(a.y, b.y, dot), dot = fmaf(a.z, b.z, dot), dot = fmaf(a.w, b.w, dot);
      }
      dots[t] = dot;
    }
    __syncthreads();
    // A thread for each head and record j, whose decay grows as i goes on; j = -1: the checkpoint.
    for (int t = static_cast<int>(threadIdx.x); t < in_group * (n + 1); t += static_cast<int>(blockDim.x)) {
      const int h = t / (n + 1), j = t % (n + 1) - 1, head = group_ * in_group + h;
      const float* log_decay = shared() + product_gates() + h * slots();
      float* out = at_.products(head);
      float sum = 0;
      for (int i = j + 1; i < n; ++i) {
        sum += log_decay[i];
        out[j < 0 ? L * L + i : i * L + j] = j < 0 ? expf(sum) : expf(sum) * dots[i * n + j];
      }
      if (j >= 0)
        out[L * L + L + j] =
            j < held_ ? reinterpret_cast<const float*>(at_.records(step_.ring.gain, head, 1))[j] : current(h)[1];
    }
  }

  // ---- one decay a channel ------------------------------------------------------------------------------------------

  /// One warp takes the records newest first, with the suffix sum of each of its channels; the other the products.
  __device__ void columns() {
    const int head = unit_, first = lane_ * kEach;
    float* out = at_.gates(head);
    const auto* logs = reinterpret_cast<const float*>(at_.records(step_.ring.log_decay, head, N));
    const float rate = -expf(step_.A_log[head]);
    float log_decay[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const std::int64_t column = static_cast<std::int64_t>(head) * N + first + e;
      log_decay[e] = rate * softplus(load(step_.gate.type, step_.gate.data, at_.row * step_.gate.stride + column) +
                                     step_.dt_bias[column]);
    }
    const float gain =
        step_.beta_scale * sigmoid(load(step_.beta.type, step_.beta.data, at_.row * step_.beta.stride + head));
    if (warp_ == 0) {
      float sum[kEach] = {};
      for (int j = held_; j >= 0; --j) {
        float w[kEach], g[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) w[e] = vector_[1][e], g[e] = log_decay[e];
        if (j < held_) {
          load_run(step_.ring.w.type, ring_w_, j * N + first, w);
          load_run(Scalar::fp32, logs, j * N + first, g);
        }
        float dot[kVectors] = {};
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          const float decayed = expf(sum[e]) * w[e];
          sum[e] += g[e];
#pragma unroll
          for (int m = 0; m < kVectors; ++m) dot[m] = fmaf(decayed, vector_[m][e], dot[m]);
        }
#pragma unroll
        for (int m = 0; m < kVectors; ++m) {
          dot[m] = lane_sum<32>(dot[m]);
          if (lane_ == 0) out[4 + (1 + m) * slots() + j] = dot[m];
        }
        if (lane_ == 0) out[4 + j] = 1.0f;
      }
      float* vectors = at_.vectors(head, static_cast<int>(step_.shape.heads));
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float total = expf(sum[e]);
#pragma unroll
        for (int m = 0; m < kVectors; ++m) vectors[m * N + first + e] = total * vector_[m][e];
        vectors[kVectors * N + first + e] = vector_[0][e];
        vectors[(kVectors + 1) * N + first + e] = total;
        vectors[(kVectors + 2) * N + first + e] = vector_[1][e];
      }
      if (lane_ == 0) {
        out[0] = 1.0f;
        out[1] = gain;
        out[2] = 0;
      }
      return;
    }
    if (!flush_) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        reinterpret_cast<float*>(at_.records(step_.ring.log_decay, head, N))[held_ * N + first + e] = log_decay[e];
      }
      if (Split && lane_ == 0) reinterpret_cast<float*>(at_.records(step_.ring.gain, head, 1))[held_] = gain;
    } else if constexpr (Split) {
      column_products(head, log_decay, gain);
    }
  }

  __device__ void column_products(int head, const float (&current)[kEach], float gain) {
    const auto L = static_cast<int>(step_.length);
    const int first = lane_ * kEach;
    const auto* logs = reinterpret_cast<const float*>(at_.records(step_.ring.log_decay, head, N));
    float* out = at_.products(head);
    for (int i = 0; i <= held_; ++i) {
      float sum[kEach], key[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) sum[e] = current[e], key[e] = vector_[1][e];
      if (i < held_) {
        load_run(Scalar::fp32, logs, i * N + first, sum);
        load_run(step_.ring.w.type, ring_w_, i * N + first, key);
      }
      for (int j = i - 1; j >= 0; --j) {
        float w[kEach], g[kEach], dot = 0;
        load_run(step_.ring.w.type, ring_w_, j * N + first, w);
        load_run(Scalar::fp32, logs, j * N + first, g);
#pragma unroll
        for (int e = 0; e < kEach; ++e) {
          dot = fmaf(w[e] * expf(sum[e]), key[e], dot);
          sum[e] += g[e];
        }
        dot = lane_sum<32>(dot);
        if (lane_ == 0) out[i * L + j] = dot;
      }
      if (lane_ == 0) {
        out[L * L + i] = 1.0f;  // decode_kernel() reads the anchor with keys that are decayed already
        out[L * L + L + i] =
            i < held_ ? reinterpret_cast<const float*>(at_.records(step_.ring.gain, head, 1))[i] : gain;
      }
    }
  }

  const StepType& step_;
  Places<StepType> at_;
  std::byte* const shared_;
  const int warp_, lane_, warps_;
  std::byte* ring_w_;
  int unit_, group_, held_;
  bool flush_;
  float vector_[3][kEach];  // c, w, w as the ring will hold it
};

/// Shared memory of a block of prepare_kernel().
template <Recurrence recurrence, int N, bool Split>
std::size_t prepare_shared_bytes(const Step& step, int slots) {
  constexpr bool delta = is_delta_rule(recurrence);
  const auto in_group = static_cast<int>(step.shape.heads / step.shape.groups);
  auto floats = static_cast<std::size_t>(output_vectors(delta, Split) * slots + (3 * in_group + 3) / 4 * 4);
  if (delta && Split && !has_column_decay(recurrence)) {
    floats +=
        static_cast<std::size_t>(in_group * slots) + static_cast<std::size_t>(step.length * (N + 4 + step.length));
  }
  floats = std::max(floats, std::size_t{8});  // order_rows()
  return floats * sizeof(float);
}

template <Recurrence recurrence, int N, bool Split>
__global__ void __launch_bounds__(128, 8)
    prepare_kernel(const __grid_constant__ Arguments<typename Prepare<recurrence, N, Split>::StepType> arguments) {
  extern __shared__ __align__(128) std::byte shared_memory[];
  Prepare<recurrence, N, Split>(arguments, shared_memory).run();
}

}  // namespace replayssm::cuda
