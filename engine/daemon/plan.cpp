// kdtree-run plan: what fits on the GPUs of a box, and the least that a step reads, without touching weights.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "client.h"
#include "commands.h"
#include "failure.h"
#include "flags.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kSize = "a size above 0 such as 139GiB or 141GB, up to 2^50 bytes";

// "139", "139GiB" or "141GB": bytes. Plain numbers are GiB.
ValueForm memory_form(int64_t& target, bool may_be_zero) {
  const char* expected = may_be_zero ? "a size such as 4GiB or 0, up to 2^50 bytes" : kSize;
  return {"SIZE", expected, [&target, may_be_zero](const std::string& text) {
            double value = 0;
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            const std::string unit(stop, end);
            if (error != std::errc() || !(value >= 0) || (unit != "" && unit != "GiB" && unit != "GB")) return false;
            const double bytes = std::floor(value * (unit == "GB" ? 1e9 : 0x1p30));
            if (bytes > 0x1p50 || (bytes < 1 && !may_be_zero)) return false;
            target = static_cast<int64_t>(bytes);
            return true;
          }};
}

struct PlanCommand {
  explicit PlanCommand(CLI::App& app)
      : flags(app, "plan", "Say what fits on the GPUs of a box and what a step reads, from the configs alone") {}

  Flags flags;
  std::string model, preset, draft;
  int32_t tp = 1;
  int64_t gpu_memory = 0, reserve = int64_t{4} << 30, context = 0;
  double bandwidth = 0;   // GB/s
  bool json = false;

  int run() const;

 private:
  Json ask() const;
};

Json PlanCommand::ask() const {
  if (model.empty() == preset.empty())
    fail_usage("--model and --preset", model.empty() ? "neither" : "both", "one of them");
  if (gpu_memory == 0) fail_usage("--gpu-memory", "not given", kSize);
  kdt_capacity_options options;
  check(kdt_capacity_options_init(&options, sizeof options));
  options.tp = tp;
  options.model_path = model.empty() ? nullptr : model.c_str();
  options.preset = preset.empty() ? nullptr : preset.c_str();
  options.draft_path = draft.empty() ? nullptr : draft.c_str();
  options.gpu_memory = gpu_memory;
  options.reserve = reserve;
  options.context = context;
  options.bandwidth = bandwidth * 1e9;
  int64_t n = 0;
  std::string text(1 << 16, '\0');
  kdt_status status = kdt_capacity_json(&options, text.data(), static_cast<int64_t>(text.size()), &n);
  if (status == KDT_ERR_BUFFER_TOO_SMALL) {
    text.resize(static_cast<size_t>(n));
    status = kdt_capacity_json(&options, text.data(), n, &n);
  }
  check(status);
  text.resize(static_cast<size_t>(n));
  return Json::parse(text);
}

std::string bytes_cell(const Json& bytes) { return byte_count(bytes.get<double>()); }
std::string ms_cell(const Json& ms) { return ms.is_null() ? "-" : fixed(ms.get<double>(), 2); }

std::string memory_table(const Json& plan) {
  Table table({"one of " + counted(plan["tp"].get<int64_t>(), "rank"), "bytes"});
  table.add({"GPU memory", bytes_cell(plan["gpu_memory_bytes"])});
  table.add({"reserved (context, graphs, activations)", bytes_cell(plan["reserve_bytes"])});
  for (const auto& [part, bytes] : plan["weights"]["parts"].items()) table.add({"weights: " + part, bytes_cell(bytes)});
  table.add({"weights in all", bytes_cell(plan["weights"]["bytes"])});
  const Json& kv = plan["kv"];
  table.add({kv["free_bytes"].get<double>() < 0 ? "missing" : "left for KV",
             byte_count(std::abs(kv["free_bytes"].get<double>()))});
  table.add_rule();
  table.add({"KV of a token", bytes_cell(kv["bytes_per_token"])});
  table.add({"drafter's KV of a token", bytes_cell(kv["draft_bytes_per_token"])});
  if (plan["fits"].get<bool>()) table.add({"KV tokens", kv["tokens"].dump()});
  if (kv["tokens_without_drafter"].get<int64_t>() > 0)
    table.add({"KV tokens without the drafter", kv["tokens_without_drafter"].dump()});
  if (!plan["fits"].get<bool>()) return table.render(1);
  for (const Json& row : plan["streams"])
    table.add({"streams of " + row["context"].dump() + " tokens", row["streams"].dump()});
  return table.render(1);
}

std::string verdict(const Json& plan) {
  const Json& kv = plan["kv"];
  if (plan["fits"].get<bool>()) {
    const auto tokens = kv["tokens"].get<int64_t>(), context = plan["streams"].back()["context"].get<int64_t>();
    if (tokens >= context) return "It fits.";
    return "It fits, with streams of at most " + std::to_string(tokens) + " of the model's " + std::to_string(context) + " tokens.";
  }
  const double free = kv["free_bytes"].get<double>();
  const std::string taken = bytes_cell(plan["weights"]["bytes"]) + " of weights and " + bytes_cell(plan["reserve_bytes"]) +
                            " reserved ";
  const std::string without = kv["tokens_without_drafter"].get<int64_t>() > 0 ? " Without the drafter it does." : "";
  if (free >= 0) return "It does not fit: " + taken + "leave " + byte_count(free) + " for KV, less than a page." + without;
  return "It does not fit: " + taken + "are " + byte_count(-free) + " more than the GPU's " +
         bytes_cell(plan["gpu_memory_bytes"]) + "." + without;
}

std::string step_table(const Json& plan) {
  Table table({"nodes", "experts a layer", "experts", "other weights", "KV", "read by a rank", "floor ms"});
  for (const Json& step : plan["steps"])
    table.add({step["nodes"].dump(), fixed(step["distinct_experts"].get<double>(), 1), bytes_cell(step["expert_bytes"]),
               bytes_cell(step["other_bytes"]), bytes_cell(step["kv_bytes"]), bytes_cell(step["bytes"]),
               ms_cell(step["floor_ms"])});
  const Json& draft = plan["draft"];
  if (!draft.is_null()) {
    table.add_rule();
    table.add({"draft", "", "", "", "", bytes_cell(draft["bytes"]), ms_cell(draft["floor_ms"])});
  }
  return table.render(0);
}

int PlanCommand::run() const {
  const Json plan = ask();
  if (json) {
    write_stdout(plan.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    return kExitOk;
  }
  std::string text = plan["model_path"].get<std::string>();
  if (!plan["draft_path"].is_null()) text += " with " + plan["draft_path"].get<std::string>();
  text += "\n" + verdict(plan) + "\n\n" + memory_table(plan) + "\nBytes a step must read (uniform routing, one stream of " +
          counted(plan["step_context"].get<int64_t>(), "token") + ")\n\n" + step_table(plan);
  write_stdout(text);
  return kExitOk;
}

}  // namespace

Command add_plan(CLI::App& app) {
  const auto command = std::make_shared<PlanCommand>(app);
  Flags& declare = command->flags;
  declare.value("--model", text_form(command->model, "DIR"), "none", "Directory with the config.json of a target");
  declare.value("--preset", text_form(command->preset, "NAME"), "none",
                "A published config instead: kimi-k2.6, with its drafter");
  declare.value("--draft", text_form(command->draft, "DIR"), "the preset's, else none",
                "Directory with a drafter's config.json");
  declare.value("--tp", integer_form(command->tp, 1, 64), "1", "Tensor-parallel ranks, one GPU each");
  declare.value("--gpu-memory", memory_form(command->gpu_memory, false), "none, must be given",
                "Memory of one GPU; a plain number is GiB");
  declare.value("--reserve", memory_form(command->reserve, true), "4GiB", "Memory of it for everything but weights and KV");
  declare.value("--context", integer_form(command->context, 0, kMaxInt32), "0",
                "Tokens of the stream whose KV a step reads");
  declare.value("--bandwidth", number_form(command->bandwidth, 0, 1e6), "none",
                "GB/s that a GPU reads, for the least time of a step");
  declare.toggle("--json", command->json, "Print one JSON object");
  return command_of(command);
}

}  // namespace kdt
