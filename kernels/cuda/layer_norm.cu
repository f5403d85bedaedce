// Layer normalisation, with the residual addition before it, its output made again, and backward.
//
// A warp takes a row and goes over it three times: the sum, the squares about the mean, the result. The row is in the first-level
// cache after the first; device memory sees each byte once. Statistics are of the stream as it is stored.

#include "common.cuh"

template <int N> __device__ __forceinline__ void normalise(Floats input, Floats out, const float* weight, const float* bias, u64 start, u32 width,
                                                           float mean, float rstd) {
    Floats gain = {(void*)weight, F32}, shift = {(void*)bias, F32};
    for (u32 column = N * (threadIdx.x & 31); column < width; column += 32 * N) {
        float x[N], w[N], b[N];
        load<N>(input, start + column, x);
        load<N>(gain, column, w);
        load<N>(shift, column, b);
        for (int i = 0; i < N; i++) x[i] = (x[i] - mean) * rstd * w[i] + b[i];
        store<N>(out, start + column, x);
    }
}

// `residual` is null without one; then `input` is what is normalised.
struct LayerNorm {
    Floats input, residual, sum_out;
    Dropout dropout;
    const float* weight;
    const float* bias;
    Floats out;
    float* means;
    float* rstds;
    u32 rows, width;
    float epsilon;

    template <int N> __device__ __forceinline__ void run() const {
        u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        if (row >= rows) return;
        u64 start = (u64)row * width;
        Floats source = residual.data ? sum_out : input;
        float sum = 0.f;
        for (u32 column = N * (threadIdx.x & 31); column < width; column += 32 * N) {
            float x[N];
            load<N>(input, start + column, x);
            if (residual.data) {
                float r[N];
                load<N>(residual, start + column, r);
                drop<N>(dropout, start + column, x);
                for (int i = 0; i < N; i++) r[i] += x[i];
                store<N>(sum_out, start + column, r);
                // As it was rounded.
                load<N>(sum_out, start + column, x);
            }
            for (int i = 0; i < N; i++) sum += x[i];
        }
        float mean = warp_sum(sum) / (float)width;
        float squares = 0.f;
        for (u32 column = N * (threadIdx.x & 31); column < width; column += 32 * N) {
            float x[N];
            load<N>(source, start + column, x);
            for (int i = 0; i < N; i++) squares += (x[i] - mean) * (x[i] - mean);
        }
        float rstd = 1.f / sqrtf(warp_sum(squares) / (float)width + epsilon);
        if ((threadIdx.x & 31) == 0) {
            means[row] = mean;
            rstds[row] = rstd;
        }
        normalise<N>(source, out, weight, bias, start, width, mean, rstd);
    }
};
WIDTHS(layer_norm, LayerNorm)

struct LayerNormApply {
    Floats input;
    const float* weight;
    const float* bias;
    const float* means;
    const float* rstds;
    Floats out;
    u32 rows, width;

    template <int N> __device__ __forceinline__ void run() const {
        u32 row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
        if (row < rows) normalise<N>(input, out, weight, bias, (u64)row * width, width, means[row], rstds[row]);
    }
};
WIDTHS(layer_norm_apply, LayerNormApply)

// Rows that one partial sum of a column covers, warps a block, and the columns that a block sums at a time.
#define REDUCE_ROWS 64
#define WARPS 16

// Sums columns of a block of REDUCE_ROWS rows. `term(row, column, x)` gives the terms of N columns; `out` takes the sums. The order
// of the sums is fixed: a warp takes every WARPS-th row, and the warps' sums are added in turn.
template <int N, typename Term>
__device__ __forceinline__ void sum_columns(u32 first_row, u32 rows, u32 width, float* out, float* parts, Term term) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    u32 end = first_row + REDUCE_ROWS < rows ? first_row + REDUCE_ROWS : rows;
    for (u32 tile = 0; tile < width; tile += 32 * N) {
        u32 column = tile + N * lane;
        float sum[N] = {};
        if (column < width)
            for (u32 row = first_row + warp; row < end; row += WARPS) {
                float x[N];
                term(row, column, x);
                for (int i = 0; i < N; i++) sum[i] += x[i];
            }
        for (int i = 0; i < N; i++) parts[(warp * N + i) * 32 + lane] = sum[i];
        __syncthreads();
        for (u32 at = threadIdx.x; at < 32 * N; at += blockDim.x) {
            // Element `at / 32` of lane `at % 32`.
            u32 of = tile + N * (at % 32) + at / 32;
            float all = 0.f;
            for (int i = 0; i < WARPS; i++) all += parts[(i * N + at / 32) * 32 + at % 32];
            if (of < width) out[of] = all;
        }
        __syncthreads();
    }
}

// A block of REDUCE_ROWS rows: their `dinput`, then their part of the sums over rows, into `workspace[block][2][width]`. `ddelta` is
// null where the delta had no dropout.
struct LayerNormBackward {
    Floats dout, input;
    const float* weight;
    const float* means;
    const float* rstds;
    Floats dinput;
    u32 accumulate;
    Floats ddelta;
    Dropout dropout;
    float* workspace;
    u32 rows, width;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ float parts[WARPS * 32 * N];
        u32 first_row = blockIdx.x * REDUCE_ROWS;
        int lane = threadIdx.x & 31;
        Floats gain = {(void*)weight, F32};
        for (u32 row = first_row + threadIdx.x / 32; row < first_row + REDUCE_ROWS && row < rows; row += WARPS) {
            u64 start = (u64)row * width;
            float mean = means[row];
            float rstd = rstds[row];
            float sum = 0.f;
            float dot = 0.f;
            for (u32 column = N * lane; column < width; column += 32 * N) {
                float g[N], x[N], w[N];
                load<N>(dout, start + column, g);
                load<N>(input, start + column, x);
                load<N>(gain, column, w);
                for (int i = 0; i < N; i++) {
                    sum += g[i] * w[i];
                    dot += g[i] * w[i] * ((x[i] - mean) * rstd);
                }
            }
            sum = warp_sum(sum) / (float)width;
            dot = warp_sum(dot) / (float)width;
            for (u32 column = N * lane; column < width; column += 32 * N) {
                float g[N], x[N], w[N], d[N];
                load<N>(dout, start + column, g);
                load<N>(input, start + column, x);
                load<N>(gain, column, w);
                if (accumulate) load<N>(dinput, start + column, d);
                for (int i = 0; i < N; i++) {
                    float own = rstd * (g[i] * w[i] - sum - (x[i] - mean) * rstd * dot);
                    d[i] = accumulate ? d[i] + own : own;
                }
                store<N>(dinput, start + column, d);
                if (ddelta.data) {
                    drop<N>(dropout, start + column, d);
                    store<N>(ddelta, start + column, d);
                }
            }
        }
        float* of_block = workspace + (u64)blockIdx.x * 2 * width;
        sum_columns<N>(first_row, rows, width, of_block, parts, [&](u32 row, u32 column, float (&g)[N]) {
            float x[N];
            u64 at = (u64)row * width + column;
            load<N>(dout, at, g);
            load<N>(input, at, x);
            for (int i = 0; i < N; i++) g[i] *= (x[i] - means[row]) * rstds[row];
        });
        sum_columns<N>(first_row, rows, width, of_block + width, parts, [&](u32 row, u32 column, float (&g)[N]) {
            load<N>(dout, (u64)row * width + column, g);
        });
    }
};
WIDTHS(layer_norm_backward, LayerNormBackward)

// Backward of a bias: the part of a block of rows, into `workspace[block][width]`.
struct BiasBackward {
    Floats dout;
    float* workspace;
    u32 rows, width;

    template <int N> __device__ __forceinline__ void run() const {
        __shared__ float parts[WARPS * 32 * N];
        sum_columns<N>(blockIdx.x * REDUCE_ROWS, rows, width, workspace + (u64)blockIdx.x * width, parts,
                       [&](u32 row, u32 column, float (&g)[N]) { load<N>(dout, (u64)row * width + column, g); });
    }
};
WIDTHS(bias_backward, BiasBackward)

// out[column] += the sum of `blocks` rows of partials, `stride` apart. 32 columns a block; eight threads take every eighth row each.
struct AddPartials {
    const float* partials;
    float* out;
    u32 blocks, stride, width, unused;

    __device__ __forceinline__ void run() const {
        __shared__ float parts[8][32];
        u32 column = blockIdx.x * 32 + threadIdx.x % 32, first = threadIdx.x / 32;
        float sum = 0.f;
        if (column < width)
            for (u32 block = first; block < blocks; block += 8) sum += partials[(u64)block * stride + column];
        parts[first][threadIdx.x % 32] = sum;
        __syncthreads();
        if (first == 0 && column < width) {
            for (int i = 1; i < 8; i++) sum += parts[i][threadIdx.x];
            out[column] += sum;
        }
    }
};
KERNEL(add_partials, AddPartials)
