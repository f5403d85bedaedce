// Tensor-core products: cp.async into shared memory, ldmatrix, mma.sync.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned u32;

__device__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
__device__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

__device__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((u32)__cvta_generic_to_shared(row)));
}
__device__ void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"((u32)__cvta_generic_to_shared(row)));
}
__device__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const __half*) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const __nv_bfloat16*) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// C[m,n] = A[m,k] B[k,n], all row-major; m a multiple of 16 a block, n of 32, k of 32. Four warps, 8 columns each; two buffers.
template <typename T> __device__ void product(const T* a, const T* b, float* c, int n, int k) {
    __shared__ __align__(16) T tile_a[2][16][40];
    __shared__ __align__(16) T tile_b[2][32][40];
    int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    int row = blockIdx.y * 16, column = blockIdx.x * 32;
    auto fetch = [&](int buffer, int depth) {
        int r = thread >> 2, part = (thread & 3) * 8;
        if (r < 16) copy16(&tile_a[buffer][r][part], a + (size_t)(row + r) * k + depth + part);
        copy16(&tile_b[buffer][r][part], b + (size_t)(depth + r) * n + column + part);
        commit();
    };
    float sum[4] = {};
    fetch(0, 0);
    for (int depth = 0, buffer = 0; depth < k; depth += 32, buffer ^= 1) {
        if (depth + 32 < k) { fetch(buffer ^ 1, depth + 32); wait<1>(); } else wait<0>();
        __syncthreads();
        for (int inner = 0; inner < 32; inner += 16) {
            u32 x[4], y[2];
            ldmatrix_x4(x, &tile_a[buffer][lane & 15][inner + (lane >> 4) * 8]);
            ldmatrix_x2_trans(y, &tile_b[buffer][inner + (lane & 15)][warp * 8]);
            mma(sum, x, y, a);
        }
        __syncthreads();
    }
    float* out = c + (size_t)(row + (lane >> 2)) * n + column + warp * 8 + (lane & 3) * 2;
    *(float2*)out = make_float2(sum[0], sum[1]);
    *(float2*)(out + 8 * n) = make_float2(sum[2], sum[3]);
}

extern "C" __global__ void matmul_f16(const __half* a, const __half* b, float* c, int n, int k) { product(a, b, c, n, k); }
extern "C" __global__ void matmul_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int n, int k) { product(a, b, c, n, k); }

// One 16 by 8 by 8 product in tf32: A row-major, B column-major.
extern "C" __global__ void matmul_tf32(const float* a, const float* b, float* c) {
    int g = threadIdx.x >> 2, t = threadIdx.x & 3;
    float d[4] = {};
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[g * 8 + t])), "r"(__float_as_uint(a[(g + 8) * 8 + t])),
                   "r"(__float_as_uint(a[g * 8 + t + 4])), "r"(__float_as_uint(a[(g + 8) * 8 + t + 4])),
                   "r"(__float_as_uint(b[g * 8 + t])), "r"(__float_as_uint(b[g * 8 + t + 4])));
    c[g * 8 + t * 2] = d[0];
    c[g * 8 + t * 2 + 1] = d[1];
    c[(g + 8) * 8 + t * 2] = d[2];
    c[(g + 8) * 8 + t * 2 + 1] = d[3];
}
