#include "analysis/verify.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "analysis/study.h"
#include "core/error.h"
#include "core/tokens.h"

namespace replayssm {
namespace {

using Values = std::vector<double>;

Values values_of(const TensorView& tensor) {
  Values out(static_cast<std::size_t>(tensor.elements()));
  widen(tensor, 0, out.size(), out.data());
  return out;
}

Agreement agreement(const std::string& name, const std::string& matches, const Values& ours, const Values& theirs) {
  Agreement out{.name = name, .matches = matches};
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    const double d = ours[i] - theirs[i];
    difference += d * d;
    norm += theirs[i] * theirs[i];
    out.max_abs = std::isnan(d) ? d : std::max(out.max_abs, std::abs(d));
  }
  out.rel_l2 = difference == 0 ? 0 : std::sqrt(difference / norm);
  return out;
}

double argmax_agreement(const Values& ours, const Values& theirs, std::int64_t vocabulary) {
  std::int64_t same = 0, rows = 0;
  for (std::size_t i = 0; i < theirs.size(); i += static_cast<std::size_t>(vocabulary), ++rows) {
    const auto best = [&](const Values& v) {
      const auto first = v.begin() + static_cast<std::ptrdiff_t>(i);
      return std::max_element(first, first + vocabulary) - first;
    };
    same += best(ours) == best(theirs);
  }
  return rows ? static_cast<double>(same) / static_cast<double>(rows) : 0;
}

/// The whole forward pass of some sequences, every layer's input kept.
struct Forward {
  std::vector<Values> hidden;  // input of layer i; then the output of the last layer
  Values normed, logits;       // [sequences, T, ...]

  Forward(const Model& model, Backend& backend, const Tokens& tokens, const std::function<bool()>& interrupted) {
    const auto layers = static_cast<std::int64_t>(model.layers().size());
    hidden.resize(static_cast<std::size_t>(layers) + 1);
    for (std::int64_t b = 0; b < tokens.sequences; ++b) {
      Tensor x = model.embed(backend, {tokens.ids.data() + b * tokens.length, static_cast<std::size_t>(tokens.length)});
      append(backend, x, hidden[0]);
      for (std::int64_t i = 0; i < layers; ++i) {
        if (interrupted && interrupted()) throw Interrupted("interrupted");
        LayerCache cache;
        const LayerInfo& info = model.layers()[static_cast<std::size_t>(i)];
        if (info.recurrence) cache.state = backend.new_state(*info.recurrence, exact_policy());
        x = model.forward(backend, i, x, cache);
        append(backend, x, hidden[static_cast<std::size_t>(i) + 1]);
      }
      x = model.final_norm(backend, x);
      append(backend, x, normed);
      append(backend, model.logits(backend, x), logits);
    }
  }

  static void append(Backend& backend, const Tensor& x, Values& out) {
    const std::size_t before = out.size();
    out.resize(before + static_cast<std::size_t>(x.rows * x.columns));
    backend.read(x, out.data() + before);
  }
};

/// logsumexp and next-token NLL of every position from logits [positions, vocabulary].
void token_losses(const Values& logits, const Tokens& tokens, std::int64_t vocabulary, Values& logsumexp, Values& nll) {
  for (std::int64_t i = 0; i < std::ssize(tokens.ids); ++i) {
    const double* row = logits.data() + i * vocabulary;
    const double top = *std::max_element(row, row + vocabulary);
    double sum = 0;
    for (std::int64_t v = 0; v < vocabulary; ++v) sum += std::exp(row[v] - top);
    logsumexp.push_back(top + std::log(sum));
    if (i % tokens.length + 1 < tokens.length) {
      nll.push_back(logsumexp.back() - row[tokens.ids[static_cast<std::size_t>(i) + 1]]);
    }
  }
}

void expect_size(const TensorView& tensor, std::size_t size) {
  if (static_cast<std::size_t>(tensor.elements()) != size) {
    fail(tensor.file, ": tensor ", tensor.name, ": expected ", size, " elements for these tokens, found ",
         tensor.describe());
  }
}

}  // namespace

double Verification::worst() const {
  double worst = 0;
  for (const auto* group : {&logits, &hidden, &others}) {
    for (const Agreement& a : *group) {
      worst = std::max(worst, std::isnan(a.rel_l2) ? std::numeric_limits<double>::infinity() : a.rel_l2);
    }
  }
  return worst;
}

Verification verify(const Model& model, Backend& backend, const std::filesystem::path& golden,
                    const std::function<bool()>& interrupted) {
  const SafetensorsFile file(golden);
  const Tokens tokens = read_tokens(golden);
  const Forward run(model, backend, tokens, interrupted);
  Verification out{.tokens = tokens.length, .sequences = tokens.sequences, .logits = {}, .hidden = {}, .others = {}};

  const std::int64_t vocabulary = model.vocabulary();
  for (const char* name : {"logits_f64", "logits"}) {
    const TensorView* tensor = file.find(name);
    if (!tensor) continue;
    const std::int64_t rows = tensor->elements() / vocabulary;
    const bool whole = static_cast<std::size_t>(tensor->elements()) == run.logits.size();
    if (tensor->shape.empty() || tensor->shape.back() != vocabulary || rows > tokens.length * tokens.sequences ||
        (!whole && tokens.sequences > 1)) {
      fail(tensor->file, ": tensor ", name, ": expected [", tokens.sequences, ", ", tokens.length, ", ", vocabulary,
           "] or the first rows of one sequence, found ", tensor->describe());
    }
    const Values theirs = values_of(*tensor);
    out.logits.push_back(
        agreement(name, whole ? "logits" : "first " + std::to_string(rows) + " rows of logits", run.logits, theirs));
    out.logits.back().argmax_agreement = argmax_agreement(run.logits, theirs, vocabulary);
  }
  if (out.logits.empty()) fail(golden.string(), ": holds neither logits nor logits_f64");

  Values logsumexp, nll;
  token_losses(run.logits, tokens, vocabulary, logsumexp, nll);
  for (const auto& [name, ours] : {std::pair<const char*, const Values&>{"logsumexp", logsumexp}, {"nll", nll}}) {
    if (const TensorView* tensor = file.find(name)) {
      expect_size(*tensor, ours.size());
      out.others.push_back(agreement(name, name, ours, values_of(*tensor)));
    }
  }

  const std::size_t layers = model.layers().size();
  for (std::size_t i = 0; i <= layers; ++i) {
    const std::string name = "hidden_" + std::to_string(i);
    const TensorView* tensor = file.find(name);
    if (!tensor) continue;
    const Values theirs = values_of(*tensor);
    expect_size(*tensor, run.normed.size());
    std::vector<Agreement> candidates;
    if (i < layers) {
      candidates.push_back(agreement(name, "input of layer " + std::to_string(i), run.hidden[i], theirs));
      candidates.push_back(agreement(name, "output of layer " + std::to_string(i), run.hidden[i + 1], theirs));
    } else {
      candidates.push_back(agreement(name, "output of layer " + std::to_string(layers - 1), run.hidden[i], theirs));
    }
    candidates.push_back(agreement(name, "final norm", run.normed, theirs));
    out.hidden.push_back(*std::min_element(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
      return a.rel_l2 < b.rel_l2 || (std::isnan(b.rel_l2) && !std::isnan(a.rel_l2));
    }));
  }
  return out;
}

std::string verify_json(const Verification& result, const std::string& model_path, const std::string& golden,
                        double bound) {
  using Json = nlohmann::ordered_json;
  const auto group_json = [](const std::vector<Agreement>& group) {
    Json list = Json::array();
    for (const Agreement& a : group) {
      list.push_back({{"name", a.name}, {"matches", a.matches}, {"rel_l2", a.rel_l2}, {"max_abs", a.max_abs}});
    }
    return list;
  };
  const Agreement& logits = result.logits.front();
  return Json{{"command", "verify"},
              {"model", model_path},
              {"golden", golden},
              {"tokens", result.tokens},
              {"sequences", result.sequences},
              {"against", logits.name},
              {"max_abs", logits.max_abs},
              {"rel_l2", logits.rel_l2},
              {"argmax_agreement", logits.argmax_agreement},
              {"logits", group_json(result.logits)},
              {"layers", group_json(result.hidden)},
              {"others", group_json(result.others)},
              {"worst", result.worst()},
              {"bound", bound},
              {"passed", result.worst() <= bound}}
             .dump(2) +
         "\n";
}

}  // namespace replayssm
