// A product of any mix of types and layouts, for what cuBLASLt does not take: tiles of 64 × 64 over slices of 16 of the sums, summed in
// order in f32. 2 · m · n · k operations; each tile of an operand is read once for 64 rows or columns of the other.

#include "common.cuh"

#define TILE 64
#define SLICE 16
// A row of a tile in shared memory: its 16-byte parts stay aligned, and columns do not meet in one bank.
#define STRIDE (TILE + 4)

struct Gemm {
    Floats a, b, out;
    const float* bias;
    u32 m, n, k;
    u32 a_transposed, b_transposed, accumulate;

    // Brings in a slice of an operand of `length` rows or columns. Neighbours in memory go to neighbouring threads: along the sums
    // where those lie together, else across.
    __device__ __forceinline__ void bring(Floats from, float (*tile)[STRIDE], u32 first, u32 length, u32 slice, bool sums_together) const {
        for (u32 i = threadIdx.x; i < TILE * SLICE; i += 256) {
            u32 along = sums_together ? i % SLICE : i / TILE;
            u32 across = sums_together ? i / SLICE : i % TILE;
            u64 at = sums_together ? (u64)(first + across) * k + slice + along : (u64)(slice + along) * length + first + across;
            tile[along][across] = first + across < length && slice + along < k ? load_one(from, at) : 0.f;
        }
    }

    __device__ __forceinline__ void run() const {
        __shared__ float4 space[2 * SLICE * STRIDE / 4];
        float (*left)[STRIDE] = (float (*)[STRIDE])space;
        float (*right)[STRIDE] = left + SLICE;
        u32 first_row = blockIdx.x * TILE;
        u32 first_column = blockIdx.y * TILE;
        u32 x = 4 * (threadIdx.x % 16);
        u32 y = 4 * (threadIdx.x / 16);
        float sum[4][4] = {};
        for (u32 slice = 0; slice < k; slice += SLICE) {
            bring(a, left, first_row, m, slice, !a_transposed);
            bring(b, right, first_column, n, slice, b_transposed);
            __syncthreads();
            for (u32 i = 0; i < SLICE; i++) {
                float4 rows = *(const float4*)&left[i][y], columns = *(const float4*)&right[i][x];
                float r[4] = {rows.x, rows.y, rows.z, rows.w}, c[4] = {columns.x, columns.y, columns.z, columns.w};
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int l = 0; l < 4; l++) sum[j][l] += r[j] * c[l];
            }
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int l = 0; l < 4; l++) {
                u32 row = first_row + y + j;
                u32 column = first_column + x + l;
                if (row >= m || column >= n) continue;
                u64 at = (u64)row * n + column;
                float value = sum[j][l] + (bias ? bias[column] : 0.f);
                store_one(out, at, accumulate ? load_one(out, at) + value : value);
            }
    }
};
KERNEL(gemm, Gemm)
