#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace replayssm {

/// Bad input: a file, tensor, option or value that cannot be used. The message is one line that names it,
/// says what was expected and what was found. Programs print it and exit with 2.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws Error with the concatenation of its arguments as the message.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace replayssm
