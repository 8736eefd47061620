// Everything public of cuda/ in a build without CUDA: the same symbols, so that no caller needs an #ifdef.

#include "core/error.h"
#include "cuda/backend.h"
#include "cuda/bench.h"
#include "cuda/convert.h"
#include "cuda/speculate.h"

namespace replayssm::cuda {
namespace {

[[noreturn]] void refuse(const char* what) {
  fail(what, ": this replayssm was built without CUDA; configure with -DREPLAYSSM_CUDA=ON and a CUDA compiler");
}

}  // namespace

void decode(const Mamba2Step&, CUstream_st*, Kernel) { refuse("decode"); }
void decode(const DeltaStep&, CUstream_st*, Kernel) { refuse("decode"); }
void advance_cursors(std::int64_t, const std::int32_t*, std::int32_t*, std::int64_t, CUstream_st*) {
  refuse("advance_cursors");
}
void verify(const Mamba2Step&, const Window&, CUstream_st*, Kernel) { refuse("verify"); }
void verify(const DeltaStep&, const Window&, CUstream_st*, Kernel) { refuse("verify"); }
void verify(const Mamba2Step&, const Snapshots&, CUstream_st*, Kernel) { refuse("verify"); }
void verify(const DeltaStep&, const Snapshots&, CUstream_st*, Kernel) { refuse("verify"); }
void commit(std::int64_t, std::int64_t, const std::int32_t*, const Window&, const std::int32_t*, std::int32_t*,
            CUstream_st*) {
  refuse("commit");
}
void commit(std::int64_t, std::int64_t, std::int32_t*, const Snapshots&, const std::int32_t*, std::int32_t*,
            CUstream_st*) {
  refuse("commit");
}
void roll_back(std::int64_t, std::int64_t, const std::int32_t*, const Window&, const std::int32_t*, std::int32_t*,
               CUstream_st*) {
  refuse("roll_back");
}
void commit_convolution(std::int64_t, std::int64_t, const std::int32_t*, const Drafts&, const ConvolutionWindow&,
                        const Activations&, const std::int32_t*, CUstream_st*) {
  refuse("commit_convolution");
}
void encode_rows(Storage, const float*, std::int64_t, std::int64_t, void*, float*, CUstream_st*) {
  refuse("encode_rows");
}
void decode_rows(Storage, const void*, const float*, std::int64_t, std::int64_t, float*, CUstream_st*) {
  refuse("decode_rows");
}
Ceilings measure_ceilings() { refuse("measure_ceilings"); }
void check_case(const BenchCase&) { refuse("bench"); }
BenchResult bench(const BenchCase&) { refuse("bench"); }
std::shared_ptr<StepDevice> gpu(Kernel) { refuse("gpu"); }
bool available() { return false; }

}  // namespace replayssm::cuda
