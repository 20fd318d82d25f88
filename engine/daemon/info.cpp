// kdtree-run info: what was loaded, and how.
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "client.h"
#include "commands.h"
#include "failure.h"
#include "options.h"
#include "output.h"
#include "table.h"

namespace kdt {
namespace {

using Json = nlohmann::ordered_json;

// Longer arrays are shown by their length.
constexpr size_t kLongestList = 12;

struct InfoCommand {
  explicit InfoCommand(CLI::App& app)
      : flags(app, "info", "Load the model and print what it is: config, sizes, backend, costs") {}

  Flags flags;
  EngineFlags engine;
  bool list_devices = false;
  bool json = false;

  int run() const;
};

// `key` with those of the objects around it: "bytes.weights".
std::string cell(const std::string& key, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "none";
  if (value.is_number() && key.rfind("bytes.", 0) == 0) {
    const char* what = key == "bytes.cache_reserved" ? ", for the KV pages; memory as streams fill them" : "";
    return value.dump() + " (" + byte_count(value.get<double>()) + what + ")";
  }
  if (value.is_number_float()) return significant(value.get<double>(), 5);
  if (value.is_array() && value.size() > kLongestList) return "[" + std::to_string(value.size()) + " values]";
  if (value.is_array()) {
    std::string items;
    for (const Json& item : value) items += (items.empty() ? "" : ", ") + cell(key, item);
    return "[" + items + "]";
  }
  return value.dump();
}

void add_rows(Table& table, const Json& object, const std::string& prefix) {
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      add_rows(table, value, prefix + key + ".");
    } else {
      table.add({prefix + key, cell(prefix + key, value)});
    }
  }
}

std::string ms_cell(const Json& ms) { return fixed(ms.get<double>(), 3); }

// What the engine measured and the controller decides by: a verify pass by its rows, a draft by its depths. Empty where
// nothing was measured.
std::string cost_table(const Json& info) {
  const Json &rounds = info["round_costs"], &drafts = info["draft_ms_by_depth"];
  if (rounds.empty()) return "";
  Table table({"rows verified", "ms", "", "depths drafted", "ms"});
  for (size_t i = 0; i < std::max(rounds.size(), drafts.size()); ++i) {
    const bool verifies = i < rounds.size(), drafted = i < drafts.size();
    table.add({verifies ? rounds[i]["rows"].dump() : "", verifies ? ms_cell(rounds[i]["verify_ms"]) : "",
               verifies && rounds[i]["estimated"].get<bool>() ? "est." : "",
               drafted ? std::to_string(i + 1) : "", drafted ? ms_cell(drafts[i]) : ""});
  }
  return "\n" + table.render(0);
}

int print_devices(bool json) {
  const Json found = Json::parse(kdt_devices_json());
  if (json) {
    write_stdout(found.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    return kExitOk;
  }
  Table table({"device", "name", "capability", "memory", "free", "usable"});
  for (const Json& d : found["devices"])
    table.add({d["index"].dump(), d["name"].get<std::string>(), d["compute_capability"].get<std::string>(),
               byte_count(d["memory_bytes"].get<double>()), byte_count(d["free_bytes"].get<double>()),
               d["usable"].get<bool>() ? "yes" : "no: " + d["reason"].get<std::string>()});
  write_stdout(found["devices"].empty() ? "no CUDA devices\n" + cell("", found["error"]) + "\n" : table.render(3));
  return kExitOk;
}

int InfoCommand::run() const {
  if (list_devices) return print_devices(json);
  if (is_follower()) return follow(engine.to_options());
  const Engine loaded(engine.to_options());
  const Json info = loaded.info();
  if (json) {
    write_stdout(info.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    return kExitOk;
  }
  Table table;
  Json rows = info;
  if (!info["round_costs"].empty()) {   // a table of their own
    rows.erase("round_costs");
    rows.erase("draft_ms_by_depth");
  }
  add_rows(table, rows, "");
  write_stdout(std::string("kdtree-engine ") + kdt_version() + "\n" + table.render(2) + cost_table(info));
  return kExitOk;
}

}  // namespace

Command add_info(CLI::App& app) {
  const auto command = std::make_shared<InfoCommand>(app);
  command->engine.declare(command->flags);
  command->flags.toggle("--list-devices", command->list_devices, "List the CUDA devices instead; loads nothing");
  command->flags.toggle("--json", command->json, "Print the engine's JSON object");
  return command_of(command);
}

}  // namespace kdt
