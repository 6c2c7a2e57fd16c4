// Kernels for the GPU plug-in's contract, as TVM would write them.

extern "C" __global__ void __launch_bounds__(32) add(float* c, const float* a, const float* b, int count, float scale) {
  int i = ((int)blockIdx.x) * 32 + ((int)threadIdx.x);
  if (i < count) c[i] = a[i] + scale * b[i];
}

extern "C" __global__ void __launch_bounds__(64) turn(float* to, const float* from) {
  __shared__ float kept[64];
  kept[((int)threadIdx.x)] = from[((int)threadIdx.x)];
  __syncthreads();
  to[((int)threadIdx.x)] = kept[63 - ((int)threadIdx.x)];
}

extern "C" __global__ void __launch_bounds__(64) total(float* to, const float* from) {
  __shared__ float sums[2];
  float value = from[((int)threadIdx.x)];
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(__activemask(), value, step, 32);
  if (((int)threadIdx.x) % 32 == 0) sums[((int)threadIdx.x) / 32] = value;
  __syncthreads();
  if (((int)threadIdx.x) < 2) {
    value = sums[((int)threadIdx.x)];
    value += __shfl_down_sync(__activemask() & 3u, value, 1, 32);
    if (((int)threadIdx.x) == 0) to[0] = value;
  }
}

extern "C" __global__ void __launch_bounds__(64) eights(float* to, const float* from) {
  float value = from[((int)threadIdx.x)];
  unsigned int mine = 255u << (((int)threadIdx.x) % 32 / 8 * 8);
  for (int step = 4; step > 0; step /= 2) value += __shfl_down_sync(mine, value, step, 32);
  to[((int)threadIdx.x)] = __shfl_sync(mine, value, ((int)threadIdx.x) % 32 / 8 * 8, 32);
}

extern "C" __global__ void __launch_bounds__(64) dynamic(float* to, const float* from) {
  extern __shared__ unsigned char kept[];
  ((float*)kept)[((int)threadIdx.x)] = from[((int)threadIdx.x)];
  __syncthreads();
  to[((int)threadIdx.x)] = ((float*)kept)[63 - ((int)threadIdx.x)];
}
