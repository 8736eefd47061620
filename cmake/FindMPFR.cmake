# MPFR and the GMP that it stands on: MPFR_FOUND, MPFR_VERSION, MPFR_INCLUDE_DIRS, MPFR_LIBRARIES.
find_path(MPFR_INCLUDE_DIR mpfr.h)
find_path(GMP_INCLUDE_DIR gmp.h)
find_library(MPFR_LIBRARY mpfr)
find_library(GMP_LIBRARY gmp)
mark_as_advanced(MPFR_INCLUDE_DIR GMP_INCLUDE_DIR MPFR_LIBRARY GMP_LIBRARY)

if(MPFR_INCLUDE_DIR)
  file(STRINGS ${MPFR_INCLUDE_DIR}/mpfr.h version_line REGEX "define MPFR_VERSION_STRING")
  string(REGEX REPLACE ".*\"([^\"]*)\".*" "\\1" MPFR_VERSION "${version_line}")
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MPFR
  REQUIRED_VARS MPFR_LIBRARY GMP_LIBRARY MPFR_INCLUDE_DIR GMP_INCLUDE_DIR VERSION_VAR MPFR_VERSION)
set(MPFR_INCLUDE_DIRS ${MPFR_INCLUDE_DIR} ${GMP_INCLUDE_DIR})
set(MPFR_LIBRARIES ${MPFR_LIBRARY} ${GMP_LIBRARY})
