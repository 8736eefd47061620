#include "cuda/check.h"

#include <cmath>
#include <cstdint>

#include "core/error.h"
#include "cuda/codes.cuh"

namespace replayssm::cuda {
namespace {

constexpr std::int64_t kMaxDim = 256;
constexpr std::int64_t kMaxBlocks = (std::int64_t{1} << 31) - 1;  // of a grid along x
constexpr std::int64_t kMaxRecords = std::int64_t{1} << 50;

void check_pointer(const char* what, const void* data, std::int64_t alignment) {
  if (!data) fail(what, ": expected a device pointer, found null");
  if (reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(alignment) != 0) {
    fail(what, ": expected a pointer aligned to ", alignment, " bytes, found ", data);
  }
}

void check_stride(const char* what, std::int64_t stride, std::int64_t width) {
  if (stride < width) fail(what, ": expected at least ", width, " elements, found ", stride);
}

void check_scalar(const char* what, Scalar type) {
  if (type != Scalar::fp32 && type != Scalar::fp16 && type != Scalar::bf16) {
    fail(what, ": expected fp32, fp16 or bf16, found type number ", static_cast<int>(type));
  }
}

/// Names a field of a member: "state" and ".codes".
std::string join(const char* member, const char* field) { return std::string(member) + field; }

void check_input(const char* name, const Activations& a, std::int64_t width) {
  check_scalar(join(name, ".type").c_str(), a.type);
  check_pointer(join(name, ".data").c_str(), a.data, bytes_of(a.type));
  check_stride(join(name, ".stride").c_str(), a.stride, width);
}

void check_parameter(const char* name, const float* data) { check_pointer(name, data, sizeof(float)); }

void check_storage(const char* name, Storage storage) {
  if (storage > Storage::int8_row) {
    fail(name, ": expected fp32, fp16, bf16, e4m3:row or int8:row, found type number ", static_cast<int>(storage));
  }
}

void check_pool(const char* name, const StatePool& pool, const RecurrenceShape& shape) {
  check_storage(join(name, ".storage").c_str(), pool.storage);
  const std::int64_t rows = shape.heads * shape.head_dim;
  check_pointer(join(name, ".codes").c_str(), pool.codes, bytes_of(pool.storage));
  check_stride(join(name, ".slot_stride").c_str(), pool.slot_stride, rows * shape.state_dim);
  if (has_scale(pool.storage)) {
    check_pointer(join(name, ".scales").c_str(), pool.scales, sizeof(float));
    check_stride(join(name, ".scale_slot_stride").c_str(), pool.scale_slot_stride, rows);
  }
}

void check_field(const char* name, const RingField& field, std::int64_t slot_elements, bool fp32_only) {
  check_scalar(join(name, ".type").c_str(), field.type);
  if (fp32_only && field.type != Scalar::fp32) fail(name, ".type: expected fp32, which gates are kept in");
  check_pointer(join(name, ".data").c_str(), field.data, bytes_of(field.type));
  check_stride(join(name, ".slot_stride").c_str(), field.slot_stride, slot_elements);
}

void check_dim(const char* name, std::int64_t dim) {
  if (dim < 1 || dim > kMaxDim) fail(name, ": expected 1 to ", kMaxDim, ", found ", dim);
}

/// Sizes and what is the same for every recurrence, but for the ring and the cursors.
void check_layer(const Step& step) {
  const RecurrenceShape& shape = step.shape;
  check_dim("shape.head_dim", shape.head_dim);
  check_dim("shape.state_dim", shape.state_dim);
  if (shape.heads < 1 || shape.heads > kMaxBlocks) {
    fail("shape.heads: expected 1 to ", kMaxBlocks, ", found ", shape.heads);
  }
  if (shape.groups < 1 || shape.heads % shape.groups != 0) {
    fail("shape.groups: expected a divisor of the ", shape.heads, " heads, found ", shape.groups);
  }
  if (step.rows < 0) fail("rows: expected at least 0, found ", step.rows);
  if (step.rows > kMaxBlocks / shape.heads) {
    fail("rows: expected rows x heads up to ", kMaxBlocks, ", found ", step.rows, " x ", shape.heads);
  }
  if (step.slots < 0) fail("slots: expected at least 0, found ", step.slots);
  if (step.rows == 0) return;

  check_pointer("slot", step.slot, sizeof(std::int32_t));
  check_pool("state", step.state, shape);
  if (step.read.codes) check_pool("read", step.read, shape);
  check_scalar("y_type", step.y_type);
  check_pointer("y", step.y, bytes_of(step.y_type));
  check_stride("y_stride", step.y_stride, shape.heads * shape.head_dim);
  if (step.workspace) check_pointer("workspace", step.workspace, 16);
}

/// Which fields of a ring there are: `values` those of raw records, `updates` those of the delta rule.
struct Fields {
  bool values, updates;
};
Fields fields(const Mamba2Step&) { return {true, false}; }
Fields fields(const DeltaStep& step) { return {step.closed_loop, true}; }

void check_ring(const Step& step, const Fields& fields) {
  const RecurrenceShape& shape = step.shape;
  const Ring& ring = step.ring;
  if (ring.capacity > kMaxRecords / shape.heads) {  // far beyond any memory; products of it fit in 64 bits
    fail("ring.capacity: expected capacity x heads up to ", kMaxRecords, ", found ", ring.capacity, " x ", shape.heads);
  }
  const std::int64_t records = ring.capacity * shape.heads;
  if (fields.values) {
    check_field("ring.v", ring.v, records * shape.head_dim, false);
    check_field("ring.gain", ring.gain, records, true);
  }
  if (fields.updates) {
    check_field("ring.u", ring.u, records * shape.head_dim, false);
    check_field("ring.log_decay", ring.log_decay, records * shape.decay_dim(), true);
  }
  check_field("ring.w", ring.w, ring.capacity * shape.groups * shape.state_dim, false);
}

/// What is its own of a recurrence.
void check_recurrence(const Mamba2Step& step) {
  const RecurrenceShape& shape = step.shape;
  if (shape.recurrence != Recurrence::mamba2) {
    fail("shape.recurrence: expected mamba2 in a Mamba2Step, found ", name(shape.recurrence));
  }
}
void check_recurrence(const DeltaStep& step) {
  const RecurrenceShape& shape = step.shape;
  if (!is_delta_rule(shape.recurrence)) {
    fail("shape.recurrence: expected gated_delta or kda in a DeltaStep, found ", name(shape.recurrence));
  }
}

void check_inputs(const Mamba2Step& step) {
  const RecurrenceShape& shape = step.shape;
  if (!(step.dt_min <= step.dt_max)) {
    fail("dt_min: expected at most dt_max = ", step.dt_max, ", found ", step.dt_min);
  }
  if (step.rows == 0) return;
  check_input("x", step.x, shape.heads * shape.head_dim);
  check_input("B", step.B, shape.groups * shape.state_dim);
  check_input("C", step.C, shape.groups * shape.state_dim);
  check_input("dt", step.dt, shape.heads);
  check_parameter("A_log", step.A_log);
  check_parameter("dt_bias", step.dt_bias);
  if (step.D) check_parameter("D", step.D);
}

void check_inputs(const DeltaStep& step) {
  const RecurrenceShape& shape = step.shape;
  if (!std::isfinite(step.beta_scale)) fail("beta_scale: expected a finite number, found ", step.beta_scale);
  if (step.rows == 0) return;
  check_input("q", step.q, shape.groups * shape.state_dim);
  check_input("k", step.k, shape.groups * shape.state_dim);
  check_input("v", step.v, shape.heads * shape.head_dim);
  check_input("gate", step.gate, shape.heads * shape.decay_dim());
  check_input("beta", step.beta, shape.heads);
  check_parameter("A_log", step.A_log);
  check_parameter("dt_bias", step.dt_bias);
}

template <class AnyStep>
void check_decode(const AnyStep& step) {
  check_recurrence(step);
  check_layer(step);
  if (step.length < 1 || step.length > kMaxBlocks) {
    fail("length: expected 1 to ", kMaxBlocks, ", found ", step.length);
  }
  if (step.rows > 0 && step.held) check_pointer("held", step.held, sizeof(std::int32_t));
  if (step.rows > 0 && step.length > 1) {
    if (step.ring.capacity < step.length - 1) {
      fail("ring.capacity: expected at least length - 1 = ", step.length - 1, " records, found ", step.ring.capacity);
    }
    check_ring(step, fields(step));
  }
  check_inputs(step);
}

// ---- speculation ----------------------------------------------------------------------------------------------------

void check_drafts(std::int64_t rows, const Drafts& drafts) {
  if (drafts.tokens < 1 || drafts.tokens > kMaxBlocks) {
    fail("tokens: expected 1 to ", kMaxBlocks, ", found ", drafts.tokens);
  }
  if (rows > kMaxBlocks / drafts.tokens) {
    fail("tokens: expected rows x tokens up to ", kMaxBlocks, ", found ", rows, " x ", drafts.tokens);
  }
  if (rows == 0) return;
  check_pointer("count", drafts.count, sizeof(std::int32_t));
  if (drafts.first) check_pointer("first", drafts.first, sizeof(std::int32_t));
}

void check_plan(std::int64_t rows, const Window& window) {
  check_drafts(rows, window);
  if (window.committed < window.tokens || window.committed > kMaxBlocks) {
    fail("committed: expected tokens = ", window.tokens, " to ", kMaxBlocks, " records, found ", window.committed);
  }
  if (window.capacity < window.committed + window.tokens || window.capacity > kMaxBlocks) {
    fail("capacity: expected committed + tokens = ", window.committed + window.tokens, " to ", kMaxBlocks,
         " records, found ", window.capacity);
  }
  if (rows == 0) return;
  check_pointer("origin", window.origin, sizeof(std::int32_t));
  check_pointer("held", window.held, sizeof(std::int32_t));
}

void check_plan(std::int64_t rows, const Snapshots& snapshots) {
  check_drafts(rows, snapshots);
  if (rows > 0) check_pointer("snapshots.slot", snapshots.slot, sizeof(std::int32_t));
}

template <class AnyStep>
void check_storage_of(const AnyStep& step, const Window& window) {
  if (step.ring.capacity != window.capacity) {
    fail("ring.capacity: expected the window's ", window.capacity, ", found ", step.ring.capacity);
  }
  check_ring(step, fields(step));
}
void check_storage_of(const Step& step, const Snapshots&) {
  if (step.read.codes) fail("read.codes: expected null, as an eager state has no read copy");
}

template <class AnyStep, class Plan>
void check_verify(const AnyStep& step, const Plan& plan) {
  check_recurrence(step);
  check_layer(step);
  if (step.length != 1) fail("length: expected 1 of a step that verifies, found ", step.length);
  if (step.held) fail("held: expected null, as a step that verifies has cursors of slots");
  check_plan(step.rows, plan);
  if (step.rows > 0) check_storage_of(step, plan);
  check_inputs(step);
}

void check_accepted(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const char* what,
                    const std::int32_t* tokens, const std::int32_t* refused) {
  if (slots < 0) fail("slots: expected at least 0, found ", slots);
  if (rows == 0) return;
  check_pointer("slot", slot, sizeof(std::int32_t));
  check_pointer(what, tokens, sizeof(std::int32_t));
  if (refused) check_pointer("refused", refused, sizeof(std::int32_t));
}

void check_rows_of(std::int64_t rows) {
  if (rows < 0 || rows > kMaxBlocks) fail("rows: expected 0 to ", kMaxBlocks, ", found ", rows);
}

}  // namespace

void check(const Mamba2Step& step) { check_decode(step); }
void check(const DeltaStep& step) { check_decode(step); }
void check(const Mamba2Step& step, const Window& window) { check_verify(step, window); }
void check(const DeltaStep& step, const Window& window) { check_verify(step, window); }
void check(const Mamba2Step& step, const Snapshots& snapshots) { check_verify(step, snapshots); }
void check(const DeltaStep& step, const Snapshots& snapshots) { check_verify(step, snapshots); }

void check_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Window& window,
                  const char* what, const std::int32_t* tokens, const std::int32_t* refused) {
  check_rows_of(rows);
  check_plan(rows, window);
  check_accepted(rows, slots, slot, what, tokens, refused);
}

void check_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Snapshots& snapshots,
                  const std::int32_t* accepted, const std::int32_t* refused) {
  check_rows_of(rows);
  check_plan(rows, snapshots);
  check_accepted(rows, slots, slot, "accepted", accepted, refused);
}

void check_commit(std::int64_t rows, std::int64_t slots, const std::int32_t* slot, const Drafts& drafts,
                  const ConvolutionWindow& window, const Activations& x, const std::int32_t* accepted) {
  check_rows_of(rows);
  check_drafts(rows, drafts);
  check_accepted(rows, slots, slot, "accepted", accepted, nullptr);
  if (window.channels < 1 || window.channels > kMaxBlocks) {
    fail("window.channels: expected 1 to ", kMaxBlocks, ", found ", window.channels);
  }
  if (rows > kMaxBlocks / window.channels) {
    fail("rows: expected rows x channels up to ", kMaxBlocks, ", found ", rows, " x ", window.channels);
  }
  if (window.inputs < 0) fail("window.inputs: expected at least 0, found ", window.inputs);
  if (rows == 0 || window.inputs == 0) return;
  check_scalar("window.type", window.type);
  check_pointer("window.data", window.data, bytes_of(window.type));
  for (const auto& [field, stride] : {std::pair{"window.slot_stride", window.slot_stride},
                                      {"window.channel_stride", window.channel_stride},
                                      {"window.input_stride", window.input_stride}}) {
    check_stride(field, stride, 1);
  }
  check_input("x", x, window.channels);
}

void check_cursors(std::int64_t rows, const std::int32_t* slot, const std::int32_t* held, std::int64_t length) {
  if (rows < 0 || rows > kMaxBlocks) fail("rows: expected 0 to ", kMaxBlocks, ", found ", rows);
  if (length < 1 || length > kMaxBlocks) fail("length: expected 1 to ", kMaxBlocks, ", found ", length);
  if (rows == 0) return;
  check_pointer("slot", slot, sizeof(std::int32_t));
  check_pointer("held", held, sizeof(std::int32_t));
}

void check_rows(Storage storage, const float* data, std::int64_t rows, std::int64_t n, const void* codes,
                const float* scales) {
  check_storage("storage", storage);
  if (rows < 0) fail("rows: expected at least 0, found ", rows);
  if (n < 1) fail("n: expected at least 1, found ", n);
  if (rows == 0) return;
  check_pointer("data", data, sizeof(float));
  check_pointer("codes", codes, bytes_of(storage));
  if (has_scale(storage)) check_pointer("scales", scales, sizeof(float));
}

}  // namespace replayssm::cuda
