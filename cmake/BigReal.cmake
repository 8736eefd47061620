# replayssm::big_real: what a file that includes core/big_real.h compiles and links with. Static libraries that use it
# privately link ${REPLAYSSM_BIG_REAL_LIBRARIES} too: by path, so that projects which link them need no package for it.
set(REPLAYSSM_MPFR AUTO CACHE STRING "MPFR, for any number of digits: AUTO (where it is found), ON or OFF")
set_property(CACHE REPLAYSSM_MPFR PROPERTY STRINGS AUTO ON OFF)
if(NOT REPLAYSSM_MPFR MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "REPLAYSSM_MPFR: expected AUTO, ON or OFF, found '${REPLAYSSM_MPFR}'")
endif()

find_package(Boost 1.74 REQUIRED)  # headers only: Multiprecision
add_library(replayssm_big_real INTERFACE)
add_library(replayssm::big_real ALIAS replayssm_big_real)
target_link_libraries(replayssm_big_real INTERFACE Boost::headers)

set(REPLAYSSM_BIG_REAL_LIBRARIES "")
if(REPLAYSSM_MPFR STREQUAL "AUTO")
  find_package(MPFR QUIET)
elseif(REPLAYSSM_MPFR)
  find_package(MPFR REQUIRED)
endif()
if(REPLAYSSM_MPFR AND MPFR_FOUND)
  set(REPLAYSSM_BIG_REAL_LIBRARIES ${MPFR_LIBRARIES})
  target_compile_definitions(replayssm_big_real INTERFACE REPLAYSSM_HAVE_MPFR)
  target_include_directories(replayssm_big_real SYSTEM INTERFACE ${MPFR_INCLUDE_DIRS})
  target_link_libraries(replayssm_big_real INTERFACE ${MPFR_LIBRARIES})
  message(STATUS "Arbitrary precision: MPFR ${MPFR_VERSION}")
else()
  message(STATUS "Arbitrary precision: a fixed list of digits, without MPFR")
endif()
