// The C ABI of rehearsals: options to a plan, figures to JSON.
#include "rehearsal/rehearsal.h"

#include <algorithm>

#include "base/error.h"
#include "capi/arguments.h"
#include "capi/backend.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/presets.h"
#include "rehearsal/report.h"

using kdt::check_argument;
using kdt::capi::guarded;
using kdt::capi::in_range;

namespace {

constexpr int64_t kMostEntries = 64;

template <class T, class Check>
auto list_of(const char* field, const T* values, int64_t n, int64_t least, const Check& check) {
  in_range((std::string("n_") + field).c_str(), n, least, kMostEntries);
  check_argument(values != nullptr || n == 0, field, "NULL", "an array");
  std::vector<decltype(check(values[0]))> list;
  for (int64_t i = 0; i < n; ++i) list.push_back(check(values[i]));
  return list;
}

kdt::RehearsalPlan plan_of(const kdt_rehearsal_options& o) {
  const kdt::capi::Places places = kdt::capi::places_of(o.model_path, o.preset, o.draft_path);
  kdt::RehearsalPlan plan;
  plan.where = places.model;
  plan.model = kdt::load_model_config(places.model);
  if (!places.draft.empty()) {
    plan.draft = kdt::load_draft_config(places.draft);
    kdt::check_draft_fits(*plan.draft, plan.model, places.draft);
  }
  plan.tp = in_range("tp", o.tp, 1, 64);
  plan.rank = o.rank;
  plan.layers = o.layers;
  plan.replays = in_range("replays", o.replays, 1, 1000);
  plan.routed = in_range("routed", o.routed, 0, 1) == 1;
  plan.seconds = kdt::capi::real_in_range("seconds", o.seconds, 0, 1e6);
  const auto within = [](const char* field, int64_t least, int64_t most) {
    return [=](int32_t value) { return in_range(field, value, least, most); };
  };
  plan.nodes = list_of("nodes", o.nodes, o.n_nodes, 1, within("nodes", 1, 1024));
  plan.prefixes = list_of("prefixes", o.prefixes, o.n_prefixes, 1, within("prefixes", 1, INT32_MAX));
  plan.streams = list_of("streams", o.streams, o.n_streams, 1, within("streams", 1, 64));
  plan.overlaps = list_of("overlaps", o.overlaps, o.n_overlaps, 1,
                          [](double value) { return kdt::capi::real_in_range("overlaps", value, 0, 1); });
  plan.round_nodes = list_of("round_nodes", o.round_nodes, o.n_round_nodes, 0, within("round_nodes", 1, 1024));
  plan.op_nodes = list_of("op_nodes", o.op_nodes, o.n_op_nodes, 0, within("op_nodes", 1, 1024));
  const double link = kdt::capi::real_in_range("link_gbps", o.link_gbps, 0, 1e6);
  const double each = kdt::capi::real_in_range("collective_us", o.collective_us, 0, 1e6);
  check_argument(link > 0 || each == 0, "collective_us", std::to_string(each), "0 without link_gbps");
  if (link > 0) plan.collectives = kdt::Collectives{plan.tp, each * 1e-6, link * 1e9};
  if (o.progress) plan.progress = &o.progress->progress;
  plan.prompts = list_of("prompts", o.prompts, o.n_prompts, 0, within("prompts", 1, INT32_MAX));
  plan.chunks = list_of("chunks", o.chunks, o.n_chunks, 0, within("chunks", 1, 65536));
  return plan;
}

}  // namespace

extern "C" {

kdt_status kdt_rehearsal_options_init(kdt_rehearsal_options* options, uint32_t struct_size) {
  return guarded([&] {
    check_argument(options != nullptr, "options", "NULL", "a struct");
    check_argument(struct_size >= sizeof(kdt_rehearsal_options) && struct_size <= 4096, "struct_size",
                   std::to_string(struct_size), std::to_string(sizeof(kdt_rehearsal_options)));
    std::fill_n(reinterpret_cast<unsigned char*>(options), struct_size, static_cast<unsigned char>(0));
    options->struct_size = struct_size;
    options->tp = 1;
    options->replays = 9;
  });
}

kdt_status kdt_rehearse(const kdt_rehearsal_options* given, const char** json) {
  return guarded([&] {
    thread_local std::string text;
    check_argument(json != nullptr, "json", "NULL", "a place for the text");
    kdt_rehearsal_options o;
    kdt::capi::copy_options(given, o);
    const kdt::RehearsalPlan plan = plan_of(o);
    kdt_engine_options engine{};
    engine.backend = o.backend;
    engine.device = o.device;
    engine.threads = o.threads;
    engine.cpu_target = o.cpu_target;
    const auto make_ops = [make = kdt::capi::choose_backend(engine)] { return make(nullptr); };
    text = kdt::rehearsal_json(plan, kdt::rehearse(plan, make_ops));
    *json = text.c_str();
  });
}

}  // extern "C"
