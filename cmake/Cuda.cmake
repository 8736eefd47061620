# REPLAYSSM_HAVE_CUDA: whether the kernels are built. The language CUDA is enabled then.
set(REPLAYSSM_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where a CUDA compiler is found), ON or OFF")
set_property(CACHE REPLAYSSM_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT REPLAYSSM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "REPLAYSSM_CUDA: expected AUTO, ON or OFF, found '${REPLAYSSM_CUDA}'")
endif()

# The widths that the fast kernels can have, all of which are built unless less is asked for: they take minutes each.
set(all_state_dims 64 96 128 256)
set(REPLAYSSM_CUDA_STATE_DIMS "${all_state_dims}" CACHE STRING
    "State dimensions with fast CUDA kernels, a list out of ${all_state_dims}; others run in the generic kernel")
if(NOT REPLAYSSM_CUDA_STATE_DIMS)
  message(FATAL_ERROR "REPLAYSSM_CUDA_STATE_DIMS: expected some of ${all_state_dims}, found none")
endif()
foreach(state_dim IN LISTS REPLAYSSM_CUDA_STATE_DIMS)
  if(NOT state_dim IN_LIST all_state_dims)
    message(FATAL_ERROR "REPLAYSSM_CUDA_STATE_DIMS: expected some of ${all_state_dims}, found '${state_dim}'")
  endif()
endforeach()

set(REPLAYSSM_HAVE_CUDA FALSE)
if(REPLAYSSM_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(REPLAYSSM_CUDA STREQUAL "ON" OR (REPLAYSSM_CUDA STREQUAL "AUTO" AND CMAKE_CUDA_COMPILER))
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a 90-virtual)  # machine code for it alone, and PTX for later ones
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
    set(REPLAYSSM_HAVE_CUDA TRUE)
  elseif(REPLAYSSM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "REPLAYSSM_CUDA=ON: expected the CUDA toolkit 12 or later, found "
                        "'${CMAKE_CUDA_COMPILER}' ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
endif()
if(REPLAYSSM_HAVE_CUDA)
  message(STATUS "CUDA kernels: CUDA ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}, "
                 "state dimensions ${REPLAYSSM_CUDA_STATE_DIMS}")
else()
  message(STATUS "CUDA kernels: not built")
endif()
