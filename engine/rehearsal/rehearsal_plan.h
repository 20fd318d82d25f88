// What a rehearsal's plan comes to, before anything of it is done.
#pragma once

#include "rehearsal/rehearsal.h"

namespace kdt {

int64_t largest(const std::vector<int64_t>& values);   // 0 of none

// Shorter prompts have one chunk, the smallest.
bool prefills(int64_t tokens, int64_t chunk, const std::vector<int64_t>& chunks);

// Errors name the field. `model`: with the layers that are wanted.
void check_plan(const RehearsalPlan& plan, const ModelConfig& model);

// Takes out, and returns, what is longer than `most`; an error that names the field where nothing would be left.
std::vector<int64_t> leave_out(std::vector<int64_t>& lengths, const char* field, int64_t most);

int64_t measurements(const RehearsalPlan& plan);

}  // namespace kdt
