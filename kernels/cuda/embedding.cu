// Token and position embedding, and backward without atomics.

#include "common.cuh"

struct Embedding {
    const u32* tokens;
    Floats wte, wpe, out;
    u32 context, width;
    u64 count;
    u32 vocabulary;
    Dropout dropout;
    Failing failing;

    template <int N> __device__ __forceinline__ void run() const {
        for (u64 at = N * (blockIdx.x * (u64)blockDim.x + threadIdx.x); at < count; at += N * (u64)gridDim.x * blockDim.x) {
            u64 row = at / width;
            u32 column = (u32)(at % width);
            u32 token = tokens[row];
            if (token >= vocabulary) {
                if (column == 0) failing.note((u32)row, token);
                token = 0;
            }
            float x[N], position[N];
            load<N>(wte, (u64)token * width + column, x);
            load<N>(wpe, row % context * width + column, position);
            for (int i = 0; i < N; i++) x[i] += position[i];
            drop<N>(dropout, at, x);
            store<N>(out, at, x);
        }
    }
};
WIDTHS(embedding, Embedding)

// Gradient of the token table. A block belongs to a row of `dout`, and does the work of the row's token if no earlier row has the
// same: then it adds the rows of that token in their order. Others end after a look at the tokens before.
struct EmbeddingBackwardTokens {
    const u32* tokens;
    Floats dout;
    float* dwte;
    u32 rows, width, vocabulary;
    Dropout dropout;
    Failing failing;

    template <int N> __device__ __forceinline__ void run() const {
        u32 own = blockIdx.x;
        u32 token = tokens[own];
        if (token >= vocabulary) {
            if (threadIdx.x == 0) failing.note(own, token);
            return;
        }
        __shared__ u32 matches[256];
        __shared__ u32 counts[8];
        bool seen = false;
        for (u32 row = threadIdx.x; row < own; row += blockDim.x) seen |= tokens[row] == token;
        seen = __any_sync(~0u, seen);
        if ((threadIdx.x & 31) == 0) counts[threadIdx.x / 32] = seen;
        __syncthreads();
        for (u32 warp = 0; warp < 8; warp++) seen |= counts[warp] != 0;
        if (seen) return;
        __syncthreads();
        Floats table = {dwte, F32};
        for (u32 tile = own; tile < rows; tile += 256) {
            // Rows of the tile with this token, in order.
            u32 row = tile + threadIdx.x;
            bool match = row < rows && tokens[row] == token;
            u32 votes = __ballot_sync(~0u, match);
            if ((threadIdx.x & 31) == 0) counts[threadIdx.x / 32] = __popc(votes);
            __syncthreads();
            u32 before = __popc(votes & ((1u << (threadIdx.x & 31)) - 1));
            u32 found = 0;
            for (u32 warp = 0; warp < 8; warp++) {
                if (warp < threadIdx.x / 32) before += counts[warp];
                found += counts[warp];
            }
            if (match) matches[before] = row;
            __syncthreads();
            if (found)
                for (u32 column = N * threadIdx.x; column < width; column += N * 256) {
                    float sum[N];
                    load<N>(table, (u64)token * width + column, sum);
                    for (u32 i = 0; i < found; i++) {
                        float x[N];
                        u64 at = (u64)matches[i] * width + column;
                        load<N>(dout, at, x);
                        drop<N>(dropout, at, x);
                        for (int j = 0; j < N; j++) sum[j] += x[j];
                    }
                    store<N>(table, (u64)token * width + column, sum);
                }
            __syncthreads();
        }
    }
};
WIDTHS(embedding_backward_tokens, EmbeddingBackwardTokens)

// Gradient of the position table: a thread adds the sequences of its columns in order.
struct EmbeddingBackwardPositions {
    Floats dout;
    float* dwpe;
    u32 batch;
    u64 sequence;
    Dropout dropout;

    template <int N> __device__ __forceinline__ void run() const {
        Floats table = {dwpe, F32};
        for (u64 at = N * (blockIdx.x * (u64)blockDim.x + threadIdx.x); at < sequence; at += N * (u64)gridDim.x * blockDim.x) {
            float sum[N];
            load<N>(table, at, sum);
            for (u32 i = 0; i < batch; i++) {
                float x[N];
                load<N>(dout, i * sequence + at, x);
                drop<N>(dropout, i * sequence + at, x);
                for (int j = 0; j < N; j++) sum[j] += x[j];
            }
            store<N>(table, at, sum);
        }
    }
};
WIDTHS(embedding_backward_positions, EmbeddingBackwardPositions)
