// What both kernels of routed experts of a few tokens share, whatever stacks are stored in.
//
// CHOSEN, where it is defined: experts a token. BIAS: 0 none, 1 bf16, 2 f32.
#pragma once
#include "products.cuh"

#define THREADS (WARPS * 32)

__device__ __forceinline__ i64 expert_at(const i64* ids) {
  i64 expert;  // past the first-level cache, which may hold ids of another layer
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(expert) : "l"(ids) : "memory");
  return expert;
}

__device__ __forceinline__ float bias_at(const void* bias, i64 n) {
  if (BIAS == 1) return __uint_as_float((u32)((const u16*)bias)[n] << 16);
  return BIAS == 2 ? ((const float*)bias)[n] : 0.f;
}

__device__ __forceinline__ void store(u16* to, float x) { *to = (u16)(__float_as_uint(narrowed(x)) >> 16); }

#ifdef CHOSEN
struct Choices {
  i64 expert[CHOSEN];     // -1: none
  float weight[CHOSEN];
  int ascending[CHOSEN];  // of the choices, in the order of their experts
};

// Ids can be read before gate_up has ended: see there. The block meets behind it.
__device__ __forceinline__ void read_ids(Choices& all, const i64* ids, int experts) {
  const int n = threadIdx.x;
  if (n < CHOSEN) {
    const i64 expert = expert_at(ids + n);
    all.expert[n] = expert < experts ? expert : -1;
  }
  __syncthreads();
}

// The rest; waits for gate_up.
__device__ __forceinline__ void read_weights(Choices& all, const float* weights) {
  const int n = threadIdx.x;
  if (n < CHOSEN) {
    int before = 0;
    for (int other = 0; other < CHOSEN; ++other)
      before += all.expert[other] < all.expert[n] || (all.expert[other] == all.expert[n] && other < n);
    all.ascending[before] = n;
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (n < CHOSEN) all.weight[n] = weights[n];
}

// The weighted sum of what value(choice) is of choices that are one, as the reference adds.
template <class Value>
__device__ __forceinline__ float weighted(const Choices& all, Value value) {
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < CHOSEN; ++i) {
    const int n = all.ascending[i];
    if (all.expert[n] >= 0) total = __fadd_rn(total, __fmul_rn(all.weight[n], value(n)));
  }
  return total;
}
#endif
