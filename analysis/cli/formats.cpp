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

/// Bits of an element with its share of the scales, in rows that scales divide evenly.
double bits_with_scales(const Format& f) {
  return f.element.storage_bits + 8.0 * static_cast<double>(f.scale_width()) / static_cast<double>(f.block(128, 128));
}

void print_table() {
  std::printf("%-10s %4s  %-12s %14s %14s %14s  %-10s %s\n", "element", "bits", "sign+exp+man", "largest",
              "least normal", "least above 0", "overflow", "scales");
  for (const Element& e : elements()) {
    char layout[16], normal[16];
    std::snprintf(layout, sizeof layout, "1+%d+%d", e.exponent_bits, e.mantissa_bits);
    std::snprintf(normal, sizeof normal, "%.8g", smallest_normal(e));
    std::printf("%-10s %4d  %-12s %14.8g %14s %14.8g  %-10s %s\n", std::string(e.name).c_str(), e.storage_bits,
                e.integer ? "two's compl." : layout, decode<double>(e, e.max_code), e.integer ? "-" : normal,
                smallest_subnormal(e), beyond(e).c_str(),
                e.integer               ? "needed"
                : e.mantissa_bits == 23 ? "none"
                                        : "none or any");
  }
  std::printf("exact      not rounded\n");
  std::printf(
      "\nscales: ELEMENT:row, :groupN, :tileR, :head; fp32, :cap=X below the largest value, or powers of two with "
      ":floor "
      "or :ceil\n\n");
  std::printf("%-11s %-8s %5s %15s  %s\n", "in blocks", "element", "block", "bits an element", "scale");
  for (const NamedFormat& named : named_formats()) {
    const Format& f = named.format;
    std::printf("%-11s %-8s %5lld %15.2f  %s\n", std::string(named.name).c_str(), std::string(f.element.name).c_str(),
                static_cast<long long>(f.extent), bits_with_scales(f),
                f.rule == ScaleRule::nvfp4 ? "e4m3, and one fp32 a head" : "2^e; :floor (the default) or :ceil");
  }
}

std::string rounding_text(const Format& f) {
  if (f.rounding == Rounding::toward_zero) return "toward zero; finite numbers never become infinite";
  if (f.rounding == Rounding::nearest) return "to nearest even";
  return "stochastic: away from zero with the probability floor(f 2^B) / 2^B, f the part of the step, B = " +
         std::to_string(f.random_bits) +
         " bits of Philox4x32-10 (key: --seed; counter: element / 4, token, sequence, "
         "layer * 65536 + head)";
}

void print_scales(const Format& f) {
  const double max = decode<double>(f.element, f.element.max_code);
  if (f.scale == Scale::none) {
    std::printf("scale: none\n");
    return;
  }
  std::string whose = "head", of = "head";
  if (f.scale == Scale::row) whose = "row", of = "row [h, p, :]";
  if (f.scale == Scale::tile) whose = "tile", of = "tile of " + std::to_string(f.extent) + " rows of a head";
  if (f.scale == Scale::group) {
    whose = f.rule == ScaleRule::nvfp4 ? "head" : "group";
    of = "group of " + std::to_string(f.extent) + " along a row, whose last may be shorter";
  }
  switch (f.rule) {
    case ScaleRule::amax:
      std::printf("scale: one fp32 for each %s, float(amax / %.9g), 1 where that is 0\n", of.c_str(),
                  f.cap > 0 ? f.cap : max);
      break;
    case ScaleRule::floor:
      std::printf(
          "scale: 2^e for each %s, one byte e + 127; e = floor(log2 amax) - %d, in [-127, 127], -127 where "
          "amax is 0; the largest elements may saturate, which is counted\n",
          of.c_str(), std::ilogb(max));
      break;
    case ScaleRule::ceil:
      std::printf("scale: 2^e for each %s, one byte e + 127; the smallest e in [-127, 127] with amax / 2^e <= %.9g\n",
                  of.c_str(), max);
      break;
    case ScaleRule::nvfp4:
      std::printf(
          "scale: s b; s = float(amax of the head / (448 x %.9g)), one fp32; b = e4m3(amax / %.9g / s) for each "
          "%s, one byte; each 1 where it is 0\n",
          max, max, of.c_str());
      break;
  }
  std::printf("not finite: a %s that holds NaN or Inf decodes to NaN\n", whose.c_str());
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
  std::printf("unit roundoff %.3g, beyond the range: %s\n",
              e.integer ? smallest_subnormal(e) / 2 : std::ldexp(0.5, -e.mantissa_bits), beyond(e).c_str());
  std::printf("rounding: once, from the computing precision, %s\n", rounding_text(format).c_str());
  if (format.hadamard) {
    std::printf(
        "rotation: each row by an orthonormal Sylvester matrix before rounding and after decoding, as many "
        "neighbours together as the largest power of two that divides the row\n");
  }
  print_scales(format);
  if (format.scale == Scale::none && !e.has_nan()) std::printf("not finite: no NaN, which becomes 0 and is counted\n");
  std::printf(
      "proof: every code, every midpoint of the 16-bit and smaller formats with its neighbours, a dense stride "
      "of all floats (ctest -R format)\n");
  if (format.rule != ScaleRule::amax) {
    std::printf("       scales and blocks against the literal reading of their standards in the tests\n");
  }
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
  app.add_option("NAME", *name, "A format such as e4m3:row or mxfp4:ceil; without one, a table of all");
  return [name] {
    name->empty() ? print_table() : print_format(*name);
    return 0;
  };
}

}  // namespace replayssm::cli
