// The gated output norm by itself: sixteen lanes a token and head, four of them one after another.
//
// Defines: SILU (delta_norm.cuh).
#include "delta_norm.cuh"

constexpr int AT_ONCE = 4, THREADS = 256, PAIRS = THREADS / 16;  // of tokens and heads

struct Args {
  __nv_bfloat16* out;  // packed; replaced
  const __nv_bfloat16* gate;
  const float* weight;
  long long gate_t, gate_h;
  int heads, num_pairs;
  float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS) gated_norm(const Args args) {
  int lane = threadIdx.x & 15, first = blockIdx.x * (PAIRS * AT_ONCE) + (threadIdx.x >> 4);
  const float4* weights = reinterpret_cast<const float4*>(args.weight) + 2 * lane;
  const float4 weight[2] = {weights[0], weights[1]};
  uint4 o[AT_ONCE], gate[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) {
    int pair = first + i * PAIRS, token = pair / args.heads, head = pair - token * args.heads;
    o[i] = gate[i] = make_uint4(0, 0, 0, 0);
    if (pair < args.num_pairs) {
      o[i] = *reinterpret_cast<const uint4*>(args.out + (long long)pair * 128 + 8 * lane);
      gate[i] = *reinterpret_cast<const uint4*>(args.gate + token * args.gate_t + head * args.gate_h + 8 * lane);
    }
  }
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) {
    int pair = first + i * PAIRS;
    float sum = squares_of(o[i]), other = __shfl_xor_sync(~0u, sum, 8);
    uint4 x = gated(o[i], gate[i], weight, factor_of(sum, other, args.eps));
    if (pair < args.num_pairs) *reinterpret_cast<uint4*>(args.out + (long long)pair * 128 + 8 * lane) = x;
  }
}
