#include "openai_fields.h"

#include <cmath>
#include <utility>

#include "nearest.h"

namespace kdt::openai {
namespace {

// The shortest form: 2, 0.5.
std::string text_of(double number) {
  return number == std::floor(number) && std::abs(number) < 1e15 ? std::to_string(static_cast<int64_t>(number))
                                                                 : Json(number).dump();
}

// JSON Schema counts 2.0 as an integer, and so do clients whose numbers are all floats.
std::optional<int64_t> integer_of(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    return number <= INT64_MAX ? std::optional<int64_t>(static_cast<int64_t>(number)) : std::nullopt;
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  const double number = value.get<double>();
  // An integer beyond 64 bits was read as the nearest double, which may be the border.
  if (number != std::floor(number) || number <= -0x1p63 || number >= 0x1p63) return std::nullopt;
  return static_cast<int64_t>(number);
}

}  // namespace

ApiError invalid_type(const std::string& name, const Json& value, std::string_view expected) {
  ApiError error = invalid_value(name, shown(value), expected);
  error.code = "invalid_type";
  return error;
}

int64_t read_integer(const std::string& name, const Json& value, int64_t low, int64_t high) {
  const std::string expected = "an integer from " + std::to_string(low) + " to " + std::to_string(high);
  if (!value.is_number()) throw invalid_type(name, value, expected);
  const std::optional<int64_t> number = integer_of(value);
  if (!number || *number < low || *number > high) throw invalid_value(name, shown(value), expected);
  return *number;
}

double read_number(const std::string& name, const Json& value, double low, double high, bool above_low) {
  const std::string expected = "a number " + std::string(above_low ? "above " : "from ") + text_of(low) +
                               (above_low ? " and at most " : " to ") + text_of(high);
  if (!value.is_number()) throw invalid_type(name, value, expected);
  const double number = value.get<double>();
  if (!(above_low ? number > low : number >= low) || !(number <= high))
    throw invalid_value(name, shown(value), expected);
  return number;
}

bool read_boolean(const std::string& name, const Json& value) {
  if (!value.is_boolean()) throw invalid_type(name, value, "true or false");
  return value.get<bool>();
}

const std::string& read_string(const std::string& name, const Json& value) {
  if (!value.is_string()) throw invalid_type(name, value, "a string");
  return value.get_ref<const std::string&>();
}

const Json& read_array(const std::string& name, const Json& value, int64_t most) {
  if (!value.is_array()) throw invalid_type(name, value, "an array");
  if (static_cast<int64_t>(value.size()) > most) {
    throw invalid_value(name, "an array of " + std::to_string(value.size()),
                        "at most " + std::to_string(most) + " items");
  }
  return value;
}

const Json& read_members(const std::string& name, const Json& value) {
  if (!value.is_object()) throw invalid_type(name, value, "an object");
  return value;
}

std::vector<int32_t> read_ids(const std::string& name, const Json& value, int64_t most, const ServedModel& model) {
  std::vector<int32_t> ids;
  const int64_t high = model.vocab_size - 1;
  ids.reserve(read_array(name, value, most).size());
  for (const Json& id : value) {
    // A body may hold millions: only a bad one is worth its name.
    const std::optional<int64_t> number = id.is_number() ? integer_of(id) : std::nullopt;
    const bool good = number && *number >= 0 && *number <= high;
    ids.push_back(static_cast<int32_t>(
        good ? *number : read_integer(name + "[" + std::to_string(ids.size()) + "]", id, 0, high)));
  }
  return ids;
}

Json integer_schema(int64_t low, int64_t high) { return {{"type", "integer"}, {"minimum", low}, {"maximum", high}}; }

Json number_schema(double low, double high) { return {{"type", "number"}, {"minimum", low}, {"maximum", high}}; }

Json ids_schema(const ServedModel& model, int64_t least, int64_t most) {
  return {
      {"type", "array"}, {"items", integer_schema(0, model.vocab_size - 1)}, {"minItems", least}, {"maxItems", most}};
}

Json or_null(Json schema) {
  if (schema.empty()) return schema;
  return {{"anyOf", Json::array({std::move(schema), {{"type", "null"}}})}};
}

Field number_field(std::string name, unsigned endpoints, double low, double high, double GenerationRequest::* member) {
  return {name, endpoints, number_schema(low, high),
          [=](const Json& value, Draft& draft) { draft.request.*member = read_number(name, value, low, high); }};
}

Field boolean_field(std::string name, unsigned endpoints, bool GenerationRequest::* member) {
  return {name, endpoints, {{"type", "boolean"}}, [=](const Json& value, Draft& draft) {
            draft.request.*member = read_boolean(name, value);
          }};
}

FieldTable::FieldTable(const ServedModel& model, const RequestLimits& limits) {
  for (const Fields& part : {input_fields(model, limits), sampling_fields(model, limits), output_fields(model, limits),
                             accepted_fields(), refused_fields()}) {
    for (const Field& field : part) fields_.push_back(field);
  }
  for (size_t i = 0; i < fields_.size(); ++i) by_name_[fields_[i].name].push_back(i);
}

const Field* FieldTable::find(Endpoint endpoint, std::string_view name) const {
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) return nullptr;
  for (const size_t index : found->second) {
    if (fields_[index].endpoints & endpoint) return &fields_[index];
  }
  return nullptr;
}

ApiError FieldTable::unknown(Endpoint endpoint, const std::string& name) const {
  std::vector<std::string> names;
  for (const Field& field : fields_)
    if (field.endpoints & endpoint) names.push_back(field.name);
  const std::string meant = nearest(name, names), shown = one_line(name);
  return ApiError(400, "unknown_parameter",
                  "Unknown parameter: '" + shown + "'" + (meant.empty() ? "." : "; did you mean '" + meant + "'?"), shown);
}

void FieldTable::read(Endpoint endpoint, const Json& object, Draft& draft) const {
  for (const auto& [name, value] : object.items()) {
    const Field* field = find(endpoint, name);
    if (!field) throw unknown(endpoint, name);
    if (!value.is_null()) field->read(value, draft);
  }
  for (const Field& field : fields_) {
    if (!field.required || !(field.endpoints & endpoint)) continue;
    const auto found = object.find(field.name);
    if (found != object.end() && !found->is_null()) continue;
    throw ApiError(400, "missing_required_parameter", "Missing required parameter: '" + field.name + "'.", field.name);
  }
}

Json FieldTable::schema(Endpoint endpoint) const {
  Json properties = Json::object();
  Json required = Json::array();
  for (const Field& field : fields_) {
    if (!(field.endpoints & endpoint)) continue;
    properties[field.name] = field.required ? field.schema : or_null(field.schema);
    if (field.required) required.push_back(field.name);
  }
  Json schema = {{"type", "object"}, {"properties", std::move(properties)}, {"additionalProperties", false}};
  if (!required.empty()) schema["required"] = std::move(required);
  return schema;
}

}  // namespace kdt::openai
