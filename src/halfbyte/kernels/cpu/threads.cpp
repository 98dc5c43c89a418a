#include "threads.hpp"

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace halfbyte {
namespace {

using GompParallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
std::atomic<GompParallel> gomp_parallel{nullptr};

struct Tickets {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    int64_t count, plenty;
    void (*work)(void *, int64_t, int64_t);
    void *context;
};

// Nothing may be thrown through an OpenMP runtime written in C.
void take(void *data) {
    auto &tickets = *static_cast<Tickets *>(data);
    try {
        const auto draw = [&] { return tickets.next.fetch_add(1, std::memory_order_relaxed); };
        for (int64_t i = draw(); i < tickets.count;) {
            // a ticket taken ahead of its turn says what to prefetch; near the end it would keep work from idle threads
            const bool early = i + tickets.plenty < tickets.count;
            const int64_t next = early ? draw() : -1;
            tickets.work(tickets.context, i, next < tickets.count ? next : -1);
            i = early ? next : draw();
        }
    } catch (...) {
        tickets.failed = true;
    }
}

struct Buffer {
    static constexpr int64_t KEPT = 4 << 20;  // floats a thread holds on to
    float *data = nullptr;
    int64_t size = 0;

    ~Buffer() { std::free(data); }
    float *get(int64_t count) {
        if (count > size || (size > KEPT && count <= KEPT)) {
            std::free(data);
            size = 0;
            data = static_cast<float *>(std::aligned_alloc(64, size_t(count * 4 + 63) / 64 * 64));
            if (!data) throw std::bad_alloc();
            size = count;
        }
        return data;
    }
};

}  // namespace

void set_gomp(void *function) { gomp_parallel = reinterpret_cast<GompParallel>(function); }

void *get_gomp() { return reinterpret_cast<void *>(gomp_parallel.load()); }

float *thread_floats(int slot, int64_t count) {
    thread_local Buffer buffers[2];
    return buffers[slot].get(count);
}

void parallel(int threads, int64_t count, void (*work)(void *, int64_t, int64_t), void *context) {
    Tickets tickets;
    tickets.count = count;
    tickets.plenty = 4 * threads;
    tickets.work = work;
    tickets.context = context;
    if (threads > count) threads = int(count);
    const GompParallel gomp = gomp_parallel.load(std::memory_order_relaxed);
    if (threads <= 1) {
        take(&tickets);
    } else if (gomp) {
        gomp(take, &tickets, unsigned(threads), 0);
    } else {
        std::vector<std::thread> helpers;
        for (int i = 1; i < threads; ++i) helpers.emplace_back(take, &tickets);
        take(&tickets);
        for (auto &helper : helpers) helper.join();
    }
    if (tickets.failed) throw std::bad_alloc();
}

}  // namespace halfbyte
