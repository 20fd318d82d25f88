#include "checkpoint/rope_config.h"

#include "checkpoint/config_limits.h"

namespace kdt {
namespace {

// "type" is the older key, "rope_type" the newer; checkpoints carry either or both.
std::string scaling_type(const Fields& scaling) {
  const char* key = scaling.has("rope_type") ? "rope_type" : "type";
  const std::string type = scaling.text(key);
  if (type != "default" && type != "yarn" && type != "deepseek_yarn") {
    scaling.refuse(Status::unsupported, key, "yarn, deepseek_yarn or default");
  }
  if (scaling.has("type") && scaling.text("type") != type) {
    scaling.refuse(Status::bad_file, "type", "the same as rope_type, " + type);
  }
  return type;
}

std::optional<Yarn> parse_scaling(const Fields& scaling) {
  if (scaling_type(scaling) == "default") return std::nullopt;
  scaling.only_absent("attention_factor");
  scaling.only_boolean("truncate", true);
  Yarn yarn;
  yarn.factor = scaling.number("factor", 1, 1e6);
  yarn.original_context = scaling.integer("original_max_position_embeddings", 1, kMaxContext);
  yarn.beta_fast = scaling.number_or("beta_fast", 32, 1e-3, 1e6);
  yarn.beta_slow = scaling.number_or("beta_slow", 1, 1e-3, 1e6);
  if (yarn.beta_fast < yarn.beta_slow) scaling.refuse(Status::bad_file, "beta_fast", "beta_slow or more");
  yarn.mscale = scaling.number_or("mscale", 1, 0, 100);
  yarn.mscale_all_dim = scaling.number_or("mscale_all_dim", 0, 0, 100);
  return yarn;
}

}  // namespace

Rope parse_rope(const Fields& config) {
  // A base of 1 would rotate every pair alike.
  constexpr double kMinTheta = 1.001, kMaxTheta = 1e12;
  if (!config.has("rope_parameters")) {
    const double theta = config.number("rope_theta", kMinTheta, kMaxTheta);
    if (!config.has("rope_scaling")) return {theta, std::nullopt};
    return {theta, parse_scaling(config.object("rope_scaling"))};
  }
  const Fields parameters = config.object("rope_parameters");
  const Fields& theta_at = parameters.has("rope_theta") ? parameters : config;
  const double theta = theta_at.number("rope_theta", kMinTheta, kMaxTheta);
  return {theta, parse_scaling(parameters)};
}

}  // namespace kdt
