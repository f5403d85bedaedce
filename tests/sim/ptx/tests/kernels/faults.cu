// Kernels with one mistake each. The line marked with a mistake's name is where the interpreter finds it when warps and blocks run
// in ascending order. With `repaired` a kernel is as it should be.

#define KERNEL(name) extern "C" __global__ void name(float* x, int n, int repaired)

typedef unsigned u32;

__device__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from));
}
__device__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

KERNEL(beyond_the_end) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n + !repaired) x[i] = 1.f;  // mistake: beyond_the_end
}

KERNEL(before_the_start) {
    int i = threadIdx.x;
    x[repaired ? i : i - 1] = 1.f;  // mistake: before_the_start
}

KERNEL(misaligned) {
    *(int*)((char*)x + (repaired ? 4 : 1)) = 7;  // mistake: misaligned
}

KERNEL(misaligned_pair) {
    __shared__ __align__(8) float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float2 pair = *(float2*)(tile + (repaired ? 2 : 1));  // mistake: misaligned_pair
    x[threadIdx.x] = pair.x + pair.y;
}

KERNEL(unwritten_global) {
    x[threadIdx.x] = x[(repaired ? 0 : n) + threadIdx.x];  // mistake: unwritten_global
}

__constant__ float levels[4] = {1.f, 2.f, 3.f, 4.f};

KERNEL(beyond_constant) {
    x[threadIdx.x] = levels[repaired ? 0 : n];  // mistake: beyond_constant
}

KERNEL(never_written) {
    extern __shared__ float dynamic[];
    if (repaired || threadIdx.x < 16) dynamic[threadIdx.x] = 1.f;
    __syncthreads();
    x[threadIdx.x] = dynamic[threadIdx.x];  // mistake: never_written
}

KERNEL(beyond_shared) {
    extern __shared__ float dynamic[];
    dynamic[repaired ? threadIdx.x / 2 : threadIdx.x] = 1.f;  // mistake: beyond_shared
}

KERNEL(missing_barrier) {
    __shared__ float tile[32];
    if (threadIdx.x < 32) tile[threadIdx.x] = x[threadIdx.x];
    if (repaired) __syncthreads();
    if (threadIdx.x >= 32) x[threadIdx.x] = tile[63 - threadIdx.x];  // mistake: missing_barrier
}

KERNEL(write_after_read) {
    __shared__ float tile[32];
    if (threadIdx.x < 32) tile[threadIdx.x] = 1.f;
    __syncthreads();
    if (threadIdx.x < 32) x[threadIdx.x] = tile[31 - threadIdx.x];
    if (repaired) __syncthreads();
    if (threadIdx.x >= 32) tile[threadIdx.x - 32] = 2.f;  // mistake: write_after_read
}

KERNEL(write_after_write) {
    __shared__ float last;
    if (repaired ? threadIdx.x == 0 : threadIdx.x % 32 == 0) last = threadIdx.x;  // mistake: write_after_write
    __syncthreads();
    x[threadIdx.x] = last;
}

KERNEL(missing_warp_sync) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    if (repaired) __syncwarp();
    x[threadIdx.x] = tile[31 - threadIdx.x];  // mistake: missing_warp_sync
}

KERNEL(plain_beside_atomic) {
    __shared__ u32 count;
    if (!threadIdx.x) count = 0;
    __syncthreads();
    atomicAdd(&count, 1u);
    if (repaired) __syncthreads();
    x[threadIdx.x] = count;  // mistake: plain_beside_atomic
}

KERNEL(partial_barrier) {
    if (repaired || threadIdx.x < 16) __syncthreads();  // mistake: partial_barrier
    x[threadIdx.x] = 1.f;
}

KERNEL(different_barriers) {
    if (repaired || threadIdx.x < 32) asm volatile("bar.sync 1;");  // mistake: different_barriers
    else asm volatile("bar.sync 2;");
    x[threadIdx.x] = 1.f;
}

KERNEL(absent_lane) {
    float v = x[threadIdx.x];
    if (repaired || threadIdx.x < 16) v = __shfl_xor_sync(~0u, v, 16);  // mistake: absent_lane
    x[threadIdx.x] = v;
}

KERNEL(unnamed_source) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v = __shfl_xor_sync(0xffff, v, repaired ? 8 : 16);  // mistake: unnamed_source
    x[threadIdx.x] = v;
}

KERNEL(too_early) {
    __shared__ float4 tile[32];
    copy16(&tile[threadIdx.x], x + 4 * threadIdx.x);
    commit();
    if (repaired) wait<0>();
    x[threadIdx.x] = tile[threadIdx.x].x;  // mistake: too_early
    wait<0>();
}

KERNEL(wrong_group) {
    __shared__ float4 tile[2][32];
    for (int k = 0; k < 2; k++) {
        copy16(&tile[k][threadIdx.x], x + 4 * threadIdx.x);
        commit();
    }
    if (repaired) wait<0>(); else wait<1>();
    x[threadIdx.x] = tile[0][threadIdx.x].x + tile[1][threadIdx.x].x;  // mistake: wrong_group
}

KERNEL(only_own_copies) {
    __shared__ float4 tile[32];
    copy16(&tile[threadIdx.x], x + 4 * threadIdx.x);
    commit();
    wait<0>();
    if (repaired) __syncthreads();
    x[threadIdx.x] = tile[31 - threadIdx.x].x;  // mistake: only_own_copies
}

KERNEL(two_blocks) {
    x[repaired ? blockIdx.x : 0] = blockIdx.x;  // mistake: two_blocks
}

KERNEL(block_reads_block) {
    if (blockIdx.x == 0) x[threadIdx.x] = 1.f;
    if (blockIdx.x == 1) x[64 + threadIdx.x] = x[(repaired ? 32 : 0) + threadIdx.x];  // mistake: block_reads_block
}

KERNEL(trapped) {
    if (!repaired && threadIdx.x == 5) __trap();  // mistake: trapped
    x[threadIdx.x] = 1.f;
}

KERNEL(endless) {
    while (!repaired && *(volatile float*)x != 0) {  // mistake: endless
    }
}
