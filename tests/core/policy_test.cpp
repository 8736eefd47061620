#include "core/policy.h"

#include <gtest/gtest.h>

#include <random>

#include "core/error.h"

namespace replayssm {
namespace {

Format F(const char* text) { return parse_format(text); }

/// The message with which a text is refused, empty where it is not.
std::string Refusal(const std::string& text) {
  try {
    parse_policy(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(PolicyText, HasACanonicalForm) {
  const std::pair<const char*, const char*> spellings[] = {
      {"exact", "exact"},
      {"  exact\n", "exact"},
      {"eager(state=exact)", "exact"},
      {"eager(state=bf16)", "eager(state=bf16)"},
      {" eager ( state = int8:row ) ", "eager(state=int8:row)"},
      {"eager(state=exact, layers=1)", "eager(state=exact, layers=1)"},
      // L is always printed, other defaults are left out.
      {"replay(state=bf16)", "replay(L=16, state=bf16)"},
      {"replay(state=bf16,L=4)", "replay(L=4, state=bf16)"},
      {"replay(L=1048576, state=fp16)", "replay(L=1048576, state=fp16)"},
      {"replay(L=16, state=bf16, ring=exact, order=closed, loop=closed)", "replay(L=16, state=bf16)"},
      {"replay(L=16, anchor=fp32, read=int8:row)", "replay(L=16, anchor=fp32, read=int8:row)"},
      {"replay(read=e4m3:row)", "replay(L=16, anchor=fp32, read=e4m3:row)"},
      {"replay(read=bf16, anchor=exact, L=2)", "replay(L=2, anchor=exact, read=bf16)"},
      {"replay(L=8, state=exact)", "replay(L=8, state=exact)"},
      // L, state or anchor, read, ring, order, loop, layers.
      {"replay(layers=3, loop=open, order=sequential, ring=bf16, read=int4:row, anchor=tf32, L=8)",
       "replay(L=8, anchor=tf32, read=int4:row, ring=bf16, order=sequential, loop=open, layers=3)"},
      {"replay(state=fp32, ring.x=bf16)", "replay(L=16, state=fp32, ring.x=bf16)"},
      {"replay(state=fp32, ring.v=e5m2, ring.k=fp16, ring=bf16)",
       "replay(L=16, state=fp32, ring=bf16, ring.k=fp16, ring.v=e5m2)"},
      {"replay(state=fp32, ring=bf16, ring.u=exact)", "replay(L=16, state=fp32, ring=bf16, ring.u=exact)"},
      {"replay(state=fp32, ring.B=bf16, ring.dt=fp16, ring.g=bf16, ring.beta=bf16)",
       "replay(L=16, state=fp32, ring.B=bf16, ring.beta=bf16, ring.dt=fp16, ring.g=bf16)"},
      // Ranges sorted and merged.
      {"eager(state=bf16, layers=7+0-2+3)", "eager(state=bf16, layers=0-3+7)"},
      {"eager(state=bf16, layers=5-5)", "eager(state=bf16, layers=5)"},
      {"eager(state=bf16, layers=4+4+4)", "eager(state=bf16, layers=4)"},
      {"eager(state=bf16, layers=0-9+2-3+12 + 11)", "eager(state=bf16, layers=0-9+11-12)"},
      {"eager(state=bf16, layers=0+2+4)", "eager(state=bf16, layers=0+2+4)"},
      {"eager(state=bf16, layers=0-9223372036854775807+5)", "eager(state=bf16, layers=0-9223372036854775807)"},
  };
  for (const auto& [text, canonical] : spellings) {
    ASSERT_EQ(Refusal(text), "");
    EXPECT_EQ(parse_policy(text).text(), canonical) << text;
    EXPECT_EQ(parse_policy(canonical), parse_policy(text)) << text;
  }
}

TEST(PolicyText, MeansWhatItSays) {
  EXPECT_EQ(parse_policy("exact"), exact_policy());
  EXPECT_EQ(parse_policy("eager(state=bf16)"), (Policy{Eager{F("bf16")}, Order::closed, Loop::closed, {}}));
  EXPECT_EQ(parse_policy("replay(L=3, state=fp16)"),
            (Policy{Replay{3, F("fp16"), {}, {}}, Order::closed, Loop::closed, {}}));
  const RingFormats ring{F("bf16"), {{"k", F("fp16")}}};
  EXPECT_EQ(parse_policy("replay(read=int8:row, ring=bf16, ring.k=fp16, order=sequential, loop=open, layers=7+0-2)"),
            (Policy{Replay{16, F("fp32"), F("int8:row"), ring}, Order::sequential, Loop::open, {{0, 2}, {7, 7}}}));
}

TEST(PolicyText, IsRefusedWithTheWordThatIsWrong) {
  const std::pair<const char*, const char*> texts[] = {
      {"", "unknown policy ''"},
      {"   ", "unknown policy ''"},
      {"exat", "'exat'"},
      {"Exact", "'Exact'"},
      {"egaer(state=bf16)", "'egaer'"},
      {"bf16", "'bf16'"},
      {"(state=bf16)", "unknown policy ''"},
      {"exact()", "exact takes no arguments"},
      {"exact(state=bf16)", "exact takes no arguments"},
      {"exact bf16", "'exact bf16'"},
      {"eager", "eager(...)"},
      {"replay", "replay(...)"},
      {"eager(state=bf16", "parentheses"},
      {"eager state=bf16)", "eager state=bf16)"},
      {"eager(state=bf16) L=4", "parentheses"},
      {"eager(state=bf16))", "bf16)"},
      {"eager(state=bf16) (x)", "bf16) (x"},
      {"eager()", "state"},
      {"replay()", "state"},
      {"replay(L=16)", "state"},
      {"replay(anchor=fp32)", "read"},
      {"replay(state=bf16, anchor=fp32)", "not both"},
      {"replay(state=bf16, read=fp32)", "not both"},
      {"eager(state=bf16, anchor=fp32)", "'anchor'"},
      {"eager(state=bf16, read=fp32)", "'read'"},
      {"eager(state=bf16, L=4)", "'L'"},
      {"eager(state=bf16, ring=bf16)", "ring"},
      {"eager(state=bf16, ring.x=bf16)", "ring"},
      {"eager(state=bf16, state=bf16)", "'state' is given twice"},
      {"replay(L=4, L=4, state=bf16)", "'L' is given twice"},
      {"replay(state=bf16, ring.x=bf16, ring.x=fp16)", "'ring.x' is given twice"},
      {"eager(stat=bf16)", "'stat'"},
      {"eager(State=bf16)", "'State'"},
      {"replay(l=4, state=bf16)", "'l'"},
      {"eager(=bf16)", "unknown argument ''"},
      {"eager(state=)", "'state' has no value"},
      {"eager(state)", "'state'"},
      {"eager(bf16)", "'bf16'"},
      {"eager(state=bf16,)", "key=value"},
      {"eager(,state=bf16)", "key=value"},
      {"eager(state=bf16 layers=3)", "bf16 layers=3"},
      {"replay(L=0, state=bf16)", "found 0"},
      {"replay(L=-1, state=bf16)", "found -1"},
      {"replay(L=1.5, state=bf16)", "'1.5'"},
      {"replay(L=x, state=bf16)", "'x'"},
      {"replay(L=4x, state=bf16)", "'4x'"},
      {"replay(L=1048577, state=bf16)", "found 1048577"},
      {"replay(L=99999999999999999999, state=bf16)", "99999999999999999999"},
      {"eager(state=bf17)", "'bf17'"},
      {"eager(state=int8)", "int8:row"},
      {"eager(state=bf16:rows)", "'rows'"},
      {"replay(state=bf16, ring=bf17)", "ring=bf17"},
      {"replay(state=bf16, ring.q=bf16)", "'q'"},
      {"replay(state=bf16, ring.=bf16)", "ring field ''"},
      {"replay(state=bf16, ring.k=int4)", "ring.k=int4"},
      {"replay(state=bf16, order=forward)", "'forward'"},
      {"replay(state=bf16, loop=ajar)", "'ajar'"},
      {"eager(state=bf16, layers=3-1)", "'3-1'"},
      {"eager(state=bf16, layers=x)", "'x'"},
      {"eager(state=bf16, layers=-1)", "'-1'"},
      {"eager(state=bf16, layers=1-)", "''"},
      {"eager(state=bf16, layers=1++2)", "''"},
      {"eager(state=bf16, layers=1-2-3)", "'2-3'"},
      {"eager(state=bf16, layers=)", "'layers' has no value"},
      {"eager(state=bf16, layers=99999999999999999999)", "99999999999999999999"},
  };
  for (const auto& [text, word] : texts) {
    const std::string message = Refusal(text);
    EXPECT_NE(message, "") << text << " was accepted";
    EXPECT_EQ(message.rfind("policy '", 0), 0U) << message;
    // What follows the quoted text must name the word, which the text itself often holds.
    const std::size_t reason = message.find("': ");
    ASSERT_NE(reason, std::string::npos) << message;
    EXPECT_NE(message.find(word, reason + 1), std::string::npos) << text << ": expected " << word << " in: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(PolicyText, RoundTripsEveryPolicy) {
  std::mt19937 random(7);
  const auto pick = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  const char* const formats[] = {"exact", "fp32", "tf32",     "fp16",     "bf16",
                                 "e4m3",  "e5m2", "bf16:row", "int8:row", "int4:row"};
  const char* const fields[] = {"x", "B", "dt", "k", "v", "u", "g", "beta"};
  const auto format = [&] { return F(formats[pick(std::size(formats))]); };
  for (int i = 0; i < 2000; ++i) {
    Policy policy;
    if (pick(3) == 0) {
      policy.schedule = Eager{format()};
    } else {
      Replay replay{static_cast<std::int64_t>(1 + pick(1 << pick(20))), format(), {}, {format(), {}}};
      if (pick(2) == 0) replay.read = format();
      for (std::size_t k = pick(4); k > 0; --k) replay.ring.fields[fields[pick(std::size(fields))]] = format();
      policy.schedule = replay;
    }
    policy.order = pick(2) == 0 ? Order::closed : Order::sequential;
    policy.loop = pick(2) == 0 ? Loop::closed : Loop::open;
    std::int64_t layer = 0;
    for (std::size_t k = pick(4); k > 0; --k) {  // sorted, with a layer in between, as ranges are kept
      const std::int64_t first = layer + static_cast<std::int64_t>(pick(5));
      const std::int64_t last = first + static_cast<std::int64_t>(pick(4));
      policy.layers.emplace_back(first, last);
      layer = last + 2;
    }
    const std::string text = policy.text();
    ASSERT_EQ(Refusal(text), "");
    EXPECT_EQ(parse_policy(text), policy) << text;
    EXPECT_EQ(parse_policy(text).text(), text);
  }
}

TEST(Policy, CoversTheLayersItNames) {
  const Policy all = parse_policy("eager(state=bf16)"), some = parse_policy("eager(state=bf16, layers=2-4+7)");
  for (std::int64_t layer = 0; layer < 10; ++layer) {
    EXPECT_TRUE(all.covers(layer));
    EXPECT_EQ(some.covers(layer), (layer >= 2 && layer <= 4) || layer == 7) << layer;
  }
}

TEST(Policy, IsExactWhereNothingIsRounded) {
  for (const char* text :
       {"exact", "replay(L=4, state=exact)", "replay(L=4, anchor=exact, read=exact, order=sequential)",
        "replay(L=4, state=exact, ring=exact, ring.k=exact)", "eager(state=exact, layers=3)"}) {
    EXPECT_TRUE(parse_policy(text).exact()) << text;
  }
  for (const char* text :
       {"eager(state=fp32)", "replay(L=4, state=bf16)", "replay(L=4, anchor=exact, read=fp32)",
        "replay(L=4, read=exact)", "replay(L=4, state=exact, ring=bf16)", "replay(L=4, state=exact, ring.g=fp32)"}) {
    EXPECT_FALSE(parse_policy(text).exact()) << text;
  }
}

TEST(RingFormats, GatesStayInFp32UnlessNamed) {
  const RingFormats exact, bf16{F("bf16"), {}}, mixed{F("bf16"), {{"dt", F("fp16")}, {"x", F("exact")}}},
      field{F("exact"), {{"g", F("bf16")}}};
  for (const char* activation : {"x", "B", "k", "v", "u"}) {
    EXPECT_EQ(exact.of(activation), F("exact"));
    EXPECT_EQ(bf16.of(activation), F("bf16"));
    EXPECT_EQ(field.of(activation), F("exact"));
  }
  for (const char* gate : {"dt", "g", "beta"}) {
    EXPECT_EQ(exact.of(gate), F("exact"));
    EXPECT_EQ(bf16.of(gate), F("fp32"));
  }
  EXPECT_EQ(mixed.of("dt"), F("fp16"));
  EXPECT_EQ(mixed.of("beta"), F("fp32"));
  EXPECT_EQ(mixed.of("x"), F("exact"));
  EXPECT_EQ(mixed.of("B"), F("bf16"));
  EXPECT_EQ(field.of("g"), F("bf16"));
  EXPECT_EQ(field.of("beta"), F("exact"));
  EXPECT_TRUE(exact.exact());
  EXPECT_FALSE(bf16.exact());
  EXPECT_FALSE(field.exact());
}

}  // namespace
}  // namespace replayssm
