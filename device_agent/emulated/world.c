/* The world around a kernel: what TVM's runtime and the C library are to it. A static aarch64 program over musl.
 *
 * It is linked at fixed addresses, loaded beside a candidate, and never started: the candidate's imports lead here.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define USED __attribute__((used))

/* What the emulator's owner reads and writes; `machine.py` describes it. `lane` says who computes at the moment. */
USED volatile struct {
    uint32_t lane;
    uint32_t regions;
    uint32_t tasks;
    uint32_t most_regions;
    uint64_t heap;
    uint64_t heap_end;
    uint64_t heap_peak;
} farm_desk;

struct environment {
    void *sync;
    int32_t num_task;
};

/* All tasks of a parallel region, one after the other; each is a lane of its own, for what it costs is what it would
 * on a core of its own. Regions beyond the last share its lanes. A nested region is its task's. */
USED int farm_launch(int (*task)(int, struct environment *, void *), void *data, int wanted) {
    int tasks = wanted > 0 ? wanted : (int)farm_desk.tasks, failed = 0;
    uint32_t outer = farm_desk.lane, region = 0;
    struct environment environment = {0, tasks};
    if (!outer) {
        region = farm_desk.regions < farm_desk.most_regions ? farm_desk.regions : farm_desk.most_regions - 1;
        farm_desk.regions++;
    }
    for (int i = 0; i < tasks && !failed; i++) {
        if (!outer) farm_desk.lane = 1 + region * farm_desk.tasks + (uint32_t)i % farm_desk.tasks;
        failed = task(i, &environment, data);
    }
    farm_desk.lane = outer;
    return failed;
}

/* Tasks that wait for each other cannot run one after the other. */
USED int farm_barrier(int task, struct environment *environment) {
    (void)task;
    return environment->num_task > 1 ? -1 : 0;
}

USED void farm_stop(void) { for (;;) *(volatile int *)8 = 0; }

/* TVM gives workspaces back in the opposite order. */
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

/* All that TVM's code may ask of the C library. */
USED void *const volatile farm_names[] = {
    memcpy, memset, memmove, memcmp, expf, logf, powf, tanhf, erff, sinf, cosf, tanf, atanf, atan2f, sinhf, coshf,
    asinf, acosf, sqrtf, floorf, ceilf, roundf, truncf, fmodf, nearbyintf, rintf, exp2f, log2f, log10f, log1pf, expm1f,
    exp, log, pow, tanh, erf, sin, cos, floor, ceil, round, trunc, fmod, nearbyint, rint, exp2, log2, sqrt, fmaf, fma,
};

/* Never called: what it reads is kept by the linker. */
int main(int count, char **words) {
    (void)words;
    return farm_names[count] != 0;
}
