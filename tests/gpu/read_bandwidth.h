#pragma once

// Bytes a second, the best of several passes over gigabytes of the current device's memory.
double read_bandwidth();
