/* A plug-in of QEMU's user-mode emulation for aarch64 programs: records which blocks a thread executes, and which lines
 * some pairs of caches lack meanwhile, so that a model of a core can price it.
 *
 * recorder,control=FILE,out=FILE,caches=L1BYTES:WAYS:L2BYTES:WAYS[:...]. The program says in the control file when: 0 not,
 * 1 caches are followed, 2 blocks are counted as well. Written, each as unsigned numbers of 64 bits:
 *   1 ID ADDRESS BYTES, then the code           a block, before it first occurs
 *   2 N, N pairs of ID and COUNT, then two numbers for each pair of caches    what happened since the last one
 * One thread is recorded, the program's first. Of QEMU's plug-in interface, version 1, only what is used is declared.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../farm/virtual/emulated/caches.inc"

typedef uint64_t plugin_id;
struct tb;
struct insn;
enum { NO_REGISTERS = 0, READS_AND_WRITES = 3 };
typedef uint32_t meminfo;
typedef void (*translated_callback)(plugin_id, struct tb *);
typedef void (*executed_callback)(unsigned int cpu, void *data);
typedef void (*memory_callback)(unsigned int cpu, meminfo, uint64_t address, void *data);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, translated_callback);
void qemu_plugin_register_vcpu_tb_exec_cb(struct tb *, executed_callback, int flags, void *data);
void qemu_plugin_register_vcpu_mem_cb(struct insn *, memory_callback, int flags, int which, void *data);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *data);
unsigned int qemu_plugin_mem_size_shift(meminfo);
size_t qemu_plugin_tb_n_insns(const struct tb *);
struct insn *qemu_plugin_tb_get_insn(const struct tb *, size_t index);
const void *qemu_plugin_insn_data(const struct insn *);
uint64_t qemu_plugin_insn_vaddr(const struct insn *);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

enum { OFF, FOLLOWING, COUNTING };
enum { MOST_PAIRS = 4, STRETCH = 500000 }; /* instructions between two writings */

struct block {
    uint64_t id, count, instructions, written;
    uint64_t address, size;
    struct block *next; /* executed since the last writing */
    unsigned char code[];
};
static struct block *executed_since;
static uint64_t ids, blocks_since, instructions_since;
static const volatile uint32_t *control;
static FILE *out;
static struct memory pairs[MOST_PAIRS];
static uint64_t missed[MOST_PAIRS][2];
static const volatile uint32_t lane;
static int pair_count;

static void put(uint64_t value) { fwrite(&value, sizeof value, 1, out); }

static void write_stretch(void) {
    for (struct block *block = executed_since; block; block = block->next) {
        if (block->written) continue;
        block->written = 1;
        put(1), put(block->id), put(block->address), put(block->size);
        fwrite(block->code, 1, block->size, out);
    }
    put(2), put(blocks_since);
    for (struct block *block = executed_since; block; block = block->next) {
        put(block->id), put(block->count);
        block->count = 0;
    }
    for (int pair = 0; pair < pair_count; pair++)
        for (int i = 0; i < 2; i++) put(missed[pair][i]);
    memset(missed, 0, sizeof missed);
    executed_since = NULL;
    blocks_since = instructions_since = 0;
}

static void executed(unsigned int cpu, void *data) {
    struct block *block = data;
    if (cpu || *control != COUNTING) return;
    if (!block->count++) {
        block->next = executed_since;
        executed_since = block;
        blocks_since++;
    }
    instructions_since += block->instructions;
    if (instructions_since >= STRETCH) write_stretch();
}

static void accessed(unsigned int cpu, meminfo info, uint64_t address, void *data) {
    (void)data;
    if (cpu || *control == OFF) return;
    uint64_t last = address + (1u << qemu_plugin_mem_size_shift(info)) - 1;
    for (int pair = 0; pair < pair_count; pair++) {
        touch(&pairs[pair], (address >> 6) + 1);
        if (last >> 6 != address >> 6) touch(&pairs[pair], (last >> 6) + 1);
        if (*control == FOLLOWING) memset(missed[pair], 0, sizeof missed[pair]);
    }
}

static void translated(plugin_id id, struct tb *tb) {
    (void)id;
    size_t count = qemu_plugin_tb_n_insns(tb);
    struct block *block = calloc(1, sizeof *block + 4 * count); /* QEMU may run the block as long as it lives */
    if (!block) abort();
    block->id = ++ids;
    block->instructions = count;
    block->size = 4 * count;
    block->address = qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, 0));
    for (size_t index = 0; index < count; index++) {
        struct insn *insn = qemu_plugin_tb_get_insn(tb, index);
        uint32_t word;
        memcpy(&word, qemu_plugin_insn_data(insn), sizeof word);
        memcpy(block->code + 4 * index, &word, sizeof word);
        if ((word & 0x0A000000) == 0x08000000) /* a load or a store */
            qemu_plugin_register_vcpu_mem_cb(insn, accessed, NO_REGISTERS, READS_AND_WRITES, NULL);
    }
    qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, NO_REGISTERS, block);
}

static void finish(plugin_id id, void *data) {
    (void)id, (void)data;
    if (executed_since) write_stretch();
    fclose(out);
}

static int make_cache(struct cache *cache, uint64_t size, uint64_t ways) {
    cache->ways = ways;
    cache->sets = size / 64 / ways;
    cache->lines = calloc(cache->sets * ways, sizeof *cache->lines);
    return cache->lines && cache->sets && !(cache->sets & (cache->sets - 1));
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "control=", 8)) {
            int file = open(argv[i] + 8, O_RDONLY | O_CLOEXEC);
            void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, file, 0);
            if (page != MAP_FAILED) control = page;
            if (file >= 0) close(file);
        } else if (!strncmp(argv[i], "out=", 4)) {
            out = fopen(argv[i] + 4, "wb");
        } else if (!strncmp(argv[i], "caches=", 7)) {
            unsigned long size[4];
            char *text = argv[i] + 7;
            for (; *text && pair_count < MOST_PAIRS; pair_count++) {
                for (int at = 0; at < 4; at++, text += *text == ':') size[at] = strtoul(text, &text, 10);
                struct memory *pair = &pairs[pair_count];
                if (!size[1] || !size[3] || !make_cache(&pair->first, size[0], size[1]) ||
                    !make_cache(&pair->second, size[2], size[3])) {
                    fprintf(stderr, "recorder: no such caches: %s\n", argv[i]);
                    return 1;
                }
                pair->lane = &lane;
                pair->lanes = 1;
                pair->missed = missed[pair_count];
            }
        }
    }
    if (!control || !out || !pair_count) {
        fprintf(stderr, "recorder: control=FILE, out=FILE and caches= are needed\n");
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finish, NULL);
    return 0;
}
