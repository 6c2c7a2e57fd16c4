#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CANDIDATE(name) int __tvm_ffi_##name(void *self, void *args, int count, void *result)

#define KEEP(pointer) __asm__ volatile("" : "+r"(pointer) : : "memory")

static void leave_file(const char *name, int number) {
  FILE *file = fopen("leaving", "w");
  fprintf(file, "%d", number);
  fclose(file);
  rename("leaving", name);
}

CANDIDATE(nothing) { return 0; }
CANDIDATE(segfault) { *(volatile int *)0 = 1; return 0; }
CANDIDATE(overflow) {
  volatile char frame[1 << 16];
  frame[0] = 1;
  return __tvm_ffi_overflow(self, (void *)frame, count, result) + frame[0];
}
CANDIDATE(aborts) { fprintf(stderr, "about to abort\n"); abort(); }
CANDIDATE(exits_0) { exit(0); }
CANDIDATE(exits_3) { exit(3); }
CANDIDATE(loops) { leave_file("busy", getpid()); for (;;) { __asm__ volatile(""); } return 0; }
/* Writes a whole page: memory is really used. */
CANDIDATE(eats_memory) {
  for (;;) {
    char *block = malloc(1 << 20);
    KEEP(block); /* or the compiler sees through the pair of malloc and NULL */
    memset(block, 1, 1 << 20);
    KEEP(block);
  }
  return 0;
}
/* Never touches what it gets, until malloc gives NULL: only the address space runs out. */
CANDIDATE(reserves_memory) {
  for (;;) {
    char *block = malloc(1 << 22);
    KEEP(block);
    if (!block) *(volatile char *)0 = 1;
  }
  return 0;
}
CANDIDATE(aborts_without_memory) {
  for (;;) {
    char *block = malloc(1 << 22);
    KEEP(block);
    if (!block) abort();
  }
  return 0;
}
CANDIDATE(talks) {
  for (int i = 0; i < 100000; i++) {
    puts("out out out out");
    fprintf(stderr, "err %d\n", i);
  }
  return 0;
}
CANDIDATE(closes_everything) { for (int fd = 0; fd < 1024; fd++) close(fd); return 0; }
/* A child that leaves the process group and outlives its parent. */
CANDIDATE(leaves_a_child) {
  if (fork() == 0) {
    setsid();
    if (fork() == 0) { leave_file("orphan", getpid()); for (;;) pause(); }
    _exit(0);
  }
  while (access("orphan", F_OK)) usleep(1000);
  return 0;
}
#ifdef CRASH_WHEN_LOADED
__attribute__((constructor)) static void crash(void) { *(volatile int *)0 = 1; }
#endif
#ifdef HANG_WHEN_LOADED
__attribute__((constructor)) static void hang(void) { for (;;) pause(); }
#endif
