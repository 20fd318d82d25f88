// The figures of a bench run as tables for people and as JSON for machines.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench_samples.h"
#include "table.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

std::string percent(double share) { return fixed(100 * share, 0) + "%"; }

// A field of the engine's info, as text; "?" when it has none.
std::string info_text(const Json& info, const char* key) {
  const auto found = info.find(key);
  if (found == info.end()) return "?";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

std::string speed_table(const BenchReport& report) {
  // Short stages are one column, so that a line fits a terminal; the JSON has all of them.
  Table table({"prompts", "mode", "tok/s", "median", "spread", "x off", "tokens", "nodes", "draft", "build", "verify", "rest"});
  for (size_t i = 0; i < report.rows.size(); ++i) {
    const BenchRow& row = report.rows[i];
    if (i > 0 && report.rows[i - 1].kind != row.kind) table.add_rule();
    const Spread speed = row.tokens_per_second();
    const BenchRow* off = report.off_row(row.kind);
    const Tally total = row.total();
    std::vector<std::string> cells = {row.kind,
                                      row.mode.name,
                                      fixed(speed.best, 0),
                                      fixed(speed.median, 0),
                                      percent(speed.spread),
                                      off ? fixed(row.ratio_to(*off), 2) : "-",
                                      fixed(total.per_round(total.committed), 2),
                                      fixed(total.per_round(static_cast<double>(total.draft_nodes)), 1)};
    double rest = 0;
    for (size_t stage = KDT_STAGE_PREFILL + 1; stage < total.stage_ms.size(); ++stage) {
      const double us = 1000 * total.per_round(total.stage_ms[stage]);
      if (stage > KDT_STAGE_VERIFY) rest += us;
      else cells.push_back(fixed(us, 0));
    }
    cells.push_back(fixed(rest, 0));
    table.add(cells);
  }
  return table.render(2);
}

std::string depth_table(const BenchReport& report) {
  size_t n_depths = 0;
  for (const BenchRow& row : report.rows) n_depths = std::max(n_depths, row.total().accepted_by_depth.size());
  std::vector<std::string> header = {"prompts", "mode"};
  for (size_t depth = 1; depth <= n_depths; ++depth) header.push_back("depth " + std::to_string(depth));
  Table table(header);
  for (const BenchRow& row : report.rows) {
    const Tally total = row.total();
    if (total.drafted_rounds == 0) continue;
    std::vector<std::string> cells = {row.kind, row.mode.name};
    for (const int64_t n : total.accepted_by_depth) cells.push_back(percent(total.per_round(static_cast<double>(n))));
    table.add(cells);
  }
  return table.empty() ? "" : "Rounds that accepted at least this depth\n" + table.render(2) + "\n";
}

std::vector<double> prefill_speeds(const PrefillFigures& prefill) {
  std::vector<double> speeds;
  for (const double ms : prefill.first_token_ms) {
    if (ms > 0) speeds.push_back(1000 * static_cast<double>(prefill.tokens) / ms);
  }
  return speeds;
}

std::string prefill_line(const PrefillFigures& prefill) {
  if (prefill.first_token_ms.empty()) return "";
  const Spread ms = spread_of(prefill.first_token_ms, Better::smaller);
  const Spread speed = spread_of(prefill_speeds(prefill), Better::larger);
  return "prefill of " + counted(prefill.tokens, "token") + ": first token after " + fixed(ms.best, 1) +
         " ms (median " + fixed(ms.median, 1) + "), " + fixed(speed.best, 0) + " tok/s (median " +
         fixed(speed.median, 0) + ")\n";
}

Json spread_json(const std::vector<double>& values, Better better) {
  const Spread spread = spread_of(values, better);
  return {{"best", spread.best}, {"median", spread.median}, {"spread", spread.spread}, {"values", values}};
}

Json row_json(const BenchReport& report, const BenchRow& row) {
  const Tally total = row.total();
  std::vector<double> speeds;
  for (const Tally& repeat : row.repeats) speeds.push_back(repeat.tokens_per_second());
  Json stages = Json::object();
  for (size_t stage = KDT_STAGE_PREFILL + 1; stage < total.stage_ms.size(); ++stage) {
    stages[kdt_stage_name(static_cast<int32_t>(stage))] = 1000 * total.per_round(total.stage_ms[stage]);
  }
  std::vector<double> depths;
  for (const int64_t n : total.accepted_by_depth) depths.push_back(total.per_round(static_cast<double>(n)));
  const BenchRow* off = report.off_row(row.kind);
  Json out;
  out["kind"] = row.kind;
  out["mode"] = row.mode.name;
  out["tokens_per_second"] = spread_json(speeds, Better::larger);
  out["ratio_to_off"] = off ? Json(row.ratio_to(*off)) : Json(nullptr);
  out["rounds"] = total.rounds;
  out["drafted_rounds"] = total.drafted_rounds;
  out["tokens_per_round"] = total.per_round(total.committed);
  out["nodes_per_round"] = total.per_round(static_cast<double>(total.draft_nodes));
  out["us_per_round"] = stages;
  out["accepted_by_depth"] = depths;
  return out;
}

}  // namespace

std::string bench_text(const BenchReport& report, const BenchSettings& settings, const Json& info) {
  std::string out = "model " + info_text(info, "model_path") + ", backend " + info_text(info, "backend") + " (" +
                    info_text(info, "cpu_target") + "), threads " + info_text(info, "threads") + "\n";
  out += counted(static_cast<int64_t>(settings.n_prompts), "prompt") + ", " + counted(settings.max_tokens, "token") + " each" +
         (settings.ignore_eos ? " (stop tokens ignored)" : ", or to the stop token") + ", repeats " +
         std::to_string(settings.repeat) + ", temperature " + fixed(settings.temperature, 2) + "\n\n";
  if (!report.rows.empty()) {
    out += "Speed of decoding: best and median of the repeats; tokens, nodes and microseconds of stages a round\n" + speed_table(report) + "\n" + depth_table(report);
  }
  out += prefill_line(report.prefill);
  out += "the run took " + fixed(report.seconds, 1) + " s\n";
  return out + "identical: " + (report.difference.empty() ? "yes" : "no: " + report.difference) + "\n";
}

Json bench_json(const BenchReport& report, const BenchSettings& settings, const Json& info) {
  Json out;
  out["schema_version"] = 1;
  for (const char* key : {"model_path", "draft_path", "backend", "cpu_target", "threads"}) {
    const auto found = info.find(key);
    out[key] = found == info.end() ? Json(nullptr) : *found;
  }
  out["prompts"] = settings.n_prompts;
  out["max_tokens"] = settings.max_tokens;
  out["repeat"] = settings.repeat;
  out["temperature"] = settings.temperature;
  out["seed"] = settings.seed;
  out["ignore_eos"] = settings.ignore_eos;
  out["seconds"] = report.seconds;
  out["identical"] = report.difference.empty();
  out["rows"] = Json::array();
  for (const BenchRow& row : report.rows) out["rows"].push_back(row_json(report, row));
  out["prefill"] = nullptr;
  if (!report.prefill.first_token_ms.empty()) {
    out["prefill"] = {{"tokens", report.prefill.tokens},
                      {"first_token_ms", spread_json(report.prefill.first_token_ms, Better::smaller)},
                      {"tokens_per_second", spread_json(prefill_speeds(report.prefill), Better::larger)}};
  }
  return out;
}

}  // namespace kdt
