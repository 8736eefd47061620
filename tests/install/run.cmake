# Installs a build into an empty prefix, builds the project in consumer/ against it, and runs both programs.
# Variables: build_dir, config, generator, compiler, flags, version.
set(work ${build_dir}/install_test)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "'${command}' failed (${result}):\n${output}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${build_dir} --config ${config} --prefix ${work}/prefix)
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${work}/build -G ${generator}
    -D CMAKE_BUILD_TYPE=${config} -D CMAKE_CXX_COMPILER=${compiler} -D "CMAKE_CXX_FLAGS=${flags}"
    -D CMAKE_PREFIX_PATH=${work}/prefix -D expected_version=${version})
run(${CMAKE_COMMAND} --build ${work}/build --config ${config})
run(${work}/build/consumer)
run(${work}/prefix/bin/replayssm --help)

# The flags that this project compiles itself with are no business of those who use it.
file(READ ${work}/build/options.txt options)
if(NOT options STREQUAL "")
  message(FATAL_ERROR "the installed targets add compile options to their users: expected none, found '${options}'")
endif()
