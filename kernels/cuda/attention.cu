// Causal self-attention for any mix of types: a warp has rows of its own, its lanes take a row each of a tile of the others.
//
// Forward, own rows are queries. A lane makes the score of its key, the softmax goes on over the tiles (Milakov and Gimelshein, 2018),
// then a lane sums channels of its own: `out += p v`, with `p` from the lane that has it. Backward (Dao et al., 2022) makes
// probabilities again from `lse`, in two passes of one shape: over queries for dq, over keys for dk and dv. So every sum has one writer,
// and an order that the shape alone decides. Tiles that no own row sees are left out; hidden keys are never multiplied, so what is not
// finite at a position does not reach earlier ones.
//
// With pairs = batch · heads · context² / 2: forward 4 · head_size · pairs operations, backward 14 (the scores are made twice). Blocks
// are of 128 threads, x is the head of a sequence, y the tile of own rows. Kernels come for head sizes of up to 64 and up to 128.

#include "common.cuh"

#define WARPS 4
// Rows of a tile: one a lane.
#define TILE 32
// Own rows of a warp.
#define OWN 4
#define OWN_BACKWARD 2

#define SIZES(name, Kernel, run)                                                                   \
    extern "C" __global__ void name##_64(const __grid_constant__ Kernel kernel) { kernel.run<64>(); } \
    extern "C" __global__ void name##_128(const __grid_constant__ Kernel kernel) { kernel.run<128>(); }

// A head's channels, a row a position.
struct Rows {
    Floats data;
    u64 start;
    u32 stride;
};

struct Head {
    u32 context, heads, size;

    // The part-th of `parts` of a buffer: 0 to 2 of 3 are queries, keys and values.
    __device__ __forceinline__ Rows rows(Floats data, u32 part, u32 parts) const {
        u32 width = heads * size;
        u64 sequence = blockIdx.x / heads, head = blockIdx.x % heads;
        return {data, sequence * context * parts * width + part * width + head * size, parts * width};
    }

    // The position's place among all heads' rows, which is the head's index in `lse`.
    __device__ __forceinline__ u64 row(u32 position) const { return (u64)blockIdx.x * context + position; }

    // Copies rows to shared memory, SIZE channels each, zeros past the head's size and the context's end.
    template <int SIZE, int STRIDE> __device__ __forceinline__ void bring(const Rows& from, u32 first, u32 count, float (*to)[STRIDE]) const {
        for (u32 row = threadIdx.x / 32; row < count; row += WARPS)
            for (u32 channel = threadIdx.x & 31; channel < SIZE; channel += 32) {
                bool inside = first + row < context && channel < size;
                to[row][channel] = inside ? load_one(from.data, from.start + (u64)(first + row) * from.stride + channel) : 0.f;
            }
    }

    __device__ __forceinline__ void give(const Rows& to, u32 position, int part, float value) const {
        u32 channel = (threadIdx.x & 31) + 32 * part;
        if (position < context && channel < size) store_one(to.data, to.start + (u64)position * to.stride + channel, value);
    }
};

struct Attention {
    Floats qkv, out;
    float* lse;
    Head head;
    float scale;
    Dropout dropout;

    template <int SIZE> __device__ __forceinline__ void run() const {
        __shared__ float queries[WARPS * OWN][SIZE];
        __shared__ float keys[TILE][SIZE + 1]; // Rows of lanes meet different banks.
        __shared__ float values[TILE][SIZE];
        constexpr int PARTS = SIZE / 32;
        u32 lane = threadIdx.x & 31, own = threadIdx.x / 32 * OWN;
        // The longest rows begin first.
        u32 first = (gridDim.y - 1 - blockIdx.y) * WARPS * OWN;
        u32 end = min(first + WARPS * OWN, head.context);
        head.bring<SIZE>(head.rows(qkv, 0, 3), first, WARPS * OWN, queries);
        float sums[OWN][PARTS] = {}, largest[OWN], total[OWN] = {};
#pragma unroll
        for (int i = 0; i < OWN; i++) largest[i] = -infinity();
        for (u32 tile = 0; tile < end; tile += TILE) {
            __syncthreads();
            head.bring<SIZE>(head.rows(qkv, 1, 3), tile, TILE, keys);
            head.bring<SIZE>(head.rows(qkv, 2, 3), tile, TILE, values);
            __syncthreads();
            float p[OWN] = {};
            for (u32 channel = 0; channel < head.size; channel++) {
                float key = keys[lane][channel];
#pragma unroll
                for (int i = 0; i < OWN; i++) p[i] += queries[own + i][channel] * key;
            }
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                u32 query = first + own + i;
                bool seen = tile + lane <= query;
                float score = seen ? p[i] * scale : -infinity();
                float all = larger(largest[i], warp_max(score));
                // Where nothing but -inf was seen, -inf - -inf would make NaN of what a later key can still outweigh.
                float shift = all == -infinity() ? 0.f : all;
                float rescale = expf(largest[i] - shift);
                p[i] = seen ? expf(score - shift) : 0.f;
                total[i] = total[i] * rescale + warp_sum(p[i]);
                largest[i] = all;
                if (dropout.threshold && seen && query < head.context)
                    p[i] *= dropout_one(dropout, head.row(query) * head.context + tile + lane);
#pragma unroll
                for (int part = 0; part < PARTS; part++) sums[i][part] *= rescale;
            }
            for (u32 j = 0; j < min(TILE, end - tile); j++) {
                float value[PARTS];
#pragma unroll
                for (int part = 0; part < PARTS; part++) value[part] = values[j][lane + 32 * part];
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    float weight = __shfl_sync(~0u, p[i], j);
                    if (tile + j > first + own + i) continue;
#pragma unroll
                    for (int part = 0; part < PARTS; part++) sums[i][part] += weight * value[part];
                }
            }
        }
        Rows to = head.rows(out, 0, 1);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            u32 query = first + own + i;
#pragma unroll
            for (int part = 0; part < PARTS; part++) head.give(to, query, part, sums[i][part] / total[i]);
            if (lane == 0 && query < head.context) lse[head.row(query)] = largest[i] + logf(total[i]);
        }
    }
};
SIZES(attention, Attention, run)

struct AttentionBackward {
    Floats dout, qkv, out, dqkv;
    const float* lse;
    float* workspace;
    Head head;
    float scale;
    Dropout dropout;

    // The row sums of dout ∘ out that a softmax's gradient takes off: a warp a position.
    __device__ __forceinline__ void row_sums() const {
        u32 position = blockIdx.y * WARPS + threadIdx.x / 32;
        if (position >= head.context) return;
        Rows left = head.rows(dout, 0, 1), right = head.rows(out, 0, 1);
        u64 skip = (u64)position * left.stride;
        float sum = 0;
        for (u32 channel = threadIdx.x & 31; channel < head.size; channel += 32)
            sum += load_one(dout, left.start + skip + channel) * load_one(out, right.start + skip + channel);
        sum = warp_sum(sum);
        if ((threadIdx.x & 31) == 0) workspace[head.row(position)] = sum;
    }

    // Own rows are queries and the others keys, or the other way about; with them go rows of dout and of values.
    template <int SIZE, bool OF_KEYS> __device__ __forceinline__ void pass() const {
        __shared__ float own_rows[WARPS * OWN_BACKWARD][SIZE];
        __shared__ float own_partners[WARPS * OWN_BACKWARD][SIZE];
        __shared__ float rows[TILE][SIZE + 1];
        __shared__ float partners[TILE][SIZE + 1];
        constexpr int PARTS = SIZE / 32;
        u32 lane = threadIdx.x & 31, own = threadIdx.x / 32 * OWN_BACKWARD;
        // The longest rows begin first: the last query sees every key, the first key is seen by every query.
        u32 first = (OF_KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y) * WARPS * OWN_BACKWARD;
        Rows queries = head.rows(qkv, 0, 3), keys = head.rows(qkv, 1, 3), values = head.rows(qkv, 2, 3), gradients = head.rows(dout, 0, 1);
        head.bring<SIZE>(OF_KEYS ? keys : queries, first, WARPS * OWN_BACKWARD, own_rows);
        head.bring<SIZE>(OF_KEYS ? values : gradients, first, WARPS * OWN_BACKWARD, own_partners);
        float sums[OWN_BACKWARD][PARTS] = {}, partner_sums[OWN_BACKWARD][PARTS] = {};
        u32 begin = OF_KEYS ? first / TILE * TILE : 0;
        u32 end = OF_KEYS ? head.context : min(first + WARPS * OWN_BACKWARD, head.context);
        for (u32 tile = begin; tile < end; tile += TILE) {
            __syncthreads();
            head.bring<SIZE>(OF_KEYS ? queries : keys, tile, TILE, rows);
            head.bring<SIZE>(OF_KEYS ? gradients : values, tile, TILE, partners);
            __syncthreads();
            float p[OWN_BACKWARD] = {}, ds[OWN_BACKWARD] = {};
            for (u32 channel = 0; channel < head.size; channel++) {
                float row = rows[lane][channel], partner = partners[lane][channel];
#pragma unroll
                for (int i = 0; i < OWN_BACKWARD; i++) {
                    p[i] += own_rows[own + i][channel] * row;
                    ds[i] += own_partners[own + i][channel] * partner;
                }
            }
#pragma unroll
            for (int i = 0; i < OWN_BACKWARD; i++) {
                u32 query = OF_KEYS ? tile + lane : first + own + i;
                u32 key = OF_KEYS ? first + own + i : tile + lane;
                if (key > query || query >= head.context) {
                    p[i] = ds[i] = 0.f;
                    continue;
                }
                float factor = dropout.threshold ? dropout_one(dropout, head.row(query) * head.context + key) : 1.f;
                float probability = expf(p[i] * scale - lse[head.row(query)]);
                ds[i] = probability * (ds[i] * factor - workspace[head.row(query)]) * scale;
                p[i] = probability * factor;
            }
            for (u32 j = 0; j < min(TILE, end - tile); j++) {
                float row[PARTS], partner[PARTS];
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    row[part] = rows[j][lane + 32 * part];
                    if (OF_KEYS) partner[part] = partners[j][lane + 32 * part];
                }
#pragma unroll
                for (int i = 0; i < OWN_BACKWARD; i++) {
                    float slope = __shfl_sync(~0u, ds[i], j), weight = OF_KEYS ? __shfl_sync(~0u, p[i], j) : 0.f;
                    u32 mine = first + own + i;
                    if (OF_KEYS ? tile + j < mine : tile + j > mine) continue;
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        sums[i][part] += slope * row[part];
                        if (OF_KEYS) partner_sums[i][part] += weight * partner[part];
                    }
                }
            }
        }
        Rows to = head.rows(dqkv, OF_KEYS ? 1 : 0, 3), partner_to = head.rows(dqkv, 2, 3);
#pragma unroll
        for (int i = 0; i < OWN_BACKWARD; i++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                head.give(to, first + own + i, part, sums[i][part]);
                if (OF_KEYS) head.give(partner_to, first + own + i, part, partner_sums[i][part]);
            }
    }

    template <int SIZE> __device__ __forceinline__ void of_queries() const { pass<SIZE, false>(); }
    template <int SIZE> __device__ __forceinline__ void of_keys() const { pass<SIZE, true>(); }
};
extern "C" __global__ void attention_row_sums(const __grid_constant__ AttentionBackward kernel) { kernel.row_sums(); }
SIZES(attention_backward_queries, AttentionBackward, of_queries)
SIZES(attention_backward_keys, AttentionBackward, of_keys)
