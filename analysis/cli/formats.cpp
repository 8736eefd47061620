#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

#include "analysis/cli/cli.h"
#include "core/own_format.h"

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
      "\nscales: ELEMENT:row, :groupN, :tileR, :head, :tensor; fp32, :cap=X below the largest value, :asym with a "
      "zero point (integers), or powers of two with :floor or :ceil\n"
      "rounding: to nearest even, :rz toward zero, :sr or :sr=B stochastic; :hadamard rotated; :ef=F with error "
      "feedback, the residual in F\n\n");
  std::printf("%-11s %-8s %5s %15s  %s\n", "in blocks", "element", "block", "bits an element", "scale");
  for (const NamedFormat& named : named_formats()) {
    const Format& f = named.format;
    std::printf("%-11s %-8s %5lld %15.2f  %s\n", std::string(named.name).c_str(), std::string(f.element.name).c_str(),
                static_cast<long long>(f.extent), bits_with_scales(f),
                f.rule == ScaleRule::nvfp4 ? "e4m3, and one fp32 a head" : "2^e; :floor (the default) or :ceil");
  }
  const auto own = defined_formats();
  if (!own.empty()) std::printf("\n");
  for (const auto& [given, definition] : own) std::printf("%s = %s\n", given.c_str(), definition.c_str());
}

struct ProofRow {
  std::string_view element, rounding;
  long long floats, doubles, rationals, wrong;
  const char* date;
};
constexpr ProofRow kProofs[] = {
#include "analysis/cli/format_proofs.inc"
};

/// What is known of the conversions, and from where.
void print_proof(const Format& f) {
  const std::string_view element = f.element.name == "fixed8" ? "int8" : f.element.name;
  const std::string_view rounding = f.rounding == Rounding::toward_zero ? "toward zero" : "nearest";
  const auto* row =
      std::ranges::find_if(kProofs, [&](const ProofRow& r) { return r.element == element && r.rounding == rounding; });
  std::printf("proof: ");
  if (f.rounding == Rounding::stochastic) {
    std::printf(
        "both neighbours of an element from the proof of nearest and toward zero; draws bit for bit by hand, and "
        "10,000 "
        "of each case of probability 1/4 and 1/2 within 4 standard errors (ctest -R Stochastic)\n");
  } else if (row != std::end(kProofs)) {
    std::printf(
        "all %lld floats rounded %s, and %lld doubles at and beside every value and midpoint: %lld wrong; %lld "
        "comparisons of "
        "the oracle with rationals (prove_formats, %s; a stride of it in ctest -R Proof)\n",
        row->floats, std::string(rounding).c_str(), row->doubles, row->wrong, row->rationals, row->date);
  } else if (f.element.name == "fp32") {
    std::printf("of floats the identity; doubles against the cast of the hardware in every exponent (ctest -R Fp32)\n");
  } else {
    std::printf(
        "values, midpoints and random numbers of 414 elements of 1 to 6 exponent and mantissa bits against the "
        "formula of their fields (ctest -R CustomElement)\n");
  }
  const auto also = [](const char* text) { std::printf("       %s\n", text); };
  if (f.rule != ScaleRule::amax)
    also("scales and blocks against the literal reading of their standards (ctest -R Blocks)");
  if (f.rule == ScaleRule::amax && f.scale != Scale::none)
    also("scales against those worked out by hand (ctest -R 'Rows|Blocks|Scales')");
  if (f.hadamard) also("rotation against the matrix, where its sums are exact (ctest -R Hadamard)");
  if (f.residual) also("error feedback against its definition, store by store (ctest -R StateStores)");
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
  if (f.scale == Scale::tensor) whose = "tensor", of = "state of a layer and sequence, all heads";
  if (f.scale == Scale::tile) whose = "tile", of = "tile of " + std::to_string(f.extent) + " rows of a head";
  if (f.scale == Scale::group) {
    whose = f.rule == ScaleRule::nvfp4 ? "head" : "group";
    of = "group of " + std::to_string(f.extent) + " along a row, whose last may be shorter";
  }
  if (f.asymmetric) {
    const double steps = 2 * max + 1;
    std::printf(
        "scale: one fp32 for each %s, s = float((high - low) / %.9g), 1 where that is 0; low and high: the least and "
        "the largest of the elements and 0\n"
        "zero point: one integer of %lld bits beside it, z = -%.9g - low / s to the nearest, ties to even; code = "
        "round(x / s) + z in [-%.9g, %.9g], value = (code - z) s\n",
        of.c_str(), steps, 8 * static_cast<long long>(f.zero_width()), max + 1, max + 1, max);
    std::printf("not finite: a %s that holds NaN or Inf decodes to NaN\n", whose.c_str());
    return;
  }
  switch (f.rule) {
    case ScaleRule::amax:
      std::printf("scale: one fp32 for each %s, float(amax / %.9g), 1 where that is 0\n", of.c_str(),
                  f.cap > 0 ? f.cap : max);
      break;
    case ScaleRule::floor:
      std::printf(
          "scale: 2^e for each %s, one byte e + 127; e = floor(log2 amax) - %d, in [-127, 127], -127 where "
          "amax is 0; the largest elements may saturate, which is counted apart from overflows\n",
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
  if (!format.given_name.empty()) std::printf("defined as %s\n", definition_of(format).text().c_str());
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
  if (format.residual) {
    std::printf("error feedback: x = S + r is stored, and r = x - S kept as %s for the next store\n",
                format.residual->text().c_str());
  }
  print_scales(format);
  if (format.scale == Scale::none && !e.has_nan()) std::printf("not finite: no NaN, which becomes 0 and is counted\n");
  print_proof(format);
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
  add_format_files(app);
  return [name] {
    name->empty() ? print_table() : print_format(*name);
    return 0;
  };
}

}  // namespace replayssm::cli
