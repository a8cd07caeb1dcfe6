// What kernels of attention share: numbers, stores, and tiles of records copied from pages by the tensor copy engine.
#pragma once
#include "wgmma.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ void store_16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// One thread's arrival; so many bytes are still to come.
__device__ __forceinline__ void expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// 64 columns of some records of a head, of one block.
__device__ __forceinline__ void copy_box(const TensorMap& map, u32 to, int column, int head, int row, int block, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to),
      "l"(&map), "r"(column), "r"(head), "r"(row), "r"(block), "r"(shared_address(barrier))
      : "memory");
}

// Records from ``seen`` on become zeros: what lies behind the end of a row may be anything, and 0 * NaN is NaN.
template <int RECORDS, int NUMBERS> __device__ __forceinline__ void clear_rows(u32 tile, int seen, int thread, int threads) {
  for (int at = thread; at < (RECORDS - seen) * (NUMBERS / 8); at += threads)
    store_16(tile + piece_at<RECORDS>(seen + at / (NUMBERS / 8), at % (NUMBERS / 8)), 0, 0, 0, 0);
  shared_fence();
}

#define O64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"

// s [64, 128] = (keep ? s : 0) + a [64, 16] b [128, 16]^T; both tiles have their columns together.
__device__ __forceinline__ void score(float (&s)[64], u64 a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" O64 "}, %64, %65, p, 1, 1, 0, 0; }\n"
      : F32(s, 0), F32(s, 32)
      : "l"(a), "l"(b), "r"(keep));
}
