/*
 * CUDA and NCCL without a GPU: the libraries that a rank waits in, and the machine whose GPUs it waits for.
 *
 * One source, one part per library, chosen by a macro: DRIVER (libcuda.so.1, libhsa-runtime64.so.1), JIT
 * (libnvidia-ptxjitcompiler.so.1), RUNTIME (libcudart.so.12, libamdhip64.so.6), NCCL (libnccl.so.2, librccl.so.1), CUDA
 * (libtorch_cuda.so), PYTHON (libtorch_python.so, an extension: its methods have no Python frame, as torch's have none)
 * and GPUS, a program that executes the streams of all ranks. HIP=1 gives the ROCm names. As in the vendors' builds,
 * internal functions have no symbol, but unwind tables.
 *
 * All share one file, $GPUS_FILE: a queue of operations for each rank. A kernel takes its time; a collective ends once
 * every member of its group has reached it with the same tag.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define RANKS 64
#define GROUPS 4
#define QUEUE 64 /* launches that fit before a launch waits; the real queue has about 1,000 */
#define HIDDEN static __attribute__((noinline))

enum kind { KERNEL, COLLECTIVE, LOST_COPY }; /* LOST_COPY never ends, and its GPU idles */

struct op {
    enum kind kind;
    int group, tag;
    uint64_t number; /* of the collective, in its group and rank */
    int64_t ns;
};

struct gpu {
    volatile uint64_t launched, done;
    volatile int64_t since_ns; /* when its oldest operation began; 0 before */
    volatile uint64_t next[GROUPS], arrived[GROUPS], ended[GROUPS]; /* collectives launched, reached, ended */
    volatile int tag[GROUPS], joined[GROUPS], pid;
    volatile double busy_percent, watts;
    struct op queue[QUEUE];
};

struct machine {
    volatile uint64_t members[GROUPS]; /* a bit for each rank */
    volatile int network_down;         /* no further collective ends */
    volatile uint64_t ended[GROUPS];   /* the newest collective that every member was allowed to end */
    struct gpu gpus[RANKS];
};

struct machine *gpus_machine(void);
struct gpu *gpus_mine(void);

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline const char *setting(const char *name, const char *otherwise) {
    const char *found = getenv(name);
    return found ? found : otherwise;
}

static inline struct machine *map_machine(void) {
    int file = open(getenv("GPUS_FILE"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || ftruncate(file, sizeof(struct machine))) abort();
    void *found = mmap(0, sizeof(struct machine), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (found == MAP_FAILED) abort();
    return found;
}

static inline void start(const char *name, void *(*body)(void *), void *with) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, 0, body, with)) abort();
    pthread_setname_np(thread, name);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

#ifdef HIP
#define DRIVER_CALL(name) hsa_##name
#define RUNTIME_CALL(name) hip##name
#else
#define DRIVER_CALL(name) cu##name
#define RUNTIME_CALL(name) cuda##name
#endif

int DRIVER_CALL(Init)(void);
int DRIVER_CALL(StreamSynchronize)(uint64_t until);
int DRIVER_CALL(LaunchKernel)(const struct op *op);
int DRIVER_CALL(ModuleLoadData)(double seconds);
int RUNTIME_CALL(LaunchKernel)(const struct op *op);
int RUNTIME_CALL(StreamSynchronize)(void);
int RUNTIME_CALL(DeviceSynchronize)(void);
int RUNTIME_CALL(EventSynchronize)(void);
int RUNTIME_CALL(MemcpyAsync)(void);
int ncclCommInitRank(int group, int members);
int ncclAllReduce(int group, int tag);
int ncclCommAbort(void);
int nvPTXCompile(double seconds);

#ifdef DRIVER
static struct machine *machine;
static struct gpu *mine;

struct machine *gpus_machine(void) { return machine; }
struct gpu *gpus_mine(void) { return mine; }

struct wait {
    uint64_t until;
    const char *how;
    struct pollfd event;
};

HIDDEN int is_done(struct wait *wait) { return mine->done >= wait->until; }

/* As a driver does: memory that the GPU writes is read until it has the value; a clock is read now and then. */
HIDDEN int poll_memory(struct wait *wait) {
    for (unsigned turn = 1; !is_done(wait); turn++) {
        if (wait->how[0] == 'y')
            sched_yield();
        else if (wait->how[0] == 'b')
            poll(&wait->event, 1, 50);
        else if (turn % 4096 == 0)
            now_ns();
        else
            __asm__ volatile("" ::: "memory");
    }
    return 0;
}

#define CALLER(name, callee)                                                                                           \
    HIDDEN int name(struct wait *wait) {                                                                               \
        volatile uint64_t saved[12] = {wait->until};                                                                   \
        int failed = callee(wait);                                                                                     \
        return saved[0] == wait->until ? failed : 1;                                                                   \
    }
CALLER(channel_wait, poll_memory)
CALLER(marker_wait, channel_wait)
CALLER(marker_list_wait, marker_wait)
CALLER(queue_wait, marker_list_wait)
CALLER(stream_wait, queue_wait)
CALLER(context_wait, stream_wait)
CALLER(entry, context_wait)

static int event_pipe[2];

HIDDEN int wait_until_done(uint64_t until) {
    struct wait wait = {until, setting("GPU_WAIT", "spin"), {event_pipe[0], POLLIN, 0}};
    return entry(&wait);
}

HIDDEN void *handle_events(void *unused) {
    struct pollfd event = {event_pipe[0], POLLIN, 0};
    while (poll(&event, 1, -1) <= 0) {
    }
    return unused;
}

int DRIVER_CALL(Init)(void) {
    if (machine) return 0;
    machine = map_machine();
    mine = &machine->gpus[atoi(setting("GPU_RANK", "0"))];
    mine->pid = getpid();
    if (pipe2(event_pipe, O_CLOEXEC)) abort();
    start("cuda-EvtHandlr", handle_events, 0);
    start("cuda00001400006", handle_events, 0);
    return 0;
}

int DRIVER_CALL(StreamSynchronize)(uint64_t until) { return wait_until_done(until) * 2; }

static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;

int DRIVER_CALL(LaunchKernel)(const struct op *op) {
    pthread_mutex_lock(&launching);
    uint64_t number = mine->launched;
    if (number >= QUEUE && wait_until_done(number - QUEUE + 1)) abort();
    mine->queue[number % QUEUE] = *op;
    if (op->kind == COLLECTIVE) mine->queue[number % QUEUE].number = ++mine->next[op->group];
    __atomic_store_n(&mine->launched, number + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&launching);
    return 0;
}

/* Relocates and copies the code of a module: it computes in the driver, and allocates. */
HIDDEN int load_sections(double seconds) {
    int64_t until = now_ns() + (int64_t)(seconds * 1e9);
    uint64_t sum = 0;
    while (now_ns() < until) {
        size_t size = 1 << 20;
        uint64_t *section = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (size_t at = 0; at < size / 8; at++) section[at] = sum += at * 2654435761u;
        munmap(section, size);
    }
    return sum == 42;
}

int DRIVER_CALL(ModuleLoadData)(double seconds) { return load_sections(seconds) * 2; }
#endif

#ifdef JIT
HIDDEN uint64_t allocate_registers(double seconds) {
    int64_t until = now_ns() + (int64_t)(seconds * 1e9);
    uint64_t sum = 0;
    while (now_ns() < until) {
        uint64_t **nodes = malloc(4096 * sizeof *nodes);
        for (int at = 0; at < 4096; at++) *(nodes[at] = malloc(48)) = sum += at;
        for (int at = 0; at < 4096; at++) free(nodes[at]);
        free(nodes);
    }
    return sum;
}
int nvPTXCompile(double seconds) { return allocate_registers(seconds) == 42; }
#endif

#ifdef RUNTIME
HIDDEN int launch(const struct op *op) { return DRIVER_CALL(LaunchKernel)(op) * 2; }
HIDDEN int wait_for_stream(void) { return DRIVER_CALL(StreamSynchronize)(gpus_mine()->launched) * 2; }
int RUNTIME_CALL(LaunchKernel)(const struct op *op) { return launch(op) * 2; }
int RUNTIME_CALL(StreamSynchronize)(void) { return wait_for_stream() * 2; }
int RUNTIME_CALL(DeviceSynchronize)(void) { return wait_for_stream() * 2; }
int RUNTIME_CALL(EventSynchronize)(void) { return wait_for_stream() * 2; }
int RUNTIME_CALL(MemcpyAsync)(void) { return wait_for_stream() * 2; } /* to pageable memory: it waits */
#endif

#ifdef NCCL
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The proxy of a net transport: asks the NIC for as long as a collective is in flight, else sleeps. */
HIDDEN void *progress(void *unused) {
    struct gpu *mine = gpus_mine();
    for (;;)
        if (mine->launched != mine->done && mine->queue[mine->done % QUEUE].kind == COLLECTIVE)
            sched_yield();
        else
            usleep(1000);
    return unused;
}

HIDDEN void *serve(void *unused) {
    for (;;) poll(0, 0, 500);
    return unused;
}

HIDDEN void start_threads(void) {
    if (getenv("NCCL_NET")) start("NCCL Progress 0", progress, 0);
    start("NCCL Service 0", serve, 0);
}

HIDDEN int bootstrap(int group, int members) {
    struct machine *machine = gpus_machine();
    gpus_mine()->joined[group] = 1;
    for (;;) {
        int joined = 0;
        for (int rank = 0; rank < RANKS; rank++) joined += machine->gpus[rank].joined[group];
        if (joined >= members) return 0;
        if (strcmp(setting("NCCL_BOOTSTRAP", "poll"), "poll"))
            usleep(1000);
        else
            poll(0, 0, 100);
    }
}

int ncclCommInitRank(int group, int members) {
    pthread_once(&once, start_threads);
    return bootstrap(group, members) * 2;
}

HIDDEN int enqueue(int group, int tag) {
    struct op op = {COLLECTIVE, group, tag, 0, 200000};
    return RUNTIME_CALL(LaunchKernel)(&op) * 2;
}
int ncclAllReduce(int group, int tag) { return enqueue(group, tag) * 2; }

HIDDEN void *reclaim(void *unused) {
    RUNTIME_CALL(StreamSynchronize)();
    return unused;
}

int ncclCommAbort(void) {
    pthread_t thread;
    if (pthread_create(&thread, 0, reclaim, 0)) abort();
    return pthread_join(thread, 0) * 2;
}
#endif

#ifdef CUDA
/* The names of torch's own functions, as gdb and a symbol table show them. */
int local_scalar_dense(void) __asm__("_ZN2at6native24_local_scalar_dense_cudaERKNS_6TensorE");
int copy_kernel(void) __asm__("_ZN2at6nativeL16copy_kernel_cudaERNS_14TensorIteratorEb");
int elementwise(double us) __asm__("_ZN2at6native15gpu_kernel_implERNS_18TensorIteratorBaseE");
int local_scalar_dense(void) { return RUNTIME_CALL(MemcpyAsync)() * 2; }
int copy_kernel(void) { return RUNTIME_CALL(StreamSynchronize)() * 2; }
int elementwise(double us) {
    struct op op = {us < 0 ? LOST_COPY : KERNEL, 0, 0, 0, (int64_t)(us * 1000)};
    return RUNTIME_CALL(LaunchKernel)(&op) * 2;
}

struct backward {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int asked, done;
    double us;
};
static struct backward backward = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};

HIDDEN void evaluate(double us) {
    for (int layer = 0; layer < 4; layer++) {
        elementwise(us);
        ncclAllReduce(0, 1);
    }
    local_scalar_dense(); /* a hook of the user's: clip, or torch.isfinite */
}

HIDDEN void *autograd(void *unused) {
    pthread_mutex_lock(&backward.lock);
    for (;; pthread_cond_broadcast(&backward.changed)) {
        while (backward.asked == backward.done) pthread_cond_wait(&backward.changed, &backward.lock);
        pthread_mutex_unlock(&backward.lock);
        evaluate(backward.us);
        pthread_mutex_lock(&backward.lock);
        backward.done++;
    }
    return unused;
}

void run_backward(double us) {
    static int started;
    if (!started++) start("pt_autograd_0", autograd, 0);
    pthread_mutex_lock(&backward.lock);
    backward.us = us;
    backward.asked++;
    pthread_cond_broadcast(&backward.changed);
    while (backward.asked != backward.done) pthread_cond_wait(&backward.changed, &backward.lock);
    pthread_mutex_unlock(&backward.lock);
}

HIDDEN void *look(void *every_ms) {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        int64_t ns = until.tv_nsec + (int64_t)(intptr_t)every_ms * 1000000;
        until.tv_sec += ns / 1000000000;
        until.tv_nsec = ns % 1000000000;
        pthread_cond_timedwait(&never, &lock, &until);
    }
    return 0;
}

void start_watchdog(void) {
    start("pt_nccl_watchdg", look, (void *)100);
    start("pt_nccl_heartbt", look, (void *)60000);
}
#endif

#ifdef PYTHON
#include <Python.h>
int local_scalar_dense(void) __asm__("_ZN2at6native24_local_scalar_dense_cudaERKNS_6TensorE");
int copy_kernel(void) __asm__("_ZN2at6nativeL16copy_kernel_cudaERNS_14TensorIteratorEb");
int elementwise(double us) __asm__("_ZN2at6native15gpu_kernel_implERNS_18TensorIteratorBaseE");
void run_backward(double us);
void start_watchdog(void);

/* A C function of the extension, which waits without the GIL. */
#define WAITS(name, format, declared, pointers, call, result)                                                          \
    HIDDEN PyObject *name(PyObject *self, PyObject *given) {                                                           \
        declared;                                                                                                      \
        (void)self;                                                                                                    \
        if (!PyArg_ParseTuple(given, format pointers)) return 0;                                                       \
        Py_BEGIN_ALLOW_THREADS call;                                                                                   \
        Py_END_ALLOW_THREADS return result;                                                                            \
    }
#define AND ,
WAITS(py_item, "", , , local_scalar_dense(), PyFloat_FromDouble(0.6931))
WAITS(py_copy, "", , , copy_kernel(), PyFloat_FromDouble(0.6931))
WAITS(py_synchronize, "", , , RUNTIME_CALL(DeviceSynchronize)(), Py_NewRef(Py_None))
WAITS(py_event, "", , , RUNTIME_CALL(EventSynchronize)(), Py_NewRef(Py_None))
WAITS(py_launch, "|d", double us = 200, AND & us, elementwise(us), Py_NewRef(Py_None))
WAITS(py_all_reduce, "|ii", int group = 0; int tag = 1, AND & group AND & tag, ncclAllReduce(group, tag),
      Py_NewRef(Py_None))
WAITS(py_comm_init, "ii", int group; int members, AND & group AND & members, ncclCommInitRank(group, members),
      Py_NewRef(Py_None))
WAITS(py_comm_abort, "", , , ncclCommAbort(), Py_NewRef(Py_None))
WAITS(py_load, "d", double seconds, AND & seconds, DRIVER_CALL(ModuleLoadData)(seconds), Py_NewRef(Py_None))
WAITS(py_jit, "d", double seconds, AND & seconds, nvPTXCompile(seconds), Py_NewRef(Py_None))
WAITS(py_init, "", , , DRIVER_CALL(Init)(); start_watchdog(), Py_NewRef(Py_None))

/* The two below are called by torch itself, with arguments of its own: an engine and a process group have these names. */
HIDDEN PyObject *py_backward(PyObject *self, PyObject *given, PyObject *named) {
    (void)self, (void)given, (void)named;
    Py_BEGIN_ALLOW_THREADS run_backward(atof(setting("STEP_US", "20000")) / 4);
    Py_END_ALLOW_THREADS return Py_NewRef(Py_None);
}

HIDDEN PyObject *py_barrier(PyObject *self, PyObject *given, PyObject *named) {
    (void)given, (void)named;
    Py_BEGIN_ALLOW_THREADS ncclAllReduce(0, 2);
    Py_END_ALLOW_THREADS return PyObject_CallMethod(self, "Tensor", 0); /* its wait() is the Work's */
}

HIDDEN PyObject *py_members(PyObject *self, PyObject *given) {
    int group;
    unsigned long long members;
    (void)self;
    if (!PyArg_ParseTuple(given, "iK", &group, &members)) return 0;
    gpus_machine()->members[group] = members;
    return Py_NewRef(Py_None);
}

HIDDEN PyObject *py_network_down(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    gpus_machine()->network_down = 1;
    return Py_NewRef(Py_None);
}

static PyMethodDef of_tensors[] = {
    {"item", py_item, METH_VARARGS, 0},   {"cpu", py_copy, METH_VARARGS, 0}, {"tolist", py_copy, METH_VARARGS, 0},
    {"nonzero", py_item, METH_VARARGS, 0}, {"wait", py_copy, METH_VARARGS, 0}, {0},
};

HIDDEN PyObject *py_float(PyObject *self) {
    (void)self;
    Py_BEGIN_ALLOW_THREADS local_scalar_dense();
    Py_END_ALLOW_THREADS return PyFloat_FromDouble(0.6931);
}

static PyType_Slot slots[] = {{Py_tp_methods, of_tensors}, {Py_nb_float, py_float}, {0}};
static PyType_Spec tensor = {"torch.Tensor", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, slots};

static PyMethodDef functions[] = {
    {"init", py_init, METH_VARARGS, 0},
    {"launch", py_launch, METH_VARARGS, 0},
    {"all_reduce", py_all_reduce, METH_VARARGS, 0},
    {"synchronize", py_synchronize, METH_VARARGS, 0},
    {"event_synchronize", py_event, METH_VARARGS, 0},
    {"comm_init", py_comm_init, METH_VARARGS, 0},
    {"comm_abort", py_comm_abort, METH_VARARGS, 0},
    {"run_backward", (PyCFunction)(void *)py_backward, METH_VARARGS | METH_KEYWORDS, 0},
    {"barrier", (PyCFunction)(void *)py_barrier, METH_VARARGS | METH_KEYWORDS, 0},
    {"module_load", py_load, METH_VARARGS, 0},
    {"jit", py_jit, METH_VARARGS, 0},
    {"members", py_members, METH_VARARGS, 0},
    {"network_down", py_network_down, METH_NOARGS, 0},
    {0},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "libtorch_python", 0, -1, functions, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit_libtorch_python(void) {
    PyObject *made = PyModule_Create(&module);
    if (made) PyModule_AddObject(made, "Tensor", PyType_FromSpec(&tensor));
    return made;
}
#endif

#ifdef GPUS
static struct machine *machine;

static int may_end(const struct op *op) {
    if (machine->ended[op->group] >= op->number) return 1;
    for (int rank = 0; rank < RANKS; rank++) {
        const struct gpu *gpu = &machine->gpus[rank];
        if (!(machine->members[op->group] >> rank & 1)) continue;
        if (gpu->arrived[op->group] < op->number) return 0;
        if (gpu->arrived[op->group] == op->number && gpu->tag[op->group] != op->tag) return 0;
    }
    if (!machine->network_down) machine->ended[op->group] = op->number;
    return !machine->network_down;
}

static void account(struct gpu *gpu, double percent, double watts) {
    gpu->busy_percent += (percent - gpu->busy_percent) / 500;
    gpu->watts += (watts - gpu->watts) / 500;
}

/* Execute what is due on one GPU: as a rule its oldest operation, or several that are short. */
static void execute(struct gpu *gpu) {
    for (;;) {
        if (!gpu->pid || gpu->done == __atomic_load_n(&gpu->launched, __ATOMIC_ACQUIRE)) {
            account(gpu, 0, 85);
            return;
        }
        const struct op *op = &gpu->queue[gpu->done % QUEUE];
        if (!gpu->since_ns) gpu->since_ns = now_ns();
        if (op->kind == COLLECTIVE) {
            gpu->tag[op->group] = op->tag;
            gpu->arrived[op->group] = op->number;
        }
        int ended = op->kind != LOST_COPY && now_ns() - gpu->since_ns >= op->ns;
        if (!ended || (op->kind == COLLECTIVE && !may_end(op))) {
            account(gpu, op->kind == LOST_COPY ? 0 : 100, op->kind == KERNEL ? 610 : op->kind == COLLECTIVE ? 190 : 85);
            return;
        }
        gpu->since_ns = 0;
        if (op->kind == COLLECTIVE) gpu->ended[op->group] = op->number;
        __atomic_store_n(&gpu->done, gpu->done + 1, __ATOMIC_RELEASE);
    }
}

static void show(int rank, const struct gpu *gpu) {
    printf("%d %d %lu %lu %.0f %.2f", rank, gpu->pid, gpu->launched, gpu->done, gpu->busy_percent, gpu->watts);
    for (int group = 0; group < 2; group++)
        printf(" %lu %lu %lu %d", gpu->next[group], gpu->arrived[group], gpu->ended[group], gpu->tag[group]);
    puts("");
}

/*
 * Run until killed; with "show", print a line for each GPU: rank, pid, operations launched and ended, utilization in
 * percent, watts; and for each of two groups its collectives launched, reached and ended, and the tag of the last.
 */
int main(int count, char **arguments) {
    machine = map_machine();
    (void)arguments;
    for (int rank = 0; count > 1 && rank < RANKS; rank++)
        if (machine->gpus[rank].pid) show(rank, &machine->gpus[rank]);
    while (count == 1) {
        for (int rank = 0; rank < RANKS; rank++) {
            struct gpu *gpu = &machine->gpus[rank];
            if (gpu->pid && kill(gpu->pid, 0) && errno == ESRCH) gpu->pid = 0;
            execute(gpu);
        }
        usleep(1000);
    }
    return 0;
}
#endif
