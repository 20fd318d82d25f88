// Functions that host and device code share: one source, so that both compute the same.
#pragma once

#ifdef __CUDACC__
#define KDT_HOST_DEVICE __host__ __device__
#else
#define KDT_HOST_DEVICE
#endif
