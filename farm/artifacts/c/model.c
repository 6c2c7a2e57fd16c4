/* See model.h. Speaks TVM's C interface (tvm/ffi/c_api.h) to its virtual machine. */
#define _POSIX_C_SOURCE 200809L

#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

/* TVM's pooled allocator keeps what one inference used for the next. */
enum { POOLED_ALLOCATOR = 2, FAST_CORES_FIRST = 1, ALIGNMENT = 64, MOST_DIMENSIONS = 16 };

struct model {
  TVMFFIAny machine, function;
  void *copies[MODEL_INPUTS];
};

typedef struct {
  const char *code;
  int bits, dimensions;
  int64_t shape[MOST_DIMENSIONS];
} described;

static const described INPUTS[] = {@INPUTS@};
static const size_t INPUT_BYTES[] = {@INPUT_BYTES@};
static const size_t OUTPUT_BYTES[] = {@OUTPUT_BYTES@};

static _Thread_local char error[512];

const char *model_error(void) { return error; }

static int fail(const char *what) {
  snprintf(error, sizeof error, "%s", what);
  return -1;
}

/* Take over the error that TVM raised. */
static int fail_by_tvm(const char *what) {
  TVMFFIObjectHandle raised = NULL;
  TVMFFIErrorMoveFromRaised(&raised);
  if (!raised) return fail(what);
  const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)raised + sizeof(TVMFFIObject));
  snprintf(error, sizeof error, "%s: %.*s", what, (int)cell->message.size, cell->message.data);
  TVMFFIObjectDecRef(raised);
  return -1;
}

static void drop(TVMFFIAny *value) {
  if (value->type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(value->v_obj);
  memset(value, 0, sizeof *value);
}

static TVMFFIAny of_int(int64_t number) {
  TVMFFIAny value = {.type_index = kTVMFFIInt};
  value.v_int64 = number;
  return value;
}

static TVMFFIAny of_text(const char *text) {
  TVMFFIAny value = {.type_index = kTVMFFIRawStr};
  value.v_c_str = text;
  return value;
}

static int call_global(const char *name, TVMFFIAny *arguments, int count, TVMFFIAny *result) {
  TVMFFIByteArray key = {name, strlen(name)};
  TVMFFIObjectHandle function = NULL;
  memset(result, 0, sizeof *result);
  if (TVMFFIFunctionGetGlobal(&key, &function)) return fail_by_tvm(name);
  if (!function) return fail("TVM's runtime lacks a function: is libtvm_runtime of another version?");
  int code = TVMFFIFunctionCall(function, arguments, count, result);
  TVMFFIObjectDecRef(function);
  return code ? fail_by_tvm(name) : 0;
}

/* The function `name` of a module. */
static int find(TVMFFIAny module, const char *name, TVMFFIAny *function) {
  TVMFFIAny arguments[] = {module, of_text(name), {.type_index = kTVMFFIBool}};
  if (call_global("ffi.ModuleGetFunction", arguments, 3, function)) return -1;
  return function->type_index == kTVMFFIFunction ? 0 : fail("the library holds no model");
}

static int call(TVMFFIAny module, const char *name, TVMFFIAny *arguments, int count, TVMFFIAny *result) {
  TVMFFIAny function;
  memset(result, 0, sizeof *result);
  if (find(module, name, &function)) return -1;
  int code = TVMFFIFunctionCall(function.v_obj, arguments, count, result);
  drop(&function);
  return code ? fail_by_tvm(name) : 0;
}

int model_create(const char *library, int threads, model **out) {
  TVMFFIAny module, nothing, path = of_text(library);
  char count[16];
  *out = NULL;
  model *self = calloc(1, sizeof *self);
  if (!self) return fail("out of memory");
  for (int i = 0; i < MODEL_INPUTS; i++) {
    if (posix_memalign(&self->copies[i], ALIGNMENT, INPUT_BYTES[i] + ALIGNMENT)) {
      model_close(self);
      return fail("out of memory");
    }
  }
  threads = threads > 0 ? threads : MODEL_THREADS;
  snprintf(count, sizeof count, "%d", threads);
  setenv("TVM_NUM_THREADS", count, 1);
  setenv("TVM_THREAD_POOL_SPIN_COUNT", "1000", 0); /* turns: 1 ms; see runner.py */
  TVMFFIAny pool[] = {of_int(FAST_CORES_FIRST), of_int(threads)};
  TVMFFIAny setup[] = {of_int(kDLCPU), of_int(0), of_int(POOLED_ALLOCATOR)};
  if (call_global("runtime.config_threadpool", pool, 2, &nothing) ||
      call_global("ffi.ModuleLoadFromFile", &path, 1, &module)) {
    model_close(self);
    return -1;
  }
  int code = call(module, "vm_load_executable", NULL, 0, &self->machine);
  drop(&module);
  if (code || call(self->machine, "vm_initialization", setup, 3, &nothing) ||
      find(self->machine, "main", &self->function)) {
    model_close(self);
    return -1;
  }
  *out = self;
  return 0;
}

/* Nothing to do: the memory is the model's. */
static void keep(DLManagedTensor *self) { (void)self; }

static int copy_output(TVMFFIAny value, void *target, size_t bytes) {
  if (value.type_index != kTVMFFITensor) return fail("the model gave something that is no tensor");
  const DLTensor *tensor = (const DLTensor *)((const char *)value.v_obj + sizeof(TVMFFIObject));
  size_t size = (tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
  for (int i = 0; i < tensor->ndim; i++) size *= (size_t)tensor->shape[i];
  if (size != bytes) return fail("the model gave an output of another size");
  memcpy(target, (const char *)tensor->data + tensor->byte_offset, bytes);
  return 0;
}

int model_run(model *self, const void *const inputs[], void *const outputs[]) {
  DLManagedTensor managed[MODEL_INPUTS];
  TVMFFIAny arguments[MODEL_INPUTS], result = {0};
  int64_t shapes[MODEL_INPUTS][MOST_DIMENSIONS];
  int made = 0, code = 0;
  for (; made < MODEL_INPUTS && !code; made++) {
    const described *about = &INPUTS[made];
    TVMFFIObjectHandle tensor = NULL;
    memcpy(self->copies[made], inputs[made], INPUT_BYTES[made]);
    memcpy(shapes[made], about->shape, sizeof about->shape);
    managed[made] = (DLManagedTensor){
        .dl_tensor = {.data = self->copies[made],
                      .device = {kDLCPU, 0},
                      .ndim = about->dimensions,
                      .dtype = {(uint8_t)(*about->code == 'f'   ? kDLFloat
                                          : *about->code == 'u' ? kDLUInt
                                          : *about->code == 'b' ? kDLBool
                                                                : kDLInt),
                                (uint8_t)about->bits, 1},
                      .shape = shapes[made]},
        .deleter = keep};
    memset(&arguments[made], 0, sizeof arguments[made]);
    if (TVMFFITensorFromDLPack(&managed[made], ALIGNMENT, 1, &tensor)) {
      code = fail_by_tvm("an input");
      break;
    }
    arguments[made].type_index = kTVMFFITensor;
    arguments[made].v_obj = tensor;
  }
  if (!code && TVMFFIFunctionCall(self->function.v_obj, arguments, MODEL_INPUTS, &result))
    code = fail_by_tvm("the model");
  while (made-- > 0) drop(&arguments[made]);
  if (code) return code;
  if (result.type_index == kTVMFFIArray) {
    const TVMFFISeqCell *found = (const TVMFFISeqCell *)((const char *)result.v_obj + sizeof(TVMFFIObject));
    if (found->size != MODEL_OUTPUTS) code = fail("the model gave another number of outputs");
    for (int i = 0; i < MODEL_OUTPUTS && !code; i++)
      code = copy_output(((const TVMFFIAny *)found->data)[i], outputs[i], OUTPUT_BYTES[i]);
  } else {
    code = copy_output(result, outputs[0], OUTPUT_BYTES[0]);
  }
  drop(&result);
  return code;
}

void model_close(model *self) {
  if (!self) return;
  drop(&self->function);
  drop(&self->machine);
  for (int i = 0; i < MODEL_INPUTS; i++) free(self->copies[i]);
  free(self);
}
