/* A stand-in for libnvidia-ml.so.1, so that the live probe and pynvml run for real where there is no GPU.
 *
 * GPU 0 and 1 are joined by two of their three NVLinks; GPU 0 has a process, GPU 1 waits for a row remapping and
 * its fabric is in progress; GPU 2 is divided into two MIG slices; GPU 3 is lost. Several newer functions are
 * missing, as in an old driver. STAND_IN_INIT makes nvmlInit fail with that code. Codes and layouts: nvml.h.
 */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };
typedef struct { int number; const char *uuid, *name, *bus; } device;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } fabric;

static device gpus[] = {
    {0, "GPU-00000000-aaaa", "NVIDIA A100-SXM4-80GB", "00000000:07:00.0"},
    {1, "GPU-11111111-bbbb", "NVIDIA A100-SXM4-80GB", "00000000:0F:00.0"},
    {2, "GPU-22222222-cccc", "NVIDIA A100-SXM4-80GB", "00000000:47:00.0"},
};
static device slices[] = {
    {10, "MIG-33333333-dddd", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", ""},
    {11, "MIG-44444444-eeee", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", ""},
};

int nvmlInitWithFlags(unsigned flags) {
    const char *code = getenv("STAND_IN_INIT");
    return code ? atoi(code) : OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "535.183.01"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12020; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **handle) {
    if (index == 3) return LOST;
    *handle = &gpus[index];
    return OK;
}
int nvmlDeviceGetUUID(device *d, char *text, unsigned size) { strcpy(text, d->uuid); return OK; }
int nvmlDeviceGetName(device *d, char *text, unsigned size) { strcpy(text, d->name); return OK; }
int nvmlDeviceGetPciInfo_v3(device *d, pci *info) { strcpy(info->bus_id, d->bus); return OK; }
int nvmlDeviceGetMemoryInfo(device *d, memory *m) {
    m->total = d->number < 10 ? 80ull << 30 : 40ull << 30;
    m->used = d->number == 0 ? 30ull << 30 : 1ull << 30;
    m->free = m->total - m->used;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(device *d, int *major, int *minor) { *major = 8; *minor = 0; return OK; }
int nvmlDeviceGetMigMode(device *d, unsigned *now, unsigned *pending) {
    *now = *pending = d->number == 2;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) { *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **handle) {
    if (index != 0 && index != 3) return NOT_FOUND;
    *handle = &slices[index == 3];
    return OK;
}
int nvmlDeviceGetTotalEccErrors(device *d, int type, int counter, unsigned long long *count) {
    *count = type == 1 && counter == 0 && d->number == 1 ? 2 : 0; /* uncorrected, volatile */
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, process *found) {
    if (d->number != 0) { *count = 0; return OK; }
    if (*count < 2) { *count = 2; return TOO_SMALL; }
    *count = 2;
    found[0].pid = 4242; found[0].used = 20ull << 30;
    found[1].pid = 4343; found[1].used = ~0ull; /* NVML_VALUE_NOT_AVAILABLE */
    return OK;
}
int nvmlDeviceGetCurrPcieLinkGeneration(device *d, unsigned *value) { *value = 4; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device *d, unsigned *value) { *value = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(device *d, unsigned *value) { *value = 16; return OK; }
int nvmlDeviceGetTotalEnergyConsumption(device *d, unsigned long long *mj) {
    if (d->number > 0) return NOT_SUPPORTED;
    static unsigned long long looks = 0;
    *mj = 123456789 + 5000 * looks++;
    return OK;
}
int nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *active) {
    if (d->number > 1) return NOT_SUPPORTED;
    if (link > 2) return INVALID;
    *active = link < 2;
    return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(device *d, unsigned link, int *type) { *type = 0; return OK; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device *d, unsigned link, pci *info) {
    strcpy(info->bus_id, gpus[1 - d->number].bus);
    return OK;
}
int nvmlDeviceGetP2PStatus(device *one, device *other, int caps, int *status) {
    if (caps != 0) return INVALID; /* NVML_P2P_CAPS_INDEX_READ */
    *status = one->number + other->number == 1 ? 0 : 5;
    return OK;
}
int nvmlDeviceGetRemappedRows(device *d, unsigned *corr, unsigned *unc, unsigned *pending, unsigned *failed) {
    *corr = *unc = *failed = 0;
    *pending = d->number == 1;
    return OK;
}
int nvmlDeviceGetGpuFabricInfo(device *d, fabric *info) { info->state = d->number == 1 ? 2 : 3; return OK; }
