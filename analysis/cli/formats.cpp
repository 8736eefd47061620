#include <cmath>
#include <cstdio>

#include "analysis/cli/cli.h"
#include "core/format.h"

namespace replayssm::cli {
namespace {

double smallest_normal(const Element& e) { return std::ldexp(1.0, e.emin); }
double smallest_subnormal(const Element& e) { return std::ldexp(1.0, e.emin - e.mantissa_bits); }

std::string beyond(const Element& e) {
  const double past = decode<double>(e, encode(e, 4 * decode<double>(e, e.max_code)));
  return std::isinf(past) ? "Inf" : std::isnan(past) ? "NaN" : "saturates";
}

void print_table() {
  std::printf("%-6s %4s  %-12s %14s %14s %14s  %-10s %s\n", "name", "bits", "sign+exp+man", "largest", "least normal",
              "least above 0", "overflow", "scales");
  for (const Element& e : elements()) {
    char layout[16], normal[16];
    std::snprintf(layout, sizeof layout, "1+%d+%d", e.exponent_bits, e.mantissa_bits);
    std::snprintf(normal, sizeof normal, "%.8g", smallest_normal(e));
    std::printf("%-6s %4d  %-12s %14.8g %14s %14.8g  %-10s %s\n", std::string(e.name).c_str(), e.storage_bits,
                e.integer ? "two's compl." : layout, decode<double>(e, e.max_code), e.integer ? "-" : normal,
                smallest_subnormal(e), beyond(e).c_str(),
                e.integer                                 ? "row"
                : e.storage_bits < 32 || e.name == "tf32" ? "none, row"
                                                          : "none");
  }
  std::printf("exact    not rounded\n");
}

void print_format(const std::string& text) {
  const Format format = parse_format(text);
  std::printf("%s\n", format.text().c_str());
  if (format.exact()) {
    std::printf("not rounded; counted as 8 bytes an element\n");
    return;
  }
  const Element& e = format.element;
  std::printf("element %s: %d bits stored, %d exponent, %d mantissa, largest %.9g, least above 0 %.9g\n",
              std::string(e.name).c_str(), e.storage_bits, e.exponent_bits, e.mantissa_bits,
              decode<double>(e, e.max_code), smallest_subnormal(e));
  if (!e.integer) std::printf("least normal %.9g, ", smallest_normal(e));
  std::printf("unit roundoff %.3g, beyond the range: %s\n", std::ldexp(0.5, e.integer ? 0 : -e.mantissa_bits),
              beyond(e).c_str());
  std::printf("rounding: once, to nearest even, from the computing precision\n");
  if (format.scale == Scale::row) {
    std::printf(
        "scale: one fp32 a row [h, p, :], float(amax / %.9g), 1 where that is 0; a row with NaN or Inf decodes "
        "to NaN\n",
        decode<double>(e, e.max_code));
  } else {
    std::printf("scale: none\n");
  }
  std::printf(
      "proof: every code, every midpoint of the 16-bit and smaller formats with its neighbours, a dense stride "
      "of all floats (ctest -R format)\n");
  if (e.bits() > 8) return;
  std::printf("codes:");
  for (std::uint32_t code = 0; code < std::uint32_t{1} << e.bits(); ++code) {
    if (code % 8 == 0) std::printf("\n  0x%02X ", code);
    std::printf(" %13.9g", decode<double>(e, code));
  }
  std::printf("\n");
}

}  // namespace

Command add_formats(CLI::App& app) {
  auto name = std::make_shared<std::string>();
  app.add_option("NAME", *name, "A format such as e4m3:row; without one, a table of all");
  return [name] {
    name->empty() ? print_table() : print_format(*name);
    return 0;
  };
}

}  // namespace replayssm::cli
