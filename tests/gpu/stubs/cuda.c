/* libcuda.so.1 of a machine without a GPU: says who called first, and refuses every call.

   The error is "CUDA driver is a stub library", which no real driver gives. The Python stack of
   each process' first call goes to the file that HYBRIDKV_DRIVER_LOG names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { REFUSED = 34 };

static const char *const SAY =
    "def _say():\n"
    "    import os, sys, traceback\n"
    "    stack = traceback.format_list(traceback.extract_stack()[:-2])\n"
    "    with open(os.environ['HYBRIDKV_DRIVER_LOG'], 'a') as log:\n"
    "        log.write(f'DRIVER REACHED by {os.getpid()} {sys.argv}\\n' + ''.join(stack))\n"
    "_say()\n";

static void say(void)
{
    static int said;
    int (*lock)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*unlock)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");

    if (__atomic_exchange_n(&said, 1, __ATOMIC_SEQ_CST) || !getenv("HYBRIDKV_DRIVER_LOG"))
        return;
    if (lock && unlock && run) {
        int state = lock();
        run(SAY);
        unlock(state);
    }
}

static int refuse(void)
{
    say();
    return REFUSED;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

int cuGetErrorString(int error, const char **text)
{
    *text = error ? "CUDA driver is a stub library" : "no error";
    return 0;
}

int cuGetErrorName(int error, const char **text)
{
    *text = error ? "CUDA_ERROR_STUB_LIBRARY" : "CUDA_SUCCESS";
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags,
                        int *status)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    Dl_info mine, its;

    (void)version;
    (void)flags;
    if (!(found && dladdr(found, &its) && dladdr((void *)refuse, &mine) &&
          its.dli_fbase == mine.dli_fbase))
        found = (void *)refuse;
    *function = found;
    if (status)
        *status = 0;
    return 0;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

#define REFUSE(name)        \
    int name(void)          \
    {                       \
        return refuse();    \
    }

/* What libraries link to by name; they find all others through cuGetProcAddress. */
REFUSE(cuInit) REFUSE(cuDeviceGet) REFUSE(cuDeviceGetAttribute) REFUSE(cuDeviceGetCount)
REFUSE(cuDevicePrimaryCtxGetState) REFUSE(cuDevicePrimaryCtxRetain) REFUSE(cuCtxGetCurrent)
REFUSE(cuCtxGetLimit) REFUSE(cuCtxSetCurrent) REFUSE(cuCtxSetLimit) REFUSE(cuFuncGetAttribute)
REFUSE(cuFuncSetAttribute) REFUSE(cuFuncSetCacheConfig) REFUSE(cuLaunchCooperativeKernel)
REFUSE(cuLaunchKernel) REFUSE(cuLaunchKernelEx) REFUSE(cuMemAddressFree)
REFUSE(cuMemAddressReserve) REFUSE(cuMemCreate) REFUSE(cuMemGetAllocationGranularity)
REFUSE(cuMemMap) REFUSE(cuMemRelease) REFUSE(cuMemSetAccess) REFUSE(cuMemUnmap)
REFUSE(cuModuleGetFunction) REFUSE(cuModuleLoad) REFUSE(cuModuleLoadData)
REFUSE(cuModuleLoadDataEx) REFUSE(cuModuleUnload) REFUSE(cuOccupancyMaxActiveClusters)
REFUSE(cuPointerGetAttribute) REFUSE(cuTensorMapEncodeTiled)
