// The table of request fields: what each accepts (the schema of the OpenAPI document), and how it is read.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "openai_json.h"
#include "openai_request.h"

namespace kdt::openai {

// Where a field may stand; a set.
enum Endpoint : unsigned { kChat = 1, kCompletion = 2, kTokenize = 4, kDetokenize = 8 };
constexpr unsigned kGenerate = kChat | kCompletion;
constexpr unsigned kEverywhere = kGenerate | kTokenize | kDetokenize;

// A request while its fields are read one by one; what depends on several is settled at the end.
struct Draft {
  const ServedModel& served;
  const RequestLimits& limits;
  GenerationRequest request = {};
  Json tools = nullptr;
  bool tools_off = false;
  bool has_prompt = false;
  bool has_messages = false;
  bool has_seed = false;
  bool has_stream_options = false;
  bool chat_logprobs = false;
  std::optional<int64_t> top_logprobs = {};
  std::optional<int64_t> max_completion_tokens = {};
  std::optional<int64_t> best_of = {};
  std::vector<int32_t> tokens = {};
};

struct Field {
  std::string name;
  unsigned endpoints;
  Json schema;
  // Not called for null, which is as good as absent. Throws ApiError.
  std::function<void(const Json& value, Draft& draft)> read;
  bool required = false;
};
using Fields = std::vector<Field>;

struct FieldTable {
  FieldTable(const ServedModel& model, const RequestLimits& limits);

  // Reads every member of `object`; one that the endpoint does not know is an error.
  void read(Endpoint endpoint, const Json& object, Draft& draft) const;
  // The schema of the endpoint's request body, without the rules that tie fields together.
  Json schema(Endpoint endpoint) const;

 private:
  const Field* find(Endpoint endpoint, std::string_view name) const;
  // 400, with the field of the endpoint that was probably meant.
  ApiError unknown(Endpoint endpoint, const std::string& name) const;

  Fields fields_;
  std::map<std::string, std::vector<size_t>, std::less<>> by_name_;
};

// The table's parts.
Fields input_fields(const ServedModel& model, const RequestLimits& limits);  // model, prompt, messages, tools, tokens
Fields sampling_fields(const ServedModel& model,
                       const RequestLimits& limits);  // how tokens are chosen and when they end
Fields output_fields(const ServedModel& model,
                     const RequestLimits& limits);  // what the answer looks like, and scheduling
Fields accepted_fields();                           // without effect: ignored, or allowed one value only
Fields refused_fields();                            // known, not implemented

// 400: a value of another type than the field's.
ApiError invalid_type(const std::string& name, const Json& value, std::string_view expected);
// Values by type and range. `name` is the field, perhaps with a path ("stop[2]").
int64_t read_integer(const std::string& name, const Json& value, int64_t low, int64_t high);
double read_number(const std::string& name, const Json& value, double low, double high, bool above_low = false);
bool read_boolean(const std::string& name, const Json& value);
const std::string& read_string(const std::string& name, const Json& value);
const Json& read_array(const std::string& name, const Json& value, int64_t most);
const Json& read_members(const std::string& name, const Json& value);
std::vector<int32_t> read_ids(const std::string& name, const Json& value, int64_t most, const ServedModel& model);

// Schemas.
Json integer_schema(int64_t low, int64_t high);
Json number_schema(double low, double high);
Json ids_schema(const ServedModel& model, int64_t least, int64_t most);
Json or_null(Json schema);

// A field that only fills one member of the request.
template <class Member>
Field integer_field(std::string name, unsigned endpoints, int64_t low, int64_t high,
                    Member GenerationRequest::* member) {
  return {name, endpoints, integer_schema(low, high), [=](const Json& value, Draft& draft) {
            draft.request.*member = static_cast<int32_t>(read_integer(name, value, low, high));
          }};
}
Field number_field(std::string name, unsigned endpoints, double low, double high, double GenerationRequest::* member);
Field boolean_field(std::string name, unsigned endpoints, bool GenerationRequest::* member);

}  // namespace kdt::openai
