// Everything public of cuda/ in a build without CUDA: the same symbols, so that no caller needs an #ifdef.

#include "core/error.h"
#include "cuda/backend.h"
#include "cuda/bench.h"
#include "cuda/convert.h"
#include "cuda/decode.h"

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
