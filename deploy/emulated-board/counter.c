/* A plug-in of QEMU's user-mode emulation for aarch64 programs: counts the instructions that each thread executes.
 *
 * Of QEMU's plug-in interface, version 1, only what is used here is declared: no distribution ships its header apart.
 * Counts lie in a shared file, so that the program itself can read them while it runs; `counter.py` describes it.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t plugin_id;
struct tb;
struct insn;
enum { NO_REGISTERS = 0 };
typedef void (*translated_callback)(plugin_id, struct tb *);
typedef void (*executed_callback)(unsigned int cpu, void *data);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, translated_callback);
void qemu_plugin_register_vcpu_tb_exec_cb(struct tb *, executed_callback, int flags, void *data);
size_t qemu_plugin_tb_n_insns(const struct tb *);
struct insn *qemu_plugin_tb_get_insn(const struct tb *, size_t index);
const void *qemu_plugin_insn_data(const struct insn *);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

/* As in counter.py: so many threads, a cache line each. */
enum { THREADS = 256, LINE = 64 };
struct counts {
    _Alignas(LINE) uint64_t instructions;
    uint64_t vector_fmas;
    uint64_t loads_stores;
};
static struct counts *counts;

/* FMLA and FMLS on full vectors of float32, all lanes by all or by one lane. */
static int is_vector_fma(uint32_t word) {
    return (word & 0xFF60FC00) == 0x4E20CC00 || (word & 0xFFC0B400) == 0x4F801000;
}

static int is_load_or_store(uint32_t word) { return (word & 0x0A000000) == 0x08000000; }

/* A block that is left in the middle, by a fault or a signal, counts as executed to its end. */
static void executed(unsigned int cpu, void *data) {
    const struct counts *block = data;
    struct counts *thread = &counts[cpu % THREADS];
    thread->instructions += block->instructions;
    thread->vector_fmas += block->vector_fmas;
    thread->loads_stores += block->loads_stores;
}

static void translated(plugin_id id, struct tb *tb) {
    (void)id;
    struct counts *block = aligned_alloc(LINE, sizeof *block); /* QEMU may run the block as long as it lives */
    if (!block) abort();
    memset(block, 0, sizeof *block);
    block->instructions = qemu_plugin_tb_n_insns(tb);
    for (size_t index = 0; index < block->instructions; index++) {
        uint32_t word;
        memcpy(&word, qemu_plugin_insn_data(qemu_plugin_tb_get_insn(tb, index)), sizeof word);
        block->vector_fmas += is_vector_fma(word);
        block->loads_stores += is_load_or_store(word);
    }
    qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, NO_REGISTERS, block);
}

/* A child that the program forks counts for itself, unseen. */
static void forked(void) {
    mmap(counts, sizeof *counts * THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
    (void)info;
    if (argc != 1 || strncmp(argv[0], "counts=", 7)) {
        fprintf(stderr, "counter: counts=FILE is missing\n");
        return 1;
    }
    int file = open(argv[0] + 7, O_RDWR | O_CLOEXEC);
    counts = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *counts * THREADS, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (counts == MAP_FAILED) {
        perror(argv[0] + 7);
        return 1;
    }
    close(file);
    pthread_atfork(NULL, NULL, forked);
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    return 0;
}
