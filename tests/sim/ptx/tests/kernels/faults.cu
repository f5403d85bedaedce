// Kernels with one mistake each. The tests expect the line that is marked with the mistake's name.

extern "C" __global__ void beyond_the_end(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) x[i] = 1.f;  // mistake: beyond_the_end
}

extern "C" __global__ void misaligned(char* x) {
    *(int*)(x + 1) = 7;  // mistake: misaligned
}

extern "C" __global__ void missing_barrier(float* x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = tile[63 - threadIdx.x];  // mistake: missing_barrier
}

extern "C" __global__ void missing_warp_sync(float* x) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = tile[31 - threadIdx.x];  // mistake: missing_warp_sync
}

extern "C" __global__ void write_after_read(float* x) {
    __shared__ float tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float y = tile[63 - threadIdx.x];
    tile[threadIdx.x] = 2 * y;  // mistake: write_after_read
    __syncthreads();
    x[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void never_written(float* x) {
    extern __shared__ float dynamic[];
    if (threadIdx.x < 16) dynamic[threadIdx.x] = 1.f;
    __syncthreads();
    x[threadIdx.x] = dynamic[threadIdx.x];  // mistake: never_written
}

extern "C" __global__ void beyond_shared(float* x) {
    extern __shared__ float dynamic[];
    dynamic[threadIdx.x] = x[threadIdx.x];  // mistake: beyond_shared
    __syncthreads();
    x[threadIdx.x] = dynamic[threadIdx.x];
}

extern "C" __global__ void partial_barrier(float* x) {
    if (threadIdx.x < 16) __syncthreads();  // mistake: partial_barrier
    x[threadIdx.x] = 1.f;
}

extern "C" __global__ void absent_lane(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v = __shfl_xor_sync(~0u, v, 16);  // mistake: absent_lane
    x[threadIdx.x] = v;
}

extern "C" __global__ void too_early(const int4* x, int* y) {
    __shared__ int4 tile[32];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(&tile[threadIdx.x])), "l"(x + threadIdx.x));
    asm volatile("cp.async.commit_group;");
    y[threadIdx.x] = tile[threadIdx.x].x;  // mistake: too_early
    asm volatile("cp.async.wait_group 0;");
}

extern "C" __global__ void two_blocks(float* x) {
    x[0] = blockIdx.x;  // mistake: two_blocks
}

extern "C" __global__ void endless(volatile int* x) {
    while (x[0] == 0) {  // mistake: endless
    }
}
