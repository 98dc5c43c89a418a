// What kernels for codebook weights are given of LoRA adapters: scaling * B h is added to their outputs, h = A x from
// adapters_shrink.cu, each row of x with its own adapter.

struct Expand {
    const float* shrunk;      // [m, width]: h
    const void* b;            // a slot's B is [n, stride] from element first * n on; null where there are no adapters
    const int4* table;        // a slot's first column of h, rank, first, stride
    const float* scalings;    // of each slot
    const int* index;         // each row's slot, none where that is out of range; null: all take slot 0
    int width, slots;
    int b_type;               // 0 fp16, 1 bf16, 2 fp32
    u64* signal;              // null, or words to which adapters_shrink.cu, right in front, writes `tag`: see wait_for_signal
    u64 tag;
    int signals;              // so many words
};
