// The figures of a rehearsal as one JSON object; docs/rehearsal.md has its fields.
#pragma once

#include <string>

#include "rehearsal/rehearsal.h"

namespace kdt {

std::string rehearsal_json(const RehearsalPlan& plan, const RehearsalReport& report);

}  // namespace kdt
