#include "analysis/baseline.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/safetensors.h"
#include "core/sha256.h"

namespace replayssm {
namespace {

using Json = nlohmann::ordered_json;

constexpr int layout = 1;

/// One value of a JSON file, with the words to say where it lies.
class Reader {
 public:
  Reader(const Json& json, std::string file, std::string where)
      : json_(json), file_(std::move(file)), where_(std::move(where)) {}

  Reader at(const std::string& key) const {
    if (!json_.is_object()) wrong("an object");
    const auto found = json_.find(key);
    if (found == json_.end()) fail(file_, where_.empty() ? "" : ": " + where_, ": there is no '", key, "'");
    return {*found, file_, where_.empty() ? key : where_ + "." + key};
  }
  std::string text() const {
    if (!json_.is_string()) wrong("text");
    return json_.get<std::string>();
  }
  template <class Int>
  Int whole() const {
    if (!json_.is_number_unsigned()) wrong("a whole number");
    const auto value = json_.get<std::uint64_t>();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<Int>::max())) wrong("a smaller number");
    return static_cast<Int>(value);
  }
  /// null is NaN.
  double number() const {
    if (json_.is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (!json_.is_number()) wrong("a number or null");
    return json_.get<double>();
  }
  /// each(key, reader) of an object.
  template <class Each>
  void members(Each&& each) const {
    if (!json_.is_object()) wrong("an object");
    for (const auto& [key, value] : json_.items()) each(key, Reader(value, file_, where_ + "." + key));
  }
  Reader item(std::size_t i) const { return {json_[i], file_, where_ + "[" + std::to_string(i) + "]"}; }
  std::size_t size() const { return json_.is_array() ? json_.size() : 0; }

  [[noreturn]] void wrong(const std::string& expected) const {
    std::string found = json_.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (found.size() > 40) found = found.substr(0, 40) + "...";
    fail(file_, where_.empty() ? "" : ": " + where_, ": expected ", expected, ", found ", found);
  }

 private:
  const Json& json_;
  std::string file_, where_;
};

std::vector<Subject> read_subjects(const Reader& list) {
  std::vector<Subject> subjects;
  list.members([&](const std::string& name, const Reader& entry) {
    Subject subject{name, {}, {}};
    entry.at("figures").members([&](const std::string& figure, const Reader& pair) {
      if (pair.size() != 2) pair.wrong("[value, margin]");
      const double margin = pair.item(1).number();
      if (!(margin >= 0)) pair.item(1).wrong("a margin of 0 or more");
      subject.figures.push_back({figure, pair.item(0).number(), margin});
    });
    entry.at("fingerprints").members([&](const std::string& print, const Reader& digest) {
      subject.fingerprints.push_back({print, digest.text()});
    });
    subjects.push_back(std::move(subject));
  });
  return subjects;
}

std::string in_json(const std::string& text) { return Json(text).dump(); }

/// {"a": 1, ...} with one member a line.
std::string object_text(const std::vector<std::pair<std::string, std::string>>& members, const std::string& indent) {
  std::string out = "{";
  for (const auto& [key, value] : members) {
    out.append(out.size() > 1 ? ",\n" : "\n")
        .append(indent)
        .append("  ")
        .append(in_json(key))
        .append(": ")
        .append(value);
  }
  return out + (members.empty() ? "}" : "\n" + indent + "}");
}

std::string subjects_text(const std::vector<Subject>& subjects) {
  std::vector<std::pair<std::string, std::string>> members;
  for (const Subject& subject : subjects) {
    std::vector<std::pair<std::string, std::string>> figures, prints;
    for (const Figure& f : subject.figures) {
      figures.emplace_back(f.name, "[" + Json(f.value).dump() + ", " + Json(f.margin).dump() + "]");
    }
    for (const Fingerprint& print : subject.fingerprints) prints.emplace_back(print.name, in_json(print.digest));
    members.emplace_back(subject.name, object_text({{"figures", object_text(figures, "      ")},
                                                    {"fingerprints", object_text(prints, "      ")}},
                                                   "    "));
  }
  return object_text(members, "  ");
}

}  // namespace

Baseline read_baseline(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path)) fail(path.string(), ": cannot be read");
  Json json;
  try {
    json = Json::parse(in);
  } catch (const Json::parse_error& error) {
    fail(path.string(), ": is no JSON: ", error.what());
  }
  const Reader file(json, path.string(), "");
  const int found = file.at("baseline").whole<int>();
  if (found != layout) fail(path.string(), ": expected a baseline of layout ", layout, ", found ", found);
  Baseline out;
  out.version = file.at("version").text();
  out.model_type = file.at("model").at("type").text();
  out.model_sha256 = file.at("model").at("sha256").text();
  const auto read_file = [&](const char* key) {
    return Baseline::File{file.at(key).at("file").text(), file.at(key).at("sha256").text()};
  };
  out.tokens = read_file("tokens");
  out.states = read_file("states");
  out.sequences = file.at("tokens").at("sequences").whole<std::int64_t>();
  out.length = file.at("tokens").at("length").whole<std::int64_t>();
  out.seed = file.at("seed").whole<std::uint64_t>();
  out.policies = read_subjects(file.at("policies"));
  out.formats = read_subjects(file.at("formats"));
  if (out.policies.empty()) file.at("policies").wrong("at least one policy");
  return out;
}

std::string baseline_text(const Baseline& b) {
  const auto file = [](const Baseline::File& f) {
    return std::vector<std::pair<std::string, std::string>>{{"file", in_json(f.path)}, {"sha256", in_json(f.sha256)}};
  };
  auto tokens = file(b.tokens);
  tokens.insert(tokens.begin() + 1, {{"sequences", std::to_string(b.sequences)}, {"length", std::to_string(b.length)}});
  return object_text(
             {{"baseline", std::to_string(layout)},
              {"version", in_json(b.version)},
              {"model", object_text({{"type", in_json(b.model_type)}, {"sha256", in_json(b.model_sha256)}}, "  ")},
              {"tokens", object_text(tokens, "  ")},
              {"states", object_text(file(b.states), "  ")},
              {"seed", std::to_string(b.seed)},
              {"policies", subjects_text(b.policies)},
              {"formats", subjects_text(b.formats)}},
             "") +
         "\n";
}

std::string tokens_sha256(const Tokens& tokens) { return sha256_hex(std::as_bytes(std::span(tokens.ids))); }

std::string file_sha256(const std::filesystem::path& path) { return sha256_hex(MappedFile(path).bytes()); }

}  // namespace replayssm
