// Hopper's asynchronous matrix product, and what goes with it: bf16 tiles in shared memory, accumulators in registers.
//
// Tiles lie in shared memory in column groups of 64 numbers: [rows][128 bytes], the eight 16-byte pieces of a row
// permuted by XOR with (row mod 8); a group begins on 1,024 bytes. Formats and descriptors: PTX ISA, "wgmma".
//
// SYNC_BOTH, 0 unless it is defined: builds for a checker of races. At 1 whoever would go on waits as well (``named_tell``),
// every lane arrives where one does (``arrive_of_warp``), and copies are done before an arrival behind them: the same
// order by means that the checker follows. At 2 the warps of a warpgroup also meet where a product of all has ended.
#pragma once
#ifndef SYNC_BOTH
#define SYNC_BOTH 0
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Where the 16-byte piece ``piece`` (of all columns) of a row lies in a tile of ``ROWS`` rows.
template <int ROWS> __device__ __forceinline__ u32 piece_at(int row, int piece) {
  return (piece >> 3) * (ROWS * 128) + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
}

// A tile's descriptor, in two steps: what grows with the shared address, by 1 for 16 bytes; then what is the same for
// all. leading_bytes: from one column group to the next, where the numbers of a row lie together along n. Along k it is
// 1,024.
// In a cluster, a shared address has the block's rank above bit 24; a descriptor has no room for it.
__device__ __forceinline__ u32 tile_low(u32 address, u32 leading_bytes) {
  return (address & 0x3FFFF) >> 4 | leading_bytes >> 4 << 16;
}
__device__ __forceinline__ u64 descriptor(u32 low) { return low | (u64)(1u << 30 | 1024 >> 4) << 32; }
// The same number, of which the compiler knows nothing: it then adds constants to it rather than keep the sums.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Shared memory written by ordinary stores is seen by matrix products from here on.
__device__ __forceinline__ void shared_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Keeps the compiler from moving what reads or writes accumulators over this place.
template <int N> __device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

#define F4(o, i) "+f"(o[i]), "+f"(o[i + 1]), "+f"(o[i + 2]), "+f"(o[i + 3])
#define F16(o, i) F4(o, i), F4(o, i + 4), F4(o, i + 8), F4(o, i + 12)
#define F32(o, i) F16(o, i), F16(o, i + 16)
#define O32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define O128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// s [64, 64] = (clear ? 0 : s) + a [64, 16] b [64, 16]^T; both tiles have their columns together.
__device__ __forceinline__ void product_64x64(float (&s)[32], u64 a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" O32 "}, %32, %33, p, 1, 1, 0, 0; }\n"
      : F32(s, 0)
      : "l"(a), "l"(b), "r"(keep));
}

// o [64, 256] += a [64, 16] b [16, 256]; a in registers, b with the numbers of a row together.
__device__ __forceinline__ void product_64x256(float (&o)[128], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" O128 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
      : F32(o, 0), F32(o, 32), F32(o, 64), F32(o, 96)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// The same with a in shared memory.
__device__ __forceinline__ void product_64x256(float (&o)[128], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" O128 "}, %128, %129, 1, 1, 1, 0, 1;\n"
      : F32(o, 0), F32(o, 32), F32(o, 64), F32(o, 96)
      : "l"(a), "l"(b));
}

__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// An arrival once all earlier asynchronous copies of this thread are done.
__device__ __forceinline__ void barrier_arrive_behind_copies(u64* barrier) {
#if SYNC_BOTH
  asm volatile("cp.async.wait_all;" ::: "memory");
  barrier_arrive(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}
// A warp's arrival, at a barrier that counts OF_A_WARP of each.
constexpr int OF_A_WARP = SYNC_BOTH ? 32 : 1;
__device__ __forceinline__ void arrive_of_warp(u64* barrier) {
  if (SYNC_BOTH || threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again; }\n" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}
// 16 bytes from device memory into shared memory, zeros where not ``real``.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// Barriers 1 to 15 of a block, of so many threads.
template <int ID> __device__ __forceinline__ void named_sync(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The arrival of those who need not wait for the others; these, in turn, may not wait for them further on.
__device__ __forceinline__ void named_tell(int id, int threads) {
  if (SYNC_BOTH)
    named_sync(id, threads);
  else
    named_arrive(id, threads);
}
// Behind the end of a warpgroup's product, before a warp of it overwrites what all of them multiplied: such a group of
// products is the warpgroup's, and so is its end. ``id`` is that warpgroup's own.
__device__ __forceinline__ void product_ended(int id) {
  if (SYNC_BOTH > 1) named_sync(id, 128);
}
// Two numbers as bf16, the first in the lower half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ u32 bf16_product(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ float power_of_2(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
