// Work for as many threads as torch uses, on torch's own pool where the process has an OpenMP runtime.
#pragma once
#include <cstdint>

namespace halfbyte {

// Calls work(context, i, next) for each i in [0, count), on up to `threads` threads, and returns when all are done.
// Next: what this thread is going to do after i, or -1 where that is not yet known.
void parallel(int threads, int64_t count, void (*work)(void *context, int64_t i, int64_t next), void *context);

// libgomp's entry point, found by the caller in the process; null for threads of our own.
void set_gomp(void *gomp_parallel);
void *get_gomp();

// fp32 scratch of this thread, 64-byte aligned, kept between calls up to a bound. Two slots: one for a call's x, one
// for a worker's own.
float *thread_floats(int slot, int64_t count);

}  // namespace halfbyte
