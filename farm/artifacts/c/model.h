/* One compiled model, for programs without Python: create it once, run it as often as you like, close it.
 *
 * Written by `farm model package --format c`. Link with this package's libtvm_ffi and libtvm_runtime. A model is for one
 * thread at a time. Functions return 0, or -1 with the reason in model_error().
 */
#ifndef TVM_FARM_MODEL_H
#define TVM_FARM_MODEL_H

#ifdef __cplusplus
extern "C" {
#endif

@DEFINES@
typedef struct model model;

/* Load `library` (the path of model.so) to run on so many threads; 0: as many as it was compiled for. */
int model_create(const char *library, int threads, model **out);

/* One inference. `inputs` and `outputs` are dense arrays in the order and of the sizes above; outputs are written. */
int model_run(model *self, const void *const inputs[], void *const outputs[]);

/* Give back what model_create took. */
void model_close(model *self);

/* Why the last call of this thread failed. */
const char *model_error(void);

#ifdef __cplusplus
}
#endif
#endif
