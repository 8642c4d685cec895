/* libnvidia-ml.so.1 of a machine that has one H100: what PyTorch and vLLM ask before CUDA starts. */

#include <stdio.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static int the_device;

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };

static int text(char *to, unsigned size, const char *said)
{
    snprintf(to, size, "%s", said);
    return OK;
}

int nvmlInit(void) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "Not Supported" : "Success"; }

int nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(to, size, "580.159.04"); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return OK; }
int nvmlDeviceGetIndex(void *device, unsigned *index) { (void)device; *index = 0; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = &the_device;
    return index ? NOT_FOUND : OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    (void)uuid;
    *device = &the_device;
    return OK;
}

int nvmlDeviceGetName(void *device, char *to, unsigned size)
{
    (void)device;
    return text(to, size, "NVIDIA H100 80GB HBM3");
}

int nvmlDeviceGetUUID(void *device, char *to, unsigned size)
{
    (void)device;
    return text(to, size, "GPU-00000000-0000-0000-0000-000000000001");
}

int nvmlDeviceGetMemoryInfo(void *device, struct memory *info)
{
    (void)device;
    info->total = info->free = 81559ULL << 20;
    info->used = 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *info)
{
    (void)device;
    info->total = info->free = 81559ULL << 20;
    info->reserved = info->used = 0;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor)
{
    (void)device;
    *major = 9;
    *minor = 0;
    return OK;
}

int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info)
{
    (void)device;
    memset(info, 0, sizeof *info);
    info->bus = 1;
    info->id = 0x233010de;
    text(info->legacy, sizeof info->legacy, "0000:01:00.0");
    return text(info->bus_id, sizeof info->bus_id, "00000000:01:00.0");
}

int nvmlDeviceGetP2PStatus(void *device, void *other, int index, int *status)
{
    (void)device;
    (void)other;
    (void)index;
    *status = OK;
    return OK;
}

int nvmlDeviceGetCpuAffinity(void *device, unsigned words, unsigned long *mask)
{
    (void)device;
    memset(mask, 0, words * sizeof *mask);
    mask[0] = 1;
    return OK;
}

int nvmlDeviceGetNumaNodeId(void *device, unsigned *node)
{
    (void)device;
    (void)node;
    return NOT_SUPPORTED;
}
