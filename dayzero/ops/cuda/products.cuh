// Pieces of products that take weights from a ring of stages in shared memory: copies into it, the matrix unit, and the
// gated activation of two sums.
//
// GLU: the kind of the activation (ops/activation), where there is one.
#pragma once
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

__device__ __forceinline__ void copy_async(u32 into, const void* from, bool there) {
  const int bytes = there ? 16 : 0;  // what is not read is 0
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(into), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float narrowed(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return __uint_as_float((u32)bits << 16);
}

struct Constants {
  float limit, alpha, beta, linear_beta;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float activated(float g, float u, Constants with) {
  if (GLU == 2 || GLU == 3) {  // a NaN stays one
    g = g > with.limit ? with.limit : g;
    u = u > with.limit ? with.limit : u < -with.limit ? -with.limit : u;
  }
  if (GLU == 1) return g * sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g)) * u;
  if (GLU == 2) return g * sigmoid(with.alpha * g) * (u + 1.f);
  if (GLU == 4) return with.beta * tanhf(g / with.beta) * sigmoid(g) * (with.linear_beta * tanhf(u / with.linear_beta));
  return g * sigmoid(g) * u;
}
