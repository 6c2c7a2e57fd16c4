/* Hooks of the emulator: for every basic block, to count it by block and lane; for every access to
 * memory, to find cache misses. Built for this machine.
 *
 * A slot is an instruction of the candidate's or the world's text; a block's first slot counts it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

struct text {
    uint64_t base, slots, first;
};
struct counts {
    struct text texts[2];
    uint64_t all_slots;
    uint64_t *count; /* lanes x all_slots */
    uint32_t *size;  /* by slot: bytes of the block */
    const volatile uint32_t *lane;
    uint64_t lanes;
    uint64_t total, limit;
    int (*stop)(void *);
    void *engine;
};

void farm_on_block(void *engine, uint64_t address, uint32_t size, struct counts *c) {
    c->total += size >> 2;
    if (c->total > c->limit) c->stop(engine);
    for (int i = 0; i < 2; i++) {
        uint64_t slot = (address - c->texts[i].base) >> 2;
        if (slot < c->texts[i].slots) {
            slot += c->texts[i].first;
            uint64_t lane = *c->lane < c->lanes ? *c->lane : c->lanes - 1;
            c->count[lane * c->all_slots + slot]++;
            c->size[slot] = size;
            return;
        }
    }
}

enum { SUPERVISOR_CALL = 2 }; /* the emulator's number of `svc` */

/* C math functions, which the world passes to this machine; counted by lane. */
struct math {
    const volatile uint32_t *lane;
    uint64_t lanes;
    uint64_t *calls; /* by lane */
    int (*read)(void *, int, void *);
    int (*write)(void *, int, const void *);
    int (*read_memory)(void *, uint64_t, void *, uint64_t);
    int (*stop)(void *);
    uint64_t refused; /* the address of an undefined instruction */
    int program_counter, first, second; /* the emulator's numbers of pc, d0 and d1 */
};

void farm_on_interrupt(void *engine, uint32_t number, struct math *m) {
    uint64_t at = 0;
    uint32_t word = 0;
    double d[2] = {0, 0};
    float f[2];
    m->read(engine, m->program_counter, &at);
    if (number != SUPERVISOR_CALL || m->read_memory(engine, at - 4, &word, 4)) {
        m->refused = at;
        m->stop(engine);
        return;
    }
    m->read(engine, m->first, &d[0]);
    m->read(engine, m->second, &d[1]);
    memcpy(&f[0], &d[0], 4);
    memcpy(&f[1], &d[1], 4);
    switch (word >> 5 & 0xffff) {
#define FLOAT(number, name) case number: f[0] = name(f[0]); break;
#define FLOATS(number, name) case number: f[0] = name(f[0], f[1]); break;
#define DOUBLE(number, name) case number: d[0] = name(d[0]); m->write(engine, m->first, &d[0]); goto done;
#define DOUBLES(number, name) case number: d[0] = name(d[0], d[1]); m->write(engine, m->first, &d[0]); goto done;
#include "math.inc"
    }
    d[0] = 0;
    memcpy(&d[0], &f[0], 4);
    m->write(engine, m->first, &d[0]);
done:
    m->calls[*m->lane < m->lanes ? *m->lane : m->lanes - 1]++;
}

#include "caches.inc"

/* Load the data at an address into L2, as far as it fits. */
void farm_warm(struct memory *m, uint64_t address, uint64_t size) {
    for (uint64_t line = address >> 6; line <= (address + size - 1) >> 6; line++) find(&m->second, line + 1);
}

int farm_on_memory(void *engine, int kind, uint64_t address, int size, int64_t value, struct memory *m) {
    (void)engine, (void)kind, (void)value;
    touch(m, (address >> 6) + 1);
    if ((address + size - 1) >> 6 != address >> 6) touch(m, ((address + size - 1) >> 6) + 1);
    return 1;
}
