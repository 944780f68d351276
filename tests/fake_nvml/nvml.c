/* A stand-in for libnvidia-ml.so.1 that describes the cards of the text file named by FAKE_NVML.
 *
 * One "key = value" a line; a line "[gpu]" begins the next card, what stands before the first is about the driver.
 * A key that is absent is a thing the card does not report: NVML_ERROR_NOT_SUPPORTED. A value "lost" makes the
 * question fail with NVML_ERROR_GPU_IS_LOST. The file is read at every question, so that a test can change a card
 * while a process runs. Processes: "process = PID MIB", any number of them; "PID" may be "self".
 *
 * Prototypes and codes as in NVIDIA's nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };
enum { MAX_CARDS = 8 };
enum { CLOCK_SM = 1, CLOCK_MEM = 2 };

typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned gpu, memory; } utilization_t;

static char cards[MAX_CARDS]; /* a handle is the address of its element */
static int initialized;

/* The n-th value of `key` of card `card` (-1: the driver), copied to `out`. */
static int find(int card, const char *key, int n, char *out, size_t size) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512], name[128], value[256];
    int at = -1, result = NOT_SUPPORTED;
    if (!file) return NOT_SUPPORTED;
    while (result == NOT_SUPPORTED && fgets(line, sizeof line, file)) {
        if (!strncmp(line, "[gpu]", 5)) { at++; continue; }
        if (at != card || sscanf(line, " %127[^= ] = %255[^\n]", name, value) != 2 || strcmp(name, key)) continue;
        if (n-- == 0) {
            snprintf(out, size, "%s", value);
            result = strcmp(value, "lost") ? SUCCESS : GPU_IS_LOST;
        }
    }
    fclose(file);
    return result;
}

static int number(int card, const char *key, u64 *out) {
    char text[256];
    int result = find(card, key, 0, text, sizeof text);
    if (result == SUCCESS) *out = strtoull(text, NULL, 0);
    return result;
}

static int text(void *device, const char *key, char *out, unsigned size) {
    return find((int)((char *)device - cards), key, 0, out, size);
}

static int ask(void *device, const char *key, u64 *out) { return number((int)((char *)device - cards), key, out); }

static int ask_uint(void *device, const char *key, unsigned *out) {
    u64 value;
    int result = ask(device, key, &value);
    if (result == SUCCESS) *out = (unsigned)value;
    return result;
}

static int count_cards(void) {
    u64 unused;
    int n = 0;
    char value[8];
    while (n < MAX_CARDS && (number(n, "memory_mib", &unused) != NOT_SUPPORTED ||
                             find(n, "uuid", 0, value, sizeof value) != NOT_SUPPORTED)) n++;
    return n;
}

/* A driver that is not loaded: "driver_missing = 1". */
int nvmlInitWithFlags(unsigned flags) {
    u64 missing = 0;
    (void)flags;
    if (number(-1, "driver_missing", &missing) == SUCCESS && missing) return 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
    initialized++;
    return SUCCESS;
}
int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "error of the stand-in"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return find(-1, "driver", 0, out, size); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    u64 value;
    int result = number(-1, "cuda", &value);
    if (result == SUCCESS) *out = (int)value;
    return result;
}
int nvmlDeviceGetCount_v2(unsigned *out) {
    if (!initialized) return UNINITIALIZED;
    *out = (unsigned)count_cards();
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    u64 value;
    if (!initialized) return UNINITIALIZED;
    if ((int)index >= count_cards()) return NOT_FOUND;
    if (number((int)index, "handle", &value) == GPU_IS_LOST) return GPU_IS_LOST;
    *out = &cards[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
    char found[256];
    if (!initialized) return UNINITIALIZED;
    for (int i = 0; i < count_cards(); i++)
        if (find(i, "uuid", 0, found, sizeof found) == SUCCESS && !strcmp(found, uuid)) {
            *out = &cards[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *device, char *out, unsigned size) { return text(device, "name", out, size); }
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) { return text(device, "uuid", out, size); }
int nvmlDeviceGetNumGpuCores(void *device, unsigned *out) { return ask_uint(device, "cuda_cores", out); }
int nvmlDeviceGetMemoryBusWidth(void *device, unsigned *out) { return ask_uint(device, "bus_width", out); }
int nvmlDeviceGetPowerUsage(void *device, unsigned *out) { return ask_uint(device, "power_mw", out); }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *out) { return ask_uint(device, "power_cap_mw", out); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *device, unsigned *out) {
    return ask_uint(device, "power_cap_default_mw", out);
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned *out) { return ask_uint(device, "persistence", out); }
int nvmlDeviceGetTotalEnergyConsumption(void *device, u64 *out) { return ask(device, "energy_mj", out); }
int nvmlDeviceGetCurrentClocksEventReasons(void *device, u64 *out) { return ask(device, "event_reasons", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *out) { return ask(device, "throttle_reasons", out); }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *out) {
    (void)sensor;
    return ask_uint(device, "temperature_c", out);
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *out) {
    return ask_uint(device, kind == CLOCK_SM ? "sm_clock" : "memory_clock", out);
}
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *out) {
    return ask_uint(device, kind == CLOCK_MEM ? "max_memory_clock" : "max_sm_clock", out);
}
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, u64 *out) {
    (void)counter;
    return ask(device, kind ? "ecc_uncorrected" : "ecc_corrected", out);
}
int nvmlDeviceGetEccMode(void *device, unsigned *current, unsigned *pending) {
    int result = ask_uint(device, "ecc", current);
    if (result == SUCCESS) *pending = *current;
    return result;
}
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    int result = ask_uint(device, "mig", current);
    if (result == SUCCESS) *pending = *current;
    return result;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    char value[32];
    int result = text(device, "capability", value, sizeof value);
    if (result == SUCCESS) sscanf(value, "%d.%d", major, minor);
    return result;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *out) {
    out->memory = 0;
    return ask_uint(device, "utilisation", &out->gpu);
}

static int memory(void *device, u64 *total, u64 *used, u64 *reserved) {
    int result = ask(device, "memory_mib", total);
    if (result != SUCCESS) return result;
    if (ask(device, "used_mib", used) != SUCCESS) *used = 0;
    if (ask(device, "reserved_mib", reserved) != SUCCESS) *reserved = 0;
    *total <<= 20, *used <<= 20, *reserved <<= 20;
    return SUCCESS;
}
/* The first version counts what the driver reserves as used, the second tells it apart. */
int nvmlDeviceGetMemoryInfo(void *device, memory_t *out) {
    u64 reserved;
    int result = memory(device, &out->total, &out->used, &reserved);
    if (result != SUCCESS) return result;
    out->used += reserved;
    out->free = out->total - out->used;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *out) {
    u64 absent;
    int result = memory(device, &out->total, &out->used, &out->reserved);
    if (result != SUCCESS) return result;
    if (ask(device, "memory_v2_missing", &absent) == SUCCESS) return NOT_SUPPORTED;
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *out) {
    char value[256], pid[32];
    u64 mib, missing;
    unsigned n = 0, room = *count;
    int card = (int)((char *)device - cards);
    if (number(card, "processes_missing", &missing) == SUCCESS) return NOT_SUPPORTED;
    for (; find(card, "process", (int)n, value, sizeof value) == SUCCESS; n++) {
        if (n >= room || !out || sscanf(value, "%31s %llu", pid, &mib) != 2) continue;
        out[n].pid = strcmp(pid, "self") ? (unsigned)atoi(pid) : (unsigned)getpid();
        out[n].used = mib << 20;
        out[n].gpu_instance = out[n].compute_instance = 0xffffffffu;
    }
    *count = n;
    return n > room || (n && !out) ? INSUFFICIENT_SIZE : SUCCESS;
}
