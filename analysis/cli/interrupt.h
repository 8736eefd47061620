#pragma once

namespace replayssm::cli {

/// From here on the first Ctrl-C is only noted; the second ends the program at once. Where the program was started with
/// interrupts ignored, as in the background of a script, they still are.
void note_interrupts();

/// Whether one was noted.
bool interrupted();

}  // namespace replayssm::cli
