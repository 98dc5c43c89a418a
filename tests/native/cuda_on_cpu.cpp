// The scheduler and the checks behind cuda_on_cpu.hpp.
#include "cuda_on_cpu.hpp"

#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

namespace cuda_on_cpu {

Now now;

namespace {

constexpr std::size_t STACK = 128 << 10, GUARD = 4096;
constexpr char UNTOUCHED = static_cast<char>(0xFF);    // as floats: NaN

struct Copy {
    void* to;
    const void* from;
    unsigned bytes;
};

enum class State { ready, at_warp, at_block, done };

struct Thread {
    ucontext_t context;
    State state;
    std::vector<Copy> open;                  // copies since the last commit
    std::deque<std::vector<Copy>> groups;    // committed, not yet waited for
};

std::vector<Thread> threads;
std::vector<Range> readable;
std::string error;
ucontext_t scheduler;
void (*kernel)(const void*);
const void* kernel_argument;

Thread& this_thread() { return threads[now.thread.x]; }

void pause(State state) {
    Thread& thread = this_thread();
    thread.state = state;
    swapcontext(&thread.context, &scheduler);
}

void trampoline() {
    try {
        kernel(kernel_argument);
    } catch (const std::exception& caught) {
        error = "thread " + std::to_string(now.thread.x) + " of block " + std::to_string(now.block.x) + ": " + caught.what();
    }
    pause(State::done);
}

// Lets those go on who are all at their barrier. Returns whether there were any.
bool release() {
    auto all_at = [](std::size_t first, std::size_t last, State state) {
        return std::all_of(threads.begin() + first, threads.begin() + last, [&](Thread& t) { return t.state == state; });
    };
    bool any = false;
    auto let_go = [&](std::size_t first, std::size_t last, State state) {
        if (!all_at(first, last, state)) return;
        for (std::size_t i = first; i < last; ++i) threads[i].state = State::ready;
        any = true;
    };
    for (std::size_t warp = 0; warp < threads.size(); warp += 32) let_go(warp, warp + 32, State::at_warp);
    let_go(0, threads.size(), State::at_block);
    return any;
}

void start_threads(std::size_t count) {
    static std::vector<char> stacks;
    stacks.resize(count * STACK);
    threads = std::vector<Thread>(count);
    for (std::size_t i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks.data() + i * STACK;
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, trampoline, 0);
        thread.state = State::ready;
    }
}

void run_block(unsigned index, unsigned blocks, unsigned shared_bytes, const std::vector<unsigned>& turns) {
    std::vector<char> memory(shared_bytes + 2 * GUARD, UNTOUCHED);
    std::vector<unsigned> exchanged(turns.size());
    char* begin = memory.data() + GUARD;
    begin += -reinterpret_cast<std::uintptr_t>(begin) & 15;
    now = {{0, 0, 0}, {index, 0, 0}, {blocks, 1, 1}, begin, shared_bytes, exchanged.data()};
    start_threads(turns.size());
    do {
        for (unsigned i : turns) {
            if (threads[i].state != State::ready) continue;
            now.thread.x = i;
            swapcontext(&scheduler, &threads[i].context);
            if (!error.empty()) return;
        }
    } while (release());
    const std::string where = "block " + std::to_string(index) + ": ";
    for (const Thread& thread : threads)
        if (thread.state != State::done) error = where + "threads wait at a barrier that others never reach";
    auto touched = [](char byte) { return byte != UNTOUCHED; };
    if (std::any_of(memory.data(), begin, touched) || std::any_of(begin + shared_bytes, &*memory.end(), touched))
        error = where + "shared memory was written beyond its ends";
}

}    // namespace

void fail(const char* what) { throw std::runtime_error(what); }
void wait_for_warp() { pause(State::at_warp); }
void wait_for_block() { pause(State::at_block); }

void check_read(const void* from, unsigned bytes) {
    const char* first = static_cast<const char*>(from);
    if (reinterpret_cast<std::uintptr_t>(from) % bytes) fail("a global read is not aligned");
    for (const Range& range : readable)
        if (first >= range.begin && first + bytes <= range.begin + range.bytes) return;
    fail("a global read is outside of all tensors");
}

void copy_later(void* to, const void* from, unsigned bytes) {
    check_read(from, bytes);
    std::memset(to, 0xA5, bytes);
    this_thread().open.push_back({to, from, bytes});
}

void commit_copies() {
    this_thread().groups.push_back(this_thread().open);
    this_thread().open.clear();
}

void finish_copies(unsigned left) {
    std::deque<std::vector<Copy>>& groups = this_thread().groups;
    for (; groups.size() > left; groups.pop_front())
        for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
}

const char* run_grid(void (*body)(const void*), const void* argument, int blocks, int thread_count, unsigned shared_bytes,
                     int order, const Range* ranges, int range_count) {
    kernel = body, kernel_argument = argument;
    error.clear();
    readable.assign(ranges, ranges + range_count);
    std::vector<unsigned> turns(thread_count);
    for (int i = 0; i < thread_count; ++i) turns[i] = order == 0 ? i : thread_count - 1 - i;
    for (int i = 0; i < blocks && error.empty(); ++i) run_block(i, blocks, shared_bytes, turns);
    return error.c_str();
}

}    // namespace cuda_on_cpu
