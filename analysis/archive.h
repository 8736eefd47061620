#pragma once

#include <cstdint>
#include <istream>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"

namespace replayssm {

/// Plain data to a stream of bytes or back: archive(a, b, ...) appends the values, or replaces them by the next ones,
/// so that one description serves both directions. A value is a number or a plain struct of such, text, a vector of
/// values, or of a type that has a function archive(Archive&, T&). The bytes are those of memory: they are read by the
/// same build only. Throws Error where the stream ends too soon or refuses.
class Archive {
 public:
  explicit Archive(std::ostream& out) : out_(&out) {}
  explicit Archive(std::istream& in) : in_(&in) {}

  bool reading() const { return in_ != nullptr; }

  template <class... T>
  void operator()(T&... values) {
    (one(values), ...);
  }

 private:
  template <class T>
  void one(T& value) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      static_assert(!std::is_pointer_v<T>);
      bytes(&value, sizeof value);
    } else {
      archive(*this, value);
    }
  }
  void one(std::string& text) { elements(text); }
  template <class T>
  void one(std::vector<T>& values) {
    if constexpr (std::is_trivially_copyable_v<T>) {
      elements(values);
    } else {
      std::uint64_t size = values.size();
      one(size);
      if (reading()) values.clear();
      for (std::uint64_t i = 0; i < size; ++i) one(reading() ? values.emplace_back() : values[i]);
    }
  }

  template <class Values>
  void elements(Values& values) {
    std::uint64_t size = values.size();
    one(size);
    if (reading()) values.resize(size);
    bytes(values.data(), size * sizeof values[0]);
  }

  void bytes(void* data, std::size_t size) {
    const auto count = static_cast<std::streamsize>(size);
    if (in_ ? !in_->read(static_cast<char*>(data), count) : !out_->write(static_cast<const char*>(data), count)) {
      fail(in_ ? "ends too soon" : "cannot be written");
    }
  }

  std::ostream* out_ = nullptr;
  std::istream* in_ = nullptr;
};

}  // namespace replayssm
