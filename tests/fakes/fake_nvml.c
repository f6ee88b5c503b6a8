/* A libnvidia-ml.so.1 without GPUs: answers what a small text file says, which a test may replace at any moment.
 *
 * The file (path in FAKE_NVML_STATE) is read again when it was replaced; it is written by tests/fakes/nvml.py, which also
 * says what each line means. Compiled with -DOLD it lacks what drivers of before 2020 lack. Only what gpulayer asks is here.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    FUNCTION_NOT_FOUND = 13,
};

#define DEVICES_MAX 2048
#define LINKS_MAX 36
#define PROCESSES_MAX 64
#define RULES_MAX 64
#define TEXT_MAX 256

typedef struct {
    unsigned pid;
    unsigned long long bytes;
} Process;

enum { COMPUTE, GRAPHICS, MPS, KINDS };

typedef struct {
    unsigned count;
    Process listed[PROCESSES_MAX];
    unsigned flood; /* this many more, made up */
} Processes;

typedef struct {
    int is_active, type; /* 0 GPU, 2 switch */
    char pci[32];
} Link;

/* A GPU, or a MIG instance (`parent` is its GPU's place in the list). */
typedef struct {
    int parent, mig; /* mig: -1 cannot, 0 off, 1 on */
    char uuid[TEXT_MAX], name[TEXT_MAX], pci[32];
    unsigned long long memory;
    int capability_major, capability_minor;
    int ecc, retired, remap[4]; /* -1: not supported */
    int fault, handle_error;
    unsigned slices;
    Link links[LINKS_MAX];
    unsigned link_count;
    Processes processes[KINDS];
} Device;

/* What one function does instead, on all devices or (from 0) on one. */
typedef struct {
    char function[64], action[16];
    int value, gpu;
} Rule;

static struct {
    char driver[TEXT_MAX], print[TEXT_MAX], answer[TEXT_MAX];
    int cuda, init, is_frozen;
    unsigned device_count, rule_count;
    Device devices[DEVICES_MAX];
    Rule rules[RULES_MAX];
} state;

static int is_initialised;
static unsigned frozen_count; /* GPUs at nvmlInit: a real library sees no others until it is initialised again */

/* --- the state file ------------------------------------------------------------------------------------------------ */

static void copy(char *to, size_t size, const char *from)
{
    size_t length = 0; /* \xNN is a byte: names that are no text must be possible */
    for (; *from && length < size - 1; from++) {
        unsigned byte;
        if (from[0] == '\\' && from[1] == 'x' && sscanf(from + 2, "%2x", &byte) == 1) {
            to[length++] = (char)byte;
            from += 3;
        } else {
            to[length++] = *from;
        }
    }
    to[length] = 0;
}

static void read_processes(Processes *processes, char *words)
{
    for (char *word = strtok(words, " "); word && processes->count < PROCESSES_MAX; word = strtok(NULL, " ")) {
        Process *process = &processes->listed[processes->count];
        if (sscanf(word, "%u:%llu", &process->pid, &process->bytes) == 2)
            processes->count++;
        else if (sscanf(word, "%u:?", &process->pid) == 1) { /* the driver does not tell how much */
            process->bytes = ~0ULL;
            processes->count++;
        }
    }
}

static void read_rule(const char *words)
{
    Rule *rule = &state.rules[state.rule_count];
    rule->gpu = -1;
    if (state.rule_count < RULES_MAX &&
        sscanf(words, "%63s %15s %d %d", rule->function, rule->action, &rule->value, &rule->gpu) >= 2)
        state.rule_count++;
}

static void read_line(char *line)
{
    char *value = strchr(line, ' ');
    if (value)
        *value++ = 0;
    else
        value = "";
    Device *device = state.device_count ? &state.devices[state.device_count - 1] : NULL;

    if (!strcmp(line, "driver")) copy(state.driver, TEXT_MAX, value);
    else if (!strcmp(line, "cuda")) state.cuda = atoi(value);
    else if (!strcmp(line, "init")) state.init = atoi(value);
    else if (!strcmp(line, "frozen")) state.is_frozen = atoi(value);
    else if (!strcmp(line, "print")) copy(state.print, TEXT_MAX, value);
    else if (!strcmp(line, "answer")) copy(state.answer, TEXT_MAX, value);
    else if (!strcmp(line, "rule")) read_rule(value);
    else if (!strcmp(line, "device") && state.device_count < DEVICES_MAX) {
        device = &state.devices[state.device_count++];
        memset(device, 0, sizeof *device);
        device->parent = atoi(value); /* -1: a GPU */
        device->mig = device->ecc = device->retired = device->remap[0] = -1;
    } else if (!device) return;
    else if (!strcmp(line, "uuid")) copy(device->uuid, TEXT_MAX, value);
    else if (!strcmp(line, "name")) copy(device->name, TEXT_MAX, value);
    else if (!strcmp(line, "pci")) copy(device->pci, sizeof device->pci, value);
    else if (!strcmp(line, "memory")) device->memory = strtoull(value, NULL, 10);
    else if (!strcmp(line, "capability")) sscanf(value, "%d.%d", &device->capability_major, &device->capability_minor);
    else if (!strcmp(line, "ecc")) device->ecc = atoi(value);
    else if (!strcmp(line, "retired")) device->retired = atoi(value);
    else if (!strcmp(line, "remap"))
        sscanf(value, "%d %d %d %d", &device->remap[0], &device->remap[1], &device->remap[2], &device->remap[3]);
    else if (!strcmp(line, "fault")) device->fault = atoi(value);
    else if (!strcmp(line, "handle")) device->handle_error = atoi(value);
    else if (!strcmp(line, "mig")) device->mig = atoi(value);
    else if (!strcmp(line, "slices")) device->slices = (unsigned)atoi(value);
    else if (!strcmp(line, "link") && device->link_count < LINKS_MAX) {
        Link *link = &device->links[device->link_count++];
        sscanf(value, "%d %d %31s", &link->is_active, &link->type, link->pci);
    } else if (!strcmp(line, "compute")) read_processes(&device->processes[COMPUTE], value);
    else if (!strcmp(line, "graphics")) read_processes(&device->processes[GRAPHICS], value);
    else if (!strcmp(line, "mps")) read_processes(&device->processes[MPS], value);
    else if (!strcmp(line, "flood")) device->processes[COMPUTE].flood = (unsigned)strtoul(value, NULL, 10);
}

static void reload(void)
{
    static struct stat last;
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (!path || stat(path, &now) != 0)
        return;
    if (now.st_ino == last.st_ino && now.st_mtim.tv_sec == last.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == last.st_mtim.tv_nsec && now.st_size == last.st_size)
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    last = now;
    state.driver[0] = state.print[0] = state.answer[0] = 0;
    state.cuda = state.init = state.is_frozen = 0;
    state.device_count = state.rule_count = 0;
    static char line[8192];
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        read_line(line);
    }
    fclose(file);
}

/* --- what every function begins with ------------------------------------------------------------------------------- */

static const Rule *rule_of(const char *function, int gpu)
{
    for (unsigned i = 0; i < state.rule_count; i++) {
        const Rule *rule = &state.rules[i];
        if (!strcmp(rule->function, function) && (rule->gpu < 0 || rule->gpu == gpu))
            return rule;
    }
    return NULL;
}

static int obey_rules(const char *function, int gpu)
{
    reload();
    const Rule *rule = rule_of(function, gpu);
    if (!rule)
        return SUCCESS;
    if (!strcmp(rule->action, "error"))
        return rule->value;
    if (!strcmp(rule->action, "missing"))
        return FUNCTION_NOT_FOUND;
    if (!strcmp(rule->action, "abort"))
        abort();
    if (!strcmp(rule->action, "crash"))
        *(volatile int *)8 = 0;
    if (!strcmp(rule->action, "exit"))
        _exit(rule->value);
    if (!strcmp(rule->action, "delay"))
        usleep((useconds_t)rule->value * 1000);
    while (rule && !strcmp(rule->action, "hang")) { /* until the test takes the rule away */
        usleep(10000);
        reload();
        rule = rule_of(function, gpu);
    }
    return SUCCESS;
}

/* A handle is the device's place in the list + 1. */
static Device *device_of(void *handle)
{
    uintptr_t place = (uintptr_t)handle;
    return place >= 1 && place <= state.device_count ? &state.devices[place - 1] : NULL;
}

/* The place of the index-th GPU, or of the index-th instance of a GPU; -1 if there is none. */
static int place_of(int parent, unsigned index)
{
    unsigned seen = 0;
    for (unsigned i = 0; i < state.device_count; i++)
        if (state.devices[i].parent == parent && seen++ == index)
            return (int)i;
    return -1;
}

static unsigned count_of(int parent)
{
    unsigned count = 0;
    for (unsigned i = 0; i < state.device_count; i++)
        count += state.devices[i].parent == parent;
    return count;
}

static int gpu_of(void *handle)
{
    uintptr_t place = (uintptr_t)handle;
    int gpu = 0;
    for (uintptr_t i = 0; i + 1 < place && i < state.device_count; i++)
        gpu += state.devices[i].parent < 0;
    return gpu;
}

static int begin(const char *function, void *handle, Device **device)
{
    if (!is_initialised)
        return UNINITIALIZED;
    int error = obey_rules(function, gpu_of(handle));
    if (error)
        return error;
    *device = device_of(handle);
    if (!*device)
        return INVALID_ARGUMENT;
    return (*device)->fault;
}

#define BEGIN(handle)                                                                                                  \
    Device *device;                                                                                                    \
    int begun = begin(__func__, handle, &device);                                                                      \
    if (begun)                                                                                                         \
    return begun

#define BEGIN_WITHOUT_DEVICE()                                                                                         \
    int begun = is_initialised ? obey_rules(__func__, -1) : UNINITIALIZED;                                             \
    if (begun)                                                                                                         \
    return begun

static int give(const char *text, char *to, unsigned size)
{
    if (strlen(text) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

/* --- the library --------------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    int error = obey_rules(__func__, -1);
    if (error || state.init)
        return error ? error : state.init;
    is_initialised = 1;
    frozen_count = count_of(-1);
    return SUCCESS;
}

int nvmlShutdown(void)
{
    BEGIN_WITHOUT_DEVICE();
    is_initialised = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static char text[32];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *to, unsigned size)
{
    BEGIN_WITHOUT_DEVICE();
    if (*state.print) {
        printf("%s\n", state.print);
        fflush(stdout);
    }
    for (int fd = 3; *state.answer && fd < 32; fd++) { /* into every pipe: a library gone mad */
        struct stat open;
        if (fstat(fd, &open) == 0 && S_ISFIFO(open.st_mode))
            dprintf(fd, "%s\n", state.answer);
    }
    return give(state.driver, to, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    BEGIN_WITHOUT_DEVICE();
    *version = state.cuda;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    BEGIN_WITHOUT_DEVICE();
    *count = count_of(-1);
    if (state.is_frozen && *count > frozen_count)
        *count = frozen_count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    if (!is_initialised)
        return UNINITIALIZED;
    int error = obey_rules(__func__, (int)index);
    if (error)
        return error;
    int place = place_of(-1, index);
    if (place < 0)
        return INVALID_ARGUMENT;
    *handle = (void *)(uintptr_t)(place + 1);
    return state.devices[place].handle_error;
}

/* --- one device ---------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetUUID(void *handle, char *to, unsigned size)
{
    BEGIN(handle);
    return give(device->uuid, to, size);
}

int nvmlDeviceGetName(void *handle, char *to, unsigned size)
{
    BEGIN(handle);
    return give(device->name, to, size);
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long memory[3])
{
    BEGIN(handle);
    memory[0] = memory[1] = device->memory;
    memory[2] = 0;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    BEGIN(handle);
    if (!device->capability_major)
        return NOT_SUPPORTED;
    *major = device->capability_major;
    *minor = device->capability_minor;
    return SUCCESS;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

static void fill(Pci *pci, const char *bus_id)
{
    memset(pci, 0, sizeof *pci);
    strcpy(pci->bus_id, bus_id);
}

int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci)
{
    BEGIN(handle);
    fill(pci, device->pci);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int error_type, int counter_type, unsigned long long *count)
{
    BEGIN(handle);
    if (device->ecc < 0)
        return NOT_SUPPORTED;
    *count = error_type == 1 && counter_type == 0 ? (unsigned)device->ecc : 0;
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, int *is_pending)
{
    BEGIN(handle);
    *is_pending = device->retired;
    return device->retired < 0 ? NOT_SUPPORTED : SUCCESS;
}

static int give_link(Device *device, unsigned link, Link **found)
{
    if (!device->link_count)
        return NOT_SUPPORTED;
    if (link >= device->link_count)
        return INVALID_ARGUMENT;
    *found = &device->links[link];
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *handle, unsigned number, unsigned *is_active)
{
    BEGIN(handle);
    Link *link;
    int error = give_link(device, number, &link);
    if (!error)
        *is_active = (unsigned)link->is_active;
    return error;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned number, Pci *pci)
{
    BEGIN(handle);
    Link *link;
    int error = give_link(device, number, &link);
    if (!error)
        fill(pci, link->pci);
    return error;
}

/* --- processes: three layouts of one list ------------------------------------------------------------------------- */

typedef struct {
    unsigned pid;
    unsigned long long bytes;
} ProcessV1;

typedef struct {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
} ProcessV2;

static int give_processes(const Processes *processes, unsigned *count, void *to, size_t size)
{
    unsigned room = to ? *count : 0, total = processes->count + processes->flood;
    *count = total;
    for (unsigned i = 0; i < total && i < room; i++) {
        ProcessV1 *process = (ProcessV1 *)((char *)to + i * size);
        if (i < processes->count) {
            process->pid = processes->listed[i].pid;
            process->bytes = processes->listed[i].bytes;
        } else {
            process->pid = 5000000 + i; /* above any pid that Linux gives */
            process->bytes = 1 << 20;
        }
    }
    return total > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(name, kind, layout)                                                                                  \
    int name(void *handle, unsigned *count, void *to)                                                                  \
    {                                                                                                                  \
        BEGIN(handle);                                                                                                 \
        return give_processes(&device->processes[kind], count, to, sizeof(layout));                                    \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses, COMPUTE, ProcessV1)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, ProcessV1)

/* --- what old drivers lack ----------------------------------------------------------------------------------------- */

#ifndef OLD

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, ProcessV2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, ProcessV2)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, ProcessV2)

int nvmlDeviceGetRemappedRows(void *handle, int *correctable, int *uncorrectable, int *is_pending, int *has_failed)
{
    BEGIN(handle);
    if (device->remap[0] < 0)
        return NOT_SUPPORTED;
    *correctable = device->remap[0];
    *uncorrectable = device->remap[1];
    *is_pending = device->remap[2];
    *has_failed = device->remap[3];
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned number, unsigned *type)
{
    BEGIN(handle);
    Link *link;
    int error = give_link(device, number, &link);
    if (!error)
        *type = (unsigned)link->type;
    return error;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    BEGIN(handle);
    if (device->mig < 0 || device->parent >= 0)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned)device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    BEGIN(handle);
    *count = device->mig < 0 ? 0 : count_of((int)(uintptr_t)handle - 1);
    if (device->mig >= 0 && *count < 7)
        *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance)
{
    BEGIN(handle);
    int place = device->mig == 1 ? place_of((int)(uintptr_t)handle - 1, index) : -1;
    if (place < 0)
        return NOT_FOUND;
    *instance = (void *)(uintptr_t)(place + 1);
    return state.devices[place].handle_error;
}

typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} Attributes;

int nvmlDeviceGetAttributes_v2(void *handle, Attributes *attributes)
{
    BEGIN(handle);
    if (device->parent < 0)
        return NOT_SUPPORTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->gpu_slices = attributes->compute_slices = device->slices;
    attributes->memory_mib = device->memory >> 20;
    return SUCCESS;
}

#endif
