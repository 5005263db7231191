// libcudart for a card that is not there: answers what PyTorch asks, writes down every launch, copy and wait, and
// computes nothing. Memory is real but untouched, so tensors of any size cost nothing until somebody writes to them.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#define API extern "C" cudaError_t

// ---- what happened ----------------------------------------------------------------------------------------------
static std::mutex guard;
static bool recording = false, capturing = false;
static unsigned long long capture = 1;
static std::vector<std::string>& events() { static auto* all = new std::vector<std::string>; return *all; }

extern "C" void card_event(const char* what) {
    if (!recording) return;
    std::lock_guard<std::mutex> lock(guard);
    events().push_back(what);
}
extern "C" void card_start() { events().clear(); recording = true; }
extern "C" int card_stop() { recording = false; return events().size(); }
extern "C" const char* card_get(int index) { return events()[index].c_str(); }

static cudaError_t wait(const char* what) {
    card_event(capturing ? "illegal wait in a captured graph" : what);
    return cudaSuccess;
}

// ---- the card: FAKE_SM names it ---------------------------------------------------------------------------------
struct Card { int sm, processors, shared, threads; };
static const Card& card() {
    static const Card all[] = {{75, 40, 64, 1024}, {80, 108, 163, 2048}, {89, 128, 99, 1536}, {90, 132, 227, 2048},
                               {100, 148, 227, 2048}, {120, 170, 99, 1536}};
    static const int sm = getenv("FAKE_SM") ? atoi(getenv("FAKE_SM")) : 90;
    for (const Card& one : all) if (one.sm == sm) return one;
    fprintf(stderr, "FAKE_SM must be 75, 80, 89, 90, 100 or 120, got %d\n", sm);
    exit(2);
}
static const size_t MEMORY = 80ull << 30;

API cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
API cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
API cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "no card, posing as sm_%d", card().sm);
    p->major = card().sm / 10, p->minor = card().sm % 10, p->totalGlobalMem = MEMORY;
    p->multiProcessorCount = card().processors, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = card().threads, p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = card().shared << 10;
    p->sharedMemPerMultiprocessor = (card().shared + 1) << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->l2CacheSize = 50 << 20, p->textureAlignment = 512;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535, p->memoryBusWidth = 5120;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    return cudaSuccess;
}
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    switch (what) {
        case cudaDevAttrComputeCapabilityMajor: *value = card().sm / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = card().sm % 10; break;
        case cudaDevAttrMultiProcessorCount: *value = card().processors; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card().shared << 10; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (card().shared + 1) << 10; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card().threads; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
        default: *value = 1;
    }
    return cudaSuccess;
}
API cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaDeviceGetPCIBusId(char* id, int size, int) { snprintf(id, size, "0000:00:00.0"); return cudaSuccess; }
API cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
API cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
API cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "an error of a card that is not there"; }
extern "C" const char* cudaGetErrorName(cudaError_t) { return "noCardError"; }
static long nothing(...) { return 0; }
API cudaGetDriverEntryPointByVersion(const char*, void** f, unsigned, unsigned long long,
                                     cudaDriverEntryPointQueryResult* found) {
    *f = (void*)nothing;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ---- kernels ----------------------------------------------------------------------------------------------------
static std::unordered_map<const void*, const char*>& names() {
    static auto* all = new std::unordered_map<const void*, const char*>;
    return *all;
}
struct Launch { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::vector<Launch> pending;

static cudaError_t launch(const void* kernel) {
    if (!recording) return cudaSuccess;
    const char* name = names().count(kernel) ? names()[kernel] : "?";
    int status;
    char* readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    card_event((std::string("kernel ") + (readable ? readable : name)).c_str());
    free(readable);
    return cudaSuccess;
}
extern "C" void** __cudaRegisterFatBinary(void*) { static void* binary; return &binary; }
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" void __cudaRegisterVar(...) {}
extern "C" void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, ...) { names()[kernel] = name; }
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    pending.push_back({grid, block, shared, stream});
    return 0;
}
API __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    Launch last = pending.back();
    pending.pop_back();
    *grid = last.grid, *block = last.block, *shared = last.shared, *(void**)stream = last.stream;
    return cudaSuccess;
}
API __cudaGetKernel(cudaKernel_t* kernel, const void* f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
API __cudaLaunchKernel(cudaKernel_t f, dim3, dim3, void**, size_t, cudaStream_t) { return launch((const void*)f); }
API cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t) { return launch(f); }
API cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* f, void**) { return launch(f); }
API cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 64;
    a->binaryVersion = a->ptxVersion = card().sm == 89 ? 86 : card().sm;  // PyTorch brings no code for sm_89 alone
    return cudaSuccess;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
    *n = 2;
    return cudaSuccess;
}
API cudaGetSymbolAddress(void** p, const void*) { static char some[4096]; *p = some; return cudaSuccess; }

// ---- streams, events, graphs ------------------------------------------------------------------------------------
template <class T> static cudaError_t fresh(T* handle) { *handle = (T)malloc(16); return cudaSuccess; }
API cudaDeviceSynchronize() { return wait("wait for the device"); }
API cudaStreamSynchronize(cudaStream_t) { return wait("wait for a stream"); }
API cudaEventSynchronize(cudaEvent_t) { return wait("wait for an event"); }
API cudaEventCreate(cudaEvent_t* e) { return fresh(e); }
API cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return fresh(e); }
API cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return cudaSuccess; }
API cudaStreamCreate(cudaStream_t* s) { return fresh(s); }
API cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return fresh(s); }
API cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return fresh(s); }
API cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
static cudaStream_t captured;  // the others run on: PyTorch allocates a graph's seeds there
static cudaStreamCaptureStatus status(cudaStream_t stream) {
    return capturing && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
API cudaStreamIsCapturing(cudaStream_t t, cudaStreamCaptureStatus* s) { *s = status(t); return cudaSuccess; }
API cudaStreamBeginCapture(cudaStream_t t, cudaStreamCaptureMode) {
    capturing = true, captured = t, capture++;
    return cudaSuccess;
}
API cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) { capturing = false; return fresh(graph); }
API cudaStreamGetCaptureInfo(cudaStream_t t, cudaStreamCaptureStatus* s, unsigned long long* id, cudaGraph_t* graph,
                             const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    if (s) *s = status(t);
    if (id) *id = capture;
    if (graph) *graph = (cudaGraph_t)&capture;
    return cudaSuccess;
}
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) { return fresh(e); }
API cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) { *n = 1; return cudaSuccess; }
API cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { card_event("graph launched"); return cudaSuccess; }

// ---- memory -----------------------------------------------------------------------------------------------------
static std::map<char*, size_t>& blocks() { static auto* all = new std::map<char*, size_t>; return *all; }
static size_t used = 0;
static const size_t SLACK = 2 << 20, COPIED = 1 << 20;  // longer copies within the card are not carried out

static bool on_card(const void* p) {
    auto after = blocks().upper_bound((char*)p);
    if (after == blocks().begin()) return false;
    --after;
    return (char*)p < after->first + after->second;
}
API cudaMalloc(void** p, size_t n) {
    std::lock_guard<std::mutex> lock(guard);
    if (used + n > MEMORY) return cudaErrorMemoryAllocation;
    void* q = mmap(nullptr, n + SLACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (q == MAP_FAILED) return cudaErrorMemoryAllocation;
    used += n, blocks()[(char*)q] = n, *p = q;
    return cudaSuccess;
}
API cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
API cudaFree(void* p) {
    std::lock_guard<std::mutex> lock(guard);
    auto block = blocks().find((char*)p);
    if (block == blocks().end()) return cudaSuccess;
    munmap(p, block->second + SLACK);
    used -= block->second;
    blocks().erase(block);
    return cudaSuccess;
}
API cudaHostAlloc(void** p, size_t n, unsigned) { *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096); return cudaSuccess; }
API cudaFreeHost(void* p) { free(p); return cudaSuccess; }
API cudaMemGetInfo(size_t* free, size_t* total) { *free = MEMORY - used, *total = MEMORY; return cudaSuccess; }
static cudaError_t copy(void* to, const void* from, size_t n, const char* how) {
    bool ends = on_card(to), starts = on_card(from);
    if (starts && !ends) memset(to, 0, n);  // nobody computed what a kernel left: the host reads 0
    else if (!starts || n < COPIED) memcpy(to, from, n);
    char text[64];
    snprintf(text, sizeof text, "%s %s to %s %zu", how, starts ? "card" : "host", ends ? "card" : "host", n);
    card_event(text);
    return cudaSuccess;
}
API cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return copy(to, from, n, "wait for a copy"); }
API cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t) { return copy(to, from, n, "copy"); }
API cudaMemset(void* p, int value, size_t n) {
    memset(p, value, n < COPIED ? n : COPIED);
    card_event("fill");
    return cudaSuccess;
}
API cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) { return cudaMemset(p, value, n); }
API cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    memset(a, 0, sizeof *a);
    a->type = on_card(p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered, a->devicePointer = (void*)p;
    return cudaSuccess;
}
