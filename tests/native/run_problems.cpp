// Runs problems that Python wrote to a file (native_problems.py) on one instruction set of the library of CPU kernels,
// where there is no Python: another processor, emulated. Judging the outputs is left to Python.
//
//     run_problems LIBRARY INSTRUCTION_SET PROBLEMS RESULTS
//
// Each tensor lies in memory of its own that ends where readable memory ends, so touching one byte beyond it ends the
// process.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "abi.hpp"

namespace {

// One problem in the file. Pointers in its structs are numbers of blobs, counted from 1; 0 for none.
struct Problem {
    int64_t kind;  // 0: hb_linear; 1: hb_decode of all rows
    HbWeight weight;
    HbCall call;   // for hb_decode: out, out_stride, threads, and dtype HB_BF16 for two terms
};

// Bytes [offset, offset + size) of the file; written back, where the problem's `out` points to it, to the results.
struct Blob {
    int64_t offset, size;
};

struct Header {
    char magic[8];
    int64_t weight_bytes, call_bytes, problems, blobs;
};

[[noreturn]] void fail(const char *what, const char *detail) {
    std::fprintf(stderr, "run_problems: %s: %s\n", what, detail);
    std::exit(2);
}

std::vector<char> read_file(const char *path) {
    std::FILE *file = std::fopen(path, "rb");
    if (!file) fail("cannot open", path);
    std::vector<char> data;
    char part[1 << 16];
    while (size_t got = std::fread(part, 1, sizeof part, file)) data.insert(data.end(), part, part + got);
    std::fclose(file);
    return data;
}

void write_file(const char *path, const std::vector<char> &data) {
    std::FILE *file = std::fopen(path, "wb");
    if (!file || std::fwrite(data.data(), 1, data.size(), file) != data.size() || std::fclose(file))
        fail("cannot write", path);
}

// Copies of blobs that end at a page nobody may touch.
class Guarded {
    struct Mapping {
        void *base;
        size_t size;
    };
    std::vector<Mapping> mappings;

   public:
    void *copy(const char *from, size_t size) {
        const size_t page = size_t(sysconf(_SC_PAGESIZE)), used = (size + page - 1) / page * page;
        void *base = mmap(nullptr, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(static_cast<char *>(base) + used, page, PROT_NONE))
            fail("cannot map memory", "mmap");
        mappings.push_back({base, used + page});
        char *at = static_cast<char *>(base) + used - size;
        std::memcpy(at, from, size);
        return at;
    }
    ~Guarded() {
        for (const Mapping &mapping : mappings) munmap(mapping.base, mapping.size);
    }
};

struct Library {
    int32_t (*linear)(int32_t, const HbWeight *, const HbCall *);
    int32_t (*decode)(int32_t, const HbWeight *, int64_t, int64_t, void *, int64_t, int32_t, int32_t);
    int32_t isa = -1;

    Library(const char *path, const char *wanted) {
        void *handle = dlopen(path, RTLD_NOW);
        if (!handle) fail("cannot load the library", dlerror());
        const auto find = [&](const char *name) {
            void *found = dlsym(handle, name);
            if (!found) fail("not in the library", name);
            return found;
        };
        linear = reinterpret_cast<decltype(linear)>(find("hb_linear"));
        decode = reinterpret_cast<decltype(decode)>(find("hb_decode"));
        const auto count = reinterpret_cast<int32_t (*)()>(find("hb_isa_count"));
        const auto name = reinterpret_cast<const char *(*)(int32_t)>(find("hb_isa_name"));
        const auto available = reinterpret_cast<int32_t (*)(int32_t)>(find("hb_isa_available"));
        const auto bytes = reinterpret_cast<int32_t (*)(int32_t)>(find("hb_struct_bytes"));
        if (bytes(0) != sizeof(HbWeight) || bytes(1) != sizeof(HbCall)) fail("built from another abi.hpp", path);
        std::printf("order of choice:");
        for (int32_t i = 0; i < count(); ++i) {
            if (!available(i)) continue;
            std::printf(" %s", name(i));
            if (!std::strcmp(name(i), wanted)) isa = i;
        }
        std::printf("\n");
        if (isa < 0) fail("instruction set not available", wanted);
    }
};

void run(const Library &library, Problem problem, const Blob *blobs, std::vector<char> &file) {
    Guarded memory;
    const Blob out = blobs[reinterpret_cast<intptr_t>(problem.call.out) - 1];
    const auto place = [&](auto &pointer) {
        if (!pointer) return;
        const Blob &blob = blobs[reinterpret_cast<intptr_t>(pointer) - 1];
        using Pointer = std::remove_reference_t<decltype(pointer)>;
        pointer = static_cast<Pointer>(memory.copy(file.data() + blob.offset, size_t(blob.size)));
    };
    HbWeight &weight = problem.weight;
    HbCall &call = problem.call;
    place(weight.codes), place(weight.scales), place(weight.second), place(weight.map);
    place(weight.constant), place(weight.zeros), place(call.x), place(call.bias), place(call.out);
    const int32_t failed =
        problem.kind == 0 ? library.linear(library.isa, &weight, &call)
                          : library.decode(library.isa, &weight, 0, weight.n, call.out, call.out_stride,
                                           call.dtype == HB_BF16, call.threads);
    if (failed) fail("the library ran out of memory", "hb_linear or hb_decode");
    std::memcpy(file.data() + out.offset, call.out, size_t(out.size));
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 5) fail("usage", "run_problems LIBRARY INSTRUCTION_SET PROBLEMS RESULTS");
    const Library library(arguments[1], arguments[2]);
    std::vector<char> file = read_file(arguments[3]);
    Header header;
    if (file.size() < sizeof header) fail("too short", arguments[3]);
    std::memcpy(&header, file.data(), sizeof header);
    if (std::memcmp(header.magic, "HBPROBS1", 8) || header.weight_bytes != sizeof(HbWeight) ||
        header.call_bytes != sizeof(HbCall))
        fail("not a file of problems for this abi.hpp", arguments[3]);
    std::vector<Problem> problems(size_t(header.problems));
    std::vector<Blob> blobs(size_t(header.blobs));
    const size_t problem_bytes = problems.size() * sizeof(Problem), blob_bytes = blobs.size() * sizeof(Blob);
    if (file.size() < sizeof header + problem_bytes + blob_bytes) fail("too short", arguments[3]);
    std::memcpy(problems.data(), file.data() + sizeof header, problem_bytes);
    std::memcpy(blobs.data(), file.data() + sizeof header + problem_bytes, blob_bytes);
    for (const Problem &problem : problems) run(library, problem, blobs.data(), file);
    write_file(arguments[4], file);
    std::printf("%zu problems\n", problems.size());
}
