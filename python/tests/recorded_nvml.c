/* The functions of libnvidia-ml.so.1 that hyperqwen asks, answering from a record. Layouts: NVIDIA's nvml.h. */
typedef unsigned long long u64;
typedef unsigned u32;

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, MOST = 8 };
enum { MEMORY_V2 = 1, POWER = 2, LIMIT = 4, CLOCKS = 8, REASONS = 16, MIG = 32, DISPLAY = 64, BUSY = 128,
       PROCESSES = 256, NAMES = 512 };

struct process { u32 pid; u64 used; };
struct card {
    char name[96], uuid[96];
    u64 total, free, used, reserved, reasons, missing;
    u32 major, minor, power, limit, clock, memory_clock, mig, display, busy, computing, drawing;
    struct process process[MOST]; /* those that compute, then those that draw */
};
struct memory { u64 total, free, used; };
struct memory_v2 { u32 version; u64 total, reserved, free, used; };
struct listed { u32 pid; u64 used; u32 gpu_instance, compute_instance; };
struct utilization { u32 gpu, memory; };

static struct card cards[MOST];
static int count, start;

int record(int code, int many, const struct card *given)
{
    start = code;
    count = many;
    for (int i = 0; i < many && i < MOST; i++)
        for (u64 b = 0; b < sizeof *given; b++)
            ((char *)&cards[i])[b] = ((const char *)&given[i])[b];
    return sizeof *given;
}

static void copy(char *to, const char *from, u32 room)
{
    u32 i = 0;
    for (; i + 1 < room && from[i]; i++)
        to[i] = from[i];
    to[i] = 0;
}

static int same(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

#define ANSWER(bit, field, value) do { if (card->missing & (bit)) return NOT_SUPPORTED; *(field) = (value); return OK; } while (0)

int nvmlInitWithFlags(u32 flags) { return flags ? 2 : start; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "An error without a name"; }
int nvmlSystemGetDriverVersion(char *to, u32 room) { copy(to, "580.65.06", room); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = 13010; return OK; }
int nvmlSystemGetProcessName(u32 pid, char *to, u32 room)
{
    if (!count || cards[0].missing & NAMES)
        return NOT_FOUND;
    copy(to, pid == 4242 ? "/usr/bin/blender" : "/usr/bin/other", room);
    return OK;
}
int nvmlDeviceGetCount_v2(u32 *to) { *to = count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, struct card **to)
{
    if (index >= (u32)count)
        return 2;
    *to = &cards[index];
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct card **to)
{
    for (int i = 0; i < count; i++)
        if (same(cards[i].uuid, uuid)) {
            *to = &cards[i];
            return OK;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetName(struct card *card, char *to, u32 room) { copy(to, card->name, room); return OK; }
int nvmlDeviceGetUUID(struct card *card, char *to, u32 room) { copy(to, card->uuid, room); return OK; }
int nvmlDeviceGetMemoryInfo(struct card *card, struct memory *to)
{
    *to = (struct memory){card->total, card->free, card->total - card->free};
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(struct card *card, struct memory_v2 *to)
{
    if (card->missing & MEMORY_V2)
        return NOT_SUPPORTED;
    if (to->version != (sizeof *to | 2 << 24))
        return 25;
    *to = (struct memory_v2){to->version, card->total, card->reserved, card->free, card->used};
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(struct card *card, int *major, int *minor)
{
    *major = card->major;
    *minor = card->minor;
    return OK;
}
int nvmlDeviceGetPowerUsage(struct card *card, u32 *to) { ANSWER(POWER, to, card->power); }
int nvmlDeviceGetEnforcedPowerLimit(struct card *card, u32 *to) { ANSWER(LIMIT, to, card->limit); }
int nvmlDeviceGetClockInfo(struct card *card, int which, u32 *to)
{
    ANSWER(CLOCKS, to, which == 1 ? card->clock : which == 2 ? card->memory_clock : 0);
}
int nvmlDeviceGetCurrentClocksEventReasons(struct card *card, u64 *to) { ANSWER(REASONS, to, card->reasons); }
int nvmlDeviceGetDisplayActive(struct card *card, u32 *to) { ANSWER(DISPLAY, to, card->display); }
int nvmlDeviceGetMigMode(struct card *card, u32 *now, u32 *later) { *later = 0; ANSWER(MIG, now, card->mig); }
int nvmlDeviceGetUtilizationRates(struct card *card, struct utilization *to)
{
    to->memory = 0;
    ANSWER(BUSY, &to->gpu, card->busy);
}
static int list(struct card *card, u32 first, u32 many, u32 *room, struct listed *to)
{
    if (card->missing & PROCESSES)
        return NOT_SUPPORTED;
    u32 had = *room;
    *room = many;
    if (!to || had < many)
        return many ? TOO_SMALL : OK;
    for (u32 i = 0; i < many; i++)
        to[i] = (struct listed){card->process[first + i].pid, card->process[first + i].used, ~0u, ~0u};
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(struct card *card, u32 *room, struct listed *to)
{
    return list(card, 0, card->computing, room, to);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(struct card *card, u32 *room, struct listed *to)
{
    return list(card, card->computing, card->drawing, room, to);
}
