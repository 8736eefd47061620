# One set of compile options for every file: mixing instruction sets between files that instantiate the same
# templates (Eigen's above all) breaks the one-definition rule and the bit-for-bit promises.
include(CheckCXXSourceRuns)

foreach(flags CMAKE_CXX_FLAGS CMAKE_CXX_FLAGS_RELEASE CMAKE_CXX_FLAGS_RELWITHDEBINFO CMAKE_CXX_FLAGS_DEBUG)
  if(${flags} MATCHES "-ffast-math|-Ofast|-funsafe-math-optimizations|-fassociative-math|-ffinite-math-only")
    message(FATAL_ERROR "${flags} = '${${flags}}': fast-math flags reorder and drop roundings; "
                        "this project measures roundings and refuses to be built with them")
  endif()
endforeach()

set(REPLAYSSM_ISA "")
if(NOT REPLAYSSM_PORTABLE AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # The level as a whole, the same question that core/cpu_check.cpp asks at start: -march=x86-64-v3 lets the compiler
  # use all of it. A compiler that does not know the name gets the portable build.
  check_cxx_source_runs([[
    int main() { return __builtin_cpu_supports("x86-64-v3") ? 0 : 1; }
  ]] REPLAYSSM_MACHINE_HAS_X86_64_V3)
  if(REPLAYSSM_MACHINE_HAS_X86_64_V3)
    set(REPLAYSSM_ISA -march=x86-64-v3)
  endif()
endif()

add_library(replayssm_options INTERFACE)
add_library(replayssm::options ALIAS replayssm_options)
target_compile_features(replayssm_options INTERFACE cxx_std_20)
target_compile_options(replayssm_options INTERFACE
  ${REPLAYSSM_ISA}
  -ffp-contract=off  # a fused multiply-add is written std::fma where it is meant
  -Wall -Wextra -Wconversion -Wdouble-promotion -Wshadow
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>  # GCC 12 sees overlaps in "literal" + std::string that are not there
  $<$<BOOL:${REPLAYSSM_WERROR}>:-Werror>)
target_compile_definitions(replayssm_options INTERFACE
  EIGEN_DONT_PARALLELIZE  # threads are ours, so that results do not depend on their number
  EIGEN_MPL2_ONLY)

# replayssm_cpu_check(SOURCE): compile options of the file that holds the version and refuses to start on a processor
# that lacks the instructions of the build. Call it in the directory of the target that SOURCE belongs to.
function(replayssm_cpu_check source)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  string(JOIN " " flags ${CMAKE_BUILD_TYPE} ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}} ${REPLAYSSM_ISA}
         -ffp-contract=off)
  set(definitions REPLAYSSM_VERSION="${PROJECT_VERSION}" "REPLAYSSM_BUILD_FLAGS=\"${flags}\"")
  if(REPLAYSSM_ISA)
    list(APPEND definitions REPLAYSSM_NEEDS_X86_64_V3)
    set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -march=x86-64)
  endif()
  set_source_files_properties(${source} PROPERTIES COMPILE_DEFINITIONS "${definitions}")
endfunction()
