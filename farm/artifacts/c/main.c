/* Run the model on files of raw numbers: main MODEL.so INPUT… OUTPUT…, one file for each input and output, in order. */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "model.h"

static const size_t INPUT_BYTES[] = {@INPUT_BYTES@};
static const size_t OUTPUT_BYTES[] = {@OUTPUT_BYTES@};
enum { RUNS = 10 };

static double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static int compare(const void *a, const void *b) {
  double left = *(const double *)a, right = *(const double *)b;
  return left < right ? -1 : left > right;
}

int main(int count, char **words) {
  void *inputs[MODEL_INPUTS], *outputs[MODEL_OUTPUTS];
  double taken_s[RUNS];
  model *self;
  if (count != 2 + MODEL_INPUTS + MODEL_OUTPUTS) {
    fprintf(stderr, "usage: %s MODEL.so INPUT... OUTPUT...: %d input and %d output files of raw numbers\n", words[0],
            MODEL_INPUTS, MODEL_OUTPUTS);
    return 2;
  }
  for (int i = 0; i < MODEL_INPUTS; i++) {
    FILE *file = fopen(words[2 + i], "rb");
    inputs[i] = malloc(INPUT_BYTES[i] + 1);
    /* One more than wanted: a longer file is not this input. */
    size_t got = file && inputs[i] ? fread(inputs[i], 1, INPUT_BYTES[i] + 1, file) : 0;
    if (file) fclose(file);
    if (got != INPUT_BYTES[i]) {
      fprintf(stderr, "error: %s holds %zu bytes, the input has %zu\n", words[2 + i], got, INPUT_BYTES[i]);
      return 2;
    }
  }
  for (int i = 0; i < MODEL_OUTPUTS; i++)
    if (!(outputs[i] = malloc(OUTPUT_BYTES[i] + 1))) return 1;
  if (model_create(words[1], 0, &self)) {
    fprintf(stderr, "error: %s\n", model_error());
    return 1;
  }
  for (int run = 0; run < RUNS; run++) {
    double begun_s = now_s();
    if (model_run(self, (const void *const *)inputs, outputs)) {
      fprintf(stderr, "error: %s\n", model_error());
      return 1;
    }
    taken_s[run] = now_s() - begun_s;
  }
  model_close(self);
  for (int i = 0; i < MODEL_OUTPUTS; i++) {
    FILE *file = fopen(words[2 + MODEL_INPUTS + i], "wb");
    size_t put = file ? fwrite(outputs[i], 1, OUTPUT_BYTES[i], file) : 0;
    if (!file || fclose(file) || put != OUTPUT_BYTES[i]) {
      fprintf(stderr, "error: %s cannot be written\n", words[2 + MODEL_INPUTS + i]);
      return 1;
    }
  }
  qsort(taken_s, RUNS, sizeof *taken_s, compare);
  printf("%.3f ms per inference, median of %d\n", taken_s[RUNS / 2] * 1e3, RUNS);
  return 0;
}
