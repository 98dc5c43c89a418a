// What api.cpp and the instruction sets share: a planned call, and the functions an instruction set offers.
#pragma once
#include "abi.hpp"

namespace halfbyte {

enum Path : int32_t {
    UNITS,    // 128 weights of a row at a time, lanes along K: all records whose rows start on whole blocks
    COLUMNS,  // lanes along N: words of eight
    INTEGERS, // UNITS with integer sums: bf16 on AVX-512 with VNNI
    TILES,    // AMX: sixteen rows at a time, bf16
    ROWS,     // decode a row, then multiply: whatever the others do not serve
};

// A call after planning. `x`, `factor` and `special` point into the caller's buffer, filled by Isa::prepare.
struct Job {
    const HbWeight *weight;
    const HbCall *call;
    Path path;
    int32_t grouping;   // UNITS: see Grouping
    int32_t block;      // UNITS: weights a scale is read for, at most 128; divides k
    int32_t units;      // UNITS: ceil(k / 128)
    int32_t stride;     // UNITS: floats of x a unit and row: 128 and, with offsets, their sums by lane
    int64_t row_bytes;  // UNITS: of codes, from a row of the weight to the next
    int64_t row_blocks; // UNITS: the format's blocks a row, 0 where rows start inside blocks
    int32_t order[128]; // UNITS: element of the unit at each place; COLUMNS: element of the octet at each nibble
    int32_t picks[4][16];  // UNITS: by group and lane, which of the unit's scales
    float table[16];    // UNITS: the codebook; INTEGERS: 32 words, it times divisor * 2^exponent
    float divisor;      // out of every output, [0.5, 1): sums overflow only where outputs do; 1 but for INTEGERS
    int32_t exponent;   // INTEGERS: in the scales of x
    float *x;
    float *factor;      // by row of x: a power of two taken out of rows near the ends of fp32's range, else 1
    uint8_t *special;   // by row of x: holds NaN or infinity
    int64_t panel;      // rows (UNITS, ROWS) or columns (COLUMNS) of the weight a task
    int64_t tasks;
    int64_t x_rows;     // rows of x with the zero rows that fill up the last block
    int64_t x_floats, scratch_floats;
};

// Rows of x that name the same slot: places [begin, end) of the rows in order of their slots.
struct Segment {
    int32_t slot;
    int64_t begin, end;
};

// A planned HbShrink or HbExpand.
struct Adapters {
    const HbShrink *shrink;
    const HbExpand *expand;
    const int64_t *rows;      // the rows of x, in order of their slots; those without an adapter are not among them
    const Segment *segments;
    int64_t count;            // of segments
    float *x, *factor;        // shrink: the block's rows as fp32, each `padded` long, and as in Job
    int64_t first, padded;    // shrink: the block's first place in `rows`
};

struct Isa {
    const char *name;
    void (*plan)(Job &job);                                      // path, panel, tasks and sizes
    // One row of x, padding rows included; scratch for two of k rounded up to 128.
    void (*prepare)(const Job &job, int64_t row, float *scratch);
    void (*run)(const Job &job, int64_t task, int64_t next, float *scratch);  // next: to prefetch, or -1
    // Rows of the true values, [rows, k]: fp32, or two bf16 terms side by side, [rows, 2k].
    void (*decode)(const HbWeight &weight, int64_t row, int64_t rows, void *out, int64_t stride, bool split,
                   float *scratch);
    int64_t (*decode_floats)(const HbWeight &weight, int64_t rows);
    void (*shrink)(const Adapters &job, int64_t segment, int64_t from, int64_t to, float *scratch);  // rows of A
    void (*expand)(const Adapters &job, int64_t task, float *scratch);  // EXPAND_COLUMNS outputs of every row
    float (*widen)(const HbShrink &call, int64_t row, int64_t padded, float *out);  // what shrink multiplies by
};

constexpr int64_t EXPAND_COLUMNS = 64;

extern const Isa portable_isa, neon_isa, avx2_isa, avx512_isa, avx512vnni_isa, amx_isa;

// Rows of x that are multiplied together from `left` on: all that fit, else the next power of two (zero rows fill up).
constexpr int block_rows(int64_t left, int most) {
    int rows = 1;
    while (rows < most && rows < left) rows *= 2;
    return rows;
}

}  // namespace halfbyte
