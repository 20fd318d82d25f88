// The C ABI of watching and stopping an engine: progress of loading, figures, health, drain.
#include <cstring>

#include "base/error.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "runtime/figures.h"

using kdt::Status;
using kdt::check_argument;
using kdt::capi::engine_of;
using kdt::capi::guarded;
using kdt::capi::hand_out;

extern "C" {

kdt_status kdt_load_progress_create(kdt_load_progress** out) {
  return guarded([&] {
    check_argument(out != nullptr, "out", "NULL", "a place for the handle");
    *out = new kdt_load_progress;
  });
}

kdt_status kdt_load_progress_read(const kdt_load_progress* progress, int64_t* done, int64_t* total) {
  return guarded([&] {
    check_argument(progress != nullptr && done != nullptr && total != nullptr, "progress", "NULL",
                   "a progress and places for its two numbers");
    *total = progress->progress.total;
    *done = progress->progress.done;
  });
}

void kdt_load_progress_destroy(kdt_load_progress* progress) { delete progress; }

kdt_status kdt_engine_figures(kdt_engine* engine, const char** names, double* values, int64_t capacity, int64_t* n) {
  return guarded([&] {
    const auto figures = engine_of(engine).figures();
    std::vector<const char*> all_names;
    std::vector<double> all_values;
    for (const kdt::Figure& figure : figures) {
      all_names.push_back(engine->name_of(figure.series));
      all_values.push_back(figure.value);
    }
    hand_out(all_names.data(), all_names.size(), names, capacity, n);
    hand_out(all_values.data(), all_values.size(), values, capacity, n);
  });
}

kdt_status kdt_figure_families(const char** names, int32_t* kinds, const char** helps, int64_t capacity, int64_t* n) {
  return guarded([&] {
    std::vector<const char*> all_names, all_helps;
    std::vector<int32_t> all_kinds;
    for (const kdt::FigureFamily& family : kdt::figure_families()) {
      constexpr int32_t kKinds[] = {KDT_FIGURE_COUNTER, KDT_FIGURE_GAUGE, KDT_FIGURE_HISTOGRAM};
      all_names.push_back(family.name);
      all_kinds.push_back(kKinds[static_cast<size_t>(family.kind)]);
      all_helps.push_back(family.help);
    }
    hand_out(all_names.data(), all_names.size(), names, capacity, n);
    hand_out(all_kinds.data(), all_kinds.size(), kinds, capacity, n);
    hand_out(all_helps.data(), all_helps.size(), helps, capacity, n);
  });
}

kdt_status kdt_engine_health(kdt_engine* engine, kdt_health* health) {
  return guarded([&] {
    check_argument(health != nullptr, "health", "NULL", "a struct");
    check_argument(health->struct_size >= sizeof(uint32_t), "struct_size", std::to_string(health->struct_size),
                   "sizeof(kdt_health)");
    const kdt::Health from = engine_of(engine).health();
    const kdt_health known{health->struct_size, from.failed, from.draining, static_cast<int32_t>(from.running),
                           static_cast<int32_t>(from.waiting), from.seconds_since_round,
                           from.failed ? engine_of(engine).failure().c_str() : ""};
    std::memcpy(health, &known, std::min<size_t>(health->struct_size, sizeof known));
  });
}

kdt_status kdt_engine_drain(kdt_engine* engine, int32_t timeout_ms) {
  return guarded([&] {
    check_argument(timeout_ms >= -1, "timeout_ms", std::to_string(timeout_ms), "-1 or more");
    engine_of(engine).drain(timeout_ms);
  });
}

kdt_status kdt_engine_cancel_all(kdt_engine* engine) {
  return guarded([&] { engine_of(engine).cancel_all(); });
}

kdt_status kdt_engine_reset_prefix_cache(kdt_engine* engine, int64_t* n_pages) {
  return guarded([&] {
    const int64_t forgotten = engine_of(engine).reset_prefix_cache();
    if (n_pages) *n_pages = forgotten;
  });
}

}  // extern "C"
