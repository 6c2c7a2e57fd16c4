/* The environment of a kernel: TVM's runtime and the C library, as a freestanding aarch64 program.
 *
 * It is linked at fixed addresses, loaded beside a candidate, and never started: it resolves the candidate's imports.
 */
#include <stddef.h>
#include <stdint.h>

#define USED __attribute__((used))

/* Shared with `machine.py`, which describes it. `lane` is the lane that computes now; `first_only` skips a region's
 * other lanes. */
USED volatile struct {
    uint32_t lane;
    uint32_t regions;
    uint32_t tasks;
    uint32_t most_regions;
    uint32_t first_only, unused;
    uint64_t heap;
    uint64_t heap_end;
    uint64_t heap_peak;
} farm_desk;

struct environment {
    void *sync;
    int32_t num_task;
};

/* Run all tasks of a parallel region in sequence, each in a lane of its own, as on its own core. Regions beyond the
 * last share its lanes. A nested region belongs to its task. */
USED int farm_launch(int (*task)(int, struct environment *, void *), void *data, int wanted) {
    int tasks = wanted > 0 ? wanted : (int)farm_desk.tasks, failed = 0;
    uint32_t outer = farm_desk.lane, region = 0;
    struct environment environment = {0, tasks};
    if (!outer) {
        region = farm_desk.regions < farm_desk.most_regions ? farm_desk.regions : farm_desk.most_regions - 1;
        farm_desk.regions++;
    }
    for (int i = 0; i < tasks && !failed; i++) {
        if (!outer && farm_desk.first_only && (uint32_t)i % farm_desk.tasks) continue;
        if (!outer) farm_desk.lane = 1 + region * farm_desk.tasks + (uint32_t)i % farm_desk.tasks;
        failed = task(i, &environment, data);
    }
    farm_desk.lane = outer;
    return failed;
}

/* Tasks that wait for each other cannot run in sequence. */
USED int farm_barrier(int task, struct environment *environment) {
    (void)task;
    return environment->num_task > 1 ? -1 : 0;
}

USED void farm_stop(void) { for (;;) *(volatile int *)8 = 0; }

/* TVM frees workspaces in reverse order. */
USED void *farm_allocate(int device, int id, uint64_t size, int code, int bits) {
    (void)device, (void)id, (void)code, (void)bits;
    uint64_t at = (farm_desk.heap + 127) & ~127ull;
    if (size > farm_desk.heap_end - at) return 0;
    farm_desk.heap = at + size;
    if (farm_desk.heap > farm_desk.heap_peak) farm_desk.heap_peak = farm_desk.heap;
    return (void *)at;
}

USED int farm_free(int device, int id, void *at) {
    (void)device, (void)id;
    farm_desk.heap = (uint64_t)at;
    return 0;
}

/* The C library functions that compilers call, sixteen bytes at a time. */
typedef uint8_t vector __attribute__((vector_size(16), aligned(1), may_alias));

USED void *memcpy(void *restrict to, const void *restrict from, size_t size) {
    char *out = to;
    const char *in = from;
    for (; size >= 16; size -= 16, in += 16, out += 16) *(vector *)out = *(const vector *)in;
    for (; size; size--) *out++ = *in++;
    return to;
}

USED void *memmove(void *to, const void *from, size_t size) {
    if ((uintptr_t)to - (uintptr_t)from >= size) return memcpy(to, from, size);
    for (; size >= 16; size -= 16)
        *(vector *)((char *)to + size - 16) = *(const vector *)((const char *)from + size - 16);
    for (; size; size--) ((char *)to)[size - 1] = ((const char *)from)[size - 1];
    return to;
}

USED void *memset(void *to, int value, size_t size) {
    char *out = to;
    vector all = (vector){0} + (uint8_t)value;
    for (; size >= 16; size -= 16, out += 16) *(vector *)out = all;
    for (; size; size--) *out++ = (char)value;
    return to;
}

USED int memcmp(const void *left, const void *right, size_t size) {
    const uint8_t *one = left, *other = right;
    for (; size && *one == *other; size--) one++, other++;
    return size ? *one - *other : 0;
}

/* C math functions run on the host, at an estimated cost per call: `hooks.c` serves them, by these numbers. */
#define FLOAT(number, name)                                                                                            \
    __asm__(".text\n.globl " #name "\n.type " #name ", %function\n" #name ":\nsvc #" #number "\nret\n");
#define FLOATS FLOAT
#define DOUBLE FLOAT
#define DOUBLES FLOAT
#include "math.inc"
