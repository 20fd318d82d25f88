#include "rehearsal/replay_costs.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"

namespace kdt {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostBytes = 16 << 20;
constexpr double kMs = 1e-3;

const auto kBefore = [](const auto& point, double at) { return point.first < at; };

class Report {
 public:
  Report(std::string path, Json json) : path_(std::move(path)), json_(std::move(json)) {}

  const Json& list(const char* name) const {
    const auto found = json_.is_object() ? json_.find(name) : json_.end();
    if (found == json_.end() || !found->is_array() || found->empty())
      wrong(name, "a list of measurements, as bench --synthetic --json has it");
    return *found;
  }
  double number(const Json& of, const char* name) const {
    const auto found = of.is_object() ? of.find(name) : of.end();
    if (found == of.end() || !found->is_number() || !std::isfinite(found->get<double>()) || found->get<double>() < 0)
      wrong(name, "a number, 0 or more");
    return found->get<double>();
  }
  [[noreturn]] void wrong(const char* name, const char* expected) const { fail(Status::bad_file, path_, name, expected); }

 private:
  const std::string path_;
  const Json json_;
};

}  // namespace

void CostCurve::add(double at, double seconds) {
  const auto place = std::lower_bound(points_.begin(), points_.end(), at, kBefore);
  if (place == points_.end() || place->first != at) points_.insert(place, {at, seconds});
}

double CostCurve::operator()(double at) const {
  if (points_.size() < 2) return points_.front().second;
  const auto right = std::lower_bound(points_.begin() + 1, points_.end() - 1, at, kBefore);
  const auto left = right - 1;
  const double part = (at - left->first) / (right->first - left->first);
  return std::max(0.0, left->second + part * (right->second - left->second));
}

ReplayCosts load_replay_costs(const std::string& path) {
  const Report report(path, Json::parse(read_text_file(path, kMostBytes), nullptr, false));
  ReplayCosts costs;
  const Json& steps = report.list("steps");
  const double prefix = report.number(steps.front(), "prefix"), overlap = report.number(steps.front(), "overlap");
  for (const Json& step : steps)
    if (report.number(step, "prefix") == prefix && report.number(step, "overlap") == overlap)
      costs.verify.add(report.number(step, "rows"), kMs * report.number(step, "ms"));
  for (const Json& round : report.list("rounds")) {
    if (report.number(round, "prefix") != prefix || report.number(round, "nodes") < 2) continue;
    const double streams = report.number(round, "streams");
    const auto stage = [&](const char* name) {
      const auto stages = round.find("stages_ms");
      if (stages == round.end()) report.wrong("stages_ms", "an object");
      return kMs * report.number(*stages, name);
    };
    costs.draft.add(streams, stage("draft") + stage("build"));
    costs.finish.add(streams, stage("accept") + stage("commit"));
  }
  if (costs.draft.empty()) report.wrong("rounds", "one with a draft behind the first prefix");
  return costs;
}

}  // namespace kdt
