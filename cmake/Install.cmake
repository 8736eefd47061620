# Installs the program, the libraries, their headers as <replayssm/core/...>, <replayssm/cuda/...> and
# <replayssm/analysis/...>, and the package that find_package(replayssm) reads.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/replayssm)
install(TARGETS replayssm_core replayssm_cuda replayssm_analysis EXPORT replayssmTargets
        INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS replayssm)
install(EXPORT replayssmTargets NAMESPACE replayssm:: DESTINATION ${package_dir})

# In the repository a header is "core/x.h"; installed it is "replayssm/core/x.h", so that no "core/x.h" of the
# project that uses it can be taken for ours. The headers are read when they are installed, never an older copy.
set(header_script "
  set(source_dir \"${PROJECT_SOURCE_DIR}\")
  set(staging_dir \"${PROJECT_BINARY_DIR}/installed_headers\")
  set(include_dir \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_INCLUDEDIR}/replayssm\")")
string(APPEND header_script [[

  file(REMOVE_RECURSE "${staging_dir}")
  file(GLOB headers RELATIVE "${source_dir}" "${source_dir}/core/*.h" "${source_dir}/analysis/*.h"
       "${source_dir}/cuda/backend.h" "${source_dir}/cuda/decode.h" "${source_dir}/cuda/convert.h")
  list(FILTER headers EXCLUDE REGEX "core/(big_real|config|lanes|literal|parallel|rounding|scales|trace_hdf5)\\.h|analysis/(decoder|head_inputs|layer_observer|literal_heads|report_json|table)\\.h")  # private
  foreach(header IN LISTS headers)
    file(READ "${source_dir}/${header}" text)
    string(REGEX REPLACE "#include \"(core|cuda|analysis)/" "#include \"replayssm/\\1/" text "${text}")
    file(WRITE "${staging_dir}/${header}" "${text}")
  endforeach()
  file(INSTALL "${staging_dir}/" DESTINATION "${include_dir}")]])
install(CODE "${header_script}")

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/replayssmConfig.cmake.in
  ${PROJECT_BINARY_DIR}/replayssmConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/replayssmConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/replayssmConfig.cmake ${PROJECT_BINARY_DIR}/replayssmConfigVersion.cmake
        DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/replayssm)

if(REPLAYSSM_TESTS AND REPLAYSSM_SLOW_TESTS)
  add_test(NAME install.consumer COMMAND ${CMAKE_COMMAND}
    -D build_dir=${PROJECT_BINARY_DIR} -D config=$<CONFIG> -D generator=${CMAKE_GENERATOR}
    -D compiler=${CMAKE_CXX_COMPILER} -D flags=${CMAKE_CXX_FLAGS} -D version=${PROJECT_VERSION}
    -P ${PROJECT_SOURCE_DIR}/tests/install/run.cmake)
  set_tests_properties(install.consumer PROPERTIES LABELS slow)
endif()
