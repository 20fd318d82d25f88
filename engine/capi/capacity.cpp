// The C ABI of the question what fits.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "capi/guard.h"
#include "capi/presets.h"
#include "checkpoint/capacity.h"

using kdt::check_argument;
using kdt::capi::Places;
using kdt::capi::guarded;

namespace {

using Json = nlohmann::ordered_json;

Json describe(const kdt_capacity_options& o, const Places& places, const kdt::Capacity& capacity) {
  Json weights = Json::object(), streams = Json::array(), steps = Json::array();
  for (const auto& [part, bytes] : capacity.weights) weights[kdt::part_name(part)] = bytes;
  for (const auto& [context, n] : capacity.streams) streams.push_back({{"context", context}, {"streams", n}});
  const auto milliseconds = [&](double bytes) {
    return o.bandwidth > 0 ? Json(bytes / o.bandwidth * 1e3) : Json(nullptr);
  };
  for (const kdt::Capacity::Step& step : capacity.steps)
    steps.push_back({{"nodes", step.nodes},
                     {"distinct_experts", step.experts},
                     {"expert_bytes", step.expert_bytes},
                     {"other_bytes", step.other_bytes},
                     {"kv_bytes", step.kv_bytes},
                     {"bytes", step.bytes()},
                     {"floor_ms", milliseconds(step.bytes())}});
  const auto draft_bytes = static_cast<double>(capacity.draft_bytes);
  return {{"model_path", places.model},
          {"draft_path", places.draft.empty() ? Json(nullptr) : Json(places.draft)},
          {"tp", o.tp},
          {"gpu_memory_bytes", o.gpu_memory},
          {"reserve_bytes", o.reserve},
          {"fits", capacity.kv_tokens > 0},
          {"weights",
           {{"bytes", capacity.weight_bytes},
            {"all_ranks_bytes", capacity.weight_bytes * o.tp},
            {"parts", weights}}},
          {"kv",
           {{"bytes_per_token", capacity.kv_token_bytes},
            {"draft_bytes_per_token", capacity.draft_kv_token_bytes},
            {"free_bytes", capacity.free_bytes},
            {"tokens", capacity.kv_tokens},
            {"tokens_without_drafter", capacity.kv_tokens_without_drafter}}},
          {"streams", streams},
          {"step_context", o.context},
          {"bandwidth", o.bandwidth > 0 ? Json(o.bandwidth) : Json(nullptr)},
          {"steps", steps},
          {"draft",
           places.draft.empty() ? Json(nullptr)
                                : Json{{"bytes", draft_bytes}, {"floor_ms", milliseconds(draft_bytes)}}}};
}

}  // namespace

extern "C" {

kdt_status kdt_capacity_options_init(kdt_capacity_options* options, uint32_t struct_size) {
  return guarded([&] {
    check_argument(options != nullptr, "options", "NULL", "a struct");
    check_argument(struct_size >= sizeof(kdt_capacity_options) && struct_size <= 4096, "struct_size",
                   std::to_string(struct_size), std::to_string(sizeof(kdt_capacity_options)));
    auto* bytes = reinterpret_cast<unsigned char*>(options);
    std::fill_n(bytes, struct_size, static_cast<unsigned char>(0));
    options->struct_size = struct_size;
    options->tp = 1;
    options->reserve = int64_t{4} << 30;
  });
}

kdt_status kdt_capacity_json(const kdt_capacity_options* given, char* json, int64_t capacity, int64_t* n) {
  return guarded([&] {
    kdt_capacity_options o;
    kdt::capi::copy_options(given, o);
    check_argument(std::isfinite(o.bandwidth) && o.bandwidth >= 0, "bandwidth", std::to_string(o.bandwidth),
                   "bytes a second, or 0");
    const Places places = kdt::capi::places_of(o.model_path, o.preset, o.draft_path);
    const kdt::ModelConfig config = kdt::load_model_config(places.model);
    std::unique_ptr<kdt::DraftConfig> draft;
    if (!places.draft.empty()) {
      draft = std::make_unique<kdt::DraftConfig>(kdt::load_draft_config(places.draft));
      kdt::check_draft_fits(*draft, config, places.draft);
    }
    const kdt::Capacity found = kdt::capacity_of(config, draft.get(), {o.tp, o.gpu_memory, o.reserve, o.context});
    const std::string text = describe(o, places, found).dump(-1, ' ', false, Json::error_handler_t::replace);
    kdt::capi::hand_out(text.data(), text.size(), json, capacity, n);
  });
}

}  // extern "C"
