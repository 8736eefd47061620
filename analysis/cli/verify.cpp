#include "analysis/verify.h"

#include <cstdio>

#include "analysis/cli/cli.h"
#include "analysis/report.h"
#include "core/error.h"

namespace replayssm::cli {
namespace {

struct Options {
  std::string model, golden, json;
  double bound = 1e-4;
  MachineOptions machine;
};

int run(const Options& options) {
  if (!(options.bound >= 0)) fail("--bound must be a number of at least 0, found ", options.bound);
  if (options.machine.device != "cpu") {
    fail("--device ", options.machine.device, ": verify runs the exact state, which the CPU keeps");
  }
  check_writable(options.json);
  const auto model = open_model(options.model);
  const auto backend = options.machine.reference();
  const Verification result = verify(*model, *backend, options.golden);
  const bool passed = result.worst() <= options.bound;
  if (options.json != "-") {
    for (const auto* group : {&result.logits, &result.hidden, &result.others}) {
      for (const Agreement& a : *group) {
        std::printf("%-12s %-26s rel_l2 %.3e  max_abs %.3e", a.name.c_str(), a.matches.c_str(), a.rel_l2, a.max_abs);
        if (group == &result.logits) std::printf("  argmax %.4f", a.argmax_agreement);
        std::printf("\n");
      }
    }
    std::printf("%s: worst rel_l2 %.3e, bound %.1e\n", passed ? "agrees" : "DIFFERS", result.worst(), options.bound);
  }
  if (!options.json.empty()) {
    write_text(options.json, verify_json(result, options.model, options.golden, options.bound));
  }
  return passed ? 0 : 1;
}

}  // namespace

Command add_verify(CLI::App& app) {
  auto options = std::make_shared<Options>();
  app.add_option("MODEL", options->model, "Hugging Face folder")->required();
  app.add_option("--golden", options->golden, "Safetensors file with input_ids, logits and perhaps hidden_i")
      ->required();
  app.add_option("--bound", options->bound, "Largest relative L2 error that passes")->capture_default_str();
  app.add_option("--json", options->json, "Write the result as JSON to a file, or to standard output with -");
  options->machine.add_to(app);
  return [options] { return run(*options); };
}

}  // namespace replayssm::cli
