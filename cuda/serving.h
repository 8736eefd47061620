#pragma once

// Private to cuda/: a policy in the words of the decode kernels.

#include <optional>
#include <string>

#include "core/policy.h"
#include "core/recurrence.h"
#include "cuda/decode.h"

namespace replayssm::cuda {

/// How the kernels keep the state of one layer under a policy.
struct Serving {
  std::int64_t length = 1;
  Storage state = Storage::fp32;
  std::optional<Storage> read;                                  ///< of a split state
  Scalar v = Scalar::fp32, u = Scalar::fp32, w = Scalar::fp32;  ///< of the ring
  bool closed_loop = false;                                     ///< of the delta rule
};

/// The kernels' form of a policy: an eager state is a replay of length 1; a field of the ring that the policy leaves
/// exact is kept in fp32, gates always. A shared delta rule in a closed loop whose ring is fp32 throughout runs in an
/// open one, whose cached u are then the very u that a flush would compute again.
///
/// Throws Error, naming policy, word and what is known, for order=sequential, a state format other than fp32, fp16,
/// bf16, e4m3:row and int8:row, recorded activations in other than fp32, fp16 and bf16, gates in other than fp32, and a
/// head_dim or state_dim beyond what the kernels hold.
Serving serve(const RecurrenceShape& shape, const Policy& policy);

/// The type that keeps states, or records, in a format. Throws Error that names the policy, `what` is kept and the
/// formats that are known.
Storage storage_of(const Format& format, const Policy& policy, const std::string& what);
Scalar scalar_of(const Format& format, const Policy& policy, const std::string& what);

/// The format of core/format.h that a type is.
Format stored_format(Storage type);
Format stored_format(Scalar type);

}  // namespace replayssm::cuda
