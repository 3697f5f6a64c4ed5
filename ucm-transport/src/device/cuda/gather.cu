// Copies fragments: block b takes descriptors b, b + grid, ...; all its threads share one fragment.
// Source and destination may be device memory, pinned host memory or memory of a peer.
struct Fragment {
    unsigned long long src;
    unsigned long long dst;
    unsigned long long len;
};

template <typename Word>
__device__ void words(unsigned long long src, unsigned long long dst, unsigned long long count) {
    const Word* from = reinterpret_cast<const Word*>(src);
    Word* to = reinterpret_cast<Word*>(dst);
    unsigned long long at = threadIdx.x;
    // Four loads in flight a thread: reads over the bus are latency.
    for (; at + 3 * blockDim.x < count; at += 4 * blockDim.x) {
        Word a = from[at];
        Word b = from[at + blockDim.x];
        Word c = from[at + 2 * blockDim.x];
        Word d = from[at + 3 * blockDim.x];
        to[at] = a;
        to[at + blockDim.x] = b;
        to[at + 2 * blockDim.x] = c;
        to[at + 3 * blockDim.x] = d;
    }
    for (; at < count; at += blockDim.x) {
        to[at] = from[at];
    }
}

extern "C" __global__ void ucm_gather(const Fragment* fragments, unsigned int count) {
    for (unsigned int f = blockIdx.x; f < count; f += gridDim.x) {
        const Fragment one = fragments[f];
        const unsigned long long both = one.src | one.dst;
        unsigned long long done = 0;
        if ((both & 15) == 0) {
            words<uint4>(one.src, one.dst, one.len / 16);
            done = one.len & ~15ULL;
        } else if ((both & 7) == 0) {
            words<unsigned long long>(one.src, one.dst, one.len / 8);
            done = one.len & ~7ULL;
        } else if ((both & 3) == 0) {
            words<unsigned int>(one.src, one.dst, one.len / 4);
            done = one.len & ~3ULL;
        }
        words<unsigned char>(one.src + done, one.dst + done, one.len - done);
    }
}
