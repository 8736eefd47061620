# Run at build time: writes OUTPUT, a source that holds the revision of the tree, and touches it only when it changes.
# A tree without git (an archive) has the revision "unknown".
set(revision unknown)
find_program(git git)
if(git)
  execute_process(COMMAND ${git} describe --always --dirty --abbrev=12 WORKING_DIRECTORY ${SOURCE_DIR}
                  OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    set(revision ${described})
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#include "core/version.h"

const char* replayssm::git_revision() { return "@revision@"; }
]])
