// A libnccl.so.2 that prints the all-reduces it is asked for: buffers, count, type, operation,
// communicator, stream. FAKE_NCCL_COPY: if set, it also sums over one rank, in host memory.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int kFloat = 7;  // ncclFloat

struct UniqueId {
    char bytes[128];
};

EXPORT int ncclGetUniqueId(UniqueId* id) {
    id->bytes[0] = 'x';
    return 0;
}
EXPORT int ncclCommInitRank(void** communicator, int, UniqueId, int) {
    *communicator = reinterpret_cast<void*>(4096);
    return 0;
}
EXPORT char const* ncclGetErrorString(int) { return "a fake error"; }
EXPORT int ncclAllReduce(void const* from, void* to, size_t count, int type, int operation,
                         void* communicator, void* stream) {
    std::printf("%zu %zu %zu %d %d %zu %zu\n", reinterpret_cast<uintptr_t>(from),
                reinterpret_cast<uintptr_t>(to), count, type, operation,
                reinterpret_cast<uintptr_t>(communicator), reinterpret_cast<uintptr_t>(stream));
    if (std::getenv("FAKE_NCCL_COPY")) std::memcpy(to, from, count * (type == kFloat ? 4 : 2));
    return 0;
}
