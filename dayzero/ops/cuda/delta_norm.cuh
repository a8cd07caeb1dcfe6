// The gated output norm of the delta rule, for heads of 128 values in bf16: o / rms(o) * weight * act(gate).
//
// Eight lanes have 64 values of a token's head, eight each. Both kernels that do this add up the same way, so that which
// of them a token goes through does not show. Defines: SILU, the activation; else the sigmoid.
#pragma once
#include "delta_chunk.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

// The sum of the squares of 64 values over eight lanes, in each of them.
__device__ __forceinline__ float squares_of(uint4 x) {
  const u32 pairs[4] = {x.x, x.y, x.z, x.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 v = floats_of_bf16(pairs[i]);
    sum = fmaf(v.y, v.y, fmaf(v.x, v.x, sum));
  }
#pragma unroll
  for (int apart = 1; apart < 8; apart <<= 1) sum += __shfl_xor_sync(~0u, sum, apart);
  return sum;
}
__device__ __forceinline__ float factor_of(float low, float high, float eps) {
  return rsqrtf(fmaf(low + high, 1.0f / 128.0f, eps));
}
__device__ __forceinline__ float gated(float o, float gate, float weight, float factor) {
  float act = inverse_of(1.0f + power_of_2(-LOG2_E * gate));
#if SILU
  act *= gate;
#endif
  return o * factor * weight * act;
}
__device__ __forceinline__ uint4 gated(uint4 o, uint4 gate, const float4 (&weight)[2], float factor) {
  const u32 pairs[4] = {o.x, o.y, o.z, o.w}, gates[4] = {gate.x, gate.y, gate.z, gate.w};
  u32 out[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 v = floats_of_bf16(pairs[i]), g = floats_of_bf16(gates[i]);
    float4 w = weight[i >> 1];
    out[i] = bf16_pair(gated(v.x, g.x, i & 1 ? w.z : w.x, factor), gated(v.y, g.y, i & 1 ? w.w : w.y, factor));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}
